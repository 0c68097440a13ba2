# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Link prediction by DGLFRM, NMM-DGLFRM and rivals. README.md explains the tasks."""

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from time import process_time

import numpy as np
import pyro
import torch
from pyro.infer import TraceMeanField_ELBO
from scipy.sparse import identity
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import utils
from torch_geometric.data import Data
from torch_geometric.nn import MLP, VGAE, GCNConv, GraphSAGE, Linear

from benchmarks.links.data import LinkSplit, link_graph, link_split, published_split
from benchmarks.shared import records
from benchmarks.shared.backbones import RandomInput
from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.timing import timed
from benchmarks.shared.training import steps
from pyro_nmm import Neighborhood
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.models import DGLFRM

#: Graphs that settings are searched on. PubMed is too large: a fit takes 15 minutes.
DATASETS = ["nips12", "yeast", "cora", "citeseer"]
#: By DGLFRM's authors (nikhil-dce/SBM-meet-GNN, run_expr.sh). Yeast takes the figures of NIPS12.
CITATIONS = {"hidden": 32, "decoder": [32, 16], "num_communities": 50, "concentration": 10.0}
NETWORKS = {"hidden": 128, "decoder": [64, 32], "num_communities": 100, "concentration": 40.0}
#: By Li et al. (2023, "Evaluating graph neural networks for link prediction", NeurIPS) for Cora.
SAGE = {"hidden": 128, "layers": 1}
#: The NMM's estimators of the gradient, and attention that starts at uniform or at the node itself.
ESTIMATORS = ({"estimator": "local"}, {"estimator": "linear"}, {"estimator": "local", "gamma": 3.0})
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
        return [chosen(rows, dataset, "original") | choice for choice in ESTIMATORS]
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


GUIDES = ("original", "nmm")
DRAWS = 100  #: of the memberships that predict links


