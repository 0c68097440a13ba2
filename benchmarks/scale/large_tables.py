# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of large.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.scale.speed_tables import by_edges, exponent
from benchmarks.shared.common import GRAPHS, grouped, pick, wrapped
from benchmarks.shared.writing import Rows, made

#: Nodes, directed edges, labels of ogbn-papers100M (Hu et al. 2020,
#: https://arxiv.org/abs/2005.00687).
PAPERS = 111_059_956, 1_615_685_872, 172
WAYS = {"random": "at random", "groups": "Louvain's groups"}


def tables(rows: Rows) -> dict[str, str]:
    makers = {large_graphs: 2, large_rates: 0, cut_graphs: 3, beyond_one_machine: 0}
    return made(makers, rows)


def stages(rows: Rows) -> dict[str, Rows]:
    """By their name and by size, with the memory above that of a process without a graph."""
    found = []
    for part in grouped(pick(rows, task="sizes"), "nodes", "threads").values():
        empty = min(row["peak"] - row["above"] for row in part)
        found += [row | {"memory": row["peak"] - empty} for row in part]
    return {stage: by_edges(part) for (stage,), part in grouped(found, "stage").items()}


def large_graphs(rows: Rows) -> Iterator[dict]:
    """Each stage by the size of the graph."""
    for stage, part in stages(rows).items():
        for small, row in pairwise([None, *part]):
            grown = small is not None and small["edges"] < row["edges"]
            yield {
                "stage": stage,
                "nodes": f"{row['nodes']:,}",
                "edges": f"{row['edges']:,}",
                "seconds": f"{row['seconds']:.2f}",
                "exponent of time": f"{exponent(small, row):.2f}" if grown else "",
                "peak memory, GB": f"{row['peak'] / 1e9:.2f}",
                "of the graph and the stage, GB": f"{row['memory'] / 1e9:.3f}",
            }


def large_rates(rows: Rows) -> str:
    """Of the largest size in all, and how the sizes grow."""
    found = {name: part for name, part in stages(rows).items() if name != "a graph"}
    if not found or len(ends := by_size(found)) < 2:
        return "Fewer than two sizes have been measured."
    small, large = ends[0], ends[-1]
    most = max((part[-1] for part in found.values()), key=lambda row: row["peak"])
    rates = []
    for name, part in found.items():
        time, memory = (exponent(part[0], part[-1], what) for what in ("seconds", "memory"))
        rates.append(f"{name} {time:.2f} and {memory:.2f}")
    return wrapped(
        f"With {large['edges']:,} edges the largest peak is {most['peak'] / 1e9:.1f} GB "
        f"({most['stage']}). From {small['edges']:,} edges to these, the time of all stages "
        f"together grows with the exponent {exponent(small, large):.2f}; exponents of time and of "
        f"memory of each: {', '.join(rates)}. What is above 1 in times are tables that no longer "
        f"fit into a cache: the number of operations is linear."
    )


def by_size(found: dict[str, Rows]) -> Rows:
    """The seconds of all stages, by edges."""
    rows = [row for part in found.values() for row in part]
    sums = [{"edges": edges, "seconds": sum(row["seconds"] for row in part)}
            for (edges,), part in grouped(rows, "edges").items()]  # fmt: skip
    return by_edges(sums)


def cut_graphs(rows: Rows) -> Iterator[dict]:
    """What ranks would have to send one another."""
    for row in pick(rows, task="cuts"):
        yield {
            "graph": GRAPHS.get(row["graph"], row["graph"]),
            "nodes": f"{row['nodes']:,}",
            "cut": WAYS[row["way"]],
            "parts": f"{row['parts']}",
            "largest part": f"{row['largest'] * row['parts'] / row['nodes']:.2f} of the mean",
            "edges between parts": f"{100 * row['cut'] / row['edges']:.0f} %",
            "halo, nodes for each node": f"{row['halo'] / row['nodes']:.2f}",
        }


def beyond_one_machine(rows: Rows) -> str:
    """The largest measured size, extrapolated in proportion to ogbn-papers100M."""
    found = {name: part[-1] for name, part in stages(rows).items()}
    if not {"fit", "marginals in blocks, from files"} <= found.keys():
        return "Nothing has been measured yet."
    nodes, edges, labels = PAPERS
    both = 2 * edges + nodes  # an undirected graph, and every node among its own sources
    one = found["fit"]
    share = both / one["edges"] * labels / one["classes"]
    hours = {
        name: share * found[name]["seconds"] / 3600
        for name in ("fit", "marginals in blocks, from files")
    }
    table, graph = 4 * nodes * labels / 1e9, 8 * both / 1e9
    cuts = pick(rows, task="cuts", way="groups", parts=8)
    halo = [row["halo"] / row["nodes"] for row in cuts]
    sent = [2 * h * table / 8 for h in (min(halo, default=0), max(halo, default=0))]
    return wrapped(
        f"In proportion to edges times labels, ogbn-papers100M ({nodes:,} nodes, {both:,} edges "
        f"with both directions, {labels} labels) would take {hours['fit']:.0f} hours for a fit and "
        f"{hours['marginals in blocks, from files']:.0f} hours for marginals in blocks on the two "
        f"cores of these rows. One table (N, C) has {table:.0f} GB, the sources of the edges "
        f"{graph:.0f} GB. Cut into 8 parts by groups, each rank would send and receive "
        f"{sent[0]:.1f} to {sent[1]:.1f} GB for every pass over the edges, of which there are 22."
    )
