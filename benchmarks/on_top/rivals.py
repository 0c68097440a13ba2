# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Calibration with few parameters. Each rival makes marginals ``(N, C)`` of a graph with ``logits``
and ``hood``: the labels of ``train_mask`` are observed, and the parameters are fitted to the
labels of ``val_mask``.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import CorrectAndSmooth
from torch_geometric.utils import remove_self_loops, scatter

from benchmarks.on_top.data import shuffled
from pyro_nmm import Neighborhood

Marginals = Callable[..., Tensor]
Fitted = tuple[Tensor, float]


def fit(loss: Callable[[], Tensor], values: list[Tensor], steps: int = 200) -> None:
    """Set values to the best that L-BFGS meets on the way, which may end in an overflow."""
    met: list[tuple[float, list[Tensor]]] = []
    optimizer = torch.optim.LBFGS(values, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        cost = loss()
        cost.backward()
        met.append((cost.item(), [value.detach().clone() for value in values]))
        return cost

    with contextlib.suppress(RuntimeError):
        optimizer.step(closure)
    for value, best in zip(values, min(met, key=lambda found: found[0])[1], strict=True):
        value.data = best


def by_likelihood(marginals: Marginals, start: Sequence, data: Data, steps: int = 200) -> Fitted:
    """Marginals under which the held-out labels are the most likely, and their loss."""
    values = [torch.tensor(value, requires_grad=True) for value in start]

    def loss() -> Tensor:
        probs = marginals(*values)[data.val_mask].clamp(min=1e-12)
        return F.nll_loss(probs.log(), data.y[data.val_mask])

    fit(loss, values, steps)
    return marginals(*values).detach(), loss().item()


def scaled(logits: Tensor, log_scale: Tensor) -> Tensor:
    return (logits * log_scale.exp()).softmax(-1)


def temperature(data: Data) -> Tensor:
    return by_likelihood(partial(scaled, data.logits), [0.0], data)[0]


def vector(data: Data) -> Tensor:
    """A slope and an offset for every label (Guo et al. 2017), by maximum likelihood."""
    x, size = data.logits, data.logits.shape[1]
    start = [1.0] * size, [0.0] * size
    return by_likelihood(lambda w, b: (x * w + b).softmax(-1), start, data)[0]


def shrunk_vector(data: Data) -> Tensor:
    """Slopes and offsets around temperature scaling, with a penalty chosen by five folds."""
    x, y, nodes = temperature(data).clamp(min=1e-9).log(), data.y, shuffled(data.val_mask)

    def at(penalty: float, part: Tensor) -> Tensor:
        w, b = (make(x.shape[1], requires_grad=True) for make in (torch.ones, torch.zeros))

        def loss() -> Tensor:
            cost = F.cross_entropy(x[part] * w + b, y[part], reduction="sum")
            return cost + penalty * ((w - 1).square().sum() + b.square().sum())

        fit(loss, [w, b])
        return (x * w + b).detach()

    def left_out(penalty: float) -> float:
        folds, total = [nodes[fold::5] for fold in range(5)], torch.zeros(())
        for number, fold in enumerate(folds):
            rest = torch.cat(folds[:number] + folds[number + 1 :])
            total += F.cross_entropy(at(penalty, rest)[fold], y[fold], reduction="sum")
        return total.item()

    return at(min([0.3, 1.0, 3.0, 10.0, 30.0, 100.0], key=left_out), nodes).softmax(-1)


def floored(probs: Tensor, floor: Tensor) -> Tensor:
    """A mixture with uniform labels."""
    return probs.lerp(torch.full_like(probs, 1 / probs.shape[1]), floor.sigmoid())


def ends(hood: Neighborhood) -> Tensor:
    """``(2, E)``: sources and targets of all edges but self-loops."""
    return remove_self_loops(torch.stack([hood.source, hood.target]))[0]


def three_numbers(data: Data) -> Tensor:
    """A temperature, the weight of the neighbours' mean, and the weight of uniform labels."""
    source, target = ends(data.hood)
    alone = (data.hood.ptr.diff() == 1)[:, None]

    def marginals(log_scale: Tensor, share: Tensor, floor: Tensor) -> Tensor:
        probs = scaled(data.logits, log_scale)
        around = scatter(probs[source], target, dim_size=len(probs), reduce="mean")
        return floored(probs.lerp(probs.where(alone, around), share.sigmoid()), floor)

    return by_likelihood(marginals, [0.0, -1.0, -4.0], data)[0]


def recalibrated(make: Callable[[Tensor], Tensor], data: Data) -> Fitted:
    """Marginals of ``make`` given the training labels, with a temperature and a uniform floor."""
    logits = make(data.train_mask).clamp(min=1e-6).log()
    return by_likelihood(lambda t, f: floored(scaled(logits, t), f), [0.0, -4.0], data)


def correct_and_smooth(data: Data, fitted: Callable[..., Fitted] = recalibrated) -> Tensor:
    """PyG's Correct and Smooth (Huang et al. 2021), with the best of six pairs of settings."""
    start, edges = temperature(data), data.edge_index

    def smoothed(known: Tensor, first: float, second: float) -> Tensor:
        smoother, labels = CorrectAndSmooth(50, first, 50, second, autoscale=True), data.y[known]
        probs = smoother.correct(start, labels, known, edges).nan_to_num().clamp(min=0)
        probs = smoother.smooth(probs, labels, known, edges).clamp(min=1e-9)
        return probs / probs.sum(-1, keepdim=True)

    pairs = itertools.product([0.5, 0.9], [0.5, 0.8, 0.9])
    every = [fitted(partial(smoothed, first=a, second=b), data) for a, b in pairs]
    return min(every, key=lambda found: found[1])[0]


def potts_marginals(hood: Neighborhood, probs: Tensor, y: Tensor, known: Tensor) -> Marginals:
    """
    Marginals of a Potts field on top of marginals ``probs``, one coupling for all edges and
    observed labels clamped, as a function of a temperature and the coupling: beliefs after twenty
    steps of loopy belief propagation, damped from the sixth on.
    """
    (source, target), size = ends(hood), hood.num_nodes
    reverse = torch.searchsorted(target * size + source, source * size + target)
    logits, sure = probs.clamp(min=1e-6).log(), F.one_hot(y.where(known, 0), probs.shape[1]).bool()
    clamped = torch.where(sure, 0.0, -30.0)

    def marginals(log_scale: Tensor, coupling: Tensor, steps: int = 20) -> Tensor:
        own = (logits * log_scale.exp()).log_softmax(-1)
        own = torch.where(known[:, None], clamped, own)
        gain, sent = F.softplus(coupling).expm1(), own.new_zeros(len(source), own.shape[1])
        for step in range(steps):
            beliefs = own + scatter(sent, target, dim_size=size)
            new = (gain * (beliefs[source] - sent[reverse]).softmax(-1)).log1p().log_softmax(-1)
            sent = new if step < 5 else (sent + new) / 2
        return (own + scatter(sent, target, dim_size=size)).softmax(-1)

    return marginals


def potts(data: Data, probs: Tensor) -> Tensor:
    marginals = potts_marginals(data.hood, probs, data.y, data.train_mask)
    return by_likelihood(marginals, [0.0, -1.0], data, steps=30)[0]
