# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fit a hidden field by expectation maximisation, sample it, and score it."""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.arguments import as_tensor, check_integers, expect, expect_device
from pyro_nmm.fitting import Steps, as_path, with_gradients, with_options
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.hidden.field import FieldPrior, HiddenField, log_prior_of, without_relabel
from pyro_nmm.models.hidden.known import allowed_labels, start_of
from pyro_nmm.ops.entries import Draw, Entries, evidence_entries
from pyro_nmm.ops.gibbs import SweepRecord, Sweeps, left_out, sweeps
from pyro_nmm.ops.sampling import draw_entries


@dataclass(frozen=True)
class FieldRun(Steps):
    """Options of :func:`fit_field`.

    :param int num_starts: fits, of which one is kept: the first with flat attention, others along a
        feature of the edges or against it.
    :param int num_steps: of expectation maximisation. Take more if :attr:`HiddenField.chains`
        disagree.
    :param int num_draws: of each of ``num_chains`` chains of Gibbs sweeps, after the fit.
    :param float lr: of the prior's parameters.
    :param progress: wraps the range of steps, for example ``tqdm``.
    :param Path checkpoint: start ``k`` is saved every ``save_every`` steps as ``<checkpoint>.k``.
        Called again after the same seed, an interrupted fit ends with the same values. A checkpoint
        of other data or steps is refused.
    """

    num_steps: int = 120
    lr: float = 0.1
    num_starts: int = 5
    num_chains: int = 4
    num_draws: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        as_path(self.checkpoint)
        sizes = {"num_starts": self.num_starts, "num_chains": self.num_chains}
        check_integers(1, **sizes, num_draws=self.num_draws)


