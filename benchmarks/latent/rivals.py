# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Consensus of noisy labels by majority, Dawid-Skene, label spreading, Potts fields and a GCN."""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data
from torch_geometric.nn import GCN, SimpleConv
from torch_geometric.utils import degree, remove_self_loops, to_torch_coo_tensor, to_undirected

from benchmarks.shared.fits import descend
from benchmarks.shared.timing import timed as timed_by
from pyro_nmm.fitting import minimise
from pyro_nmm.models import Annotators, potts
from pyro_nmm.models.hidden import mixture_em

#: Chains and steps of Gibbs sampling inside EM, and sweeps after it, as in our fit.
NUM_CHAINS, NUM_STEPS, NUM_SWEEPS = 4, 120, 50


class Found(NamedTuple):
    """A consensus: distributions ``(N, C)``, fields of its row, and the emission's parameters."""

    probs: Tensor
    row: dict = {}
    values: dict = {}


def timed(fit: Callable[..., Found], *args) -> Found:
    """With the processor seconds of this process after its start, as others share the machine."""
    found, seconds = timed_by(fit, *args, clock=time.process_time)
    return found._replace(row=found.row | {"seconds": found.row.get("seconds", 0.0) + seconds})


def best(found: Iterable[Found]) -> Found:
    return max(found, key=lambda fit: fit.row["left out"])


def majority(answers: Tensor, num_labels: int) -> Found:
    """Shares of the votes; of a node without any, equal shares."""
    votes = one_hot(answers + 1, num_labels + 1)[..., 1:].sum(1).double()
    votes = torch.where(votes.sum(1, keepdim=True) > 0, votes, 1.0)
    return Found(votes / votes.sum(1, keepdim=True))


def start_of(emission: Annotators, data: Data) -> Found:
    """Dawid-Skene from a random start; with types, the start of our own fit, at its sources."""
    if emission.num_types:
        values = emission.start(data.answers, data.place[0])
        return Found(emission.log_prob(values, data.answers).softmax(-1), {}, values)
    values, probs = mixture_em(emission, data.answers, emission.start(data.answers, None))
    share = (probs.sum(0) + 1) / (len(probs) + emission.num_labels)
    score = (emission.log_prob(values, data.answers) + share.log()).logsumexp(-1).mean().item()
    return Found(probs, {"left out": score}, values)


def spread_labels(start: Found, edge_index: Tensor) -> Found:
    """.8 times the mean of the neighbours and .2 times one's own, until it converges."""
    own = probs = start.probs.float()
    alpha, mean = 0.8 * (degree(edge_index[1], len(own)) > 0)[:, None], SimpleConv("mean")
    for _ in range(50):
        probs = alpha * mean(probs, edge_index) + (1 - alpha) * own
    return Found(probs, start.row)


def rivals(emission: Annotators, data: Data, num_starts: int = 1) -> dict[str, Found]:
    """Dawid-Skene and what starts from it; with types, which need a graph, Potts fields only."""
    field, turns = AnnotatedPotts(emission, data.answers, data.edge_index), range(num_starts)
    fits = {"Potts, mean field": field.mean_field, "Potts, Gibbs": field.gibbs}
    if emission.num_types:
        return {
            f"{name}, types": timed(best, (fit(start_of(emission, data)) for _ in turns))
            for name, fit in fits.items()
        }
    start = timed(best, (start_of(emission, data) for _ in turns))
    found = {"Dawid-Skene": start, "label spreading": timed(spread_labels, start, data.edge_index)}
    return found | {name: timed(fit, start) for name, fit in fits.items()}


def gcn(data: Data, votes: Tensor, num_epochs: int) -> Found:
    """Each half of the nodes by a GCN trained on the majority of the other's votes ``(N, C)``."""
    half, probs = torch.randint(2, (data.num_nodes,)).bool(), torch.zeros_like(votes).float()
    answered = votes.amax(1) > votes.amin(1)
    for train in (half, ~half):
        model = GCN(data.num_features, 16, 2, votes.shape[1], dropout=0.5)
        adam = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
        inputs, rows = (data.x, data.edge_index), train & answered
        loss = lambda: cross_entropy(model(*inputs)[rows], votes[rows].float())  # noqa: B023, E731
        descend(model, adam, loss, num_epochs)
        probs[~train] = model(*inputs)[~train].softmax(-1).detach()
    return Found(probs)


