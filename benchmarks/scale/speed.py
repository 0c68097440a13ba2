# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Speed as ratios within one run: medians of turns, but for the slow loop, which runs once.

    python benchmarks/speed.py
    python benchmarks/speed.py --tables 1 2 3 --results benchmarks/results/speed.jsonl
    python benchmarks/speed.py --tables 4 --threads 2 --scale-nodes 200000
    python benchmarks/speed.py --tables 5 --particles 4 --results benchmarks/results/speed.jsonl
    python benchmarks/speed.py --device cuda

1. One draw of q(c|y) against a loop over nodes in PyTorch.
2. One whole step of the bound (order, draw, evaluation, gradient to alpha and logits, under
   TraceGraph_ELBO) against one training step of a GCN on the same graph.
3. Time and peak memory of a step as the graph grows, each size in a process of its own.
4. Time and peak memory of every query on a million nodes, likewise (``benchmarks/scale.py``).
5. One whole step where labels are latent, given evidence, against the same step where they are
   observed: a graph of PubMed's size, seven labels.

On one thread of a CPU, seconds are those of the process, so that other work on the machine counts
less. Validation is off, as ``pyro.enable_validation(False)`` does; Pyro's default costs a few
milliseconds a step more.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch_geometric.nn import GCN

from benchmarks.scale import scale
from benchmarks.scale.speed_tables import tables
from benchmarks.shared.common import Records, started
from benchmarks.shared.timing import citation_like, in_a_process, in_turn, peak_memory, timed
from pyro_nmm import Neighborhood, OrderedConditional, backend
from pyro_nmm.guides import evidence_guide, ordered_guide
from pyro_nmm.models import nmm

CLASSES = 3
COMPILED = backend.compiled
ESTIMATORS = ("reward_to_go", "one_step_credit", "no_score")


def seconds(device: str, repeats: int, *functions) -> list[float]:
    """Medians of functions that take turns, after one round to warm up."""

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        alone = device == "cpu" and torch.get_num_threads() == 1
        return time.process_time() if alone else time.perf_counter()

    turns = in_turn({f: lambda f=f: timed(f, clock=clock)[1] for f in functions}, repeats + 1)
    return [median(times[1:]) for times in turns.values()]


def problem(num_nodes, num_links, device, num_classes=CLASSES):
    """A graph, its NMM parameters and labels."""
    edge_index = citation_like(num_nodes, num_links)
    hood = Neighborhood(edge_index, num_nodes).to(device)
    alpha = torch.randn(num_nodes, num_classes, device=device).exp().requires_grad_()
    logits = torch.randn(hood.num_edges, device=device, requires_grad=True)
    y = torch.randint(num_classes, (num_nodes,), device=device)
    return edge_index.to(device), hood, alpha, logits, y


def machine(args) -> dict:
    return {"device": args.device, "threads": args.threads}


def draw_in_a_loop(hood, alpha, logits, y, order):
    """q(c|y) as it is written down: one node after the other."""
    attention, counts = hood.softmax(logits), alpha.clone()
    ptr, chosen = hood.ptr.tolist(), []
    for i in order.tolist():
        near = hood.source[ptr[i] : ptr[i + 1]]
        share = counts[near, y[i]] / counts[near].sum(-1)
        c = near[torch.multinomial(attention[ptr[i] : ptr[i + 1]] * share, 1)]
        counts[c, y[i]] += 1
        chosen.append(c)
    return torch.cat(chosen)


def draws(args, results: Records) -> None:
    """Table 1."""
    _, hood, alpha, logits, y = problem(20_000, 50_000, args.device)
    alpha, logits = alpha.detach(), logits.detach()
    graph = {"task": "draw", "nodes": hood.num_nodes, "edges": hood.num_edges} | machine(args)
    for key in results.missing(**graph, code="loop", particles=1):
        order = torch.randperm(hood.num_nodes, device=args.device)
        loop = partial(draw_in_a_loop, hood, alpha, logits, y, order)
        results.add(**key, seconds=seconds(args.device, 1, loop)[0])
    codes = {"sweeps": None}
    if COMPILED is not None and args.device == "cpu":
        codes = {"compiled": COMPILED, "sweeps": None}
    for key in results.missing(**graph, particles=args.particles, code=list(codes)):
        backend.compiled = codes[key["code"]]
        q = OrderedConditional(hood, alpha, logits, y, validate_args=False)
        (found,) = seconds(args.device, args.repeats, partial(q.sample, (key["particles"],)))
        results.add(**key, seconds=found / key["particles"])
    backend.compiled = COMPILED


def nmm_step(hood, alpha, logits, y, observed, particles, estimator):
    alpha.grad = logits.grad = None
    elbo = TraceGraph_ELBO(particles, max_plate_nesting=0, vectorize_particles=True)
    guide = partial(ordered_guide, collapsed=True, estimator=estimator)
    elbo.loss_and_grads(partial(nmm, collapsed=True), guide, hood, alpha, logits, y, observed)


