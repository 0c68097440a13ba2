# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Conditionals that are exact in small windows, after the idea of A. Chakraborty, M. Katzfuss and
J. Guinness, Ordered conditional approximation of Potts models, 2021. We do not have that paper's
recipe in full, so this rival does not have its name.
"""

import itertools

import torch
from opt_einsum import contract
from torch import Tensor

from benchmarks.random_fields.fields import Shape, grid
from benchmarks.random_fields.van import drawn
from pyro_nmm.models import PairwiseMRF


class Windowed:
    """
    Ordered conditionals: every pixel given the nearest of those before it, exactly, in the target
    cut down to a window of pixels around it. Nothing is fitted.

    :param Tensor order: ``(N,)`` of the pixels.
    :param radius: windows have ``2 radius + 1`` pixels a side, fewer at the border.
    :param neighbors: largest number of earlier pixels that a pixel is given.
    """

    def __init__(
        self, field: PairwiseMRF, shape: Shape, order: Tensor, radius: int, neighbors: int
    ) -> None:
        self.field, self.order = field, order.tolist()
        self.given: dict[int, list[int]] = {}
        self.tables: dict[int, Tensor] = {}
        self.edge = {tuple(ends): number for number, ends in enumerate(field.edges.T.tolist())}
        place, around = order.argsort(), grid(shape, radius)
        sizes = around.hood.ptr.diff().tolist()
        windows = zip(around.hood.source.split(sizes), around.distance.split(sizes), strict=True)
        # Windows of the same form are summed out at once, as many as the memory allows.
        alike: dict[tuple, list[int]] = {}
        for node, (window, distance) in enumerate(windows):
            before = place[window] < place[node]
            given = window[before][distance[before].argsort(stable=True)[:neighbors]]
            self.given[node] = given.tolist()
            form = tuple((window - node).tolist()), tuple((given - node).tolist())
            alike.setdefault(form, []).append(node)
        for (steps, _), nodes in alike.items():
            for members in torch.tensor(nodes).split(64 if field.num_classes == 2 else 8):
                self.sum_out(members.tolist(), steps)

    def sum_out(self, nodes: list[int], steps: tuple[int, ...]) -> None:
        """Make tables ``(C^m, C)`` of log conditionals, the nearest neighbour's label slowest."""
        unary, phi = self.field.unary.double(), self.field.interaction.double()
        unary = (unary - unary.amax(-1, keepdim=True)).exp()  # against overflow
        strength = self.field.strength.double().expand(self.field.num_edges)
        dimension = {step: k + 1 for k, step in enumerate(steps)}  # 0 is the dimension of nodes
        operands: list = []
        for step, k in dimension.items():
            operands += [unary[[node + step for node in nodes]], [0, k]]
        for a, b in itertools.product(steps, steps):
            if (nodes[0] + a, nodes[0] + b) in self.edge:
                weight = strength[[self.edge[node + a, node + b] for node in nodes]]
                operands += [(weight[:, None, None] * phi).exp(), [0, dimension[a], dimension[b]]]
        kept = [dimension[n - nodes[0]] for n in (*self.given[nodes[0]], nodes[0])]
        joint = contract(*operands, [0, *kept]).reshape(len(nodes), -1, self.field.num_classes)
        self.tables |= zip(nodes, joint.log().log_softmax(-1), strict=True)

    def rows(self, y: Tensor, node: int) -> Tensor:
        """``(S, C)``: log conditionals of a node given the earlier labels in ``y``."""
        index = torch.zeros(len(y), dtype=torch.long)
        for n in self.given[node]:
            index = index * self.field.num_classes + y[:, n]
        return self.tables[node][index]

    def log_prob(self, y: Tensor) -> Tensor:
        """``(S,)`` of labels ``(S, N)``."""
        each = [self.rows(y, n).gather(1, y[:, n, None])[:, 0] for n in self.order]
        return torch.stack(each).sum(0)

    def sample(self, count: int) -> Tensor:
        """``(count, N)``."""
        y = torch.zeros(count, len(self.order), dtype=torch.long)
        for node in self.order:
            y[:, node] = drawn(self.rows(y, node))
        return y
