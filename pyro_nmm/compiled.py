# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The sequential draw as a compiled loop, for the CPU (``pip install pyro-nmm[fast]``).

It does each edge once where sweeps do it a dozen times; ``benchmarks/speed.py`` has the ratio.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _loop(batch, ptr, source, attention, alpha, total, labels, num_classes, uniforms,
          table, edges, same_label, any_label):  # fmt: skip
    # table[j] counts the choices of node j: one column per label, then all of them.
    running = np.empty(np.max(ptr[1:] - ptr[:-1]))
    for b in batch:
        b_l, b_a = min(b, len(attention) - 1), min(b, len(alpha) - 1)
        b_t, b_y = min(b, len(total) - 1), min(b, len(labels) - 1)
        for i in range(len(ptr) - 1):
            label, first, last = labels[b_y, i], ptr[i], ptr[i + 1]
            weight = 0.0
            for e in range(first, last):
                same, every = table[source[e], label], table[source[e], num_classes]
                same_label[b, e], any_label[b, e] = same, every
                weight += attention[b_l, e] * (alpha[b_a, e] + same) / (total[b_t, e] + every)
                running[e - first] = weight
            e, threshold = first, uniforms[b, i] * weight
            while running[e - first] <= threshold and running[e - first] < weight:
                e += 1
            edges[b, i] = e
            table[source[e], label] += 1
            table[source[e], num_classes] += 1
        for i in range(len(ptr) - 1):
            table[source[edges[b, i]], labels[b_y, i]] = 0
            table[source[edges[b, i]], num_classes] = 0


def draw_by_loop(rows, terms, labels, num_classes, uniforms):
    """
    See :func:`~pyro_nmm.sampling.draw_by_sweeps`, whose result this is.

    Cost: :math:`O(B E)`; draws are spread over ``torch.get_num_threads()`` threads.
    """
    from pyro_nmm.sampling import Draw

    size, num_edges = len(uniforms), rows.num_edges
    attention = terms.log_attention.double().exp()
    inputs = [_array(t) for t in (attention, terms.alpha.double(), terms.total.double(), labels)]
    edges = np.empty((size, rows.num_rows), np.int64)
    same, every = (np.empty((size, num_edges), np.int32) for _ in range(2))

    def run(batch: np.ndarray) -> None:
        # Zeroed lazily by the operating system: only the touched nodes cost.
        table = np.zeros((rows.num_nodes, num_classes + 1), np.int32)
        _loop(batch, _array(rows.ptr), _array(rows.source), *inputs[:3], inputs[3],
              num_classes, _array(uniforms), table, edges, same, every)  # fmt: skip

    parts = np.array_split(np.arange(size), min(size, torch.get_num_threads()))
    if len(parts) == 1:
        run(parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(run, parts))
    return Draw(*map(torch.from_numpy, (edges, same, every)))


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().numpy())
