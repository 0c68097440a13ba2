# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Where node classification deviates from the paper's recipe, one change at a time. Run by

    python benchmarks/node_classification.py deviations --datasets cora --backbones gcn
"""

from __future__ import annotations

import itertools

from node_fits import fit, load
from node_scores import evaluate

from pyro_nmm import NeighborMixture

#: Besides the backbone's own learning rate, weight decay and dropout, chosen by validation.
OURS = {"link": "exp", "floor": 0.1, "gamma": 2.0}

PAPER = {"floor": 1.0, "gamma": 0.0, "weight_decay": 0.005, "dropout": 0.5, "lr": 0.01}
SHORT = {"num_epochs": 200}

#: What is changed: settings, and options of the fit. "none" is the row of the other tables.
CHANGES: dict[str, tuple[dict, dict]] = {
    "none": ({}, {}),
    "link softplus + 1": ({"link": "softplus", "floor": 1.0}, {}),
    "link square + 1": ({"link": "square", "floor": 1.0}, {}),
    "link exp + 1": ({"floor": 1.0}, {}),
    "gamma 0": ({"gamma": 0.0}, {}),
    "200 epochs": ({}, SHORT),
    "weight decay .005": ({"weight_decay": 0.005}, {}),
    "estimator horizon": ({}, {"estimator": "horizon"}),
    "estimator em": ({}, {"estimator": "em"}),
    "paper's, softplus + 1": (PAPER | {"link": "softplus"}, SHORT),
    "paper's, square + 1": (PAPER | {"link": "square"}, SHORT),
    "paper's, softplus + 1, lr .05": (PAPER | {"link": "softplus", "lr": 0.05}, SHORT),
    "paper's, square + 1, lr .05": (PAPER | {"link": "square", "lr": 0.05}, SHORT),
}


def deviations(args, results, dataset: str, kind: str) -> None:
    """The public split, with one thing of the recipe changed, then with the paper's whole one."""
    data, hood = load(args, dataset)
    ours = results.chosen(dataset, kind, "backbone") | OURS
    for seed, (change, (settings, options)) in itertools.product(
        range(args.num_seeds), CHANGES.items()
    ):
        key = {"task": "deviations", "dataset": dataset, "backbone": kind, "method": "NMM",
               "change": change, "seed": seed}  # fmt: skip
        if results.has(**key):
            continue
        settings, most = ours | settings, min(options.get("num_epochs", 400), args.num_epochs)
        more = options | {"num_epochs": most}
        mixture, curve = fit("NMM", kind, data, hood, settings, seed, args, **more)
        scores = evaluate(mixture, data, joint=True)
        scores["sequential"] = sequential_accuracy(mixture, data)
        results.add(**key, **scores, settings=settings | more, epochs=len(curve))


def sequential_accuracy(mixture: NeighborMixture, data) -> float:
    """Of the paper's rule: one test node after another, each prediction a known label."""
    test = data.test_mask.nonzero().flatten()
    posterior = mixture.condition(data.y, data.train_mask, num_samples=16)
    found = posterior.predict(test, method="sequential")
    return (found == data.y[test]).double().mean().item()
