# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A hidden field: its prior, the Pyro program, and what a fit returns."""

import math
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.distributions import Unit
from torch import Tensor, nn

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture
from pyro_nmm.arguments import as_tensor, check_integers, expect
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.nmm import nmm
from pyro_nmm.ops.sweeps import SweepRecord


class FieldPrior(nn.Module):
    r"""The NMM prior of a field of labels, a network to :class:`~pyro_nmm.models.Parameters` for
    features :math:`x` of the edges, ``(num_edges, F)``, such as a squared distance,

    .. math::

        \alpha_j = \kappa \pi, \qquad L_{ij} \propto \exp(\beta^\top x_{ij})

    >>> from pyro_nmm import sources
    >>> hood = sources.grid(6, 6, stride=3)
    >>> alpha, logits = FieldPrior(num_labels=3)(hood)
    >>> alpha.shape, logits.shape
    (torch.Size([4, 3]), torch.Size([100]))

    If :math:`\kappa` is small, a source gives all nodes the same label. It starts at .2.

    :param Tensor edge_attr: the features, if any. Their standard deviations are the units in which
        :math:`\beta` is learned.
    :raises ValueError: for fewer than two labels, and ``edge_attr`` of a wrong shape.
    """

    unit: Tensor

    def __init__(self, num_labels: int, edge_attr: Tensor | None = None) -> None:
        super().__init__()
        check_integers(2, num_labels=num_labels)
        unit = torch.ones(0)
        if edge_attr is not None:
            edge_attr = expect("edge_attr", as_tensor("edge_attr", edge_attr), ("num_edges", "F"))
            unit = edge_attr.double().std(0, correction=0)
            unit = unit.where(unit > 0, 1.0)
        self.log_kappa = nn.Parameter(torch.tensor(math.log(0.2)))
        self.share_scores = nn.Parameter(torch.zeros(num_labels))
        self.scaled_weight = nn.Parameter(torch.zeros(len(unit)))
        self.register_buffer("unit", unit)

    @property
    def weight(self) -> Tensor:
        """``(F,)``: :math:`\\beta`."""
        return self.scaled_weight / self.unit.to(self.scaled_weight)

    def forward(self, hood: Neighborhood, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(M, C)``, the same for every source, and ``logits`` ``(num_edges,)``."""
        alpha = self.log_kappa.exp() * self.share_scores.softmax(0)
        logits = alpha.new_zeros(hood.num_edges)
        if edge_attr is not None:
            expect("edge_attr", edge_attr, (hood.num_edges, len(self.unit)))
            logits = edge_attr.to(alpha) @ self.weight
        return alpha.expand(hood.num_sources, -1), logits

    def log_prior(self) -> Tensor:
        r"""Normal(-1, 2) of :math:`\log \kappa`, uniform of :math:`\pi`, flat of :math:`\beta`."""
        return self.share_scores.log_softmax(0).sum() - 0.125 * (self.log_kappa + 1).square()

    def extra_repr(self) -> str:
        share = [round(x, 3) for x in self.share_scores.softmax(0).tolist()]
        weight = [round(x, 3) for x in self.weight.tolist()]
        return f"kappa={self.log_kappa.exp().item():.4g}, share={share}, weight={weight}"


def hidden_field(
    hood: Neighborhood, prior: nn.Module, emission: Emission, values: Values, data: Any, *inputs,
) -> Tensor:  # fmt: skip
    r"""A hidden field as a Pyro program, for example for SVI with
    :class:`~pyro_nmm.guides.AutoNMM`.

    .. math::

        u \sim \mathrm{NMM}, \qquad w_i \sim p(w_i \mid u_i, \theta), \qquad \theta \sim p(\theta)

    It has the sites ``c`` and ``y`` of an :func:`~pyro_nmm.models.nmm`, and the factors ``data``,
    a term for each node, and ``prior``.

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm import sources
    >>> from pyro_nmm.guides import AutoNMM
    >>> from pyro_nmm.models import NormalEmission
    >>> hood = sources.grid(12, 12, stride=4)
    >>> x = 3.0 * (torch.arange(144) % 12 >= 6)[:, None] + torch.randn(144, 1)
    >>> emission, prior = NormalEmission(num_labels=2), FieldPrior(num_labels=2)
    >>> start = emission.start(x, hood)
    >>> def model():
    ...     pyro.module("prior", prior)
    ...     values = {key: pyro.param(key, start[key], emission.support[key]) for key in start}
    ...     return hidden_field(hood, prior, emission, values, x)
    >>> guide = AutoNMM(model)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    >>> svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step() for _ in range(50)]
    >>> pyro.param("mean").flatten().sort().values.round().int().tolist()
    [0, 3]
    >>> guide.posterior()["c"].marginals().shape
    torch.Size([144, 2])

    :param prior: a :class:`FieldPrior`, or a network called as ``prior(hood, *inputs)`` for
        concentrations and logits; its own log prior density is ``prior.log_prior()``, if there.
    :param dict values: the emission's parameters, such as ``pyro.param`` gives them.
    :param data: observations of the nodes, as :meth:`Emission.check` returns them.
    :param inputs: of the prior: features of the edges, or what a network takes.
    :return: ``(..., N)`` labels. Cost: :math:`O(E + N C)`, and the emission's.
    :raises ValueError: if ``prior`` returns ``relabel``, or the evidence is no table ``(N, C)``.
    """
    alpha, logits, *relabel = prior(hood, *inputs)
    if any(channel is not None for channel in relabel):
        raise ValueError("prior must return alpha and logits alone: a field has no relabel")
    y = nmm(hood, alpha, logits, collapsed=True)
    evidence, table = emission.log_prob(values, data), (hood.num_nodes, emission.num_labels)
    if evidence.shape[-2:] != table:
        got = tuple(evidence.shape)
        raise ValueError(f"data and values must give evidence of shape (N, C) = {table}, got {got}")
    of_labels = evidence.expand(*y.shape, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    # A factor for each node, from which guides compute the evidence of labels.
    pyro.sample("data", Unit(of_labels).to_event(1), obs=of_labels.new_empty(*y.shape, 0))
    log_prior = getattr(prior, "log_prior", lambda: 0.0)()
    pyro.factor("prior", log_prior + emission.log_prior(values, data))
    return y


@dataclass(frozen=True)
class HiddenField:
    """A fitted field: what :func:`~pyro_nmm.models.fit_field` returns.

    >>> from pyro_nmm.models import NormalEmission, fit_field
    >>> hood, features = Neighborhood.grid(2, 2), torch.tensor([[-1.0], [-1.1], [1.0], [0.9]])
    >>> field = fit_field(NormalEmission(num_labels=2), hood, features, num_steps=2)
    >>> field.predict().shape, field.probs.shape, field.samples.shape
    (torch.Size([4]), torch.Size([4, 2]), torch.Size([200, 4]))

    :ivar FieldPrior prior: the fitted prior.
    :ivar dict values: the emission's parameters, fitted.
    :ivar Tensor probs: ``(N, C)``, the posterior probability of every label.
    :ivar Tensor samples: ``(T, N)`` int16, joint draws of all labels.
    :ivar dict draws: the emission's parameters as drawn with these, ``(T, ...)`` each.
    :ivar float score: the mean over nodes of :math:`\\log p(w_i \\mid u_{-i})` in nats. It compares
        starts. For sources and emissions see :func:`~pyro_nmm.models.leave_one_out`.
    :ivar SweepRecord chains: effective sample sizes, and whether chains agree.
    :ivar Tensor edge_attr: ``(num_edges, F)``, the features of the edges, if any.
    """

    hood: Neighborhood
    emission: Emission
    prior: FieldPrior
    values: Values
    probs: Tensor
    samples: Tensor
    draws: Values
    score: float
    chains: SweepRecord
    edge_attr: Tensor | None = None

    def predict(self) -> Tensor:
        """``(N,)``: every node's most probable label."""
        return self.probs.argmax(-1)

    def entropy(self) -> Tensor:
        """``(N,)``: entropy of every node's label, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    @torch.no_grad()
    def latents(self, data: Any) -> EvidenceConditional:
        """:math:`q(c, u \\mid w)` at the fitted parameters, for all other queries.

        :raises ValueError: for data that the emission refuses.
        """
        data = self.emission.check(self.hood, data)
        mixture = NeighborMixture(self.hood, *self.prior(self.hood, self.edge_attr))
        return mixture.latents(self.emission.log_prob(self.values, data))

    def __repr__(self) -> str:
        parts = f"hood={self.hood}, emission={self.emission}, score={self.score:.4g}"
        return f"HiddenField({parts}, {self.prior.extra_repr()})"
