# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Seconds of a draw of q(c|y), and of a step of the bound: order, draw, evaluation, gradient."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.nn import GCN

from benchmarks.shared.records import Records
from benchmarks.shared.timing import citation_like, in_a_process, in_turn, peak_memory, timed
from pyro_nmm import Neighborhood, OrderedConditional, backend
from pyro_nmm.guides import evidence_guide, ordered_guide
from pyro_nmm.models import nmm

ESTIMATORS = ["reinforce", "reward_to_go", "one_step_credit", "no_score"]
#: Nodes, links and labels.
MEDIUM, PUBMED = (20_000, 50_000, 3), (19_717, 44_324, 7)


def seconds(repeats: int, **functions: Callable) -> dict[str, float]:
    """Medians of functions that take turns, after one round to warm up."""
    # On one thread, other work on the machine does not count.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    turns = {name: lambda f=f: timed(f, clock=clock)[1] for name, f in functions.items()}
    return {name: median(times[1:]) for name, times in in_turn(turns, repeats + 1).items()}


def problem(num_nodes: int, num_links: int, num_classes: int) -> tuple:
    """Fields of rows; neighbourhoods, alpha, logits and labels."""
    hood = Neighborhood(citation_like(num_nodes, num_links), num_nodes)
    alpha = torch.randn(num_nodes, num_classes).exp().requires_grad_()
    logits = torch.randn(hood.num_edges, requires_grad=True)
    place = {"nodes": num_nodes, "edges": hood.num_edges, "device": "cpu"}
    return place, hood, alpha, logits, torch.randint(num_classes, (num_nodes,))


def draw_in_a_loop(hood, alpha, logits, y) -> Tensor:
    """q(c|y) as it is written down: one node after the other."""
    attention, counts = hood.softmax(logits), alpha.clone()
    ptr, chosen = hood.ptr.tolist(), []
    for i in torch.randperm(len(y)).tolist():
        near = hood.source[ptr[i] : ptr[i + 1]]
        share = counts[near, y[i]] / counts[near].sum(-1)
        c = near[torch.multinomial(attention[ptr[i] : ptr[i + 1]] * share, 1)]
        counts[c, y[i]] += 1
        chosen.append(c)
    return torch.cat(chosen)


def draw(args, results: Records) -> None:
    """By compiled loops and by tensor code, against a loop over nodes in PyTorch."""
    place, hood, alpha, logits, y = problem(*MEDIUM)
    given, compiled = (hood, alpha.detach(), logits.detach(), y), backend.compiled
    each = {"task": "draw", "threads": args.threads} | place
    for key in results.missing(**each, code="loop", particles=1):
        results.add(**key, **seconds(1, seconds=partial(draw_in_a_loop, *given)))
    codes = ["compiled", "sweeps"] if compiled else ["sweeps"]
    for key in results.missing(**each, particles=args.samples, code=codes):
        backend.compiled = compiled if key["code"] == "compiled" else None
        q = OrderedConditional(*given, validate_args=False)
        found = seconds(args.repeats, draws=partial(q.sample, (key["particles"],)))
        results.add(**key, seconds=found["draws"] / key["particles"])
    backend.compiled = compiled


def step_of(model: Callable, guide: Callable, given: tuple, particles: int, estimator: str) -> None:
    """Gradients of the loss to those of ``given`` that need them."""
    for value in given:
        if isinstance(value, Tensor):
            value.grad = None
    elbo = TraceGraph_ELBO(particles, max_plate_nesting=0, vectorize_particles=True)
    guide = partial(guide, collapsed=True, estimator=estimator)
    elbo.loss_and_grads(partial(model, collapsed=True), guide, *given)


def latent_nmm(hood, alpha, logits, table: Tensor, collapsed: bool) -> None:
    """Latent labels; the log-probabilities of what is observed are a table."""
    y = nmm(hood, alpha, logits, collapsed=collapsed)
    pyro.factor("w", table.expand(*y.shape, -1).gather(-1, y[..., None]).sum((-2, -1)))


observed_step = partial(step_of, nmm, ordered_guide)
latent_step = partial(step_of, latent_nmm, evidence_guide)


def gcn_step(model: GCN, x: Tensor, edge_index: Tensor, labels: tuple, thinned: bool) -> None:
    model.zero_grad()
    y, observed = labels
    out = model(dropout(x, 0.5) if thinned else x, edge_index)
    cross_entropy(out[observed], y[observed]).backward()


def step(args, results: Records) -> None:
    """Against a training step of a GCN on the same graph, without and with dropout of its input."""
    place, *parts, y = problem(*MEDIUM)
    gcn = partial(gcn_step, GCN(500, 16, 2, MEDIUM[2], dropout=0.5, cached=True))
    inputs = torch.randn(len(y), 500), citation_like(*MEDIUM[:2])
    each = {"labelled": (60, 140, len(y)), "particles": args.samples, "estimator": ESTIMATORS[1:]}
    for key in results.missing(task="step", **place, threads=args.threads, **each):
        labels = y, torch.randperm(len(y)) < key["labelled"]
        bound = partial(observed_step, (*parts, *labels), key["particles"], key["estimator"])
        plain, thinned = (partial(gcn, *inputs, labels, how) for how in (False, True))
        functions = {"bound": bound, "GCN": plain, "GCN, input dropout": thinned}
        results.add(**key, seconds=seconds(args.repeats, **functions))


def evidence(args, results: Records) -> None:
    """A step with latent labels, against one with observed labels."""
    place, *parts, y = problem(*PUBMED)
    table = torch.randn(len(y), PUBMED[2], requires_grad=True)
    each = {"classes": PUBMED[2], "particles": args.samples, "estimator": ESTIMATORS[1:]}
    for key in results.missing(task="evidence", **place, threads=args.threads, **each):
        how = key["particles"], key["estimator"]
        observed = partial(observed_step, (*parts, y, None), *how)
        latent = partial(latent_step, (*parts, table), *how)
        results.add(**key, seconds=seconds(args.repeats, observed=observed, evidence=latent))


def growth(args, results: Records) -> None:
    """A step by the number of edges, each in a process of its own."""
    for key in results.missing(task="growth", size=args.sizes, threads=args.threads):
        results.add(**key, **in_a_process(args.threads, one_size, key["size"]))


def one_size(size: int) -> dict:
    """The graph's making counts towards the memory."""

    def measured(nodes: int, links: int) -> dict:
        place, *parts = problem(nodes, links, 3)
        step = partial(observed_step, (*parts, None), 1, "reward_to_go")
        return place | seconds(3, seconds=step)

    pyro.set_rng_seed(0)
    measured(100, 500)  # pays for what is loaded or compiled once
    row, peak, above = peak_memory(measured, size // 10, size // 2)
    return row | {"peak": peak, "above": above}
