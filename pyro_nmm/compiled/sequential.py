# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loop of predictions in turn, compiled for the CPU as those of :mod:`pyro_nmm.compiled`."""

import numpy as np
import torch

from pyro_nmm.compiled.loops import _array, compiled, opaque


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


@opaque
def predict(rows, attention, alpha, weights, uniforms, counts):
    """See :func:`pyro_nmm.distributions.sequential.predict_by_sweeps`. Cost: :math:`O(T E C)`."""
    labels = np.empty(rows.num_rows, np.int64)
    parameters = (_array(t, np.float64) for t in (attention, alpha, weights))
    graph = _array(rows.ptr), _array(rows.source)
    _predict(*graph, *parameters, _array(uniforms), _array(counts), labels)
    return torch.from_numpy(labels)
