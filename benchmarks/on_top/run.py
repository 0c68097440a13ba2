# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
On top of trained classifiers: StackedNMM against what else calibrates them.

    python benchmarks/calibration.py priors splits labels counts questions weights --data-root F

Tasks: ``priors`` (the numbers of StackedNMM fitted to nearly all labels of splits that no table
shows, from which its priors are), ``splits`` (the published splits of three graphs), ``labels``
(more and more of the test labels known), ``counts`` (of labels in sets of nodes), ``questions``
(which labels to ask for) and ``weights`` (of edges). F holds ``planetoid/`` and ``gats_splits/``;
with ``--logits`` classifiers and the losses of every node are kept in a folder, and ``bootstrap``
reads these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pyro
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.nodes.fits import node_scores, pair_log_probs
from benchmarks.on_top import rivals
from benchmarks.on_top.counts import counts
from benchmarks.on_top.data import NUM_FOLDS, classifier, load, network
from benchmarks.on_top.gmnn import gmnn
from benchmarks.on_top.labels import labels
from benchmarks.on_top.potts import potts
from benchmarks.on_top.questions import questions
from benchmarks.on_top.weights import weights
from benchmarks.shared.common import RESULTS, Records, pick, read, run
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import inner_edges
from pyro_nmm.metrics import independent_pairs
from pyro_nmm.models import PooledScores, StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.pooled import PRIOR

GRAPHS = ["cora", "citeseer", "pubmed"]
#: Graphs and splits that the priors are from.
PRIOR_GRAPHS, PRIOR_SPLITS = ["cora", "citeseer", "digits"], [100, 101]
#: Of the graphs that priors are from and that are reported: the other one.
OTHER = {"cora": "citeseer", "citeseer": "cora"}
MOST_PAIRS = 5000
OURS = "StackedNMM"


def methods(graph: str, kind: str) -> dict[str, Callable]:
    """Marginals or, of ours, a fitted module, by name."""
    smooth = rivals.correct_and_smooth

    def on_smooth(data, hood, logits, known, held):
        return potts(data, hood, smooth(data, hood, logits, known, held), known, held)

    def on_temperature(data, hood, logits, known, held):
        return potts(data, hood, logits.softmax(-1), known, held)

    found = {
        "raw": lambda data, hood, logits, known, held: logits.softmax(-1),
        "temperature": rivals.temperature,
        "vector scaling": rivals.vector,
        "vector scaling, shrunk": rivals.shrunk_vector,
        "three numbers": rivals.three_numbers,
        "CaGCN": rivals.cagcn,
        "GATS": partial(rivals.gats, decay=rivals.GATS_DECAY.get((graph, kind), 5e-3)),
        "C&S": smooth,
        "Potts": on_temperature,
        "Potts on C&S": on_smooth,
        "GMNN": partial(taught, kind=kind),
        "the pool alone": pool_alone,
        "StackedNMM, scores alone": partial(stacked, pool=False),
        "StackedNMM": stacked,
    }
    if graph in OTHER:
        found["StackedNMM, the other graph's priors"] = partial(stacked, prior=OTHER[graph])
    return found


def taught(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor, kind: str):
    """GMNN with the same kind of networks, and its temperature."""

    def make(width: int) -> torch.nn.Module:
        return network(kind, width, logits.shape[1])

    return rivals.temperature(data, hood, gmnn(make, data), known, held)


def stacked(data: Data, hood: Neighborhood, logits: Tensor, known, held, pool=True, prior=None):
    """``prior``: the graph whose labels alone choose the means of the priors."""
    module = StackedNMM(logits.shape[1], pool=pool)
    if prior is not None:
        module.prior = prior_of(module.prior, prior)
    module.fit(hood, logits, data.y, known, held)
    labels = (data.y, known) if pool else ()
    return module.mixture(hood, logits, *labels)


