# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The sampler of q(c|y) as its definition reads: one node after the other."""

import numpy as np


def draw(hood, alpha, logits, y, order, uniforms):
    """
    :param order: node ids in the order of the draw.
    :param uniforms: ``(n,)``, in that order.
    :return: chosen node ids in that order, and log q.
    """
    alpha, scores, y = alpha.numpy(), logits.numpy(), y.numpy()
    ptr, source = hood.ptr.numpy(), hood.source.numpy()
    counts = np.zeros_like(alpha)
    chosen, log_q = [], 0.0
    for i, u in zip(order.tolist(), uniforms.tolist(), strict=True):
        row = slice(ptr[i], ptr[i + 1])
        weight = np.exp(scores[row] - scores[row].max())
        total = alpha + counts
        weight = weight * total[source[row], y[i]] / total[source[row]].sum(1)
        probs = weight / weight.sum()
        k = min(int((np.cumsum(probs) <= u).sum()), len(probs) - 1)
        counts[source[row][k], y[i]] += 1
        chosen.append(source[row][k])
        log_q += np.log(probs[k])
    return np.array(chosen), log_q
