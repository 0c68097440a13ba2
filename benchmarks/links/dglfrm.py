# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""DGLFRM with its original guide, or with the NMM's: fits, scores and costs."""

from functools import partial
from statistics import mean

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO

from benchmarks.links.protocol import Problem
from benchmarks.shared.timing import median_cost, timed
from pyro_nmm import NeighborChoice, Neighborhood
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.models import DGLFRM

GUIDES = ("original", "nmm")
DRAWS = 100  #: of the memberships that predict links


def build(problem: Problem, guide: str, settings: dict, seed: int) -> DGLFRMGuide:
    """A guide and its model. Both guides start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    data, options = problem.data, dict(settings)
    of_model = {name: options.pop(name) for name in ("num_communities", "concentration")}
    of_model["hidden"] = tuple(options.pop("decoder"))
    of_model["num_features"] = data.num_features if data.has_features else 0
    target = DGLFRM(data.num_nodes, **of_model, name=f"{guide} model")
    hood = Neighborhood(problem.split.train, data.num_nodes) if guide == "nmm" else None
    return DGLFRMGuide(target, data.num_features, hood, **options, name=f"{guide} guide")


def fit(args, problem: Problem, guide: str, settings: dict, seed: int) -> tuple[DGLFRMGuide, dict]:
    """The fitted guide, and what its row says of the fit. Losses are in nats per pair of nodes."""
    pair, data, split = build(problem, guide, settings, seed), problem.data, problem.split
    curve, seconds = timed(fit_links, pair, split, data.x, num_steps=args.num_steps or 500)
    means = [mean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
    inputs = pair.eval().model, pair.guide, split.train, data.x, split.held_out
    with torch.no_grad():
        loss = mean(TraceMeanField_ELBO().loss(*inputs) for _ in range(20)) / data.num_nodes**2
    row = {"settings": settings, "loss in training": mean(means[-5:]), "loss": loss}
    return pair, row | {"seconds": seconds / len(curve), "curve": means}


def measure(args, problem: Problem, guide: str, settings: dict, seed: int, parts, draws=DRAWS):
    """The row of a fit, with the scores of ``parts``."""
    pair, row = fit(args, problem, guide, settings, seed)
    for part in parts:
        known = problem.pairs(part), problem.split.train, problem.data.x
        row[part] = problem.scores(part, pair.link_logits(*known, draws))
    return row


@torch.no_grad()
def exchanged(pair: DGLFRMGuide, problem: Problem) -> dict[str, float]:
    """Average precision of a fitted original guide if nodes have other nodes' memberships."""
    inputs, tested = (problem.split.train, problem.data.x), problem.pairs("test")
    hood = Neighborhood(problem.split.train, problem.data.num_nodes)
    uniform = NeighborChoice(hood, torch.zeros(hood.num_edges))
    donors = {"own": partial(torch.arange, hood.num_nodes), "a neighbour's": uniform.sample}
    donors["anyone's"] = partial(torch.randperm, hood.num_nodes)
    found = {}
    for name, draw in donors.items():
        logits = torch.zeros(tested.shape[1])
        for _ in range(DRAWS):
            sites = poutine.trace(pair.guide).get_trace(*inputs).nodes
            members = (sites["s"]["value"][draw()] > 0) * sites["r"]["value"]
            logits += pair.target.link_logits(members, tested)
        found[name] = problem.scores("test", logits)["AP"]
    return found


def cost(problem: Problem, settings: dict) -> dict:
    """Seconds of a step with either guide, in turn, and the process's memory."""

    def stepper(guide: str):
        pair = build(problem, guide, settings, 0)
        # The NMM compares neighbours in every other step, at random.
        return lambda: timed(fit_links, pair, problem.split, problem.data.x, num_steps=10)[1] / 10

    makers = {guide: partial(stepper, guide) for guide in GUIDES}
    return {"settings": settings} | median_cost(makers, repeats=8)
