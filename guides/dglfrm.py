# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Guides of the latent feature model of links, with and without an NMM, and their fit."""

from typing import Any, Literal, Unpack

import pyro
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import MembershipMixture, Neighborhood
from pyro_nmm.arguments import Array, as_tensor, check_finite, check_integers, check_range, expect
from pyro_nmm.distributions.memberships import relaxed_logits
from pyro_nmm.fitting import StepOptions, Steps, with_gradients, with_options
from pyro_nmm.guides.shared_forward import evaluation
from pyro_nmm.model_arguments import check_hood
from pyro_nmm.models.dglfrm import DGLFRM, StickShares, inner, observed_edges, stick_logits
from pyro_nmm.models.networks import attention_scores, register
from pyro_nmm.sparse import sparse_csr

#: Random nodes and features of ``"local"``, whose pairs stand for all.
NUM_COLUMNS = 128


class DGLFRMGuide(nn.Module):
    r"""A guide for :class:`~pyro_nmm.models.DGLFRM`: the original one, or with an NMM over the
    memberships, section 5.3 of the paper. With :math:`(\ell, \mu, \log \varsigma, u)` from a GCN,

    .. math::

        v_{ik} &\sim \mathrm{Kumaraswamy}(\hat a_k, \hat b_k), \qquad
        r_{ik} \sim \mathrm{Normal}(\mu_{ik}, \varsigma_{ik}), \\
        \lambda_{ik} &= \ell_{ik} + \log \frac{\pi_{ik}}{1 - \pi_{ik}}, \qquad
        s_{ik} \sim \mathrm{Logistic}(\lambda_{c_i k}, 1)

    with :math:`c_i = i` in the original. With ``hood``, :math:`c_i` is a neighbour, chosen by
    attention :math:`L_{ij} \propto \exp(\omega^2 \cos(u_i, u_j) + \gamma \delta(i = j))`, and
    summed out.

    >>> from pyro.infer import TraceMeanField_ELBO
    >>> from torch_geometric.datasets import KarateClub
    >>> data = KarateClub()[0]
    >>> target = DGLFRM(num_nodes=34, num_communities=8, concentration=4.0)
    >>> pair = DGLFRMGuide(target, data.num_features, Neighborhood(data.edge_index, 34))
    >>> loss = TraceMeanField_ELBO().loss(pair.model, pair.guide, data.edge_index, data.x)
    >>> pair.link_logits(torch.tensor([[0, 0], [1, 9]]), data.edge_index, data.x).shape
    torch.Size([2])

    Sites ``v``, ``s`` and ``r`` have event shape ``(N, K)``. Use ``TraceMeanField_ELBO``, which has
    the divergences of ``v`` and ``r`` in closed form, or ``Trace_ELBO``. Scale or mask all sites
    equally.

    :param DGLFRM target: the model.
    :param int num_features: the number of columns of ``x``.
    :param Neighborhood hood: of the training edges; ``None`` for the original guide.
    :param tuple hidden: widths of the network's first layer, and of :math:`u`.
    :param float dropout: of the features and of the first layer's output.
    :param float gamma: initial value of the learned :math:`\gamma`.
    :param str estimator: of the derivative towards the attention. ``"local"`` is unbiased: it
        compares two draws of each node's memberships, in a random half of the steps, one particle
        at a time. ``"linear"`` is biased, see :class:`~pyro_nmm.MembershipMixture`.
    :raises ValueError: for an unknown ``estimator``, and a graph of another size; in methods for
        edges in one direction only or among ``held_out``, and ``x`` of a wrong shape.
    :raises NotImplementedError: for ``"local"`` with vectorized particles.
    """

    def __init__(
        self,
        target: DGLFRM,
        num_features: int,
        hood: Neighborhood | None = None,
        *,
        hidden: tuple[int, int] = (32, 16),
        dropout: float = 0.5,
        gamma: float = 0.0,
        estimator: Literal["local", "linear"] = "local",
    ) -> None:
        super().__init__()
        if estimator not in ("local", "linear"):
            raise ValueError(f'estimator must be "local" or "linear", got {estimator!r}')
        check_integers(1, num_features=num_features)
        check_finite(gamma=gamma)
        if hood is not None:
            check_hood(hood)
            if hood.num_nodes != (size := target.num_nodes):
                raise ValueError(f"hood must have the {size} nodes of target, got {hood.num_nodes}")
        self.target, self.hood, self.name = target, hood, f"{target.name}_guide"
        self.estimator = estimator
        widths = [target.num_communities] * 3 + ([] if hood is None else [hidden[1]])
        self.encoder = _Encoder(num_features, hidden[0], widths, dropout, gamma)

    def guide(self, edge_index: Tensor, x: Tensor, held_out: Tensor | None = None) -> Tensor:
        r"""Sites ``v``, ``s`` and ``r``.

        :param Tensor edge_index: ``(2, num_edges)``, both directions of every training edge.
        :param Tensor x: ``(N, F)`` features, dense or ``torch.sparse_csr``; else the identity.
        :param Tensor held_out: ``(2, P)`` pairs without a likelihood, none in ``edge_index``.
        :return: ``(..., N, K)``, :math:`b \odot r`.
        """
        data = edge_index, self._modelled(x), held_out
        self._check_held_out(edge_index, held_out)
        register(self.name, self.encoder)
        a, b = self.encoder.sticks(self.target.concentration)
        v = pyro.sample("v", StickShares(a, b).expand(self.target.shape).to_event(2))
        mean, log_scale, odds, *vectors = self.encoder(edge_index, x)
        odds = odds + stick_logits(v)
        family: Any = relaxed_logits(odds, 1.0).to_event(2)
        if self.hood is not None:
            own: Any = "linear" if self.estimator == "linear" else "detached"
            scores = self.hood, *vectors, self.encoder.omega.square(), self.encoder.gamma
            family = MembershipMixture(self.hood, odds, attention_scores(*scores), estimator=own)
        s = pyro.sample("s", family)
        r = pyro.sample("r", Normal(mean, log_scale.exp()).to_event(2))
        if self.hood is not None and self.estimator == "local" and torch.is_grad_enabled():
            pyro.factor("credit", -self._credit(family, (v, s, r), data), has_rsample=True)
        return s.sigmoid() * r

    def model(self, edge_index: Tensor, x: Tensor, held_out: Tensor | None = None) -> Tensor:
        """The target."""
        return self.target.model(edge_index, self._modelled(x), held_out)

    def link_logits(self, pairs: Any, edge_index: Any, x: Any, num_samples: int = 15) -> Tensor:
        """``(P,)``: log-odds of edges between pairs ``(2, P)``, means over rounded :math:`b`."""
        check_integers(1, num_samples=num_samples)
        device = self.encoder.log_sticks.device
        pairs, x = as_tensor("pairs", pairs, device), as_tensor("x", x, device)
        edge_index = as_tensor("edge_index", edge_index, device)
        pairs = expect("pairs", pairs, (2, "P"), kind="integers").long()
        check_range("pairs", pairs, self.target.num_nodes)
        total = self.encoder.log_sticks.new_zeros(pairs.shape[1])
        with evaluation(self):
            for _ in range(num_samples):
                nodes: dict = poutine.trace(self.guide).get_trace(edge_index, x).nodes
                members = (nodes["s"]["value"] > 0) * nodes["r"]["value"]
                total = total + inner(self.target.decoder(members), pairs)
        return total / num_samples

    def _check_held_out(self, edge_index: Tensor, held_out: Tensor | None) -> None:
        size = self.target.num_nodes
        edges, others = (observed_edges(edge_index, size, hidden) for hidden in (None, held_out))
        if edges.shape != others.shape:
            pairs = "edge_index must not hold pairs of held_out"
            raise ValueError(f"{pairs}: the network would see them")

    def _modelled(self, x: Tensor) -> Tensor | None:
        expect("x", x, (self.target.num_nodes, self.encoder.first.in_channels), kind="float")
        return None if self.target.features is None else x

    def _credit(self, family: MembershipMixture, draws: tuple, data: tuple) -> Tensor:
        """Zero, with a derivative: gains of nodes times changes of scores between two draws."""
        v, s, r = draws
        if s.dim() > 2:
            must = "takes particles one by one: vectorize_particles=False"
            raise NotImplementedError(f"estimator='local' {must}")
        if torch.rand(()) < 0.5:
            return s.new_zeros(())
        hood = family.hood
        with torch.no_grad():
            others = family.sample()
            gain = self.target.swaps((v, s, r, others), data, NUM_COLUMNS)
            before, after = (family.choices(t).logits for t in (s, others))
            gain = gain + hood.logsumexp(before) - hood.logsumexp(after)
            # Half, as both draws stand for either one, and twice, as every other step has none.
            change = hood.softmax(after) - hood.softmax(before)
            credit = gain.index_select(0, hood.row) * change
        return (credit * (family.logits - family.logits.detach())).sum()


