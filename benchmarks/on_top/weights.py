# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What weights of edges tell StackedNMM: those of near digits, which fall with their distance."""

from __future__ import annotations

import pyro
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.nodes.fits import node_scores
from benchmarks.on_top.data import classifier, load
from benchmarks.shared.common import Records
from pyro_nmm.models import StackedNMM, edge_weights


def by_distance(data: Data) -> Tensor:
    """``(E,)``: one over e where the squared distance of the images is the median."""
    source, target = data.edge_index
    distance = (data.x[source] - data.x[target]).square().sum(-1)
    return (-distance / distance.median()).exp()


def weights(args, results: Records) -> None:
    """The same classifier, which knows of no weights, and StackedNMM with them and without."""
    each = {"split": [200 + seed for seed in args.seeds], "fold": range(args.num_folds)}
    for key in results.missing(
        task="weights", dataset="digits", backbone="gcn", **each, method=["none", "by distance"]
    ):
        cell = "digits", "gcn", key["split"], key["fold"], None
        data, hood = load(cell[0], *cell[2:])
        logits, weight = classifier(*cell, args.logits, args.num_epochs), None
        if key["method"] != "none":
            weight = edge_weights(hood, data.edge_index, by_distance(data))
        pyro.set_rng_seed(key["split"])
        y, train, test = data.y, data.train_mask, data.test_mask
        stacked = StackedNMM(logits.shape[1])
        stacked.fit(hood, logits, y, train, data.val_mask, edge_weight=weight)
        mixture = stacked.mixture(hood, logits, y, train, weight)
        row = {"test": node_scores(mixture.marginals()[test], y[test])}
        row["joint"] = mixture.log_likelihood(y, test, train, 64).item() / int(test.sum())
        results.add(**key, **row)
