# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fit a hidden field by expectation maximisation, sample it, and score it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.arguments import Array, as_tensor, check_integers, expect, expect_all
from pyro_nmm.fitting import Steps, bar, with_gradients, with_options
from pyro_nmm.model_arguments import check_all_rows
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.hidden.field import FieldPrior, HiddenField
from pyro_nmm.ops.entries import Draw, Entries, evidence_entries
from pyro_nmm.ops.sampling import draw_entries
from pyro_nmm.ops.sweeps import SweepRecord, Sweeps, left_out, sweeps


class FieldOptions(TypedDict, total=False):
    """Types of the fields of :class:`FieldRun`, as keywords of :func:`fit_field`."""

    num_starts: int
    num_steps: int
    num_chains: int
    num_draws: int
    progress: Callable[[range], Iterable[int]]


@dataclass(frozen=True)
class FieldRun:
    """Options of :func:`fit_field`.

    :param int num_starts: fits, of which one is kept: the first with flat attention, others along a
        feature of the edges or against it.
    :param int num_steps: of expectation maximisation. Take more if :attr:`HiddenField.chains`
        disagree.
    :param int num_draws: of each of ``num_chains`` chains of Gibbs sweeps, after the fit.
    :param progress: wraps the range of steps, as in ``Steps``. Default a bar.
    :raises ValueError: for a number below one.
    """

    num_starts: int = 5
    num_steps: int = 120
    num_chains: int = 4
    num_draws: int = 50
    progress: Callable[[range], Iterable[int]] = bar

    def __post_init__(self) -> None:
        names = "num_starts", "num_steps", "num_chains", "num_draws"
        check_integers(1, **{name: getattr(self, name) for name in names})


@with_options
@with_gradients
def fit_field(
    emission: Emission, hood: Neighborhood, data: Any, edge_attr: Array | None = None, *,
    options: FieldRun = FieldRun(), **fields: Unpack[FieldOptions],
) -> HiddenField:  # fmt: skip
    r"""Fit a field of latent labels, with all parameters, to observations.

    The E-step of expectation maximisation continues chains of collapsed Gibbs sweeps and averages
    the labels that they visit over the second half of the steps (Delyon, Lavielle and Moulines
    1999, Annals of Statistics 27). The M-step is the emission's own, and a step of Adam on
    :math:`\log p(c, u)` for the prior. Of several starts the one with the best
    :attr:`HiddenField.score` is kept, and sampled.

    >>> from pyro_nmm import sources
    >>> from pyro_nmm.models import NormalEmission
    >>> hood = sources.grid(16, 16, stride=4)
    >>> truth = (torch.arange(256) % 16 >= 8).long()
    >>> x = 2.0 * truth[:, None] + torch.randn(256, 1)
    >>> field = fit_field(NormalEmission(num_labels=2), hood, x)
    >>> bool(abs((field.predict() == truth).float().mean() - 0.5) > 0.4)  # labels have no names
    True

    :param data: observations of ``N`` nodes, as the emission takes them.
    :param Tensor edge_attr: ``(num_edges, F)`` or ``(num_edges,)`` features of the edges, such as
        hops, for the attention of :class:`FieldPrior`; default flat attention.
    :param options: keywords of :class:`~pyro_nmm.models.hidden.FieldRun`.
    :return: the fitted field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    :raises ValueError: for data or ``edge_attr`` of a wrong shape or value, and options below one.
    """
    check_all_rows(hood)
    if edge_attr is not None:
        edge_attr = as_tensor("edge_attr", edge_attr, hood.device)
        edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
        note = f"or ({hood.num_edges},)"
        expect("edge_attr", edge_attr, (hood.num_edges, "F"), like=hood, note=note)
        good = edge_attr.isfinite() & edge_attr.isreal()
        expect_all("edge_attr", edge_attr, good, "be finite and real")
    data = emission.check(hood, data)
    chains = FieldChains(emission, hood, data, edge_attr, options.num_chains)
    starts = (_fit(chains, turn, options) for turn in range(options.num_starts))
    best = max(starts, key=lambda state: state.score)
    return chains.sample(best, options.num_draws)


