# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import math
from typing import Any

import torch
from torch import Tensor

from pyro_nmm.models.latent.field import HiddenField
from pyro_nmm.ops.evidence import LatentTerms
from pyro_nmm.ops.gibbs import left_out, sweep
from pyro_nmm.validation import check_integers


@torch.no_grad()
def leave_one_out(field: HiddenField, data: Any, num_sweeps: int = 20) -> Tensor:
    r"""
    ``(N,)``: :math:`\log p(w_i \mid w_{-i})` in nats, what is observed of a node predicted
    from what is observed of all others, at the fitted numbers of the prior.

    :attr:`HiddenField.score` predicts it from the labels of the others, which have seen it too;
    the more freely they may follow it, the better that looks. Here chains of labels given all are
    weighted so that they have not seen it [1],

    .. math::

        \frac1{p(w_i \mid w_{-i})} = \mathrm{E} \Bigl[
            \frac1{p(w_i \mid c_{-i}, u_{-i}, \theta)} \Bigm| w \Bigr] .

    Its mean compares sources and emissions on the same data.

    >>> from pyro_nmm import sources
    >>> from pyro_nmm.models import NormalEmission, fit_field
    >>> truth = (torch.arange(256) % 16 >= 8).long()
    >>> x = 2.0 * truth[:, None] + torch.randn(256, 1)
    >>> found = {}
    >>> for stride in (1, 4):  # every pixel a source, or one in sixteen
    ...     hood = sources.grid(16, 16, stride)
    ...     field = fit_field(NormalEmission(2), hood, x, num_starts=2)
    ...     found[stride] = leave_one_out(field, x).mean().item()
    >>> found[4] > found[1]
    True

    [1] A. E. Gelfand, D. K. Dey, H. Chang (1992) "Model Determination Using Predictive
    Distributions with Implementation via Sampling-Based Methods", Bayesian Statistics 4.

    :param HiddenField field: as fitted.
    :param data: what it was fitted to.
    :param int num_sweeps: of every chain, from where it stands.
    :return: ``(N,)``. Cost: :math:`O(E C)` a sweep and chain.
    """
    check_integers(1, num_sweeps=num_sweeps)
    hood, data = field.hood, field.emission.check(field.hood, data)
    alpha, logits = field.prior(hood, field.edge_attr)
    attention, draw, found = hood.log_softmax(logits)[None], field.chains.draw, []
    # Parameters of its own for every chain, drawn anew as the labels are: those that are fitted
    # have seen w_i too.
    size = len(draw.labels)
    drawn = {name: value[-size:] for name, value in field.draws.items()}
    values = [{name: value[chain] for name, value in drawn.items()} for chain in range(size)]
    for _ in range(num_sweeps):
        pairs = zip(draw.labels, values, strict=True)
        values = [field.emission.draw(data, labels, old) for labels, old in pairs]
        evidence = torch.stack([field.emission.log_prob(own, data) for own in values])
        terms = LatentTerms(attention, alpha[None], evidence)
        uniforms = torch.rand(1, *draw.edges.shape, dtype=torch.double, device=hood.device)
        draw = sweep(hood, terms, draw, uniforms).draw
        found.append(left_out(hood, terms, draw))
    logs = torch.cat(found)
    return math.log(len(logs)) - (-logs).logsumexp(0)
