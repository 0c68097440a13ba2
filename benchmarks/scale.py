# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Seconds and peak resident memory of every query on a large graph, each in a process of its own
and again at a tenth of the size: a query that is linear takes a tenth.

Table 4 of ``benchmarks/speed.py``.
"""

from __future__ import annotations

import sys
import time

import torch
from common import PeakMemory, Records, citation_like, in_a_process
from speed_tables import exponent

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import StackedNMM

#: Nodes, directed edges, labels: a large graph, and one as dense as co-purchases are.
LARGE, DENSE = (10**6, 10**7, 20), (13_752, 490_000, 10)
#: The graph that each query runs on.
QUERIES = {
    "fit": LARGE, "condition": LARGE, "marginals": LARGE, "pairwise": LARGE, "sample": LARGE,
    "log_likelihood": LARGE, "sequential": DENSE,
}  # fmt: skip


class Problem:
    """A graph with hubs, a classifier's scores, and 2 % of the nodes each to learn from."""

    def __init__(self, num_nodes: int, num_edges: int, num_classes: int) -> None:
        self.hood = Neighborhood(citation_like(num_nodes, num_edges // 2), num_nodes)
        self.scores = 2 * torch.randn(num_nodes, num_classes)
        # Labels of the model itself: particles then differ in weight, and are drawn anew.
        self.y = self.mixture().sample()
        part = torch.rand(num_nodes)
        self.train, self.held_out, self.test = part < 0.02, part > 0.98, (part - 0.5).abs() < 0.01
        self.pairs = torch.randint(num_nodes, (2, 1000))

    def mixture(self) -> NeighborMixture:
        # Where a fit starts: queries cost the same at all values.
        return StackedNMM().mixture(self.hood, self.scores)

    def prepared(self, query: str):
        """The query as a function of nothing, and what it is called in the table."""
        if query == "fit":
            known = self.hood, self.scores, self.y, self.train, self.held_out
            return lambda: StackedNMM().fit(*known, num_steps=150), "StackedNMM.fit, 2 % + 2 %"
        mix = self.mixture()
        if query == "condition":
            return lambda: mix.condition(self.y, self.train, 64), "condition, 64 samples"
        if query == "log_likelihood":
            name = f"log_likelihood of {int(self.test.sum())} nodes, 16 particles"
            return lambda: mix.log_likelihood(self.y, self.test, num_particles=16), name
        posterior = mix.condition(self.y, self.train, num_samples=64)
        return {
            "marginals": (posterior.marginals, "marginals"),
            "pairwise": (lambda: posterior.pairwise(self.pairs), "pairwise of 1,000 pairs"),
            "sample": (posterior.sample, "sample"),
            "sequential": (lambda: posterior.predict(method="sequential"), 'predict("sequential")'),
        }[query]


def one_query(query: str, num_nodes: int, num_edges: int, num_classes: int) -> dict:
    """A measurement, in this process."""
    torch.manual_seed(0)
    tiny = Problem(300, 1500, num_classes).prepared(query)[0]
    tiny()  # pays for what is loaded or compiled once
    problem = Problem(num_nodes, num_edges, num_classes)
    run, name = problem.prepared(query)
    memory = PeakMemory()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "task": "scale", "query": query, "name": name, "nodes": num_nodes,
        "edges": problem.hood.num_edges, "classes": num_classes, "seconds": seconds,
        "cpu_seconds": cpu, "peak": memory.stop(), "above": memory.peak - memory.start_bytes,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


class Lines(Records):
    def line(self, row: dict) -> str:
        return (
            f"   {row['name']:46} {row['nodes']:8} {row['edges']:9} {row['seconds']:8.2f} "
            f"{row['peak'] / 1e9:8.2f} {row['above'] / 1e9:7.2f}"
        )


def measure(args) -> None:
    """Table 4; what is in ``--results`` already is measured again."""
    print("\n4. Queries on large graphs, at a tenth of the size and in full")
    print(f"   {'query':46} {'nodes':>8} {'edges':>9} {'seconds':>8} {'peak GB':>8} {'above':>7}")
    results = Lines(args.results)
    for query in args.queries or QUERIES:
        nodes, edges, classes = QUERIES[query]
        nodes, edges = (round(size * args.scale_nodes / 10**6) for size in (nodes, edges))
        for part in (10, 1):
            sizes = nodes // part, edges // part, classes
            one = ("--one-query", query, *sizes, "--threads", args.threads)
            results.add(**in_a_process(sys.argv[0], *one))
        print(f"   {'':46} exponent of time {exponent(*results.rows[-2:]):.2f}")
