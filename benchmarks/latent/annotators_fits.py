# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Consensus of noisy labels by other methods, and how a consensus is scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import mean

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.nn import GCNConv
from torch_geometric.utils import degree
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.latent.annotators_data import Section
from benchmarks.latent.annotators_potts import Found, Potts
from benchmarks.shared.timing import timed as timed_by
from pyro_nmm.metrics import brier, mean_log_prob
from pyro_nmm.models import Annotators, leave_one_out
from pyro_nmm.models.latent.mixture_em import mixture_em

#: Log scores take probabilities below these for these.
FLOOR = 1e-12
#: Seconds are of this process, as others share the machine.
timed = partial(timed_by, clock=time.process_time)


def majority(answers: Tensor, num_labels: int) -> Found:
    """Shares of the votes; of a node without any, equal shares."""
    votes = torch.stack([(answers == k).sum(1) for k in range(num_labels)], 1).double()
    votes = torch.where(votes.sum(1, keepdim=True) > 0, votes, 1.0)
    return Found(votes / votes.sum(1, keepdim=True), {})


def renamed(answers: Tensor) -> Tensor:
    """
    Clusterings with their labels renamed to those of the first one that they overlap with most, by
    the Hungarian method.
    """
    size, first = int(answers.max()) + 1, answers[:, 0]
    columns = []
    for column in answers.unbind(1):
        both = (column >= 0) & (first >= 0)
        counts = (column[both] * size + first[both]).bincount(minlength=size**2).view(size, size)
        name = torch.tensor(linear_sum_assignment(counts, maximize=True)[1])
        columns.append(torch.where(column < 0, -1, name[column.clamp(min=0)]))
    return torch.stack(columns, 1)


def dawid_skene(emission: Annotators, answers: Tensor, num_starts: int) -> tuple[Found, dict]:
    """The best of several random starts by its likelihood, and the fitted parameters."""
    best, found = -torch.inf, None
    for _ in range(num_starts):
        values, probs = mixture_em(emission, answers, emission.start(answers, None))
        share = (probs.sum(0) + 1) / (len(probs) + emission.num_labels)
        score = (emission.log_prob(values, answers) + share.log()).logsumexp(-1).mean().item()
        if score > best:
            best, found = score, (values, probs)
    values, probs = found
    return Found(probs, {"left out": best}), values


def spread_labels(start: Found, edge_index: Tensor, alpha: float = 0.8) -> Found:
    """
    Label spreading with a random walk's weights, so that probabilities stay such: ``alpha`` times
    the neighbours' mean and the rest of one's own, until it changes no more.
    """
    own = probs = start.probs.float()
    number = degree(edge_index[1], len(own))
    alpha = alpha * (number > 0).to(own)[:, None]
    for _ in range(50):
        around = torch.zeros_like(own).index_add_(0, edge_index[1], probs[edge_index[0]])
        probs = alpha * around / number.clamp(min=1)[:, None] + (1 - alpha) * own
    return Found(probs, start.settings)


def rivals(
    emission: Annotators, answers: Tensor, edge_index: Tensor, num_starts: int
) -> Iterator[tuple[str, Found, float]]:
    """Dawid-Skene and what follows it: names, their consensus, and seconds with Dawid-Skene's."""
    (start, values), before = timed(dawid_skene, emission, answers, num_starts)
    yield "Dawid-Skene", start, before
    field = Potts(emission, answers, edge_index)
    later = {
        "label spreading": partial(spread_labels, start, edge_index),
        "Potts, mean field": partial(field.mean_field, start.probs, values),
        "Potts, Gibbs": partial(field.gibbs, start.probs, values),
    }
    for name, fit in later.items():
        found, seconds = timed(fit)
        yield name, found, before + seconds


