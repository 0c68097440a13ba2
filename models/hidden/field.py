# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A hidden field: its prior, the Pyro program, and what a fit returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture
from pyro_nmm.arguments import (
    as_tensor,
    check_integers,
    check_positive,
    expect,
    expect_all,
    expect_device,
)
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.nmm import nmm
from pyro_nmm.ops.gibbs import SweepRecord


class FieldPrior(nn.Module):
    r"""The NMM prior of a field of labels, a :class:`~pyro_nmm.models.ParameterNetwork` for
    features :math:`x` of the edges, ``(num_edges, F)``, such as a squared distance,

    .. math::

        \alpha_j = \kappa \pi, \qquad L_{ij} \propto \exp(\beta^\top x_{ij})

    >>> from pyro_nmm import sources
    >>> hood = sources.grid(6, 6, stride=3)
    >>> alpha, logits = FieldPrior(num_labels=3)(hood)
    >>> alpha.shape, logits.shape
    (torch.Size([4, 3]), torch.Size([100]))

    :param float kappa: at the start. If it is small, a source gives all nodes the same label.
    :param Tensor unit: ``(F,)`` units of the features, by which :math:`\beta` is scaled.
    """

    unit: Tensor

    def __init__(
        self, num_labels: int, num_features: int = 0, kappa: float = 0.2, unit: Tensor | None = None
    ) -> None:
        super().__init__()
        check_integers(2, num_labels=num_labels)
        check_integers(0, num_features=num_features)
        check_positive(kappa=kappa)
        unit = torch.ones(num_features) if unit is None else as_tensor("unit", unit)
        expect("unit", unit, (num_features,), kind="float")
        expect_all("unit", unit, (unit > 0) & unit.isfinite(), "be positive and finite")
        self.log_kappa = nn.Parameter(torch.tensor(math.log(kappa)))
        self.share_scores = nn.Parameter(torch.zeros(num_labels))
        self.scaled_weight = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("unit", unit)

    @classmethod
    def of(cls, num_labels: int, edge_attr: Tensor | None) -> "FieldPrior":
        """A prior whose unit is the standard deviation of features ``(num_edges, F)``."""
        if edge_attr is None:
            return cls(num_labels)
        spread = edge_attr.double().std(0, correction=0)
        return cls(num_labels, len(spread), unit=spread.where(spread > 0, 1.0))

    @property
    def weight(self) -> Tensor:
        """``(F,)``: :math:`\\beta`."""
        return self.scaled_weight / self.unit

    def forward(self, hood: Neighborhood, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(M, C)``, the same for every source, and ``logits`` ``(num_edges,)``."""
        alpha = self.log_kappa.exp() * self.share_scores.softmax(0)
        logits = alpha.new_zeros(hood.num_edges)
        if edge_attr is not None:
            expect("edge_attr", edge_attr, (hood.num_edges, len(self.unit)))
            logits = edge_attr.to(self.unit) @ self.weight
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
    r"""A hidden field as a Pyro program.

    .. math::

        u \sim \mathrm{NMM}, \qquad w_i \sim p(w_i \mid u_i, \theta), \qquad \theta \sim p(\theta)

    It has the sites ``c`` and ``y`` of an :func:`~pyro_nmm.models.nmm`, and the factors ``data``
    and ``prior``. :class:`~pyro_nmm.guides.HiddenFieldGuide` has the guide.

    >>> from pyro_nmm.models import NormalEmission
    >>> hood, x = Neighborhood.grid(2, 2), torch.zeros(4, 1)
    >>> values = {"mean": torch.tensor([[0.0], [1.0]]), "variance": torch.ones(2, 1)}
    >>> program = hood, FieldPrior(num_labels=2), NormalEmission(2), values, x
    >>> trace = pyro.poutine.trace(hidden_field).get_trace(*program)
    >>> trace.nodes["y"]["value"].shape
    torch.Size([4])

    :param prior: a :class:`FieldPrior`, or a network called as ``prior(hood, *inputs)`` for
        concentrations and logits; its own log prior density is ``prior.log_prior()``, if there.
    :param dict values: the emission's parameters, such as ``pyro.param`` gives them.
    :param data: observations of the nodes, as :meth:`Emission.check` returns them.
    :param inputs: of the prior: features of the edges, or what a network takes.
    :return: ``(..., N)`` labels. Cost: :math:`O(E + N C)`, and the emission's.
    """
    y = nmm(hood, *without_relabel(prior(hood, *inputs)), collapsed=True)
    evidence, table = emission.log_prob(values, data), (hood.num_nodes, emission.num_labels)
    if evidence.shape[-2:] != table:
        got = tuple(evidence.shape)
        raise ValueError(f"data and values must give evidence of shape (N, C) = {table}, got {got}")
    of_labels = evidence.expand(*y.shape, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    pyro.factor("data", of_labels.sum(-1))
    log_prior = getattr(prior, "log_prior", lambda: 0.0)()
    pyro.factor("prior", log_prior + emission.log_prior(values, data))
    return y


def without_relabel(outputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Concentrations and logits of a prior."""
    alpha, logits, *relabel = outputs
    if any(channel is not None for channel in relabel):
        raise ValueError("prior must return alpha and logits alone: a field has no relabel")
    return alpha, logits


def start_of(emission: Emission, data: Any, hood: Neighborhood, known: Tensor | None) -> Values:
    """The emission's start. Known labels give names to labels that have none."""
    values = emission.start(data, hood)
    if known is None or getattr(emission, "named", False):
        return values
    probs, rows = emission.log_prob(values, data).softmax(-1), known >= 0
    agree = probs.new_zeros(probs.shape[1], probs.shape[1])
    place = matched(agree.index_add(0, known[rows].long(), probs[rows]))
    if "types" in values:  # matrices are those of types
        return values | {"types": values["types"][place]}
    return emission.maximise(data, probs[:, place], values)


def matched(agree: Tensor) -> Tensor:
    """For each row of ``(C, C)`` a column of its own, the largest values first."""
    left, place = agree.clone(), torch.zeros(len(agree), dtype=torch.long, device=agree.device)
    for _ in range(len(agree)):
        row, column = divmod(int(left.argmax()), len(agree))
        place[row] = column
        left[row], left[:, column] = -1, -1
    return place


@dataclass(frozen=True)
class HiddenField:
    """A fitted field: what :func:`~pyro_nmm.models.fit_field` returns.

    >>> from pyro_nmm.models import NormalEmission, fit_field
    >>> hood, features = Neighborhood.grid(2, 2), torch.tensor([[-1.0], [-1.1], [1.0], [0.9]])
    >>> field = fit_field(NormalEmission(num_labels=2), hood, features, num_steps=2)
    >>> field.predict().shape, field.probs.shape, field.samples.shape
    (torch.Size([4]), torch.Size([4, 2]), torch.Size([200, 4]))

    :ivar prior: the fitted :class:`FieldPrior`, or the network in its place.
    :ivar dict values: the emission's parameters, fitted.
    :ivar Tensor probs: ``(N, C)``, the posterior probability of every label.
    :ivar Tensor samples: ``(T, N)`` int16, joint draws of all labels.
    :ivar dict draws: the emission's parameters as drawn with these, ``(T, ...)`` each.
    :ivar float score: the mean over nodes of :math:`\\log p(w_i \\mid u_{-i})` in nats. It compares
        starts. For sources and emissions see :func:`~pyro_nmm.models.leave_one_out`.
    :ivar tuple inputs: of the prior, beside the neighborhood.
    :ivar SweepRecord chains: effective sample sizes, and whether chains agree.
    """

    hood: Neighborhood
    emission: Emission
    prior: nn.Module
    values: Values
    probs: Tensor
    samples: Tensor
    draws: Values
    score: float
    chains: SweepRecord
    edge_attr: Tensor | None = None
    known: Tensor | None = None
    inputs: tuple = ()

    def predict(self) -> Tensor:
        """``(N,)``: every node's most probable label."""
        return self.probs.argmax(-1)

    def entropy(self) -> Tensor:
        """``(N,)``: of every node's label, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    @torch.no_grad()
    def mixture(self) -> NeighborMixture:
        """The prior of the labels."""
        return NeighborMixture(self.hood, *self.prior(self.hood, *self.inputs))

    @torch.no_grad()
    def latents(self, data: Any) -> EvidenceConditional:
        """:math:`q(c, u \\mid w)` at the fitted parameters, for all other queries."""
        data = self.emission.check(self.hood, data)
        evidence = self.emission.log_prob(self.values, data)
        allowed = allowed_labels(self.known, self.hood, self.emission.num_labels)
        return self.mixture().latents(evidence + allowed.to(evidence))

    def __repr__(self) -> str:
        parts = f"hood={self.hood}, emission={self.emission}, score={self.score:.4g}"
        return f"HiddenField({parts}, {self.prior.extra_repr()})"


def allowed_labels(known: Tensor | None, hood: Neighborhood, num_labels: int) -> Tensor:
    """``(N, C)`` evidence of labels ``(N,)``: zero where unknown (-1) and for the known label, else
    minus infinity."""
    allowed = torch.zeros(hood.num_nodes, num_labels, device=hood.device)
    if known is None:
        return allowed
    if known.dtype == torch.bool:
        cure = "torch.where(mask, y, -1)"
        raise ValueError(f"known must hold labels, -1 where unknown, not a mask: pass {cure}")
    known = expect("known", known, (hood.num_nodes,), kind="labels", like=hood)
    good = (known >= -1) & (known < num_labels)
    expect_all("known", known, good, f"lie in 0..{num_labels - 1}, or be -1 where unknown")
    other = known[:, None] != torch.arange(num_labels, device=hood.device)
    return allowed.masked_fill(other & (known >= 0)[:, None], -torch.inf)


def check_prior(prior: nn.Module | None, inputs: tuple, edge_attr: Any) -> None:
    """Features of edges belong to :class:`FieldPrior`, and inputs to a network."""
    if prior is not None and edge_attr is not None:
        raise ValueError("give edge_attr or prior, not both: a network has inputs of its own")
    if prior is None and inputs:
        raise ValueError("inputs belong to prior: give a network as prior")


def check_edge_attr(hood: Neighborhood, edge_attr: Tensor | None) -> Tensor | None:
    """``(num_edges, F)`` features, also from ``(num_edges,)``, such as hops or distances."""
    if edge_attr is None:
        return None
    edge_attr = as_tensor("edge_attr", edge_attr, hood.device)
    if edge_attr.is_complex() or edge_attr.dim() not in (1, 2) or len(edge_attr) != hood.num_edges:
        shape = f"({hood.num_edges},) or ({hood.num_edges}, F)"
        raise ValueError(f"edge_attr must hold numbers of shape {shape}, got {edge_attr.shape}")
    if not edge_attr.isfinite().all():
        raise ValueError("edge_attr must be finite")
    expect_device("edge_attr", edge_attr, hood.device)
    return edge_attr.view(hood.num_edges, -1)
