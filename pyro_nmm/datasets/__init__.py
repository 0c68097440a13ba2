# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs and links for the examples and the benchmarks, and their splits."""

from pyro_nmm.datasets.batches import seed_batch
from pyro_nmm.datasets.images import letters
from pyro_nmm.datasets.links import LinkSplit, link_split
from pyro_nmm.datasets.nodes import digits, inner_edges, planetoid, random_split, select_split

__all__ = [
    "LinkSplit", "digits", "inner_edges", "letters", "link_split", "planetoid", "random_split",
    "seed_batch", "select_split",
]  # fmt: skip
