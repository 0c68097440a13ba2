# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noise of the gradient and errors of sampled estimates, on a graph of Cora's size."""

from __future__ import annotations

import time
from functools import cache, partial
from statistics import mean, median, stdev

import pyro
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.scale.speed import ESTIMATORS, observed_step
from benchmarks.shared.records import Records
from benchmarks.shared.timing import citation_like, timed
from pyro_nmm import Neighborhood, NeighborMixture

CLASSES, CHAINS, SWEEPS = 7, 2048, 20
#: How many times as many steps: the score term is a difference of noisy means.
MORE = {"reward_to_go": 5}
cpu_timed = partial(timed, clock=time.process_time)


def problem(share: float) -> tuple[NeighborMixture, Tensor, Tensor, Tensor]:
    """A mixture away from the one that made the labels; labels, observed nodes, and log alpha."""
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.double)  # of the graph's random numbers
    edge_index = citation_like(2708, 5278)
    torch.set_default_dtype(torch.float)
    hood = Neighborhood(edge_index, int(edge_index.max()) + 1)
    logits = torch.randn(hood.num_edges, dtype=torch.double)
    alpha = torch.randn(hood.num_nodes, CLASSES, dtype=torch.double).mul(1.5).exp()
    y = NeighborMixture(hood, alpha, logits).sample()
    log_alpha = alpha.log() + 0.3 * torch.randn_like(alpha)
    mix = NeighborMixture(hood, log_alpha.exp(), logits + 0.5 * torch.randn_like(logits))
    return mix, y, torch.rand(len(y), dtype=torch.double) < share, log_alpha


def gradients_of(given: tuple, estimator: str, particles: int, steps: int) -> Tensor:
    """``(steps, P)`` gradients of the loss."""
    mix, y, observed, log_alpha = given
    found = []
    for _ in range(steps):
        a, b = log_alpha.clone().requires_grad_(), mix.logits.clone().requires_grad_()
        observed_step((mix.hood, a.exp(), b, y, observed), particles, estimator)
        found.append(torch.cat([a.grad.flatten(), b.grad]))
    return torch.stack(found)


def summary(found: Tensor, observed: Tensor) -> dict:
    """``sd`` is the root of the total variance of one step's gradient."""
    noise = found.var(0).sum().sqrt().item()
    return {"labelled": int(observed.sum()), "steps": len(found), "sd": noise}


def score_share(unbiased: Tensor, biased: Tensor, direct: Tensor) -> dict[str, float]:
    """Share of the score term, ``unbiased`` minus ``direct``, that ``biased`` has; its error."""
    # The first half of the steps gives the term's direction: its noise must not look like a share.
    half = len(direct) // 2
    direction = biased[:half].mean(0) - direct[:half].mean(0)
    parts = biased[half:] @ direction, unbiased @ direction, direct[half:] @ direction
    above, truth, base = (part.mean() for part in parts)
    share = (above - base) / (truth - base)
    above, truth_error, base_error = (part.var() / len(part) for part in parts)
    variance = above + share**2 * truth_error + (1 - share) ** 2 * base_error
    error = variance.sqrt() / (truth - base).abs()
    return {"score": share.item(), "score error": error.item()}


def variance(args, results: Records) -> None:
    """Mean and noise of each estimator's gradient."""
    known = {"graph": "of Cora's size", "particles": 4, "repeats": args.repeats, "seed": 0}
    for key in results.missing(**known, share=args.shares):
        given, found = problem(key["share"]), {}
        for name in ESTIMATORS:
            found[name] = gradients_of(given, name, 4, args.repeats * MORE.get(name, 1))
        share = score_share(*[found[name] for name in ESTIMATORS[1:]])
        for name, steps in found.items():
            row = {"estimator": name, "mean": steps.mean(0).norm().item()}
            row |= share if name == "one_step_credit" else {}
            results.add(**key, **row, **summary(steps, given[2]))


def gradients(args, results: Records) -> None:
    """Noise and seconds of a step, over particles."""
    each = {"share": args.shares, "estimator": ESTIMATORS[1:], "particles": args.samples}
    for key in results.missing(task="gradients", seed=0, **each):
        given, name = problem(key["share"]), key["estimator"]
        gradients_of(given, name, 2, MORE.get(name, 1))  # warms up
        found, seconds = cpu_timed(gradients_of, given, name, key["particles"], args.repeats)
        results.add(**key, **summary(found, given[2]), seconds=seconds / args.repeats)


@cache
def reference(share: float) -> tuple[NeighborMixture, Tensor, Tensor, list[Tensor]]:
    """A mixture, labels, observed nodes, and marginals of the others by two halves of chains."""
    mix, y, observed, _ = problem(share)
    latents = mix.latents(one_hot(y, CLASSES).to(mix.alpha).log(), observed)
    halves = [latents.posterior(CHAINS // 2, num_sweeps=SWEEPS) for _ in range(2)]
    return mix, y, observed, [half.marginals()[~observed] for half in halves]


def variation(some: Tensor, others: Tensor) -> float:
    """Total variation, mean over nodes."""
    return (some - others).abs().sum(-1).mean().item() / 2


def marginals(args, results: Records) -> None:
    """Errors of sampled posterior marginals of unobserved nodes, over draws."""
    each = {"share": args.shares, "weighted": [False, True], "draws": args.samples}
    for key in results.missing(task="marginals", seed=0, **each):
        mix, y, observed, halves = reference(key["share"])
        how = mix, y, observed, key["draws"], key["weighted"]
        turns = [cpu_timed(conditioned, *how) for _ in range(args.repeats)]
        row = {"labelled": int(observed.sum()), "chains": CHAINS, "sweeps": SWEEPS}
        row["error"] = mean(variation(found[~observed], sum(halves) / 2) for found, _ in turns)
        row["error of the reference"] = variation(*halves) / 2
        results.add(**key, **row, seconds=median(seconds for _, seconds in turns))


def conditioned(mix: NeighborMixture, *how) -> Tensor:
    return mix.condition(*how).marginals()


def likelihood(args, results: Records) -> None:
    """Estimates of log p by sequential Monte Carlo; without particles, the bound."""
    each = {"share": args.shares, "particles": [0, *args.samples]}
    for key in results.missing(task="likelihood", seed=0, **each):
        mix, *given, _ = problem(key["share"])
        estimate = partial(mix.elbo, *given)
        if key["particles"]:
            estimate = partial(mix.log_likelihood, *given, num_particles=key["particles"])
        turns = [cpu_timed(estimate) for _ in range(args.repeats + 1)][1:]
        values, seconds = [value.item() for value, _ in turns], median(time for _, time in turns)
        row = {"labelled": int(given[1].sum()), "turns": args.repeats, "seconds": seconds}
        results.add(**key, **row, mean=mean(values), sd=stdev(values))
