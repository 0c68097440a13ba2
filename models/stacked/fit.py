# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: steps, uncertain parameters, and evidence of held-out labels."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
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
from pyro_nmm.blocks import row_blocks
from pyro_nmm.fitting import minimise, with_gradients
from pyro_nmm.labels import in_label_order
from pyro_nmm.models.stacked.formula import Formula, Priors
from pyro_nmm.models.stacked.table import GraphScores, side_by_side
from pyro_nmm.neighborhood import edges_between
from pyro_nmm.ops.marginals import node_log_probs, node_marginals
from pyro_nmm.relabel import Channel, entries_at

#: Candidates of the labels' probabilities.
TEMPERED, POOL, NMM = "temperature scaling", "pool", "NMM"
#: Folds of held-out nodes for the evidence of a fit without folds of its own, and the most nodes.
FOLDS, MOST_LABELS = 5, 2_000
#: Pairs of neighbours that shrink their agreement, and labels that priors of shares count as.
PAIRS, LABELS = 10, 5
#: Edges of a fold up to which a fit on a device runs on the processor, because each of its many
#: small calls costs a device more. Times of docs/results/speed.md, linear in the edges, cross near
#: it. A fit of twice as many edges would take about half as long again there, and a fit of half as
#: many a quarter longer on the device.
FEW_EDGES = 50_000
#: Draws of the parameters, in pairs of opposite deviations from the fit.
NUM_DRAWS = 16


