# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loops over entries, see `pyro_nmm.ops.entries`: draws, their counts, and Gibbs sweeps.

``table[j]`` counts the choices of source ``j``, in one column per label and one for all of them.
"""

from typing import Any, NamedTuple

import numpy as np

from pyro_nmm.compiled.loops import (
    _array,
    _check_labels,
    _clear,
    _compiled,
    _graph,
    _run,
    _tensors,
    _widest,
    opaque,
)


class _Inputs(NamedTuple):
    single: tuple  #: ``(1,)`` if labels are observed, else ``()``: numba compiles for the length
    ptr: Any
    source: Any
    attention: Any
    alpha: Any
    total: Any
    labels: Any
    likelihood: Any


@_compiled
def _of(b, inputs):
    # The inputs of one draw of a batch that may share them.
    single, ptr, source, attention, alpha, total, labels, likelihood = inputs
    attention, alpha = attention[min(b, len(attention) - 1)], alpha[min(b, len(alpha) - 1)]
    total, labels = total[min(b, len(total) - 1)], labels[min(b, len(labels) - 1)]
    likelihood = likelihood[min(b, len(likelihood) - 1)]
    return _Inputs(single, ptr, source, attention, alpha, total, labels, likelihood)


@_compiled
def _draw(first, last, table, inputs, uniforms, edges, labels, sums):
    for b in range(first, last):
        given, outputs = _of(b, inputs), (edges[b], labels[b])
        _rows(False, 1, given, table, uniforms[b], *outputs, (sums[b],), (), ())
        _clear(inputs.ptr, inputs.source, edges[b], labels[b], table)


@_compiled
def _rows(again, step, inputs, table, uniforms, edges, labels, sums, shares, before):
    # All rows in turn, from the last one if the step is -1; if drawn again, given all others. One
    # function a row would take four times as long: numba counts references to arrays. It takes the
    # branches out where sums, shares or before are (). With attention and likelihood before, it
    # gives the logarithm of the rise of all rows' weights.
    single, ptr, source, attention, alpha, total, observed, likelihood = inputs
    each, every = len(likelihood) == len(source), table.shape[1] - 1
    running = np.empty(_widest(ptr))
    rise, product = 0.0, 1.0
    for place in range(len(ptr) - 1):
        i = place if step > 0 else len(ptr) - 2 - place
        if again:
            table[source[edges[i]], labels[i]] -= 1
            table[source[edges[i]], every] -= 1
        start, weight, old = ptr[i], 0.0, 0.0
        for e in range(start, ptr[i + 1]):
            j = source[e]
            if len(single):
                a, above = e, alpha[e, 0] + table[j, observed[i]]
            else:
                a, row, above = j, e if each else i, 0.0
                for k in range(every):
                    above += (alpha[j, k] + table[j, k]) * likelihood[row, k]
            below = total[a] + table[j, every]
            above /= below
            weight += attention[e] * above
            running[e - start] = weight
            if len(before):
                if not len(single):
                    above = 0.0
                    for k in range(every):
                        above += (alpha[j, k] + table[j, k]) * before[1][row, k]
                    above /= below
                old += before[0][e] * above
        if len(before):
            product *= weight / old
            if not 1e-100 < product < 1e100:  # a logarithm costs more than all else
                rise += np.log(product)
                product = 1.0
        if len(sums):
            sums[0][i] = weight
        if len(shares):
            below = 0.0
            for e in range(start, ptr[i + 1]):
                shares[0][e] += (running[e - start] - below) / weight
                below = running[e - start]
        e, threshold = start, uniforms[i] * weight
        while running[e - start] <= threshold and running[e - start] < weight:
            e += 1
        j, row = source[e], e if each else i
        if len(single):
            chosen = observed[i]
        else:
            # What is left of the threshold goes through the labels of this edge.
            scale = attention[e] / (total[j] + table[j, every])
            rest = threshold - running[e - 1 - start] if e > start else threshold
            chosen = 0  # of weights that are not numbers, too: loops do not look where they count
            for k in range(every):
                part = scale * (alpha[j, k] + table[j, k]) * likelihood[row, k]
                if part > 0:
                    chosen = k
                    if rest < part:
                        break
                rest -= part
        edges[i], labels[i] = e, chosen
        table[j, chosen] += 1
        table[j, every] += 1
    return rise + np.log(product)


@_compiled
def _count(ptr, source, edges, labels, table):
    for i in range(len(ptr) - 1):
        table[source[edges[i]], labels[i]] += 1
        table[source[edges[i]], table.shape[1] - 1] += 1


@_compiled
def _sweep(first, last, table, inputs, uniforms, edges, labels, shares, visits):
    # uniforms is (sweeps, draws, rows): every row in turn, given all others. Wanted are sums over
    # sweeps of shares, with all states, or of visits of labels and their totals; or they are ().
    ptr, source = inputs.ptr, inputs.source
    for b in range(first, last):
        one = _of(b, inputs)
        _count(ptr, source, edges[b], labels[b], table)
        for sweep in range(len(uniforms)):
            of_edges = (shares[0][b],) if len(shares) else ()
            at, to, some = edges[b], labels[b], uniforms[sweep, b]
            _rows(True, 1, one, table, some, at, to, (), of_edges, ())
            if len(shares):
                for i in range(len(ptr) - 1):
                    shares[1][sweep, b, i], shares[2][sweep, b, i] = edges[b, i], labels[b, i]
            if len(visits):
                for i in range(len(ptr) - 1):
                    visits[0][b, i, labels[b, i]] += 1
                    visits[1][b, sweep, labels[b, i]] += 1
        _clear(ptr, source, edges[b], labels[b], table)


@_compiled
def _mixed(start, end, share):
    return start * (1 - share) + end * share


@_compiled
def _rise(inputs, table, edges, labels, alpha_to, total_to):
    # How much the logarithm of the joint probability rises with other concentrations.
    single, ptr, source, _, alpha, total, _, _ = inputs
    every, found, product = table.shape[1] - 1, 0.0, 1.0
    for i in range(len(ptr) - 1):
        e, k = edges[i], labels[i]
        j = source[e]
        a, column = (e, 0) if len(single) else (j, k)
        same, all_same = table[j, k], table[j, every]
        product *= (alpha_to[a, column] + same) / (alpha[a, column] + same)
        product *= (total[a] + all_same) / (total_to[a] + all_same)
        if not 1e-100 < product < 1e100:  # a logarithm costs more than all else
            found += np.log(product)
            product = 1.0
        table[j, k] += 1
        table[j, every] += 1
    _clear(ptr, source, edges, labels, table)
    return found + np.log(product)


@_compiled
def _anneal(first, last, table, inputs, ends, uniforms, edges, labels, gains):
    # Rows are taken in reverse in the second half of the sweeps.
    (single, ptr, source), counts, size = inputs[:3], np.zeros_like(table), len(uniforms)
    for b in range(first, last):
        start, end, at, to = _of(b, inputs), _of(b, ends), edges[b], labels[b]
        gains[b], now = 0.0, start
        _count(ptr, source, at, to, table)
        for sweep in range(size + 1):
            share = (sweep + 1) / (size + 1)
            alpha = _mixed(start.alpha, end.alpha, share)
            total = _mixed(start.total, end.total, share)
            gains[b] += _rise(now, counts, at, to, alpha, total)
            if sweep < size:
                share = (sweep + 1) / size
                attention = _mixed(start.attention, end.attention, share)
                likelihood = _mixed(start.likelihood, end.likelihood, share)
                then = _Inputs(
                    single, ptr, source, attention, alpha, total, start.labels, likelihood
                )
                old, step = (now.attention, now.likelihood), 1 if 2 * sweep < size else -1
                some = uniforms[sweep, b]
                gains[b] += _rows(True, step, then, table, some, at, to, (), (), old)
                now = then
        _clear(ptr, source, at, to, table)


@_compiled
def _meet(first, last, table, ptr, source, rows, edges, labels, wanted, same, every):
    # The counts that draws b meet at the edges of some rows: of wanted labels, or of all of them.
    start, all_labels = ptr[rows[0]], table.shape[1] - 1
    for b in range(first, last):
        for i in range(rows[1]):
            if i >= rows[0]:
                for e in range(ptr[i], ptr[i + 1]):
                    every[b, e - start] = table[source[e], all_labels]
                    for k in range(same.shape[2]):
                        label = wanted[min(b, len(wanted) - 1), i] if len(wanted) else k
                        same[b, e - start, k] = table[source[e], label]
            table[source[edges[b, i]], labels[b, i]] += 1
            table[source[edges[b, i]], all_labels] += 1
        _clear(ptr[: rows[1] + 1], source, edges[b], labels[b], table)


def _inputs(rows, entries) -> _Inputs:
    attention, alpha, total = (_array(t, np.float64) for t in entries[:3])
    if entries.observed:
        _check_labels(entries.data, entries.num_classes)
        alpha, labels, likelihood = alpha[..., None], _array(entries.data), np.ones((1, 1, 1))
    else:
        likelihood, labels = np.exp(_array(entries.data, np.float64)), np.zeros((1, 0), np.int64)
    single = (1,) if entries.observed else ()
    return _Inputs(single, *_graph(rows), np.exp(attention), alpha, total, labels, likelihood)


def _run_entries(loop, rows, entries, size: int, *arrays, sweeps=1) -> None:
    work = sweeps * size * rows.num_edges
    _run(loop, rows, entries.num_classes, size, work, _inputs(rows, entries), *arrays)


@opaque
def draw(rows, entries, uniforms):
    """See :func:`pyro_nmm.ops.sampling.draw_entries`. Cost: :math:`O(B E K)`."""
    edges, labels = (np.empty(uniforms.shape, np.int64) for _ in range(2))
    outputs = edges, labels, np.empty(uniforms.shape)
    _run_entries(_draw, rows, entries, len(edges), _array(uniforms), *outputs)
    return _tensors(rows, *outputs)


@opaque
def meet(rows, draw, part, wanted, num_classes):
    """See :func:`pyro_nmm.ops.entries.met`; ``wanted`` are labels of rows, or ``None`` for all of
    them. Cost: :math:`O(B (n + E K))`."""
    (ptr, source), (edges, labels) = _graph(rows), map(_array, draw[:2])
    _check_labels(draw.labels, num_classes)
    size = len(edges), int(ptr[part.stop] - ptr[part.start])
    some = np.empty((0, 0), np.int64) if wanted is None else _array(wanted)
    same = np.empty((*size, num_classes if wanted is None else 1), np.int32)
    every, limits = np.empty(size, np.int32), (part.start, part.stop)
    outputs = edges, labels, some, same, every
    _run(_meet, rows, num_classes, len(edges), same.size, ptr, source, limits, *outputs)
    return _tensors(rows, same, every)


@opaque
def sweep(rows, entries, draw, uniforms, want):
    """See :func:`pyro_nmm.ops.sweeps.sweep`. Cost: :math:`O(S B E C)`."""
    edges, labels = (_array(t).copy() for t in draw[:2])
    (num_sweeps, num_draws, num_rows), visits, shares = uniforms.shape, (), ()
    if want == "visits":
        sizes, width = (num_rows, num_sweeps), entries.num_classes
        visits = tuple(np.zeros((num_draws, size, width), np.int32) for size in sizes)
    elif want == "shares":
        states = (np.empty(uniforms.shape, np.int64) for _ in range(2))
        shares = (np.zeros((num_draws, rows.num_edges)), *states)
    inputs, outputs = (_inputs(rows, entries), _array(uniforms)), (edges, labels, shares, visits)
    work = num_sweeps * num_draws * rows.num_edges
    _run(_sweep, rows, entries.num_classes, num_draws, work, *inputs, *outputs)
    return _tensors(rows, edges, labels, *shares, *visits)


@opaque
def anneal(rows, start, end, draw, uniforms):
    """See :func:`pyro_nmm.ops.annealing.anneal`; with uniforms ``(S, B, num_rows)``. Cost:
    :math:`O(S B E C)`."""
    edges, labels = (_array(t).copy() for t in draw[:2])
    outputs = edges, labels, np.empty(len(edges))
    inputs = _inputs(rows, end), _array(uniforms), *outputs
    _run_entries(_anneal, rows, start, len(edges), *inputs, sweeps=len(uniforms))
    return _tensors(rows, *outputs)
