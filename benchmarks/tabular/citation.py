# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Citation graphs: validation labels held out, or all labels in five folds."""

import pyro
import torch
from torch import Tensor
from torch.optim import Adam
from torch_geometric.data import Data

from benchmarks.nodes import node_scores
from benchmarks.on_top import epochs, network, shuffled, trained
from benchmarks.shared.records import Records
from benchmarks.tabular.data import FOLDS
from pyro_nmm import Neighborhood
from pyro_nmm.datasets import planetoid
from pyro_nmm.models import StackedNMM, temperature_scaling


def retrained(kind: str, data: Data, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Logits ``(K, N, C)`` of networks that have not seen a fold of the observed labels, logits
    ``(N, C)`` of a network that has seen all, each after 200 epochs, and the folds ``(N,)``.
    """
    known, folds = data.train_mask | data.val_mask, torch.full_like(data.y, -1)
    order = shuffled(known, torch.Generator().manual_seed(seed))
    folds[order] = torch.arange(len(order)) % FOLDS

    def logits(nodes: Tensor) -> Tensor:
        pyro.set_rng_seed(seed)
        module = network(kind, data.num_features, int(data.y.max()) + 1)
        optimizer = Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
        taught = (data.x, data.edge_index), data.y, nodes
        *_, last = epochs(module, optimizer, taught, 200)
        return last

    parts = [logits(known & (folds != fold)) for fold in range(FOLDS)]
    return torch.stack(parts), logits(known), folds


def scaled(scores: Tensor, held_out: Tensor, y: Tensor) -> Tensor:
    temperature = temperature_scaling(held_out, y, torch.ones_like(y, dtype=torch.bool))
    return (scores / temperature).softmax(-1)


def folds(args, results: Records) -> None:
    """The public split, whose 500 validation labels are held out or belong to the folds."""
    each = {"dataset": args.graphs, "backbone": args.backbones, "split": args.splits}
    for key in results.missing(task="folds", **each, method="StackedNMM, five folds"):
        data = planetoid(key["dataset"], args.data_root and args.data_root / "planetoid")
        hood, known = Neighborhood(data.edge_index, data.num_nodes), data.train_mask | data.val_mask
        y, test, rows = data.y, data.test_mask, known.nonzero()[:, 0]
        logits = trained(key["backbone"], data, key["split"])
        module = StackedNMM(logits.shape[1]).fit(hood, logits, y, data.train_mask, data.val_mask)
        found = {"temperature": scaled(logits, logits[data.val_mask], y[data.val_mask])}
        found["StackedNMM"] = module.posterior(hood, logits, y, known).marginals()
        parts, scores, fold = retrained(key["backbone"], data, key["split"])
        found["temperature, five folds"] = scaled(scores, parts[fold[rows], rows], y[rows])
        module = StackedNMM(scores.shape[1]).fit(hood, parts, y, folds=fold)
        found["StackedNMM, five folds"] = module.posterior(hood, scores, y, known).marginals()
        for name, probs in found.items():
            results.add(**key | {"method": name}, **node_scores(probs[test], y[test]))
