# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs with scores and labels for StackedNMM, in every kind."""

import networkx as nx
import torch
from graphs import to_hood

from pyro_nmm.models import StackedNMM
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
FEW = {"num_steps": 5}


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


def log_score(posterior, y, nodes):
    return posterior.marginals()[nodes, y[nodes]].log().mean().item()
