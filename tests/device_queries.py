# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Calls to a device and waits for it, counted on the device that tests simulate."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median

import pyro
import torch
from cost import Launches
from networkx import barabasi_albert_graph
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch_geometric.nn import GCN

from benchmarks.scale.speed import step_without_value
from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM, Chains
from pyro_nmm.models import NMMNetwork, StackedNMM

#: Nodes, labels, steps of a fit, and chains.
SIZE, CLASSES, STEPS, CHAINS = 2000, 7, 4, 4
#: Queries that are asked once before, because networks and mixtures keep what they computed.
WARM = "network", "step", "marginals"
#: With chains in Pyro's loss, which waits for its value three times, and without a value.
LOSSES = {
    "step of the bound": (TraceGraph_ELBO, "reward_to_go"),
    "step with chains": (Trace_ELBO, "chains"),
}


def queries(at: str, num_sweeps: int = 1) -> dict[str, Callable[[], object]]:
    """Queries of a graph with hubs, by the names of the table."""
    edges = torch.tensor([*barabasi_albert_graph(SIZE, 3, seed=0).edges]).T
    hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), SIZE)
    alpha, logits = torch.randn(SIZE, CLASSES).exp(), torch.randn(hood.num_edges)
    more = torch.randn(SIZE, CLASSES), torch.randn(SIZE, 20), torch.rand(SIZE)
    hood, alpha, logits, scores, x, part = (t.to(at) for t in (hood, alpha, logits, *more))
    mix, places = NeighborMixture(hood, alpha, logits), torch.stack([hood.source, hood.target])
    y, known, some = mix.sample(), part < 0.1, part > 0.95
    posterior = mix.condition(y, known, num_samples=64)
    observed, latent = mix.choices(y), EvidenceConditional(hood, alpha, logits, scores)
    states, both = observed.sample((CHAINS,)), latent.sample((CHAINS,))

    def network() -> NMMNetwork:
        widths = CLASSES, 16
        return NMMNetwork(*(GCN(20, 16, 2, w, cached=True) for w in widths), num_classes=CLASSES)

    def step(loss: type, estimator: str) -> Callable[[], object]:
        how = Chains() if estimator == "chains" else estimator
        pair = AmortizedNMM(hood, network().to(at), estimator=how, name=estimator)
        elbo = loss(CHAINS, vectorize_particles=True, max_plate_nesting=0)
        return partial(elbo.loss_and_grads, pair.model, pair.guide, x, places, y=y)

    alone = network().to(at)
    chains = Chains(num_sweeps)
    pair = AmortizedNMM(hood, network().to(at), estimator=chains, name="captured")
    static = partial(step_without_value, pair.model, pair.guide, CHAINS, x, places, y=y)
    return {
        "networks and edge scores": lambda: sum(t.sum() for t in alone(hood, x, places)).backward(),
        **{name: step(*how) for name, how in LOSSES.items()},
        "step with chains, no value of the loss": static,
        "draw of q(c given y)": partial(mix.choices(y).sample, (CHAINS,)),
        "draw of q(c, u given w)": partial(latent.sample, (CHAINS,)),
        "sweep, observed labels": partial(observed.sweep, states),
        "sweep, latent labels": partial(latent.sweep, both),
        "eight sweeps, observed labels": partial(observed.sweep, states, 8),
        "`sample`": mix.sample,
        "`marginals`": lambda: NeighborMixture(hood, alpha, logits).marginals(),
        "`condition`, 64 samples": partial(mix.condition, y, known, 64),
        "`marginals` of this posterior": posterior.marginals,
        "`StackedNMM.fit`": partial(StackedNMM(CLASSES).fit, hood, scores, y, known, some),
    }


def counted(query: Callable[[], object]) -> tuple[int, int]:
    """Calls and waits."""
    with Launches() as found:
        query()
    return found.calls, found.waits


def fit_counts(fit: Callable[..., object]) -> Iterator[tuple[str, int, int]]:
    """Of a step of a fit, and of all else that it does."""
    marks = []

    def progress(steps: range) -> Iterator[int]:
        for step in steps:
            marks.append((found.calls, found.waits))
            yield step
        marks.append((found.calls, found.waits))

    with Launches() as found:
        fit(num_steps=STEPS, progress=progress)
    steps = [[b - a for a, b in pairwise(sums)] for sums in zip(*marks, strict=True)]
    yield "step of `StackedNMM.fit`", *(int(median(step)) for step in steps)
    rest = (found.calls, found.waits), marks[0], marks[-1]
    yield "`StackedNMM.fit`, all else", *(all - b + a for all, a, b in zip(*rest, strict=True))


def counts(at: str) -> Iterator[tuple[str, int, int]]:
    """Of every query: its name, calls and waits."""
    pyro.enable_validation(False)
    pyro.set_rng_seed(0)
    for name, query in queries(at).items():
        if "fit" in name:
            yield from fit_counts(query)
            continue
        if any(word in name for word in WARM):
            query()
        yield name, *counted(query)
