# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops, whose machine code numba keeps on disk if it can."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba


def compiled(function: Callable) -> Callable:
    """A compiled loop, kept on disk or, with a warning, in this process alone."""
    compiler = functools.partial(numba.njit, nogil=True, error_model="numpy")
    try:
        loop = compiler(cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write
        _warn_once()
        return compiler()(function)
    if disk := getattr(loop, "_cache", None):  # there is none with NUMBA_DISABLE_JIT
        # Numba would let the loop's first caller fail, for example if the disk is full.
        disk._guard_against_spurious_io_errors = _guard
    return loop


@contextmanager
def _guard() -> Iterator[None]:
    try:
        yield
    except OSError:
        _warn_once()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"numba cannot keep compiled loops on disk ({sys.exception()}), so every process compiles "
        f"them anew: free space, or set NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
