# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: steps, uncertain parameters, and evidence of held-out labels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.arguments import Array, NodeSet, as_labels, as_set
from pyro_nmm.blocks import row_blocks
from pyro_nmm.fitting import Steps, minimise, with_gradients
from pyro_nmm.models.stacked.formula import Formula
from pyro_nmm.models.stacked.table import GraphScores, as_scores, side_by_side
from pyro_nmm.ops.marginals import node_marginals
from pyro_nmm.relabel import KEEP, Channel, entries_at

#: Candidates of the labels' probabilities.
TEMPERED, POOL, NMM = "temperature scaling", "pool", "NMM"
#: Folds of held-out nodes for the evidence of a fit without folds of its own, the most nodes for
#: it, and steps of each refit.
FOLDS, MOST_LABELS, REFIT_STEPS = 5, 2_000, 20
#: Adam's rate, and draws of the bound in a step.
RATE, NUM_SAMPLES = 0.1, 8
#: Pairs of neighbours that shrink their agreement, and labels that priors of shares count as.
PAIRS, LABELS = 10, 5
#: Edges of a fold up to which a fit on a device runs on the processor, because each of its many
#: small calls costs a device more. Times of docs/results/speed.md cross near it.
FEW_EDGES = 50_000
#: Draws of the parameters, in pairs of opposite deviations from the fit.
NUM_DRAWS = 16


@with_gradients
def temperature_scaling(scores: Array, y: Array, held_out: NodeSet) -> float:
    r"""Temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural Networks",
    ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    >>> scores, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> temperature = temperature_scaling(scores, y, held_out=torch.ones(4, dtype=torch.bool))
    >>> (scores[0] / temperature).softmax(0).round(decimals=2)  # right in three of four cases
    tensor([0.7500, 0.2500])

    :param Tensor scores: ``(N, C)`` finite logits, with labels ``y``, ``(N,)``.
    :param Tensor held_out: mask ``(N,)`` or ``n`` node ids. Cost: :math:`O(n C)` a step of LBFGS.
    :raises ValueError: for scores that are not finite, wrong held-out labels, and an empty set.
    """
    scores = as_scores(scores, None).detach()
    held_out = as_set(held_out, len(scores), scores.device, "held_out")
    y = as_labels("y", y, held_out, scores.shape[1], "held_out")
    log_scale = scores.new_zeros(()).requires_grad_()
    kept, labels = scores[held_out], y[held_out]
    minimise(lambda: F.cross_entropy(kept * log_scale.exp(), labels), [log_scale], 100)
    return (-log_scale).exp().item()