def prior_of(prior: dict, graph: str) -> dict[str, tuple[float, float]]:
    """With the medians of a graph's rows of ``priors``; offsets, whose mean is 0, with its sd."""
    fits = pick(read(RESULTS / "calibration.jsonl"), task="priors", dataset=graph)
    found = {name: median(row["numbers"][name] for row in fits) for name in prior}
    means = {name: (found[name], sd) for name, (_, sd) in prior.items()}
    return means | {"pool.offsets": (0.0, found["pool.offsets"])}


def pool_alone(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    """What StackedNMM is without an NMM: its pool, by maximum a posteriori."""
    pool = PooledScores(logits.shape[1])
    unit = logits.std()
    pool.temperature.fill_(unit * temperature_scaling(logits / unit, data.y, held))
    terms = pool.terms(hood, logits, data.y, known)

    def loss() -> Tensor:
        numbers = [(getattr(pool, name), *prior) for name, prior in PRIOR.items()]
        prior = sum(((number - mean) / sd).square().sum() for number, mean, sd in numbers)
        cost = F.nll_loss(pool(terms)[held].log(), data.y[held], reduction="sum")
        return (cost + prior / 2) / int(held.sum())

    rivals.minimised(list(pool.parameters()), loss)
    return pool(terms).detach()


def quality(found: Tensor | NeighborMixture, data: Data, known: Tensor, split: int):
    """Scores on the test nodes: alone, in adjacent pairs and all together."""
    test, y = data.test_mask, data.y
    pairs = inner_edges(data.edge_index, test)
    order = torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(split))
    pairs = pairs[:, order[:MOST_PAIRS]]
    posterior = None
    if isinstance(found, NeighborMixture):
        posterior = found.condition(y, known, num_samples=64)
        probs = posterior.marginals()
    else:
        probs = found
    row = {"test": node_scores(probs[test], y[test])}
    row["own product"] = pair_log_probs(independent_pairs(probs, pairs), y, pairs).mean().item()
    row["joint"] = -row["test"]["nll"]
    if posterior is not None:
        row["pairs"] = pair_log_probs(posterior.pairwise(pairs), y, pairs).mean().item()
        joint = found.log_likelihood(y, test, known, 64)
        row["joint"] = joint.item() / int(test.sum())
    return row, probs


def node_losses(probs: Tensor, data: Data) -> Tensor:
    """``(2, n)``: the negative log-likelihood and the Brier score of every test node."""
    probs, y = probs[data.test_mask], data.y[data.test_mask, None]
    gap = probs.scatter_add(1, y, -torch.ones_like(y, dtype=probs.dtype))
    return torch.stack([-probs.gather(1, y)[:, 0].clamp(min=1e-12).log(), gap.square().sum(-1)])


def splits(args, results: Records) -> None:
    """Every method on every classifier of the published splits."""
    for graph in args.graphs:
        for kind in args.backbones:
            every = methods(graph, kind)
            names = list(every) if args.methods == [""] else args.methods
            each = {"split": args.splits, "fold": range(args.num_folds), "method": names}
            for key in results.missing(task="splits", dataset=graph, backbone=kind, **each):
                cell = graph, kind, key["split"], key["fold"], args.data_root
                data, hood = load(graph, *cell[2:])
                logits = classifier(*cell, args.logits, args.num_epochs)
                pyro.set_rng_seed(key["split"])
                arguments = data, hood, logits, data.train_mask, data.val_mask
                found, seconds = timed(every[key["method"]], *arguments)
                row, probs = quality(found, data, data.train_mask, key["split"])
                if args.logits:
                    name = "_".join(map(str, (*cell[:4], key["method"])))
                    torch.save(node_losses(probs, data), args.logits / f"{name}.nodes")
                results.add(**key, **row, **{"fit seconds": seconds})


