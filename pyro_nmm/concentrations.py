# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations of many ordered labels, given by a mean instead of a table."""

from __future__ import annotations

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm import backend
from pyro_nmm.tracking import untracked

#: Labels that are summed at once, and nodes whose labels are written out at once.
CHUNK, STRIP = 16, 4096


class GaussianConcentrations:
    r"""
    Concentrations :math:`\alpha` for ordered labels such as grey levels, highest around a mean:

    .. math::

        \alpha_{ik} = s_i \exp\left(-\frac{(k - u_i)^2}{\sigma_i^2}\right) + \epsilon,
        \qquad k = 0, \dots, C - 1

    as in the paper's appendix C; the floor :math:`\epsilon` is ours, without which a label far from
    all means would have probability zero in floating point. It stands wherever
    :class:`~pyro_nmm.OrderedConditional` takes ``alpha``: the bound needs concentrations at
    observed labels and their sums over all labels alone, so no table ``(N, C)`` is made.

    >>> alpha = GaussianConcentrations(torch.tensor([3.0, 200.0]), width=10.0)
    >>> alpha.shape
    torch.Size([2, 256])
    >>> alpha.expected()  # at 3, labels below 0 are missing
    tensor([  6.6454, 199.9895])

    Cost: :math:`O(N C)` time for the sums, :math:`O(N)` memory, also with gradients. Compiled
    loops skip labels far from the mean.

    :param Tensor mean: ``(..., N)``, :math:`u`, in units of labels; any real number.
    :param width: :math:`\sigma`, positive: a number or a tensor that broadcasts to ``mean``.
    :param scale: :math:`s`, positive, as ``width``. With :math:`\sigma` it makes
        :math:`A_i \approx s_i \sigma_i \sqrt\pi`, how many labels of neighbours outweigh the mean.
    :param int num_classes: ``C``.
    :param float floor: :math:`\epsilon`, positive.
    """

    def __init__(
        self,
        mean: Tensor,
        width: Tensor | float,
        scale: Tensor | float = 1.0,
        num_classes: int = 256,
        floor: float = 1e-5,
    ) -> None:
        if not isinstance(mean, Tensor) or not mean.is_floating_point() or mean.dim() < 1:
            got = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean)
            raise ValueError(f"mean must be a floating-point tensor of shape (..., N), got {got}")
        if num_classes < 2 or not floor > 0:
            raise ValueError(
                f"num_classes must be at least 2 and floor positive, got {num_classes} and {floor}"
            )
        self.mean, self.num_classes, self.floor = mean, num_classes, floor
        self.width, self.scale = (
            torch.as_tensor(t, dtype=mean.dtype, device=mean.device) for t in (width, scale)
        )
        for name, value in (("width", self.width), ("scale", self.scale)):
            sizes = zip(reversed(value.shape), reversed(mean.shape), strict=False)
            if value.dim() > mean.dim() or any(size not in (1, full) for size, full in sizes):
                raise ValueError(
                    f"{name} must broadcast to mean's shape {tuple(mean.shape)}, got "
                    f"{tuple(value.shape)}"
                )

    @property
    def shape(self) -> Size:
        """``(..., N, C)``, as of a table."""
        return Size((*self.mean.shape, self.num_classes))

    def at(self, nodes: Tensor, labels: Tensor) -> Tensor:
        """``(..., E)``: of nodes ``(..., E)`` at labels ``(..., E)``."""
        mean, width, scale = self._of(nodes)
        return scale * (-((labels - mean) / width).square()).exp() + self.floor

    def take(self, nodes: Tensor) -> GaussianConcentrations:
        """Those of nodes ``(n,)`` alone."""
        mean, width, scale = self._of(nodes)
        return GaussianConcentrations(mean, width, scale, self.num_classes, self.floor)

    def totals(self) -> Tensor:
        """``(..., N)``: :math:`A_i`."""
        (mean, width), provenance = untracked(self.mean, self.width)
        bumps = track_provenance(_Total.apply(mean, width, self.num_classes), provenance)
        return self.scale * bumps + self.floor * self.num_classes

    @torch.no_grad()
    def expected(self) -> Tensor:
        r"""``(..., N)``: the mean label under :math:`\alpha_i / A_i`. Without gradient."""
        (mean, width), _ = untracked(self.mean, self.width)
        bumps, first, _ = _sums(mean, width, self.num_classes)
        rest = self.floor * self.num_classes
        total = self.scale * bumps + rest
        above = self.scale * (first + self.mean * bumps) + rest * (self.num_classes - 1) / 2
        return above / total

    @torch.no_grad()
    def draw(self, nodes: Tensor) -> Tensor:
        r"""
        ``(..., n)``: one label of each of nodes ``(..., n)``, independent, with probabilities
        :math:`\alpha_{ik} / A_i`. Cost: :math:`O(n C)` time, :math:`O(n)` memory.
        """
        shape = torch.broadcast_shapes(nodes.shape, (*self.mean.shape[:-1], nodes.shape[-1]))
        strips = zip(
            *(t.expand(shape).flatten().split(STRIP) for t in self._of(nodes)), strict=True
        )
        drawn = []
        for mean, width, scale in strips:
            strip = GaussianConcentrations(mean, width, scale, self.num_classes, self.floor)
            drawn.append(strip.table().multinomial(1))
        return torch.cat(drawn).view(shape)

    def table(self) -> Tensor:
        """``(..., N, C)``: written out."""
        labels = torch.arange(self.num_classes, device=self.mean.device)
        width, scale = (t.expand(self.mean.shape)[..., None] for t in (self.width, self.scale))
        return scale * (-((labels - self.mean[..., None]) / width).square()).exp() + self.floor

    def _of(self, nodes: Tensor) -> list[Tensor]:
        # A number for all nodes stays one.
        varying = (t.dim() > 0 and t.shape[-1] > 1 for t in (self.width, self.scale))
        parameters = zip((self.mean, self.width, self.scale), (True, *varying), strict=True)
        return [gather(t, nodes) if varies else t for t, varies in parameters]


