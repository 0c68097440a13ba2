# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Multinomial draws over the edges of rows, with a cost that does not depend on the counts."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood


class Level(NamedTuple):
    """Blocks of neighbouring edges of rows, and the blocks of twice the size that contain them."""

    first: Tensor  #: the first half of each larger block, which is never empty
    second: Tensor  #: its second half, of the larger blocks that have one
    whole: Tensor  #: the larger blocks of ``second``

    def sums(self, values: Tensor) -> Tensor:
        """``(..., larger, C)`` sums of ``(..., blocks, C)``."""
        found = values.index_select(-2, self.first)
        whole = found.index_select(-2, self.whole) + values.index_select(-2, self.second)
        return found.index_copy_(-2, self.whole, whole)


def levels(rows: Neighborhood) -> list[Level]:
    r"""Halves of halves of the edges of every row, edges first. Cost: :math:`O(E)`."""
    found, sizes = [], rows.ptr.diff()
    while int(sizes.max()) > 1:
        larger = (sizes + 1) // 2
        row = torch.repeat_interleave(larger)
        place = torch.arange(len(row), device=row.device) - (larger.cumsum(0) - larger)[row]
        first = (sizes.cumsum(0) - sizes)[row] + 2 * place
        whole = (2 * place + 1 < sizes[row]).nonzero()[:, 0]
        found.append(Level(first, first[whole] + 1, whole))
        sizes = larger
    return found


def split(halves: list[Level], counts: Tensor, weights: Tensor) -> Tensor:
    r"""Draw multinomial counts over the edges of each row, for each label.

    .. math::

        (m_{ijk})_j \sim \mathrm{Multinomial}(n_{ik}, w_{ijk} / \textstyle\sum_j w_{ijk})

    A block's count is divided among its halves by a binomial draw, from whole rows to edges.

    :param Tensor counts: ``(B, num_rows, C)`` of whole numbers in floating point.
    :param Tensor weights: ``(B, num_edges, C)``, positive at an edge of a row with a count.
    :return: ``(B, num_edges, C)``. Cost: :math:`O(B E C)`, in :math:`O(\log \max_i |n(i)|)` calls.
    """
    sums = [weights]
    for level in halves:
        sums.append(level.sums(sums[-1]))
    for level, parts, whole in zip(halves[::-1], sums[-2::-1], sums[:0:-1], strict=True):
        share = parts.index_select(-2, level.second) / whole.index_select(-2, level.whole)
        number = counts.index_select(-2, level.whole)
        second = torch.binomial(number, share.nan_to_num().clamp(0, 1))  # no weight, no count
        new = counts.new_empty(*counts.shape[:-2], parts.shape[-2], counts.shape[-1])
        counts = counts.index_copy(-2, level.whole, number - second)
        counts = new.index_copy_(-2, level.first, counts).index_copy_(-2, level.second, second)
    return counts