class _Encoder(nn.Module):
    """Two graph convolutions, with a head for each output, and the sticks."""

    def __init__(
        self, num_features: int, hidden: int, widths: list[int], dropout: float, gamma: float
    ) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.dropout = GCNConv(num_features, hidden, bias=False), dropout
        self.heads = nn.ModuleList(GCNConv(hidden, width, bias=False) for width in widths)
        self.log_sticks = nn.Parameter(torch.zeros(2, widths[0]))
        if len(widths) > 3:
            self.omega = nn.Parameter(torch.ones(()))
            self.gamma = nn.Parameter(torch.tensor(float(gamma)))

    def sticks(self, concentration: float) -> Tensor:
        """``(2, K)``: the parameters of ``v``; they start at the prior's."""
        prior = self.log_sticks.new_tensor([[concentration], [1.0]])
        return F.softplus(self.log_sticks + prior + (-(-prior).expm1()).log())

    def forward(self, edge_index: Tensor, x: Tensor) -> list[Tensor]:
        """The output of every head, in the order of ``widths``."""
        x, edge_index = self._thinned(x.to(self.log_sticks.dtype)), edge_index.long()
        hidden = F.leaky_relu(self.first(x, edge_index), 0.2)
        thinned = (F.dropout(hidden, self.dropout, self.training) for _ in self.heads)
        return [head(h, edge_index) for head, h in zip(self.heads, thinned, strict=True)]

    def _thinned(self, x: Tensor) -> Tensor:
        """Features with dropout; zeros of sparse ones stay zeros."""
        if x.layout == torch.strided:
            return F.dropout(x, self.dropout, self.training)
        x = x.to_sparse_csr() if x.layout == torch.sparse_coo else x
        values = F.dropout(x.values(), self.dropout, self.training)
        return sparse_csr(x.crow_indices(), x.col_indices(), values, (x.shape[0], x.shape[1]))


