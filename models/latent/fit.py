# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.models.latent.field import (
    Emission,
    FieldPrior,
    HiddenField,
    Values,
    check_edge_attr,
    check_prior,
)
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, draw_latent
from pyro_nmm.ops.gibbs import Chains, left_out, sweep
from pyro_nmm.validation import check_all_rows, check_integers, check_positive, options_of


@dataclass(frozen=True)
class FieldRun:
    """
    Options of :func:`fit_field`.

    :param int num_starts: fits, of which one is kept: the first with flat attention, others along a
        feature of the edges or against it. One is often enough if answers name labels.
    :param int num_steps: of expectation maximisation. Take more if :attr:`HiddenField.chains`
        disagree, or if the score still rises.
    :param int num_chains: of Gibbs sweeps.
    :param int num_draws: of every chain, in the end.
    :param float lr: of the prior's parameters.
    """

    num_starts: int = 5
    num_steps: int = 120
    num_chains: int = 4
    num_draws: int = 50
    lr: float = 0.1

    def __post_init__(self) -> None:
        numbers = {k: v for k, v in vars(self).items() if k.startswith("num_")}
        check_integers(1, **numbers)
        check_positive(lr=self.lr)


@dataclass(frozen=True)
class FieldSampling:
    """
    Options of :func:`sample_field`.

    :param int num_chains: of Gibbs sweeps.
    :param int num_draws: of every chain.
    :param int num_sweeps: before the first draw.
    """

    num_chains: int = 4
    num_draws: int = 50
    num_sweeps: int = 20

    def __post_init__(self) -> None:
        check_integers(1, **vars(self))


def fit_field(
    emission: Emission,
    hood: Neighborhood,
    data: Any,
    edge_attr: Tensor | None = None,
    **options: Any,
) -> HiddenField:
    r"""
    Fit a field of latent labels, with all parameters, to observations.

    First by expectation maximisation [1]. The E-step continues chains of collapsed Gibbs sweeps
    and averages the labels that they visit over the second half of the steps [2]. The M-step is the
    emission's own, and a step of Adam on :math:`\log p(c, u)` for the prior. Of several starts the
    one with the best :attr:`HiddenField.score` is kept. Then each chain draws emission parameters
    of its own after every sweep, so that labels and these parameters come from their joint
    posterior, given the parameters of the prior.

    >>> from pyro_nmm import sources
    >>> from pyro_nmm.models import NormalEmission
    >>> hood = sources.grid(16, 16, stride=4)
    >>> truth = (torch.arange(256) % 16 >= 8).long()
    >>> x = 2.0 * truth[:, None] + torch.randn(256, 1)
    >>> field = fit_field(NormalEmission(num_labels=2), hood, x)
    >>> right = (field.predict() == truth).float().mean()
    >>> bool(max(right, 1 - right) > 0.9)  # labels have no names
    True

    [1] A. P. Dempster, N. M. Laird, D. B. Rubin (1977) "Maximum Likelihood from Incomplete Data via
    the EM Algorithm", Journal of the Royal Statistical Society B 39.
    [2] Bernard Delyon, Marc Lavielle, Eric Moulines (1999) "Convergence of a stochastic
    approximation version of the EM algorithm", Annals of Statistics 27,
    https://doi.org/10.1214/aos/1018031103.

    :param Emission emission: what is observed of a label.
    :param Neighborhood hood: the neighbourhoods; see :mod:`pyro_nmm.sources`.
    :param data: what is observed of ``N`` nodes.
    :param Tensor edge_attr: ``(num_edges, F)`` or ``(num_edges,)`` features of the edges, such as
        hops, of which attention is a softmax of a learned weighted sum; default flat attention.
    :param options: of :class:`~pyro_nmm.models.latent.FieldRun`.
    :return: the fitted field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    """
    if not isinstance(hood, Neighborhood):
        raise ValueError(
            f"hood must be a Neighborhood, got {type(hood)}: functions of pyro_nmm.sources may "
            f"return a pair, of which it is the first"
        )
    check_all_rows(hood)
    how = options_of(fit_field, FieldRun, options)
    data, edge_attr = emission.check(hood, data), check_edge_attr(hood, edge_attr)
    fit = _Fit(emission, hood, data, edge_attr, how.num_chains)
    found = (fit.run(how.num_steps, how.lr, turn) for turn in range(how.num_starts))
    best = max(found, key=lambda state: state.score)
    return fit.sample(best, how.num_draws)


@torch.no_grad()
def sample_field(
    emission: Emission,
    hood: Neighborhood,
    data: Any,
    prior: FieldPrior,
    values: Values,
    edge_attr: Tensor | None = None,
    **options: Any,
) -> HiddenField:
    r"""
    A field of known parameters, as of :class:`~pyro_nmm.guides.HiddenFieldGuide`. Chains draw

    .. math::

        c, u \sim p(c, u \mid w, \theta), \qquad \theta \sim p(\theta \mid u, w)

    in turn, the labels by a sweep of collapsed Gibbs sampling.

    >>> from pyro_nmm.models import NormalEmission
    >>> hood, x = Neighborhood.grid(1, 4), torch.tensor([[0.0], [0.1], [2.0], [2.1]])
    >>> values = {"mean": torch.tensor([[0.0], [2.0]]), "variance": torch.ones(2, 1)}
    >>> field = sample_field(NormalEmission(2), hood, x, FieldPrior(2), values)
    >>> field.samples.shape, field.draws["mean"].shape
    (torch.Size([200, 4]), torch.Size([200, 2, 1]))

    :param Emission emission: what is observed of a label.
    :param Neighborhood hood: the neighbourhoods.
    :param data: what is observed of ``N`` nodes.
    :param FieldPrior prior: the prior's numbers, which stay.
    :param dict values: the emission's parameters that chains start with.
    :param Tensor edge_attr: ``(num_edges, F)`` features of the edges.
    :param options: of :class:`~pyro_nmm.models.latent.FieldSampling`.
    :return: the field. Cost: :math:`O(E C)` a sweep and chain, and the emission's.
    """
    check_all_rows(hood)
    how = options_of(sample_field, FieldSampling, options)
    data, edge_attr = emission.check(hood, data), check_edge_attr(hood, edge_attr)
    check_prior(prior, emission.num_labels, edge_attr)
    fit = _Fit(emission, hood, data, edge_attr, how.num_chains)
    terms = fit.terms(prior, emission.log_prob(values, data)[None])
    draw = draw_latent(hood, terms, fit.uniforms())
    for _ in range(how.num_sweeps):
        draw = sweep(hood, terms, draw, fit.uniforms(1)).draw
    score = left_out(hood, terms, draw).mean().item()
    return fit.sample(_State(prior, values, draw, score), how.num_draws)


