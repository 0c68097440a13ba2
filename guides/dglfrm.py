# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools

import pyro
import torch
from pyro import poutine
from pyro.distributions import Kumaraswamy, Normal
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from pyro_nmm import MembershipMixture, Neighborhood
from pyro_nmm.distributions.membership_mixture import RelaxedLogits
from pyro_nmm.guides.handover import evaluation
from pyro_nmm.guides.mixture import MixtureGuide
from pyro_nmm.models.backbones import RandomInput
from pyro_nmm.models.dglfrm import DGLFRM
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.sticks import stick_logits


class DGLFRMGuide(nn.Module):
    r"""
    A guide for :class:`~pyro_nmm.models.DGLFRM`: the original one, or with an NMM over the
    memberships, section 5.3 of the paper. With :math:`(\ell, \mu, \log \varsigma, u)` from a
    graph convolutional network,

    .. math::

        v_{ik} &\sim \mathrm{Kumaraswamy}(\hat a_k, \hat b_k), \qquad
        r_{ik} \sim \mathrm{Normal}(\mu_{ik}, \varsigma_{ik}), \\
        \lambda_{ik} &= \ell_{ik} + \log \frac{\pi_{ik}}{1 - \pi_{ik}}, \qquad
        s_{ik} \sim \mathrm{Logistic}(\lambda_{c_i k} / \tau, 1 / \tau)

    where in the original :math:`c_i = i`; given ``hood``, :math:`c_i` is a neighbour, chosen by
    attention :math:`L_{ij} \propto \exp(\omega^2 \cos(u_i, u_j) + \gamma \delta(i = j))`, and
    summed out unless ``marginal=False``. Then the guide has a site ``c``, as the model gets one:
    use :meth:`model`, which is the target itself otherwise.

    >>> from pyro.infer import SVI, TraceMeanField_ELBO
    >>> from pyro.optim import Adam
    >>> from torch_geometric.datasets import KarateClub
    >>> data = KarateClub()[0]
    >>> target = DGLFRM(num_nodes=34, num_communities=8, concentration=4.0)
    >>> pair = DGLFRMGuide(target, data.num_features, Neighborhood(data.edge_index, 34))
    >>> svi = SVI(pair.model, pair.guide, Adam({"lr": 0.01}), TraceMeanField_ELBO())
    >>> losses = [svi.step(data.edge_index, data.x) for _ in range(5)]
    >>> pair.link_logits(torch.tensor([[0, 0], [1, 9]]), data.edge_index, data.x).shape
    torch.Size([2])

    Sites ``v``, ``s`` and ``r`` have event shape ``(N, K)``, ``c`` has ``(N,)``. Any ELBO of Pyro's
    will do; ``TraceMeanField_ELBO`` takes the divergences of ``v`` and ``r`` in
    closed form.

    :param DGLFRM target: the model.
    :param int num_features: of the network's input, columns of ``x``.
    :param Neighborhood hood: of the training edges; ``None`` for the original guide.
    :param int hidden: width of the network's first layer.
    :param int width: of the attention's vectors :math:`u`.
    :param float dropout: of the network.
    :param float temperature: :math:`\tau`.
    :param float gamma: where :math:`\gamma` starts; it is learned, as :math:`\omega` is.
    :param bool marginal: Whether choices are summed out.
    :param str estimator: of the derivative towards the attention, see
        :class:`~pyro_nmm.MembershipMixture`; or ``"local"``, which is unbiased too: every node's
        memberships are drawn twice, and the two compared while all other nodes stay.
    :param int num_columns: of the other nodes that ``"local"`` looks at, drawn at random.
    """

    def __init__(
        self,
        target: DGLFRM,
        num_features: int,
        hood: Neighborhood | None = None,
        *,
        hidden: int = 32,
        width: int = 16,
        dropout: float = 0.5,
        temperature: float = 1.0,
        gamma: float = 0.0,
        marginal: bool = True,
        estimator: str = "local",
        num_columns: int | None = 512,
    ) -> None:
        super().__init__()
        if hood is not None and hood.num_nodes != target.num_nodes:
            raise ValueError(
                f"hood must have the {target.num_nodes} nodes of target, got {hood.num_nodes}"
            )
        self.target, self.hood, self.temperature = target, hood, temperature
        self.num_columns = num_columns
        widths = [target.num_communities] * 3 + ([] if hood is None else [width])
        self.encoder = _Encoder(num_features, hidden, widths, dropout, gamma)
        if hood is not None:
            family = functools.partial(
                MembershipMixture, temperature=temperature,
                estimator="detached" if estimator == "local" else estimator,
            )  # fmt: skip
            self.memberships = MixtureGuide(
                hood, self.encoder, self._rest, site="s", family=family, marginal=marginal,
                name="encoder", credit=self._credit if estimator == "local" else None,
            )  # fmt: skip

    def guide(self, edge_index: Tensor, x: Tensor, held_out: Tensor | None = None) -> Tensor:
        """
        Sites ``v``, ``c`` unless it is summed out, ``s`` and ``r``.

        :param Tensor edge_index: ``(2, num_edges)``, both directions of every training edge.
        :param Tensor x: ``(N, F)`` features, dense or ``torch.sparse_csr``; without any, the
            identity.
        :param Tensor held_out: ``(2, P)`` pairs whose edges are not looked at.
        :return: ``(..., N, K)``, :math:`b \\odot r`.
        """
        a, b = self.encoder.sticks(self.target.concentration)
        v = pyro.sample("v", Kumaraswamy(a, b).expand(self.target.shape).to_event(2))
        if self.hood is None:
            pyro.module("encoder", self.encoder)
            odds, _ = self.encoder(None, v, edge_index, x)
            temperature = odds.new_tensor(self.temperature)
            s = pyro.sample("s", RelaxedLogits(temperature, logits=odds).to_event(2))
        else:
            s = self.memberships.guide(v, edge_index, x, held_out)
        r = pyro.sample("r", Normal(*self.encoder.strengths).to_event(2))
        return s.sigmoid() * r

    def model(self, edge_index: Tensor, x: Tensor, held_out: Tensor | None = None) -> Tensor:
        """The target, with the site ``c`` that the guide has."""
        pyro.module("dglfrm", self.target)
        v = self.target.sticks()
        rest = self._rest if self.hood is None else self.memberships.model
        return rest(v, edge_index, x, held_out)

    def link_logits(
        self, pairs: Tensor, edge_index: Tensor, x: Tensor, num_samples: int = 15
    ) -> Tensor:
        """
        ``(P,)``: log-odds of edges between pairs ``(2, P)``, a mean over draws of whole
        memberships, :math:`b` rounded.
        """
        with evaluation(self), pyro.validation_enabled(False):
            total = self.encoder.log_sticks.new_zeros(pairs.shape[1])
            for _ in range(num_samples):
                nodes: dict = poutine.trace(self.guide).get_trace(edge_index, x).nodes
                members = (nodes["s"]["value"] > 0) * nodes["r"]["value"]
                total = total + self.target.link_logits(members, pairs)
        return total / num_samples

    def _rest(self, v: Tensor, edge_index: Tensor, x: Tensor, held_out: Tensor | None) -> Tensor:
        return self.target.given(v, edge_index, self._modelled(x), held_out)

    def _modelled(self, x: Tensor) -> Tensor | None:
        return None if self.target.features is None else x

    def _credit(
        self, family: MembershipMixture, values: dict[str, Tensor], v: Tensor, edge_index: Tensor,
        x: Tensor, held_out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """
        Zero, with the bound's derivative towards the attention: every node's score at two draws
        of its memberships, times half of what the bound gains from one to the other while all
        other nodes stay.
        """
        s, r = values["s"], values["r"]
        if s.dim() > 2:
            raise NotImplementedError(
                "estimator='local' takes particles one by one: vectorize_particles=False"
            )
        with torch.no_grad():
            others = family.sample()
            gain = self.target.swaps(v, s, r, others, edge_index, self._modelled(x), held_out,
                                     self.num_columns)  # fmt: skip
            gain = gain - family.node_log_prob(others) + family.node_log_prob(s)
            hood = family.hood
            before, after = (hood.softmax(family.choices(t).logits) for t in (s, others))
            credit = 0.5 * gain.index_select(0, hood.row) * (after - before)
        return (credit * (family.logits - family.logits.detach())).sum()


class _Encoder(nn.Module):
    """What the sites of the guide need, from two graph convolutions without biases."""

    def __init__(
        self, num_features: int, hidden: int, widths: list[int], dropout: float, gamma: float
    ) -> None:
        super().__init__()
        first = GCNConv(num_features, hidden, bias=False, cached=True)
        self.first, self.dropout = RandomInput(first, dropout), dropout
        self.heads = nn.ModuleList(GCNConv(hidden, w, bias=False, cached=True) for w in widths)
        self.log_sticks = nn.Parameter(torch.zeros(2, widths[0]))
        if len(widths) > 3:
            self.omega = nn.Parameter(torch.ones(()))
            self.gamma = nn.Parameter(torch.tensor(float(gamma)))
        #: Means and scales of the strengths, of the last run.
        self.strengths: tuple[Tensor, Tensor]

    def sticks(self, concentration: float) -> Tensor:
        """``(2, K)``: the parameters of ``v``; they start at the prior's."""
        prior = self.log_sticks.new_tensor([[concentration], [1.0]])
        return F.softplus(self.log_sticks + prior.expm1().log())

    def forward(
        self, hood: Neighborhood | None, v: Tensor, edge_index: Tensor, x: Tensor, *_
    ) -> tuple[Tensor, Tensor | None]:
        h = F.leaky_relu(self.first(x, edge_index), 0.2)
        outputs = [head(F.dropout(h, self.dropout, self.training), edge_index)
                   for head in self.heads]  # fmt: skip
        mean, log_scale, odds = outputs[:3]
        self.strengths = mean, log_scale.exp()
        odds = odds + stick_logits(v)
        if hood is None:
            return odds, None
        return odds, attention_scores(hood, outputs[3], self.omega.square(), self.gamma)
