# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A rival that models the dependence of labels, SPN, on splits that GMNN and StackedNMM have rows of.

    python benchmarks/nodes_rivals.py published random --datasets cora --data-root F

Tasks: ``published`` (the splits and networks of calibration.py, whose rows are beside it) and
``random`` (those of ``nodes.py pairs``, with more and more known labels and edges between them).
F holds ``planetoid/`` and ``gats_splits/``. CopulaGNN (Ma et al. 2021, ICLR,
https://github.com/jiaqima/CopulaGNN) is not run: its copula is of outcomes that are numbers, normal
or Poisson, and it has no version for labels without an order.
"""

from __future__ import annotations

from pathlib import Path

import pyro
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from benchmarks.nodes import fits as nodes_fits
from benchmarks.nodes.fits import node_scores, pair_log_probs
from benchmarks.nodes.spn import Fit, Fitted, Messages, chained
from benchmarks.on_top import data as calibration_data
from benchmarks.on_top.data import NUM_FOLDS, network
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.metrics import independent_pairs

#: As in calibration.py.
MOST_PAIRS = 5000


def evaluated(fitted: Fitted, data: Data, seed: int) -> dict:
    """Scores on the test nodes: alone, in adjacent pairs and all together."""
    test, y = data.test_mask, data.y
    state = Messages(fitted.field).run()
    probs, tables = state.marginals(), state.tables()
    pairs = inner_edges(data.edge_index, test)
    generator = torch.Generator().manual_seed(seed)
    pairs = pairs[:, torch.randperm(pairs.shape[1], generator=generator)[:MOST_PAIRS]]
    likely = Messages(fitted.field, maximum=True).run().logits().argmax(-1)
    nodes = test.nonzero()[:, 0]
    order = nodes[torch.randperm(len(nodes), generator=generator)]
    return {
        "test": node_scores(probs[test], y[test]),
        "max-product": (likely == y)[test].double().mean().item(),
        "own product": pair_log_probs(independent_pairs(probs, pairs), y, pairs).mean().item(),
        "pairs": pair_log_probs(of_edges(tables, fitted.field.edges, pairs), y, pairs)
        .mean()
        .item(),
        "joint": chained(fitted.field, y, order) / len(order),
        "settings": fitted.settings,
    }


def of_edges(tables: Tensor, edges: Tensor, pairs: Tensor) -> Tensor:
    """Tables of ``pairs``, from those ``(E, C, C)`` of edges, each with its lower node first."""
    size = int(edges.max()) + 1
    low, high = pairs.min(0).values, pairs.max(0).values
    key, order = (edges[0] * size + edges[1]).sort()
    found = tables[order[torch.searchsorted(key, low * size + high)]]
    return torch.where((pairs[0] < pairs[1])[:, None, None], found, found.mT)


def published(args, results: Records) -> None:
    """SPN with the networks of the published protocol, on its splits."""
    each = {"split": args.splits, "fold": range(args.num_folds), "method": "SPN"}
    cells = {"dataset": args.datasets, "backbone": args.backbones}
    for key in results.missing(task="published", **cells, **each):
        cell = key["dataset"], key["split"], key["fold"], args.data_root
        data, _ = calibration_data.load(*cell)

        def make(width: int, data=data, kind=key["backbone"]) -> nn.Module:
            return network(kind, data.num_features, width)

        pyro.set_rng_seed(10 * key["split"] + key["fold"])
        measured(results, key, data, make, args.num_epochs, key["split"])


def random(args, results: Records) -> None:
    """SPN with the networks of ``nodes.py pairs``, on its splits."""
    each = {"seed": range(10, 10 + args.num_splits), "ratio": args.ratios, "method": "SPN"}
    cells = {"dataset": args.datasets, "backbone": args.backbones}
    for key in results.missing(task="random", **cells, **each):
        whole, _ = nodes_fits.load(
            key["dataset"], args.data_root and args.data_root / "planetoid", "cpu"
        )
        data = random_split(whole, key["ratio"], 0.1, 0.3, key["seed"])

        def make(width: int, data=data, kind=key["backbone"]) -> nn.Module:
            return nodes_fits.backbone(kind, data, width)

        pyro.set_rng_seed(key["seed"])
        measured(results, key, data, make, args.num_epochs, key["seed"])


def measured(results: Records, key: dict, data: Data, make, num_epochs: int, seed: int) -> None:
    fit = Fit(make, data, num_epochs)
    fitted, seconds = timed(fit.best)
    more = {"fit seconds": seconds, "taught edges": int(fit.taught.sum())}
    results.add(**key, **evaluated(fitted, data, seed), **more)


def main(argv: list[str] | None = None) -> Records:
    small = {"datasets": ["digits"], "splits": [100], "ratios": [0.2], "num_epochs": 20}
    small |= {"num_folds": 1, "num_splits": 1}
    return run(
        argv, __doc__, (published, random), smoke=small, choices={"backbones": ["gcn", "gat"]},
        datasets=["cora", "citeseer"], backbones=["gcn"], splits=[0, 1, 2, 3, 4],
        num_folds=NUM_FOLDS, num_splits=5, ratios=[0.2, 0.4, 0.6], num_epochs=200,
        data_root=Path, results=RESULTS / "nodes_rivals.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
