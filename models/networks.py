# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Networks from features, or free parameters, to the parameters of an NMM; and Pyro's store."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pyro
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import (
    Array,
    NodeSet,
    as_edge_index,
    as_labels,
    as_set,
    as_tensor,
    check_finite,
    check_integers,
    check_positive,
    expect,
    expect_all,
)
from pyro_nmm.fitting import ordinary
from pyro_nmm.labels import in_label_order
from pyro_nmm.model_arguments import check_hood, in_single
from pyro_nmm.ops.edge_products import edge_products

#: Positive links for ``alpha``. ``exp`` makes alpha's direction the softmax of the backbone alone.
#: It ends at about 3 million, beyond which single precision cannot add a count.
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "square": torch.square,
    "exp": lambda u: u.clamp(max=15.0).exp(),
}


class Parameters(NamedTuple):
    r"""Parameters of an NMM: positive :math:`\alpha`, a table ``(..., N, C)`` or a formula; logits
    ``(..., num_edges)`` in the order of the neighbourhoods, see :func:`~pyro_nmm.edge_values`; and
    label changes by edges, see :mod:`pyro_nmm.relabel`.

    Every guide and every fit takes a ``torch.nn.Module`` from neighbourhoods and own inputs to
    parameters, or to the first two of them, such as :class:`NMMNetwork` or your own:

    >>> class Mine(nn.Module):
    ...     def forward(self, hood, x):
    ...         return Parameters(x.exp(), torch.zeros(hood.num_edges))
    >>> alpha, logits, _ = Mine()(Neighborhood.grid(1, 2), torch.zeros(2, 3))
    """

    alpha: Tensor  #: ``(..., N, C)``
    logits: Tensor  #: ``(..., num_edges)``
    relabel: Any = None  #: ``(..., num_edges, C, C)``, or ``None``


def attention_scores(hood: Neighborhood, v: Tensor, scale: Tensor, gamma: Tensor) -> Tensor:
    r"""``(..., num_edges)``: :math:`\text{scale} \cdot v_i^\top v_j / (\|v_i\| \|v_j\|) + \gamma \,
    \delta(i = j)` of vectors ``(..., N, H)``.
    """
    target, batch = hood.target, v.shape[:-2]
    units = F.normalize(v, dim=-1).reshape(-1, *v.shape[-2:])
    cosines = torch.stack([edge_products(unit, target, hood.source) for unit in units])
    return scale * cosines.reshape(*batch, hood.num_edges) + gamma * (target == hood.source).to(v)


