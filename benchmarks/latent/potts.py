# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Potts fields as priors of hidden labels: with a Normal emission, and with annotators."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.distributions import Categorical, Normal
from torch.nn.functional import one_hot
from torch_geometric.utils import remove_self_loops, to_torch_coo_tensor, to_undirected

from pyro_nmm.guides import mean_field
from pyro_nmm.models import Annotators, PairwiseMRF, annealed_log_normalizer, grid_edges, potts

CLASSES = 3  # of a hidden field
#: Chains and steps of Gibbs sampling inside EM with annotators, and sweeps after it, as in our fit.
NUM_CHAINS, NUM_STEPS, NUM_SWEEPS = 4, 120, 50


def first_guess(w: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviation of a Normal emission, with which every method starts."""
    share = (torch.arange(CLASSES).to(w) + 0.5) / CLASSES
    return w.quantile(share), 0.6 * w.std()


def log_likelihoods(w: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """``(N, C)``: log p(w_i | u_i = k)."""
    return Normal(means, scale).log_prob(w[:, None])


def emission(w: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviation of highest likelihood, given distributions of the labels."""
    means = (probs * w[:, None]).sum(0) / probs.sum(0)
    return means, (probs * (w[:, None] - means).square()).sum(1).mean().sqrt()


def independent(w: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Labels without a graph, the mixture of Normals with equal weights, by EM; as ``fitted``."""
    means, scale = first_guess(w)
    for _ in range(200):
        means, scale = emission(w, log_likelihoods(w, means, scale).softmax(-1))
    log_joint = log_likelihoods(w, means, scale) - math.log(CLASSES)
    total = log_joint.logsumexp(-1).double().sum().item()
    row = {"bound": total, "log evidence": total, "error": 0.0, "settings": {"sd": scale.item()}}
    return means, log_joint.softmax(-1), row


def without_evidence(size: int, coupling: float) -> PairwiseMRF:
    return potts(grid_edges(size, size), coupling, torch.zeros(size**2, CLASSES))


def log_normalizer(size: int, coupling: float, num_steps: int) -> tuple[float, float]:
    """
    log Z without evidence, and its standard error. Two annealings, from uniform labels and from
    mostly one label, are both too low on average, so the larger one is kept.
    """
    field, found = without_evidence(size, coupling), []
    for start in ([1 / 3, 1 / 3, 1 / 3], [0.9, 0.05, 0.05]):
        start = torch.tensor(start).expand_as(field.unary)
        value, error = annealed_log_normalizer(field, start, num_steps, 8)
        found.append((value.item(), error.item()))
    return max(found)


@torch.no_grad()
def fitted(w: Tensor, log_normalizers: dict[float, float], args) -> dict:
    """
    Mean field and Gibbs sampling of a Potts field fitted by variational EM: means, marginals of
    the labels, and other values of a row. For each coupling the emission is fitted to the mean
    field's marginals, in turns; the coupling is that of the highest bound.
    """
    edges, trials, warm = grid_edges(args.size, args.size), [], None
    means, scale = first_guess(w)
    for coupling, log_z in log_normalizers.items():
        for last in range(args.rounds + 1):
            field = potts(edges, coupling, log_likelihoods(w, means, scale))
            options = {"num_random": 2 * (last == args.rounds), "num_sweeps": 200}
            q = mean_field(field, warm, tolerance=1e-4, **options)
            warm = q.marginals[None]
            if last < args.rounds:
                means, scale = emission(w, q.marginals)
        trials.append((-q.losses[0].item() - log_z, coupling, q.marginals, means, scale, field))
    bound, coupling, marginals, means, scale, field = max(trials, key=lambda trial: trial[0])
    total, error = annealed_log_normalizer(field, marginals, args.anneal, 8)
    row = {"bound": bound, "log evidence": total.item() - log_normalizers[coupling]}
    row |= {"error": error.item(), "settings": {"coupling": coupling, "sd": scale.item()}}
    sampled = gibbs(field, Categorical(marginals).sample(Size([8])), args.sweeps // 2)[1]
    return {"Potts, mean field": (means, marginals, row), "Potts, Gibbs": (means, sampled, row)}


@torch.no_grad()
def gibbs(field: PairwiseMRF, y: Tensor, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """Labels ``(B, N)`` after the sweeps, and the share of each label in their second half."""
    classes, colors, met = torch.eye(field.num_classes), field.colors(), 0
    for number in range(num_sweeps):
        for color in colors:
            logits = field.local_logits(classes[y]).index_select(1, color)
            y = y.index_copy(1, color, Categorical(logits=logits).sample())
        met = met + classes[y].mean(0) * (number >= num_sweeps // 2)
    return y, met / met.sum(-1, keepdim=True)


class Found(NamedTuple):
    """A consensus of annotators."""

    probs: Tensor  # (N, C)
    settings: dict = {}
    values: dict = {}  # parameters of the emission, for fits that start from them


class AnnotatedPotts:
    """
    Dawid-Skene with a Potts field of one coupling as the labels' prior, by EM. Coupling and label
    weights maximise the pseudo-likelihood (Besag 1975) of the current labels: the mean field's
    distributions (Celeux, Forbes, Peyrard 2003), or Gibbs chains. "Left out" is log p(w_i | w_-i)
    as in ``leave_one_out``: over these chains, or given the mean field's other distributions.
    """

    def __init__(self, emission: Annotators, answers: Tensor, edge_index: Tensor) -> None:
        warnings.filterwarnings("ignore", "Sparse ")  # invariant checks, and a beta state
        self.emission, self.answers, num_nodes = emission, answers, len(answers)
        both = to_undirected(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
        pairs, unary = both[:, both[0] < both[1]], torch.zeros(num_nodes, emission.num_labels)
        self.colors = potts(pairs, 1.0, unary).colors()
        matrix = to_torch_coo_tensor(both, size=num_nodes)
        self.matrix = matrix.to_sparse_csr()
        self.parts = [matrix.index_select(0, color).to_sparse_csr() for color in self.colors]

    def around(self, labels: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Sums over neighbours, of ``(N, ..., C)``."""
        matrix = self.matrix if matrix is None else matrix
        return (matrix @ labels.flatten(1)).view(matrix.shape[0], *labels.shape[1:])

    def raise_pseudo_likelihood(self, weights: Tensor, labels: Tensor) -> Tensor:
        """Coupling and label weights after a few steps of BFGS from the last ones."""
        weights, around = weights.clone().requires_grad_(), self.around(labels)
        bfgs = torch.optim.LBFGS([weights], max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            bfgs.zero_grad()
            logits = weights[0] * around + weights[1:]
            # The second term keeps the weight finite of a label that is no longer used.
            loss = -(labels * logits.log_softmax(-1)).sum(-1).mean()
            loss = loss + 1e-4 * weights.square().sum()
            loss.backward()
            return loss

        bfgs.step(closure)
        return weights.detach()

    def mean_field(self, start: Found) -> Found:
        weights = torch.zeros(self.emission.num_labels + 1)
        probs, values = start.probs.float(), start.values
        for _ in range(NUM_STEPS):
            weights = self.raise_pseudo_likelihood(weights, probs)
            evidence = self.emission.log_prob(values, self.answers)
            for _ in range(3):
                for color, matrix in zip(self.colors, self.parts, strict=True):
                    prior = weights[0] * self.around(probs, matrix) + weights[1:]
                    probs = probs.index_copy(0, color, (evidence[color] + prior).softmax(-1))
            values = self.emission.maximise(self.answers, probs, values)
        prior = weights[0] * self.around(probs) + weights[1:]
        evidence = self.emission.log_prob(values, self.answers)
        left_out = predicted(evidence, prior).mean().item()
        return Found(probs, {"coupling": weights[0].item(), "left out": left_out})

    def gibbs(self, start: Found) -> Found:
        size, answers = self.emission.num_labels, self.answers
        probs, values = start.probs.float(), start.values
        labels = one_hot(Categorical(probs).sample((NUM_CHAINS,)).T, size).float()
        weights = torch.zeros(size + 1)
        for step in range(NUM_STEPS):
            gain = 1 / max(1, step + 1 - NUM_STEPS // 2)
            weights = weights + gain * (self.raise_pseudo_likelihood(weights, labels) - weights)
            evidence = self.emission.log_prob(values, answers)
            labels, seen, _ = self.sweep(labels, evidence, weights)
            probs = probs + gain * (seen - probs)
            values = self.emission.maximise(answers, probs, values)
        evidence, total, left_out = self.emission.log_prob(values, answers), 0, []
        for _ in range(NUM_SWEEPS):
            labels, seen, logs = self.sweep(labels, evidence, weights)
            total = total + seen / NUM_SWEEPS
            left_out.append(logs)
        logs = torch.cat(left_out, 1)
        score = (math.log(logs.shape[1]) - (-logs).logsumexp(1)).mean().item()
        return Found(total, {"coupling": weights[0].item(), "left out": score})

    def sweep(self, labels: Tensor, evidence: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """
        New labels ``(N, B, C)``, the mean over chains of the distributions that they were drawn
        from, and ``(N, B)`` the log-probability of a node's answers given its neighbours' labels.
        """
        seen, logs = torch.zeros_like(evidence), evidence.new_zeros(labels.shape[:2])
        for color, matrix in zip(self.colors, self.parts, strict=True):
            prior, own = weights[0] * self.around(labels, matrix) + weights[1:], evidence[color]
            logits = own[:, None] + prior
            drawn = one_hot(Categorical(logits=logits).sample(), logits.shape[-1]).float()
            labels = labels.index_copy(0, color, drawn)
            seen[color] = logits.softmax(-1).mean(1)
            logs[color] = predicted(own[:, None], prior)
        return labels, seen, logs


def predicted(evidence: Tensor, prior: Tensor) -> Tensor:
    """``log p(w_i | u_-i)`` from ``log p(w_i | u_i)`` and the logits of labels given the others."""
    return (evidence + prior.log_softmax(-1)).logsumexp(-1)