@with_options
@with_gradients
def fit_field(
    emission: Emission, hood: Neighborhood, data: Any, edge_attr: Tensor | None = None,
    known: Tensor | None = None, *, prior: nn.Module | None = None, inputs: tuple = (),
    options: FieldRun = FieldRun(),
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
    :param Tensor known: ``(N,)`` true labels of some nodes, -1 elsewhere.
    :param prior: a network to :class:`~pyro_nmm.models.Parameters` in place of :class:`FieldPrior`,
        such as an :class:`~pyro_nmm.models.NMMNetwork` of node features, called as
        ``prior(hood, *inputs)``. A copy is trained, with weight decay of its matrices. Its own log
        prior density is ``prior.log_prior()``, if there.
    :param options: keywords of :class:`~pyro_nmm.models.hidden.FieldRun`.
    :return: the fitted field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    """
    check_all_rows(hood)
    if prior is not None and edge_attr is not None:
        raise ValueError("give edge_attr or prior, not both: a network has inputs of its own")
    if prior is None and inputs:
        raise ValueError("inputs belong to prior: give a network as prior")
    if prior is None:
        inputs = (as_edge_attr(hood, edge_attr),)
    if known is not None:
        known = as_tensor("known", known, hood.device, masked=-1)
    chains = FieldChains(emission, hood, data, known, inputs, options.num_chains)
    starts = (_Start(chains, prior, turn, options.lr) for turn in range(options.num_starts))
    best = max((start.run(options) for start in starts), key=lambda state: state.score)
    return chains.sample(best, options.num_draws)


@torch.no_grad()
def leave_one_out(field: HiddenField, data: Any, num_sweeps: int = 20) -> Tensor:
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

    :param data: the data of the fit. At nodes of known labels, the value is of the observation
        and the label.
    :param int num_sweeps: of every chain, each at the cost of a sweep of :func:`fit_field`.
    """
    check_integers(1, num_sweeps=num_sweeps)
    if not isinstance(field, HiddenField):
        raise ValueError(f"field must be a HiddenField, got {type(field)}")
    draw, size = field.chains.draw, len(field.chains.draw.labels)
    chains = FieldChains(field.emission, field.hood, data, field.known, field.inputs, size)
    prior, logs = chains.prior_terms(field.prior), []
    # Every chain draws its own parameters, because the fitted ones have seen w_i too.
    last = {name: value[-size:] for name, value in field.draws.items()}
    values = [{name: value[chain] for name, value in last.items()} for chain in range(size)]
    for _ in range(num_sweeps):
        values, terms, swept = chains.gibbs(prior, values, draw, 1)
        draw = swept.draw
        logs.append(left_out(field.hood, terms, draw))
    predictions = torch.cat(logs)
    return math.log(len(predictions)) - (-predictions).logsumexp(0)


def as_edge_attr(hood: Neighborhood, edge_attr: Tensor | None) -> Tensor | None:
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


class State(NamedTuple):
    """Parameters, and the chains' labels and choices under them."""

    prior: nn.Module
    values: Values
    draw: Draw
    score: float


class FieldChains:
    """Chains of labels of one field, given its data: everything but parameters."""

    def __init__(
        self, emission: Emission, hood: Neighborhood, data: Any, known: Tensor | None = None,
        inputs: tuple = (None,), num_chains: int = 4,
    ) -> None:  # fmt: skip
        self.emission, self.hood, self.known = emission, hood, known
        self.data = emission.check(hood, data)
        self.inputs, self.num_chains = inputs, num_chains
        self.allowed = allowed_labels(known, hood, emission.num_labels)

    def evidence(self, values: Values) -> Tensor:
        """``(N, C)``: log-likelihood of the data and of the known labels."""
        evidence = self.emission.log_prob(values, self.data)
        expect("evidence of emission", evidence, tuple(self.allowed.shape))
        return evidence + self.allowed.to(evidence)

    @torch.no_grad()
    def prior_terms(self, prior: nn.Module) -> tuple[Tensor, Tensor]:
        """The log attention and concentrations of :func:`evidence_entries`."""
        alpha, logits = without_relabel(prior.eval()(self.hood, *self.inputs))
        expect("alpha of prior", alpha, (self.hood.num_sources, self.emission.num_labels))
        return self.hood.log_softmax(logits)[None], alpha[None]

    def terms(self, prior: nn.Module, values: Values) -> Entries:
        """Entries of the same parameters in all chains."""
        return evidence_entries(*self.prior_terms(prior), self.evidence(values)[None])

    def first(self, terms: Entries) -> Draw:
        """Labels and choices to begin with."""
        size, device = (self.num_chains, self.hood.num_nodes), self.hood.device
        return draw_entries(self.hood, terms, torch.rand(size, dtype=torch.double, device=device))

    def loss(self, prior: nn.Module, draw: Draw) -> Tensor:
        """Minus log p(c, u) of the prior, given labels and choices of each chain."""
        hood, choices = self.hood, self.hood.source[draw.edges]
        alpha, logits = without_relabel(prior.train()(hood, *self.inputs))
        log_prob = ChosenLabels(alpha, choices, validate_args=False).log_prob(draw.labels)
        attention = NeighborChoice(hood, logits, validate_args=False)
        log_prob = log_prob + attention.log_prob(choices) + log_prior_of(prior)
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
        visits = visits + share / share.sum() * self.allowed.exp()
        probs = visits / visits.sum(-1, keepdim=True)
        chains = SweepRecord(draw, torch.stack(totals, 1).to(probs))
        stacked = {name: torch.stack([drawn[name] for drawn in draws]) for name in start}
        return HiddenField(
            self.hood, self.emission, deepcopy(prior), start, probs, torch.cat(labels), stacked,
            score, chains, self.known, self.inputs,
        )  # fmt: skip


class _Start(nn.Module):
    """Expectation maximisation from one start: the prior, and as extra state all that it learns."""

    def __init__(
        self, chains: FieldChains, network: nn.Module | None, turn: int, lr: float
    ) -> None:
        super().__init__()
        self._chains, self._turn, self._lr = chains, turn, lr
        self._values = start_of(chains.emission, chains.data, chains.hood, chains.known)
        self._probs = torch.zeros_like(evidence := chains.evidence(self._values))
        self.prior = self._field_prior().to(evidence) if network is None else deepcopy(network)
        self._draw = chains.first(self._terms())

    def _field_prior(self) -> FieldPrior:
        prior = FieldPrior(self._chains.emission.num_labels, *self._chains.inputs)
        # From flat attention a fit may turn to the wrong side for good, so other starts lean.
        if lean := self._turn % (1 + 2 * len(prior.unit)):
            prior.scaled_weight.data[(lean - 1) // 2] = 1.0 if lean % 2 else -1.0
        return prior

    def get_extra_state(self) -> dict:
        return {"values": self._values, "probs": self._probs, "draw": self._draw[:2]}

    def set_extra_state(self, state: dict) -> None:
        move = partial(torch.Tensor.to, device=self._probs.device)
        self._values = {name: move(value) for name, value in state["values"].items()}
        edges, labels = map(move, state["draw"])
        self._probs, self._draw = move(state["probs"]), Draw(edges, labels)

    def run(self, options: FieldRun) -> State:
        chains, half = self._chains, options.num_steps // 2

        def gain(step: int) -> float:
            return 1 / max(1, step + 1 - half)

        def backward(step: int) -> float:
            swept = sweeps(chains.hood, self._terms(), self._draw, 2)
            self._draw, visits = swept.draw, swept.visits.sum(0).to(self._probs)
            share = visits / visits.sum(-1, keepdim=True)
            self._probs = self._probs + gain(step) * (share - self._probs)
            self._values = chains.emission.maximise(chains.data, self._probs, self._values)
            loss = chains.loss(self.prior, self._draw)
            loss.backward()
            return loss.item()

        names = "emission", "data", "known", "num_chains"
        settings = {name: getattr(chains, name) for name in names} | {"start": self._turn}
        settings["edge_attr" if isinstance(self.prior, FieldPrior) else "inputs"] = chains.inputs
        settings["emission's attributes"] = getattr(chains.emission, "__dict__", None)
        settings["edges"] = chains.hood.ptr, chains.hood.source, chains.hood.num_sources
        path = None if options.checkpoint is None else Path(f"{options.checkpoint}.{self._turn}")
        optimizer, rate = torch.optim.Adam(self._groups()), lambda k: max(gain(k), 0.1)
        replace(options, checkpoint=path).train(self, optimizer, backward, rate, **settings)
        score = left_out(chains.hood, self._terms(), self._draw).mean().item()
        return State(self.prior, self._values, self._draw, score)

    def _terms(self) -> Entries:
        terms = self._chains.terms(self.prior, self._values)
        if not (terms.alpha.isfinite() & (terms.alpha > 0)).all():  # NaN would break the sweep
            raise ValueError(f"lr={self._lr} is too large: concentrations are no longer finite")
        return terms

    def _groups(self) -> list[dict]:
        """Adam's rate and weight decay of each parameter of the prior."""
        # Kappa has the longest way: its logarithm may end five below where it starts. Decay of
        # vectors would switch off scales of attention.
        far = self.prior.log_kappa if isinstance(self.prior, FieldPrior) else None
        return [
            {
                "params": [value],
                "lr": self._lr * (3 if value is far else 1),
                "weight_decay": 5e-4 if value.dim() > 1 else 0.0,
            }
            for value in self.prior.parameters()
        ]
