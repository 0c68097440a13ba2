# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loop of `pyro_nmm.distributions.joint`: a sum of logarithms and its gradient in one pass."""

import numpy as np
import torch

from pyro_nmm.compiled.loops import _array, _check_labels, _compiled, _graph, _tensors, opaque


@_compiled
def _chosen(logits, edges, slopes):
    found = 0.0
    for b in range(len(edges)):
        of = b % len(logits)
        for i in range(edges.shape[1]):
            found += logits[of, edges[b, i]]
            slopes[of, edges[b, i]] += 1
    return found


@_compiled
def _urns(source, alpha, total, edges, labels, table, slopes, of_total):
    found, product, every = 0.0, 1.0, table.shape[1] - 1
    for b in range(len(edges)):
        of, of_labels = b % len(alpha), b % len(labels)
        for i in range(edges.shape[1]):
            j, k = source[edges[b, i]], labels[of_labels, i]
            above, below = alpha[of, j, k] + table[j, k], total[of, j] + table[j, every]
            slopes[of, j, k] += 1 / above
            of_total[of, j] -= 1 / below
            product *= above / below
            if product < 1e-200:  # a logarithm costs more than all else
                found += np.log(product)
                product = 1.0
            table[j, k] += 1
            table[j, every] += 1
        for i in range(edges.shape[1]):
            j = source[edges[b, i]]
            table[j, labels[of_labels, i]] = 0
            table[j, every] = 0
    return found + np.log(product)


@opaque
def joint(alpha, log_attention, attention, rows, edges, labels, shares):
    """See :class:`pyro_nmm.distributions.joint.LogJoint`: the sum, and its gradients towards
    ``alpha`` and logits. Cost: :math:`O(b (E + N C) + B n)`."""
    _check_labels(labels, alpha.shape[-1])
    alpha, total, log_attention = (
        _array(t, np.float64) for t in (alpha, alpha.sum(-1), log_attention)
    )
    (edges, labels), source = map(_array, (edges, labels)), _graph(rows)[1]
    of_logits = _array(attention, np.float64) * (-len(edges) / len(log_attention))
    of_alpha, of_total = np.zeros_like(alpha), np.zeros_like(total)
    table = np.zeros((rows.num_sources, alpha.shape[-1] + 1), np.int32)
    if shares is None:
        found = _chosen(log_attention, edges, of_logits)
    else:
        shares = _array(shares, np.float64)
        # Edges that are switched off have no share.
        found = (shares * log_attention.clip(np.finfo(np.float32).min)).sum()
        of_logits += shares
    found += _urns(source, alpha, total, edges, labels, table, of_alpha, of_total)
    of_alpha += of_total[..., None]
    return torch.tensor(found, dtype=torch.double), *_tensors(rows, of_alpha, of_logits)