class NMMNetwork(nn.Module):
    r"""Graph neural networks as the parameters of an NMM, the paper's equation (7).

    .. math::

        \alpha_i = \sigma(u_i) + \text{floor}, \qquad
        \text{logits}_{ij} = \omega^2 \frac{v_i^\top v_j}{\|v_i\| \|v_j\|}
                             + \gamma \, \delta(i = j)

    with a learned :math:`\omega`, and :math:`u, v` from two backbones, or the first ``C`` and the
    other ``H`` columns of one shared backbone: any modules ``(*inputs) -> (N, width)``. PyG's take
    ``(x, edge_index)``.

    >>> from torch_geometric.nn import GCN
    >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> hood = Neighborhood(edge_index, num_nodes=3)
    >>> network = NMMNetwork(GCN(5, 16, 2, 4), GCN(5, 32, 1), num_classes=4)
    >>> alpha, logits = network(hood, torch.randn(3, 5), edge_index)
    >>> alpha.shape, logits.shape
    (torch.Size([3, 4]), torch.Size([7]))

    :param nn.Module labels: backbone for :math:`u`, width ``C``; or shared, ``C + H``.
    :param nn.Module attention: backbone for :math:`v`, any width ``H``; ``None`` if shared.
    :param str link: :math:`\sigma`, one of ``"softplus"``, ``"square"``, ``"exp"``.
    :param float floor: positive. One keeps each Dirichlet unimodal.
    :param float gamma: :math:`\gamma`; a large one switches all other edges off. It is a constant
        unless it is replaced, ``network.gamma = torch.nn.Parameter(network.gamma)``.
    :raises ValueError: for an unknown link, a ``floor`` that is not positive, wrong shapes of
        inputs and outputs, and sources that are no nodes.

    Cost: the backbones, and :math:`O(E H)`.
    """

    def __init__(
        self, labels: nn.Module, attention: nn.Module | None = None, *, num_classes: int,
        link: Literal["softplus", "square", "exp"] = "exp", floor: float = 1.0, gamma: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if link not in LINKS:
            raise ValueError(f"link must be one of {tuple(LINKS)}, got {link!r}")
        check_integers(2, num_classes=num_classes)
        check_positive(floor=floor)
        check_finite(gamma=gamma)
        self.labels, self.attention, self.num_classes = labels, attention, num_classes
        self.link, self.floor = link, floor
        #: Weight decay on it switches the attention off.
        self.omega = nn.Parameter(torch.tensor(1.0))
        self.gamma: Tensor
        self.register_buffer("gamma", torch.tensor(float(gamma)))

    def extra_repr(self) -> str:
        return f"link={self.link!r}, floor={self.floor}, gamma={self.gamma.item():.3g}"

    def forward(self, hood: Neighborhood, *inputs: Any) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(N, C)``, ``logits`` ``(num_edges,)``; NaN if the inputs make them so."""
        check_hood(hood)
        if hood.bipartite:
            raise ValueError("hood has sources that are no nodes: use FreeNMM, or your own network")
        _check_inputs(hood, self.labels, *inputs)
        u = self.labels(*inputs)
        if self.attention is None:
            u, v = u[..., : self.num_classes], u[..., self.num_classes :]
        else:
            v = self.attention(*inputs)
        if u.shape != (hood.num_nodes, self.num_classes) or v.shape[-1] == 0:
            width = "num_classes" if self.attention is not None else "num_classes + H"
            must = f"({hood.num_nodes}, {width}), num_classes = {self.num_classes}"
            got = f"{tuple(u.shape)} for alpha and {tuple(v.shape)} for attention"
            raise ValueError(f"labels must return shape {must}, got {got}")
        # An alpha of half a type's digits cannot count, so a narrow network's output is widened.
        u, v = (in_single(value) for value in (u, v))
        alpha = LINKS[self.link](u) + self.floor
        return alpha, attention_scores(hood, v, self.omega.square(), self.gamma)


def _check_inputs(hood: Neighborhood, network: nn.Module, *inputs: Any) -> None:
    """Refuse wrong ``(x, edge_index)`` for PyG's networks; wrong ids only where Pyro validates."""
    from torch_geometric.nn.models.basic_gnn import BasicGNN
    from torch_geometric.utils import is_sparse

    if getattr(type(network), "forward", None) is not BasicGNN.forward or len(inputs) < 2:
        return
    x, edge_index = inputs[:2]
    # Without a width, or with -1, a layer takes the width of its first input.
    width = network.in_channels if isinstance(network.in_channels, int) else 0
    expect("x", x, (hood.num_nodes, width if width > 0 else "F"), kind="float")
    if not is_sparse(edge_index):
        expect("edge_index", edge_index, (2, "num_edges"), kind="integers")
        if pyro.settings.get("validate_distributions_pyro"):
            as_edge_index(edge_index, hood.num_nodes)


def near_marginals(marginals: Tensor, kappa: float, epsilon: float) -> Tensor:
    """Concentrations that sum to ``kappa``, near marginals ``(N, C)``, none of them zero."""
    return kappa * ((1 - epsilon) * marginals + epsilon / marginals.shape[-1])


class FreeNMM(nn.Module):
    r"""Free parameters of one graph, the paper's NMM-:math:`\alpha, L`, near marginals :math:`m`,

    .. math::

        \alpha_j = \kappa \, \bigl((1 - \epsilon) m_j + \epsilon / C\bigr), \qquad
        \text{logits}_{ij} = \gamma \, \delta(i = j)

    >>> hood = Neighborhood.grid(3, 3)
    >>> network = FreeNMM(hood, num_classes=2)
    >>> alpha, logits = network(hood)
    >>> alpha.shape, logits.shape
    (torch.Size([9, 2]), torch.Size([49]))

    :param Tensor marginals: ``(N, C)``, or ``(M, C)`` of sources, :math:`m`; default uniform.
    :param float gamma: as it grows, nodes become independent.
    :param float epsilon: without it, excluded labels could not return.
    :raises ValueError: for ``marginals`` that are no probabilities, options out of range, and
        another graph.
    """

    def __init__(
        self, hood: Neighborhood, num_classes: int, marginals: Tensor | None = None, *,
        kappa: float = 1.0, gamma: float = 4.0, epsilon: float = 0.001,
    ) -> None:  # fmt: skip
        super().__init__()
        check_hood(hood)
        check_integers(2, num_classes=num_classes)
        check_positive(kappa=kappa)
        check_finite(gamma=gamma, epsilon=epsilon)
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must lie in [0, 1], got {epsilon}")
        shape = hood.num_sources, num_classes
        if marginals is None:
            marginals = torch.full(shape, 1 / num_classes, device=hood.device)
        marginals = as_tensor("marginals", in_label_order(marginals), hood.device)
        expect("marginals", marginals, shape, note="one row of probabilities per source")
        good = marginals.isfinite() & (marginals >= 0)
        expect_all("marginals", marginals, good, "be probabilities")
        start = near_marginals(marginals.detach(), kappa, epsilon)
        self.log_alpha = nn.Parameter(start.log().contiguous())  # as Pyro's store keeps it
        loops = (hood.source == hood.target) & (not hood.bipartite)
        self.logits = nn.Parameter(gamma * loops.to(start))

    def forward(self, hood: Neighborhood, *inputs: Any) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(N, C)`` and ``logits`` ``(num_edges,)``."""
        sources, edges = len(self.log_alpha), len(self.logits)
        # Sources that are no nodes have errors of their own, where the output is used.
        if (hood.num_sources, hood.num_edges) != (sources, edges) and not hood.bipartite:
            must = f"the {sources} sources and {edges} edges of these parameters"
            raise ValueError(f"hood must have {must}, got {hood.num_sources} and {hood.num_edges}")
        return self.log_alpha.exp(), self.logits


def _check_nodes(hood: Neighborhood) -> None:
    check_hood(hood)
    if hood.bipartite:
        raise ValueError("hood has sources that are no nodes: give relabel for every edge instead")


def compatibility(hood: Neighborhood, y: Array, observed: NodeSet, num_classes: int) -> Tensor:
    r"""Frequency of label :math:`k` among neighbours of nodes with label :math:`u`, from the edges
    between observed nodes: the compatibility matrix of Zhu et al. (2021, "Graph Neural Networks
    with Heterophily", AAAI), as :class:`StackedNMM` takes it.

    .. math::

        H_{uk} = \frac{n_{uk} + p_k}{n_u + 1} ,

    where :math:`n_{uk}` counts edges from label :math:`u` to label :math:`k`, and :math:`p_k` is
    the share of label :math:`k` among the observed nodes, with one count more for every label.

    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])  # labels 0 - 1 - 0
    >>> hood, y = Neighborhood(edges, num_nodes=3), torch.tensor([0, 1, 0])
    >>> compatibility(hood, y, torch.ones(3, dtype=torch.bool), num_classes=2)
    tensor([[0.2000, 0.8000],
            [0.8667, 0.1333]])

    :param Tensor y: ``(N,)`` labels, read where ``observed``, a mask ``(N,)`` or node ids.
    :return: ``(C, C)``, rows sum to one. Cost: :math:`O(E)`.
    :raises ValueError: for sources that are no nodes, wrong labels where observed, and an empty
        set.
    """
    _check_nodes(hood)
    check_integers(2, num_classes=num_classes)
    observed = as_set(observed, hood.num_nodes, hood.device, "observed")
    y = as_labels("y", y, observed, num_classes, "observed")
    both = observed[hood.source] & observed[hood.target] & (hood.source != hood.target)
    source, target = hood.source[both], hood.target[both]
    counts = torch.bincount(y[source] * num_classes + y[target], minlength=num_classes**2)
    counts = counts.view(num_classes, num_classes).to(torch.get_default_dtype())
    share = torch.bincount(y[observed], minlength=num_classes) + 1.0
    return (counts + share / share.sum()) / (counts.sum(1, keepdim=True) + 1.0)


class Compatibility(nn.Module):
    r"""A network whose edges relabel, for heterophilous graphs: a label that a node borrows from
    another one passes through one learned stochastic matrix ``(C, C)``.

    .. math::

        T_{ij} = \mathrm{softmax}(W) \; (i \ne j), \qquad T_{ii} = I

    >>> hood = Neighborhood.grid(1, 3)
    >>> network = Compatibility(FreeNMM(hood, num_classes=2), num_classes=2)
    >>> alpha, logits, relabel = network(hood)
    >>> relabel.shape
    torch.Size([7, 2, 2])

    :param nn.Module network: a network of ``alpha`` and ``logits`` alone. Cost: :math:`O(E C^2)`.
    :raises ValueError: for fewer than two labels, and sources that are no nodes.
    """

    def __init__(self, network: nn.Module, num_classes: int) -> None:
        super().__init__()
        check_integers(2, num_classes=num_classes)
        self.network = network
        #: ``(C, C)``: :math:`W`, from a neighbour's label. Fits from the identity would stay there.
        self.scores = nn.Parameter(torch.zeros(num_classes, num_classes))

    def forward(self, hood: Neighborhood, *inputs: Any) -> Parameters:
        """``alpha`` and ``logits`` of the network, and ``relabel``, ``(num_edges, C, C)``."""
        _check_nodes(hood)
        alpha, logits = self.network(hood, *inputs)
        matrix = self.scores.softmax(-1)
        keep = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        others = (hood.source != hood.target).long()
        return Parameters(alpha, logits, torch.stack([keep, matrix]).index_select(0, others))


def register(name: str, module: nn.Module) -> None:
    """``pyro.module``, and an error if the store has other parameters: they would learn instead."""
    if not torch.is_inference_mode_enabled():
        ordinary(module)  # it may have been made there
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was not registered in the param store")
        pyro.module(name, module)
    store = pyro.get_param_store()
    for key, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if store[f"{name}$$${key}"].data_ptr() != parameter.data_ptr():
            raise ValueError(
                f"Pyro's store already holds another network named {name!r}, or this one's state "
                f"from param_store.load: to go on from the state call pyro.module({name!r}, "
                f"network, update_module_params=True) first, and to train a second network give "
                f"each program its own name="
            )
