# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Work cut into blocks, so that temporaries have a bounded size."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Numbers that a temporary holds at most: 128 megabytes in double precision.
NUMBERS = 2**24
#: Numbers that stay in a CPU's cache, where gathering is several times as fast.
IN_CACHE = 2**18


def blocks(size: int, numbers_each: int, cached: bool = False) -> Iterator[slice]:
    """Slices of ``range(size)``, whose items take so many numbers; ``cached`` for a CPU."""
    numbers = min(IN_CACHE, NUMBERS) if cached else NUMBERS
    step = max(1, numbers // max(1, numbers_each))
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))


def row_blocks(ptr: Tensor, numbers_each: int) -> Iterator[slice]:
    """Slices of whole rows, whose edges take ``numbers_each`` numbers each."""
    step, first, num_rows = max(1, NUMBERS // max(1, numbers_each)), 0, len(ptr) - 1
    while first < num_rows:
        last = int(torch.searchsorted(ptr, ptr[first] + step, right=True)) - 1
        last = min(max(last, first + 1), num_rows)
        yield slice(first, last)
        first = last
