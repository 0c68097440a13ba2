# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Work cut into blocks, so that temporaries have a size that no problem changes."""

from __future__ import annotations

from collections.abc import Iterator

#: Numbers that a temporary holds at most: 128 megabytes in double precision.
NUMBERS = 2**24


def blocks(size: int, numbers_each: int) -> Iterator[slice]:
    """
    Slices that cover ``0..size - 1``, of items that take ``numbers_each`` numbers each.

    >>> list(blocks(5, numbers_each=NUMBERS // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, NUMBERS // max(1, numbers_each))
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))
