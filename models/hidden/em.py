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
from pyro_nmm.arguments import as_tensor, check_integers, expect
from pyro_nmm.fitting import Steps, as_path, with_gradients, with_options
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.hidden.field import (
    FieldPrior,
    HiddenField,
    allowed_labels,
    check_edge_attr,
    check_prior,
    start_of,
    without_relabel,
)
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
        names = "num_starts", "num_chains", "num_draws"
        check_integers(1, **{name: getattr(self, name) for name in names})


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
    :attr:`HiddenField.score` is kept, and sampled as by :func:`sample_field`.

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
    :param prior: a :class:`~pyro_nmm.models.ParameterNetwork` in place of :class:`FieldPrior`, such
        as an :class:`~pyro_nmm.models.NMMNetwork` of node features, called as
        ``prior(hood, *inputs)``. A copy is trained, with weight decay of its matrices.
    :param options: keywords of :class:`~pyro_nmm.models.hidden.FieldRun`.
    :return: the fitted field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    """
    check_prior(prior, inputs, edge_attr)
    chains = FieldChains(emission, hood, data, edge_attr, options.num_chains, known, prior, inputs)
    states = (_Start(chains, turn, options.lr).run(options) for turn in range(options.num_starts))
    return chains.sample(max(states, key=lambda state: state.score), options.num_draws)


@torch.no_grad()
def sample_field(
    emission: Emission, hood: Neighborhood, data: Any, prior: nn.Module, values: Values,
    edge_attr: Tensor | None = None, *, inputs: tuple = (), num_chains: int = 4,
    num_draws: int = 50, num_sweeps: int = 20,
) -> HiddenField:  # fmt: skip
    r"""A field of known prior, as of :class:`~pyro_nmm.guides.HiddenFieldGuide`. Chains draw

    .. math::

        c, u \sim p(c, u \mid w, \theta), \qquad \theta \sim p(\theta \mid u, w)

    in turn, the labels by a sweep of collapsed Gibbs sampling.

    >>> from pyro_nmm.models import NormalEmission
    >>> hood, x = Neighborhood.grid(1, 4), torch.tensor([[0.0], [0.1], [2.0], [2.1]])
    >>> values = {"mean": torch.tensor([[0.0], [2.0]]), "variance": torch.ones(2, 1)}
    >>> field = sample_field(NormalEmission(2), hood, x, FieldPrior(2), values)
    >>> field.samples.shape, field.draws["mean"].shape
    (torch.Size([200, 4]), torch.Size([200, 2, 1]))

    :param prior: a :class:`FieldPrior`, or a network with its ``inputs``.
    :param dict values: the emission's parameters that chains start with.
    :param int num_draws: of each of ``num_chains`` chains, after ``num_sweeps`` sweeps.
    :return: the field, with samples ``(T, N)``.
    """
    check_integers(1, num_chains=num_chains, num_draws=num_draws, num_sweeps=num_sweeps)
    prior = deepcopy(prior)  # whose mode is the caller's
    chains = FieldChains(emission, hood, data, edge_attr, num_chains, None, prior, inputs)
    if isinstance(prior, FieldPrior):
        labels, features = len(prior.share_scores), len(prior.unit)
        expected = 0 if chains.edge_attr is None else chains.edge_attr.shape[1]
        if (labels, features) != (emission.num_labels, expected):
            has = f"prior has {labels} labels and {features} features of edges"
            want = f"emission {emission.num_labels} labels and edge_attr {expected} features"
            raise ValueError(f"{has}, but {want}")
    terms = chains.terms(prior, values)
    draw = draw_entries(hood, terms, chains.uniforms())
    for _ in range(num_sweeps):
        draw = sweeps(hood, terms, draw, 1).draw
    score = left_out(hood, terms, draw).mean().item()
    return chains.sample(_State(prior, values, draw, score), num_draws)


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
    model = field.emission, field.hood, data, field.edge_attr, size
    chains = FieldChains(*model, field.known, field.prior, field.inputs)
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


class _State(NamedTuple):
    prior: nn.Module
    values: Values
    draw: Draw
    score: float


@dataclass
class FieldChains:
    """Chains of labels of one field, given its data: everything but parameters."""

    emission: Emission
    hood: Neighborhood
    data: Any
    edge_attr: Tensor | None
    num_chains: int
    known: Tensor | None = None
    network: nn.Module | None = None
    inputs: tuple = ()

    def __post_init__(self) -> None:
        check_all_rows(self.hood)
        self.data = self.emission.check(self.hood, self.data)
        self.edge_attr = check_edge_attr(self.hood, self.edge_attr)
        if isinstance(self.network, FieldPrior | None):
            self.network, self.inputs = None, (self.edge_attr,)
        if self.known is not None:
            self.known = as_tensor("known", self.known, self.hood.device, masked=-1)
        self.allowed = allowed_labels(self.known, self.hood, self.emission.num_labels)

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

    def uniforms(self, *shape: int) -> Tensor:
        size = *shape, self.num_chains, self.hood.num_nodes
        return torch.rand(size, dtype=torch.double, device=self.hood.device)

    def loss(self, prior: nn.Module, draw: Draw) -> Tensor:
        """Minus log p(c, u) of the prior, given labels and choices of each chain."""
        hood, choices = self.hood, self.hood.source[draw.edges]
        alpha, logits = without_relabel(prior.train()(hood, *self.inputs))
        log_prob = ChosenLabels(alpha, choices, validate_args=False).log_prob(draw.labels)
        if self.edge_attr is not None or self.network is not None:
            attention = NeighborChoice(hood, logits, validate_args=False)
            log_prob = log_prob + attention.log_prob(choices)
        if isinstance(prior, FieldPrior):
            log_prob = log_prob + prior.log_prior()
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
    def sample(self, state: _State, num_draws: int) -> HiddenField:
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
        ends = SweepRecord(draw, torch.stack(totals, 1).to(probs))
        stacked = {name: torch.stack([drawn[name] for drawn in draws]) for name in start}
        return HiddenField(
            self.hood, self.emission, deepcopy(prior), start, probs, torch.cat(labels), stacked,
            score, ends, self.edge_attr, self.known, self.inputs,
        )  # fmt: skip


class _Start(nn.Module):
    """Expectation maximisation from one start: the prior, and as extra state all that it learns."""

    def __init__(self, chains: FieldChains, turn: int, lr: float) -> None:
        super().__init__()
        self._chains, self._turn, self._lr = chains, turn, lr
        self._values = start_of(chains.emission, chains.data, chains.hood, chains.known)
        evidence = chains.evidence(self._values)
        self.prior, self._groups = self._prior(evidence)
        self._probs = torch.zeros_like(evidence)
        self._draw = draw_entries(chains.hood, self._terms(), chains.uniforms())

    def get_extra_state(self) -> dict:
        return {"values": self._values, "probs": self._probs, "draw": self._draw[:2]}

    def set_extra_state(self, state: dict) -> None:
        move = partial(torch.Tensor.to, device=self._probs.device)
        self._values = {name: move(value) for name, value in state["values"].items()}
        edges, labels = map(move, state["draw"])
        self._probs, self._draw = move(state["probs"]), Draw(edges, labels)

    def run(self, options: FieldRun) -> _State:
        chains, half = self._chains, options.num_steps // 2
        optimizer = torch.optim.Adam(self._groups)

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

        names = "emission", "data", "edge_attr", "known", "inputs", "num_chains"
        settings = {name: getattr(chains, name) for name in names}
        settings["emission's attributes"] = getattr(chains.emission, "__dict__", None)
        settings["edges"] = chains.hood.ptr, chains.hood.source, chains.hood.num_sources
        path = None if options.checkpoint is None else Path(f"{options.checkpoint}.{self._turn}")
        of_start = replace(options, checkpoint=path)
        settings |= {"start": self._turn}
        of_start.train(self, optimizer, backward, lambda k: max(gain(k), 0.1), **settings)
        score = left_out(chains.hood, self._terms(), self._draw).mean().item()
        return _State(self.prior, self._values, self._draw, score)

    def _terms(self) -> Entries:
        terms = self._chains.terms(self.prior, self._values)
        if not (terms.alpha.isfinite() & (terms.alpha > 0)).all():  # NaN would break the sweep
            raise ValueError(f"lr={self._lr} is too large: concentrations are no longer finite")
        return terms

    def _prior(self, evidence: Tensor) -> tuple[nn.Module, list[dict]]:
        """The prior as this start has it, and Adam's groups of its parameters."""
        chains, lr = self._chains, float(self._lr)
        if chains.network is not None:
            network = deepcopy(chains.network)
            parts: list[list[nn.Parameter]] = [[], []]
            for value in network.parameters():
                parts[value.dim() > 1].append(value)  # decay would switch off scales of attention
            decays = zip(parts, (0.0, 5e-4), strict=True)
            return network, [{"params": p, "lr": lr, "weight_decay": rate} for p, rate in decays]
        prior = FieldPrior.of(chains.emission.num_labels, chains.edge_attr).to(evidence)
        # From flat attention a fit may turn to the wrong side for good, so other starts lean.
        if lean := self._turn % (1 + 2 * len(prior.unit)):
            prior.scaled_weight.data[(lean - 1) // 2] = 1.0 if lean % 2 else -1.0
        # Kappa has the longest way: its logarithm may end five below where it starts.
        others = {"params": [prior.share_scores, prior.scaled_weight], "lr": lr}
        return prior, [{"params": [prior.log_kappa], "lr": 3 * lr}, others]
