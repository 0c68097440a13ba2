# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.arguments import as_tensor, check_integers, expect, options_of
from pyro_nmm.checkpoints import Checkpoint
from pyro_nmm.fitting import with_gradients
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.models.hidden.emissions import Emission, Values
from pyro_nmm.models.hidden.field import (
    FieldPrior,
    HiddenField,
    allowed_labels,
    check_edge_attr,
    start_of,
    without_relabel,
)
from pyro_nmm.models.hidden.options import FieldRun, FieldSampling
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, draw_latent
from pyro_nmm.ops.gibbs import Chains, Sweeps, left_out, sweep


@with_gradients
def fit_field(
    emission: Emission, hood: Neighborhood, data: Any, edge_attr: Tensor | None = None,
    known: Tensor | None = None, *, prior: nn.Module | None = None, inputs: tuple = (), **options,
) -> HiddenField:  # fmt: skip
    r"""
    Fit a field of latent labels, with all parameters, to observations.

    The fit is expectation maximisation. The E-step continues chains of collapsed Gibbs sweeps and
    averages the labels that they visit over the second half of the steps (Delyon, Lavielle and
    Moulines 1999, "Convergence of a stochastic approximation version of the EM algorithm", Annals
    of Statistics 27). The M-step is the emission's own, and a step of Adam on :math:`\log p(c, u)`
    for the prior. Of several starts the one with the best :attr:`HiddenField.score` is kept, and
    sampled as by :func:`sample_field`.

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
        ``prior(hood, *inputs)``. It is copied, and trained by Adam with ``lr``, and with weight
        decay of its matrices.
    :param options: of :class:`~pyro_nmm.models.hidden.FieldRun`.
    :return: the fitted field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    """
    how = options_of(fit_field, FieldRun, options)
    if prior is not None and edge_attr is not None:
        raise ValueError("give edge_attr or prior, not both: a network has inputs of its own")
    if prior is None and inputs:
        raise ValueError("inputs belong to prior: give a network as prior")
    fit = _Fit(emission, hood, data, edge_attr, how.num_chains, known, prior, inputs)
    best = max((fit.run(how, i) for i in range(how.num_starts)), key=lambda state: state.score)
    return fit.sample(best, how.num_draws)


@torch.no_grad()
def sample_field(
    emission: Emission, hood: Neighborhood, data: Any, prior: nn.Module, values: Values,
    edge_attr: Tensor | None = None, *, inputs: tuple = (), **options,
) -> HiddenField:  # fmt: skip
    r"""
    A field of known prior, as of :class:`~pyro_nmm.guides.HiddenFieldGuide`. Chains draw

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
    :param options: of :class:`~pyro_nmm.models.hidden.FieldSampling`.
    :return: the field, with samples ``(T, N)``. All else is as for :func:`fit_field`.
    """
    how = options_of(sample_field, FieldSampling, options)
    prior = deepcopy(prior)  # whose mode is the caller's
    fit = _Fit(emission, hood, data, edge_attr, how.num_chains, None, prior, inputs)
    if isinstance(prior, FieldPrior):
        labels, features = len(prior.share_scores), len(prior.unit)
        expected = 0 if fit.edge_attr is None else fit.edge_attr.shape[1]
        if (labels, features) != (emission.num_labels, expected):
            has = f"prior has {labels} labels and {features} features of edges"
            want = f"emission {emission.num_labels} labels and edge_attr {expected} features"
            raise ValueError(f"{has}, but {want}")
    terms = LatentTerms(*fit.terms(prior), fit.evidence(values)[None])
    draw = draw_latent(hood, terms, fit.uniforms())
    for _ in range(how.num_sweeps):
        draw = sweep(hood, terms, draw, fit.uniforms(1)).draw
    score = left_out(hood, terms, draw).mean().item()
    return fit.sample(_State(prior, values, draw, score), how.num_draws)


