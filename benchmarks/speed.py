# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Speed as ratios within one run: medians of turns, but for the slow loop, which runs once. On one
thread of a CPU, seconds are those of the process, so that other work on the machine counts less.
Validation is off, as ``pyro.enable_validation(False)`` does; Pyro's default costs a few
milliseconds a step more.

1. One draw of q(c|y) against a loop over nodes in PyTorch.
2. One whole step of the bound (order, draw, evaluation, gradient to alpha and logits, under
   TraceGraph_ELBO) against one training step of a GCN on the same graph.
3. Time and peak memory of a step as the graph grows, each size in a process of its own.
4. Time and peak memory of every query on a million nodes, likewise (``benchmarks/scale.py``).

    python benchmarks/speed.py
    python benchmarks/speed.py --tables 1 2 3 --results benchmarks/results/speed.jsonl
    python benchmarks/speed.py --tables 4 --threads 2 --scale-nodes 20000
    python benchmarks/speed.py --device cuda

With ``--results``, what tables 1 to 3 find there is not measured again.
"""

from __future__ import annotations

import json
import time
from argparse import SUPPRESS, ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import scale
import torch
from common import PeakMemory, Records, arguments, citation_like, in_a_process, start
from pyro.infer import TraceGraph_ELBO
from speed_tables import tables
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood, OrderedConditional, backend
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

CLASSES = 3
COMPILED = backend.compiled


def median_seconds(device, repeats, *functions):
    """Medians of functions that take turns, after one warm-up round each."""

    def now():
        if device == "cuda":
            torch.cuda.synchronize()
        alone = device == "cpu" and torch.get_num_threads() == 1
        return time.process_time() if alone else time.perf_counter()

    rounds = []
    for _ in range(repeats + 1):
        rounds.append([])
        for function in functions:
            began = now()
            function()
            rounds[-1].append(now() - began)
    return torch.tensor(rounds[1:]).median(0).values.tolist()


def problem(num_nodes, num_links, device):
    """A graph, its NMM parameters and labels."""
    edge_index = citation_like(num_nodes, num_links)
    hood = Neighborhood(edge_index, num_nodes).to(device)
    alpha = torch.randn(num_nodes, CLASSES, device=device).exp().requires_grad_()
    logits = torch.randn(hood.num_edges, device=device, requires_grad=True)
    y = torch.randint(CLASSES, (num_nodes,), device=device)
    return edge_index.to(device), hood, alpha, logits, y


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


def sampling(args, results: Records) -> None:
    """Table 1."""
    _, hood, alpha, logits, y = problem(20_000, 50_000, args.device)
    known = {"task": "draw", "nodes": hood.num_nodes, "edges": hood.num_edges} | machine(args)
    if results.has(**known):
        return
    alpha, logits = alpha.detach(), logits.detach()
    order = torch.randperm(hood.num_nodes, device=args.device)
    (loop,) = median_seconds(args.device, 1, partial(draw_in_a_loop, hood, alpha, logits, y, order))
    results.add(**known, code="loop", particles=1, seconds=loop)
    for size in args.particles:
        for name, code in (("compiled", COMPILED), ("sweeps", None)):
            if name == "compiled" and (code is None or args.device != "cpu"):
                continue
            backend.compiled = code
            q = OrderedConditional(hood, alpha, logits, y, validate_args=False)
            (seconds,) = median_seconds(args.device, args.repeats, partial(q.sample, (size,)))
            results.add(**known, code=name, particles=size, seconds=seconds / size)
    backend.compiled = COMPILED


def nmm_step(hood, alpha, logits, y, observed, particles, estimator):
    alpha.grad = logits.grad = None
    elbo = TraceGraph_ELBO(particles, max_plate_nesting=0, vectorize_particles=True)
    guide = partial(ordered_guide, collapsed=True, estimator=estimator)
    elbo.loss_and_grads(partial(nmm, collapsed=True), guide, hood, alpha, logits, y, observed)


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
    known = {"task": "step", "nodes": hood.num_nodes, "edges": hood.num_edges} | machine(args)
    for labelled in (60, 140, hood.num_nodes):
        observed = torch.zeros(hood.num_nodes, dtype=torch.bool)
        observed[torch.randperm(hood.num_nodes)[:labelled]] = True
        observed = observed.to(args.device)
        for row in results.missing(
            **known, labelled=labelled, particles=args.particles,
            estimator=("reward_to_go", "one_step_credit", "no_score"),
        ):  # fmt: skip
            size, estimator = row["particles"], row["estimator"]
            bound, plain, dropped = median_seconds(
                args.device, args.repeats,
                partial(nmm_step, hood, alpha, logits, y, observed, size, estimator),
                partial(gcn_step, model, x, edge_index, y, observed, False),
                partial(gcn_step, model, x, edge_index, y, observed, True),
            )  # fmt: skip
            gcn = {"GCN": plain, "GCN, input dropout": dropped}
            results.add(**row, seconds={"bound": bound} | gcn)


def one_size(args):
    """A line of table 3, in a process of its own."""
    num_links = args.one_size // 2
    # The first step pays for what is loaded or compiled once.
    nmm_step(*problem(100, 500, args.device)[1:], None, 1, "reward_to_go")
    memory = PeakMemory()
    _, hood, alpha, logits, y = problem(num_links // 5, num_links, args.device)
    step = partial(nmm_step, hood, alpha, logits, y, None, 1, "reward_to_go")
    (seconds,) = median_seconds(args.device, 3, step)
    peak, above = memory.stop(), memory.peak - memory.start_bytes
    if args.device == "cuda":
        peak = above = torch.cuda.max_memory_allocated()
    return [hood.num_nodes, hood.num_edges, seconds, peak, above]


def growth(args, results: Records) -> None:
    """Table 3."""
    for row in results.missing(task="growth", size=args.sizes, **machine(args)):
        options = "--one-size", row["size"], "--device", args.device, "--threads", args.threads
        names = "nodes", "edges", "seconds", "peak", "above"
        found = in_a_process(__file__, *options)
        results.add(**row, **dict(zip(names, found, strict=True)))


def machine(args) -> dict:
    return {"device": args.device, "threads": args.threads}


def report(args, results: Records) -> None:
    """Tables 1 to 3, of what is stored."""
    names = {1: ("draws",), 2: ("steps",), 3: ("growth", "growth rates")}
    made = tables(results.rows)
    for name in (name for number in args.tables for name in names.get(number, ())):
        print(f"\n{name}\n{made[name]}")


def main(args):
    start(args.threads)
    torch.set_grad_enabled(True)
    pyro.set_rng_seed(0)
    if args.one_size:
        return print(json.dumps(one_size(args)))
    if args.one_query:
        query, *sizes = args.one_query
        return print(json.dumps(scale.one_query(query, *map(int, sizes))))
    print(f"device {args.device}, {args.threads} thread(s), numba {'on' if COMPILED else 'off'}")
    results = Records(args.results)
    for table in args.tables:
        if table == 4:
            scale.measure(args)
        else:
            {1: sampling, 2: steps, 3: growth}[table](args, results)
    report(args, results)


def parser() -> ArgumentParser:
    parser = arguments(
        __doc__, device="cpu", threads=1, particles=[1, 8], repeats=11,
        sizes=[10**4, 10**5, 10**6, 10**7], tables=[1, 2, 3, 4],
        scale_nodes=(10**6, "size of table 4"), one_size=(0, SUPPRESS),
        results=(Path, "lines of JSON that are added to"),
    )  # fmt: skip
    parser.add_argument("--queries", nargs="+", choices=scale.QUERIES, help="of table 4; all")
    parser.add_argument("--one-query", nargs=4, help=SUPPRESS)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
