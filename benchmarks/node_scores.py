# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What node classification's benchmark measures of a fit: of nodes, of pairs, and of them all."""

from __future__ import annotations

import time

from pair_gains import pair_log_probs, summary
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from pyro_nmm import NeighborMixture
from pyro_nmm.metrics import (
    brier,
    independent_pairs,
    log_likelihood,
    pair_log_likelihood,
    temperature_scaling,
)
from pyro_nmm.models import StackedNMM


def node_scores(probs: Tensor, data) -> dict:
    result = {}
    for part in ("val", "test"):
        mask = data[part + "_mask"]
        p, y = probs[mask], data.y[mask]
        result[part] = {
            "accuracy": (p.argmax(-1) == y).double().mean().item(),
            "nll": -log_likelihood(p.clamp(min=1e-12), y).item(),
            "ece": multiclass_calibration_error(p, y, probs.shape[-1], n_bins=15).item(),
            "brier": brier(p, y).item(),
        }
    return result


def stack(hood, scores: Tensor, data) -> tuple[NeighborMixture, float]:
    """A mixture on top of ``scores``, and the seconds that it took."""
    start = time.perf_counter()
    stacked = StackedNMM().fit(hood, scores, data.y, data.train_mask, data.val_mask)
    return stacked.mixture(hood, scores), time.perf_counter() - start


def variants(method: str, fitted, hood, data):
    """What comes out of one fit: itself, and with its numbers fitted on the validation nodes."""
    if "NMM" in method:
        yield method, fitted, None
        yield method + ", stacked", *stack(hood, fitted.alpha.log(), data)
        return
    yield method, fitted.softmax(-1), None
    temperature = temperature_scaling(fitted, data.y, data.val_mask)
    yield method + ", temperature", (fitted / temperature).softmax(-1), None
    yield method + ", stacked", *stack(hood, fitted, data)


def evaluate(model, data, pairs=None, joint=False, temperature=None) -> dict:
    """
    Scores of marginals or a mixture; ``joint`` adds log p(y_test | y_train) per node, and
    ``temperature``, marginals of the calibrated backbone, what each of ``pairs`` gains on them.
    """
    independent = isinstance(model, Tensor)
    post = None if independent else model.condition(data.y, data.train_mask, num_samples=64)
    probs = model if independent else post.marginals()
    result = node_scores(probs, data)
    if joint:
        result["joint"] = -result["test"]["nll"]
        if not independent:
            estimate = model.log_likelihood(data.y, data.test_mask, data.train_mask, 64)
            result["joint"] = estimate.item() / int(data.test_mask.sum())
    if pairs is not None:
        tables = {"own product": independent_pairs(probs, pairs)}
        if not independent:
            tables |= {"conditional": post.pairwise(pairs), "prior": model.pairwise(pairs)}
        for name, table in tables.items():
            table = table.clamp(min=1e-24)
            result[name] = pair_log_likelihood(table, data.y, pairs).item()
        tables["temperature"] = independent_pairs(temperature, pairs)
        known = {name: pair_log_probs(table, data.y, pairs) for name, table in tables.items()}
        own, ours = known["own product"], known.get("conditional", known["own product"])
        compare = {"on temperature": ours - known["temperature"]}
        if not independent:
            compare["on own product"] = ours - own
        result |= {n: summary(gain, pairs, data.test_mask) for n, gain in compare.items()}
    return result