@with_options
@with_gradients
def fit_links(
    pair: DGLFRMGuide,
    edge_index: Array,
    x: Array,
    held_out: Array | None = None,
    *,
    options: Steps = Steps(num_steps=500, lr=0.01),
    **fields: Unpack[StepOptions],
) -> list[float]:
    r"""Fit a latent feature model and its guide to training edges, as Mehta, Carin and Rai (2019).

    .. math::

        \min_\theta \; -\frac{1}{N^2} E_q \left[ \log \frac{p(v, b, r, A, X)}{q(v, b, r)} \right]

    >>> from torch_geometric.datasets import KarateClub
    >>> from torch_geometric.transforms import RandomLinkSplit
    >>> from pyro_nmm.models import DGLFRM
    >>> data = KarateClub()[0]
    >>> train, val, test = RandomLinkSplit(is_undirected=True)(data)
    >>> held_out = torch.cat([val.edge_label_index, test.edge_label_index], 1)
    >>> pair = DGLFRMGuide(DGLFRM(34, 8, concentration=4.0), data.num_features)
    >>> losses = fit_links(pair, train.edge_index, data.x, held_out, num_steps=20)

    :param Tensor edge_index: ``(2, num_edges)``, both directions of every training edge.
    :param Tensor x: ``(N, F)``, see :meth:`DGLFRMGuide.guide`.
    :param Tensor held_out: ``(2, P)`` pairs, with an edge or without, that no step reads.
    :param options: keywords of :class:`~pyro_nmm.fitting.Steps`.
    :return: every step's loss in nats a pair of nodes, of one draw, at :math:`O(N^2)` a step.
    :raises ValueError: as :class:`DGLFRMGuide`; errors of :meth:`~pyro_nmm.fitting.Steps.train`.
    """
    sticks = pair.encoder.log_sticks
    x = expect("x", as_tensor("x", x), (pair.target.num_nodes, "F"), note="one row per node")
    x = x.to(sticks.dtype)  # once, and not in every step
    edge_index = as_tensor("edge_index", edge_index, sticks.device)
    if held_out is not None:
        held_out = as_tensor("held_out", held_out, sticks.device)
    # Adam's own constant is meant for losses of order one.
    model, guide = (poutine.scale(f, 1 / len(x) ** 2) for f in (pair.model, pair.guide))
    optimizer, elbo = torch.optim.Adam(pair.parameters(), options.lr), TraceMeanField_ELBO()

    def backward(step: int) -> float:
        return elbo.loss_and_grads(model, guide, edge_index, x, held_out)

    with pyro.get_param_store().scope():
        data: dict[str, Any] = {"x": x, "edge_index": edge_index, "held_out": held_out}
        return options.train(pair, optimizer, backward, **data)
