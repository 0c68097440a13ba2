# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Convolutions from a Markov random field on a grid to an NMM."""

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import check_integers
from pyro_nmm.model_arguments import check_hood
from pyro_nmm.models.random_fields.pairwise import PairwiseMRF, check_field, coarseness, grid_edges


class ConvolutionalNMM(nn.Module):
    r"""Convolutional networks from a Markov random field on a grid to an NMM that approximates it:
    the paper's NMM-CNN, which amortises inference over many fields.

    .. math::

        \alpha = \exp \big( s(\mathrm{conv}_1(X)) \big), \qquad
        \text{logits}_{ij} = s(\mathrm{conv}_2(X)_{i, \, j - i}), \qquad
        s(x) = 6 \tanh(x / 6)

    each with a layer of ``channels`` filters of ``kernel x kernel``, ReLU and a layer of
    1 x 1. :math:`X`, ``(2 C + 5, height, width)``, holds for every pixel the unary terms, the
    strengths towards the right and below, logarithms of given marginals and, not in the paper, the
    groups of :func:`~pyro_nmm.models.coarse_to_fine`, in whose order the NMM is best fitted. The
    last layers start at zero, so that a :class:`MeanFieldCorrection` starts at the mean field.

    >>> from pyro_nmm.models import ising
    >>> field = ising(grid_edges(5, 6), coupling=0.4, field=torch.zeros(30))
    >>> alpha, logits = ConvolutionalNMM(radius=2)(Neighborhood.grid(5, 6, radius=2), field)
    >>> alpha.shape
    torch.Size([30, 2])

    :param int radius: of windows, as in ``Neighborhood.grid``. Cost: linear in pixels and filters.
    :raises ValueError: for an even ``kernel``; in a call for wider windows, and a field that has a
        batch, other labels, or edges other than :func:`grid_edges`.
    """

    def __init__(
        self, radius: int, num_classes: int = 2, *, channels: int = 128, kernel: int = 11
    ) -> None:
        super().__init__()
        check_integers(0, radius=radius)
        check_integers(1, channels=channels, kernel=kernel)
        check_integers(2, num_classes=num_classes)
        if kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that outputs stand on pixels, got {kernel}")
        self.radius, self.num_classes = radius, num_classes
        side = 2 * radius + 1

        def branch(width: int) -> nn.Sequential:
            first = nn.Conv2d(2 * num_classes + 5, channels, kernel, padding=kernel // 2)
            return nn.Sequential(first, nn.ReLU(), nn.Conv2d(channels, width, 1))

        self.labels, self.attention = branch(num_classes), branch(side * side)
        # Near pixels first: from even attention, large windows end up with a worse bound.
        step = torch.arange(-radius, radius + 1)
        distance = (step[:, None].square() + step.square()).flatten()
        for tensor in (*self.labels[-1].parameters(), *self.attention[-1].parameters()):
            nn.init.zeros_(tensor)
        self.attention[-1].bias.data.copy_(-0.5 * distance)  # type: ignore[operator, union-attr]

    def forward(
        self, hood: Neighborhood, field: PairwiseMRF, marginals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``alpha`` ``(N, C)`` and ``logits`` ``(num_edges,)`` of a field on the same grid.

        :param Tensor marginals: ``(N, C)``, of the field's mean field. Default even.
        """
        check_hood(hood)
        check_field(field)
        if (hood.num_nodes, hood.num_sources) != (field.num_nodes, field.num_nodes):
            raise ValueError(f"hood must have the {field.num_nodes} nodes of field, got {hood}")
        images, width = self._images(field, marginals)
        alpha = _bounded(self.labels(images)).exp()[0].flatten(1).T
        scores = _bounded(self.attention(images))[0].flatten(1)
        rows = hood.source // width - hood.target // width
        columns = hood.source % width - hood.target % width
        if max(rows.abs().max(), columns.abs().max()) > self.radius:
            raise ValueError(f"hood must have windows of radius {self.radius} at most")
        window = (rows + self.radius) * (2 * self.radius + 1) + columns + self.radius
        return alpha, scores[window, hood.target]

    def _images(self, field: PairwiseMRF, marginals: Tensor | None) -> tuple[Tensor, int]:
        edges = field.edges
        width = int((edges[1] - edges[0]).max()) if edges.numel() else 1
        height = field.num_nodes // width
        if width == 1 or not torch.equal(edges, grid_edges(height, width, edges.device)):
            raise ValueError("field must have the edges grid_edges(height, width), both at least 2")
        if field.num_classes != self.num_classes:
            raise ValueError(f"field must have {self.num_classes} labels, got {field.num_classes}")
        shape, across = (height, width), height * (width - 1)
        given = torch.ones_like(field.unary) if marginals is None else marginals
        terms = torch.stack([field.unary, (given + 0.001).log()])  # the log ends at -7
        terms = terms - terms.mean(-1, keepdim=True)
        unary, log_marginals = terms.mT.reshape(2, -1, *shape)
        strength, towards = field.strength.expand(edges.shape[1]), unary.new_zeros(2, *shape)
        towards[0, :, :-1] = strength[:across].view(height, width - 1)
        towards[1, :-1] = strength[across:].view(height - 1, width)
        groups = nn.functional.one_hot(coarseness(*shape, edges.device), 3)
        groups = groups.T.reshape(3, *shape).to(unary)
        return torch.cat([unary, log_marginals, towards, groups])[None], width


def _bounded(x: Tensor) -> Tensor:
    """Nearly the identity, between -6 and 6, against outliers among the fields."""
    return 6 * (x / 6).tanh()
