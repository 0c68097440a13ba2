# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Rivals of the NMM that draw a grid's pixels one by one and know the density of their draws: an
autoregressive network [1], and conditionals that are exact in small windows. The second follows the
idea of [2], whose recipe we do not have in full, so it does not have its name.

1. D. Wu, L. Wang and P. Zhang, Solving statistical mechanics using variational autoregressive
   networks, Physical Review Letters 122, 080602, 2019.
2. A. Chakraborty, M. Katzfuss and J. Guinness, Ordered conditional approximation of Potts models,
   2021.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opt_einsum import contract
from torch import Tensor, nn

from pyro_nmm.models import PairwiseMRF


def drawn(logits: Tensor) -> Tensor:
    """A label for each row of logits ``(..., C)``; faster than ``Categorical`` on small tables."""
    above = torch.rand_like(logits[..., :1]) > logits.softmax(-1)[..., :-1].cumsum(-1)
    return above.sum(-1)


class Autoregressive(nn.Module):
    r"""
    A variational autoregressive network [1] of one hidden layer, whose masks let every node see
    the ``memory`` nodes before it and no others [1]:

    .. math::

        \log q(y) = \sum_i \log \mathrm{softmax}\big( b_i + A_i x + V_i \tanh(W_i x + d_i)
        \big)_{y_i}, \qquad x = (y_{i - m}, \dots, y_{i - 1})

    Weights are a node's own. On a grid in row-major order the conditional of a pixel in the target
    rests on the last row's width of pixels alone, so a memory of that size loses nothing.

    :param Tensor unary: ``(N, C)``, the target's, where the biases begin.
    """

    def __init__(self, unary: Tensor, memory: int, hidden: int = 16) -> None:
        super().__init__()
        (nodes, classes), width = unary.shape, memory * (unary.shape[1] - 1)
        self.memory, self.classes = memory, classes
        noise = torch.randn(nodes, width, hidden, dtype=unary.dtype)
        self.inner = nn.Parameter(noise / width**0.5)
        self.shift = nn.Parameter(unary.new_zeros(nodes, hidden))
        self.outer = nn.Parameter(unary.new_zeros(nodes, hidden, classes))
        self.straight = nn.Parameter(unary.new_zeros(nodes, width, classes))
        self.bias = nn.Parameter(unary.clone())

    def encode(self, y: Tensor) -> Tensor:
        """``(..., C - 1)``: all labels but the first, centred."""
        labels = torch.arange(1, self.classes)
        return (y.unsqueeze(-1) == labels).to(self.bias) - 1 / self.classes

    def log_prob(self, y: Tensor) -> Tensor:
        """``(S,)`` of labels ``(S, N)``, differentiable."""
        before = nn.functional.pad(self.encode(y), (0, 0, self.memory, 0))[:, :-1]
        x = before.unfold(1, self.memory, 1).permute(1, 0, 3, 2).flatten(2)  # (N, S, memory (C-1))
        hidden = (x @ self.inner + self.shift.unsqueeze(1)).tanh()
        logits = hidden @ self.outer + x @ self.straight + self.bias.unsqueeze(1)
        return logits.log_softmax(-1).gather(-1, y.T.unsqueeze(-1))[..., 0].sum(0)

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """``(count, N)``."""
        nodes, width = self.inner.shape[:2]
        y, one = torch.empty(count, nodes, dtype=torch.long), width // self.memory
        seen = self.bias.new_zeros(count, width + nodes * one)
        for n in range(nodes):
            x = seen[:, n * one : n * one + width]
            hidden = torch.addmm(self.shift[n], x, self.inner[n]).tanh()
            logits = torch.addmm(self.bias[n], x, self.straight[n]) + hidden @ self.outer[n]
            y[:, n] = drawn(logits)
            seen[:, width + n * one : width + (n + 1) * one] = self.encode(y[:, n])
        return y


def surrogate(network: Autoregressive, field: PairwiseMRF, y: Tensor) -> Tensor:
    r"""
    A scalar whose gradient is the estimate of that of the variational free energy by score and the
    mean of the other draws as baseline [1]:

    .. math::

        \nabla F = E_q \big[ (\log q(y) - \log p^*(y) - b) \nabla \log q(y) \big]
    """
    log_q = network.log_prob(y)
    loss = log_q.detach() - field.log_potential(y)
    return ((loss - loss.mean()) * log_q).sum() / (len(y) - 1)


