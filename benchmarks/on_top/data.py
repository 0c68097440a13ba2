# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Graphs, splits and classifiers of a published protocol for the calibration of node classifiers
(Hsu et al. 2022, "What Makes Graph Neural Networks Miscalibrated?", NeurIPS,
https://github.com/hans66hsu/GATS, commit 80cfd00).
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, Sequential
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood
from pyro_nmm.datasets.nodes import digits, planetoid
from pyro_nmm.models.backbones import RandomInput, mlp

FOLDERS = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed"}
NUM_FOLDS = 3


@cache
def graph(name: str, root: Path | None) -> tuple[Data, Neighborhood]:
    data = digits() if name == "digits" else planetoid(name, root and root / "planetoid")
    return data, Neighborhood(data.edge_index, data.num_nodes)


def load(name: str, split: int, fold: int, root: Path | None) -> tuple[Data, Neighborhood]:
    """
    A graph with the masks of a published split: the classifier learns from two of three folds of
    5 %, and the third is held out. Splits from 100 on are drawn here, class by class as the
    published ones are: settings come from them, and no table shows them.
    """
    data, hood = graph(name, root)
    if split >= 100 or name == "digits":
        folds, test = drawn(data.y, split)
    else:
        path = root / "gats_splits" / FOLDERS[name] / f"split_{split}.npz"
        with np.load(path, allow_pickle=True) as file:
            folds = [torch.from_numpy(part.astype(int)) for part in file["k_fold_indices"]]
            test = torch.from_numpy(file["test_indices"])
    data = data.clone()
    learned = torch.cat([part for number, part in enumerate(folds) if number != fold])
    for part, nodes in (("train", learned), ("val", folds[fold]), ("test", test)):
        data[f"{part}_mask"] = index_to_mask(nodes, data.num_nodes)
    return data, hood


def drawn(y: Tensor, seed: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    folds: list[list[Tensor]] = [[] for _ in range(NUM_FOLDS)]
    rest = []
    for label in range(int(y.max()) + 1):
        nodes = (y == label).nonzero()[:, 0]
        nodes = nodes[torch.randperm(len(nodes), generator=generator)]
        size = int(0.05 * NUM_FOLDS * len(nodes))
        for number, fold in enumerate(folds):
            fold.append(nodes[:size][number::NUM_FOLDS])
        rest.append(nodes[size:])
    return [torch.cat(fold) for fold in folds], torch.cat(rest)


def network(kind: str, num_features: int, num_classes: int, dropout: float = 0.5) -> nn.Module:
    """The protocol's GCN of 64 hidden units and GAT of 8 heads of 8; and an MLP of 64."""
    if kind == "mlp":
        return mlp(num_features, num_classes)
    thin = (nn.Dropout(dropout), "x -> x")
    if kind == "gcn":
        first = GCNConv(num_features, 64, cached=True), "x, edge_index -> x"
        last = GCNConv(64, num_classes, cached=True), "x, edge_index -> x"
        return Sequential("x, edge_index", [first, nn.ReLU(), thin, last])
    first = GATConv(num_features, 8, heads=8, dropout=dropout), "x, edge_index -> x"
    last = GATConv(64, num_classes, dropout=dropout, concat=False), "x, edge_index -> x"
    return RandomInput(Sequential("x, edge_index", [first, nn.ELU(), thin, last]), dropout)


def classifier(
    name: str, kind: str, split: int, fold: int, root: Path | None, folder: Path | None,
    num_epochs: int,
) -> Tensor:  # fmt: skip
    """``(N, C)``: logits of the protocol's classifier, kept in a folder if there is one."""
    data, _ = load(name, split, fold, root)
    path = folder and folder / f"{name}_{kind}_{split}_{fold}.pt"
    return kept(path, kind, data, 10 * split + fold, num_epochs)


def kept(path: Path | None, kind: str, data: Data, seed: int, num_epochs: int) -> Tensor:
    """``(N, C)``: logits of a file, or of a network that is trained now and kept there."""
    if path and path.exists():
        return torch.load(path, weights_only=True)
    pyro.set_rng_seed(seed)
    module = network(kind, data.num_features, int(data.y.max()) + 1)
    logits = trained(module, data, num_epochs)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(logits, path)
    return logits


def trained(module: nn.Module, data: Data, num_epochs: int, patience: int = 100) -> Tensor:
    """
    The protocol's training: kept is the last epoch with the best accuracy and the least loss on the
    held-out nodes so far, and patience ends when neither has been equalled for so long.
    """
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
    best, least, kept, waited = 0.0, float("inf"), None, 0
    for _ in range(num_epochs):
        module.train()
        optimizer.zero_grad()
        out = module(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            out = module(data.x, data.edge_index)
        held, y = out[data.val_mask], data.y[data.val_mask]
        accuracy = (held.argmax(-1) == y).double().mean().item()
        loss = F.cross_entropy(held, y).item()
        if accuracy >= best and loss <= least:
            kept = copy.deepcopy(out)
        waited = 0 if accuracy >= best or loss <= least else waited + 1
        best, least = max(best, accuracy), min(least, loss)
        if waited >= patience:
            break
    return kept
