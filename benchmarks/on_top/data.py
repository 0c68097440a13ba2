# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The protocol of Hsu et al. 2022 (https://github.com/hans66hsu/GATS, commit 80cfd00)."""

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, groupby, islice
from math import inf
from operator import itemgetter
from pathlib import Path

import networkx as nx
import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GATConv, Sequential
from torch_geometric.utils import index_to_mask, to_undirected

from benchmarks.shared.backbones import RandomInput, mlp
from benchmarks.shared.graphs import inner_edges, planetoid
from benchmarks.shared.records import Records
from benchmarks.shared.training import steps
from pyro_nmm import Neighborhood
from pyro_nmm.datasets import digits

NUM_FOLDS, NUM_EPOCHS = 3, 2000
HETEROPHILOUS = ["texas", "cornell", "wisconsin", "actor", "minesweeper", "tolokers"]
#: Sets whose labels are counted, and nodes that may be asked for.
NUM_SETS, NUM_OPEN = 100, 150
MOST_PAIRS = 5000  # of adjacent test nodes
#: What a pickle says of an array or of its type. NumPy's own classes may take bytes for objects.
Part = type("Part", (list,), {"__setstate__": list.extend})


@cache
def graph(name: str, root: Path | None) -> tuple[Data, Neighborhood]:
    data = digits() if name == "digits" else planetoid(name, root and root / "planetoid")
    return data, Neighborhood(data.edge_index, data.num_nodes)


def heterophilous(name: str, split: int, root: Path) -> tuple[Data, Neighborhood]:
    """Graphs of Geom-GCN and of Platonov et al. 2023, each with ten published splits."""
    with np.load(root / "heterophilous" / f"{name}.npz") as file:
        parts = {key: torch.from_numpy(file[key]) for key in file.files}
    x = parts["node_features"].float()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6) if x.shape[1] < 50 else x
    edges = to_undirected(parts["edges"].long().T, num_nodes=len(x))
    masks = {f"{k}_mask": parts[f"{k}_masks"][split].bool() for k in ("train", "val", "test")}
    data = Data(x=x, edge_index=edges, y=parts["node_labels"].long(), **masks)
    return data, Neighborhood(edges, len(x))


def load(name: str, split: int, fold: int, root: Path | None) -> tuple[Data, Neighborhood]:
    """A graph with masks. Published splits have numbers below 100; all others are drawn here."""
    if name in HETEROPHILOUS:
        return heterophilous(name, split, root)
    data, hood = graph(name, root)
    if split >= 100 or name == "digits":
        folds, test = drawn(data.y, split)
    else:
        folds, test = published(root / "gats_splits" / name.capitalize() / f"split_{split}.npz")
    data, held_out = data.clone(), folds.pop(fold)
    for part, nodes in {"train": torch.cat(folds), "val": held_out, "test": test}.items():
        data[f"{part}_mask"] = index_to_mask(nodes, data.num_nodes)
    return data, hood


def published(path: Path) -> tuple[list[Tensor], Tensor]:
    """Nodes of every fold, and test nodes. Folds of different sizes are stored as a pickle."""
    with np.load(path) as file, file.zip.open("k_fold_indices.npy") as stored:
        np.lib.format.read_magic(stored)
        *_, dtype = np.lib.format.read_array_header_1_0(stored)
        parts = Arrays(stored).load()[-1] if dtype.hasobject else ()
        folds = [np.frombuffer(p[-1], p[-3][4] + p[-3][0]).copy() for p in parts]
        folds = folds or file["k_fold_indices"]
        return [torch.from_numpy(fold) for fold in folds], torch.from_numpy(file["test_indices"])


class Arrays(pickle.Unpickler):
    """Unpickles arrays of numbers and nothing else, because a pickle may run any code."""

    def find_class(self, module: str, name: str):
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype"):
            return lambda *given: Part(given)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")


