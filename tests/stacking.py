# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs with scores and labels for StackedNMM, in every kind, and its fit written out."""

import math

import networkx as nx
import torch
from graphs import to_hood

from pyro_nmm import NeighborMixture, OrderedConditional
from pyro_nmm.models import StackedNMM
from pyro_nmm.models.stacked import bounded_temperature
from pyro_nmm.models.stacked.fit import surrogate
from pyro_nmm.models.tabular import NeighborMixtureClassifier

#: Kinds of a StackedNMM: options beside the number of classes.
KINDS = {
    "pool": {},
    "scores": {"pool": False},
    "relabelled": {
        "compatibility": torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.3, 0.3, 0.4]])
    },
}
#: A fit of which only the way is tested.
FEW = {"num_steps": 5, "refit_steps": 4}


class QuickClassifier(NeighborMixtureClassifier):
    """With a short fit of the NMM."""

    _fit_options = FEW


def mask(size, *nodes):
    found = torch.zeros(size, dtype=torch.bool)
    found[list(nodes)] = True
    return found


def made(kind, num_classes=3):
    return StackedNMM(num_classes, **KINDS[kind])


def moved(stacked, scale=0.1):
    """A module as after a fit."""
    for value in stacked.parameters():
        value.data += scale * torch.randn_like(value)
    return stacked


def numbers(stacked, **values):
    for name, value in values.items():
        stacked.get_parameter(name).data.fill_(value)
    return stacked


def few_labels(seed=0):
    """60 nodes of which 14 are labelled: graph, scores, labels, and two masks."""
    torch.manual_seed(seed)
    hood = to_hood(nx.watts_strogatz_graph(60, 4, 0.3, seed=seed))
    scores, y, order = torch.randn(60, 3), torch.randint(3, (60,)), torch.randperm(60).tolist()
    return hood, scores, y, mask(60, *order[:5]), mask(60, *order[5:14])


def cliques():
    """Cliques whose labels nearly agree, and a quarter each to train and to hold out."""
    hood = to_hood(nx.connected_caveman_graph(12, 5))
    y = torch.arange(12).repeat_interleave(5) % 3
    scores = torch.nn.functional.one_hot(y, 3) + torch.randn(60, 3)
    return hood, scores, y, torch.arange(60) % 4 == 0, torch.arange(60) % 4 == 1


def shared_labels(num_cliques=60, size=6):
    """Labels that cliques share, a classifier that is biased and overconfident, and four masks."""
    torch.manual_seed(0)
    number = num_cliques * size
    hood = to_hood(nx.connected_caveman_graph(num_cliques, size))
    truth = (2 * torch.randn(num_cliques, 4)).repeat_interleave(size, 0).softmax(-1)
    y = NeighborMixture(hood, 0.5 * truth, torch.zeros(hood.num_edges)).sample()
    scores = 3 * truth.log() + 5 * torch.randn(number, 4) + torch.tensor([6.0, 0.0, 0.0, 0.0])
    parts = torch.randperm(number).split([number // 6, number // 6, number // 3, number // 3])
    return hood, scores, y, *(mask(number, *part.tolist()) for part in parts)


def log_score(posterior, y, nodes):
    return posterior.marginals()[nodes, y[nodes]].log().mean().item()


def prior_of(stacked, scores, y, held_out):
    """With the prior of the scale, around temperature scaling's."""
    scale = -math.log(bounded_temperature(scores, y, held_out))
    return stacked.prior | {"log_scale": (scale, 1.0)}


def log_prior(stacked, prior):
    values = ((stacked.get_parameter(name), *moments) for name, moments in prior.items())
    return -0.5 * sum(((value - mean) / sd).square().sum() for value, mean, sd in values)


def fit_on_all_edges(stacked, hood, scores, y, train, held_out, num_steps, edge_weight=None):
    """The fit of scores alone as its docstring has it, without leaving out any node."""
    stacked = stacked.to(scores)
    prior, observed = prior_of(stacked, scores, y, held_out), train | held_out
    numbers(stacked, **{name: mean for name, (mean, _) in prior.items()})
    optimizer = torch.optim.Adam(stacked.parameters(), lr=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 - 2 * step / num_steps)
    )
    for _ in range(num_steps):
        optimizer.zero_grad()
        parts = [nodes.nonzero()[:, 0] for nodes in (train, held_out)]
        order = torch.cat([nodes[torch.randperm(len(nodes))] for nodes in parts])
        parameters = stacked.formula(hood, scores, edge_weight)
        q = OrderedConditional(hood, *parameters, y, observed, order=order)
        loss = -log_prior(stacked, prior) - surrogate(q, int(train.sum()), 8)
        (loss / held_out.sum()).backward()
        optimizer.step()
        schedule.step()
    return stacked