@with_gradients
def temperature_scaling(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    r"""Temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural Networks",
    ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    >>> scores, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> temperature = temperature_scaling(scores, y, held_out=torch.ones(4, dtype=torch.bool))
    >>> (scores[0] / temperature).softmax(0).round(decimals=2)  # right in three of four cases
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
    kept, labels = scores[held_out], y[held_out]
    minimise(lambda: F.cross_entropy(kept * log_scale.exp(), labels), [log_scale], 100)
    return (-log_scale).exp().item()


def bounded_temperature(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    """:func:`temperature_scaling` between .05 and 20 standard deviations of the scores."""
    # Few held-out nodes may all be predicted rightly, and would have a temperature of zero.
    unit, centred = scores.std(), scores - scores.mean(1, keepdim=True)
    if centred.std() <= unit / 20:  # numbers that all labels of a row share hide the scale
        scores, unit = centred, centred.std()
    if unit < 1e-12 or (centred - centred.mean(0)).std() < 1e-6 * unit:
        return 1.0  # all nodes have the same scores
    temperature = temperature_scaling(scores / unit, y, held_out)
    return unit.item() * min(max(temperature, 0.05), 20.0)


@dataclass(frozen=True)
class FitOptions:
    """Options of :meth:`StackedNMM.fit`, which documents them."""

    num_steps: int = 150
    num_samples: int = 8
    num_folds: int = 1
    max_held_out: int = 5_000
    lr: float = 0.1
    progress: Callable[[range], Iterable[int]] = iter
    refit_steps: int = 20

    def __post_init__(self) -> None:
        check_integers(1, num_steps=self.num_steps, num_folds=self.num_folds)
        check_integers(1, max_held_out=self.max_held_out, refit_steps=self.refit_steps)
        check_integers(2, num_samples=self.num_samples)
        check_positive(lr=self.lr)


@dataclass(frozen=True)
class Evidence:
    """How probable each candidate finds held-out labels, and the share of the NMM that follows."""

    nll: dict[str, float]  #: mean negative log-likelihood of the labels, by candidate
    share: float

    def __str__(self) -> str:
        lowest, lines = min(self.nll.values()), ["held-out NLL"]
        for name, value in self.nll.items():
            lines.append(f"{name:24}{value:8.3f}{'  lowest' * (value == lowest)}")
        if self.share < 1:
            lines.append(f"{'share of the NMM':24}{self.share:8.3f}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Fold:
    """Labels that are held out, given others, on the nodes that they depend on."""

    hood: Neighborhood
    inputs: Tensor  #: of the formula
    y: Tensor
    observed: Tensor  #: mask of nodes that the mixture is conditioned on
    held_out: Tensor  #: mask
    edge_weight: Tensor | None = None

    @classmethod
    def of(cls, formula: Formula, data: GraphScores, out: Tensor) -> "Fold":
        """Some known labels, held out, given the others."""
        inputs, observed = formula.inputs(replace(data, known=data.known & ~out))
        return cls(data.hood, inputs, data.y, observed, out, data.edge_weight).small()

    def small(self) -> "Fold":
        """The same on a smaller graph: of the nodes that its labels depend on."""
        rows = self.hood.restrict(self.observed | self.held_out)
        kept = rows.source.unique()
        # Nodes without a label here keep the edge from themselves only.
        ends = torch.searchsorted(kept, torch.stack([rows.source, rows.target]))
        near, weight = Neighborhood(ends, len(kept)), self.edge_weight
        if weight is not None:
            weight = weight[edges_between(self.hood, kept[near.source], kept[near.target])]
        labels = self.y[kept], self.observed[kept], self.held_out[kept]
        return Fold(near, self.inputs[..., kept, :], *labels, weight)

    def cpu(self) -> "Fold":
        """The same on the processor."""
        found = ((name, value) for name, value in vars(self).items() if value is not None)
        return Fold(**{name: value.to("cpu") for name, value in found})


def parts_of(mask: Tensor, number: int = FOLDS) -> list[Tensor]:
    """Masks of parts of equal size, at random."""
    nodes = mask.nonzero()[:, 0]
    nodes = shuffled(nodes) if number > 1 else nodes
    return [index_to_mask(nodes[k::number], len(mask)) for k in range(min(number, len(nodes)))]


def is_small(fold: Fold) -> bool:
    """Whether a fit on a device is faster on the processor."""
    return fold.hood.device.type != "cpu" and fold.hood.num_edges <= FEW_EDGES


def some_of(mask: Tensor, most: int) -> Tensor:
    """A mask of at most so many of its nodes, at random."""
    if int(mask.sum()) <= most:
        return mask
    return index_to_mask(shuffled(mask.nonzero()[:, 0])[:most], len(mask))


def shuffled(nodes: Tensor) -> Tensor:
    return nodes[torch.randperm(len(nodes), device=nodes.device)]


def fit_folds(
    formula: Formula, priors: Priors, copies: Sequence[tuple[GraphScores, Tensor]],
    options: FitOptions, agree: float,
) -> tuple[Tensor, Evidence | None]:  # fmt: skip
    """Fit values to held-out nodes, or a copy of the graph a fold; draws of them, and evidence."""
    part = torch.zeros(0, dtype=torch.long)
    if len(copies) == 1:
        data, out = copies[0]
        folds = [Fold.of(formula, data, part) for part in parts_of(out, options.num_folds)]
    else:
        every = [Fold.of(formula, data, out) for data, out in copies]
        part = torch.cat([torch.full_like(fold.y, k) for k, fold in enumerate(every)])
        folds = [side_by_side(every)]
    whole = formula
    if all(map(is_small, folds)):
        folds = [fold.cpu() for fold in folds]
        formula = formula.copied(folds[0].inputs)
        part = part.cpu()
    maximise(formula, priors, folds, options)
    draws = deviations(formula, priors, folds)
    with torch.no_grad():
        for name, value in whole.values.items():
            value.copy_(formula.values[name])
    fold, share = folds[0], formula.share
    if formula.temperature is None or len(folds) > 1 or int(fold.held_out.sum()) == 1:
        return draws, None
    if len(copies) == 1:
        fold = replace(fold, held_out=some_of(fold.held_out, MOST_LABELS)).small()
        nodes = shuffled(fold.held_out.nonzero()[:, 0])
        part = torch.full_like(fold.y, -1)
        part[nodes] = torch.arange(len(nodes), device=part.device) % FOLDS
    log_probs = held_out_log_probs(formula, priors, fold, part, options.refit_steps)
    if len(copies) > 1:
        share = expected_share(log_probs[NMM], log_probs[TEMPERED], agree)
    raw = [F.cross_entropy(d.scores[out], d.y[out], reduction="none") for d, out in copies]
    nll = {"classifier": torch.cat(raw).mean().item()}
    nll |= {name: -values.mean().item() for name, values in log_probs.items()}
    return draws, Evidence(nll, share)


def held_out_log_probs(
    formula: Formula, priors: Priors, fold: Fold, part: Tensor, num_steps: int
) -> dict[str, Tensor]:
    """``(n,)``: log-probabilities of held-out labels, by candidates refitted without them."""
    scaled, y, part = fold.inputs[0, fold.held_out], fold.y[fold.held_out], part[fold.held_out]
    by = {name: torch.empty_like(scaled[:, 0]) for name in (TEMPERED, POOL, NMM)}
    for k in part.unique().tolist():
        out = part == k
        tempered = scaled / bounded_temperature(scaled, y, ~out)
        by[TEMPERED][out] = entries_at(tempered.log_softmax(-1), y)[out]
        for name, log_probs in ((POOL, pool_log_probs), (NMM, label_log_probs)):
            again = refitted(formula, priors, fold, ~out, log_probs, num_steps)
            by[name][out] = again[out].nan_to_num(nan=-torch.inf)  # it may diverge
    return by


def refitted(
    formula: Formula, priors: Priors, fold: Fold, rows: Tensor,
    log_probs: Callable[[Formula, Fold], Tensor], num_steps: int,
) -> Tensor:  # fmt: skip
    """``(n,)``: log-probabilities of the held-out labels by a copy that is refitted to some."""
    again, number = formula.copied(fold.inputs), int(rows.sum())

    def loss() -> Tensor:
        likelihood = log_probs(again, fold)[rows].sum()
        return -(likelihood + priors.log_prob(again.values)) / number

    minimise(loss, again.values.values(), num_steps)
    with torch.no_grad():
        return log_probs(again, fold)


def pool_log_probs(formula: Formula, fold: Fold) -> Tensor:
    """``(n,)``: log-probabilities of the held-out labels, by the pool alone."""
    return entries_at(formula.probs(fold.inputs[:, fold.held_out]), fold.y[fold.held_out]).log()


def maximise(formula: Formula, priors: Priors, folds: list[Fold], options: FitOptions) -> None:
    """Fit the formula's values in steps, each on the next fold."""
    optimizer = torch.optim.Adam(formula.values.values(), lr=options.lr, betas=(0.9, 0.99))
    schedule = LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / options.num_steps))
    whole = sum(int(fold.held_out.sum()) for fold in folds)
    for step in options.progress(range(options.num_steps)):
        optimizer.zero_grad()
        fold = folds[step % len(folds)]
        parameters = formula(fold.hood, fold.inputs, fold.edge_weight)
        mixture = NeighborMixture(fold.hood, *parameters, validate_args=False)
        sets = [mask.nonzero()[:, 0] for mask in (fold.observed, fold.held_out)]
        order = torch.cat([shuffled(nodes) for nodes in sets])
        q = mixture.in_order(fold.y, fold.observed | fold.held_out, order)
        loss = -surrogate(q, len(sets[0]), options.num_samples) / len(sets[1])
        (loss - priors.log_prob(formula.values) / whole).backward()
        optimizer.step()
        schedule.step()
        if not priors.are_finite(formula.values):
            raise ValueError(f"lr={options.lr} is too large: the parameters are no longer finite")