def bounded_temperature(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    """:func:`temperature_scaling` between .05 and 20 standard deviations of the scores."""
    # Few held-out nodes may all be predicted rightly, and would have a temperature of zero.
    scores = scores - scores.mean(1, keepdim=True)  # what all labels of a row share says nothing
    unit = scores.std()
    if scores.std(0).max() <= 1e-6 * unit:
        return 1.0  # all nodes have the same scores
    temperature = temperature_scaling(scores / unit, y, held_out)
    return unit.item() * min(max(temperature, 0.05), 20.0)


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
    copy: Tensor  #: number of the graph of each node, where several are side by side

    @classmethod
    def of(cls, formula: Formula, data: GraphScores, out: Tensor, copy: int = 0) -> "Fold":
        """Some known labels, held out, given the others."""
        data = replace(data, known=data.known & ~out, evidence=data.evidence & ~out)
        inputs, observed = formula.inputs(data), data.evidence
        rows = data.hood.restrict(observed | out)
        kept = rows.source.unique()
        # Nodes without a label here keep the edge from themselves only.
        ends = torch.searchsorted(kept, torch.stack([rows.source, rows.target]))
        labels = data.y[kept], observed[kept], out[kept], torch.full_like(kept, copy)
        return cls(Neighborhood(ends, len(kept)), inputs[..., kept, :], *labels)

    @classmethod
    def of_copies(
        cls, formula: Formula, copies: Sequence[tuple[GraphScores, Tensor]]
    ) -> tuple["Fold", list[Tensor]]:
        """Held-out nodes of copies of a graph, side by side, and masks of them for each copy. It is
        on the processor if a fit is faster there."""
        fold = side_by_side([cls.of(formula, *each, k) for k, each in enumerate(copies)])
        if fold.hood.device.type != "cpu" and fold.hood.num_edges <= FEW_EDGES:
            fold = cls(**{name: value.to("cpu") for name, value in vars(fold).items()})
        return fold, [fold.held_out & (fold.copy == k) for k in range(len(copies))]


def parts_of(mask: Tensor, number: int) -> list[Tensor]:
    """Masks of parts of equal size, at random."""
    nodes = shuffled(mask.nonzero()[:, 0])
    parts = (nodes[k::number] for k in range(min(number, len(nodes))))
    return [torch.zeros_like(mask).index_fill(0, part, True) for part in parts]


def some_of(mask: Tensor, most: int) -> Tensor:
    """A mask of at most so many of its nodes, at random."""
    if int(mask.sum()) <= most:
        return mask
    return torch.zeros_like(mask).index_fill(0, shuffled(mask.nonzero()[:, 0])[:most], True)


def shuffled(nodes: Tensor) -> Tensor:
    return nodes[torch.randperm(len(nodes), device=nodes.device)]


def maximise(formula: Formula, prior: Normal, fold: Fold, steps: Steps) -> Tensor:
    """``(d,)``: the formula's values, fitted by steps from its own."""
    numbers = nn.Parameter(formula.numbers().to(fold.inputs))
    given, out = (mask.nonzero()[:, 0] for mask in (fold.observed, fold.held_out))

    def backward(step: int) -> float:
        parameters = formula.with_values(numbers)(fold.hood, fold.inputs)
        mixture = NeighborMixture(fold.hood, *parameters, validate_args=False)
        order = torch.cat([shuffled(given), shuffled(out)])
        q = mixture.in_order(fold.y, fold.observed | fold.held_out, order)
        value = surrogate(q, len(given), NUM_SAMPLES) + prior.log_prob(numbers).sum()
        loss = -value / len(out)
        loss.backward()
        return loss.item()

    def rate(step: int) -> float:
        return min(1, 2 - 2 * step / steps.num_steps)

    optimizer = torch.optim.Adam([numbers], lr=steps.lr, betas=(0.9, 0.99))
    steps.train(nn.ParameterList([numbers]), optimizer, backward, rate)
    return numbers.detach()


def surrogate(q: OrderedConditional, num_given: int, num_samples: int) -> Tensor:
    r"""A number with the gradient of :math:`E_q \sum_i f_i` over the nodes after ``num_given``."""
    choices = q.sample(Size([num_samples]))
    bound = q.log_terms(choices)[:, num_given:].sum(-1)
    others = (bound.sum() - bound) / (num_samples - 1)
    return (bound + q.log_prob(choices) * (bound - others).detach()).mean()


def evidence_of(
    formula: Formula, prior: Normal, fold: Fold, parts: Sequence[Tensor], agree: float
) -> tuple[dict[str, float], float]:
    """Mean negative log-likelihoods of held-out labels, by candidates that are refitted without
    their part, and the NMM's share if there are parts.
    """
    several = len(parts) > 1
    if not several:
        fold = replace(fold, held_out=some_of(fold.held_out, MOST_LABELS))
        parts = parts_of(fold.held_out, FOLDS)
    scaled, y = fold.inputs[0, fold.held_out], fold.y[fold.held_out]
    rows = fold.hood.restrict(fold.held_out)

    def by_pool(candidate: Formula) -> Tensor:
        return entries_at(candidate.probs(fold.inputs[:, fold.held_out]), y).log()

    def by_nmm(candidate: Formula) -> Tensor:
        return label_log_probs(candidate, rows, fold.inputs, y)

    def refitted(log_probs: Callable[[Formula], Tensor], some: Tensor) -> Tensor:
        """Of all labels, by values that are refitted to some."""
        numbers, size = formula.numbers().requires_grad_(), int(some.sum())

        def loss() -> Tensor:
            likelihood = log_probs(formula.with_values(numbers))[some].sum()
            return -(likelihood + prior.log_prob(numbers).sum()) / size

        minimise(loss, [numbers], REFIT_STEPS)
        found = log_probs(formula.with_values(numbers.detach()))
        return found.nan_to_num(nan=-torch.inf)  # it may diverge

    by = {name: torch.empty_like(scaled[:, 0]) for name in (TEMPERED, POOL, NMM)}
    for part in parts:
        out = part[fold.held_out]
        tempered = scaled / bounded_temperature(scaled, y, ~out)
        by[TEMPERED][out] = entries_at(tempered.log_softmax(-1), y)[out]
        by[POOL][out] = refitted(by_pool, ~out)[out]
        by[NMM][out] = refitted(by_nmm, ~out)[out]
    share = expected_share(by[NMM], by[TEMPERED], agree) if several else 1.0
    return {name: -values.mean().item() for name, values in by.items()}, share


def label_log_probs(formula: Formula, rows: Neighborhood, inputs: Tensor, y: Tensor) -> Tensor:
    """``(n,)``: of each label of some rows alone, by the NMM, of the inputs of all nodes."""
    alpha, logits, *relabel = formula(rows, inputs)
    channel = Channel(relabel[0]) if relabel else KEEP
    return entries_at(node_marginals(rows, alpha, rows.softmax(logits), channel), y).log()


def agreement(data: GraphScores) -> float:
    """How often labelled neighbours agree, from chance (0) to always (1), shrunk by ten pairs."""
    hood, known = data.hood, data.known | data.evidence
    pairs = known[hood.source] & known[hood.target] & (hood.source != hood.target)
    same = data.y[hood.source[pairs]] == data.y[hood.target[pairs]]
    chance = data.y[known].bincount().div(known.sum()).square().sum().item()
    excess = (same.double() - chance).sum().item() / 2  # an undirected pair counts once
    return max(excess, 0.0) / (len(same) / 2 + PAIRS) / (1 - chance) if chance < 1 else 0.0


def silence(probs: Tensor, y: Tensor, out: Tensor) -> float:
    """:math:`\\zeta` of :class:`PooledScores`: 1 if label probabilities ``(N, C)`` say nothing."""
    gain = entries_at((probs / probs.mean(0))[out], y[out]).log().sum().item()
    return math.exp(-gain) if gain > 1e-4 else 1.0  # not at the level of rounding


def expected_share(nmm: Tensor, tempered: Tensor, agree: float) -> float:
    """Posterior mean of the weight of a linear pool (Yao et al. 2018, "Using Stacking to Average
    Bayesian Predictive Distributions", Bayesian Analysis 13), from log-probabilities of held-out
    labels without their fold. The prior counts as five labels, of which the NMM explains the share
    ``agree``. It was chosen on tables that are not reported (``benchmarks/tabular/README.md``).
    """
    share = (torch.arange(200).double() + 0.5) / 200
    pair = torch.stack([nmm, tempered]).double().cpu()[..., None]
    pair = pair + torch.stack([share, 1 - share])[:, None].log()
    prior = LABELS * (agree * share.log() + (1 - agree) * (1 - share).log())
    return float(((pair.logsumexp(0).sum(0) + prior).softmax(0) * share).sum())


def deviations(formula: Formula, prior: Normal, fold: Fold, number: int = NUM_DRAWS) -> Tensor:
    r"""``(number, d)``: draws of the parameters minus the fitted ones, by the first step of a refit
    to labels with weights :math:`1 + \xi_{bi}` (Newton and Raftery 1994, "Approximate Bayesian
    Inference with the Weighted Likelihood Bootstrap", Journal of the RSS B 56): :math:`H^{-1}
    \sum_i \xi_{bi} g_i`, with gradients :math:`g_i` of labels, the prior's precision
    :math:`\Lambda` and :math:`H = \Lambda + \sum_i g_i g_i^\top`. Pairs are opposite.
    """
    gradients = label_gradients(formula, fold)
    hessian = gradients.T @ gradients + prior.variance.double().reciprocal().diag()
    scores = torch.randn(number // 2, len(gradients)).to(gradients) @ gradients
    half = torch.linalg.solve(hessian, scores.T).T
    return torch.stack([half, -half], 1).flatten(0, 1).to(fold.inputs)


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
        log_probs = label_log_probs(each, stars, inputs, fold.y[part.nodes])
        gradients += torch.autograd.grad(log_probs.sum(), own)
    return torch.cat(gradients).nan_to_num(0.0, 0.0, 0.0)  # of a label without a probability