def typed_rivals(
    emission: Annotators, data: Section, num_starts: int
) -> Iterator[tuple[str, Found, float]]:
    """
    Potts fields of annotators that err together, which without a graph say nothing of labels. Each
    starts where our own fit does, at its sources, and the start that predicts best what is left
    out is kept.
    """
    field = Potts(emission, data.answers, data.edge_index)

    def best(fit: Callable) -> Found:
        found = []
        for _ in range(num_starts):
            values = emission.start(data.answers, data.hood)
            found.append(fit(emission.log_prob(values, data.answers).softmax(-1), values))
        return max(found, key=lambda found: found.settings["left out"])

    for name, fit in {"Potts, mean field": field.mean_field, "Potts, Gibbs": field.gibbs}.items():
        yield f"{name}, types", *timed(best, fit)


def found_by(emission: Annotators, choice: Iterable, answers: Tensor, options: dict) -> Found:
    """What our fits found on average, one for each neighbourhood and its features of edges."""
    fields = [emission.fit(hood, answers, edge_attr, **options) for hood, edge_attr in choice]
    columns = {
        "score": [field.score for field in fields],
        "left out": [leave_one_out(field, answers).mean().item() for field in fields],
        "kappa": [field.prior.log_kappa.exp().item() for field in fields],
        "weight": [weight for field in fields for weight in field.prior.weight.tolist()],
        "Gelman-Rubin": [
            field.chains.gelman_rubin().nan_to_num(1).max().item() for field in fields
        ],
    }
    means = {name: mean(values) for name, values in columns.items() if values}
    return Found(torch.stack([field.probs for field in fields]).mean(0), means)


class GCN(torch.nn.Module):
    def __init__(self, num_features: int, num_labels: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(num_features, 16), GCNConv(16, num_labels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = torch.dropout(self.first(x, edge_index).relu(), 0.5, self.training)
        return self.second(hidden, edge_index)


def gcn(data, votes: Found, num_labels: int, num_epochs: int) -> Found:
    """
    Trained on the majority of the votes, as nobody knows the labels. Nodes are halved at random,
    and each half is predicted by the GCN trained on the other, so that it repeats no vote.
    """
    half, probs = torch.randint(2, (data.num_nodes,)).bool(), torch.zeros_like(votes.probs).float()
    target = votes.probs.float()
    known = target.amax(1) > target.amin(1)  # who has an answer
    for train in (half, ~half):
        model = GCN(data.num_features, num_labels)
        adam = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
        for _ in range(num_epochs):
            logits = model(data.x, data.edge_index)[train & known]
            loss = -(target[train & known] * logits.log_softmax(-1)).sum(-1).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        model.eval()
        with torch.no_grad():
            probs[~train] = model(data.x, data.edge_index)[~train].softmax(-1)
    return Found(probs, {})


def scores(probs: Tensor, y: Tensor) -> dict:
    """Of probabilities of labels that have names, against the truth."""
    probs = probs.double()
    top = probs.amax(-1)
    return {
        "accuracy": (probs.argmax(-1) == y).double().mean().item(),
        "log score": mean_log_prob(probs.clamp(min=FLOOR), y).item(),
        "ECE": multiclass_calibration_error(probs, y, probs.shape[-1], n_bins=15).item(),
        "Brier": brier(probs, y).item(),
        "confidence": top.mean().item(),
        "entropy": torch.special.entr(probs).sum(-1).mean().item(),
    }


def clustering_scores(probs: Tensor, y: Tensor) -> dict:
    """
    Of labels without names, on the nodes whose truth is known: the adjusted Rand index, and the
    scores under the names that suit best. Names are given one to one by the Hungarian method; a
    label that is left over then is the layer that it overlaps with most, and a layer that is left
    over has probability zero.
    """
    probs, y = probs[y >= 0], y[y >= 0]
    found, num_layers = probs.argmax(-1), int(y.max()) + 1
    counts = one_hot(found, probs.shape[1]).T @ one_hot(y, num_layers)
    name = counts.argmax(1)
    labels, layers = linear_sum_assignment(counts, maximize=True)
    name[labels] = torch.tensor(layers)
    named = probs.new_zeros(len(probs), num_layers).index_add_(1, name, probs)
    return {"ARI": adjusted_rand_score(y.numpy(), found.numpy()), **scores(named, y)}
