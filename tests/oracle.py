# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Brute force in NumPy, from the paper's equations and nothing of the library."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.special import gammaln, logsumexp


class Oracle:
    """
    The table of p(y, c) over all labellings and all joint choices of some nodes, by
    the paper's equation (4): attention times a ratio of multivariate Beta functions.

    ``neighbors[i]`` lists n(i) of the i-th node of the set, ``attention[i]`` its L_i.
    """

    def __init__(self, alpha, neighbors, attention):
        self.alpha = alpha
        num_classes = alpha.shape[1]
        self.choices = np.array(list(itertools.product(*neighbors)), int)
        self.labels = np.array(list(itertools.product(range(num_classes), repeat=len(neighbors))))
        log_l = [np.log(np.array(list(itertools.product(*attention)))).sum(1)]
        onehot = np.eye(num_classes)[self.labels]  # (Q, n, C)
        log_prob = np.zeros((len(self.labels), len(self.choices))) + log_l[0]
        for j in range(len(alpha)):
            picks = (self.choices == j).astype(float)  # (M, n)
            if picks.any():
                counts = np.einsum("mn,qnc->qmc", picks, onehot)
                log_prob += self._log_beta(alpha[j] + counts) - self._log_beta(alpha[j])
        self.log_joint = log_prob  # (Q, M)
        self.log_prob = logsumexp(log_prob, 1)

    @staticmethod
    def _log_beta(a):
        return gammaln(a).sum(-1) - gammaln(a.sum(-1))

    def index(self, labels):
        """Row of a labelling."""
        base = self.alpha.shape[1]
        return int(np.polyval(np.asarray(labels), base))

    def marginal(self, *nodes):
        """p(y_i) or p(y_i, y_j) of positions in the set."""
        size = self.alpha.shape[1]
        table = np.zeros((size,) * len(nodes))
        np.add.at(table, tuple(self.labels[:, n] for n in nodes), np.exp(self.log_prob))
        return table

    def given(self, positions, values):
        """Log p(rest | y at positions = values): (labels of the rest, log-probabilities)."""
        match = (self.labels[:, positions] == values).all(1)
        rest = [i for i in range(self.labels.shape[1]) if i not in positions]
        return self.labels[match][:, rest], self.log_prob[match] - logsumexp(self.log_prob[match])


def of_hood(hood, alpha, logits, nodes=None):
    """The oracle of a library object: reads its edges, nothing else."""
    neighbors, attention = edge_lists(hood, logits)
    if nodes is not None:
        neighbors, attention = ([part[i] for i in nodes] for part in (neighbors, attention))
    return Oracle(alpha.detach().numpy(), neighbors, attention)


def label_probs(hood, alpha, logits, relabel=None):
    """
    All labellings ``(Q, N)`` and their probabilities, as the model reads: a sum over choices and
    borrowed labels of attention, moments of the label distributions, and what edges make of a
    label, ``(num_edges, C, C)``.
    """
    if relabel is None:
        oracle = of_hood(hood, alpha, logits)
        return oracle.labels, np.exp(oracle.log_prob)
    neighbors, attention = edge_lists(hood, logits)
    alpha, first = alpha.detach().numpy(), hood.ptr.numpy()
    num_classes = alpha.shape[1]
    labels = np.array(list(itertools.product(range(num_classes), repeat=len(neighbors))))
    probs = np.zeros(len(labels))
    for places in itertools.product(*(range(len(row)) for row in neighbors)):
        weight = np.prod([attention[i][place] for i, place in enumerate(places)])
        chosen = [neighbors[i][place] for i, place in enumerate(places)]
        for borrowed in labels:
            counts = np.zeros_like(alpha)
            np.add.at(counts, (chosen, borrowed), 1)
            moment = Oracle._log_beta(alpha + counts) - Oracle._log_beta(alpha)
            shown = [relabel[first[i] + place, borrowed[i], labels[:, i]]
                     for i, place in enumerate(places)]  # fmt: skip
            probs += weight * np.exp(moment.sum()) * np.prod(shown, 0)
    return labels, probs


def entropy_bound(alpha, neighbors, attention, order):
    """
    E sum_i H(p(y_i | earlier labels and choices)), by recursion over everything that the
    earlier nodes can do.
    """
    num_classes = alpha.shape[1]

    def rest(place, counts):
        if place == len(order):
            return 0.0
        i = order[place]
        above = alpha[neighbors[i]] + counts[neighbors[i]]
        joint = attention[i][:, None] * above / above.sum(1, keepdims=True)
        total = -(joint.sum(0) * np.log(joint.sum(0))).sum()
        if place + 1 < len(order):
            for position, j in enumerate(neighbors[i]):
                for k in range(num_classes):
                    counts[j, k] += 1
                    total += joint[position, k] * rest(place + 1, counts)
                    counts[j, k] -= 1
        return total

    return rest(0, np.zeros_like(alpha))


class CountOracle:
    """
    Counts of labels: how many units of node ``i`` with label ``k`` chose each neighbour is
    enumerated, with the numbers of ways as weights. ``totals`` ``(T, M, C)`` are the sums at
    sources, and ``log_weight`` their log-probabilities before label distributions come in.
    """

    def __init__(self, neighbors, attention, counts, num_sources):
        found = {(0,) * (num_sources * counts.shape[1]): 0.0}
        for (i, k), number in np.ndenumerate(counts.astype(int)):
            ways = [
                way
                for way in itertools.product(range(number + 1), repeat=len(neighbors[i]))
                if sum(way) == number
            ]
            new = {}
            for way, (state, weight) in itertools.product(ways, found.items()):
                after, way = list(state), np.array(way)
                for j, m in zip(neighbors[i], way, strict=True):
                    after[j * counts.shape[1] + k] += m
                term = gammaln(number + 1) - gammaln(way + 1).sum() + weight
                term += (way * np.log(attention[i])).sum()
                after = tuple(after)
                new[after] = np.logaddexp(new.get(after, -np.inf), term)
            found = new
        self.totals = np.array(list(found)).reshape(len(found), num_sources, -1)
        self.log_weight = np.array(list(found.values()))
        number = counts.sum(1)
        self.log_ways = (gammaln(number + 1) - gammaln(counts + 1).sum(1)).sum()

    def terms(self, alpha):
        """``(T,)`` log-probabilities of the totals with the counts."""
        after = Oracle._log_beta(alpha + self.totals) - Oracle._log_beta(alpha)
        return self.log_weight + after.sum(1)

    def log_prob(self, alpha):
        return logsumexp(self.terms(alpha)) + self.log_ways

    def mean(self, alpha):
        """``(M, C)``: the posterior mean of the label distributions."""
        terms, above = self.terms(alpha), alpha + self.totals
        shares = np.exp(terms - logsumexp(terms))
        return np.einsum("t,tmc->mc", shares, above / above.sum(-1, keepdims=True))


def edge_lists(hood, logits):
    """``neighbors`` and ``attention`` of a library object, as :class:`Oracle` takes them."""
    ptr, source, scores = hood.ptr.numpy(), hood.source.numpy(), logits.detach().numpy()
    neighbors, attention = [], []
    for i in range(len(ptr) - 1):
        row = slice(ptr[i], ptr[i + 1])
        weight = np.exp(scores[row] - scores[row].max())
        neighbors.append(source[row])
        attention.append(weight / weight.sum())
    return neighbors, attention


def surrogate(q, c):
    """What Pyro's score-function losses differentiate, where choices alone are random."""
    parts, bound = q.score_parts(c), q.log_terms(c).sum(-1)
    joint = bound + parts.log_prob
    return joint + parts.score_function * bound.detach() - parts.entropy_term