def evidence_step(hood, alpha, logits, evidence, particles, estimator):
    """All that a step with latent labels does, but for the emission, here a table."""
    alpha.grad = logits.grad = evidence.grad = None

    def model():
        y = nmm(hood, alpha, logits, collapsed=True)
        pyro.factor("w", evidence.expand(*y.shape, -1).gather(-1, y[..., None]).sum((-2, -1)))

    def guide():
        evidence_guide(hood, alpha, logits, evidence, collapsed=True, estimator=estimator)

    elbo = TraceGraph_ELBO(particles, max_plate_nesting=0, vectorize_particles=True)
    elbo.loss_and_grads(model, guide)


def gcn_step(model, x, edge_index, y, observed, input_dropout):
    model.zero_grad()
    x = torch.nn.functional.dropout(x, 0.5) if input_dropout else x
    out = model(x, edge_index)
    torch.nn.functional.cross_entropy(out[observed], y[observed]).backward()


def steps(args, results: Records) -> None:
    """Table 2."""
    edge_index, hood, alpha, logits, y = problem(20_000, 50_000, args.device)
    model = GCN(500, 16, 2, CLASSES, dropout=0.5, cached=True).to(args.device)
    x = torch.randn(hood.num_nodes, 500, device=args.device)
    each = {"task": "step", "nodes": hood.num_nodes, "edges": hood.num_edges} | machine(args)
    each |= {"labelled": (60, 140, hood.num_nodes), "particles": args.particles}
    for key in results.missing(**each, estimator=ESTIMATORS):
        observed = torch.randperm(hood.num_nodes, device=args.device) < key["labelled"]
        how = key["particles"], key["estimator"]
        gcn = partial(gcn_step, model, x, edge_index, y, observed)
        functions = {
            "bound": partial(nmm_step, hood, alpha, logits, y, observed, *how),
            "GCN": partial(gcn, input_dropout=False),
            "GCN, input dropout": partial(gcn, input_dropout=True),
        }
        found = seconds(args.device, args.repeats, *functions.values())
        results.add(**key, seconds=dict(zip(functions, found, strict=True)))


def growth(args, results: Records) -> None:
    """Table 3."""
    for key in results.missing(task="growth", size=args.sizes, **machine(args)):
        results.add(**key, **in_a_process(args.threads, one_size, args.device, key["size"]))


def one_size(device: str, size: int) -> dict:
    """A line of table 3, in a process of its own."""
    pyro.set_rng_seed(0)
    # The first step pays for what is loaded or compiled once.
    nmm_step(*problem(100, 500, device)[1:], None, 1, "reward_to_go")

    def measured():
        _, hood, *parameters = problem(size // 10, size // 2, device)
        step = partial(nmm_step, hood, *parameters, None, 1, "reward_to_go")
        return hood, *seconds(device, 3, step)

    (hood, found), peak, above = peak_memory(measured)
    if device == "cuda":
        peak = above = torch.cuda.max_memory_allocated()
    row = {"nodes": hood.num_nodes, "edges": hood.num_edges, "seconds": found}
    return row | {"peak": peak, "above": above}


def evidence_steps(args, results: Records) -> None:
    """Table 5."""
    _, hood, alpha, logits, y = problem(19_717, 44_324, args.device, 7)
    evidence = torch.randn(hood.num_nodes, 7, device=args.device, requires_grad=True)
    each = {"task": "evidence", "nodes": hood.num_nodes, "edges": hood.num_edges, "classes": 7}
    each |= {"particles": args.particles} | machine(args)
    for key in results.missing(**each, estimator=ESTIMATORS):
        how = key["particles"], key["estimator"]
        functions = {
            "observed": partial(nmm_step, hood, alpha, logits, y, None, *how),
            "evidence": partial(evidence_step, hood, alpha, logits, evidence, *how),
        }
        found = seconds(args.device, args.repeats, *functions.values())
        results.add(**key, seconds=dict(zip(functions, found, strict=True)))


def main(argv: list[str] | None = None) -> Records:
    args = started(
        argv, __doc__, choices={"queries": scale.QUERIES}, device="cpu", particles=[1, 8],
        smoke={"particles": [1], "repeats": 1, "sizes": [1000], "scale_nodes": 200_000,
               "queries": ["condition", "sequential", "sweep", "annotators"]},
        repeats=11, sizes=[10**4, 10**5, 10**6, 10**7], tables=[1, 2, 3, 4, 5],
        scale_nodes=(10**6, "size of table 4"), queries=(list(scale.QUERIES), "of table 4"),
        results=(Path, "lines of JSON that are added to"),
    )  # fmt: skip
    pyro.set_rng_seed(0)
    results = Records(args.results)
    for number in args.tables:
        known = {1: draws, 2: steps, 3: growth, 4: scale.measure, 5: evidence_steps}
        known[number](args, results)
    for name, table in tables(results.rows).items():
        print(f"\n{name}\n{table}")
    return results


if __name__ == "__main__":
    main()
