# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noisy labels of nodes: clusterings of cortex, and simulated annotators of graphs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from benchmarks.shared.louvain import louvain
from pyro_nmm import Neighborhood, sources
from pyro_nmm.datasets.nodes import digits, planetoid

SECTIONS = ["151507", "151509", "151670", "151672", "151673", "151675"]
#: Sources of the nodes, and features of the edges to them, such as minus the hops.
Place = tuple[Neighborhood, Tensor | None]


def section(root: Path, name: str) -> Data:
    """
    A section of `LieberInstitute/HumanPilot`: ``answers`` ``(N, M)`` of clusterings that use no
    positions, layers ``y`` by hand, -1 where there is none, neighbours on the hexagonal lattice,
    and the ``place`` of sources that are 3.5 spots apart and reach 4.2.
    """
    rows = pd.read_csv(root / f"dlpfc/cluster_labels_{name}.csv", dtype=str)
    spots = pd.read_csv(root / f"dlpfc/tissue_positions_{name}.txt", header=None, index_col=0)
    spots = spots.loc[rows.pop("key").str.partition("_")[2], [3, 2]]
    positions = torch.tensor(spots.to_numpy() * [1 / 2, 3**0.5 / 2]).float()
    codes = {column: torch.tensor(pd.Categorical(rows[column]).codes).long() for column in rows}
    truth = codes.pop("ground_truth")
    answers = [code for column, code in codes.items() if not column.endswith("_spatial")]
    pairs = torch.tensor(cKDTree(positions.numpy()).query_pairs(1.1, output_type="ndarray"))
    hood, centres = sources.points(positions, radius=4.2, spacing=3.5)
    place = hood, -0.5 * (centres[hood.source] - positions[hood.target]).square().sum(1)
    edges = to_undirected(pairs.T.contiguous())
    return Data(answers=torch.stack(answers, 1), y=truth, edge_index=edges, place=place)


@cache
def graph(name: str, root: Path | None) -> Data:
    """A graph with features and labels: a Planetoid graph, or scikit-learn's digits."""
    return digits() if name == "digits" else planetoid(name, root)


def places(data: Data, number: int) -> dict[str, list[Place]]:
    """
    Choices of sources: every node for itself and its neighbours; random nodes that are some hops
    apart; and Louvain's communities, which the steps of a walk lead to. The last two are random,
    so there is a number of draws of each.
    """
    ends, size = data.edge_index, data.num_nodes
    hood = Neighborhood(ends, size)
    found = {"every node": [(hood, -(hood.source != hood.target).float())]}
    for spacing, radius in ((1, 1), (2, 3)):
        drawn = [sources.hops(ends, size, radius, spacing) for _ in range(number)]
        placed = [(hood, -hops.float()) for hood, hops in drawn]
        found[f"{spacing} apart, within {radius}"] = placed
    for resolution in (4, 32):
        groups = [louvain(data, resolution, seed=seed) for seed in range(number)]
        for steps, suffix in ((1, ""), (2, ", 2 steps")):
            walks = [sources.walks(ends, size, group, steps) for group in groups]
            found[f"Louvain {resolution}{suffix}"] = walks
    return found


def noisy(y: Tensor, accuracies: Tensor, num_labels: int, copying: bool = False) -> Tensor:
    """
    ``(N, M)`` answers, of which a third is missing. An annotator errs to all other labels alike.
    With copying, the last one repeats the answer of the one before with probability .8.
    """
    size = len(y), len(accuracies)
    shift = torch.randint(1, num_labels, size)
    wrong = torch.rand(size) >= accuracies
    answers = torch.where(wrong, (y[:, None] + shift) % num_labels, y[:, None])
    if copying:
        answers[:, -1] = torch.where(torch.rand(len(y)) < 0.8, answers[:, -2], answers[:, -1])
    return answers.masked_fill(torch.rand(size) < 1 / 3, -1)
