# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Collapsed Gibbs sampling [1] of choices and labels given evidence.

Row after row is drawn anew, given all others,

.. math::

    p(c_i = j, u_i = k \mid c_{-i}, u_{-i}, w) \propto
        L_{ij} \frac{\alpha_{jk} + s_{jk}^{-i}}{A_j + S_j^{-i}} \, e^{e_{ijk}} ,

the sequential draw's summands with the counts of all other rows in place of the earlier ones'. It
has no parameter, and is exact in the limit, where the sequential draw sees the past only.

A sweep over the rows in a given order, with given uniform numbers, is a function of the counts that
each row sees: the new draws of earlier rows and the old ones of later rows. So the tensor code
finds it as the fixed point of drawing all rows at once, as :mod:`pyro_nmm.ops.sampling` does, and
it is equal to the loop.

[1] Jun S. Liu (1994) "The Collapsed Gibbs Sampler in Bayesian Computations with Applications to a
Gene Regulation Problem", Journal of the American Statistical Association 89,
https://doi.org/10.1080/01621459.1994.10476829.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import choice_groups, indicator
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, flat_terms, relative, written_out
from pyro_nmm.ops.sampling import pick


@torch.no_grad()
def sweep(rows: Neighborhood, terms: LatentTerms, draw: LatentDraw, uniforms: Tensor) -> LatentDraw:
    """
    Every row anew, in their order, as often as there are uniform numbers.

    :param LatentDraw draw: the states of ``B`` chains.
    :param Tensor uniforms: ``(S, B, num_rows)`` float64, one per sweep, chain and row.
    :return: the states after ``S`` sweeps. Cost: :math:`O(S B E C)`; without compiled loops, times
        the number of rounds to a fixed point.
    """
    terms, _ = relative(rows, terms)
    if backend.compiled is not None and rows.device.type == "cpu":
        from pyro_nmm import compiled_evidence  # needs numba

        return LatentDraw(*compiled_evidence.sweep(rows, terms, draw, uniforms))
    size, wide, labels = terms.num_classes, *written_out(rows, terms.num_classes)
    groups = choice_groups(wide, labels[None], size, wide.row)
    flat = flat_terms(rows, terms)
    edges = draw.edges * size + draw.labels
    for numbers in uniforms:
        edges = _settle(wide, groups, flat, edges, numbers)
    return LatentDraw(edges.div(size, rounding_mode="floor"), edges % size)


def _settle(wide, groups, flat, old, uniforms):
    attention = flat.log_attention.double().exp()
    by_source, by_label = groups
    chosen = indicator(old, wide.num_edges)
    after = flat.alpha + by_label.later(chosen), flat.total + by_source.later(chosen)
    new = old
    while True:
        chosen = indicator(new, wide.num_edges)
        above, below = after[0] + by_label.earlier(chosen), after[1] + by_source.earlier(chosen)
        found = pick(wide, attention * (above / below), uniforms)
        if torch.equal(found, new):
            return new
        new = found
