# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What node classification's benchmark measures of a fit: of nodes, of pairs, and of them all."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from pyro_nmm import NeighborMixture
from pyro_nmm.metrics import brier, independent_pairs, log_likelihood, temperature_scaling
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


def variants(method: str, fitted, hood, data):
    """What comes out of one fit, and seconds: itself, and with numbers of the validation nodes."""

    def stack(scores: Tensor) -> tuple[NeighborMixture, float]:
        start = time.perf_counter()
        stacked = StackedNMM().fit(hood, scores, data.y, data.train_mask, data.val_mask)
        return stacked.mixture(hood, scores), time.perf_counter() - start

    if "NMM" in method:
        yield method, fitted, None
        yield method + ", stacked", *stack(fitted.alpha.log())
        return
    yield method, fitted.softmax(-1), None
    temperature = temperature_scaling(fitted, data.y, data.val_mask)
    yield method + ", temperature", (fitted / temperature).softmax(-1), None
    yield method + ", stacked", *stack(fitted)


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
    r"""
    What one model gains on another, pair by pair, for means may rest on hubs: the mean in nats per
    pair and a 95 % interval of it, the median pair, the share of pairs that gain, and the most
    that any two nodes add to the mean.

    The interval is a bootstrap over *nodes* (Snijders and Borgatti 1999, "Non-parametric standard
    errors and tests for network statistics", Connections 22): pairs that share a node are not
    independent, so nodes are drawn with replacement, and a pair weighs the product of how often
    its two ends were drawn. It stands for one split, not for the spread over splits.

    :param Tensor gain: ``(P,)``.
    :param Tensor pairs: ``(2, P)`` distinct node ids a pair, each pair once.
    :param Tensor nodes: ``(N,)`` boolean mask of the nodes that are drawn.
    """
    gain, where = gain.cpu(), (nodes.cumsum(0) - 1)[pairs].cpu()
    size = int(nodes.sum())
    # Its own generator: what is measured after this draws what it did without.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(size, (num_resamples, size), generator=generator)
    counts = torch.zeros(num_resamples, size, dtype=gain.dtype)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    weights = counts[:, where[0]] * counts[:, where[1]]
    means = (weights @ gain) / weights.sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=gain.dtype)).tolist()
    return {
        "mean": gain.mean().item(), "low": low, "high": high, "median": gain.median().item(),
        "share": (gain > 0).double().mean().item(), "two nodes": two_nodes(gain, where, size),
    }  # fmt: skip


def two_nodes(gain: Tensor, pairs: Tensor, size: int) -> float:
    """The largest sum of the gains of all pairs that two nodes take part in, over ``P``."""
    table = torch.zeros(size, size, dtype=gain.dtype)
    table.index_put_((pairs[0], pairs[1]), gain, accumulate=True)
    table = table + table.T
    own = table.sum(1)
    together = own[:, None] + own - table
    together.fill_diagonal_(-torch.inf)
    return together.max().item() / len(gain)
