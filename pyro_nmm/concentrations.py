# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations ``alpha``: a table, or a formula over ordered labels."""

from numbers import Integral
from typing import Any

import torch
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm import backend
from pyro_nmm.arguments import as_expected, as_tensor
from pyro_nmm.blocks import blocks
from pyro_nmm.provenance import untracked

#: Nodes whose labels are written out at once, and labels that are summed at once.
STRIP, CHUNK = 4096, 16


class OrdinalConcentrations:
    r"""Of ordered labels: :math:`\alpha_{ik} = s_i \, g(k; u_i, \sigma_i) + \epsilon`."""

    def __init__(
        self, mean: Tensor, width: Tensor | float, scale: Tensor | float = 1.0,
        num_classes: int = 256, floor: float = 1e-5,
    ) -> None:  # fmt: skip
        mean = in_single(as_expected("mean", mean, ("...", "N"), kind="float"))
        whole = isinstance(num_classes, Integral)
        if not whole or num_classes < 2 or not floor > 0:
            got = f"{num_classes} and {floor}"
            raise ValueError(f"num_classes must be at least 2 and floor positive, got {got}")
        self.mean, self.num_classes, self.floor = mean, num_classes, floor
        # Tensor.to(), unlike as_tensor(), keeps the provenance of a sampled width.
        pair = (t if isinstance(t, Tensor) else mean.new_tensor(t) for t in (width, scale))
        self.width, self.scale = (t.to(mean.device, mean.dtype) for t in pair)
        for name, value in (("width", self.width), ("scale", self.scale)):
            sizes = zip(reversed(value.shape), reversed(mean.shape), strict=False)
            if value.dim() > mean.dim() or any(size not in (1, full) for size, full in sizes):
                shapes = f"{tuple(mean.shape)}, got {tuple(value.shape)}"
                raise ValueError(f"{name} must broadcast to mean's shape {shapes}")

    @property
    def shape(self) -> Size:
        """``(..., N, C)``, as of a table."""
        return Size((*self.mean.shape, self.num_classes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, floor={self.floor})"

    def at(self, nodes: Tensor, labels: Tensor) -> Tensor:
        """``(..., E)``: values of nodes ``(..., E)`` at labels ``(..., E)``."""
        mean, width, scale = self._of(nodes)
        labels = as_tensor("labels", labels, mean.device)
        return scale * self._peak(labels, mean, width) + self.floor

    def take(self, nodes: Tensor) -> "OrdinalConcentrations":
        """Concentrations of nodes ``(n,)`` alone."""
        return self._like(*self._of(nodes))

    def detach(self) -> "OrdinalConcentrations":
        """The same concentrations without gradients."""
        return self._like(*(t.detach() for t in (self.mean, self.width, self.scale)))

    def _like(self, mean: Tensor, width: Tensor, scale: Tensor) -> "OrdinalConcentrations":
        return type(self)(mean, width, scale, self.num_classes, self.floor)

    def _peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        """:math:`g`, which broadcasts."""
        raise NotImplementedError

    def totals(self) -> Tensor:
        """``(..., N)``: :math:`A_i`."""
        raise NotImplementedError

    @torch.no_grad()
    def draw(self, nodes: Tensor) -> Tensor:
        """``(..., n)``: independent labels of nodes ``(..., n)``. Cost: :math:`O(n C)` time."""
        nodes = as_tensor("nodes", nodes, self.mean.device)
        shape = torch.broadcast_shapes(nodes.shape, (*self.mean.shape[:-1], nodes.shape[-1]))
        parts = (t.expand(shape).flatten().split(STRIP) for t in self._of(nodes))
        strips = (self._like(*strip) for strip in zip(*parts, strict=True))
        return torch.cat([strip.table().multinomial(1) for strip in strips]).view(shape)

    def table(self) -> Tensor:
        """``(..., N, C)``: the concentrations written out."""
        labels = torch.arange(self.num_classes, device=self.mean.device)
        width, scale = (t.expand(self.mean.shape)[..., None] for t in (self.width, self.scale))
        return scale * self._peak(labels, self.mean[..., None], width) + self.floor

    def _of(self, nodes: Tensor) -> list[Tensor]:
        nodes = as_tensor("nodes", nodes, self.mean.device)
        varying = (t.dim() > 0 and t.shape[-1] > 1 for t in (self.width, self.scale))
        parameters = zip((self.mean, self.width, self.scale), (True, *varying), strict=True)
        return [gather(t, nodes) if varies else t for t, varies in parameters]


@extract_provenance.register(OrdinalConcentrations)
def _extract_provenance(alpha: OrdinalConcentrations) -> tuple[OrdinalConcentrations, frozenset]:
    plain: Any
    plain, provenance = extract_provenance((alpha.mean, alpha.width, alpha.scale))
    return alpha._like(*plain), provenance


class GaussianConcentrations(OrdinalConcentrations):
    r"""Concentrations ``(..., N, C)`` for ordered labels such as grey levels, highest around a
    mean, as in the paper's appendix C. Near the ends the mean label is not :math:`u`.

    .. math::

        \alpha_{ik} = s_i \exp\left(-\frac{(k - u_i)^2}{\sigma_i^2}\right) + \epsilon,
        \qquad k = 0, \dots, C - 1

    >>> alpha = GaussianConcentrations(torch.tensor([3.0, 200.0]), width=10.0)
    >>> alpha.shape
    torch.Size([2, 256])
    >>> alpha.totals()
    tensor([12.2296, 17.7271])

    Cost: :math:`O(N C)` time for the sums, :math:`O(N)` memory, also with gradients.

    :param Tensor mean: ``(..., N)``, :math:`u`, in units of labels.
    :param width: :math:`\sigma`, positive: a number or a tensor that broadcasts to ``mean``.
    :param scale: :math:`s`, as ``width``. About :math:`s_i \sigma_i \sqrt\pi` labels of neighbours
        weigh as much as the mean.
    :param int num_classes: ``C``.
    :param float floor: :math:`\epsilon`, keeps labels far from all means possible.
    """

    def _peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        return (-((labels - mean) / width).square()).exp()

    def totals(self) -> Tensor:
        (mean, width), provenance = untracked(self.mean, self.width)
        bumps = track_provenance(_Total.apply(mean, width, self.num_classes), provenance)
        return self.scale * bumps + self.floor * self.num_classes


class _Total(torch.autograd.Function):
    r"""The sum of :math:`f_k = e^{-(k-u)^2 / \sigma^2}`, and the moments that gradients need."""

    @staticmethod
    def forward(ctx, mean: Tensor, width: Tensor, num_classes: int) -> Tensor:
        widths = width.expand(mean.shape)
        if loops := backend.loops_on(mean.device):
            totals = loops.gaussian_sums(mean, widths, num_classes)
        else:
            totals = [torch.zeros_like(mean)] * 3
            for labels in torch.arange(num_classes, device=mean.device).split(CHUNK):
                gap = labels - mean[..., None]
                bumps = (-(gap / widths[..., None]).square()).exp()
                parts = bumps, gap * bumps, gap.square() * bumps
                totals = [total + part.sum(-1) for total, part in zip(totals, parts, strict=True)]
        ctx.save_for_backward(*totals[1:], width)
        return totals[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        first, second, width = ctx.saved_tensors
        to_mean = upstream * 2 * first / width.square()
        to_width = upstream * 2 * second / width.pow(3)
        return to_mean, to_width.sum_to_size(width.shape), None


class LogisticConcentrations(OrdinalConcentrations):
    r"""Concentrations ``(..., N, C)`` for ordered labels: the mass of a logistic distribution on
    each label's unit, as in PixelCNN++ (Salimans et al., 2017),

    .. math::

        \alpha_{ik} = s_i \left[ F\left(\frac{k + \frac12 - u_i}{\sigma_i}\right)
            - F\left(\frac{k - \frac12 - u_i}{\sigma_i}\right) \right] + \epsilon, \qquad
        F(x) = \frac{1}{1 + e^{-x}},

    where the first term is one for ``k = C - 1`` and the second zero for ``k = 0``. Parameters as
    for :class:`GaussianConcentrations`, but :math:`s_i` labels of neighbours weigh as much as the
    mean, and log concentrations fall linearly far from it. Cost: :math:`O(N)`.

    >>> alpha = LogisticConcentrations(torch.tensor([3.0, 200.0]), width=5.0, scale=20.0)
    >>> alpha.at(torch.tensor([0, 1]), torch.tensor([0, 200]))
    tensor([7.5508, 0.9992])
    """

    def _peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        gap, top = labels - mean, self.num_classes - 1
        # F(a) - F(b) = F(a) F(-b) (1 - exp(b - a)): no digits are lost.
        inner = ((0.5 + gap) / width).sigmoid() * ((0.5 - gap) / width).sigmoid()
        inner = inner * -torch.expm1(-1 / width)
        first, last = ((0.5 - mean) / width).sigmoid(), ((mean - top + 0.5) / width).sigmoid()
        return torch.where(labels == top, last, torch.where(labels == 0, first, inner))

    def totals(self) -> Tensor:
        return (self.scale + self.floor * self.num_classes).expand(self.mean.shape)


#: A table ``(..., N, C)``, or a formula.
Concentrations = Tensor | OrdinalConcentrations


def in_single(parameter: Tensor) -> Tensor:
    """A tensor of half precision in single precision: ``bfloat16`` loses counts beyond 256."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def written_out(alpha: Concentrations) -> Tensor:
    """``(..., N, C)``: a table of concentrations."""
    return alpha.table() if isinstance(alpha, OrdinalConcentrations) else alpha


def at_labels(alpha: Concentrations, nodes: Tensor, labels: Tensor) -> Tensor:
    """``(..., E)``: values of nodes ``(..., E)`` at labels ``(..., E)``."""
    if isinstance(alpha, OrdinalConcentrations):
        return alpha.at(nodes, labels)
    return gather(alpha.flatten(-2), torch.add(labels, nodes, alpha=alpha.shape[-1]))


def chosen_rows(alpha: Concentrations, nodes: Tensor) -> Concentrations:
    """Concentrations of nodes ``(n,)`` alone."""
    if isinstance(alpha, OrdinalConcentrations):
        return alpha.take(nodes)
    return alpha.index_select(-2, nodes)


def draw_labels(alpha: Concentrations, nodes: Tensor) -> Tensor:
    """See :meth:`OrdinalConcentrations.draw`; a table has no batch dimensions."""
    if isinstance(alpha, OrdinalConcentrations):
        return alpha.draw(nodes)
    flat = nodes.flatten()
    labels = torch.empty_like(flat)
    for part in blocks(len(flat), alpha.shape[-1]):
        labels[part] = alpha.index_select(0, flat[part]).multinomial(1)[:, 0]
    return labels.view_as(nodes)


def totals(alpha: Concentrations) -> Tensor:
    """``(..., N)``: :math:`A_i`."""
    return alpha.totals() if isinstance(alpha, OrdinalConcentrations) else alpha.sum(-1)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """``(..., E)``: values ``(..., K)`` at ``(..., E)``, batch by batch."""
    if index.dim() == 1:
        return values.index_select(-1, index)
    if values.dim() == 1:
        return values.index_select(0, index.flatten()).view_as(index)
    batch = torch.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    return values.expand(*batch, -1).gather(-1, index.expand(*batch, -1))
