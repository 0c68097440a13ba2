# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from pyro import poutine
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_nmm.datasets.links import LinkSplit
from pyro_nmm.guides.dglfrm import DGLFRMGuide
from pyro_nmm.guides.fitting.loop import check_loss
from pyro_nmm.validation import check_integers, check_positive


def fit_links(
    pair: DGLFRMGuide,
    split: LinkSplit,
    x: Tensor,
    *,
    num_steps: int = 500,
    lr: float = 0.01,
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[float]:
    r"""
    Fits a latent feature model and its guide to the training edges of a split, as Mehta, Carin and
    Rai (2019) do: Adam at a constant rate, the last iterate. No step looks at held-out pairs.

    .. math::

        \min_\theta \; -\frac{1}{N^2} E_q \left[ \log \frac{p(v, b, r, A, X)}{q(v, b, r)} \right]

    >>> import torch
    >>> from torch_geometric.datasets import KarateClub
    >>> from pyro_nmm.datasets.links import link_split
    >>> from pyro_nmm.models import DGLFRM
    >>> data = KarateClub()[0]
    >>> split = link_split(data.edge_index, 34, seed=0)
    >>> pair = DGLFRMGuide(DGLFRM(34, 8, concentration=4.0), data.num_features)
    >>> losses = fit_links(pair, split, data.x, num_steps=20)
    >>> pair.link_logits(split.test, split.train, data.x).shape == (split.test.shape[1],)
    True

    :param DGLFRMGuide pair: model and guide.
    :param LinkSplit split: see :func:`~pyro_nmm.datasets.links.link_split`.
    :param Tensor x: ``(N, F)``, see :meth:`DGLFRMGuide.guide`.
    :param float lr: Adam's, positive.
    :param progress: wraps the steps' numbers, for example ``tqdm``.
    :return: every step's loss, the negative bound in nats a pair of nodes, as noisy as one draw.
    :raises ValueError: for numbers that cannot be, ``x`` of another shape, and a loss that is not
        finite.
    """
    check_integers(1, num_steps=num_steps)
    check_positive(lr=lr)
    if not isinstance(x, Tensor) or x.is_meta:
        got = "meta tensor" if isinstance(x, Tensor) else type(x)
        raise ValueError(f"x must be a tensor with values, got {got}")
    if x.dim() != 2 or len(x) != pair.target.num_nodes:
        raise ValueError(
            f"x must have shape ({pair.target.num_nodes}, F), one row per node, got "
            f"{tuple(x.shape)}"
        )
    pair.train()
    # Adam's own constant is meant for losses of order one.
    model, guide = (poutine.scale(f, 1 / len(x) ** 2) for f in (pair.model, pair.guide))
    optimizer, held_out = PyroOptim(torch.optim.Adam, {"lr": lr}), split.held_out
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    losses: list[float] = []
    for step in progress(range(num_steps)):
        losses.append(svi.step(split.train, x, held_out))
        check_loss(losses[-1], f"step {step}")
    return losses
