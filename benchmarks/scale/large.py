# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A StackedNMM on graphs of up to ten million nodes: seconds and peak resident memory of each stage.

    python benchmarks/large.py sizes --threads 2
    python benchmarks/large.py cuts --data-root F

``sizes``: each size in two processes of its own. The first makes a graph with hubs, its
neighbourhoods, fits 2 % of the nodes given another 2 %, and has the marginals of all others, twice:
of the posterior, whose graph, attention and marginals are in memory, and in blocks of nodes. It
leaves the graph and the scores in files, from which the second has the marginals in blocks again.
``cuts``: how many sources lie in another part, if a graph is cut into so many: what ranks of a
cluster would have to send one another. F holds Cora/raw and PubMed/raw.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.louvain import louvain
from benchmarks.shared.timing import citation_like, in_a_process, peak_memory, timed
from pyro_nmm import Neighborhood
from pyro_nmm.datasets.nodes import planetoid
from pyro_nmm.models import StackedNMM, marginals_in_blocks

#: Edges for each node, and labels.
DEGREE, CLASSES = 10, 10


def sizes(args, results: Records) -> None:
    for nodes in args.sizes:
        known = {"task": "sizes", "nodes": nodes, "threads": args.threads}
        if results.has(**known):
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for stages in (in_memory, from_files):
                for row in in_a_process(args.threads, stages, nodes, Path(folder)):
                    results.add(**known, classes=CLASSES, **row)


class Stages:
    """Rows of stages, one after the other."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def measure(self, stage: str, function: Callable):
        gc.collect()
        cpu = time.process_time()
        (found, seconds), peak, above = peak_memory(timed, function)
        row = {"stage": stage, "seconds": seconds, "cpu_seconds": time.process_time() - cpu}
        self.rows.append(row | {"peak": peak, "above": above})
        return found


def in_memory(nodes: int, folder: Path) -> list[dict]:
    """A graph, a fit, and its posterior marginals."""
    torch.manual_seed(0)
    stages = Stages()
    warm(folder)
    edges = stages.measure("a graph", partial(citation_like, nodes, DEGREE * nodes // 2))
    hood = stages.measure("neighbourhoods", partial(Neighborhood, edges, nodes))
    del edges
    scores, y = 2 * torch.randn(nodes, CLASSES), torch.randint(CLASSES, (nodes,))
    part = torch.rand(nodes)
    train, held_out = part < 0.02, part > 0.98
    arrays = {"ptr": hood.ptr, "source": hood.source, "scores": scores, "y": y, "train": train}
    for name, array in arrays.items():
        np.save(folder / name, array.numpy())
    arguments = hood, scores, y, train
    stacked = stages.measure("fit", partial(StackedNMM(CLASSES).fit, *arguments, held_out))
    torch.save(stacked.state_dict(), folder / "stacked.pt")
    blocks = stages.measure("marginals in blocks", partial(in_blocks, folder, stacked, *arguments))
    mixture = stages.measure("alpha and attention", partial(stacked.mixture, *arguments))
    found = stages.measure("marginals", mixture.marginals)
    torch.testing.assert_close(torch.from_numpy(blocks), found, atol=1e-4, rtol=1e-4)
    for row in stages.rows:
        row |= {"edges": hood.num_edges}
    return stages.rows


def from_files(nodes: int, folder: Path) -> list[dict]:
    """The same marginals, of a graph and of scores that lie in files."""
    warm(folder)
    names = ("ptr", "source", "scores", "y", "train")
    arrays = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in names)
    ptr, source, scores, y, train = map(torch.from_numpy, arrays)
    hood = Neighborhood.of_rows(nodes, torch.arange(nodes), ptr, source)
    stacked, stages = StackedNMM(CLASSES), Stages()
    stacked.load_state_dict(torch.load(folder / "stacked.pt"))
    blocks = partial(in_blocks, folder, stacked, hood, scores, y, train)
    stages.measure("marginals in blocks, from files", blocks)
    return [row | {"edges": hood.num_edges} for row in stages.rows]


def in_blocks(folder: Path, stacked: StackedNMM, hood: Neighborhood, scores: Tensor, *known):
    """Marginals that are written to a file as they come."""
    path, shape = folder / "marginals.npy", tuple(scores.shape)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    for nodes, probs in marginals_in_blocks(stacked, hood, scores, *known):
        out[nodes] = probs.numpy()
    out.flush()
    return out


def warm(folder: Path) -> None:
    """Pays for what is loaded or compiled once."""
    hood, y = Neighborhood(citation_like(100, 500), 100), torch.randint(2, (100,))
    train, held_out = torch.arange(100) < 50, torch.arange(100) >= 50
    stacked = StackedNMM(2).fit(hood, torch.randn(100, 2), y, train, held_out, num_steps=2)
    in_blocks(folder, stacked, hood, torch.randn(100, 2), y, train)


def cuts(args, results: Records) -> None:
    """The halo of parts: sources that a part needs and does not own."""
    for graph in args.graphs:
        each = {"way": ["random", "groups"], "parts": args.parts}
        for key in results.missing(task="cuts", graph=graph, **each):
            data = graph_of(graph, args.data_root)
            part = parts_of(key["way"], data, key["parts"])
            source, target = data.edge_index
            away = part[source] != part[target]
            halo = torch.stack([part[target], source])[:, away].unique(dim=1).shape[1]
            row = {"nodes": data.num_nodes, "edges": len(source), "cut": int(away.sum())}
            row |= {"halo": halo, "largest": int(part.bincount().max())}
            results.add(**key, **row)


def graph_of(name: str, root: Path | None) -> Data:
    if name == "with hubs":
        edges = citation_like(20_000, 100_000)
        return Data(edge_index=edges, y=torch.zeros(20_000), num_nodes=20_000)
    return planetoid(name, root)


def parts_of(way: str, data: Data, number: int) -> Tensor:
    """Nodes at random, or Louvain's groups, the largest first to the part that is smallest."""
    torch.manual_seed(0)
    if way == "random":
        return torch.randint(number, (data.num_nodes,))
    group = louvain(data, resolution=4.0)
    sizes, filled = group.bincount(), [0] * number
    part = torch.zeros_like(sizes)
    for which in sizes.argsort(descending=True).tolist():
        part[which] = least = filled.index(min(filled))
        filled[least] += int(sizes[which])
    return part[group]


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (sizes, cuts),
        smoke={"sizes": [1000], "graphs": ["with hubs"], "parts": [2]},
        sizes=[10**5, 10**6, 10**7], graphs=["cora", "pubmed", "with hubs"], parts=[2, 8, 64],
        data_root=Path, folder=(Path, "for files of some gigabytes, default the system's"),
        results=RESULTS / "large.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
