# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Consensus of noisy labels by majority, Dawid-Skene, label spreading, Potts fields and a GCN."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import degree

from benchmarks.latent.potts import AnnotatedPotts, Found
from benchmarks.shared.timing import timed as timed_by
from pyro_nmm.models import Annotators
from pyro_nmm.models.latent import mixture_em

#: Names of methods, their consensus, and seconds.
Fits = Iterator[tuple[str, Found, float]]
#: Seconds are of this process, as others share the machine.
timed = partial(timed_by, clock=time.process_time)


def majority(answers: Tensor, num_labels: int) -> Found:
    """Shares of the votes; of a node without any, equal shares."""
    votes = torch.stack([(answers == k).sum(1) for k in range(num_labels)], 1).double()
    votes = torch.where(votes.sum(1, keepdim=True) > 0, votes, 1.0)
    return Found(votes / votes.sum(1, keepdim=True))


def dawid_skene(emission: Annotators, answers: Tensor, num_starts: int) -> Found:
    """The random start of the highest likelihood."""

    def fitted() -> Found:
        values, probs = mixture_em(emission, answers, emission.start(answers, None))
        share = (probs.sum(0) + 1) / (len(probs) + emission.num_labels)
        score = (emission.log_prob(values, answers) + share.log()).logsumexp(-1).mean().item()
        return Found(probs, {"left out": score}, values)

    return best(fitted() for _ in range(num_starts))


def best(found: Iterable[Found]) -> Found:
    return max(found, key=lambda fit: fit.settings["left out"])


def spread_labels(start: Found, edge_index: Tensor, alpha: float = 0.8) -> Found:
    """``alpha`` times the mean of the neighbours and the rest of one's own, until it converges."""
    own = probs = start.probs.float()
    number = degree(edge_index[1], len(own))
    alpha = alpha * (number > 0).to(own)[:, None]
    for _ in range(50):
        around = torch.zeros_like(own).index_add_(0, edge_index[1], probs[edge_index[0]])
        probs = alpha * around / number.clamp(min=1)[:, None] + (1 - alpha) * own
    return Found(probs, start.settings)


def rivals(emission: Annotators, data: Data, num_starts: int) -> Fits:
    """Dawid-Skene and what starts from it, with its seconds."""
    start, before = timed(dawid_skene, emission, data.answers, num_starts)
    yield "Dawid-Skene", start, before
    found, seconds = timed(spread_labels, start, data.edge_index)
    yield "label spreading", found, before + seconds
    for name, found, seconds in potts_fits(emission, data, lambda: [start]):
        yield name, found, before + seconds


def typed_rivals(emission: Annotators, data: Data, num_starts: int) -> Fits:
    """
    Potts fields of annotators that err together, which without a graph say nothing of the labels.
    They start where our own fit does, at its sources.
    """

    def starts() -> Iterator[Found]:
        for _ in range(num_starts):
            values = emission.start(data.answers, data.place[0])
            yield Found(emission.log_prob(values, data.answers).softmax(-1), {}, values)

    for name, *found in potts_fits(emission, data, starts):
        yield f"{name}, types", *found


def potts_fits(emission: Annotators, data: Data, starts: Callable[[], Iterable[Found]]) -> Fits:
    field = AnnotatedPotts(emission, data.answers, data.edge_index)
    for name, fit in {"Potts, mean field": field.mean_field, "Potts, Gibbs": field.gibbs}.items():
        yield name, *timed(lambda fit=fit: best(map(fit, starts())))


def gcn(data: Data, votes: Tensor, num_epochs: int) -> Found:
    """
    A GCN trained on the majority of the votes ``(N, C)``. Nodes are halved at random, and each half
    is predicted by the GCN trained on the other, so that it repeats no vote.
    """
    half, probs = torch.randint(2, (data.num_nodes,)).bool(), torch.zeros_like(votes).float()
    answered = votes.amax(1) > votes.amin(1)
    for train in (half, ~half):
        model = GCN(data.num_features, 16, 2, votes.shape[1], dropout=0.5)
        adam = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
        for _ in range(num_epochs):
            logits = model(data.x, data.edge_index)[train & answered]
            loss = cross_entropy(logits, votes[train & answered].float())
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            probs[~train] = model.eval()(data.x, data.edge_index)[~train].softmax(-1)
    return Found(probs)
