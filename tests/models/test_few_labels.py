# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A graph, a few labels, and scores that say nothing about them."""

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import to_hood
from sklearn.linear_model import LogisticRegression
from stacking import FEW, cliques
from torch.nn.functional import cross_entropy, one_hot

from pyro_nmm.models import StackedNMM
from pyro_nmm.models.stacked.fit import silence
from pyro_nmm.models.tabular import NeighborMixtureClassifier

STEPS = {"num_steps": 40}


class Classifier(NeighborMixtureClassifier):
    """With a shorter fit of the NMM."""

    _fit_options = STEPS


def karate():
    graph = nx.karate_club_graph()
    return graph, [int(club == "Officer") for _, club in graph.nodes(data="club")]


def quarters():
    places = list(nx.grid_2d_graph(6, 8))
    labels = [2 * (row > 2) + (column > 3) for row, column in places]
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(6, 8)), labels


def noisy_halves():
    graph, labels = quarters()
    flipped = np.random.default_rng(0).random(48) < 0.1
    return graph, [int(label > 1) ^ int(flip) for label, flip in zip(labels, flipped, strict=True)]


def checkerboard():
    return quarters()[0], [(row + column) % 2 for row, column in nx.grid_2d_graph(6, 8)]


def observed_sets(y):
    """Masks of 14 and 20 nodes, at least two of each class."""
    random = torch.Generator().manual_seed(0)
    for size in (14, 20):
        known = torch.zeros(len(y), dtype=torch.bool)
        while y[known].bincount(minlength=int(y.max()) + 1).min() < 2:
            known = torch.randperm(len(y), generator=random) < size
        yield known


def mean_of_neighbours(hood, y, known):
    """Counts of the neighbours' observed labels, and the shares of all labels as one more label."""
    share = y[known].bincount(minlength=int(y.max()) + 1) + 1.0
    share = share / share.sum()
    counts = share.repeat(len(y), 1)
    for target, source in zip(hood.target.tolist(), hood.source.tolist(), strict=True):
        if source != target and known[source]:
            counts[target, y[source]] += 1
    return counts / counts.sum(1, keepdim=True)


def by_halves(hood, y, known):
    """StackedNMM on zeros, half of the labels to train and half held out."""
    nodes, zeros = known.nonzero()[:, 0], torch.zeros(len(y), int(y.max()) + 1)
    stacked = StackedNMM(zeros.shape[1])
    stacked.fit(hood, zeros, y, nodes[::2], nodes[1::2], **STEPS)
    return stacked.posterior(hood, zeros, y, known).marginals()


def by_folds(hood, y, known):
    """StackedNMM on zeros, by folds."""
    zeros, folds = torch.zeros(4, len(y), int(y.max()) + 1), torch.full((len(y),), -1)
    folds[known] = torch.arange(int(known.sum())) % 4
    stacked = StackedNMM(zeros.shape[2]).fit(hood, zeros, y, folds=folds, **STEPS)
    return stacked.posterior(hood, zeros[0], y, known).marginals()


def by_classifier(hood, y, known):
    """Of features that are noise."""
    rows = np.random.default_rng(0).normal(size=(len(y), 5))
    edges = torch.stack([hood.source, hood.target])
    model = Classifier(LogisticRegression(), random_state=0).fit(rows, y.where(known, -1), edges)
    return torch.from_numpy(model.label_distributions_)


@pytest.mark.filterwarnings("ignore:The least populated class")
@pytest.mark.parametrize("method", [by_halves, by_folds, by_classifier])
def test_no_worse_than_a_mean_of_neighbours(method):
    """On average over sets of observed labels: clearly better over graphs whose neighbours mostly
    agree, on none of them worse by more than noise, and better where neighbours never agree."""
    gains = {}
    for make in (karate, quarters, noisy_halves, checkerboard):
        graph, labels = make()
        hood, y = to_hood(graph), torch.tensor(labels)
        for known in observed_sets(y):
            torch.manual_seed(0)
            pair = method(hood, y, known), mean_of_neighbours(hood, y, known)
            probs = torch.stack([probs.double()[~known, y[~known]] for probs in pair])
            gain = (probs[0] / probs[1]).log().mean().item()
            gains.setdefault(make, []).append(gain)
    by_graph = torch.tensor(list(gains.values())).mean(1)
    assert by_graph[:3].mean() > 0.03
    assert by_graph.min() > -0.02


def test_silence():
    """The likelihood of held-out labels under the mean prediction, relative to the predictions."""
    probs = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.4, 0.6], [0.9, 0.1]])
    y, out = torch.tensor([0, 0, 1, 0]), torch.tensor([True, False, True, False])
    assert silence(probs, y, out) == pytest.approx(0.6 * 0.4 / (0.6 * 0.6), rel=1e-5)
    assert silence(probs, 1 - y, out) == 1  # worse than their mean
    assert silence(probs[:1].expand(4, 2), y, out) == 1
    _, scores, y, _, held_out = cliques()
    assert silence((scores + 3 * one_hot(y, 3)).softmax(-1), y, held_out) < 1e-3


def test_shares_replace_scores_that_say_nothing():
    """A node far from all labels gets their shares, and a copy of the module has the same answers.
    Any scores that are equal everywhere give the same fit."""
    graph = nx.disjoint_union(nx.path_graph(20), nx.path_graph(2))
    hood, y, zeros = to_hood(graph), torch.arange(22) // 5 % 2, torch.zeros(22, 2)
    y[:20:4] = 1
    known, answers = torch.arange(22) < 20, []
    for scores in (zeros, zeros + torch.tensor([1.0, 3.0])):
        torch.manual_seed(0)
        train, held_out = torch.arange(10), torch.arange(10, 20)
        stacked = StackedNMM(2).fit(hood, scores, y, train, held_out, **FEW)
        answers.append(stacked.posterior(hood, scores, y, known, num_draws=0).marginals())
        share = (y[known].bincount() + 2.5) / 25
        torch.testing.assert_close(stacked.pool.shares, share)
        assert (answers[-1][20:] - share).abs().max() < 0.1
        again = StackedNMM(2)
        again.load_state_dict(stacked.state_dict())
        loaded = again.posterior(hood, scores, y, known, num_draws=0).marginals()
        torch.testing.assert_close(loaded, answers[-1])
        raw = cross_entropy(scores[known], y[known]).item()
        assert stacked.evidence.nll["classifier"] == pytest.approx(raw)
    torch.testing.assert_close(*answers)
