# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Folds side by side, the evidence of their labels, and the share of the NMM that it supports."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.models.stacked.fit import (
    FitOptions,
    Fold,
    bounded_temperature,
    fold_of,
    folds_of,
    label_log_probs,
    maximise,
    shuffled,
    some_of,
)
from pyro_nmm.models.stacked.inputs import GraphScores, warn_of_one_way, warn_of_probabilities
from pyro_nmm.models.stacked.parameters import ParameterPriors
from pyro_nmm.models.stacked.uncertainty import deviations
from pyro_nmm.relabel import taken

#: Candidates of the labels' probabilities.
TEMPERED, POOL, NMM = "temperature scaling", "pool", "NMM"
#: Folds of held-out nodes for the evidence of a fit without folds of its own, and the most nodes.
FOLDS, MOST_LABELS = 5, 2_000
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
        shares = [f"{'share of the NMM':24}{self.share:8.3f}"] if self.share < 1 else []
        return "\n".join(["held-out NLL", *lines, *shares])


def fit_copies(
    stacked: Any, copies: Sequence[tuple[GraphScores, Tensor]], options: FitOptions,
    afresh: bool = True,
) -> Any:  # fmt: skip
    """
    Fit a module to a graph's held-out nodes, or to one copy of the graph for each fold of the
    labels, and return it, with the deviations of its parameters, and with a pool the evidence of
    labels that no fit has seen. An error leaves it as it was.
    """
    copies = [(replace(data, scores=data.scores.detach()), out) for data, out in copies]
    scores, y = (torch.cat([getattr(d, name) for d, _ in copies]) for name in ("scores", "y"))
    warn_of_probabilities(scores)
    warn_of_one_way(copies[0][0].hood)
    temperature = bounded_temperature(scores, y, torch.cat([out for _, out in copies]))
    changed, agree = copy.deepcopy(stacked).to(scores), agreement(copies[0][0])
    parameters = ParameterPriors(changed, stacked.declared, stacked.prior, temperature, agree)
    if afresh:
        parameters.start()
        if changed.pool is not None:
            changed.share.fill_(1.0)
            changed.pool.temperature.fill_(temperature)
    changed.updated.fill_(not afresh)
    evidence = fit_folds(changed, parameters, copies, options, agree)
    stacked.to(scores).load_state_dict(changed.state_dict())
    stacked.evidence = evidence
    return stacked


def fit_folds(
    stacked: Any, parameters: ParameterPriors, copies: Sequence[tuple[GraphScores, Tensor]],
    options: FitOptions, agree: float,
) -> Evidence | None:  # fmt: skip
    """Fit parameters, their deviations and, to several copies, the share of the NMM."""
    if len(copies) == 1:
        folds = folds_of(stacked.formula, *copies[0], options.num_folds)
    else:
        union, part = side_by_side([fold_of(stacked.formula, *each) for each in copies])
        folds = [union]
    maximise(stacked.formula, parameters, folds, options)
    stacked.deviations.copy_(deviations(stacked, parameters, folds))
    if stacked.pool is None or len(folds) > 1 or int(folds[0].held_out.sum()) == 1:
        return None
    fold = folds[0]
    if len(copies) == 1:
        fold = replace(fold, held_out=some_of(fold.held_out, MOST_LABELS)).small()
        nodes = shuffled(fold.held_out.nonzero()[:, 0])
        part = torch.full_like(fold.y, -1)
        part[nodes] = torch.arange(len(nodes), device=part.device) % FOLDS
    found = held_out_log_probs(stacked, parameters, fold, part)
    if len(copies) > 1:
        stacked.share.fill_(expected_share(found[NMM], found[TEMPERED], agree))
    nll = {name: -values.mean().item() for name, values in found.items()}
    return Evidence(nll, stacked.share.item())


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


def held_out_log_probs(
    stacked: Any, parameters: ParameterPriors, fold: Fold, part: Tensor
) -> dict[str, Tensor]:
    """
    Log-probability ``(n,)`` of each held-out label by the classifier's own scores, by temperature
    scaling, by the pool and by the NMM. The last three are refitted without the label's part
    ``(N,)`` of the fold. A refit that diverges gives its labels no probability.
    """
    scaled, y, part = fold.inputs[0, fold.held_out], fold.y[fold.held_out], part[fold.held_out]
    raw = taken((scaled * stacked.pool.temperature).log_softmax(-1), y)
    found = {"classifier": raw} | {name: torch.empty_like(raw) for name in (TEMPERED, POOL, NMM)}
    for k in part.unique().tolist():
        out = part == k
        tempered = scaled / bounded_temperature(scaled, y, ~out)
        found[TEMPERED][out] = taken(tempered.log_softmax(-1), y)[out]
        for name, log_probs in ((POOL, pooled), (NMM, label_log_probs)):
            again = refitted(stacked, parameters, fold, ~out, log_probs)
            found[name][out] = again[out].nan_to_num(nan=-torch.inf)
    return found


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


def pooled(stacked: Any, fold: Fold) -> Tensor:
    """``(n,)``: log-probabilities of the held-out labels, by the pool alone."""
    return taken(stacked.pool(fold.inputs[:, fold.held_out]), fold.y[fold.held_out]).log()


def refitted(
    stacked: nn.Module, parameters: ParameterPriors, fold: Fold, rows: Tensor,
    log_probs: Callable[[Any, Fold], Tensor],
) -> Tensor:  # fmt: skip
    """``(n,)``: log-probabilities of the held-out labels by a copy that is refitted to some."""
    again, number = copy.deepcopy(stacked), int(rows.sum())
    own = parameters.of(again)
    optimizer = torch.optim.LBFGS(own.values, max_iter=REFIT_STEPS, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        likelihood = log_probs(again, fold)[rows].sum()
        loss = -(likelihood + own.log_prior()) / number
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return log_probs(again, fold)
