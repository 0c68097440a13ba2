# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels that become known after a classifier has been trained: what StackedNMM and others make of
them, without training it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pyro
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import LabelPropagation

from benchmarks.nodes.fits import node_scores
from benchmarks.on_top import rivals
from benchmarks.on_top.data import classifier, load
from benchmarks.shared.common import Records
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM

SHARES = [0.0, 0.1, 0.3, 0.5]
FOLDS = 5


def by_folds(make: Callable[[Tensor], Tensor], data: Data, known: Tensor, new: Tensor):
    """
    Marginals that ``make`` finds given some labels, recalibrated by those of every fold of the new
    ones, given all others; and their loss. Then given all.
    """
    nodes = new.nonzero()[:, 0]
    nodes = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))]
    left_out = torch.full((data.num_nodes, int(data.y.max()) + 1), 0.5)
    for fold in range(FOLDS):
        out = torch.zeros_like(new)
        out[nodes[fold::FOLDS]] = True
        left_out[out] = make(known | (new & ~out))[out]
    both = torch.cat([left_out, make(known | new)])
    held = torch.cat([new, torch.zeros_like(new)])
    found, loss = rivals.recalibrated(both, data.y.repeat(2), held)
    return found[data.num_nodes :], loss


def correct_and_smooth(data: Data, logits: Tensor, known: Tensor, new: Tensor) -> Tensor:
    """All of its settings and recalibrations by folds."""
    start = rivals.temperature(data, None, logits, known, new)
    found = [
        by_folds(lambda given, a=pair: rivals.smoothed(data, start, given, a), data, known, new)
        for pair in itertools.product([0.5, 0.9], [0.5, 0.8, 0.9])
    ]
    return min(found, key=lambda each: each[1])[0]


def propagation(data: Data, logits: Tensor, known: Tensor, new: Tensor) -> Tensor:
    """PyG's label propagation, which knows no classifier."""

    def make(given: Tensor) -> Tensor:
        spread = LabelPropagation(50, 0.9)(data.y, data.edge_index, given) + 1e-3
        return spread / spread.sum(-1, keepdim=True)

    return by_folds(make, data, known, new)[0]


def vector(data: Data, logits: Tensor, known: Tensor, new: Tensor) -> Tensor:
    return rivals.shrunk_vector(data, None, logits, known, new)


def stacked(data: Data, hood: Neighborhood, logits: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Conditioned on the new labels at once; and updated. The fit is to the held-out ones alone."""
    y, train = data.y, data.train_mask
    module = StackedNMM(logits.shape[1]).fit(hood, logits, y, train, data.val_mask)
    before = module.posterior(hood, logits, y, train)
    found = {"StackedNMM, conditioned": (before.condition(y, new).marginals(), None)}

    def update() -> Tensor:
        module.update(hood, logits, y, train, new)
        return module.posterior(hood, logits, y, train | new).marginals()

    return found | {"StackedNMM, updated": timed(update)}


def labels(args, results: Records) -> None:
    """Scores on half of the test nodes, with the held-out labels and some of the others known."""
    others = {"C&S": correct_and_smooth, "label propagation": propagation}
    others |= {"vector scaling, shrunk": vector}
    for graph, kind in itertools.product(args.graphs, args.backbones):
        each = {"split": args.splits, "fold": 0, "share": SHARES}
        for key in results.missing(
            task="labels", dataset=graph, backbone=kind, **each, method="StackedNMM, updated"
        ):
            cell = graph, kind, key["split"], 0, args.data_root
            data, hood = load(graph, *cell[2:])
            logits, train = classifier(*cell, args.logits, args.num_epochs), data.train_mask
            generator = torch.Generator().manual_seed(key["split"])
            test = data.test_mask.nonzero()[:, 0]
            test = test[torch.randperm(len(test), generator=generator)]
            new, rest = data.val_mask.clone(), test[len(test) // 2 :]
            new[test[: int(key["share"] * len(test))]] = True
            pyro.set_rng_seed(key["split"])
            found = {name: timed(make, data, logits, train, new) for name, make in others.items()}
            found |= stacked(data, hood, logits, new)
            for name, (probs, seconds) in found.items():
                row = {"test": node_scores(probs[rest], data.y[rest]), "seconds": seconds}
                results.add(**key | {"method": name}, **row)