def surrogate(q: OrderedConditional, num_given: int, num_samples: int) -> Tensor:
    r"""A number with the gradient of :math:`E_q \sum_i f_i` over the nodes after ``num_given``."""
    choices = q.sample(Size([num_samples]))
    bound = q.log_terms(choices)[:, num_given:].sum(-1)
    others = (bound.sum() - bound) / (num_samples - 1)
    return (bound + q.log_prob(choices) * (bound - others).detach()).mean()


def label_log_probs(formula: Formula, fold: Fold) -> Tensor:
    """``(n,)``: of each held-out label alone, by the NMM. Cost: linear in the edges into them."""
    rows = fold.hood.restrict(fold.held_out)
    weight = None if fold.edge_weight is None else fold.edge_weight[rows.edge]
    return row_log_probs(formula, rows, fold.inputs, weight, fold.y[rows.nodes])


def row_log_probs(
    formula: Formula, rows: Neighborhood, inputs: Tensor, weight: Tensor | None, y: Tensor
) -> Tensor:
    """``(n,)``: of labels of some rows, of the inputs of all nodes."""
    probs = formula.probs(inputs)
    logits, *relabel = formula.attention(rows, probs, weight)
    alpha, attention = formula.alpha(probs), rows.softmax(logits)
    if relabel:
        return entries_at(node_marginals(rows, alpha, attention, Channel(relabel[0])), y).log()
    return node_log_probs(rows, alpha, attention, y)


def agreement(data: GraphScores) -> float:
    """How often labelled neighbours agree, from chance (0) to always (1), shrunk by ten pairs."""
    hood, labels = data.hood, data.y[data.known]
    pairs = (hood.source != hood.target) & data.known[hood.target]
    source, target = hood.source[pairs], hood.target[pairs]
    inside = data.known[source]
    same = data.y[source[inside]] == data.y[target[inside]]
    chance = labels.bincount().div(len(labels)).square().sum().item()
    excess = (same.double() - chance).sum().item() / 2  # an undirected pair counts once
    return max(excess, 0.0) / (len(same) / 2 + PAIRS) / (1 - chance) if chance < 1 else 0.0


