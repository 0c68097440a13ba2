# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
On top of trained classifiers: StackedNMM beside other ways to calibrate them.

    python -m benchmarks.on_top.run splits labels counts questions weights --data-root F
    python -m benchmarks.on_top.run splits bootstrap --losses G --data-root F
    python -m benchmarks.on_top.run priors --graphs cora citeseer digits --data-root F

``splits`` runs every method on the published splits, and ``bootstrap`` takes intervals over nodes
of the losses that ``splits`` leaves in G. F holds ``planetoid/`` and ``gats_splits/``.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.nodes import node_scores, pair_log_probs
from benchmarks.on_top import rivals
from benchmarks.on_top.data import NUM_FOLDS, cases, given, network
from benchmarks.on_top.networks import cagcn, gats, gmnn
from benchmarks.on_top.uses import counts, labels, questions
from benchmarks.shared.records import RESULTS, Records, pick, read, run
from benchmarks.shared.timing import timed
from pyro_nmm import NeighborMixture
from pyro_nmm.datasets.nodes import inner_edges
from pyro_nmm.metrics import independent_pairs
from pyro_nmm.models import PooledScores, StackedNMM, edge_weights, temperature_scaling

FILE = RESULTS / "calibration.jsonl"
#: Each reported graph that the priors are from, and the other one.
OTHER = {"cora": "citeseer", "citeseer": "cora"}
MOST_PAIRS, NUM_RESAMPLES = 5000, 2000
OURS, POOL, SCORES = "StackedNMM", "the pool alone", "StackedNMM, scores alone"
ELSEWHERE = "StackedNMM, the other graph's priors"
#: A file with the losses of all nodes in one run.
LOSSES = "{dataset}_{backbone}_{split}_{fold}_{method}.pt"


def taught(data: Data) -> Tensor:
    """GMNN with networks of the same kind, and its temperature."""
    data = data.clone()
    data.logits = gmnn(partial(network, data.backbone, num_classes=data.logits.shape[1]), data)
    return rivals.temperature(data)


def stacked(data: Data, pool: bool = True, elsewhere: bool = False) -> NeighborMixture:
    """``elsewhere``: the priors' means are medians over the fits to the other graph."""
    module = StackedNMM(data.logits.shape[1], pool=pool)
    if elsewhere:
        fits = pick(read(FILE), task="priors", dataset=OTHER[data.graph])
        found = {name: median(row["numbers"][name] for row in fits) for name in module.prior}
        module.prior = {name: (found[name], sd) for name, (_, sd) in module.prior.items()}
        # Offsets have mean zero; a fit's number for them is their standard deviation.
        module.prior["pool.offsets"] = (0.0, found["pool.offsets"])
    module.fit(*given(data), data.val_mask)
    return module.mixture(*given(data)[: 4 if pool else 2])


def pool_alone(data: Data) -> Tensor:
    """StackedNMM's pool without an NMM, by maximum a posteriori."""
    logits, y, held, size = data.logits, data.y, data.val_mask, data.logits.shape[1]
    pool, unit, prior = PooledScores(size), logits.std(), StackedNMM(size).prior
    pool.temperature.fill_(unit * temperature_scaling(logits / unit, y, held))
    terms = pool.terms(data.hood, logits, y, data.train_mask)

    def loss() -> Tensor:
        cost = F.nll_loss(pool(terms)[held].log(), y[held], reduction="sum")
        numbers = ((value, *prior[f"pool.{name}"]) for name, value in pool.named_parameters())
        penalty = sum(((value - mean) / sd).square().sum() for value, mean, sd in numbers)
        return (cost + penalty / 2) / int(held.sum())

    rivals.fit(loss, list(pool.parameters()))
    return pool(terms).detach()


METHODS: dict[str, Callable[[Data], Tensor | NeighborMixture]] = {
    "raw": lambda data: data.logits.softmax(-1),
    "temperature": rivals.temperature,
    "vector scaling": rivals.vector,
    "vector scaling, shrunk": rivals.shrunk_vector,
    "three numbers": rivals.three_numbers,
    "CaGCN": cagcn,
    "GATS": gats,
    "C&S": rivals.correct_and_smooth,
    "Potts": lambda data: rivals.potts(data, data.logits.softmax(-1)),
    "Potts on C&S": lambda data: rivals.potts(data, rivals.correct_and_smooth(data)),
    "GMNN": taught,
    POOL: pool_alone,
    SCORES: partial(stacked, pool=False),
    OURS: stacked,
    ELSEWHERE: partial(stacked, elsewhere=True),
}


def quality(found: Tensor | NeighborMixture, data: Data, split: int) -> tuple[dict, Tensor]:
    """Scores on the test nodes, alone, in adjacent pairs and all together; and marginals."""
    test, y, known = data.test_mask, data.y, data.train_mask
    pairs = inner_edges(data.edge_index, test)
    order = torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(split))
    pairs = pairs[:, order[:MOST_PAIRS]]
    joint = isinstance(found, NeighborMixture)
    posterior = found.condition(y, known, num_samples=64) if joint else None
    probs = posterior.marginals() if joint else found
    row: dict = {"test": node_scores(probs[test], y[test])}
    row["own product"] = pair_log_probs(independent_pairs(probs, pairs), y, pairs).mean().item()
    row["joint"] = -row["test"]["nll"]
    if joint:
        row["pairs"] = pair_log_probs(posterior.pairwise(pairs), y, pairs).mean().item()
        row["joint"] = found.log_likelihood(y, test, known, 64).item() / int(test.sum())
    return row, probs