@torch.no_grad()
def leave_one_out(field: HiddenField, data: Any) -> Tensor:
    r"""``(N,)``: :math:`\log p(w_i \mid w_{-i})` in nats, each observation predicted from all
    others, at the fitted parameters of the prior. Its mean compares sources and emissions on the
    same data.

    Chains are weighted so that labels do not depend on :math:`w_i` (Gelfand, Dey and Chang 1992,
    Bayesian Statistics 4),

    .. math::

        \frac1{p(w_i \mid w_{-i})} = \mathrm{E} \Bigl[
            \frac1{p(w_i \mid c_{-i}, u_{-i}, \theta)} \Bigm| w \Bigr] .

    >>> from pyro_nmm import sources
    >>> from pyro_nmm.models import NormalEmission, fit_field
    >>> truth = (torch.arange(256) % 16 >= 8).long()
    >>> x = 2.0 * truth[:, None] + torch.randn(256, 1)
    >>> grids = [sources.grid(16, 16, stride) for stride in (1, 4)]  # all pixels, one in sixteen
    >>> fields = [fit_field(NormalEmission(2), hood, x, num_starts=2) for hood in grids]
    >>> every, few = (leave_one_out(field, x).mean() for field in fields)
    >>> bool(few > every)
    True

    :param data: the data of the fit.
    :return: Cost: 20 sweeps of every chain, each as in :func:`fit_field`.
    :raises ValueError: for anything but a :class:`HiddenField`, and data that its emission refuses.
    """
    if not isinstance(field, HiddenField):
        raise ValueError(f"field must be a HiddenField, got {type(field)}")
    draw, size = field.chains.draw, len(field.chains.draw.labels)
    data = field.emission.check(field.hood, data)
    chains = FieldChains(field.emission, field.hood, data, field.edge_attr, size)
    prior, logs = chains.prior_terms(field.prior), []
    # Every chain draws its own parameters, because the fitted ones have seen w_i too.
    last = {name: value[-size:] for name, value in field.draws.items()}
    values = [{name: value[chain] for name, value in last.items()} for chain in range(size)]
    for _ in range(20):
        values, terms, swept = chains.gibbs(prior, values, draw, 1)
        draw = swept.draw
        logs.append(left_out(field.hood, terms, draw))
    predictions = torch.cat(logs)
    return math.log(len(predictions)) - (-predictions).logsumexp(0)


class State(NamedTuple):
    """Parameters, and the chains' labels and choices under them."""

    prior: FieldPrior
    values: Values
    draw: Draw
    score: float


