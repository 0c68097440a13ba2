# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What else makes probabilities of a classifier's logits. Each is a function of the data, the
neighbourhoods, logits (N, C), the nodes that are known and those that are held out, and returns
marginals (N, C).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN, CorrectAndSmooth, Linear
from torch_geometric.utils import degree, scatter, softmax

from pyro_nmm import Neighborhood

Marginals = Callable[[], Tensor]
#: Weight decay of GATS, by graph and backbone: the configuration files of its authors.
GATS_DECAY = {("cora", "gcn"): 5e-3, ("cora", "gat"): 1e-2, ("citeseer", "gcn"): 5e-3}
GATS_DECAY |= {("citeseer", "gat"): 1e-2, ("pubmed", "gcn"): 0.0, ("pubmed", "gat"): 0.2}


def minimised(numbers: Sequence[Tensor], loss: Callable[[], Tensor], steps: int = 200) -> None:
    """L-BFGS, which ends where it overflows; the numbers are the best that it has met."""
    best, kept = float("inf"), [number.detach().clone() for number in numbers]
    optimizer = torch.optim.LBFGS(numbers, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        nonlocal best, kept
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if value.item() < best:
            best, kept = value.item(), [number.detach().clone() for number in numbers]
        return value

    with contextlib.suppress(RuntimeError):  # a number that is too large for its type
        optimizer.step(closure)
    with torch.no_grad():
        for number, value in zip(numbers, kept, strict=True):
            number.copy_(value)


def by_likelihood(marginals: Callable[..., Tensor], start: list, y: Tensor, held: Tensor, **more):
    """The marginals at the numbers that make the held-out labels likeliest; and their loss."""
    numbers = [torch.as_tensor(value).clone().requires_grad_() for value in start]

    def loss() -> Tensor:
        return F.nll_loss(marginals(*numbers)[held].clamp(min=1e-12).log(), y[held])

    minimised(numbers, loss, **more)
    with torch.no_grad():
        return marginals(*numbers), loss().item()


def scaled(logits: Tensor, log_scale: Tensor) -> Tensor:
    return (logits * log_scale.exp()).softmax(-1)


def temperature(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    return by_likelihood(partial(scaled, logits), [0.0], data.y, held)[0]


def vector(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    """A slope and an offset for every label (Guo et al. 2017), by maximum likelihood."""
    size = logits.shape[1]
    start = [torch.ones(size), torch.zeros(size)]
    marginals = by_likelihood(lambda w, b: (logits * w + b).softmax(-1), start, data.y, held)
    return marginals[0]


def shrunk_vector(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    """The same around temperature scaling, with a penalty that five folds of them choose."""
    unit, y = temperature(data, hood, logits, known, held).clamp(min=1e-9).log(), data.y
    nodes = held.nonzero()[:, 0]
    nodes = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))]

    def fitted(part: Tensor, penalty: float) -> Tensor:
        w, b = torch.ones(unit.shape[1]), torch.zeros(unit.shape[1])
        w.requires_grad_(), b.requires_grad_()

        def loss() -> Tensor:
            cost = F.cross_entropy(unit[part] * w + b, y[part], reduction="sum")
            return cost + penalty * ((w - 1).square().sum() + b.square().sum())

        minimised([w, b], loss)
        return (unit * w + b).detach()

    def left_out(penalty: float) -> float:
        folds = [nodes[fold::5] for fold in range(5)]
        rest = [torch.cat(folds[:k] + folds[k + 1 :]) for k in range(5)]
        each = [F.cross_entropy(fitted(r, penalty)[f], y[f], reduction="sum")
                for f, r in zip(folds, rest, strict=True)]  # fmt: skip
        return float(sum(each))

    return fitted(nodes, min([0.3, 1.0, 3.0, 10.0, 30.0, 100.0], key=left_out)).softmax(-1)


def around(hood: Neighborhood, probs: Tensor) -> Tensor:
    """The mean over a node's neighbours, or itself if it has none."""
    edges = hood.source != hood.target
    source, target = hood.source[edges], hood.target[edges]
    means = scatter(probs[source], target, dim_size=len(probs), reduce="mean")
    return means.where((hood.ptr.diff() > 1)[:, None], probs)


def three_numbers(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    """A temperature, the share of the neighbours' mean, and that of uniform labels."""

    def marginals(log_scale: Tensor, share: Tensor, floor: Tensor) -> Tensor:
        probs = scaled(logits, log_scale)
        mixed = probs.lerp(around(hood, probs), share.sigmoid())
        return mixed.lerp(torch.full_like(probs, 1 / probs.shape[1]), floor.sigmoid())

    return by_likelihood(marginals, [0.0, -1.0, -4.0], data.y, held)[0]


def recalibrated(probs: Tensor, y: Tensor, held: Tensor):
    """A temperature and a uniform floor; and their loss."""
    logits = probs.clamp(min=1e-6).log()

    def marginals(log_scale: Tensor, floor: Tensor) -> Tensor:
        uniform = torch.full_like(probs, 1 / probs.shape[1])
        return scaled(logits, log_scale).lerp(uniform, floor.sigmoid())

    return by_likelihood(marginals, [0.0, -4.0], y, held)


def smoothed(data: Data, probs: Tensor, known: Tensor, alphas: tuple[float, float]) -> Tensor:
    """PyG's Correct and Smooth (Huang et al. 2021), 50 steps of either."""
    found = CorrectAndSmooth(50, alphas[0], 50, alphas[1], autoscale=True)
    mine, edges = data.y[known], data.edge_index
    probs = found.correct(probs, mine, known, edges).nan_to_num().clamp(min=0)
    probs = found.smooth(probs, mine, known, edges).clamp(min=1e-9)
    return probs / probs.sum(-1, keepdim=True)


def correct_and_smooth(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    """The settings, of six, and two numbers of recalibration by the held-out nodes."""
    start = temperature(data, hood, logits, known, held)
    each = itertools.product([0.5, 0.9], [0.5, 0.8, 0.9])
    every = [recalibrated(smoothed(data, start, known, pair), data.y, held) for pair in each]
    return min(every, key=lambda found: found[1])[0]


class CaGCN(nn.Module):
    """A temperature for every node by a GCN of the logits (Wang et al. 2021)."""

    def __init__(self, hood: Neighborhood, num_classes: int) -> None:
        super().__init__()
        self.edges = torch.stack([hood.source, hood.target])
        self.network = GCN(num_classes, 16, 2, out_channels=1, dropout=0.5)

    def forward(self, logits: Tensor) -> Tensor:
        return logits * F.softplus(self.network(logits, self.edges))


class GATS(nn.Module):
    """A temperature for every node by attention among logits (Hsu et al. 2022), equations 7-10."""

    def __init__(self, hood: Neighborhood, known: Tensor, num_classes: int, heads: int = 8) -> None:
        super().__init__()
        self.source, self.target, self.size = hood.source, hood.target, hood.num_nodes
        next_to = scatter(known[hood.source].long(), hood.target, dim_size=self.size, reduce="max")
        self.distance = torch.where(known, 0, 2 - next_to)
        self.ranks = Linear(num_classes, heads, bias=False, weight_initializer="glorot")
        self.coefficient = nn.Parameter(torch.zeros(()))
        self.bias, self.of_near = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    def forward(self, logits: Tensor) -> Tensor:
        low, high = logits.aminmax(dim=1, keepdim=True)
        ranked = self.ranks(((logits - low) / (high - low)).sort(-1).values)
        near = torch.cat([self.of_near, self.of_near.new_ones(1)])[self.distance][:, None]
        sharp, sure = logits / near, logits.softmax(-1).amax(-1)
        weight = (sharp[self.source] * sharp[self.target]).sum(-1)
        weight = softmax(F.leaky_relu(weight, 0.2), self.target, num_nodes=self.size)[:, None]
        alike = scatter(weight * (ranked * near)[self.source], self.target, dim_size=self.size)
        gap = scatter(sure[self.target] - sure[self.source], self.target, dim_size=self.size)
        gap = gap / degree(self.source, self.size)
        found = F.softplus(alike + self.coefficient * gap[:, None]).mean(-1, keepdim=True)
        return logits / (found + self.bias)


def by_network(module: nn.Module, decay: float, y: Tensor, logits: Tensor, known, held) -> Tensor:
    """The protocol's fit: on the held-out nodes, stopped early by those that were learned from."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=decay)
    least, waited, kept = float("inf"), 0, logits
    for _ in range(2000):
        module.train()
        optimizer.zero_grad()
        F.cross_entropy(module(logits)[held], y[held]).backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            found = module(logits)
        loss = F.cross_entropy(found[known], y[known]).item()
        waited = 0 if loss <= least else waited + 1
        if loss <= least:
            least, kept = loss, copy.deepcopy(found)
        if waited >= 100:
            break
    return kept.softmax(-1)


def cagcn(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor):
    return by_network(CaGCN(hood, logits.shape[1]), 5e-3, data.y, logits, known, held)


def gats(data: Data, hood: Neighborhood, logits: Tensor, known: Tensor, held: Tensor, decay: float):
    return by_network(GATS(hood, known, logits.shape[1]), decay, data.y, logits, known, held)
