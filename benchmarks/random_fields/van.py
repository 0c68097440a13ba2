# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The variational autoregressive network of D. Wu, L. Wang and P. Zhang, Solving statistical mechanics
using variational autoregressive networks, Physical Review Letters 122, 080602, 2019.
"""

import torch
from torch import Tensor, nn

from pyro_nmm.models import PairwiseMRF


def drawn(logits: Tensor) -> Tensor:
    """A label for each row of logits ``(..., C)``; faster than ``Categorical`` on small tables."""
    above = torch.rand_like(logits[..., :1]) > logits.softmax(-1)[..., :-1].cumsum(-1)
    return above.sum(-1)


class Autoregressive(nn.Module):
    r"""
    A network of one hidden layer, whose masks let every node see the ``memory`` nodes before it:

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