def bootstrap(args, results: Records) -> None:
    """Differences from StackedNMM once more: 95 % intervals over nodes, of the losses kept."""
    if args.logits is None:
        raise ValueError("bootstrap reads the losses that other tasks keep: give --logits")
    for graph in args.graphs:
        for kind in args.backbones:
            runs = [(split, fold) for split in args.splits for fold in range(args.num_folds)]
            names = [name for name in methods(graph, kind) if name != OURS]
            for key in results.missing(
                task="bootstrap", dataset=graph, backbone=kind, method=names
            ):
                changes = [kept_change(args, graph, kind, run, key["method"]) for run in runs]
                if all(change is not None for change in changes):
                    nll, brier = over_nodes(torch.stack(changes))
                    results.add(**key, runs=len(runs), nll=nll, brier=brier)


def kept_change(args, graph: str, kind: str, run: tuple, method: str) -> Tensor | None:
    """``(3, N)``: where a node is a test node, and by how much our losses are above another's."""
    name = "_".join(map(str, (graph, kind, *run)))
    paths = [args.logits / f"{name}_{each}.nodes" for each in (OURS, method)]
    if not all(path.exists() for path in paths):
        return None
    ours, theirs = (torch.load(path, weights_only=True) for path in paths)
    data, _ = load(graph, *run, args.data_root)
    change = ours.new_zeros(3, data.num_nodes)
    change[:, data.test_mask] = torch.cat([torch.ones_like(ours[:1]), ours - theirs])
    return change


def over_nodes(changes: Tensor, num_resamples: int = 2000) -> list[list[float]]:
    """Of ``(R, 3, N)``, for either loss: the mean difference and its 95 % bootstrap interval."""
    times, nll, brier = changes.double().sum(0)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(num_resamples):
        drawn = torch.randint(len(times), times.shape, generator=generator)
        found.append(torch.stack([nll[drawn].sum(), brier[drawn].sum()]) / times[drawn].sum())
    mean = torch.stack([nll.sum(), brier.sum()]) / times.sum()
    low, high = torch.stack(found).quantile(torch.tensor([0.025, 0.975]).double(), 0)
    return torch.stack([mean, low, high], 1).tolist()


def priors(args, results: Records) -> None:
    """
    The numbers of StackedNMM, with priors so wide that they hardly matter, fitted to all labels of
    a split that the classifier did not learn from.
    """
    each = {"split": PRIOR_SPLITS, "fold": range(args.num_folds)}
    kinds = {"dataset": args.prior_graphs, "backbone": args.backbones}
    for key in results.missing(task="priors", **kinds, **each):
        cell = key["dataset"], key["backbone"], key["split"], key["fold"], args.data_root
        data, hood = load(cell[0], *cell[2:])
        logits = classifier(*cell, args.logits, args.num_epochs)
        module = StackedNMM(logits.shape[1])
        module.prior = {name: (mean, 10 * sd) for name, (mean, sd) in module.prior.items()}
        pyro.set_rng_seed(key["split"])
        module.fit(hood, logits, data.y, data.train_mask, data.val_mask | data.test_mask)
        numbers = {name: p.item() for name, p in module.named_parameters() if p.numel() == 1}
        numbers["pool.offsets"] = module.pool.offsets.std().item()
        results.add(**key, numbers=numbers)


def main(argv: list[str] | None = None) -> Records:
    small = {"graphs": ["digits"], "prior_graphs": ["digits"], "backbones": ["gcn"]}
    small |= {"splits": [100], "num_folds": 1, "num_epochs": 2, "seeds": [0]}
    return run(
        argv, __doc__, (priors, splits, labels, counts, bootstrap, questions, weights), smoke=small,
        choices={"backbones": ["gcn", "gat", "mlp"]},
        graphs=GRAPHS, prior_graphs=PRIOR_GRAPHS, backbones=["gcn", "gat"], splits=[0, 1, 2, 3, 4],
        seeds=list(range(5)),
        num_folds=NUM_FOLDS, methods=([""], "names, default all"), num_epochs=2000,
        data_root=Path, logits=(Path, "folder for classifiers' logits"),
        results=RESULTS / "calibration.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
