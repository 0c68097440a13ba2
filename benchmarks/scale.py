# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Seconds and peak resident memory of every query on a large graph, each in a process of its own
and again at a tenth of the size: a query that is linear takes a tenth.

Table 4 of ``benchmarks/speed.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable

import citation_graphs
import torch
from peak import PeakMemory
from records import Records

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import StackedNMM

#: Nodes, directed edges, labels: a large graph, and one as dense as co-purchases are.
LARGE, DENSE = (10**6, 10**7, 20), (13_752, 490_000, 10)


def summary(rows: list[dict], table: Callable[..., str]) -> str:
    """The table of the stored measurements, for ``report.py``."""
    lines = []
    for query in dict.fromkeys(row["query"] for row in rows):
        part = sorted((r for r in rows if r["query"] == query), key=lambda r: r["edges"])
        for small, row in itertools.zip_longest([None, *part[:-1]], part):
            growth = ""
            if small is not None and small["edges"] < row["edges"]:
                time, size = (math.log(row[k] / small[k]) for k in ("seconds", "edges"))
                growth = f"{time / size:.2f}"
            cells = [f"{row['nodes']:,}", f"{row['edges']:,}", str(row["classes"])]
            cells += [f"{row['seconds']:.2f}", growth, f"{row['peak'] / 1e9:.2f}"]
            lines.append([row["name"], *cells])
    head = ["query", "nodes", "edges", "labels", "seconds", "exponent of time", "peak memory, GB"]
    return table(head, lines)


class Problem:
    """A graph with hubs, a classifier's scores, and 2 % of the nodes each to learn from."""

    def __init__(self, num_nodes: int, num_edges: int, num_classes: int) -> None:
        edge_index = citation_graphs.citation_like(num_nodes, num_edges // 2)
        self.hood = Neighborhood(edge_index, num_nodes)
        self.scores = 2 * torch.randn(num_nodes, num_classes)
        # Labels of the model itself: particles then differ in weight, and are drawn anew.
        self.y = self.mixture().sample()
        part = torch.rand(num_nodes)
        self.train, self.held_out, self.test = part < 0.02, part > 0.98, (part - 0.5).abs() < 0.01
        self.pairs = torch.randint(num_nodes, (2, 1000))

    def fit(self, num_steps: int = 150) -> StackedNMM:
        known = self.hood, self.scores, self.y, self.train, self.held_out
        return StackedNMM().fit(*known, num_steps=num_steps)

    def mixture(self) -> NeighborMixture:
        # Where a fit starts: queries cost the same at all values.
        return StackedNMM().mixture(self.hood, self.scores)

    def posterior(self):
        return self.mixture().condition(self.y, self.train, num_samples=64)


def prepared(query: str, problem: Problem):
    """The query as a function of nothing, and what it is called in the table."""
    if query == "fit":
        return problem.fit, "StackedNMM.fit, 2 % + 2 %"
    if query in ("condition", "log_likelihood"):
        mix, y = problem.mixture(), problem.y
        if query == "condition":
            return lambda: mix.condition(y, problem.train, 64), "condition, 64 samples"
        size = int(problem.test.sum())
        return lambda: mix.log_likelihood(y, problem.test, num_particles=16), (
            f"log_likelihood of {size} nodes, 16 particles"
        )
    posterior = problem.posterior()
    return {
        "marginals": (posterior.marginals, "marginals"),
        "pairwise": (lambda: posterior.pairwise(problem.pairs), "pairwise of 1,000 pairs"),
        "sample": (lambda: posterior.sample(), "sample"),
        "sequential": (lambda: posterior.predict(method="sequential"), 'predict("sequential")'),
    }[query]


#: The graph that each query runs on.
QUERIES = {
    "fit": LARGE, "condition": LARGE, "marginals": LARGE, "pairwise": LARGE, "sample": LARGE,
    "log_likelihood": LARGE, "sequential": DENSE,
}  # fmt: skip


def one_query(query: str, num_nodes: int, num_edges: int, num_classes: int) -> dict:
    """A measurement, in this process."""
    torch.manual_seed(0)
    tiny = prepared(query, Problem(300, 1500, num_classes))[0]
    tiny()  # pays for what is loaded or compiled once
    problem = Problem(num_nodes, num_edges, num_classes)
    run, name = prepared(query, problem)
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


def table(args) -> None:
    """Table 4."""
    print("\n4. Queries on large graphs, at a tenth of the size and in full")
    print(f"   {'query':46} {'nodes':>8} {'edges':>9} {'seconds':>8} {'peak GB':>8} {'above':>7}")
    results = Records(args.results) if args.results else None
    for query in args.queries or QUERIES:
        nodes, edges, classes = QUERIES[query]
        nodes, edges = (round(size * args.scale_nodes / 10**6) for size in (nodes, edges))
        rows = []
        for part in (10, 1):
            sizes = [str(nodes // part), str(edges // part), str(classes)]
            command = [sys.executable, sys.argv[0], "--one-query", query, *sizes]
            command += ["--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            print(
                f"   {row['name']:46} {row['nodes']:8} {row['edges']:9} {row['seconds']:8.2f} "
                f"{row['peak'] / 1e9:8.2f} {row['above'] / 1e9:7.2f}",
                flush=True,
            )
            if results is not None:
                results.add(**row)
        grown = rows[1]["edges"] / rows[0]["edges"]
        exponent = math.log(rows[1]["seconds"] / rows[0]["seconds"]) / math.log(grown)
        print(f"   {'':46} exponent of time {exponent:.2f}")