def drawn(y: Tensor, seed: int) -> tuple[list[Tensor], Tensor]:
    """Three folds of 5 % of every class, and all other nodes, like published splits."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for label in range(int(y.max()) + 1):
        nodes = shuffled(y == label, generator)
        size = int(0.05 * NUM_FOLDS * len(nodes))
        parts.append([*(nodes[:size][fold::NUM_FOLDS] for fold in range(NUM_FOLDS)), nodes[size:]])
    *folds, test = map(torch.cat, zip(*parts, strict=True))
    return folds, test


def shuffled(mask: Tensor, rng: torch.Generator | None = None) -> Tensor:
    """Ids of the nodes of a mask in random order, by default always the same."""
    nodes = mask.nonzero()[:, 0]
    return nodes[torch.randperm(len(nodes), generator=rng or torch.Generator().manual_seed(0))]


def some_pairs(data: Data, seed: int) -> Tensor:
    """``(2, P)``: pairs of adjacent test nodes, drawn if there are more than 5,000."""
    pairs = inner_edges(data.edge_index, data.test_mask)
    order = torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(seed))
    return pairs[:, order[:MOST_PAIRS]]


def grown(hood: Neighborhood, inside: Tensor, size: int, seed: int) -> Tensor:
    """``(S, size)``: nodes of ``inside`` around random ones, the nearest first."""
    edges = torch.stack([hood.target, hood.source], 1)
    graph, nodes = nx.DiGraph(edges[inside[edges].all(1)].tolist()), inside.nonzero()[:, 0]
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(20 * NUM_SETS):  # components may be too small
        start = nodes[torch.randint(len(nodes), (1,), generator=generator)].item()
        found.append(list(islice(chain.from_iterable(nx.bfs_layers(graph, start)), size)))
    return torch.tensor([near for near in found if len(near) == size][:NUM_SETS])


def few(y: Tensor, seed: int) -> list[Tensor]:
    """Masks: two nodes a label to learn from, one held out, those open to questions, and tested."""
    generator = torch.Generator().manual_seed(seed)
    order = shuffled(torch.ones_like(y), generator)
    parts = [order[y[order] == label].tensor_split([2, 3]) for label in range(int(y.max()) + 1)]
    learned, held_out, rest = map(torch.cat, zip(*parts, strict=True))
    rest = rest[torch.randperm(len(rest), generator=generator)]
    test, others = rest.tensor_split([len(rest) // 2])
    return [index_to_mask(nodes, len(y)) for nodes in (learned, held_out, others[:NUM_OPEN], test)]


def cases(args, results: Records, task: str, **key) -> Iterator[tuple[dict, Data]]:
    """Keys without a row, and graphs with masks, ``hood`` and ``logits`` of a classifier."""
    every = {"dataset": args.graphs, "backbone": args.backbones, "split": args.splits}
    every |= {"fold": range(args.num_folds)} | key
    place = itemgetter("dataset", "backbone", "split", "fold")
    for (name, backbone, split, fold), keys in groupby(results.missing(task=task, **every), place):
        if name in HETEROPHILOUS and fold > 0:
            continue  # their splits have no folds
        data, hood = load(name, split, fold, args.data_root)
        data.hood, data.graph, data.backbone = hood, name, backbone
        data.logits = trained(backbone, data, 10 * split + fold)
        for found in keys:
            pyro.set_rng_seed(split)
            yield found, data


def given(data: Data) -> tuple[Neighborhood, Tensor, Tensor, Tensor]:
    """Arguments of StackedNMM: neighbourhoods, logits, labels and which of them are observed."""
    return data.hood, data.logits, data.y, data.train_mask


def network(kind: str, num_features: int, num_classes: int, dropout: float = 0.5) -> nn.Module:
    """The protocol's GCN of 64 hidden units and GAT of 8 heads of 8; and an MLP of 64."""
    if kind == "mlp":
        return mlp(num_features, num_classes)
    if kind == "gcn":
        return GCN(num_features, 64, 2, num_classes, dropout=dropout, cached=True)
    first = GATConv(num_features, 8, heads=8, dropout=dropout), "x, edge_index -> x"
    last = GATConv(64, num_classes, dropout=dropout, concat=False), "x, edge_index -> x"
    layers = [first, nn.ELU(), (nn.Dropout(dropout), "x -> x"), last]
    return RandomInput(Sequential("x, edge_index", layers), dropout)


def trained(kind: str, data: Data, seed: int) -> Tensor:
    """``(N, C)``: logits after the protocol's training."""
    pyro.set_rng_seed(seed)
    module = network(kind, data.num_features, int(data.y.max()) + 1)
    optimizer = Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
    taught = (data.x, data.edge_index), data.y, data.train_mask
    outputs = epochs(module, optimizer, taught, NUM_EPOCHS)
    return stopped_early(outputs, lambda out: held_out_losses(out, data))


def epochs(module: nn.Module, optimizer: Optimizer, taught: tuple, num: int) -> Iterator[Tensor]:
    """Train on inputs, and targets of some nodes; outputs in evaluation mode after each epoch."""
    inputs, targets, nodes = taught
    loss = lambda: F.cross_entropy(module.train()(*inputs)[nodes], targets[nodes])  # noqa: E731
    for _ in steps(optimizer, loss, num):
        yield module.eval()(*inputs).detach()


def held_out_losses(out: Tensor, data: Data) -> tuple[float, float]:
    """Minus accuracy, and the negative log-likelihood."""
    held, y = out[data.val_mask], data.y[data.val_mask]
    return -(held.argmax(-1) == y).double().mean().item(), F.cross_entropy(held, y).item()


def stopped_early(outputs: Iterator[Tensor], losses: Callable, patience: int = 100) -> Tensor:
    """The last output with the least losses, until ``patience`` outputs in turn equal none."""
    least, kept, waited = (inf, inf), None, 0
    for out in outputs:
        found = losses(out)
        equalled = [new <= old for new, old in zip(found, least, strict=False)]
        least = list(map(min, least, found))
        kept, waited = out if all(equalled) else kept, 0 if any(equalled) else waited + 1
        if waited >= patience:
            break
    return kept
