# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label fields that only a Normal emission shows: how each model is fitted and scored."""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Categorical, Normal
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import ClippedAdam
from torch import Size, Tensor, nn
from torch.nn.functional import one_hot

from pyro_nmm import ChosenLabels, EvidenceConditional, NeighborChoice, sources
from pyro_nmm.guides import evidence_guide, mean_field
from pyro_nmm.models import PairwiseMRF, annealed_log_normalizer, grid_edges, nmm, potts
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms
from pyro_nmm.ops.gibbs import sweep

CLASSES = 3


class Found(NamedTuple):
    """What a fitted model says; numbers in nats, of the whole image."""

    means: Tensor
    marginals: Tensor
    bound: float
    log_evidence: float
    error: float
    settings: dict


def first_guess(w: Tensor) -> tuple[Tensor, Tensor]:
    """Means and width of the emission: every method starts from these."""
    share = (torch.arange(CLASSES).to(w) + 0.5) / CLASSES
    return w.quantile(share), 0.6 * w.std()


def log_likelihoods(w: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """``(N, C)``."""
    return Normal(means, scale).log_prob(w[:, None])


def scores(y: Tensor, found: Found) -> dict:
    """Against the true labels, which are in the order of their means, as the fitted ones are."""
    probs = found.marginals[:, found.means.argsort()]
    own = probs.gather(1, y[:, None]).clamp(min=1e-4)  # a chain may never meet a rare label
    hit = (probs.argmax(1) == y).double().mean().item()
    brier = (probs - one_hot(y, CLASSES)).square().sum(1).mean().item()
    return {"Brier": brier, "accuracy": hit, "NLL": -own.log().mean().item()}


def strided(size: int, stride: int, radius: int):
    """Pixels and their sources, and how far each edge goes, squared and in strides."""
    hood = sources.grid(size, size, stride, radius)
    number = -(-size // stride)
    first = (size - 1 - stride * (number - 1)) // 2
    place = first + stride * torch.stack([hood.source // number, hood.source % number])
    pixel = torch.stack([hood.target // size, hood.target % size])
    return hood, (place - pixel).square().sum(0) / stride**2


class HiddenField(nn.Module):
    """
    An NMM of strided sources over an image ``w``: three means, a width, one concentration for all
    labels and sources, and one rate at which attention falls with the distance.
    """

    def __init__(self, w: Tensor, size: int, stride: int, radius: int) -> None:
        super().__init__()
        self.w, self.settings = w, {"stride": stride, "radius": radius}
        self.hood, self.distance = strided(size, stride, radius)
        means, scale = first_guess(w)
        self.means, self.log_scale = nn.Parameter(means), nn.Parameter(scale.log())
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))
        self.log_rate = nn.Parameter(torch.tensor(0.0))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        alpha = self.log_alpha.exp().expand(self.hood.num_sources, CLASSES)
        evidence = log_likelihoods(self.w, self.means, self.log_scale.exp())
        return alpha, -self.log_rate.exp() * self.distance, evidence

    def model(self) -> None:
        pyro.module("field", self)
        alpha, logits, _ = self.parts()
        y = nmm(self.hood, alpha, logits, collapsed=True)
        emission = Normal(self.means[y], self.log_scale.exp())
        pyro.sample("w", emission.to_event(1), obs=self.w)

    def guide(self) -> None:
        pyro.module("field", self)
        evidence_guide(self.hood, *self.parts(), collapsed=True)


def fit_by_bound(field: HiddenField, num_steps: int) -> None:
    """SVI on the sequential draw's bound."""
    pyro.clear_param_store()
    adam = ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / num_steps)})
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(field.model, field.guide, adam, elbo)
    for _ in range(num_steps):
        svi.step()


def fit_by_sweeps(field: HiddenField, num_steps: int, num_chains: int = 4) -> None:
    """
    Stochastic maximum likelihood: the gradient of log p(w) is the posterior mean of that of
    log p(w, c, u), here over chains that take one Gibbs sweep between two steps.
    """
    hood, nodes = field.hood, torch.arange(field.hood.num_nodes)
    adam = torch.optim.Adam(field.parameters(), 0.05)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.1 ** (1 / num_steps))
    draw = prior_draw(field, num_chains)
    for _ in range(num_steps):
        alpha, logits, evidence = field.parts()
        draw = swept(hood, alpha, logits, evidence, draw)
        c = hood.source[draw.edges]
        joint = ChosenLabels(alpha, c).log_prob(draw.labels) + evidence[nodes, draw.labels].sum(-1)
        joint = joint + NeighborChoice(hood, logits).log_prob(c)
        adam.zero_grad()
        (-joint.mean()).backward()
        adam.step()
        decay.step()


@torch.no_grad()
def prior_draw(field: HiddenField, num_chains: int) -> LatentDraw:
    alpha, logits, _ = field.parts()
    c = NeighborChoice(field.hood, logits).sample(Size([num_chains]))
    return LatentDraw(field.hood.find(c), ChosenLabels(alpha, c).sample())


@torch.no_grad()
def swept(hood, alpha: Tensor, logits: Tensor, evidence: Tensor, draw: LatentDraw) -> LatentDraw:
    terms = LatentTerms(hood.log_softmax(logits)[None], alpha[None], evidence[None])
    uniforms = torch.rand(1, *draw.edges.shape, dtype=torch.double)
    return sweep(hood, terms, draw, uniforms).draw