def build(problem: Problem, guide: str, settings: dict, seed: int) -> DGLFRMGuide:
    """A guide and its model. Both guides start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    data, options = problem.data, dict(settings)
    of_model = {name: options.pop(name) for name in ("num_communities", "concentration")}
    of_model["hidden"] = tuple(options.pop("decoder"))
    of_model["num_features"] = data.num_features if data.has_features else 0
    target = DGLFRM(data.num_nodes, **of_model, name=f"{guide} model")
    hood = Neighborhood(problem.split.train, data.num_nodes) if guide == "nmm" else None
    options["hidden"] = options["hidden"], options.pop("width", 16)
    return DGLFRMGuide(target, data.num_features, hood, **options)


def fit(args, problem: Problem, guide: str, settings: dict, seed: int) -> tuple[DGLFRMGuide, dict]:
    """The fitted guide, and what its row says of the fit. Losses are in nats per pair of nodes."""
    pair, data, split = build(problem, guide, settings, seed), problem.data, problem.split
    known = split.train, data.x, split.held_out
    curve, seconds = timed(fit_links, pair, *known, num_steps=args.num_steps or 500)
    inputs = pair.eval().model, pair.guide, *known
    with torch.no_grad():
        loss = mean(TraceMeanField_ELBO().loss(*inputs) for _ in range(20)) / data.num_nodes**2
    row = {"settings": settings, "loss in training": mean(curve[-50:]), "loss": loss}
    return pair, row | {"seconds": seconds / len(curve)}


def measure(args, problem: Problem, guide: str, settings: dict, seed: int, parts, draws=DRAWS):
    """The row of a fit, with the scores of ``parts``."""
    pair, row = fit(args, problem, guide, settings, seed)
    for part in parts:
        known = problem.pairs(part), problem.split.train, problem.data.x
        row[part] = problem.scores(part, pair.link_logits(*known, draws))
    return row


def walks(edge_index: Tensor, num_nodes: int, pairs: Tensor, longest: int = 6) -> Tensor:
    """``(longest, P)``: numbers of walks between nodes by length, for Katz's index (1953)."""
    graph = utils.to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes).tocsr().astype(float)
    powers, (start, end) = [identity(num_nodes, format="csr")], pairs.numpy()
    for _ in range((longest + 1) // 2):
        powers.append(powers[-1] @ graph)
    # A walk is two walks of half its length that meet.
    halves = ((powers[n // 2], powers[n - n // 2]) for n in range(1, longest + 1))
    counts = [a[start].multiply(b[end]).sum(1) for a, b in halves]
    return torch.from_numpy(np.hstack(counts).T.copy())


def katz_index(counts: Tensor, discount: float) -> Tensor:
    """``(P,)``: the sum of the numbers of walks, each step at a discount."""
    return discount ** torch.arange(1, len(counts) + 1, dtype=counts.dtype) @ counts


def katz_scores(problem: Problem) -> dict:
    """Scores on test links, at the discount with the best average precision on validation links."""
    split, size = problem.split, problem.data.num_nodes
    val, test = (walks(split.train, size, problem.pairs(part)) for part in ("val", "test"))
    rates = (0.1, 0.03, 0.01, 0.003, 0.001)
    best = max(rates, key=lambda rate: problem.scores("val", katz_index(val, rate))["AP"])
    sizes = [split.train.shape[1] // 2, split.val.shape[1], split.test.shape[1]]
    found = problem.scores("test", katz_index(test, best))
    return {"discount": best, "sizes": sizes, "test": found}


class _Gaussians(nn.Module):
    """Means and log-scales of the nodes' vectors, from two graph convolutions."""

    def __init__(self, num_features: int, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first = RandomInput(GCNConv(num_features, hidden, cached=True, bias=False), dropout)
        heads = (GCNConv(hidden, width, cached=True, bias=False) for _ in range(2))
        self.heads, self.dropout = nn.ModuleList(heads), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
        hidden = F.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        return tuple(head(hidden, edge_index) for head in self.heads)


class LinksVGAE(VGAE):
    """PyG's VGAE (Kipf and Welling, 2016), with the normalisation of its one graph cached."""

    def __init__(self, num_features: int, hidden: int = 32, width: int = 16, dropout: float = 0.0):
        super().__init__(_Gaussians(num_features, hidden, width, dropout))

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The authors' loss in expectation. Links weigh as much as all other pairs."""
        number, count, z = len(x), edge_index.shape[1], self.encode(x, edge_index)
        true = utils.add_self_loops(edge_index, num_nodes=number)[0]
        false = utils.negative_sampling(edge_index, number, count)
        linked, apart = (self.decode(z, pairs, sigmoid=False) for pairs in (true, false))
        others = 1 - number / (number**2 - count)  # share of drawn pairs that are no loops
        cost = F.softplus(-linked).sum() / count + others * F.softplus(apart).mean()
        return cost / 2 + self.kl_loss() / number

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``: inner products, of the means in evaluation mode."""
        return self.decode(self.encode(x, edge_index), pairs, sigmoid=False)


class LinksSAGE(nn.Module):
    """GraphSAGE (Hamilton, Ying and Leskovec, 2017) and a perceptron on products of outputs."""

    def __init__(self, num_features: int, hidden: int = 128, layers: int = 1, dropout: float = 0.5):
        super().__init__()
        # GraphSAGE's own first layer does not take sparse features.
        linear = Linear(num_features, hidden, bias=False, weight_initializer="glorot")
        self.first = RandomInput(linear, dropout)
        self.network = GraphSAGE(hidden, hidden, layers, dropout=dropout)
        self.score = MLP([hidden, hidden, hidden, 1], dropout=dropout, norm=None)

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Cross-entropy of a quarter of the links, hidden from the network, and of other pairs."""
        links = edge_index[:, edge_index[0] < edge_index[1]]
        links = links[:, torch.randperm(links.shape[1])]
        count = max(1, links.shape[1] // 4)
        asked, seen = links[:, :count], utils.to_undirected(links[:, count:], num_nodes=len(x))
        pairs = torch.cat([asked, utils.negative_sampling(edge_index, len(x), count)], 1)
        linked = (torch.arange(pairs.shape[1]) < count).to(x.dtype)
        return F.binary_cross_entropy_with_logits(self.logits(pairs, x, seen), linked)

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``."""
        z = self.network(self.first(x), edge_index)
        return self.score(z[pairs[0]] * z[pairs[1]]).squeeze(-1)


RIVALS = {"vgae": LinksVGAE, "sage": LinksSAGE}


def measure_rival(args, problem: Problem, rival: str, settings: dict, seed: int, parts, every=10):
    """Scores at the step with the best AP on validation links, of every few steps and the last."""
    pyro.set_rng_seed(seed)
    x, train, num_steps, looks = problem.data.x, problem.split.train, args.num_steps or 200, []
    network = RIVALS[rival](problem.data.num_features, **settings)
    began, optimizer = process_time(), torch.optim.Adam(network.parameters(), lr=0.01)

    @torch.no_grad()
    def scores(part: str) -> dict[str, float]:
        return problem.scores(part, network.eval().logits(problem.pairs(part), x, train))

    for step in steps(optimizer, lambda: network.train().loss(x, train), num_steps):
        if step % every == 0 or step == num_steps:
            looks.append({"step": step} | {part: scores(part) for part in parts})
    seconds, best = process_time() - began, max(looks, key=lambda row: row["val"]["AP"])
    return {"settings": settings, "seconds": seconds / num_steps} | best


METHODS = [*GUIDES, *RIVALS]


def reproduce(args, results: Records) -> None:
    for key in results.missing(task="reproduce", dataset="cora", split=(0, 1), seed=range(3)):
        path = args.data_root / f"linkpred_splits/cora/split_{key['split']}.npz"
        data = load("cora", args.data_root)
        problem = Problem(data, published_split(path, data.num_nodes))
        first, *_ = candidates(results.rows, "cora", "original")
        row = measure(args, problem, "original", first, key["seed"], ["test"], draws=15)
        results.add(**key, **row)


def measured(args, key: dict, guide: str, settings: dict) -> dict:
    """The row of a guide or rival on a random split. Searches do not see test links."""
    method = measure_rival if guide in RIVALS else measure
    problem = Problem.of(args, key["dataset"], key["seed"])
    parts = ["val"] if key["task"] == "search" else ["val", "test"]
    return method(args, problem, guide, settings, key["seed"], parts)


def search(args, results: Records) -> None:
    for dataset, guide in itertools.product(args.datasets, args.guides):
        trials = candidates(results.rows, dataset, guide)
        known = {"task": "search", "dataset": dataset, "guide": guide, "trial": range(len(trials))}
        for key in results.missing(**known, seed=range(args.num_searched)):
            results.add(**key, **measured(args, key, guide, trials[key["trial"]]))


def compared(args) -> range:
    """Seeds of splits that no setting was searched on."""
    return range(args.num_searched, args.num_searched + args.num_splits)


def compare(args, results: Records) -> None:
    for dataset, guide in itertools.product(args.datasets, args.guides):
        settings = chosen(results.rows, dataset, guide)
        known = {"task": "compare", "dataset": dataset, "guide": guide, "settings": settings}
        for key in results.missing(**known, seed=compared(args)):
            results.add(**key | measured(args, key, guide, settings))


def katz(args, results: Records) -> None:
    for key in results.missing(task="katz", dataset=args.datasets, seed=compared(args)):
        results.add(**key, **katz_scores(Problem.of(args, key["dataset"], key["seed"])))


TASKS = reproduce, search, compare, katz
CHOICES = {"datasets": [*DATASETS, "pubmed"], "guides": METHODS}
OPTIONS = CHOICES | {"choices": CHOICES, "datasets": DATASETS, "data_root": Path}
OPTIONS |= {"num_searched": (2, "splits of the search"), "num_splits": (10, "other splits")}
OPTIONS |= {"num_steps": (int, "steps of Adam; default: 500, rivals 200")}
main = command(__doc__, TASKS, **OPTIONS, results=RESULTS / "links.jsonl")

if __name__ == "__main__":
    main()