@torch.no_grad()
def leave_one_out(field: HiddenField, data: Any, num_sweeps: int = 20) -> Tensor:
    r"""
    ``(N,)``: :math:`\log p(w_i \mid w_{-i})` in nats, each observation predicted from all others,
    at the fitted parameters of the prior. Its mean compares sources and emissions on the same data.

    :attr:`HiddenField.score` predicts from labels that depend on :math:`w_i`. Here chains of labels
    are weighted so that they do not (Gelfand, Dey and Chang 1992, Bayesian Statistics 4),

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
    draw, found, size = field.chains.draw, [], len(field.chains.draw.labels)
    given = data, field.edge_attr, size, field.known, field.prior, field.inputs
    fit = _Fit(field.emission, field.hood, *given)
    prior = fit.terms(field.prior)
    # Every chain draws its own parameters, because the fitted ones have seen w_i too.
    last = {name: value[-size:] for name, value in field.draws.items()}
    values = [{name: value[chain] for name, value in last.items()} for chain in range(size)]
    for _ in range(num_sweeps):
        values, terms, swept = fit.gibbs(prior, values, draw, 1)
        draw = swept.draw
        found.append(left_out(field.hood, terms, draw))
    logs = torch.cat(found)
    return math.log(len(logs)) - (-logs).logsumexp(0)


class _State(NamedTuple):
    prior: nn.Module
    values: Values
    draw: LatentDraw
    score: float


@dataclass
class _Fit:
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
        """``(N, C)``: of the data and of the known labels."""
        evidence = self.emission.log_prob(values, self.data)
        expect("evidence of emission", evidence, tuple(self.allowed.shape))
        return evidence + self.allowed.to(evidence)

    @torch.no_grad()
    def terms(self, prior: nn.Module) -> tuple[Tensor, Tensor]:
        """The log attention and concentrations of :class:`LatentTerms`."""
        alpha, logits = without_relabel(prior.eval()(self.hood, *self.inputs))
        expect("alpha of prior", alpha, (self.hood.num_sources, self.emission.num_labels))
        return self.hood.log_softmax(logits)[None], alpha[None]

    def saved(
        self, how: FieldRun, turn: int, prior: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        names = "emission", "data", "edge_attr", "known", "inputs", "num_chains"
        settings = {name: getattr(self, name) for name in names}
        settings["emission's attributes"] = getattr(self.emission, "__dict__", None)
        settings["edges"] = self.hood.ptr, self.hood.source, self.hood.num_sources
        settings |= {"start": turn, "num_steps": how.num_steps}
        path = None if how.checkpoint is None else f"{how.checkpoint}.{turn}"
        return Checkpoint(path, {"prior": prior, "optimizer": optimizer}, settings)

    def uniforms(self, *shape: int) -> Tensor:
        size = *shape, self.num_chains, self.hood.num_nodes
        return torch.rand(size, dtype=torch.double, device=self.hood.device)

    def run(self, how: FieldRun, turn: int) -> _State:
        emission, hood, data = self.emission, self.hood, self.data
        values = start_of(emission, data, hood, self.known)
        evidence = self.evidence(values)
        prior, optimizer = self.prepared(evidence, float(how.lr), turn)
        rates = [group["lr"] for group in optimizer.param_groups]
        saved = self.saved(how, turn, prior, optimizer)
        if state := saved.read():
            saved.restore(state)
            move = partial(torch.Tensor.to, device=hood.device)
            values = {name: move(value) for name, value in state["values"].items()}
            probs, draw = move(state["probs"]), LatentDraw(*map(move, state["draw"]))
            terms = LatentTerms(*self.terms(prior), self.evidence(values)[None])
        else:
            probs = torch.zeros_like(evidence)
            terms = LatentTerms(*self.terms(prior), evidence[None])
            draw = draw_latent(hood, terms, self.uniforms())
        for step in how.progress(range(state["steps"] if state else 0, how.num_steps)):
            found = sweep(hood, terms, draw, self.uniforms(2))
            draw, seen = found.draw, found.visits.sum(0).to(probs)
            gain = 1 / max(1, step + 1 - how.num_steps // 2)
            probs = probs + gain * (seen / seen.sum(-1, keepdim=True) - probs)
            values = emission.maximise(data, probs, values)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(gain, 0.1)
            self.ascend(prior, optimizer, draw)
            terms = LatentTerms(*self.terms(prior), self.evidence(values)[None])
            if not (terms.alpha.isfinite() & (terms.alpha > 0)).all():  # NaN would break the sweep
                raise ValueError(f"lr={how.lr} is too large: concentrations are no longer finite")
            if step + 1 == how.num_steps or (step + 1) % how.save_every == 0:
                saved.write(steps=step + 1, values=values, probs=probs, draw=tuple(draw))
        return _State(prior, values, draw, left_out(hood, terms, draw).mean().item())

    def prepared(
        self, evidence: Tensor, lr: float, turn: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.network is not None:
            network = deepcopy(self.network)
            parts: list[list[nn.Parameter]] = [[], []]
            for value in network.parameters():
                parts[value.dim() > 1].append(value)  # decay would switch off scales of attention
            decays = zip(parts, (0.0, 5e-4), strict=True)
            groups = [{"params": part, "lr": lr, "weight_decay": rate} for part, rate in decays]
            return network, torch.optim.Adam(groups)
        prior = FieldPrior.of(self.emission.num_labels, self.edge_attr).to(evidence)
        # From flat attention a fit may turn to the wrong side for good, so other starts lean.
        if lean := turn % (1 + 2 * len(prior.unit)):
            prior.scaled_weight.data[(lean - 1) // 2] = 1.0 if lean % 2 else -1.0
        # Kappa has the longest way: its logarithm may end five below where it starts.
        others = {"params": [prior.share_scores, prior.scaled_weight], "lr": lr}
        groups = [{"params": [prior.log_kappa], "lr": 3 * lr}, others]
        return prior, torch.optim.Adam(groups)

    def ascend(self, prior: nn.Module, optimizer: torch.optim.Optimizer, draw: LatentDraw) -> None:
        hood, choices = self.hood, self.hood.source[draw.edges]
        alpha, logits = without_relabel(prior.train()(hood, *self.inputs))
        found = ChosenLabels(alpha, choices, validate_args=False).log_prob(draw.labels)
        if self.edge_attr is not None or self.network is not None:
            found = found + NeighborChoice(hood, logits, validate_args=False).log_prob(choices)
        if isinstance(prior, FieldPrior):
            found = found + prior.log_prior()
        loss = -found.mean() / hood.num_nodes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def gibbs(
        self, prior: tuple[Tensor, Tensor], values: list[Values], draw: LatentDraw, num_sweeps: int
    ) -> tuple[list[Values], LatentTerms, Sweeps]:
        """Each chain with emission parameters drawn anew, and sweeps given these."""
        emission, data = self.emission, self.data
        pairs = zip(draw.labels, values, strict=True)
        values = [emission.draw(data, labels, old) for labels, old in pairs]
        terms = LatentTerms(*prior, torch.stack([self.evidence(own) for own in values]))
        return values, terms, sweep(self.hood, terms, draw, self.uniforms(num_sweeps))

    @torch.no_grad()
    def sample(self, state: _State, num_draws: int) -> HiddenField:
        prior, start, draw, score = state
        terms, values = self.terms(prior), [start] * self.num_chains
        visits, labels, draws, totals = torch.zeros((), device=self.hood.device), [], [], []
        for _ in range(num_draws):
            values, _, found = self.gibbs(terms, values, draw, 2)
            draw, visits = found.draw, visits + found.visits.sum(0)
            labels.append(draw.labels.to(torch.int16))
            totals.append(found.totals[:, -1])
            draws += values
        # A label that no sweep met is rare, not impossible.
        share = terms[1].sum((0, 1))
        visits = visits + share / share.sum() * self.allowed.exp()
        probs = visits / visits.sum(-1, keepdim=True)
        ends = Chains(draw, torch.stack(totals, 1).to(probs))
        stacked = {name: torch.stack([each[name] for each in draws]) for name in start}
        return HiddenField(
            self.hood, self.emission, deepcopy(prior), start, probs, torch.cat(labels), stacked,
            score, ends, self.edge_attr, self.known, self.inputs,
        )  # fmt: skip
