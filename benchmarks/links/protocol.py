# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs, random splits of their links, scores, and the settings that searches try and choose."""

from dataclasses import dataclass
from functools import cache
from statistics import mean

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.shared import records
from pyro_nmm.datasets import LinkSplit, link_graph, link_split

#: Graphs that settings are searched on. PubMed is too large: a fit takes 15 minutes.
DATASETS = ["nips12", "yeast", "cora", "citeseer"]
#: By DGLFRM's authors (nikhil-dce/SBM-meet-GNN, run_expr.sh). Yeast takes the figures of NIPS12.
CITATIONS = {"hidden": 32, "decoder": [32, 16], "num_communities": 50, "concentration": 10.0}
NETWORKS = {"hidden": 128, "decoder": [64, 32], "num_communities": 100, "concentration": 40.0}
#: By Li et al. (2023, "Evaluating graph neural networks for link prediction", NeurIPS) for Cora.
SAGE = {"hidden": 128, "layers": 1}
#: The NMM's estimators of the gradient, and attention that starts at uniform or at the node itself.
CHOICES = ({"estimator": "local"}, {"estimator": "linear"}, {"estimator": "local", "gamma": 3.0})
load = cache(link_graph)


@dataclass(frozen=True)
class Problem:
    """A graph, and a split of its links into training, validation and test links."""

    data: Data
    split: LinkSplit

    @staticmethod
    def of(args, dataset: str, seed: int) -> "Problem":
        """A graph of ``--data-root`` and a random split."""
        data = load(dataset, args.data_root)
        return Problem(data, link_split(data.edge_index, data.num_nodes, seed))

    def pairs(self, part: str) -> Tensor:
        """``(2, P)``: the links of ``"val"`` or ``"test"``, then as many pairs without a link."""
        return torch.cat([getattr(self.split, part), getattr(self.split, f"{part}_false")], 1)

    def scores(self, part: str, logits: Tensor) -> dict[str, float]:
        """Average precision and AUC, in percent, of logits of ``pairs(part)``."""
        linked = torch.arange(len(logits)) < getattr(self.split, part).shape[1]
        measures = {"AP": average_precision_score, "AUC": roc_auc_score}
        return {name: 100 * float(score(linked, logits)) for name, score in measures.items()}


def candidates(rows: list[dict], dataset: str, guide: str) -> list[dict]:
    """Settings to try: less dropout, and twice the width, or two layers of GraphSAGE."""
    if guide == "nmm":
        return [chosen(rows, dataset, "original") | choice for choice in CHOICES]
    if guide == "vgae":
        each = (s | {"width": s["decoder"][1]} for s in candidates(rows, dataset, "original"))
        return [{name: s[name] for name in ("hidden", "width", "dropout")} for s in each]
    if guide == "sage":
        first, large = SAGE, {"layers": 2}
    else:
        first = NETWORKS if dataset in ("nips12", "yeast") else CITATIONS
        large = {name: 2 * first[name] for name in ("hidden", "num_communities")}
        large["decoder"] = [2 * width for width in first["decoder"]]
    found = [first | {"dropout": rate} for rate in (0.5, 0.25, 0.0)]
    return found + [first | large | {"dropout": rate} for rate in (0.5, 0.25)]


def chosen(rows: list[dict], dataset: str, guide: str) -> dict:
    """The settings of the best mean over splits, of the NMM's bound or others' validation AP."""
    quality = (lambda row: -row["loss"]) if guide == "nmm" else (lambda row: row["val"]["AP"])
    key = {"dataset": "cora" if dataset == "pubmed" else dataset, "guide": guide}
    return records.chosen(rows, lambda trial: mean(map(quality, trial)), **key)