#: What stands for alpha.
Concentrations = Tensor | GaussianConcentrations


def written_out(alpha: Concentrations) -> Tensor:
    """``(..., N, C)``."""
    return alpha.table() if isinstance(alpha, GaussianConcentrations) else alpha


def at_labels(alpha: Concentrations, nodes: Tensor, labels: Tensor) -> Tensor:
    """``(..., E)``: of nodes ``(..., E)`` at labels ``(..., E)``."""
    if isinstance(alpha, GaussianConcentrations):
        return alpha.at(nodes, labels)
    return gather(alpha.flatten(-2), nodes * alpha.shape[-1] + labels)


def totals(alpha: Concentrations) -> Tensor:
    """``(..., N)``: :math:`A_i`."""
    return alpha.totals() if isinstance(alpha, GaussianConcentrations) else alpha.sum(-1)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """``(..., E)``: of values ``(..., K)`` those at ``(..., E)``, batch by batch."""
    if index.dim() == 1:
        return values.index_select(-1, index)
    if values.dim() == 1:
        return values.index_select(0, index.flatten()).view_as(index)
    batch = torch.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    return values.expand(*batch, -1).gather(-1, index.expand(*batch, -1))


@torch.no_grad()
def _sums(mean: Tensor, width: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Of :math:`f_k = \exp(-(k - u)^2 / \sigma^2)`, of :math:`(k - u) f_k` and of its square's."""
    if backend.compiled is not None and mean.device.type == "cpu":
        return backend.compiled.gaussian_sums(mean, width.expand(mean.shape), num_classes)
    zero = torch.zeros_like(mean)
    totals = [zero, zero, zero]
    for labels in torch.arange(num_classes, device=mean.device).split(CHUNK):
        gap = labels - mean[..., None]
        bumps = (-(gap / width.expand(mean.shape)[..., None]).square()).exp()
        parts = bumps, gap * bumps, gap.square() * bumps
        totals = [total + part.sum(-1) for total, part in zip(totals, parts, strict=True)]
    return totals[0], totals[1], totals[2]


class _Total(torch.autograd.Function):
    """The sum over all labels; what its gradient needs is summed along with it."""

    @staticmethod
    def forward(ctx, mean: Tensor, width: Tensor, num_classes: int) -> Tensor:
        total, first, second = _sums(mean, width, num_classes)
        ctx.save_for_backward(first, second, width)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        first, second, width = ctx.saved_tensors
        to_mean = upstream * 2 * first / width.square()
        to_width = upstream * 2 * second / width.pow(3)
        return to_mean, to_width.sum_to_size(width.shape), None
