# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The exact normalizer of the Ising model on a grid without field, of any size."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix, identity
from scipy.sparse.linalg import splu

from pyro_nmm.models import grid_edges


def kac_ward(height: int, width: int, coupling: float) -> float:
    r"""
    Exact :math:`\log Z` of the Ising model on a grid with open boundary and without field
    (Kac and Ward 1952): :math:`2^N \prod_e \cosh J_e \sqrt{\det(1 - W)}`, where :math:`W` leads
    from each directed edge to those that follow it, turning by an angle :math:`\varphi`, with
    :math:`\tanh J \, e^{i \varphi / 2}`.
    """
    edges = grid_edges(height, width).numpy()
    tail, head = np.concatenate([edges, edges[::-1]], 1)
    step = head - tail
    angle = np.select([step == 1, step == -1, step == width], [0, np.pi, np.pi / 2], -np.pi / 2)
    if width == 1:
        angle = np.where(step > 0, np.pi / 2, -np.pi / 2)
    out = [[] for _ in range(height * width)]
    for number, node in enumerate(tail):
        out[node].append(number)
    pairs = [(e, f) for e in range(len(tail)) for f in out[head[e]] if head[f] != tail[e]]
    row, column = np.array(pairs, int).reshape(-1, 2).T
    turn = (angle[column] - angle[row] + np.pi) % (2 * np.pi) - np.pi
    weight = coo_matrix(
        (np.tanh(coupling) * np.exp(0.5j * turn), (row, column)), shape=(len(tail), len(tail))
    )
    factors = splu((identity(len(tail), dtype=complex) - weight).tocsc())
    log_det = np.log(np.abs(factors.U.diagonal())).sum()
    size = height * width * np.log(2) + edges.shape[1] * np.log(np.cosh(coupling))
    return float(size + log_det / 2)
