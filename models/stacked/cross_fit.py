# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Folds side by side, and the share of the NMM beside temperature scaling that they support."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models.stacked.fit import (
    FitOptions,
    Fold,
    bounded_temperature,
    fold_of,
    folds_of,
    maximise,
)
from pyro_nmm.models.stacked.formula import Formula
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.parameters import ParameterPriors

#: Candidates of the labels' probabilities.
TEMPERED, NMM = "temperature scaling", "NMM"
#: Pairs of neighbours that shrink their agreement, and labels that the prior of a share counts as.
PAIRS, LABELS = 10, 5
#: Steps of LBFGS in a refit, which begins at the parameters of the whole fit.
REFIT_STEPS = 20


@dataclass(frozen=True)
class Evidence:
    """How probable each candidate finds held-out labels, and the share of the NMM that follows."""

    nll: dict[str, float]  #: mean negative log-likelihood of the labels, by candidate
    share: float

    def __str__(self) -> str:
        lowest = min(self.nll, key=lambda name: self.nll[name])
        lines = [f"{name:24}{value:8.3f}{'  lowest' * (name == lowest)}"
                 for name, value in self.nll.items()]  # fmt: skip
        return "\n".join(["held-out NLL", *lines, f"{'share of the NMM':24}{self.share:8.3f}"])


def fit_copies(
    stacked: Any, parameters: ParameterPriors, copies: list[tuple[GraphScores, Tensor]],
    options: FitOptions,
) -> Evidence | None:  # fmt: skip
    """
    Fit the parameters to a graph's held-out nodes, or to one copy of the graph for each fold of the
    labels. With folds and a pool, set the share of the NMM and return the evidence for it.
    """
    formula, (data, held_out) = stacked.formula, copies[0]
    if len(copies) == 1:
        maximise(formula, parameters, folds_of(formula, data, held_out, options.num_folds), options)
        return None
    union, part = side_by_side([fold_of(formula, *each) for each in copies])
    maximise(formula, parameters, [union], options)
    if stacked.pool is None:
        return None
    evidence = evidence_of_folds(stacked, parameters, union, part, agreement(data))
    stacked.share.fill_(evidence.share)
    return evidence


def side_by_side(folds: Sequence[Fold]) -> tuple[Fold, Tensor]:
    """
    The disjoint union of the graphs of some folds, and the fold of each of its nodes. Sources that
    are no nodes follow all nodes. Cost: linear in the graphs of the folds.
    """
    hoods = [fold.hood for fold in folds]
    num_nodes, sources, ptr = sum(hood.num_nodes for hood in hoods), [], []
    nodes = edges = 0
    others = num_nodes
    for hood in hoods:
        own = hood.source < hood.num_nodes
        sources.append(hood.source + torch.where(own, nodes, others - hood.num_nodes))
        ptr.append(hood.ptr[:-1] + edges)
        nodes, edges = nodes + hood.num_nodes, edges + hood.num_edges
        others += hood.num_sources - hood.num_nodes
    first = hoods[0]
    union = Neighborhood.of_rows(
        num_nodes, torch.arange(num_nodes, device=first.device),
        torch.cat([*ptr, first.ptr.new_tensor([edges])]), torch.cat(sources),
        num_sources=others if first.bipartite else None,
    )  # fmt: skip
    weights = [fold.edge_weight for fold in folds if fold.edge_weight is not None]
    part = torch.cat([torch.full_like(fold.y, k) for k, fold in enumerate(folds)])
    y, given, out = (torch.cat([getattr(f, n) for f in folds]) for n in ("y", "given", "held_out"))
    inputs = torch.cat([fold.inputs for fold in folds], -2)
    return Fold(union, inputs, torch.cat(weights) if weights else None, y, given, out), part


def evidence_of_folds(
    stacked: Any, parameters: ParameterPriors, fold: Fold, part: Tensor, agree: float
) -> Evidence:
    """
    Evidence of labels that a candidate has not seen.

    :param Tensor part: ``(N,)`` fold of each node of ``fold``.
    :param float agree: the :func:`agreement` of neighbours.
    """
    found = held_out_log_probs(stacked, parameters, fold, part)
    nll = {name: -values.mean().item() for name, values in found.items()}
    return Evidence(nll, expected_share(found[NMM], found[TEMPERED], agree))