def silence(probs: Tensor, y: Tensor, out: Tensor) -> float:
    """:math:`\\zeta` of :class:`PooledScores`: 1 if label probabilities ``(N, C)`` say nothing."""
    gain = entries_at((probs / probs.mean(0))[out], y[out]).log().sum().item()
    return math.exp(-gain) if gain > 1e-4 else 1.0  # not at the level of rounding


def expected_share(nmm: Tensor, tempered: Tensor, agree: float) -> float:
    r"""Posterior mean of the weight :math:`w` of a linear pool with cross-validated weights (Yao et
    al. 2018, "Using Stacking to Average Bayesian Predictive Distributions", Bayesian Analysis 13),

    .. math::

        p(w) \propto w^{5 h} (1 - w)^{5 (1 - h)}
            \prod_i \left( w \, p_{-k(i)}(y_i) + (1 - w) \, t_{-k(i)}(y_i) \right)

    over the held-out labels. :math:`p_{-k}` are the marginals of an NMM and :math:`t_{-k}`
    temperature scaling, both refitted without the fold :math:`k` of the label. The prior counts as
    five labels, of which the NMM explains the share :math:`h`, the agreement of neighbours; more
    where scores say nothing. It was chosen on tables that are not reported
    (``benchmarks/tabular/README.md``).
    """
    share = (torch.arange(200).double() + 0.5) / 200
    pair = torch.stack([nmm, tempered]).double().cpu()[..., None]
    pair = pair + torch.stack([share, 1 - share])[:, None].log()
    prior = LABELS * (agree * share.log() + (1 - agree) * (1 - share).log())
    return float(((pair.logsumexp(0).sum(0) + prior).softmax(0) * share).sum())


def deviations(
    formula: Formula, priors: Priors, folds: list[Fold], number: int = NUM_DRAWS
) -> Tensor:
    r"""``(number, d)``: draws of the parameters minus the fitted ones, by the first step of a refit
    to labels with weights :math:`1 + \xi_{bi}` (Newton and Raftery 1994, "Approximate Bayesian
    Inference with the Weighted Likelihood Bootstrap", Journal of the RSS B 56),

    .. math::

        \theta_b - \hat\theta = H^{-1} \sum_i \xi_{bi} \, g_i, \qquad
        H = \Lambda + \sum_i g_i g_i^\top, \qquad \xi_{bi} \sim \mathcal{N}(0, 1)

    where :math:`g_i` is the gradient of the log-probability of held-out label ``i``, and
    :math:`\Lambda` the precision of the prior. Every second draw has the opposite deviation, so
    that their mean is the fit. Cost: :math:`O(E_\tau C)`.
    """
    gradients = torch.cat([label_gradients(formula, fold) for fold in folds])
    hessian = gradients.T @ gradients + priors.precision(formula.values).to(gradients).diag()
    scores = torch.randn(number // 2, len(gradients)).to(gradients) @ gradients
    half = torch.linalg.solve(hessian, scores.T).T
    return torch.stack([half, -half], 1).flatten(0, 1).to(folds[0].inputs)


@torch.enable_grad()
def label_gradients(formula: Formula, fold: Fold) -> Tensor:
    """``(n, d)``: of log-probabilities of held-out labels towards the parameters, in double."""
    # Each label has a copy of the parameters, and each edge one of the inputs of its source, so
    # that one backward pass has the gradients of all labels.
    rows, numbers = fold.hood.restrict(fold.held_out), formula.numbers().double()
    gradients: list[Tensor] = []
    for block in row_blocks(rows.ptr, 16 * fold.inputs.shape[-1]):  # sixteen tables of the edges
        part = rows.take(torch.arange(block.start, block.stop, device=rows.device))
        place = torch.arange(part.num_edges, device=rows.device)
        stars = Neighborhood.of_rows(len(place), place[part.source == part.target], part.ptr, place)
        own = numbers.repeat(part.num_rows, 1).requires_grad_()
        each = formula.with_values(own.index_select(0, part.row))
        inputs = fold.inputs.index_select(-2, part.source).double()
        weight = None if fold.edge_weight is None else fold.edge_weight[part.edge]
        log_probs = row_log_probs(each, stars, inputs, weight, fold.y[part.nodes])
        gradients += torch.autograd.grad(log_probs.sum(), own)
    return torch.cat(gradients).nan_to_num(0.0, 0.0, 0.0)  # of a label without a probability
