# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels of all test nodes that a mixture predicts by three rules: each node's most probable label,
the paper's rule (section 3.6), and a search for the most probable labelling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import NeighborMixture

NUM_SAMPLES, NUM_PARTICLES = 64, 64
#: The search's blocks of nodes in a sweep, sweeps, and draws among its starts.
BLOCKS, SWEEPS, DRAWS = 10, 5, 20


def log_prob(mix: NeighborMixture, labels: Tensor, data, seed: int, repeats: int = 1) -> float:
    """Nats of the test nodes' labels given the training nodes'. A seed fixes the nodes' order."""
    total = 0.0
    for number in range(repeats):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + number)
            options = data.test_mask, data.train_mask, NUM_PARTICLES
            total += mix.log_likelihood(labels, *options).item()
    return total / repeats


def jointly(mix: NeighborMixture, starts: list[Tensor], data, seed: int) -> Tensor:
    """
    A local maximum of the labels' joint probability, by iterated conditional modes (Besag 1986, "On
    the statistical analysis of dirty pictures", Journal of the Royal Statistical Society B 48):
    from the best start, blocks of nodes take their most probable labels given all others.
    """
    values = [log_prob(mix, start, data, seed) for start in starts]
    best = max(values)
    labels = starts[values.index(best)].clone()
    nodes = data.test_mask.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(SWEEPS):
        changed = False
        for block in nodes[torch.randperm(len(nodes), generator=generator)].chunk(BLOCKS):
            others = data.train_mask | data.test_mask
            others[block] = False
            posterior = mix.condition(labels, others, num_samples=NUM_SAMPLES)
            trial = labels.clone()
            trial[block] = posterior.marginals()[block].argmax(-1)
            if not torch.equal(trial, labels):
                value = log_prob(mix, trial, data, seed)
                if value > best:
                    best, labels, changed = value, trial, True
        if not changed:
            break
    # Estimates are noisy, and the search kept the highest: new ones compare with two starts.
    last = [labels, *starts[:2]]
    return max(last, key=lambda each: log_prob(mix, each, data, 500 + seed, repeats=4))


def labellings(mix: NeighborMixture, data, seed: int) -> dict[str, Tensor]:
    """``(N,)`` labels by rule. Only training nodes' true labels are read."""
    nodes = data.test_mask.nonzero()[:, 0]
    posterior = mix.condition(data.y, data.train_mask, num_samples=NUM_SAMPLES)
    start = data.y.where(data.train_mask, 0)
    found = {}
    for rule, method in (("one by one", "marginal"), ("sequential", "sequential")):
        found[rule] = start.clone()
        found[rule][nodes] = posterior.predict(nodes, method=method)
    draws = start.repeat(DRAWS, 1)
    draws[:, nodes] = posterior.sample((DRAWS,), nodes)
    found["joint"] = jointly(mix, [*found.values(), *draws], data, seed)
    return found


def predictions(mix: NeighborMixture, data, seed: int) -> dict[str, dict]:
    """Accuracy of each rule's labels, their log p per node, and how many differ from the first."""

    def nats(labels: Tensor) -> float:
        return log_prob(mix, labels, data, 1000 + seed, repeats=8) / int(data.test_mask.sum())

    found = labellings(mix, data, seed)
    truth, test, first = nats(data.y), data.test_mask, found["one by one"]
    return {
        rule: {
            "accuracy": (labels == data.y)[test].double().mean().item(),
            "log prob": nats(labels),
            "changed": int((labels != first)[test].sum()),
            "of the true labels": truth,
        }
        for rule, labels in found.items()
    }
