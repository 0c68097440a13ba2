# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Link prediction by what a user would try first, on the splits of links.py:

    python benchmarks/links_rivals.py anchor search compare --data-root F

Rivals: ``vgae`` (the variational graph auto-encoder of Kipf and Welling, 2016) and ``sage``
(GraphSAGE of Hamilton, Ying and Leskovec, 2017, with a perceptron on the elementwise product of a
pair's ends). Both see what DGLFRM sees: features and training links. Tasks: ``anchor`` (VGAE by its
authors' protocol, on new random splits, beside their figures), ``search`` (as many candidates as
DGLFRM has, on the same two splits, by average precision on validation links) and ``compare`` (the
splits on which links.py compares the two guides).
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import mean

import pyro
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import MLP, VGAE, GCNConv, GraphSAGE, Linear
from torch_geometric.utils import add_self_loops, negative_sampling, to_undirected

from benchmarks.links import run as links
from benchmarks.shared import common
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm.datasets.links import LinkSplit
from pyro_nmm.datasets.nodes import PLANETOID
from pyro_nmm.models.backbones import RandomInput

RIVALS = ["vgae", "sage"]


class _Gaussians(nn.Module):
    """Means and log-scales of every node's vector, from two graph convolutions."""

    def __init__(self, num_features: int, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first = RandomInput(GCNConv(num_features, hidden, cached=True, bias=False), dropout)
        heads = (GCNConv(hidden, width, cached=True, bias=False) for _ in range(2))
        self.heads, self.dropout = nn.ModuleList(heads), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        mean, log_scale = (head(hidden, edge_index) for head in self.heads)
        return mean, log_scale


class LinksVGAE(nn.Module):
    """PyG's VGAE on one training graph, whose normalisation is computed once."""

    def __init__(self, num_features: int, hidden: int = 32, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.auto_encoder = VGAE(_Gaussians(num_features, hidden, width, dropout))

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """
        The authors' loss in expectation: there, links weigh as much as all other pairs together, a
        node is linked to itself besides, and the divergence is one of N^2 terms. Here the other
        pairs are as many as the links, drawn anew in each step, so that a step is linear.
        """
        checked(x, edge_index)
        number, count = len(x), edge_index.shape[1]
        z = self.auto_encoder.encode(x, edge_index)
        own = add_self_loops(edge_index, num_nodes=number)[0]
        false = false_pairs(edge_index, number, count)
        linked, apart = (self.auto_encoder.decode(z, p, sigmoid=False) for p in (own, false))
        others = 1 - number / (number**2 - count)  # of the pairs that are no links, without loops
        cost = F.softplus(-linked).sum() / count + others * F.softplus(apart).mean()
        return cost / 2 + self.auto_encoder.kl_loss() / number

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``: inner products; of means, unless it trains."""
        z = self.auto_encoder.encode(x, edge_index)
        return self.auto_encoder.decode(z, pairs, sigmoid=False)


class LinksSAGE(nn.Module):
    """
    PyG's GraphSAGE with mean aggregation of vectors that are linear in the features, which keeps
    sparse features sparse, and a perceptron of three layers on products of two nodes' outputs.
    """

    def __init__(self, num_features: int, hidden: int = 128, layers: int = 1, dropout: float = 0.5):
        super().__init__()
        first = Linear(num_features, hidden, bias=False, weight_initializer="glorot")
        self.first = RandomInput(first, dropout)
        self.network = GraphSAGE(hidden, hidden, layers, dropout=dropout)
        self.score = MLP([hidden, hidden, hidden, 1], dropout=dropout, norm=None)

    def loss(self, x: Tensor, edge_index: Tensor, share: float = 0.25) -> Tensor:
        """
        Cross-entropy of a random share of the links, which the network does not see, and of as many
        pairs without one. (If it saw them, it would learn that links are what it sees.)
        """
        checked(x, edge_index)
        links = edge_index[:, edge_index[0] < edge_index[1]]
        links = links[:, torch.randperm(links.shape[1], device=links.device)]
        count = max(1, int(share * links.shape[1]))
        asked, seen = links[:, :count], to_undirected(links[:, count:], num_nodes=len(x))
        pairs = torch.cat([asked, false_pairs(edge_index, len(x), count)], 1)
        logits = self.logits(pairs, x, seen)
        return F.binary_cross_entropy_with_logits(
            logits, (torch.arange(len(logits), device=logits.device) < count).to(logits)
        )

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``."""
        z = self.network(self.first(x), edge_index)
        return self.score(z[pairs[0]] * z[pairs[1]]).squeeze(-1)


def checked(x: Tensor, edge_index: Tensor) -> None:
    if edge_index.shape[1] < 4:
        raise ValueError(f"edge_index must hold two links or more, got {edge_index.shape[1]} edges")
    if int(edge_index.max()) >= len(x):
        raise ValueError(
            f"x must have a row for each node, got {len(x)} and node {int(edge_index.max())}"
        )


def false_pairs(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    """
    ``(2, count)`` random pairs of different nodes without a training link. Pairs that are held out
    are not known to be such, so that a hidden link may be among them: one in thousands.
    """
    return negative_sampling(edge_index, num_nodes, count)


def candidates(dataset: str, rival: str) -> list[dict]:
    """
    VGAE's are DGLFRM's: its authors' widths and dropout are the third of a citation graph.
    GraphSAGE's first are those of Li et al. (2023, "Evaluating graph neural networks for link
    prediction", NeurIPS; in Juanhui28/HeaRT) for Cora; then less dropout, and two layers.
    """
    if rival == "vgae":
        each = links.candidates(dataset)
        return [
            {"hidden": s["hidden"], "width": s["decoder"][1], "dropout": s["dropout"]} for s in each
        ]
    first = {"hidden": 128, "layers": 1, "dropout": 0.5}
    changes = [{}, {"dropout": 0.25}, {"dropout": 0.0}, {"layers": 2}]
    return [first | change for change in [*changes, {"layers": 2, "dropout": 0.25}]]


def chosen(rows: list[dict], dataset: str, rival: str) -> dict:
    """Of the best average precision on validation links, a mean over the splits of the search."""

    def quality(trial: list[dict]) -> float:
        return mean(row["val"]["AP"] for row in trial)

    dataset = "cora" if dataset == "pubmed" else dataset
    return common.chosen(rows, quality, dataset=dataset, guide=rival)


def fit(
    network: nn.Module, x: Tensor, split: LinkSplit, num_steps: int, every: int | None, parts
) -> dict:
    """
    Scores of ``parts`` at the step with the best average precision on validation links, of those
    that are looked at; or at the last step.
    """

    @torch.no_grad()
    def measured(part: str) -> dict:
        pairs, count = links.held_out(split, part)
        return links.precision(network.eval().logits(pairs, x, split.train), count)

    optimizer, best = torch.optim.Adam(network.parameters(), lr=0.01), {}
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        network.train()
        network.loss(x, split.train).backward()
        optimizer.step()
        if step == num_steps or (every and step % every == 0):
            val = measured("val")
            if not every or not best or val["AP"] > best["val"]["AP"]:
                best = {"step": step, "val": val} | {part: measured(part) for part in parts}
    return best


def measure(args, data: Data, split: LinkSplit, rival: str, settings: dict, seed: int, parts=()):
    """The row of a fit; seconds are the process's own, a step, with what is looked at."""
    pyro.set_rng_seed(seed)
    make = LinksVGAE if rival == "vgae" else LinksSAGE
    network = make(data.num_features, **settings).to(args.device)
    known = network, data.x, split, args.num_steps, args.every, parts
    row, seconds = timed(fit, *known, clock=time.process_time)
    return {"settings": settings, "seconds": seconds / args.num_steps} | row


def anchor(args, results: Records) -> None:
    """The authors' widths, features and last iterate."""
    settings = {"hidden": 32, "width": 16, "dropout": 0.0}
    datasets = [name for name in args.datasets if name in PLANETOID or args.smoke]
    for key in results.missing(task="anchor", dataset=datasets, seed=range(args.num_splits)):
        data, split = links.problem(args, key["dataset"], key["seed"])
        if not args.smoke:  # PubMed's weights of words, which DGLFRM sees as zeros and ones
            data.x = Planetoid(str(args.data_root), PLANETOID[key["dataset"]])[0].x.to_sparse_csr()
        pyro.set_rng_seed(key["seed"])
        network = LinksVGAE(data.num_features, **settings).to(args.device)
        x = data.x.to(args.device)
        row = fit(network, x, split, args.num_steps, None, ["test"])
        results.add(**key, settings=settings, **row)


def search(args, results: Records) -> None:
    datasets = [name for name in args.datasets if name != "pubmed"]
    for dataset, rival in itertools.product(datasets, args.rivals):
        trials = candidates(dataset, rival)[: args.num_trials]
        known = {"task": "search", "dataset": dataset, "guide": rival}
        each = {"trial": range(len(trials)), "seed": range(args.num_searched)}
        for key in results.missing(**known, **each):
            problem = links.problem(args, dataset, key["seed"])
            row = measure(args, *problem, rival, trials[key["trial"]], key["seed"])
            results.add(**key, **row)


def compare(args, results: Records) -> None:
    for dataset, rival in itertools.product(args.datasets, args.rivals):
        settings, seeds = chosen(results.rows, dataset, rival), links.compared(args, dataset)
        known = {"task": "compare", "dataset": dataset, "guide": rival, "settings": settings}
        for key in results.missing(**known, seed=seeds):
            problem = links.problem(args, dataset, key["seed"])
            row = measure(args, *problem, rival, settings, key["seed"], ["test"])
            results.add(**key | row)


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (anchor, search, compare),
        smoke={"datasets": ["nips12"], "num_trials": 2, "num_searched": 1, "num_splits": 3,
               "num_steps": 3, "every": 2},
        choices={"datasets": links.DATASETS, "rivals": RIVALS}, datasets=links.DATASETS,
        rivals=RIVALS, num_trials=(5, "candidates of the search"),
        num_searched=(2, "splits of the search"), num_splits=(10, "compared; PubMed at most 5"),
        num_steps=200, every=(10, "steps from one look at validation links to the next"),
        data_root=Path, device="cpu", results=RESULTS / "links.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
