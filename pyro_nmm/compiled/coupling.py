# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loop of `pyro_nmm.ops.coupling`: sweeps of two chains at once."""

import numpy as np

from pyro_nmm.compiled.draws import _count, _inputs, _of
from pyro_nmm.compiled.loops import _array, _compiled, _widest, opaque


@_compiled
def _weights(inputs, table, i, found):
    # Of each edge of a row, and of each of its labels if these are latent, given all other rows.
    single, ptr, source, attention, alpha, total, observed, likelihood = inputs
    each, every, place, weight = len(likelihood) == len(source), table.shape[1] - 1, 0, 0.0
    for e in range(ptr[i], ptr[i + 1]):
        j = source[e]
        scale = attention[e] / (total[e if len(single) else j] + table[j, every])
        for k in range(1 if len(single) else every):
            if len(single):
                found[place] = scale * (alpha[e, 0] + table[j, observed[i]])
            else:
                found[place] = scale * (alpha[j, k] + table[j, k]) * likelihood[e if each else i, k]
            weight += found[place]
            place += 1
    for p in range(place):
        found[p] /= weight
    return place


@_compiled
def _picked(one, other, size, kind, threshold):
    # An entry in proportion to the smaller of two weights, or to what the first has above it.
    found, last = 0.0, 0
    for p in range(size):
        part = min(one[p], other[p]) if kind == 0 else max(one[p] - other[p], 0.0)
        if part > 0:
            found, last = found + part, p
            if found > threshold:
                break
    return last


@_compiled
def _coupled(inputs, uniforms, edges, labels, tables):
    # The number of sweeps until both chains (2, rows) agree; zero if they do not.
    single, ptr, source = inputs[:3]
    every, width = tables.shape[2] - 1, 1 if len(single) else tables.shape[2] - 1
    most = _widest(ptr) * width
    probs, places = np.empty((2, most)), np.zeros(2, np.int64)
    for sweep in range(len(uniforms)):
        agree = True
        for i in range(len(ptr) - 1):
            size = 0
            for b in range(2):
                j = source[edges[b, i]]
                tables[b, j, labels[b, i]] -= 1
                tables[b, j, every] -= 1
                size = _weights(inputs, tables[b], i, probs[b])
            overlap = 0.0
            for p in range(size):
                overlap += min(probs[0, p], probs[1, p])
            first = uniforms[sweep, 0, i]
            if first < overlap:
                places[:] = _picked(probs[0], probs[1], size, 0, first)
            else:
                for b in range(2):
                    rest = uniforms[sweep, 1 + b, i] * (1 - overlap)
                    places[b] = _picked(probs[b], probs[1 - b], size, 1, rest)
            agree = agree and places[0] == places[1]
            for b in range(2):
                edges[b, i] = ptr[i] + places[b] // width
                if not len(single):
                    labels[b, i] = places[b] % width
                j = source[edges[b, i]]
                tables[b, j, labels[b, i]] += 1
                tables[b, j, every] += 1
        if agree:
            return sweep + 1
    return 0


@opaque
def coupled(rows, entries, edges, labels, uniforms):
    """See :func:`pyro_nmm.ops.coupling.meeting_time`: sweeps, and states, which are changed."""
    tables = np.zeros((2, rows.num_sources, entries.num_classes + 1), np.int32)
    inputs = _of(0, _inputs(rows, entries))
    for b in range(2):
        _count(inputs.ptr, inputs.source, edges[b], labels[b], tables[b])
    return _coupled(inputs, _array(uniforms), edges, labels, tables)
