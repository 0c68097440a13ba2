# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs, links and images for the examples and the benchmarks, and their splits."""

from pyro_nmm.datasets.batches import seed_batch
from pyro_nmm.datasets.images import image_folder, letters, photographs, random_patches
from pyro_nmm.datasets.links import LinkSplit, link_graph, link_split, published_split
from pyro_nmm.datasets.nodes import digits, inner_edges, planetoid, random_split, select_split

__all__ = [
    "LinkSplit", "digits", "image_folder", "inner_edges", "letters", "link_graph", "link_split",
    "photographs", "planetoid", "published_split", "random_patches", "random_split", "seed_batch",
    "select_split",
]  # fmt: skip