class _State(NamedTuple):
    prior: FieldPrior
    values: Values
    draw: LatentDraw
    score: float


class _Fit:
    """What does not change during a fit."""

    def __init__(
        self,
        emission: Emission,
        hood: Neighborhood,
        data: Any,
        edge_attr: Tensor | None,
        num_chains: int,
    ) -> None:
        self.emission, self.hood, self.data = emission, hood, data
        self.edge_attr, self.size = edge_attr, (num_chains, hood.num_nodes)

    def terms(self, prior: FieldPrior, evidence: Tensor) -> LatentTerms:
        """With evidence ``(N, C)``, or ``(num_chains, N, C)``."""
        with torch.no_grad():
            alpha, logits = prior(self.hood, self.edge_attr)
            return LatentTerms(self.hood.log_softmax(logits)[None], alpha[None], evidence)

    def uniforms(self, *shape: int) -> Tensor:
        return torch.rand(*shape, *self.size, dtype=torch.double, device=self.hood.device)

    def run(self, num_steps: int, lr: float, turn: int) -> _State:
        emission, hood, data = self.emission, self.hood, self.data
        values = emission.start(data, hood)
        evidence = emission.log_prob(values, data)
        prior = FieldPrior.of(emission.num_labels, self.edge_attr).to(evidence)
        # From flat attention a fit may turn to the wrong side for good, so that other starts lean
        # along a feature, or against it.
        if lean := turn % (1 + 2 * len(prior.unit)):
            prior.scaled_weight.data[(lean - 1) // 2] = 1.0 if lean % 2 else -1.0
        # Kappa has the longest way: its logarithm may end five below where it starts.
        others = [p for p in prior.parameters() if p is not prior.log_kappa]
        rates = 3 * lr, lr
        optimizer = torch.optim.Adam([{"params": [prior.log_kappa]}, {"params": others}])
        draw, probs = None, torch.zeros_like(evidence)
        for step in range(num_steps):
            terms = self.terms(prior, evidence[None])
            draw = draw_latent(hood, terms, self.uniforms()) if draw is None else draw
            found = sweep(hood, terms, draw, self.uniforms(2))
            draw, seen = found.draw, found.visits.sum(0).to(probs)
            gain = 1 / max(1, step + 1 - num_steps // 2)
            probs = probs + gain * (seen / seen.sum(-1, keepdim=True) - probs)
            values = emission.maximise(data, probs, values)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(gain, 0.1)
            self.ascend(prior, optimizer, draw)
            evidence = emission.log_prob(values, data)
        assert draw is not None
        terms = self.terms(prior, evidence[None])
        return _State(prior, values, draw, left_out(hood, terms, draw).mean().item())

    def ascend(self, prior: FieldPrior, optimizer: torch.optim.Optimizer, draw: LatentDraw) -> None:
        """A step of the prior's numbers towards the labels and choices of the chains."""
        hood, choices = self.hood, self.hood.source[draw.edges]
        alpha, logits = prior(hood, self.edge_attr)
        found = ChosenLabels(alpha, choices, validate_args=False).log_prob(draw.labels)
        if self.edge_attr is not None:
            found = found + NeighborChoice(hood, logits, validate_args=False).log_prob(choices)
        loss = -(found.mean() + prior.log_prior()) / hood.num_nodes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def sample(self, state: _State, num_draws: int) -> HiddenField:
        """Every chain with emission parameters of its own, from where it stands."""
        emission, hood, data = self.emission, self.hood, self.data
        prior, start, draw, score = state
        values = [start] * self.size[0]
        visits, labels, draws, totals = torch.zeros((), device=hood.device), [], [], []
        for _ in range(num_draws):
            values = [
                emission.draw(data, own, old) for own, old in zip(draw.labels, values, strict=True)
            ]
            evidence = torch.stack([emission.log_prob(own, data) for own in values])
            found = sweep(hood, self.terms(prior, evidence), draw, self.uniforms(2))
            draw, visits = found.draw, visits + found.visits.sum(0)
            labels.append(draw.labels.to(torch.int16))
            totals.append(found.totals[:, -1])
            draws += values
        # A label that no sweep met is rare, not impossible.
        visits = visits + prior.share_scores.softmax(0)
        probs = visits / visits.sum(-1, keepdim=True)
        ends = Chains(draw, torch.stack(totals, 1).to(probs))
        stacked = {name: torch.stack([each[name] for each in draws]) for name in start}
        return HiddenField(
            hood, emission, deepcopy(prior), start, probs, torch.cat(labels), stacked, score, ends,
            self.edge_attr,
        )  # fmt: skip