def around(matrix: Tensor, labels: Tensor) -> Tensor:
    """Sums over neighbours, of ``(N, ..., C)``."""
    return (matrix @ labels.flatten(1)).unflatten(1, labels.shape[1:])


class AnnotatedPotts:
    """Dawid-Skene with a Potts prior, fitted by EM and by pseudo-likelihood (Besag 1975)."""

    def __init__(self, emission: Annotators, answers: Tensor, edge_index: Tensor) -> None:
        warnings.filterwarnings("ignore", "Sparse ")  # invariant checks, and a beta state
        self.emission, self.answers, size = emission, answers, len(answers)
        both = to_undirected(remove_self_loops(edge_index)[0], num_nodes=size)
        self.colors = potts(both[:, both[0] < both[1]], 1.0, torch.zeros(size, 2)).colors()
        matrix = to_torch_coo_tensor(both, size=size)
        self.matrix = matrix.to_sparse_csr()
        self.parts = [matrix.index_select(0, color).to_sparse_csr() for color in self.colors]

    def raise_pseudo_likelihood(self, weights: Tensor, labels: Tensor) -> Tensor:
        """Coupling and label weights after a few steps of BFGS from the last ones."""
        weights, sums = weights.clone().requires_grad_(), around(self.matrix, labels)

        def loss() -> Tensor:
            log_probs = (weights[0] * sums + weights[1:]).log_softmax(-1)
            # The first term keeps the weight finite of a label that is no longer used.
            return 1e-4 * weights.square().sum() - (labels * log_probs).sum(-1).mean()

        minimise(loss, [weights], 5)
        return weights.detach()

    def mean_field(self, start: Found) -> Found:
        probs, values = start.probs.float(), start.values
        weights = torch.zeros(self.emission.num_labels + 1)
        evidence = self.emission.log_prob(values, self.answers)
        for _ in range(NUM_STEPS):
            weights = self.raise_pseudo_likelihood(weights, probs)
            for color, matrix in 3 * list(zip(self.colors, self.parts, strict=True)):
                prior = weights[0] * around(matrix, probs) + weights[1:]
                probs = probs.index_copy(0, color, (evidence[color] + prior).softmax(-1))
            values = self.emission.maximise(self.answers, probs, values)
            evidence = self.emission.log_prob(values, self.answers)
        prior = (weights[0] * around(self.matrix, probs) + weights[1:]).log_softmax(-1)
        score = (evidence + prior).logsumexp(-1).mean().item()
        return Found(probs, start.row | {"left out": score})

    def gibbs(self, start: Found) -> Found:
        probs, values, size = start.probs.float(), start.values, self.emission.num_labels
        weights, total, left_out = torch.zeros(size + 1), 0, []
        labels = one_hot(Categorical(probs).sample((NUM_CHAINS,)).T, size).float()
        evidence = self.emission.log_prob(values, self.answers)
        for step in range(NUM_STEPS):
            gain = 1 / max(1, step + 1 - NUM_STEPS // 2)
            weights = weights + gain * (self.raise_pseudo_likelihood(weights, labels) - weights)
            labels, seen, _ = self.sweep(labels, evidence, weights)
            probs = probs + gain * (seen - probs)
            values = self.emission.maximise(self.answers, probs, values)
            evidence = self.emission.log_prob(values, self.answers)
        for _ in range(NUM_SWEEPS):
            labels, seen, logs = self.sweep(labels, evidence, weights)
            total = total + seen / NUM_SWEEPS
            left_out.append(logs)
        logs = torch.cat(left_out, 1)
        score = (math.log(logs.shape[1]) - (-logs).logsumexp(1)).mean().item()
        return Found(total, start.row | {"left out": score})

    def sweep(self, labels: Tensor, evidence: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Labels ``(N, B, C)``, means of their distributions, and log p(answers | neighbours)."""
        seen, logs = torch.zeros_like(evidence), evidence.new_zeros(labels.shape[:2])
        for color, matrix in zip(self.colors, self.parts, strict=True):
            prior, own = weights[0] * around(matrix, labels) + weights[1:], evidence[color, None]
            logits = own + prior
            drawn = one_hot(Categorical(logits=logits).sample(), logits.shape[-1]).float()
            labels = labels.index_copy(0, color, drawn)
            seen[color] = logits.softmax(-1).mean(1)
            logs[color] = (own + prior.log_softmax(-1)).logsumexp(-1)
        return labels, seen, logs
