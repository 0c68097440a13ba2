# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rivals that draw labels one by one, each given earlier labels: VAN and exact windows."""

import itertools
from collections import defaultdict

import torch
from opt_einsum import contract
from torch import Tensor, nn

from benchmarks.random_fields.fields import Grid
from pyro_nmm.models import PairwiseMRF


def drawn(logits: Tensor) -> Tensor:
    """A label for each row of logits ``(..., C)``; faster than ``Categorical`` on small tables."""
    above = torch.rand_like(logits[..., :1]) > logits.softmax(-1)[..., :-1].cumsum(-1)
    return above.sum(-1)


class Autoregressive(nn.Module):
    r"""
    The variational autoregressive network of D. Wu, L. Wang and P. Zhang, Solving statistical
    mechanics using variational autoregressive networks, Physical Review Letters 122, 080602, 2019:
    one hidden layer, whose masks let every node see the ``memory`` nodes before it,

    .. math::

        \log q(y) = \sum_i \log \mathrm{softmax}\big( b_i + A_i x + V_i \tanh(W_i x + d_i)
        \big)_{y_i}, \qquad x = (y_{i - m}, \dots, y_{i - 1})

    :param Tensor unary: ``(N, C)``, the target's, where the biases begin.
    """

    def __init__(self, unary: Tensor, memory: int, hidden: int) -> None:
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
        y, one = torch.empty(count, nodes, dtype=torch.long), self.classes - 1
        seen = self.bias.new_zeros(count, width + nodes * one)
        for n in range(nodes):
            x = seen[:, n * one : n * one + width]
            hidden = torch.addmm(self.shift[n], x, self.inner[n]).tanh()
            logits = torch.addmm(self.bias[n], x, self.straight[n]) + hidden @ self.outer[n]
            y[:, n] = drawn(logits)
            seen[:, width + n * one : width + (n + 1) * one] = self.encode(y[:, n])
        return y


def surrogate(network: Autoregressive, field: PairwiseMRF, y: Tensor) -> Tensor:
    """
    A scalar whose gradient estimates the gradient of the variational free energy by the score,
    with the mean over draws ``(S, N)`` as baseline.
    """
    log_q = network.log_prob(y)
    loss = log_q.detach() - field.log_potential(y)
    return ((loss - loss.mean()) * log_q).sum() / (len(y) - 1)


def fit_autoregressive(
    field: PairwiseMRF, memory: int, *, hidden: int, num_steps: int, lr: float
) -> Autoregressive:
    """
    The network fitted by Adam. The temperature falls, as in the paper: interactions rise from zero
    over the first half of the steps. The rate falls over the second, as in the NMM's own fit.
    """
    network = Autoregressive(field.unary, memory, hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr * max(min(1.0, 2 - 2 * step / num_steps), 1e-3)
        target = field.scaled(min(1.0, 2 * (step + 1) / num_steps))
        optimizer.zero_grad()
        surrogate(network, target, network.sample(128)).backward()
        optimizer.step()
    return network


class Windowed:
    """
    Ordered conditionals: every pixel given the nearest of those before it, exactly, in the target
    cut down to a window of pixels around it. Nothing is fitted. The idea is that of A. Chakraborty,
    M. Katzfuss and J. Guinness, Ordered conditional approximation of Potts models, 2021. We do not
    have that paper's recipe in full, so this rival does not have its name.

    :param neighbors: largest number of earlier pixels that a pixel is given.
    """

    def __init__(self, field: PairwiseMRF, windows: Grid, neighbors: int) -> None:
        self.field, self.order = field, windows.order.tolist()
        self.given: dict[int, list[int]] = {}
        self.tables: dict[int, Tensor] = {}
        self.edge = {tuple(ends): number for number, ends in enumerate(field.edges.T.tolist())}
        place, sizes = windows.order.argsort(), windows.hood.ptr.diff().tolist()
        parts = windows.hood.source.split(sizes), windows.distance.split(sizes)
        # Windows of the same form are summed out at once, as many as the memory allows.
        alike: dict[tuple, list[int]] = defaultdict(list)
        for node, (window, distance) in enumerate(zip(*parts, strict=True)):
            before = place[window] < place[node]
            given = window[before][distance[before].argsort(stable=True)[:neighbors]]
            self.given[node] = given.tolist()
            alike[tuple((window - node).tolist()), tuple((given - node).tolist())].append(node)
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
