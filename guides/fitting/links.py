# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a latent feature model of links."""

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor

from pyro_nmm.arguments import as_tensor, expect
from pyro_nmm.datasets.links import LinkSplit
from pyro_nmm.fitting import Steps, with_gradients, with_options
from pyro_nmm.guides.dglfrm import DGLFRMGuide


@with_options
@with_gradients
def fit_links(
    pair: DGLFRMGuide, split: LinkSplit, x: Tensor, *,
    options: Steps = Steps(num_steps=500, lr=0.01),
) -> list[float]:  # fmt: skip
    r"""
    Fit a latent feature model and its guide to the training edges of a split by Adam at a constant
    rate, as Mehta, Carin and Rai (2019).

    .. math::

        \min_\theta \; -\frac{1}{N^2} E_q \left[ \log \frac{p(v, b, r, A, X)}{q(v, b, r)} \right]

    >>> from torch_geometric.datasets import KarateClub
    >>> from pyro_nmm.datasets import link_split
    >>> from pyro_nmm.models import DGLFRM
    >>> data = KarateClub()[0]
    >>> split = link_split(data.edge_index, 34, seed=0)
    >>> pair = DGLFRMGuide(DGLFRM(34, 8, concentration=4.0), data.num_features)
    >>> losses = fit_links(pair, split, data.x, num_steps=20)

    :param LinkSplit split: see :func:`~pyro_nmm.datasets.link_split`.
    :param Tensor x: ``(N, F)``, see :meth:`DGLFRMGuide.guide`.
    :param options: keywords of :class:`~pyro_nmm.guides.fitting.Steps`.
    :return: every step's loss, the negative bound in nats a pair of nodes, as noisy as one draw.
        A step costs :math:`O(N^2)`.
    """
    x = expect("x", as_tensor("x", x), (pair.target.num_nodes, "F"), note="one row per node")
    x = x.to(pair.encoder.log_sticks.dtype)  # once, and not in every step
    if x.is_meta:
        raise ValueError("x must be a tensor with values, got a meta tensor")
    # Adam's own constant is meant for losses of order one.
    model, guide = (poutine.scale(f, 1 / len(x) ** 2) for f in (pair.model, pair.guide))
    optimizer, elbo = torch.optim.Adam(pair.parameters(), options.lr), TraceMeanField_ELBO()

    def backward(step: int) -> float:
        return elbo.loss_and_grads(model, guide, split.train, x, split.held_out)

    with pyro.get_param_store().scope():
        return options.train(pair, optimizer, backward, x=x, **split._asdict())
