# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Which estimator, how many samples: what docs/choosing.md shows.

    python benchmarks/samples.py gradients marginals likelihood

The graph, labels and parameters are those of ``gradient_variance.py``: Cora's size, seven labels.

* ``gradients``: the noise of one step's gradient and the seconds it takes, over particles.
* ``marginals``: total variation between the posterior marginals of nodes that are not observed and
  those of many chains of collapsed Gibbs sweeps, over draws.
* ``likelihood``: estimates of log p of the observed labels, over particles.

Seconds are those of the process, on one thread.
"""

from __future__ import annotations

import time
from argparse import Namespace
from statistics import mean, median, stdev

import pyro
import torch
from torch.nn.functional import one_hot

from benchmarks.scale import gradient_variance
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm import NeighborMixture


def made(share: float, seed: int):
    """A graph, its mixture, labels, and which of them are observed, as gradient_variance.py has."""
    pyro.set_rng_seed(seed)
    given = Namespace(data_root=None, seed=seed)
    hood, y, log_alpha, logits = gradient_variance.problem(given)
    observed = torch.rand(hood.num_nodes) < share
    return hood, y, log_alpha, logits, observed


def mixture(share: float, seed: int):
    hood, y, log_alpha, logits, observed = made(share, seed)
    return NeighborMixture(hood, log_alpha.exp(), logits), y, observed


def gradients(args, results: Records) -> None:
    """The root of the total variance of one step's gradient."""
    each = {"estimator": args.estimators, "particles": args.particles}
    for key in results.missing(task="gradients", seed=args.seed, share=args.shares, **each):
        hood, *parameters, observed = made(key["share"], args.seed)
        options = Namespace(particles=key["particles"], repeats=args.repeats)
        if key["estimator"] == "reward_to_go":  # gradient_variance.py gives it five times as many
            options.repeats = max(1, args.repeats // 5)
        arguments = hood, *parameters, observed, key["estimator"], options
        gradient_variance.gradients(*arguments[:-1], Namespace(particles=2, repeats=1))  # warm
        found, seconds = timed(gradient_variance.gradients, *arguments, clock=time.process_time)
        noise = found.var(0).sum().sqrt().item()
        row = {"labelled": int(observed.sum()), "steps": len(found), "sd": noise}
        results.add(**key, **row, seconds=seconds / len(found))


def marginals(args, results: Records) -> None:
    """Errors of draws of equal and of unequal weight; the reference's own by its two halves."""
    for share in args.known:
        each = {"weighted": [False, True], "draws": args.draws}
        missing = list(results.missing(task="marginals", seed=args.seed, share=share, **each))
        if not missing:
            continue
        mix, y, observed = mixture(share, args.seed)
        rest = ~observed
        known = one_hot(y, mix.num_classes).to(mix.alpha).log()
        latents = mix.latents(known, observed)
        halves = [latents.posterior(args.chains // 2, num_sweeps=args.sweeps) for _ in range(2)]
        found = [half.marginals()[rest] for half in halves]
        truth, own = sum(found) / 2, variation(*found) / 2
        for key in missing:
            rows = [
                timed(condition, mix, y, observed, key, clock=time.process_time)
                for _ in range(args.turns)
            ]
            errors = [variation(some[rest], truth) for some, _ in rows]
            row = {"labelled": int(observed.sum()), "chains": args.chains, "sweeps": args.sweeps}
            row |= {"error": mean(errors), "error of the reference": own}
            results.add(**key, **row, seconds=median(seconds for _, seconds in rows))


def condition(mix, y, observed, key: dict):
    return mix.condition(y, observed, key["draws"], key["weighted"]).marginals()


def variation(some, others) -> float:
    """Total variation, mean over nodes."""
    return (some - others).abs().sum(-1).mean().item() / 2


def likelihood(args, results: Records) -> None:
    """Of the bound, and of sequential Monte Carlo with more and more particles."""
    each = {"share": args.known, "particles": [0, *args.likelihood_particles]}
    for key in results.missing(task="likelihood", seed=args.seed, **each):
        mix, y, observed = mixture(key["share"], args.seed)
        number = key["particles"]

        def estimate(mix=mix, y=y, observed=observed, number=number) -> float:
            if number == 0:
                return mix.elbo(y, observed).item()
            return mix.log_likelihood(y, observed, num_particles=number).item()

        rows = [timed(estimate, clock=time.process_time) for _ in range(args.turns + 1)][1:]
        values = [value for value, _ in rows]
        row = {"labelled": int(observed.sum()), "mean": mean(values), "sd": stdev(values)}
        results.add(**key, **row, turns=len(rows), seconds=median(time for _, time in rows))


def main(argv: list[str] | None = None) -> Records:
    torch.set_default_dtype(torch.double)
    return run(
        argv, __doc__, (gradients, marginals, likelihood),
        smoke={"shares": [0.02], "known": [0.02], "particles": [2], "repeats": 5, "draws": [2, 4],
               "chains": 4, "sweeps": 2, "turns": 2, "likelihood_particles": [2, 4]},
        shares=[0.05, 1.0], estimators=["reward_to_go", "one_step_credit", "no_score"],
        known=[0.05, 0.5], particles=[1, 2, 4, 8, 16, 32], repeats=100, turns=32, seed=0,
        draws=[1, 4, 16, 64, 256, 1024], chains=2048, sweeps=20,
        likelihood_particles=[1, 4, 16, 64, 256, 1024], results=RESULTS / "samples.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