def node_losses(probs: Tensor, data: Data) -> Tensor:
    """``(3, N)``: one for every test node, its negative log-likelihood and its Brier score."""
    nll = -probs.gather(1, data.y[:, None])[:, 0].clamp(min=1e-12).log()
    brier = (probs - F.one_hot(data.y, probs.shape[1])).square().sum(-1)
    return torch.stack([torch.ones_like(nll), nll, brier]).double() * data.test_mask


def splits(args, results: Records) -> None:
    """Every method on every classifier of the published splits."""
    for graph in args.graphs:
        methods = [name for name in args.methods if name != ELSEWHERE or graph in OTHER]
        for key, data in cases(args, results, "splits", dataset=graph, method=methods):
            found, seconds = timed(METHODS[key["method"]], data)
            row, probs = quality(found, data, key["split"])
            if args.losses:
                args.losses.mkdir(parents=True, exist_ok=True)
                torch.save(node_losses(probs, data), args.losses / LOSSES.format(**key))
            results.add(**key, **row, **{"fit seconds": seconds})


def bootstrap(args, results: Records) -> None:
    """Differences from StackedNMM over all runs, with 95 % intervals over nodes."""
    if args.losses is None:
        raise ValueError("bootstrap reads the losses that splits keeps: give --losses to both")
    runs = [{"split": s, "fold": f} for s in args.splits for f in range(args.num_folds)]
    each = {"dataset": args.graphs, "backbone": args.backbones}
    each["method"] = [name for name in args.methods if name != OURS]
    for key in results.missing(task="bootstrap", **each):
        both = [
            [args.losses / LOSSES.format(**key | run | {"method": name}) for run in runs]
            for name in (OURS, key["method"])
        ]
        if all(path.exists() for path in both[0] + both[1]):
            sums = (sum(torch.load(path, weights_only=True) for path in paths) for paths in both)
            nll, brier = over_nodes(*sums)
            results.add(**key, nll=nll, brier=brier)


def over_nodes(ours: Tensor, theirs: Tensor) -> list[list[float]]:
    """
    Mean difference of a test node and its 95 % bootstrap interval, for both losses.

    :param ours: ``(3, N)`` sums of :func:`node_losses` over runs.
    """
    changes, size = torch.stack([ours[0], *(ours - theirs)[1:]]), ours.shape[1]
    generator, draws = torch.Generator().manual_seed(0), [torch.arange(size)]
    for _ in range(NUM_RESAMPLES):
        draws.append(torch.randint(size, (size,), generator=generator))
    sums = torch.stack([changes[:, nodes].sum(1) for nodes in draws])
    means = sums[:, 1:] / sums[:, :1]
    interval = means[1:].quantile(torch.tensor([0.025, 0.975]).to(means), 0)
    return torch.stack([means[0], *interval], 1).tolist()


def priors(args, results: Records) -> None:
    """Parameters under priors ten times as wide, fitted to all labels but the training nodes'."""
    for key, data in cases(args, results, "priors", split=[100, 101]):
        module = StackedNMM(data.logits.shape[1])
        module.prior = {name: (mean, 10 * sd) for name, (mean, sd) in module.prior.items()}
        module.fit(*given(data), data.val_mask | data.test_mask)
        numbers = {name: p.item() for name, p in module.named_parameters() if p.numel() == 1}
        numbers["pool.offsets"] = module.pool.offsets.std().item()
        results.add(**key, numbers=numbers)


def weights(args, results: Records) -> None:
    """StackedNMM on the digits with edge weights and without, on a GCN that has none."""
    each = {"split": [200 + split for split in args.splits], "method": ["none", "by distance"]}
    for key, data in cases(args, results, "weights", dataset="digits", backbone="gcn", **each):
        weight, test = None, data.test_mask
        if key["method"] == "by distance":  # one over e at the median of the squared distances
            distance = data.x[data.edge_index].diff(dim=0)[0].square().sum(-1)
            near = (-distance / distance.median()).exp()
            weight = edge_weights(data.hood, data.edge_index, near)
        module = StackedNMM(data.logits.shape[1])
        module.fit(*given(data), data.val_mask, edge_weight=weight)
        mixture = module.mixture(*given(data), weight)
        row = {"test": node_scores(mixture.marginals()[test], data.y[test])}
        joint = mixture.log_likelihood(data.y, test, data.train_mask, 64)
        results.add(**key, **row, joint=joint.item() / int(test.sum()))


def main(argv: list[str] | None = None) -> Records:
    tasks = priors, splits, bootstrap, labels, counts, questions, weights
    choices = {"backbones": ["gcn", "gat", "mlp"], "methods": list(METHODS)}
    options: dict = {"graphs": ["cora", "citeseer", "pubmed"], "backbones": ["gcn", "gat"]}
    options |= {"splits": [0, 1, 2, 3, 4], "num_folds": NUM_FOLDS, "methods": list(METHODS)}
    options |= {"data_root": Path, "losses": (Path, "folder of the losses of all nodes")}
    return run(argv, __doc__, tasks, choices=choices, results=FILE, **options)


if __name__ == "__main__":
    main()
