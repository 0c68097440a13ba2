# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels that a mixture predicts of all test nodes, by three rules: every node's own most probable
label, node after node as in the paper's section 3.6, and the labelling that is jointly most
probable, as far as a search finds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import NeighborMixture

NUM_SAMPLES, NUM_PARTICLES = 64, 64
#: Of the search: blocks of nodes in a sweep, sweeps, and draws that it may start from.
BLOCKS, SWEEPS, DRAWS = 10, 5, 20


def log_prob(mix: NeighborMixture, labels: Tensor, data, seed: int, repeats: int = 1) -> float:
    """Nats of the test nodes' labels given the training nodes'; a seed has one order of nodes."""
    total = 0.0
    for number in range(repeats):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + number)
            options = data.test_mask, data.train_mask, NUM_PARTICLES
            total += mix.log_likelihood(labels, *options).item()
    return total / repeats


def jointly(mix: NeighborMixture, starts: list[Tensor], data, seed: int) -> Tensor:
    r"""
    A labelling that no block of nodes can be changed alone to make more probable: block after
    block, the nodes' most probable labels given all others, :math:`\arg\max p(y_i \mid y_\tau,
    \hat y_{-B})`, kept where :math:`\log p(\hat y \mid y_\tau)` grows. Iterated conditional modes
    (Besag 1986, "On the statistical analysis of dirty pictures", Journal of the Royal Statistical
    Society B 48), from the best of some labellings; a maximum among its neighbours, not of all.
    What a noisy estimate has let in is checked by a new one against the first two labellings.
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
    last = [labels, *starts[:2]]
    fresh = [log_prob(mix, each, data, 500 + seed, repeats=4) for each in last]
    return last[fresh.index(max(fresh))]


def labellings(mix: NeighborMixture, data, seed: int) -> dict[str, Tensor]:
    """``(N,)`` labels by rule. The true ones are read at training nodes only."""
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
    """By rule: accuracy, nats a node of the labelling, and how many labels are not the first's."""
    test = data.test_mask
    size, rows = int(test.sum()), {}
    found = labellings(mix, data, seed)
    for rule, labels in found.items():
        hits = (labels == data.y)[test].double().mean().item()
        nats = log_prob(mix, labels, data, 1000 + seed, repeats=8) / size
        changed = int((labels != found["one by one"])[test].sum())
        rows[rule] = {"accuracy": hits, "log prob": nats, "changed": changed}
    truth = log_prob(mix, data.y, data, 1000 + seed, repeats=8) / size
    return {rule: row | {"of the true labels": truth} for rule, row in rows.items()}
