# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Exact sums over all choices of a small set of nodes, the paper's equation (3)."""

import math

import torch
from torch import Size, Tensor

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.relabel import Channel, log_entries

#: Largest number of joint choices that is enumerated.
MAX_CHOICES = 2**20
#: Largest table of numbers that is built, one gigabyte in double precision.
_MAX_NUMBERS = 2**27


def enumerate_choices(rows: Neighborhood) -> Tensor:
    """``(M, num_rows)``: all joint choices of the rows' nodes, as edges; last row fastest."""
    size = check_size(rows)
    edges = [torch.arange(a, b, device=rows.device) for a, b in rows.ptr.unfold(0, 2, 1).tolist()]
    return torch.cartesian_prod(*edges).view(size, rows.num_rows)


def check_size(rows: Neighborhood, numbers_each: int = 1) -> int:
    """The number of joint choices; an error if so many terms of ``numbers_each`` do not fit."""
    size = math.prod(rows.ptr.diff().tolist())
    if size > MAX_CHOICES or size * numbers_each > _MAX_NUMBERS:
        number, each = (
            str(value) if value < 10**9 else f"about 10^{math.log10(value):.0f}"
            for value in (size, numbers_each)
        )
        unit = f" of {each} numbers" if numbers_each > 1 else ""
        raise ValueError(
            f"exact enumeration over {rows.num_rows} nodes would need {number} choices{unit}, more "
            f"than {MAX_CHOICES} choices or {_MAX_NUMBERS} numbers: use log_likelihood or elbo, or "
            f"condition with num_samples"
        )
    return size


def log_joint(
    rows: Neighborhood, alpha: Tensor, logits: Tensor, labels: Tensor, edges: Tensor
) -> Tensor:
    r"""``(..., Q, M)``: :math:`\log p(y, c)` of labellings ``(Q, num_rows)`` with chosen edges
    ``(M, num_rows)``, the paper's equation (4). ``logits`` are in the order of ``rows``.
    """
    log_prob = rows.log_softmax(logits)[..., edges].sum(-1).unsqueeze(-2)
    total, choice = alpha.sum(-1), rows.source[edges]
    for i in range(rows.num_rows):
        shared = choice[:, :i] == choice[:, i : i + 1]
        equal = labels[:, :i] == labels[:, i : i + 1]
        same = (shared.to(alpha.dtype) @ equal.to(alpha.dtype).T).T
        label, j = labels[:, i, None], choice[:, i]
        log_prob = log_prob + (alpha[..., j, label] + same).log()
        log_prob = log_prob - (total[..., j] + shared.sum(-1)).log().unsqueeze(-2)
    return log_prob


def log_marginal(
    rows: Neighborhood, alpha: Tensor, logits: Tensor, labels: Tensor, channel: Channel
) -> Tensor:
    r"""``(..., Q)``: :math:`\log p(y_\tau)` of labellings ``(Q, num_rows)``."""
    if not channel.keeps:
        return _log_shown(rows, alpha, logits, labels, channel.relabel)
    edges = enumerate_choices(rows)
    some = max(1, 4 * MAX_CHOICES // (len(edges) * max(1, alpha[..., 0, 0].numel())))
    joints = (log_joint(rows, alpha, logits, part, edges) for part in labels.split(some))
    return torch.cat([joint.logsumexp(-1) for joint in joints], -1)


def _log_shown(rows, alpha, logits, labels, matrices):
    """:func:`log_marginal` with a sum over the borrowed labels, too."""
    size = alpha.shape[-1]
    check_size(rows, size**rows.num_rows * rows.num_rows * max(1, alpha[..., 0, 0].numel()))
    edges = enumerate_choices(rows)
    borrowed = enumerate_labels(rows.num_rows, size, rows.device)
    joint = log_joint(rows, alpha, logits, borrowed, edges)
    log_matrices, places = log_entries(matrices), (edges[None], borrowed[:, None])
    terms = [joint + log_matrices[..., *places, shown].sum(-1) for shown in labels]
    return torch.stack([term.flatten(-2).logsumexp(-1) for term in terms], -1)


def log_marginals(
    rows: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    labels: Tensor,
    batch_shape: Size,
    channel: Channel,
) -> Tensor:
    """:func:`log_marginal` of labels ``(..., num_rows)`` and parameters of a batch shape."""
    shape = torch.broadcast_shapes(labels.shape[:-1], batch_shape)
    if not shape.numel():  # no labels, no gradient
        return (alpha.sum() + logits.sum()).expand(shape)
    batch = shape[len(shape) - len(batch_shape) :]
    alpha = alpha.expand(*batch, -1, -1).reshape(-1, *alpha.shape[-2:])
    logits = logits.expand(*batch, -1).reshape(-1, logits.shape[-1])
    labels = labels.expand(*shape, -1).reshape(-1, len(alpha), rows.num_rows)
    columns = alpha, logits, labels.unbind(1), channel.split(batch)
    columns_log_prob = [log_marginal(rows, *column) for column in zip(*columns, strict=True)]
    return torch.stack(columns_log_prob, 1).view(shape)


def enumerate_labels(
    num_nodes: int, num_classes: int, device: torch.device | None = None
) -> Tensor:
    """``(C ** num_nodes, num_nodes)``: all labellings, last node fastest."""
    label = torch.arange(num_classes, device=device)
    if not num_nodes:
        return label.new_zeros(1, 0)
    return torch.cartesian_prod(*[label] * num_nodes).view(-1, num_nodes)