def held_out_log_probs(
    stacked: Any, parameters: ParameterPriors, fold: Fold, part: Tensor
) -> dict[str, Tensor]:
    """
    Log-probability ``(n,)`` of each held-out label by the classifier's own scores, by temperature
    scaling and by the NMM. The last two are refitted without the label's fold. A refit that
    diverges gives its labels no probability.
    """
    scaled, truth = fold.inputs[0], fold.y[:, None].clamp(min=0)
    raw = scaled * stacked.pool.temperature
    found = {"classifier": raw.log_softmax(-1).gather(1, truth)[:, 0]}
    nmm, tempered = torch.zeros_like(scaled[:, 0]), torch.zeros_like(scaled[:, 0])
    for k in part.unique().tolist():
        out, rest = fold.held_out & (part == k), fold.held_out & (part != k)
        temperature = bounded_temperature(scaled, fold.y, rest)
        probs = refitted(stacked, parameters, fold, rest)
        nmm[out] = probs.gather(1, truth)[out, 0].log().nan_to_num(nan=-torch.inf)
        tempered[out] = (scaled / temperature).log_softmax(-1).gather(1, truth)[out, 0]
    found |= {TEMPERED: tempered, NMM: nmm}
    return {name: values[fold.held_out] for name, values in found.items()}


def agreement(data: GraphScores) -> float:
    """
    How often labelled neighbours agree, from chance (0) to always (1), shrunk towards chance as if
    ten further pairs agreed as often as by chance.
    """
    hood, labels = data.hood, data.y[data.known]
    pairs = (hood.source < hood.num_nodes) & (hood.source != hood.target) & data.known[hood.target]
    source, target = hood.source[pairs], hood.target[pairs]
    inside = data.known[source]
    same = data.y[source[inside]] == data.y[target[inside]]
    chance = labels.bincount().div(len(labels)).square().sum().item()
    excess = (same.double() - chance).sum().item() / 2  # an undirected pair counts once
    return max(excess, 0.0) / (len(same) / 2 + PAIRS) / (1 - chance) if chance < 1 else 0.0


def expected_share(nmm: Tensor, tempered: Tensor, agree: float) -> float:
    r"""
    Posterior mean of the weight :math:`w` of a linear pool with cross-validated weights [1],

    .. math::

        p(w) \propto w^{5 h} (1 - w)^{5 (1 - h)}
            \prod_i \left( w \, p_{-k(i)}(y_i) + (1 - w) \, t_{-k(i)}(y_i) \right)

    over the held-out labels. :math:`p_{-k}` are the marginals of an NMM and :math:`t_{-k}`
    temperature scaling, both refitted without the fold :math:`k` of the label. The prior counts as
    five labels, of which the NMM explains the share :math:`h`, the agreement of neighbours. It was
    chosen on tables that are not reported (``benchmarks/tabular/README.md``).

    [1] Yuling Yao et al. (2018) "Using Stacking to Average Bayesian Predictive Distributions",
    Bayesian Analysis 13, https://doi.org/10.1214/17-BA1091.

    :param Tensor nmm: ``(n,)`` log-probabilities of the labels, as ``tempered``.
    """
    share = (torch.arange(200).double() + 0.5) / 200
    pair = torch.stack([nmm, tempered]).double().cpu()[..., None]
    pair = pair + torch.stack([share, 1 - share])[:, None].log()
    prior = LABELS * (agree * share.log() + (1 - agree) * (1 - share).log())
    return float(((pair.logsumexp(0).sum(0) + prior).softmax(0) * share).sum())


def refitted(stacked: nn.Module, parameters: ParameterPriors, fold: Fold, rows: Tensor) -> Tensor:
    """``(N, C)``: marginals of an NMM that is refitted to the marginals of some labels."""
    again, y = copy.deepcopy(stacked), fold.y[rows, None]
    own = parameters.of(again)
    optimizer = torch.optim.LBFGS(own.values, max_iter=REFIT_STEPS, line_search_fn="strong_wolfe")

    def marginals() -> Tensor:
        formula: Formula = again.formula
        found = formula(fold.hood, fold.inputs, fold.edge_weight)
        return NeighborMixture(fold.hood, *found, validate_args=False).marginals()

    def closure():
        optimizer.zero_grad()
        likelihood = marginals()[rows].gather(1, y).log().sum()
        loss = -(likelihood + own.log_prior()) / len(y)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return marginals()