def fit_autoregressive(
    field: PairwiseMRF,
    memory: int,
    *,
    hidden: int = 16,
    num_steps: int = 1000,
    num_samples: int = 128,
    lr: float = 0.01,
) -> Autoregressive:
    """
    The network by Adam. The temperature falls, as in [1]: interactions rise from zero over the
    first half of the steps, and the rate falls over the second, as in the NMM's own fit.
    """
    network = Autoregressive(field.unary, memory, hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * max(min(1.0, 2 - 2 * step / num_steps), 1e-3)
        target = field.scaled(min(1.0, 2 * (step + 1) / num_steps))
        optimizer.zero_grad()
        surrogate(network, target, network.sample(num_samples)).backward()
        optimizer.step()
    return network


class Windowed:
    r"""
    Ordered conditionals: every pixel given the nearest of those before it, in the target cut down
    to a window of pixels around it, where they are exact.

    .. math::

        q(y) = \prod_i p_{w(i)}\big(y_i \mid y_{g(i)}\big), \qquad
        p_w(y) \propto \exp \Big( \sum_{j \in w} u_j(y_j) + \sum_{(j, k) \in w} w_{jk}
        \phi(y_j, y_k) \Big)

    Nothing is fitted. Pixels whose windows look alike are summed out at once.

    :param Tensor order: ``(N,)`` of the pixels.
    :param radius: windows are of ``2 radius + 1`` pixels a side, less at the border.
    :param neighbors: most pixels before it that a pixel is given.
    :param at_once: most windows at once, which bounds the memory.
    """

    def __init__(
        self,
        field: PairwiseMRF,
        shape: tuple[int, int],
        order: Tensor,
        radius: int,
        neighbors: int,
        at_once: int = 64,
    ) -> None:
        self.field, self.width, self.order = field, shape[1], order.tolist()
        self.given: dict[int, list[int]] = {}
        self.tables: dict[int, Tensor] = {}
        place = order.argsort().tolist()
        strength = field.strength.double().expand(field.num_edges)
        self.pairs = dict(zip(map(tuple, field.edges.T.tolist()), strength, strict=True))
        alike: dict[tuple, list[tuple[int, list[int]]]] = {}
        for node in self.order:
            window = list(self.window(node, shape, radius))
            earlier = [n for n in window if place[n] < place[node]]
            self.given[node] = sorted(earlier, key=lambda n: (self.apart(n, node), n))[:neighbors]
            key = [n - node for n in window], [n - node for n in self.given[node]]
            alike.setdefault(tuple(map(tuple, key)), []).append((node, window))
        for members in alike.values():
            for first in range(0, len(members), at_once):
                self.sum_out(members[first : first + at_once])

    def window(self, node: int, shape: tuple[int, int], radius: int) -> Iterator[int]:
        row, column = divmod(node, self.width)
        for r in range(max(row - radius, 0), min(row + radius + 1, shape[0])):
            for c in range(max(column - radius, 0), min(column + radius + 1, shape[1])):
                yield r * self.width + c

    def apart(self, first: int, second: int) -> int:
        """The squared distance."""
        (r, c), (row, column) = divmod(first, self.width), divmod(second, self.width)
        return (r - row) ** 2 + (c - column) ** 2

    def sum_out(self, members: list[tuple[int, list[int]]]) -> None:
        """Tables ``(C^m, C)`` of log conditionals, the nearest neighbour's label slowest."""
        node, window = members[0]
        unary, phi = self.field.unary.double(), self.field.interaction.double()
        unary = unary - unary.amax(-1, keepdim=True)  # against overflow
        number = {n: k + 1 for k, n in enumerate(window)}  # 0 is that of the members
        operands: list = []
        for k, n in enumerate(window):
            each = torch.tensor([other[k] for _, other in members])
            operands += [unary[each].exp(), [0, number[n]]]
        for first, second in ((a, b) for a in window for b in window if (a, b) in self.pairs):
            moved = [(first + m - node, second + m - node) for m, _ in members]
            weight = torch.stack([self.pairs[pair] for pair in moved])
            operands += [(weight[:, None, None] * phi).exp(), [0, number[first], number[second]]]
        kept = [number[n] for n in (*self.given[node], node)]
        joint = contract(*operands, [0, *kept]).reshape(len(members), -1, self.field.num_classes)
        for (member, _), table in zip(members, joint.log().log_softmax(-1), strict=True):
            self.tables[member] = table

    def rows(self, y: Tensor, node: int) -> Tensor:
        """``(S, C)``: log conditionals of a node given those before it in ``y``."""
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


@torch.no_grad()
def drawn_loss(family: Autoregressive | Windowed, field: PairwiseMRF, count: int) -> Tensor:
    """``(count,)`` draws of log q(y) - log p*(y), whose mean is KL(q || p) - log Z."""
    y = family.sample(count)
    return family.log_prob(y).double() - field.log_potential(y).double()