@dataclass(frozen=True)
class FieldChains:
    """Chains of labels of one field, given its data: everything but parameters."""

    emission: Emission
    hood: Neighborhood
    data: Any  #: checked by the emission
    edge_attr: Tensor | None
    num_chains: int

    def evidence(self, values: Values) -> Tensor:
        """``(N, C)``: log-likelihood of the data."""
        table = self.hood.num_nodes, self.emission.num_labels
        return expect("evidence of emission", self.emission.log_prob(values, self.data), table)

    @torch.no_grad()
    def prior_terms(self, prior: FieldPrior) -> tuple[Tensor, Tensor]:
        """The log attention and concentrations of :func:`evidence_entries`."""
        alpha, logits = prior(self.hood, self.edge_attr)
        return self.hood.log_softmax(logits)[None], alpha[None]

    def terms(self, prior: FieldPrior, values: Values) -> Entries:
        """Entries of the same parameters in all chains."""
        return evidence_entries(*self.prior_terms(prior), self.evidence(values)[None])

    def first(self, terms: Entries) -> Draw:
        """Labels and choices to begin with."""
        size, device = (self.num_chains, self.hood.num_nodes), self.hood.device
        return draw_entries(self.hood, terms, torch.rand(size, dtype=torch.double, device=device))

    def loss(self, prior: FieldPrior, draw: Draw) -> Tensor:
        """Minus log p(c, u) of the prior, given labels and choices of each chain."""
        hood, choices = self.hood, self.hood.source[draw.edges]
        alpha, logits = prior(hood, self.edge_attr)
        log_prob = ChosenLabels(alpha, choices, validate_args=False).log_prob(draw.labels)
        attention = NeighborChoice(hood, logits, validate_args=False)
        log_prob = log_prob + attention.log_prob(choices) + prior.log_prior()
        return -log_prob.mean() / hood.num_nodes

    def gibbs(
        self, prior: tuple[Tensor, Tensor], values: list[Values], draw: Draw, num_sweeps: int
    ) -> tuple[list[Values], Entries, Sweeps]:
        """Each chain with emission parameters drawn anew, and sweeps given these."""
        pairs = zip(draw.labels, values, strict=True)
        values = [self.emission.draw(self.data, labels, old) for labels, old in pairs]
        terms = evidence_entries(*prior, torch.stack([self.evidence(drawn) for drawn in values]))
        return values, terms, sweeps(self.hood, terms, draw, num_sweeps)

    @torch.no_grad()
    def sample(self, state: State, num_draws: int) -> HiddenField:
        r"""Draws :math:`c, u \sim p(c, u \mid w, \theta)` and
        :math:`\theta \sim p(\theta \mid u, w)` in turn."""
        prior, start, draw, score = state
        terms, values = self.prior_terms(prior), [start] * self.num_chains
        visits, labels, draws, totals = torch.zeros((), device=self.hood.device), [], [], []
        for _ in range(num_draws):
            values, _, swept = self.gibbs(terms, values, draw, 2)
            draw, visits = swept.draw, visits + swept.visits.sum(0)
            labels.append(draw.labels.to(torch.int16))
            totals.append(swept.totals[:, -1])
            draws += values
        # A label that no sweep met is rare, not impossible.
        share = terms[1].sum((0, 1))
        visits = visits + share / share.sum()
        probs = visits / visits.sum(-1, keepdim=True)
        chains = SweepRecord(draw, torch.stack(totals, 1).to(probs))
        stacked = {name: torch.stack([drawn[name] for drawn in draws]) for name in start}
        found = probs, torch.cat(labels), stacked, score, chains
        return HiddenField(self.hood, self.emission, prior, start, *found, self.edge_attr)


def _fit(chains: FieldChains, turn: int, options: FieldRun) -> State:
    """Expectation maximisation from one start."""
    emission, half = chains.emission, options.num_steps // 2
    values = emission.start(chains.data, chains.hood)
    probs = torch.zeros_like(evidence := chains.evidence(values))
    prior = FieldPrior(emission.num_labels, chains.edge_attr).to(evidence)
    # From flat attention a fit may turn to the wrong side for good, so other starts lean.
    if lean := turn % (1 + 2 * len(prior.unit)):
        prior.scaled_weight.data[(lean - 1) // 2] = 1.0 if lean % 2 else -1.0
    draw = chains.first(chains.terms(prior, values))

    def gain(step: int) -> float:
        return 1 / max(1, step + 1 - half)

    def backward(step: int) -> float:
        nonlocal values, probs, draw
        swept = sweeps(chains.hood, chains.terms(prior, values), draw, 2)
        draw, visits = swept.draw, swept.visits.sum(0).to(probs)
        share = visits / visits.sum(-1, keepdim=True)
        probs = probs + gain(step) * (share - probs)
        values = emission.maximise(chains.data, probs, values)
        loss = chains.loss(prior, draw)
        loss.backward()
        return loss.item()

    # Kappa has the longest way: its logarithm may end five below where it starts.
    groups = [
        {"params": [prior.log_kappa], "lr": 0.3},
        {"params": [prior.share_scores, prior.scaled_weight], "lr": 0.1},
    ]
    loop = Steps(options.num_steps, progress=options.progress)
    loop.train(prior, torch.optim.Adam(groups), backward, lambda step: max(gain(step), 0.1))
    score = left_out(chains.hood, chains.terms(prior, values), draw).mean().item()
    return State(prior, values, draw, score)
