# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The loops over edges and labels: draws given evidence, and predictions in turn. ``table[j]`` counts
the choices of source ``j``, in one column per label and one for all of them.
"""

import numpy as np
import torch

from pyro_nmm.compiled.loops import _array, _graph, _in_threads, compiled, opaque


@compiled
def _of(b, inputs):
    # The inputs of one draw of a batch that may share them.
    ptr, source, each, attention, alpha, total, likelihood = inputs
    b_a = min(b, len(alpha) - 1)
    own = attention[min(b, len(attention) - 1)], alpha[b_a], total[b_a]
    return ptr, source, each, own[0], own[1], own[2], likelihood[min(b, len(likelihood) - 1)]


@compiled
def _draw(first, last, inputs, table, uniforms, edges, labels):
    ptr, source = inputs[0], inputs[1]
    running = np.empty(np.max(ptr[1:] - ptr[:-1]))
    for b in range(first, last):
        own = _of(b, inputs)
        for i in range(len(ptr) - 1):
            e, k = _draw_row(i, own, table, uniforms[b, i], running)
            edges[b, i], labels[b, i] = e, k
            table[source[e], k] += 1
            table[source[e], -1] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _draw_row(i, inputs, table, uniform, running):
    ptr, source, each, attention, alpha, total, likelihood = inputs
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
def _sweep(first, last, inputs, table, uniforms, edges, labels, visits, totals):
    # uniforms is (sweeps, draws, rows): every row in turn, given all others.
    ptr, source = inputs[0], inputs[1]
    running = np.empty(np.max(ptr[1:] - ptr[:-1]))
    for b in range(first, last):
        own = _of(b, inputs)
        for i in range(len(ptr) - 1):
            table[source[edges[b, i]], labels[b, i]] += 1
            table[source[edges[b, i]], -1] += 1
        for sweep in range(len(uniforms)):
            for i in range(len(ptr) - 1):
                table[source[edges[b, i]], labels[b, i]] -= 1
                table[source[edges[b, i]], -1] -= 1
                e, k = _draw_row(i, own, table, uniforms[sweep, b, i], running)
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
def _evaluate(first, last, inputs, table, edges, labels, log_evidence, log_choice):
    every = table.shape[1] - 1
    for b in range(first, last):
        ptr, source, each, attention, alpha, total, likelihood = _of(b, inputs)
        for i in range(len(ptr) - 1):
            weight = 0.0
            for e in range(ptr[i], ptr[i + 1]):
                j, place, above = source[e], e if each else i, 0.0
                for k in range(every):
                    above += (alpha[j, k] + table[j, k]) * likelihood[place, k]
                weight += attention[e] * above / (total[j] + table[j, every])
            e, k = edges[b, i], labels[b, i]
            j, place = source[e], e if each else i
            own = attention[e] * (alpha[j, k] + table[j, k]) * likelihood[place, k]
            log_evidence[b, i] = np.log(weight)
            log_choice[b, i] = np.log(own / (total[j] + table[j, every])) - np.log(weight)
            table[j, k] += 1
            table[j, every] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _gradient(first, last, inputs, table, edges, labels, log_evidence, to_evidence, to_choice,
              to_attention, to_alpha, to_likelihood):  # fmt: skip
    # Of the logarithms of attention and likelihood. A batch that shares a parameter adds to its
    # one gradient.
    every = table.shape[1] - 1
    for b in range(first, last):
        ptr, source, each, attention, alpha, total, likelihood = _of(b, inputs)
        grad_attention = to_attention[min(b, len(to_attention) - 1)]
        grad_alpha = to_alpha[min(b, len(to_alpha) - 1)]
        grad_likelihood = to_likelihood[min(b, len(to_likelihood) - 1)]
        for i in range(len(ptr) - 1):
            share = (to_evidence[b, i] - to_choice[b, i]) * np.exp(-log_evidence[b, i])
            for e in range(ptr[i], ptr[i + 1]):
                j, place, above = source[e], e if each else i, 0.0
                below = total[j] + table[j, every]
                scale = share * attention[e] / below
                for k in range(every):
                    part = (alpha[j, k] + table[j, k]) * likelihood[place, k]
                    grad_likelihood[place, k] += scale * part
                    above += part
                grad_attention[e] += scale * above
                for k in range(every):
                    grad_alpha[j, k] += scale * (likelihood[place, k] - above / below)
            e, label, direct = edges[b, i], labels[b, i], to_choice[b, i]
            j, place = source[e], e if each else i
            below = total[j] + table[j, every]
            grad_attention[e] += direct
            grad_likelihood[place, label] += direct
            grad_alpha[j, label] += direct / (alpha[j, label] + table[j, label])
            for k in range(every):
                grad_alpha[j, k] -= direct / below
            table[j, label] += 1
            table[j, every] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@compiled
def _credit(first, last, inputs, counts, edges, labels, log_evidence, costs, table):
    # From the last row to the first, a row's own count taken out before its edges are visited:
    # table[j, k] holds what one count of k fewer at j would have changed in the later rows.
    every = counts.shape[1] - 1
    for b in range(first, last):
        ptr, source, each, attention, alpha, total, likelihood = _of(b, inputs)
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
                    above += (alpha[j, k] + counts[j, k]) * likelihood[place, k]
                below = total[j] + counts[j, every]
                share, now = shrink * attention[e], above / below
                for k in range(every):
                    if counts[j, k] > 0:
                        fewer = (above - likelihood[place, k]) / (below - 1)
                        table[j, k] -= np.log1p(share * (fewer - now))
        for i in range(len(ptr) - 1):
            for e in range(ptr[i], ptr[i + 1]):
                for k in range(every):
                    table[source[e], k] = 0


@compiled
def _predict(ptr, source, attention, alpha, weights, uniforms, counts, labels):
    # counts[j, t] holds the choices of node j in component t: by label, then all of them.
    num_components, every = counts.shape[1], counts.shape[2] - 1
    running, score = np.empty(np.max(ptr[1:] - ptr[:-1])), np.empty(every)
    total = np.empty(len(alpha))
    for j in range(len(alpha)):
        total[j] = np.sum(alpha[j])
    for i in range(len(ptr) - 1):
        score[:] = 0
        for e in range(ptr[i], ptr[i + 1]):
            j, scale = source[e], 0.0
            for t in range(num_components):
                share = attention[e] * weights[t] / (total[j] + counts[j, t, every])
                scale += share
                if counts[j, t, every] > 0:
                    for k in range(every):
                        score[k] += share * counts[j, t, k]
            for k in range(every):
                score[k] += scale * alpha[j, k]
        label = np.argmax(score)
        labels[i] = label
        for t in range(num_components):
            weight = 0.0
            for e in range(ptr[i], ptr[i + 1]):
                j = source[e]
                above, below = alpha[j, label] + counts[j, t, label], total[j] + counts[j, t, every]
                weight += attention[e] * above / below
                running[e - ptr[i]] = weight
            e, threshold = ptr[i], uniforms[t, i] * weight
            while running[e - ptr[i]] <= threshold and running[e - ptr[i]] < weight:
                e += 1
            counts[source[e], t, label] += 1
            counts[source[e], t, every] += 1


def _inputs(rows, terms) -> tuple:
    attention, alpha, likelihood = (_array(t, np.float64) for t in terms)
    # As of observed labels, to the last digit.
    total = _array(terms.alpha.sum(-1), np.float64)
    each = likelihood.shape[1] == rows.num_edges
    return *_graph(rows), each, np.exp(attention), alpha, total, np.exp(likelihood)


def _run(loop, rows, terms, size: int, *arrays, sweeps=1, own=lambda first: ()) -> None:
    """A loop over draws in threads; ``own`` makes what each thread has of its own."""
    inputs = _inputs(rows, terms)

    def run(first, last):
        # Zeroed lazily by the operating system: only the touched sources cost.
        table = np.zeros((rows.num_sources, terms.num_classes + 1), np.int32)
        loop(first, last, inputs, table, *arrays, *own(first))

    _in_threads(run, size, sweeps * size * rows.num_edges)


@opaque
def draw(rows, terms, uniforms):
    """See :func:`pyro_nmm.ops.evidence.draw_latent`. Cost: :math:`O(B E C)`."""
    edges, labels = (np.empty(uniforms.shape, np.int64) for _ in range(2))
    _run(_draw, rows, terms, len(edges), _array(uniforms), edges, labels)
    return torch.from_numpy(edges), torch.from_numpy(labels)


@opaque
def sweep(rows, terms, draw, uniforms):
    """See :func:`pyro_nmm.ops.gibbs.sweep`. Cost: :math:`O(S B E C)`."""
    edges, labels = (_array(t).copy() for t in draw)
    num_sweeps, num_draws, num_rows = uniforms.shape
    visits = np.zeros((num_draws, num_rows, terms.num_classes), np.int32)
    totals = np.zeros((num_draws, num_sweeps, terms.num_classes), np.int32)
    found = edges, labels, visits, totals
    _run(_sweep, rows, terms, num_draws, _array(uniforms), *found, sweeps=num_sweeps)
    return map(torch.from_numpy, found)


@opaque
def evaluate(rows, terms, draw):
    """See :func:`pyro_nmm.ops.evidence.latent_predictive`. Cost: :math:`O(B E C)`."""
    size = tuple(draw.edges.shape)
    found = np.empty(size), np.empty(size)
    _run(_evaluate, rows, terms, size[0], *map(_array, draw), *found)
    return (torch.from_numpy(part).to(terms.alpha.dtype) for part in found)


@opaque
def gradient(rows, terms, draw, log_evidence, to_evidence, to_choice):
    """The gradient of :func:`evaluate` by ``terms``, given the gradient by its results."""
    given = (_array(t, np.float64) for t in (log_evidence, to_evidence, to_choice))
    found = {}

    def own(first):
        # Threads that share a parameter have a gradient of their own to add to.
        found[first] = [np.zeros(t.shape) for t in terms]
        return found[first]

    _run(_gradient, rows, terms, len(draw.edges), *map(_array, draw), *given, own=own)
    sums = (sum(parts) for parts in zip(*(found[first] for first in sorted(found)), strict=True))
    return (torch.from_numpy(s).to(t.dtype) for s, t in zip(sums, terms, strict=True))


@opaque
def credits(rows, terms, draw, log_evidence):
    """See :func:`pyro_nmm.ops.evidence.one_step_credits`. Cost: :math:`O(B E C)`."""
    costs, size = np.empty(tuple(draw.edges.shape)), (rows.num_sources, terms.num_classes)
    arrays = *map(_array, draw), _array(log_evidence, np.float64), costs
    _run(_credit, rows, terms, len(costs), *arrays, own=lambda first: (np.zeros(size),))
    return torch.from_numpy(costs)


@opaque
def predict(rows, attention, alpha, weights, uniforms, counts):
    """See :func:`pyro_nmm.distributions.sequential.predict_by_sweeps`. Cost: :math:`O(T E C)`."""
    labels = np.empty(rows.num_rows, np.int64)
    parameters = (_array(t, np.float64) for t in (attention, alpha, weights))
    _predict(*_graph(rows), *parameters, _array(uniforms), _array(counts), labels)
    return torch.from_numpy(labels)
