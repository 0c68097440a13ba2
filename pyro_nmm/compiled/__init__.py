# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops (numba); `pyro_nmm.backend` says whether they run."""

from pyro_nmm.compiled.entries import anneal, credits, draw, evaluate, gradient, sweep
from pyro_nmm.compiled.loops import entropy_and_gradient, find, predict, ranks

__all__ = [
    "anneal", "credits", "draw", "entropy_and_gradient", "evaluate", "find", "gradient",
    "predict", "ranks", "sweep",
]  # fmt: skip
