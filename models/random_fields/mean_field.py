# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The mean field of a Markov random field, and networks that correct it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import Array, as_expected, check_integers, expect_all
from pyro_nmm.model_arguments import check_hood
from pyro_nmm.models.networks import near_marginals
from pyro_nmm.models.random_fields.marginal_field import MarginalField, RandomField
from pyro_nmm.models.random_fields.pairwise import PairwiseMRF, check_field


class MeanField(NamedTuple):
    """Marginals ``(N, C)``, and the loss of each start ``(S,)``, sorted."""

    marginals: Tensor
    losses: Tensor


@torch.no_grad()
def mean_field(
    field: RandomField,
    starts: Array | None = None,
    *,
    num_random: int = 4,
    num_rises: int = 100,
    num_sweeps: int = 2000,
    tolerance: float = 1e-8,
) -> MeanField:
    r"""Independent approximation of a Markov random field, by coordinate ascent from several
    starts.

    .. math::

        q(y) = \prod_i q_i(y_i), \qquad
        q_i \leftarrow \mathrm{softmax}\Big( u_i + \sum_j w_{ij} \phi \, q_j \Big)

    The loss is :math:`\mathrm{KL}(q \,\|\, p) - \log Z`, with many local minima if interactions are
    strong. Starts are the softmax of the unary terms, the same with interactions that rise slowly
    from zero, every label everywhere, random fields, and ``starts``. Of a
    :class:`~pyro_nmm.models.MarginalField` it is the whole field's, at the nodes that stay; their
    own loss is at most the whole field's.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(2, 2), coupling=0.1, field=torch.tensor([1.0, 0.0, 0.0, -1.0]))
    >>> mean_field(field).marginals[:, 1]
    tensor([0.8808, 0.5000, 0.5000, 0.1192])

    :param field: a ``PairwiseMRF`` without batch dimensions, or a ``MarginalField``.
    :param Tensor starts: ``(S, N, C)`` further starts, probabilities, of all nodes.
    :param int num_random: random starts.
    :param int num_rises: sweeps over which interactions rise; 0 leaves this start out.
    :param float tolerance: change of a probability that ends the at most ``num_sweeps`` sweeps.
    :return: the best marginals, and losses in nats. Cost: :math:`O(S K (P C + N C^2))` a
        sweep, with ``K`` colours of the graph.
    :raises ValueError: for a field with a batch, bad ``starts``, and options out of range.
    """
    nodes: Any = slice(None)
    if isinstance(field, MarginalField):
        field, nodes = field.field, field.nodes
    check_field(field)
    check_integers(1, num_sweeps=num_sweeps)
    check_integers(0, num_random=num_random, num_rises=num_rises)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    shape = field.num_nodes, field.num_classes
    if starts is not None:
        starts = as_expected("starts", starts, ("S", *shape), kind="float", like=field.unary)
        expect_all("starts", starts, starts >= 0, "be probabilities")
    unary = field.unary
    labels = torch.eye(shape[1], dtype=unary.dtype, device=unary.device)[:, None].expand(-1, *shape)
    noise = torch.randn(num_random, *shape, dtype=unary.dtype, device=unary.device)
    colors = field.colors()
    annealed = unary.softmax(-1)[None]
    parts = [annealed, labels, (4 * noise).softmax(-1)]
    if num_rises:
        for share in torch.linspace(0, 1, num_rises + 1):
            annealed = _sweep(field.scaled(share.item()), colors, annealed)
        parts.append(annealed)
    q = torch.cat(parts if starts is None else [*parts, starts.to(annealed)])
    for _ in range(num_sweeps):
        before, q = q, _sweep(field, colors, q)
        if (q - before).abs().max() < tolerance:
            break
    # Each edge meets both its ends in the local logits, so it counts half there.
    energy = (q * (field.local_logits(q) + unary)).sum((-2, -1)) / 2
    losses = -torch.special.entr(q).sum((-2, -1)) - energy
    return MeanField(q[losses.argmin(), nodes], losses.sort().values)


def _sweep(field: PairwiseMRF, colors: list[Tensor], q: Tensor) -> Tensor:
    for nodes in colors:
        q = q.index_copy(1, nodes, field.local_logits(q).index_select(1, nodes).softmax(-1))
    return q


def independent(hood: Neighborhood, marginals: Tensor) -> NeighborMixture | None:
    """The mean field as an NMM: every node is its own source. ``None`` if a node cannot be."""
    loops = hood.source == hood.target
    if hood.bipartite or int(loops.sum()) < hood.num_nodes:
        return None
    # A hundred nats between a node and its neighbours leave them nothing in single precision.
    return NeighborMixture(hood, near_marginals(marginals, 1.0, 1e-6), 100.0 * loops.to(marginals))


class MeanFieldCorrection(nn.Module):
    r"""A network that corrects the mean field of the Markov random field that it reads. If it
    starts with equal :math:`a` for all labels and with equal scores :math:`s`, it starts at the
    mean field, from where :func:`~pyro_nmm.guides.fit_mixture` improves.

    .. math::

        \alpha_i = \big((1 - \epsilon) m_i + \epsilon / C\big) \, a_i, \qquad
        \text{logits}_{ij} = s_{ij} + \gamma \, \delta(i = j), \qquad
        \epsilon = 10^{-5}, \quad \gamma = 6

    >>> from pyro_nmm.models import ConvolutionalNMM, grid_edges, ising
    >>> field = ising(grid_edges(5, 6), coupling=0.4, field=torch.full((30,), 0.1))
    >>> network = MeanFieldCorrection(ConvolutionalNMM(radius=1))
    >>> alpha, logits = network(Neighborhood.grid(5, 6), field)
    >>> bool((alpha[:, 1] > alpha[:, 0]).all())
    True

    :param nn.Module network: called with the neighbourhoods, the field and its mean field's
        marginals :math:`m`, ``(N, C)``; returns :math:`a`, ``(N, C)``, and :math:`s`.
    :param options: keywords of :func:`~pyro_nmm.guides.mean_field`, which runs in every call
        without ``marginals``: few sweeps and starts save time if a network serves many fields.
    :raises ValueError: in a call, as the network and :func:`~pyro_nmm.guides.mean_field`.
    :raises TypeError: in a call, for ``options`` that ``mean_field`` lacks.
    """

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__()
        self.network, self.gamma, self.options = network, 6.0, options

    def forward(
        self, hood: Neighborhood, field: RandomField, marginals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(N, C)`` and ``logits`` ``(num_edges,)``.

        :param Tensor marginals: ``(N, C)``, :math:`m`. Default: computed, in every call.
        """
        check_hood(hood)
        if marginals is None:
            marginals = mean_field(field, **self.options).marginals
        factors, scores = self.network(hood, field, marginals)
        loops = hood.source == hood.target
        start = near_marginals(marginals, 1.0, 1e-5)
        return start * factors, scores + self.gamma * loops.to(scores)
