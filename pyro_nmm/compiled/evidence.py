# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The loops over edges and labels given evidence, compiled as those of :mod:`pyro_nmm.compiled`.

Counts follow from the draw, so every loop counts anew and keeps none.
"""

import numpy as np
import torch

from pyro_nmm.compiled.loops import _array, _in_threads, compiled, opaque


@compiled
def _draw(first, last, ptr, source, attention, alpha, total, likelihood, each, uniforms, table,
          edges, labels):  # fmt: skip
    # table[j] counts the choices of source j: one column per label, then all of them.
    running = np.empty(np.max(ptr[1:] - ptr[:-1]))
    for b in range(first, last):
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_e = min(b, len(likelihood) - 1)
        for i in range(len(ptr) - 1):
            e, k = _draw_row(i, ptr, source, attention[b_l], alpha[b_a], total[b_a],
                             likelihood[b_e], each, uniforms[b, i], table, running)  # fmt: skip
            edges[b, i], labels[b, i] = e, k
            table[source[e], k] += 1
            table[source[e], -1] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _draw_row(i, ptr, source, attention, alpha, total, likelihood, each, uniform, table, running):
    every, weight = table.shape[1] - 1, 0.0
    for e in range(ptr[i], ptr[i + 1]):
        j, place, above = source[e], e if each else i, 0.0
        for k in range(every):
            above += (alpha[j, k] + table[j, k]) * likelihood[place, k]
        weight += attention[e] * above / (total[j] + table[j, every])
        running[e - ptr[i]] = weight
    e, threshold = ptr[i], uniform * weight
    while running[e - ptr[i]] <= threshold and running[e - ptr[i]] < weight:
        e += 1
    j, place = source[e], e if each else i
    # What is left of the threshold goes through the labels of this edge.
    scale = attention[e] / (total[j] + table[j, every])
    rest = threshold - running[e - 1 - ptr[i]] if e > ptr[i] else threshold
    chosen = 0  # of weights that are not numbers, too: the loops do not look where they count
    for k in range(every):
        part = scale * (alpha[j, k] + table[j, k]) * likelihood[place, k]
        if part > 0:
            chosen = k
            if rest < part:
                break
        rest -= part
    return e, chosen


@compiled
def _sweep(first, last, ptr, source, attention, alpha, total, likelihood, each, uniforms, table,
           edges, labels, visits, totals):  # fmt: skip
    # uniforms is (sweeps, draws, rows): every row in turn, given all others.
    running = np.empty(np.max(ptr[1:] - ptr[:-1]))
    for b in range(first, last):
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_e = min(b, len(likelihood) - 1)
        for i in range(len(ptr) - 1):
            table[source[edges[b, i]], labels[b, i]] += 1
            table[source[edges[b, i]], -1] += 1
        for sweep in range(len(uniforms)):
            for i in range(len(ptr) - 1):
                table[source[edges[b, i]], labels[b, i]] -= 1
                table[source[edges[b, i]], -1] -= 1
                e, k = _draw_row(i, ptr, source, attention[b_l], alpha[b_a], total[b_a],
                                 likelihood[b_e], each, uniforms[sweep, b, i], table,
                                 running)  # fmt: skip
                edges[b, i], labels[b, i] = e, k
                visits[b, i, k] += 1
                totals[b, sweep, k] += 1
                table[source[e], k] += 1
                table[source[e], -1] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _clear(ptr, source, edges, labels, table):
    for i in range(len(ptr) - 1):
        table[source[edges[i]], labels[i]] = 0
        table[source[edges[i]], table.shape[1] - 1] = 0


@compiled
def _evaluate(first, last, ptr, source, attention, alpha, total, likelihood, each, edges, labels,
              table, log_evidence, log_choice):  # fmt: skip
    every = table.shape[1] - 1
    for b in range(first, last):
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_e = min(b, len(likelihood) - 1)
        for i in range(len(ptr) - 1):
            weight = 0.0
            for e in range(ptr[i], ptr[i + 1]):
                j, place, above = source[e], e if each else i, 0.0
                for k in range(every):
                    above += (alpha[b_a, j, k] + table[j, k]) * likelihood[b_e, place, k]
                weight += attention[b_l, e] * above / (total[b_a, j] + table[j, every])
            e, k = edges[b, i], labels[b, i]
            j, place = source[e], e if each else i
            own = attention[b_l, e] * (alpha[b_a, j, k] + table[j, k]) * likelihood[b_e, place, k]
            log_evidence[b, i] = np.log(weight)
            log_choice[b, i] = np.log(own / (total[b_a, j] + table[j, every])) - np.log(weight)
            table[j, k] += 1
            table[j, every] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _gradient(first, last, ptr, source, attention, alpha, total, likelihood, each, edges, labels,
              log_evidence, to_evidence, to_choice, table, to_attention, to_alpha,
              to_likelihood):  # fmt: skip
    # Of the logarithms of attention and likelihood. A batch that shares a parameter adds to its
    # one gradient.
    every = table.shape[1] - 1
    for b in range(first, last):
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_e = min(b, len(likelihood) - 1)
        for i in range(len(ptr) - 1):
            share = (to_evidence[b, i] - to_choice[b, i]) * np.exp(-log_evidence[b, i])
            for e in range(ptr[i], ptr[i + 1]):
                j, place, above = source[e], e if each else i, 0.0
                below = total[b_a, j] + table[j, every]
                scale = share * attention[b_l, e] / below
                for k in range(every):
                    part = (alpha[b_a, j, k] + table[j, k]) * likelihood[b_e, place, k]
                    to_likelihood[b_e, place, k] += scale * part
                    above += part
                to_attention[b_l, e] += scale * above
                for k in range(every):
                    to_alpha[b_a, j, k] += scale * (likelihood[b_e, place, k] - above / below)
            e, label, direct = edges[b, i], labels[b, i], to_choice[b, i]
            j, place = source[e], e if each else i
            below = total[b_a, j] + table[j, every]
            to_attention[b_l, e] += direct
            to_likelihood[b_e, place, label] += direct
            to_alpha[b_a, j, label] += direct / (alpha[b_a, j, label] + table[j, label])
            for k in range(every):
                to_alpha[b_a, j, k] -= direct / below
            table[j, label] += 1
            table[j, every] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _credit(first, last, ptr, source, attention, alpha, total, likelihood, each, edges, labels,
            log_evidence, counts, table, costs):  # fmt: skip
    # From the last row to the first, a row's own count taken out before its edges are visited:
    # table[j, k] holds what one count of k fewer at j would have changed in the later rows.
    every = counts.shape[1] - 1
    for b in range(first, last):
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_e = min(b, len(likelihood) - 1)
        for i in range(len(ptr) - 1):
            counts[source[edges[b, i]], labels[b, i]] += 1
            counts[source[edges[b, i]], every] += 1
        for i in range(len(ptr) - 2, -1, -1):
            own, label = source[edges[b, i]], labels[b, i]
            costs[b, i] = table[own, label]
            counts[own, label] -= 1
            counts[own, every] -= 1
            shrink = np.exp(-log_evidence[b, i])
            for e in range(ptr[i], ptr[i + 1]):
                j, place, above = source[e], e if each else i, 0.0
                if counts[j, every] == 0:
                    continue
                for k in range(every):
                    above += (alpha[b_a, j, k] + counts[j, k]) * likelihood[b_e, place, k]
                below = total[b_a, j] + counts[j, every]
                share, now = shrink * attention[b_l, e], above / below
                for k in range(every):
                    if counts[j, k] > 0:
                        fewer = (above - likelihood[b_e, place, k]) / (below - 1)
                        table[j, k] -= np.log1p(share * (fewer - now))
        for i in range(len(ptr) - 1):
            for e in range(ptr[i], ptr[i + 1]):
                for k in range(every):
                    table[source[e], k] = 0


def _inputs(rows, terms) -> list:
    attention, alpha, likelihood = (_array(t, np.float64) for t in terms)
    # As of observed labels, to the last digit.
    total = _array(terms.alpha.sum(-1), np.float64)
    graph = [_array(rows.ptr), _array(rows.source)]
    each = likelihood.shape[1] == rows.num_edges
    return [*graph, np.exp(attention), alpha, total, np.exp(likelihood), each]


def _table(rows, terms) -> np.ndarray:
    # Zeroed lazily by the operating system: only the touched sources cost.
    return np.zeros((rows.num_sources, terms.num_classes + 1), np.int32)


@opaque
def draw(rows, terms, uniforms):
    """See :func:`pyro_nmm.ops.evidence.draw_latent`. Cost: :math:`O(B E C)`."""
    inputs = _inputs(rows, terms)
    edges, labels = (np.empty(uniforms.shape, np.int64) for _ in range(2))

    def run(first, last):
        _draw(first, last, *inputs, _array(uniforms), _table(rows, terms), edges, labels)

    _in_threads(run, len(edges), edges.shape[0] * rows.num_edges)
    return torch.from_numpy(edges), torch.from_numpy(labels)


@opaque
def sweep(rows, terms, draw, uniforms):
    """See :func:`pyro_nmm.ops.gibbs.sweep`. Cost: :math:`O(S B E C)`."""
    inputs = _inputs(rows, terms)
    edges, labels = (_array(t).copy() for t in draw)
    num_sweeps, num_draws, num_rows = uniforms.shape
    visits = np.zeros((num_draws, num_rows, terms.num_classes), np.int32)
    totals = np.zeros((num_draws, num_sweeps, terms.num_classes), np.int32)

    def run(first, last):
        table = _table(rows, terms)
        _sweep(first, last, *inputs, _array(uniforms), table, edges, labels, visits, totals)

    _in_threads(run, num_draws, num_sweeps * num_draws * rows.num_edges)
    return map(torch.from_numpy, (edges, labels, visits, totals))


@opaque
def evaluate(rows, terms, draw):
    """See :func:`pyro_nmm.ops.evidence.latent_predictive`. Cost: :math:`O(B E C)`."""
    inputs = [*_inputs(rows, terms), *map(_array, draw)]
    size = tuple(draw.edges.shape)
    log_evidence, log_choice = np.empty(size), np.empty(size)

    def run(first, last):
        _evaluate(first, last, *inputs, _table(rows, terms), log_evidence, log_choice)

    _in_threads(run, size[0], size[0] * rows.num_edges)
    return (torch.from_numpy(part).to(terms.alpha.dtype) for part in (log_evidence, log_choice))


@opaque
def gradient(rows, terms, draw, log_evidence, to_evidence, to_choice):
    """
    The gradient of :func:`evaluate` towards ``terms``, given that towards its results
    ``(B, num_rows)``. Cost: :math:`O(B E C)`.
    """
    inputs = [*_inputs(rows, terms), *map(_array, draw)]
    inputs += [_array(t, np.float64) for t in (log_evidence, to_evidence, to_choice)]
    found = {}

    def run(first, last):
        # Threads that share a parameter have a gradient of their own to add to.
        grads = [np.zeros(t.shape) for t in terms]
        _gradient(first, last, *inputs, _table(rows, terms), *grads)
        found[first] = grads

    size = len(draw.edges)
    _in_threads(run, size, size * rows.num_edges)
    sums = (sum(parts) for parts in zip(*(found[first] for first in sorted(found)), strict=True))
    return (torch.from_numpy(s).to(t.dtype) for s, t in zip(sums, terms, strict=True))


@opaque
def credits(rows, terms, draw, log_evidence):
    """See :func:`pyro_nmm.ops.evidence.one_step_credits`. Cost: :math:`O(B E C)`."""
    inputs = [*_inputs(rows, terms), *map(_array, draw), _array(log_evidence, np.float64)]
    costs = np.empty(tuple(draw.edges.shape))

    def run(first, last):
        table = np.zeros((rows.num_sources, terms.num_classes))
        _credit(first, last, *inputs, _table(rows, terms), table, costs)

    _in_threads(run, len(costs), len(costs) * rows.num_edges)
    return torch.from_numpy(costs)
