# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of classifiers and NMMs to the labels of nodes, and scores of their predictions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from statistics import mean

import pyro
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.shared import records
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood
from pyro_nmm.datasets.nodes import digits, planetoid, random_split, select_split
from pyro_nmm.guides import Consistency, fit_classifier, fit_nmm
from pyro_nmm.metrics import brier, independent_pairs, mean_log_prob
from pyro_nmm.models import NMMNetwork, StackedNMM, temperature_scaling
from pyro_nmm.models.backbones import appnp, gat, gcn, mlp

BACKBONES = {"gcn": gcn, "gat": gat, "appnp": appnp, "mlp": mlp}
#: Settings for many labels, where no search was run.
DEFAULT = {"lr": 0.02, "weight_decay": 5e-4, "dropout": 0.5, "floor": 0.1, "gamma": 2.0}
DEFAULT |= {"weight": 0.5, "temperature": 0.5, "memory": 0.9}


@cache
def load(name: str, root, device: str = "cpu"):
    """A graph with the masks of its public split, and its neighbourhoods."""
    if name == "digits":
        data = random_split(digits(), 0.05, 0.1, 0.5, seed=0)
    else:
        data = select_split(planetoid(name, root))
    return data.to(device), Neighborhood(data.edge_index, data.num_nodes).to(device)


def chosen(rows: list[dict], **key) -> dict:
    """Settings with the best mean validation accuracy of a search, then likelihood."""

    def quality(trial: list[dict]) -> tuple[float, float]:
        return mean(r["val"]["accuracy"] for r in trial), -mean(r["val"]["nll"] for r in trial)

    return DEFAULT | records.chosen(rows, quality, num_splits=2, **key)


def random_settings(method: str, dataset: str, trial: int) -> dict:
    """A trial's draw from the pools of the paper's appendix, and ours."""
    heavy = [5e-4, 2e-3, 5e-3]
    pools = {"lr": [0.01, 0.03, 0.05], "weight_decay": heavy, "dropout": [0.5, 0.6, 0.7]}
    if method != "backbone":
        # The backbones' own searches chose the heavier decays on PubMed.
        decays = heavy if dataset == "pubmed" else [2e-4, 5e-4, 1e-3]
        pools = {"lr": [0.01, 0.02, 0.03], "weight_decay": decays, "dropout": [0.5, 0.6]}
        if "consistency" in method:
            pools |= {"weight": [0.5, 1.0], "temperature": [0.3, 0.5, 0.7], "memory": [0.8, 0.95]}
        pools |= {"floor": [0.01, 0.1, 1.0], "gamma": [0.0, 2.0, 3.0]}
    rng = random.Random(0)
    draws = [{name: rng.choice(pool) for name, pool in pools.items()} for _ in range(trial + 1)]
    return draws[-1]


def backbone(kind: str, data, width: int, **options) -> nn.Module:
    module = BACKBONES[kind](data.num_features, width, **options)
    if data.x.layout == torch.strided:
        module.dropout = 0.0  # dropout of dense features would take most of an epoch
    return module


def nmm_network(kind: str, data, drop: dict | None = None, **options) -> NMMNetwork:
    """An NMM's two networks. ``drop`` is their dropout; the attention's network drops no nodes."""
    drop, classes = drop or {}, int(data.y.max()) + 1
    labels = backbone(kind, data, classes, **drop)
    width, drop = 64 if kind == "gcn" else 32, drop | {"drop_nodes": 0.0}
    attention = backbone(kind, data, width, attention=True, **drop)
    return NMMNetwork(labels, attention, num_classes=classes, **options)


def fit(key: dict, data, hood, settings: dict, wrap: Callable = lambda net: net, **options):
    """
    Logits of a classifier, or a NeighborMixture; and the validation curve. ``wrap`` may change the
    network of an NMM.
    """
    pyro.set_rng_seed(key["seed"])
    method, kind, classes = key["method"], key["backbone"], int(data.y.max()) + 1
    drop, device = {"dropout": settings["dropout"]}, data.y.device
    names = {"lr", "weight_decay", "num_epochs", "estimator"} & settings.keys()
    options = {name: settings[name] for name in names} | options
    if "consistency" in method:
        agreement = {name: settings[name] for name in ("weight", "temperature", "memory")}
        options["consistency"] = Consistency(data.num_nodes, classes, **agreement).to(device)
        drop["drop_nodes"] = 0.5
    if "NMM" not in method:
        return fit_classifier(backbone(kind, data, classes, **drop).to(device), data, **options)
    more = {name: settings[name] for name in {"link", "floor", "gamma"} & settings.keys()}
    network = wrap(nmm_network(kind, data, drop, **more).to(device))
    few = int(data.train_mask.sum()) <= 300
    options.setdefault("estimator", "reward_to_go" if few else "one_step_credit")
    return fit_nmm(network, data, hood, **options)