@torch.no_grad()
def annealed_log_evidence(field: HiddenField, num_steps: int, num_chains: int = 8):
    """
    log p(w) by annealed importance sampling as :func:`~pyro_nmm.models.annealed_log_normalizer`
    has it: from the prior, with a Gibbs sweep for every power of the likelihood. Too low on
    average. With its standard error, of the chains' weights, which says little once a chain holds
    them all; and the standard deviation of their logarithms, which shows that.
    """
    alpha, logits, evidence = field.parts()
    draw, nodes = prior_draw(field, num_chains), torch.arange(field.hood.num_nodes)
    weights, before = torch.zeros(num_chains, dtype=torch.double), 0.0
    for step in range(1, num_steps + 1):
        power = (step / num_steps) ** 2
        found = evidence[nodes, draw.labels].double().sum(-1)
        weights, before = weights + (power - before) * found, power
        draw = swept(field.hood, alpha, logits, power * evidence, draw)
    return mean_weight(weights)


def mean_weight(weights: Tensor) -> tuple[float, float, float]:
    total = weights.logsumexp(0) - math.log(len(weights))
    error = (weights - total).exp().std() / len(weights) ** 0.5
    return total.item(), error.item(), weights.std().item()


@torch.no_grad()
def found_by(field: HiddenField, num_anneal: int, num_sweeps: int) -> Found:
    q = EvidenceConditional(field.hood, *field.parts())
    bound = q.log_evidence(q.sample(Size([64]))).sum(-1).mean().item()
    posterior = q.posterior(num_samples=8, num_sweeps=num_sweeps)
    more = {"alpha": field.log_alpha.exp().item(), "rate": field.log_rate.exp().item(),
            "sd": field.log_scale.exp().item(),
            "Gelman-Rubin": posterior.chains.gelman_rubin().max().item()}  # fmt: skip
    total, error, apart = annealed_log_evidence(field, num_anneal)
    settings = field.settings | more | {"sd of log-weights": apart}
    return Found(field.means, posterior.marginals(), bound, total, error, settings)


def independent(w: Tensor, num_steps: int = 200) -> Found:
    """The mixture of three Normal distributions with equal weights, by EM: no graph."""
    means, scale = first_guess(w)
    for _ in range(num_steps):
        probs = log_likelihoods(w, means, scale).softmax(-1)
        means, scale = emission(w, probs)
    log_joint = log_likelihoods(w, means, scale) - math.log(CLASSES)
    total = log_joint.logsumexp(-1).double().sum().item()
    return Found(means, log_joint.softmax(-1), total, total, 0.0, {"sd": scale.item()})


def emission(w: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """The means and the width of highest likelihood, given distributions of labels."""
    means = (probs * w[:, None]).sum(0) / probs.sum(0)
    return means, (probs * (w[:, None] - means).square()).sum(1).mean().sqrt()


def log_normalizer(size: int, coupling: float, num_steps: int) -> tuple[float, float]:
    """
    Of a Potts field without evidence, and its standard error: annealed from equal labels and from
    mostly one label, whichever is more, because either is too low on average.
    """
    field = potts(grid_edges(size, size), coupling, torch.zeros(size * size, CLASSES))
    starts = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.9, 0.05, 0.05]])
    found = [
        annealed_log_normalizer(field, start.expand_as(field.unary), num_steps, 8)
        for start in starts
    ]
    value, error = max(found)
    return value.item(), error.item()


@torch.no_grad()
def fit_potts(w: Tensor, size: int, log_normalizers: dict, num_rounds: int):
    """
    Variational EM: for each coupling the emission is fitted to the mean field's marginals, in
    turns, and the coupling is that of the highest bound.

    :param log_normalizers: of the couplings, without evidence.
    :return: the bound, the coupling, the mean field, means, width, and the field.
    """
    edges, trials, warm = grid_edges(size, size), [], None
    means, scale = first_guess(w)
    for coupling, log_z in log_normalizers.items():
        for last in range(num_rounds + 1):
            field = potts(edges, coupling, log_likelihoods(w, means, scale))
            options = {"num_random": 2 * (last == num_rounds), "num_sweeps": 200}
            q = mean_field(field, warm, tolerance=1e-4, **options)
            warm = q.marginals[None]
            if last < num_rounds:
                means, scale = emission(w, q.marginals)
        trials.append((-q.losses[0].item() - log_z, coupling, q.marginals, means, scale, field))
    return max(trials, key=lambda trial: trial[0])


def found_by_potts(w, size: int, log_normalizers: dict, args) -> dict[str, Found]:
    """The mean field of the fitted Potts field, and Gibbs sampling of the same."""
    fitted = fit_potts(w, size, log_normalizers, args.rounds)
    bound, coupling, marginals, means, scale, field = fitted
    total, error = (v.item() for v in annealed_log_normalizer(field, marginals, args.anneal, 8))
    settings = {"coupling": coupling, "sd": scale.item()}
    both = total - log_normalizers[coupling], error, settings
    start = Categorical(marginals).sample(Size([8]))
    sampled = gibbs(field, start, args.sweeps // 2)[1]
    return {
        "Potts, mean field": Found(means, marginals, bound, *both),
        "Potts, Gibbs": Found(means, sampled, bound, *both),
    }


@torch.no_grad()
def gibbs(field: PairwiseMRF, y: Tensor, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """Labels ``(B, N)`` after so many sweeps, and how often each was met in the second half."""
    classes, colors, met = torch.eye(field.num_classes), field.colors(), 0
    for number in range(num_sweeps):
        for color in colors:
            logits = field.local_logits(classes[y]).index_select(1, color)
            y = y.index_copy(1, color, Categorical(logits=logits).sample())
        met = met + classes[y].mean(0) * (number >= num_sweeps // 2)
    return y, met / met.sum(-1, keepdim=True)
