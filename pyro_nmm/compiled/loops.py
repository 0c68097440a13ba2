# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What all compiled loops share, and loops over edges. They run on the processor: tensors of other
devices are copied there and back."""

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

#: ``torch.compile`` would trace NumPy calls as tensor code.
opaque = torch.compiler.disable

#: Below this many edges and draws a second thread costs more than it saves.
_MIN_PARALLEL = 100_000


def _compiled(function: Callable) -> Callable:
    """A compiled loop, kept on disk or, with a warning, in this process alone."""
    compiler = functools.partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return compiler(cache=True)(function)
    except RuntimeError as error:  # numba finds no folder that it may write
        warnings.warn(
            f"numba cannot keep compiled loops on disk ({error}), so every process compiles them "
            f"anew: set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=1,  # one place, so that it is shown once
        )
        return compiler()(function)


@_compiled
def _find(first, last, ptr, source, choices, edges):
    for b in range(len(choices)):
        for i in range(first, last):
            for e in range(ptr[i], ptr[i + 1]):
                if source[e] == choices[b, i]:
                    edges[b, i] = e


@_compiled
def _ranks(choices, labels, table, same_label, any_label):
    every = table.shape[1] - 1
    for b in range(len(choices)):
        b_y = min(b, len(labels) - 1)
        for i in range(choices.shape[1]):
            j, label = choices[b, i], labels[b_y, i]
            same_label[b, i], any_label[b, i] = table[j, label], table[j, every]
            table[j, label] += 1
            table[j, every] += 1
        for i in range(choices.shape[1]):
            table[choices[b, i], labels[b_y, i]] = 0
            table[choices[b, i], every] = 0


@_compiled
def _widest(ptr):
    most = 0  # np.max of differences takes half a second to compile
    for i in range(len(ptr) - 1):
        most = max(most, ptr[i + 1] - ptr[i])
    return most


@_compiled
def _clear(ptr, source, edges, labels, table):
    for i in range(len(ptr) - 1):
        table[source[edges[i]], labels[i]] = 0
        table[source[edges[i]], table.shape[1] - 1] = 0


@_compiled
def _entr(x):
    return -x * np.log(x) if x > 0 else 0.0


@_compiled
def _added(weight, mean, probs, entropy, change):
    # change[k] of a row's entropy if its edge gets one more count of k.
    rest = -entropy
    for k in range(len(probs)):
        left = max(probs[k] - weight * mean[k], 0.0)
        without = _entr(left)
        rest += without
        change[k] = _entr(left + weight) - without
    for k in range(len(probs)):
        change[k] += rest


@_compiled
def _entropy(
    first, last, table, ptr, source, attention, alpha, total, edges, labels, bound, slopes
):
    # slopes is () or the derivatives of each draw, by attention and by alpha.
    num_classes = alpha.shape[1]
    probs = np.empty((len(ptr) - 1, num_classes))
    for b in range(first, last):
        probs[:] = 0
        for i in range(len(probs)):
            for e in range(ptr[i], ptr[i + 1]):
                j = source[e]
                weight = attention[e] / (total[j] + table[j, num_classes])
                for k in range(num_classes):
                    probs[i, k] += weight * (alpha[j, k] + table[j, k])
            for k in range(num_classes):
                bound[b] += _entr(probs[i, k])
            table[source[edges[b, i]], labels[b, i]] += 1
            table[source[edges[b, i]], num_classes] += 1
        if len(slopes):
            given = ptr, source, attention, alpha, total
            _slopes(*given, edges[b], labels[b], probs, table, slopes[0][b], slopes[1][b])
        _clear(ptr, source, edges[b], labels[b], table)


@_compiled
def _slopes(
    ptr, source, attention, alpha, total, edges, labels, probs, table, to_attention, to_alpha
):
    # Backwards, without a row's own count. credit[j, 0] holds the change of later rows by one count
    # more at j, and credit[j, 1 + k] the same with one count of k fewer.
    num_classes = alpha.shape[1]
    mean, without = np.empty(num_classes), np.empty(num_classes)
    change, changed = np.empty(num_classes), np.empty(num_classes)
    gain, slope = np.empty(num_classes), np.empty(num_classes)
    credit = np.zeros((len(alpha), num_classes + 1, num_classes))
    for i in range(len(probs) - 1, -1, -1):
        table[source[edges[i]], labels[i]] -= 1
        table[source[edges[i]], num_classes] -= 1
        entropy = 0.0
        for k in range(num_classes):
            slope[k] = -1 - np.log(max(probs[i, k], 1e-300))
            entropy += _entr(probs[i, k])
        for e in range(ptr[i], ptr[i + 1]):
            j = source[e]
            base, below = labels[i] + 1 if e == edges[i] else 0, total[j] + table[j, num_classes]
            average = 0.0
            for k in range(num_classes):
                mean[k] = (alpha[j, k] + table[j, k]) / below
                gain[k] = credit[j, base, k] + slope[k]
                average += mean[k] * gain[k]
            to_attention[e] = average
            for k in range(num_classes):
                to_alpha[j, k] += attention[e] / below * (gain[k] - average)
            _added(attention[e] / (below + 1), mean, probs[i], entropy, change)
            for k in range(num_classes):
                credit[j, 0, k] += change[k]
            for k in range(num_classes):
                if table[j, k] == 0:
                    continue
                entropy_without = 0.0
                for m in range(num_classes):
                    without[m] = (alpha[j, m] + table[j, m] - (m == k)) / (below - 1)
                    changed[m] = probs[i, m] + attention[e] * (without[m] - mean[m])
                    entropy_without += _entr(changed[m])
                _added(attention[e] / below, without, changed, entropy_without, change)
                for m in range(num_classes):
                    credit[j, 1 + k, m] += change[m]


@_compiled
def _predict(ptr, source, attention, alpha, total, weights, uniforms, counts, labels):
    # counts[j, t] holds the choices of node j in component t: by label, then all of them.
    num_components, every = counts.shape[1], counts.shape[2] - 1
    running, score = np.empty(_widest(ptr)), np.empty(every)
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


@opaque
def find(hood, choices):
    """See :meth:`pyro_nmm.Neighborhood.find`. Cost: :math:`O(B E)`."""
    edges = np.full(choices.shape, -1, np.int64)

    def run(first, last):
        _find(first, last, *_graph(hood), _array(choices), edges)

    _in_threads(run, hood.num_rows, len(choices) * hood.num_edges)
    return torch.from_numpy(edges)


@opaque
def entropy(alpha, attention, rows, edges, labels, slopes=False):
    """See :func:`pyro_nmm.ops.entropy.entropy_samples`; with derivatives if ``slopes``."""
    _check_labels(labels, alpha.shape[-1])
    size, parts = len(edges), [_array(t, np.float64) for t in (attention, alpha, alpha.sum(-1))]
    outputs = [np.zeros(size)]
    if slopes:
        outputs += [np.empty((size, rows.num_edges)), np.zeros((size, *alpha.shape))]
    arrays = *_graph(rows), *parts, _array(edges), _array(labels), outputs[0], tuple(outputs[1:])
    _run(_entropy, rows, alpha.shape[-1], size, size * rows.num_edges, *arrays)
    return tuple(output.to(alpha.dtype) for output in _tensors(rows, *outputs))


@opaque
def ranks(choices, labels, num_nodes, num_classes):
    """See :func:`pyro_nmm.ops.counts.ranks`. Cost: :math:`O(B n)`."""
    _check_labels(labels, num_classes)
    counts = np.empty((2, *choices.shape), np.int32)
    table = np.zeros((num_nodes, num_classes + 1), np.int32)
    _ranks(_array(choices), _array(labels), table, *counts)
    return torch.from_numpy(counts)


@opaque
def predict(rows, attention, alpha, weights, uniforms, counts):
    """See :func:`pyro_nmm.distributions.sequential.predict_in_turn`. Cost: :math:`O(T E C)`."""
    labels = np.empty(rows.num_rows, np.int64)
    parameters = (_array(t, np.float64) for t in (attention, alpha, alpha.sum(-1), weights))
    _predict(*_graph(rows), *parameters, _array(uniforms), _array(counts), labels)
    return _tensors(rows, labels)[0]


def _graph(rows) -> tuple[np.ndarray, np.ndarray]:
    return _array(rows.ptr), _array(rows.source)


def _check_labels(labels: Tensor, num_classes: int) -> None:
    # Always, because the loops do not check where they write.
    if labels.numel() and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(f"y holds a label outside 0..{num_classes - 1}")


def _run(loop, rows, num_classes: int, size: int, work: int, *arrays) -> None:
    """A loop over draws in threads, each with a table of counts."""

    def run(first, last):
        # Zeroed lazily by the operating system: only the touched sources cost.
        table = np.zeros((rows.num_sources, num_classes + 1), np.int32)
        loop(first, last, table, *arrays)

    _in_threads(run, size, work)


def _in_threads(run, size: int, work: int) -> None:
    parts = min(size, torch.get_num_threads()) if work > _MIN_PARALLEL else 1
    if parts == 1:
        return run(0, size)
    cuts = np.linspace(0, size, parts + 1).astype(int).tolist()
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(run, cuts[:-1], cuts[1:]))


def _array(tensor: Tensor, dtype=None) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype)


def _tensors(rows, *arrays) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(rows.device) for array in arrays)