def variants(method: str, fitted, hood, data) -> Iterator[tuple]:
    """
    Names, models and seconds: StackedNMM and temperature scaling on a fit, then the fit itself. The
    fit's own row comes last, because an interrupted run repeats a fit without it.
    """
    mixes = "NMM" in method
    scores = fitted.alpha.log() if mixes else fitted
    stack, known = StackedNMM(pool=False), (data.y, data.train_mask, data.val_mask)
    stacked, seconds = timed(stack.fit, hood, scores, *known)
    yield method + ", stacked", stacked.mixture(hood, scores), seconds
    if not mixes:
        yield method + ", temperature", calibrated(scores, data), None
    yield method, fitted if mixes else scores.softmax(-1), None


def calibrated(scores: Tensor, data) -> Tensor:
    """Marginals at the temperature that the validation nodes choose."""
    return (scores / temperature_scaling(scores, data.y, data.val_mask)).softmax(-1)


def node_scores(probs: Tensor, y: Tensor) -> dict:
    return {
        "accuracy": (probs.argmax(-1) == y).double().mean().item(),
        "nll": -mean_log_prob(probs.clamp(min=1e-12), y).item(),
        "ece": multiclass_calibration_error(probs, y, probs.shape[-1], n_bins=15).item(),
        "brier": brier(probs, y).item(),
    }


def evaluate(model, data, pairs=None, joint=False, temperature=None) -> dict:
    """
    Scores of marginals or of a mixture. ``joint`` adds log p(y_test | y_train) per node. ``pairs``
    adds log-likelihoods of pairs, and their gains on the calibrated marginals ``temperature``.
    """
    independent = isinstance(model, Tensor)
    post = None if independent else model.condition(data.y, data.train_mask, num_samples=64)
    probs = model if independent else post.marginals()
    masks = {"val": data.val_mask, "test": data.test_mask}
    result = {part: node_scores(probs[mask], data.y[mask]) for part, mask in masks.items()}
    if joint:
        result["joint"] = -result["test"]["nll"]
        if not independent:
            estimate = model.log_likelihood(data.y, data.test_mask, data.train_mask, 64)
            result["joint"] = estimate.item() / int(data.test_mask.sum())
    if pairs is None:
        return result
    tables = {"own product": independent_pairs(probs, pairs)}
    if not independent:
        tables |= {"conditional": post.pairwise(pairs), "prior": model.pairwise(pairs)}
    known = {name: pair_log_probs(table, data.y, pairs) for name, table in tables.items()}
    result |= {name: values.mean().item() for name, values in known.items()}
    base = pair_log_probs(independent_pairs(temperature, pairs), data.y, pairs)
    gains = {"on temperature": known.get("conditional", known["own product"]) - base}
    if not independent:
        gains["on own product"] = known["conditional"] - known["own product"]
    return result | {name: summary(gain, pairs, data.test_mask) for name, gain in gains.items()}


def pair_log_probs(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    """``(P,)`` values of log p(y_i, y_j), from ``(P, C, C)`` tables."""
    rows = torch.arange(pairs.shape[1], device=y.device)
    return table[rows, y[pairs[0]], y[pairs[1]]].double().clamp(min=1e-24).log()


def summary(gain: Tensor, pairs: Tensor, nodes: Tensor, num_resamples: int = 1000) -> dict:
    """
    Mean of gains ``(P,)`` with a 95 % interval, median, share above 0, and the part of the mean
    that two nodes contribute, of distinct ``pairs`` ``(2, P)`` among some nodes, a mask.

    The interval is a bootstrap over *nodes* (Snijders and Borgatti 1999, "Non-parametric standard
    errors and tests for network statistics", Connections 22), because pairs that share a node are
    dependent. A pair has the product of the weights of its two nodes.
    """
    gain, where = gain.cpu(), (nodes.cumsum(0) - 1)[pairs].cpu()
    size = int(nodes.sum())
    # A generator of its own leaves the later draws of a run as they are.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(size, (num_resamples, size), generator=generator)
    counts = torch.zeros(num_resamples, size, dtype=gain.dtype)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    weights = counts[:, where[0]] * counts[:, where[1]]
    means = (weights @ gain) / weights.sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=gain.dtype)).tolist()
    found = {"mean": gain.mean().item(), "low": low, "high": high, "median": gain.median().item()}
    share = (gain > 0).double().mean().item()
    return found | {"share": share, "two nodes": two_nodes(gain, where, size)}


def two_nodes(gain: Tensor, pairs: Tensor, size: int) -> float:
    """The largest sum of the gains of all pairs that contain one of two nodes, over ``P``."""
    table = torch.zeros(size, size, dtype=gain.dtype)
    table.index_put_((pairs[0], pairs[1]), gain, accumulate=True)
    table = table + table.T
    own = table.sum(1)
    together = own[:, None] + own - table
    together.fill_diagonal_(-torch.inf)
    return together.max().item() / len(gain)
