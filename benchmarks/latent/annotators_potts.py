# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Consensus of noisy labels by a Potts field."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from pyro_nmm.models import Annotators, potts

#: Chains and steps of Gibbs sampling inside EM, and sweeps after it, as in our own fit.
NUM_CHAINS, NUM_STEPS, NUM_SWEEPS = 4, 120, 50


class Found(NamedTuple):
    """A consensus."""

    probs: Tensor  # (N, C)
    settings: dict


class Potts:
    """
    Dawid-Skene with a Potts field of one coupling as the labels' prior, by EM. Coupling and field
    of the labels maximise the pseudo-likelihood [1] of the current labels: mean field's
    distributions [2], or Gibbs chains. "Left out" is the log p(w_i | w_-i) of our own
    ``leave_one_out``, of these chains; of the mean field, given its distributions of the others.

    [1] Julian Besag (1975) "Statistical Analysis of Non-Lattice Data", The Statistician 24.
    [2] Gilles Celeux, Florence Forbes, Nathalie Peyrard (2003) "EM Procedures Using Mean Field-Like
    Approximations for Markov Model-Based Image Segmentation", Pattern Recognition 36.
    """

    def __init__(self, emission: Annotators, answers: Tensor, edge_index: Tensor) -> None:
        warnings.filterwarnings("ignore", "Sparse ")  # invariant checks, and a beta state
        self.emission, self.answers, num_nodes = emission, answers, len(answers)
        pairs = edge_index[:, edge_index[0] < edge_index[1]].unique(dim=1)
        self.colors = potts(pairs, 1.0, torch.zeros(num_nodes, emission.num_labels)).colors()
        both = torch.cat([pairs, pairs.flip(0)], 1)
        ones = torch.ones(both.shape[1])
        matrix = torch.sparse_coo_tensor(both, ones, (num_nodes, num_nodes)).coalesce()
        self.matrix = matrix.to_sparse_csr()
        self.parts = [matrix.index_select(0, color).to_sparse_csr() for color in self.colors]

    def around(self, labels: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Sums over neighbours, of ``(N, ..., C)``."""
        matrix = self.matrix if matrix is None else matrix
        return (matrix @ labels.flatten(1)).view(matrix.shape[0], *labels.shape[1:])

    def raise_pseudo_likelihood(self, numbers: Tensor, labels: Tensor) -> Tensor:
        """A few steps of BFGS from the last numbers: the coupling, and the field of the labels."""
        numbers, around = numbers.clone().requires_grad_(), self.around(labels)
        bfgs = torch.optim.LBFGS([numbers], max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            bfgs.zero_grad()
            logits = numbers[0] * around + numbers[1:]
            # The second term keeps the field where a label is used no more.
            loss = -(labels * logits.log_softmax(-1)).sum(-1).mean()
            loss = loss + 1e-4 * numbers.square().sum()
            loss.backward()
            return loss

        bfgs.step(closure)
        return numbers.detach()

    def mean_field(self, probs: Tensor, values: dict, num_sweeps: int = 3) -> Found:
        """From probabilities and parameters to start with, such as Dawid-Skene's."""
        probs, numbers = probs.float(), torch.zeros(self.emission.num_labels + 1)
        for _ in range(NUM_STEPS):
            numbers = self.raise_pseudo_likelihood(numbers, probs)
            evidence = self.emission.log_prob(values, self.answers)
            for _ in range(num_sweeps):
                for color, matrix in zip(self.colors, self.parts, strict=True):
                    prior = numbers[0] * self.around(probs, matrix) + numbers[1:]
                    probs = probs.index_copy(0, color, (evidence[color] + prior).softmax(-1))
            values = self.emission.maximise(self.answers, probs, values)
        prior = numbers[0] * self.around(probs) + numbers[1:]
        evidence = self.emission.log_prob(values, self.answers)
        left_out = predicted(evidence, prior).mean().item()
        return Found(probs, {"coupling": numbers[0].item(), "left out": left_out})

    def gibbs(self, probs: Tensor, values: dict) -> Found:
        size, answers, probs = self.emission.num_labels, self.answers, probs.float()
        y = Categorical(probs).sample((NUM_CHAINS,)).T
        labels, numbers = one_hot(y, size).float(), torch.zeros(size + 1)
        for step in range(NUM_STEPS):
            gain = 1 / max(1, step + 1 - NUM_STEPS // 2)
            found = self.raise_pseudo_likelihood(numbers, labels)
            numbers = numbers + gain * (found - numbers)
            evidence = self.emission.log_prob(values, answers)
            labels, seen, _ = self.sweep(labels, evidence, numbers)
            probs = probs + gain * (seen - probs)
            values = self.emission.maximise(answers, probs, values)
        evidence, total, left_out = self.emission.log_prob(values, answers), 0, []
        for _ in range(NUM_SWEEPS):
            labels, seen, logs = self.sweep(labels, evidence, numbers)
            total = total + seen / NUM_SWEEPS
            left_out.append(logs)
        logs = torch.cat(left_out, 1)
        score = (math.log(logs.shape[1]) - (-logs).logsumexp(1)).mean().item()
        return Found(total, {"coupling": numbers[0].item(), "left out": score})

    def sweep(self, labels: Tensor, evidence: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        """
        New labels ``(N, B, C)``, the means of what they were drawn from, and ``(N, B)`` how well
        what is observed of a node was predicted from its neighbours.
        """
        seen, logs = torch.zeros_like(evidence), evidence.new_zeros(labels.shape[:2])
        for color, matrix in zip(self.colors, self.parts, strict=True):
            prior, own = numbers[0] * self.around(labels, matrix) + numbers[1:], evidence[color]
            logits = own[:, None] + prior
            drawn = one_hot(Categorical(logits=logits).sample(), logits.shape[-1]).float()
            labels = labels.index_copy(0, color, drawn)
            seen[color] = logits.softmax(-1).mean(1)
            logs[color] = predicted(own[:, None], prior)
        return labels, seen, logs


def predicted(evidence: Tensor, prior: Tensor) -> Tensor:
    """``log p(w_i | u_-i)`` from ``log p(w_i | u_i)`` and the logits of labels given the others."""
    return (evidence + prior.log_softmax(-1)).logsumexp(-1)
