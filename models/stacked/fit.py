# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: folds of the held-out labels, the objective and the steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional as F
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import (
    as_set,
    as_tensor,
    check_integers,
    check_positive,
    expect,
    expect_all,
    expect_device,
    is_kind,
)
from pyro_nmm.edge_values import edges_between
from pyro_nmm.fitting import with_gradients
from pyro_nmm.labels import in_label_order
from pyro_nmm.models.stacked.formula import Formula
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.parameters import ParameterPriors
from pyro_nmm.ops.marginals import node_log_probs, node_marginals
from pyro_nmm.relabel import as_channel, taken


@with_gradients
def temperature_scaling(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    r"""
    Temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    >>> scores, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> found = temperature_scaling(scores, y, held_out=torch.ones(4, dtype=torch.bool))
    >>> (scores[0] / found).softmax(0)  # right in three of four cases
    tensor([0.7500, 0.2500])

    :param Tensor scores: ``(N, C)`` finite logits, with labels ``y``, ``(N,)``.
    :param Tensor held_out: mask ``(N,)`` or node ids of some nodes.
    """
    scores = as_tensor("scores", in_label_order("scores", scores))
    scores = scores.to(torch.get_default_dtype()) if is_kind(scores, "integers") else scores
    scores = expect("scores", scores, ("N", "C"), kind="float").detach()
    y = as_tensor("y", y, scores.device, masked=-1)
    held_out = as_tensor("held_out", held_out, scores.device)
    expect_device("held_out", held_out, scores.device, "scores")
    held_out = as_set(held_out, len(scores), scores.device, "held_out")
    y = expect("y", y, (len(scores),), kind="labels", note="one label per row of scores").long()
    expect_device("y", y, scores.device, "scores")
    num_classes = scores.shape[1]
    good = ~held_out | (y >= 0) & (y < num_classes)
    expect_all("y", y, good, f"hold labels 0..{num_classes - 1} where held_out")
    cure = ": for log(0), clamp probabilities"
    expect_all("scores", scores, scores.isfinite(), "be finite", cure)
    log_scale = torch.zeros((), dtype=scores.dtype, device=scores.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(scores[held_out] * log_scale.exp(), y[held_out])
        loss.backward()
        return loss

    optimizer.step(closure)
    return (-log_scale).exp().item()


def bounded_temperature(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    """:func:`temperature_scaling` between .05 and 20 standard deviations of the scores."""
    # Few held-out nodes may all be predicted rightly, and would have a temperature of zero.
    unit, own = scores.std(), scores - scores.mean(1, keepdim=True)
    if own.std() <= unit / 20:  # numbers that all labels of a row share hide the scale
        scores, unit = own, own.std()
    if unit < 1e-12:
        return 1.0
    found = temperature_scaling(scores / unit, y, held_out)
    return unit.item() * min(max(found, 0.05), 20.0)


@dataclass(frozen=True)
class FitOptions:
    """Options of :meth:`StackedNMM.fit`, which documents them."""

    num_steps: int = 150
    num_samples: int = 8
    num_folds: int = 1
    max_held_out: int = 5_000
    lr: float = 0.1
    progress: Callable[[range], Iterable[int]] = iter

    def __post_init__(self) -> None:
        check_integers(1, num_steps=self.num_steps, num_folds=self.num_folds)
        check_integers(1, max_held_out=self.max_held_out)
        check_integers(2, num_samples=self.num_samples)
        check_positive(lr=self.lr)


@dataclass(frozen=True)
class Fold:
    """Labels that are held out, given others, on the nodes that they depend on."""

    hood: Neighborhood
    inputs: Tensor  #: of the predictor
    edge_weight: Tensor | None
    y: Tensor
    given: Tensor  #: mask of nodes that the mixture is conditioned on
    held_out: Tensor  #: mask

    def small(self) -> "Fold":
        """The same on a smaller graph: of the nodes that its labels depend on."""
        near, kept, sources = sources_of(self.hood, self.given | self.held_out)
        weight = self.edge_weight
        if weight is not None:
            weight = weight[edges_between(self.hood, sources[near.source], kept[near.target])]
        labels = self.y[kept], self.given[kept], self.held_out[kept]
        return Fold(near, self.inputs[..., kept, :], weight, *labels)


def folds_of(formula: Formula, data: GraphScores, held_out: Tensor, num_folds: int) -> list[Fold]:
    """Folds of the held-out nodes, each given the other known labels."""
    nodes, folds = held_out.nonzero()[:, 0], []
    if num_folds > 1:
        nodes = shuffled(nodes)
    num_folds = min(num_folds, len(nodes))
    for fold in range(num_folds):
        out = torch.zeros_like(held_out)
        out[nodes[fold::num_folds]] = True
        folds.append(fold_of(formula, data, out))
    return folds


def fold_of(formula: Formula, data: GraphScores, out: Tensor) -> Fold:
    """Some known labels, held out, given the others."""
    inputs, given = formula.predictor.read(replace(data, known=data.known & ~out))
    return Fold(data.hood, inputs, data.edge_weight, data.y, given, out).small()


def some_of(mask: Tensor, most: int) -> Tensor:
    """A mask of at most so many of its nodes, at random."""
    if int(mask.sum()) <= most:
        return mask
    return index_to_mask(shuffled(mask.nonzero()[:, 0])[:most], len(mask))


def shuffled(nodes: Tensor) -> Tensor:
    return nodes[torch.randperm(len(nodes), device=nodes.device)]


def sources_of(hood: Neighborhood, observed: Tensor) -> tuple[Neighborhood, Tensor, Tensor]:
    """
    The part of a graph that the labels of observed nodes depend on, its nodes and its sources, both
    ascending. The nodes are sources of the observed nodes, or members of communities that are. An
    unobserved node has an edge from itself and from these communities only. Memory: no more than
    the edges of this part, unless there are communities.
    """
    rows, num_nodes = hood.restrict(observed), hood.num_nodes
    reached, members = rows.source.unique(), rows.source.new_zeros(2, 0)
    if hood.bipartite:
        chosen = index_to_mask(reached[reached >= num_nodes], hood.num_sources)
        inside = chosen[hood.source].nonzero()[:, 0]
        members = torch.stack([hood.source[inside], hood.target[inside]])
    nodes = torch.cat([reached[reached < num_nodes], members[1]]).unique()
    sources = torch.cat([nodes, reached[reached >= num_nodes]])
    source, target = torch.cat([torch.stack([rows.source, rows.target]), members], 1)
    own = torch.arange(len(nodes), device=hood.device).expand(2, -1)
    edges = torch.stack([torch.searchsorted(sources, source), torch.searchsorted(nodes, target)])
    num_sources = len(sources) if hood.bipartite else None
    return Neighborhood(torch.cat([edges, own], 1), len(nodes), num_sources), nodes, sources


def maximise(
    formula: Formula, parameters: ParameterPriors, folds: list[Fold], options: FitOptions
) -> None:
    """Fits the parameters in steps, each on the next fold."""
    optimizer = torch.optim.Adam(parameters.values, lr=options.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 - 2 * step / options.num_steps)
    )
    whole = sum(int(fold.held_out.sum()) for fold in folds)
    for step in options.progress(range(options.num_steps)):
        optimizer.zero_grad()
        fold = folds[step % len(folds)]
        found = formula(fold.hood, fold.inputs, fold.edge_weight)
        mixture = NeighborMixture(fold.hood, *found, validate_args=False)
        sets = [mask.nonzero()[:, 0] for mask in (fold.given, fold.held_out)]
        order = torch.cat([shuffled(nodes) for nodes in sets])
        q = mixture.in_order(fold.y, fold.given | fold.held_out, order)
        loss = -surrogate(q, len(sets[0]), options.num_samples) / len(sets[1])
        (loss - parameters.log_prior() / whole).backward()
        optimizer.step()
        schedule.step()
        if not parameters.are_finite():
            raise ValueError(f"lr={options.lr} is too large: the parameters are no longer finite")


def label_log_probs(stacked: Any, fold: Fold) -> Tensor:
    """``(n,)``: of each held-out label alone, by the NMM. Cost: linear in the edges into them."""
    formula, rows = stacked.formula, fold.hood.restrict(fold.held_out)
    probs = formula.predictor.probs(fold.inputs)
    weight = None if fold.edge_weight is None else fold.edge_weight[rows.edge]
    return row_log_probs(formula, fold.hood, rows, probs, weight, fold.y[rows.nodes])


def row_log_probs(
    formula: Formula, hood: Neighborhood, rows: Neighborhood, probs: Tensor, weight: Tensor | None,
    y: Tensor,
) -> Tensor:  # fmt: skip
    """The same of labels ``(n,)`` of some rows, of :math:`P` of all nodes of ``hood``."""
    alpha, probs = formula.concentrations(hood, probs)
    logits, *relabel = formula.attention(rows, probs, weight)
    attention = rows.softmax(logits)
    if relabel:
        return taken(node_marginals(rows, alpha, attention, *map(as_channel, relabel)), y).log()
    return node_log_probs(rows, alpha, attention, y)


def surrogate(q: Any, num_given: int, num_samples: int) -> Tensor:
    """
    A number with the gradient of :math:`E_q \\sum_i f_i` over the nodes after ``num_given``. The
    score of the choices has the mean of the other draws as baseline.
    """
    choices = q.sample(Size([num_samples]))
    bound = q.log_terms(choices)[:, num_given:].sum(-1)
    others = (bound.sum() - bound) / (num_samples - 1)
    return (bound + q.log_prob(choices) * (bound - others).detach()).mean()
