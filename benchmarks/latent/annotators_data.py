# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noisy labels of nodes: sections of cortex, and simulated annotators of graphs."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch_geometric.utils import to_undirected

from benchmarks.shared.louvain import louvain
from pyro_nmm import Neighborhood, sources
from pyro_nmm.datasets.nodes import digits, planetoid

SECTIONS = ("151507", "151509", "151670", "151672", "151673", "151675")
#: What the files write where there is no label.
ABSENT = "", "NA"
#: More than so many hops from one source to the next, and the most from a node to its sources.
HOPS = (1, 1), (2, 3)
#: Resolutions of Louvain's groups, and steps of a node's walk to them.
GROUPS = (4, 1), (4, 2), (32, 1), (32, 2)


class Section(NamedTuple):
    """Spots of a section of cortex."""

    answers: Tensor  # (N, M), of the clusterings that do not use positions
    truth: Tensor  # (N,) layers by hand, -1 where there is none
    edge_index: Tensor  # (2, E), of neighbours on the hexagonal lattice
    hood: Neighborhood
    edge_attr: Tensor  # (num_edges,), minus half of the squared distance


def section(folder: Path, name: str) -> Section:
    """
    A section of `LieberInstitute/HumanPilot`: clusterings of its spots, positions and layers.
    Sources lie 3.5 spots apart, and reach 4.2.
    """
    with (folder / f"tissue_positions_{name}.txt").open() as file:
        place = {key: (int(column) / 2, int(row) * 3**0.5 / 2)
                 for key, _, row, column, *_ in csv.reader(file)}  # fmt: skip
    with (folder / f"cluster_labels_{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    known = {"key", "ground_truth"}
    names = [k for k in rows[0] if k not in known and not k.endswith("_spatial")]
    answers = torch.stack([numbered([row[k] for row in rows]) for k in names], 1)
    positions = torch.tensor([place[row["key"].partition("_")[2]] for row in rows])
    pairs = torch.tensor(cKDTree(positions.numpy()).query_pairs(1.1, output_type="ndarray"))
    hood, places = sources.points(positions, radius=4.2, spacing=3.5)
    distance = (places[hood.source] - positions[hood.target]).square().sum(1)
    truth = numbered([row["ground_truth"] for row in rows])
    return Section(answers, truth, to_undirected(pairs.T.contiguous()), hood, -0.5 * distance)


def numbered(names: list[str]) -> Tensor:
    """Numbers for names in their order, and -1 for those that are absent."""
    known = sorted(set(names) - set(ABSENT))
    place = {name: number for number, name in enumerate(known)}
    return torch.tensor([place.get(name, -1) for name in names])


def graph(name: str, root: Path | None):
    """A graph with features and labels: a Planetoid graph, or scikit-learn's digits."""
    return digits() if name == "digits" else planetoid(name, root)


class Place(NamedTuple):
    """Where the sources of a graph's nodes lie."""

    hood: Neighborhood
    edge_attr: Tensor | None  # (num_edges,), minus the hops from a source, or the log of a walk


def places(name: str, root: Path | None, number: int) -> dict[str, list[Place]]:
    """
    Choices of sources: every node for itself and its neighbours; nodes drawn at random that are
    some hops apart; or Louvain's groups. The last two in a number of draws, as a draw is arbitrary.
    """
    data = graph(name, root)
    ends, size = data.edge_index, data.num_nodes
    hood = Neighborhood(ends, size)
    found = {"every node": [Place(hood, -(hood.source != hood.target).float())]}
    for spacing, radius in HOPS:
        drawn = [sources.hops(ends, size, radius, spacing) for _ in range(number)]
        found[f"{spacing} apart, within {radius}"] = [
            Place(hood, -distance.float()) for hood, distance in drawn
        ]
    for resolution, steps in GROUPS:
        members = [groups(name, root, resolution, seed) for seed in range(number)]
        walked = [Place(*sources.walks(ends, size, member, steps)) for member in members]
        found[f"Louvain {resolution}, {steps} steps" if steps > 1 else f"Louvain {resolution}"] = (
            walked
        )
    return found


@cache
def groups(name: str, root: Path | None, resolution: float, seed: int) -> Tensor:
    return louvain(graph(name, root), resolution, seed=seed)


def noisy(
    y: Tensor, accuracies: Tensor, copying: bool, missing: float = 1 / 3, num_labels: int = 0
) -> Tensor:
    """
    ``(N, M)`` answers. An annotator errs to any other label alike, and a third is missing. Where
    there is copying, the last repeats what the one before says, with probability .8.
    """
    num_labels = num_labels or int(y.max()) + 1
    size = len(y), len(accuracies)
    shift = torch.randint(1, num_labels, size)
    wrong = torch.rand(size) >= accuracies
    answers = torch.where(wrong, (y[:, None] + shift) % num_labels, y[:, None])
    if copying:
        answers[:, -1] = torch.where(torch.rand(len(y)) < 0.8, answers[:, -2], answers[:, -1])
    return answers.masked_fill(torch.rand(size) < missing, -1)


def spread_out(mean: float, num_annotators: int) -> Tensor:
    """Accuracies of annotators, up to .08 below and above a mean."""
    return mean + torch.linspace(-0.08, 0.08, num_annotators)
