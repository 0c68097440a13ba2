# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
SPN, a rival that models the dependence of labels, on splits of other tasks.

    python -m benchmarks.nodes.rivals published random --datasets cora --data-root F

Tasks: ``published`` (splits and networks of ``benchmarks.on_top.run``) and ``random`` (splits and
networks of the task ``pairs``). F holds ``planetoid/`` and ``gats_splits/``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyro
import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import on_top
from benchmarks.nodes import fits
from benchmarks.nodes.spn import Field, Fit, Messages, chained
from benchmarks.shared.records import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.metrics import independent_pairs

#: As in benchmarks.on_top.
MOST_PAIRS = 5000


def evaluated(field: Field, data: Data, seed: int) -> dict:
    """Scores of single test nodes, of adjacent pairs and of all test nodes jointly."""
    test, y = data.test_mask, data.y
    state = Messages(field).run()
    probs = state.marginals()
    pairs, generator = inner_edges(data.edge_index, test), torch.Generator().manual_seed(seed)
    pairs = pairs[:, torch.randperm(pairs.shape[1], generator=generator)[:MOST_PAIRS]]
    likely = Messages(field, maximum=True).run().logits().argmax(-1)
    nodes = test.nonzero()[:, 0]
    order = nodes[torch.randperm(len(nodes), generator=generator)]
    tables = {"own product": independent_pairs(probs, pairs)}
    tables["pairs"] = of_edges(state.tables(), field.edges, pairs)
    found = {name: fits.pair_log_probs(each, y, pairs) for name, each in tables.items()}
    return {
        "test": fits.node_scores(probs[test], y[test]),
        "max-product": (likely == y)[test].double().mean().item(),
        **{name: values.mean().item() for name, values in found.items()},
        "joint": chained(field, y, order) / len(order),
    }


def of_edges(tables: Tensor, edges: Tensor, pairs: Tensor) -> Tensor:
    """Tables of ``pairs``, from tables ``(E, C, C)`` of edges, each with its lower node first."""
    size = int(edges.max()) + 1
    low, high = pairs.min(0).values, pairs.max(0).values
    key, order = (edges[0] * size + edges[1]).sort()
    found = tables[order[torch.searchsorted(key, low * size + high)]]
    return torch.where((pairs[0] < pairs[1])[:, None, None], found, found.mT)


def published(args, results: Records) -> None:
    each = {"dataset": args.datasets, "backbone": args.backbones, "split": args.splits}
    for key in results.missing(task="published", **each, fold=args.folds, method="SPN"):
        data, _ = on_top.load(key["dataset"], key["split"], key["fold"], args.data_root)
        make = partial(on_top.network, key["backbone"], data.num_features)
        pyro.set_rng_seed(10 * key["split"] + key["fold"])
        measure(results, key, Fit(make, data, args.num_epochs), key["split"])


def random(args, results: Records) -> None:
    each = {"dataset": args.datasets, "backbone": args.backbones, "seed": args.seeds}
    for key in results.missing(task="random", **each, ratio=args.ratios, method="SPN"):
        whole, _ = fits.load(key["dataset"], args.data_root and args.data_root / "planetoid")
        data = random_split(whole, key["ratio"], 0.1, 0.3, key["seed"])
        make = partial(fits.backbone, key["backbone"], data)
        pyro.set_rng_seed(key["seed"])
        measure(results, key, Fit(make, data, args.num_epochs), key["seed"])


def measure(results: Records, key: dict, fit: Fit, seed: int) -> None:
    (field, settings), seconds = timed(fit.best)
    more = {"fit seconds": seconds, "taught edges": int(fit.taught.sum())}
    results.add(**key, **evaluated(field, fit.data, seed), settings=settings, **more)


def main(argv: list[str] | None = None) -> Records:
    options = {"datasets": ["cora", "citeseer"], "backbones": ["gcn"], "splits": [0, 1, 2, 3, 4]}
    options |= {"folds": [0, 1, 2], "seeds": [10, 11, 12], "ratios": [0.2, 0.4, 0.6]}
    options |= {"num_epochs": 200, "data_root": Path, "results": RESULTS / "nodes_rivals.jsonl"}
    return run(argv, __doc__, (published, random), **options)


if __name__ == "__main__":
    main()
