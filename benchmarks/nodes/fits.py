# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of classifiers and NMMs to the labels of nodes, and scores of their predictions."""

import random
from collections.abc import Callable
from functools import cache
from statistics import mean

import pyro
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.shared import records
from benchmarks.shared.backbones import appnp, gat, gcn, mlp
from benchmarks.shared.graphs import planetoid
from benchmarks.shared.scores import brier, independent_pairs, mean_log_prob
from benchmarks.shared.training import Consistency, train_classifier, train_nmm
from pyro_nmm import Neighborhood, NeighborMixture, Posterior
from pyro_nmm.datasets import digits, random_split
from pyro_nmm.guides import Chains
from pyro_nmm.models import NMMNetwork, StackedNMM, temperature_scaling

BACKBONES = {"gcn": gcn, "gat": gat, "appnp": appnp, "mlp": mlp}
#: Settings for many labels, where no search was run.
DEFAULT = {"lr": 0.02, "weight_decay": 5e-4, "dropout": 0.5, "floor": 0.1, "gamma": 2.0}
DEFAULT |= {"weight": 0.5, "temperature": 0.5, "memory": 0.9}
NUM_EPOCHS, NUM_DRAWS = 400, 64  # draws of posteriors, and particles of likelihoods
NUM_EACH = 16  # particles under each draw of the parameters


@cache
def load(name: str, root):
    """A graph with the masks of its public split, and its neighbourhoods."""
    if name == "digits":
        data = random_split(digits(), 0.05, 0.1, 0.5, seed=0)
    else:
        data = planetoid(name, root)
    return data, Neighborhood(data.edge_index, data.num_nodes)


def chosen(rows: list[dict], **key) -> dict:
    """Settings with the best mean validation accuracy of a search, then likelihood."""

    def quality(trial: list[dict]) -> tuple[float, float]:
        return mean(r["val"]["accuracy"] for r in trial), -mean(r["val"]["nll"] for r in trial)

    return DEFAULT | records.chosen(rows, quality, num_splits=2, **key)


def random_settings(method: str, dataset: str, trial: int) -> dict:
    """A trial's draw from the pools of the paper's appendix, and ours."""
    pools = {"lr": [0.01, 0.02, 0.03], "weight_decay": [2e-4, 5e-4, 1e-3], "dropout": [0.5, 0.6]}
    if method == "backbone":
        pools |= {"lr": [0.01, 0.03, 0.05], "dropout": [0.5, 0.6, 0.7]}
    if method == "backbone" or dataset == "pubmed":
        # The backbones' own searches chose the heavier decays on PubMed.
        pools["weight_decay"] = [5e-4, 2e-3, 5e-3]
    if "consistency" in method:
        pools |= {"weight": [0.5, 1.0], "temperature": [0.3, 0.5, 0.7], "memory": [0.8, 0.95]}
    if "NMM" in method:
        pools |= {"floor": [0.01, 0.1, 1.0], "gamma": [0.0, 2.0, 3.0]}
    rng = random.Random(0)
    for _ in range(trial + 1):
        drawn = {name: rng.choice(pool) for name, pool in pools.items()}
    return drawn


def backbone(kind: str, data, width: int, **options) -> nn.Module:
    module = BACKBONES[kind](data.num_features, width, **options)
    if data.x.layout == torch.strided:
        module.dropout = 0.0  # dropout of dense features would take most of an epoch
    return module


def nmm_network(
    kind: str, data, drop: dict | None = None, attention: str = "", **options
) -> NMMNetwork:
    """
    An NMM's two networks, of one kind unless ``attention`` says otherwise. ``drop`` is their
    dropout; the attention's network drops no nodes.
    """
    drop, classes, other = drop or {}, int(data.y.max()) + 1, attention or kind
    labels = backbone(kind, data, classes, **drop)
    width, drop = 64 if other == "gcn" else 32, drop | {"drop_nodes": 0.0}
    weights = backbone(other, data, width, attention=True, **drop)
    return NMMNetwork(labels, weights, num_classes=classes, **options)


def fit(key: dict, data, hood, settings: dict, wrap: Callable = lambda network: network):
    """Logits or a NeighborMixture, and the validation curve. ``wrap`` changes an NMM's network."""

    def given(*names: str) -> dict:
        return {name: settings[name] for name in names if name in settings}

    pyro.set_rng_seed(key["seed"])
    method, kind, classes = key["method"], key["backbone"], int(data.y.max()) + 1
    options = given("lr", "weight_decay", "num_epochs", "patience", "criterion", "estimator")
    drop, options = given("dropout"), {"num_epochs": NUM_EPOCHS} | options
    if "consistency" in method:
        agreement = given("weight", "temperature", "memory")
        options["consistency"] = Consistency(data.num_nodes, classes, **agreement)
        drop["drop_nodes"] = 0.5
    if "NMM" not in method:
        return train_classifier(backbone(kind, data, classes, **drop), data, **options)
    few = int(data.train_mask.sum()) <= 300
    options.setdefault("estimator", "reward_to_go" if few else Chains())
    network = nmm_network(kind, data, drop, **given("link", "floor", "gamma", "attention"))
    return train_nmm(wrap(network), data, hood, **options)


def calibrated(scores: Tensor, data) -> Tensor:
    """Marginals at the temperature that the validation nodes choose."""
    return (scores / temperature_scaling(scores, data.y, data.val_mask)).softmax(-1)


def stack(hood, scores: Tensor, data, pool: bool = False, **options) -> NeighborMixture:
    """The mixture of StackedNMM on a classifier's scores."""
    given = hood, scores, data.y, data.train_mask
    module = StackedNMM(scores.shape[1], pool=pool, **options).fit(*given, data.val_mask)
    return module.mixture(*given)


def node_scores(probs: Tensor, y: Tensor) -> dict:
    hits, nll = (probs.argmax(-1) == y).double(), -mean_log_prob(probs.clamp(min=1e-12), y)
    ece = multiclass_calibration_error(probs, y, probs.shape[-1], n_bins=15)
    found = {"accuracy": hits.mean(), "nll": nll, "ece": ece, "brier": brier(probs, y)}
    return {name: value.item() for name, value in found.items()}


def pair_log_probs(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    """``(P,)`` values of log p(y_i, y_j), from ``(P, C, C)`` tables."""
    return table[torch.arange(len(table)), *y[pairs]].double().clamp(min=1e-24).log()


def evaluate(model, data, pairs=None, joint=False) -> dict:
    """Scores; ``joint`` and ``pairs`` add log-likelihoods."""
    y, train, test = data.y, data.train_mask, data.test_mask
    mixes, post = isinstance(model, NeighborMixture), model
    if mixes:
        post = model.condition(y, train, num_samples=NUM_DRAWS)
    joint_model = isinstance(post, Posterior)
    probs = post.marginals() if joint_model else model
    parts = {"val": data.val_mask, "test": test}
    result = {part: node_scores(probs[mask], y[mask]) for part, mask in parts.items()}
    if joint:
        result["joint"] = -result["test"]["nll"]
    if joint and joint_model:
        given = (train, NUM_DRAWS) if mixes else (NUM_EACH,)
        result["joint"] = model.log_likelihood(y, test, *given).item() / int(test.sum())
    if pairs is None:
        return result
    tables = {"own product": independent_pairs(probs, pairs)}
    if joint_model:
        tables["conditional"] = post.pairwise(pairs)
    if mixes:
        tables["prior"] = model.pairwise(pairs)
    for name, table in tables.items():
        result[name] = pair_log_probs(table, y, pairs).mean().item()
    return result
