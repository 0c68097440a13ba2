# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The Neighbor Mixture Model in one picture. Each of five nodes has a die, chooses a neighbour or
itself, and rolls the die of its choice. A table shows how often two nodes have the same label.

    python examples/borrowed_label.py --output output/borrowed_label.png
"""

from __future__ import annotations

from argparse import ArgumentParser

import pyro
import torch
from common import options
from drawing.borrowed_label import draw
from pyro.distributions import Categorical, Dirichlet

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture

EDGES = (0, 1), (1, 2), (2, 3), (3, 4), (1, 3)


def main(args) -> torch.Tensor:
    pyro.set_rng_seed(args.seed)
    edges = torch.tensor(EDGES).T
    hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), num_nodes=5)
    alpha, logits = torch.full((5, 2), args.alpha), torch.zeros(hood.num_edges)

    z = Dirichlet(alpha).sample()  # (5, 2): a die each
    c = NeighborChoice(hood, logits).sample()  # (5,): the source of each node
    y = Categorical(z[c]).sample()  # (5,): labels

    pairs = torch.triu_indices(5, 5, 1)
    tables = NeighborMixture(hood, alpha, logits).pairwise(pairs)  # (10, 2, 2), in closed form
    equal = torch.full((5, 5), torch.nan)
    equal[pairs[0], pairs[1]] = equal[pairs[1], pairs[0]] = tables.diagonal(dim1=1, dim2=2).sum(1)
    print("probability of the same label")
    for i, row in enumerate(equal.tolist()):
        print(f"node {i}", *(f"{p:5.2f}" for p in row))
    if args.output:
        draw(args.output, EDGES, z.tolist(), c.tolist(), y.tolist(), equal)
    return equal


def parser() -> ArgumentParser:
    return options(__doc__, "borrowed_label.png", alpha=(0.125, "small: loaded dice"), seed=3410)


if __name__ == "__main__":
    main(parser().parse_args())
