# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import torch
from torch import Tensor

from pyro_nmm.models.annotators.walks import Walk

#: Weight of a node's own evidence, strength of the neighbours, and damped steps.
OWN, STRENGTH, NUM_STEPS = 0.3, 2.5, 30


def potts_labels(walk: Walk, evidence: Tensor, part: Tensor) -> Tensor:
    r"""
    What neighbours say about each node, ``(N, C)``, in the mean field of a Potts model,

    .. math::

        q_i \propto \exp \Bigl( .3 \, e_i + \tfrac{2.5}{\sqrt{d_i}} \sum_{j \sim i} q_j \Bigr)

    Label spreading is linear in what nodes say, and mild. In the Potts model neighbours that agree
    convince each other. Over sources :math:`d_i` is the inverse sum of squared attention.

    :param Tensor evidence: ``(N, C)`` in double precision, zeros at nodes without any.
    :param Tensor part: ``(N,)`` integers from zero; a part's own evidence is left out for it.
    :return: the softmax of the second term. Cost: :math:`O(E C)` for each step and part.
    """
    found = torch.empty_like(evidence)
    shares, rows = walk.there.values(), walk.there.crow_indices().diff()
    squares = torch.segment_reduce(shares.square(), "sum", lengths=rows, initial=0)
    strength = STRENGTH * squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()[:, None]
    for number in range(int(part.max()) + 1):
        here = part == number
        without = (OWN * evidence).masked_fill(here[:, None], 0)
        labels = without.softmax(-1)
        for _ in range(NUM_STEPS):
            pull = strength * walk.step(labels)
            labels = (labels + (without + pull).softmax(-1)) / 2
        found[here] = (strength * walk.step(labels))[here].softmax(-1)
    return found
