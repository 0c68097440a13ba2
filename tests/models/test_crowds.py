# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Crowds that mislead a consensus: it is as good as the vote, or warns."""

import pytest
import torch
from crowds import QUICK, answers_to, by_visitors
from torch.nn.functional import nll_loss
from torch_geometric.utils import grid

from pyro_nmm.datasets import digits
from pyro_nmm.models import Annotators, accuracy
from pyro_nmm.models.annotators.answers import Answers

EDGES = grid(12, 12)[0]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


def accuracies(found, answers, truth):
    """Of the consensus, the vote, in which ties count for half, and the field."""
    votes = Answers.of(answers).votes(2)
    vote = (votes[:, 1] > votes[:, 0]).long()
    hits = (vote == truth).double().where(votes[:, 0] != votes[:, 1], 0.5).mean()
    right = [(each.predict() == truth).double().mean().item() for each in (found, found.field)]
    return right[0], hits.item(), right[1]


@pytest.mark.parametrize(("per_task", "each"), [(1, 1), (3, 1), (5, 3)])
def test_two_labels_and_few_answers_of_each(per_task, each):
    """On a graph that labels do not follow, the consensus is the vote. It was .5."""
    truth = torch.randint(2, (144,))
    answers = by_visitors(truth, per_task, each)
    right, vote, _ = accuracies(Annotators(2).fit(EDGES, answers, **QUICK), answers, truth)
    assert right >= vote - 0.02


@pytest.mark.parametrize("labels", [2, 4])
def test_a_single_answer_of_each_without_edges(labels):
    """Nothing tells workers apart: the consensus is the vote, as sure as it is right."""
    truth = torch.randint(labels, (200,))
    answers = torch.full((200, 1000), -1)
    answers[torch.arange(200).repeat(5), torch.arange(1000)] = answers_to(
        truth.repeat(5), [0.7], 0, labels
    )[:, 0]
    found = Annotators(labels).fit(torch.empty(2, 0, dtype=torch.long), answers, **QUICK)
    votes = Answers.of(answers).votes(labels).double()
    right = (found.predict() == truth).double().mean()
    assert right >= (votes.argmax(1) == truth).double().mean() - 0.03
    assert abs(found.probs.amax(1).mean() - right) < 0.08
    assert found.powers == {"shares": 1.0, "walk": 0.0, "potts": 0.0, "answers": 1.0}
    assert "0% of the pool" in found.summary()
    assert "are few" not in found.summary()


def complete(size):
    return torch.ones(size, size).fill_diagonal_(0).nonzero().T


def nearest(size):
    """Ten nearest of points that say nothing about labels."""
    places = torch.rand(size, 2)
    near = torch.cdist(places, places).fill_diagonal_(9).topk(10, largest=False).indices
    return torch.stack([near.flatten(), torch.arange(size).repeat_interleave(10)])


@pytest.mark.parametrize(
    ("graph", "size", "number"), [(nearest, 20, 5), (nearest, 40, 9), (complete, 40, 5)]
)
def test_dense_graphs_do_not_overrule_answers(graph, size, number):
    """Labels were inverted in up to 7 of 10 seeds. Answers alone are as good as the vote."""
    for seed in range(2):
        torch.manual_seed(seed)
        truth = torch.randint(2, (size,))
        answers = truth[:, None] ^ (torch.rand(size, number) > 0.8).long()
        found = Annotators(2).fit(graph(size), answers, **QUICK)
        right, vote, field = accuracies(found, answers, truth)
        assert right >= min(vote, field) - 0.05
        assert size > 20 or "20 answered nodes are few: the accuracy" in found.summary()


def one_sided(truth, number, labels):
    """Annotators who name one label or are silent."""
    label = torch.arange(number) % labels
    rate = torch.where(truth[:, None] == label, 0.6, 0.03)
    return torch.where(torch.rand(rate.shape) < rate, label, -1)


@pytest.mark.parametrize("labels", [2, 3, 4])
def test_annotators_of_one_label(labels):
    """Their silence is an answer; people who answer rarely, and rare labels, show no such thing."""
    truth = torch.randint(labels, (144,))
    answers = one_sided(truth, 3 * labels, labels)
    found = Annotators(labels).fit(EDGES, answers, **QUICK)
    assert found.answers.max() == labels
    assert ((found.answers == labels) == (answers < 0)).all()
    right = (found.predict() == truth).double().mean()
    assert right > 0.85
    assert abs(found.probs.amax(1).mean() - right) < 0.08
    quality = accuracy(found).mean
    assert ((quality > 0.6 / labels - 0.1) & (quality < 0.6 / labels + 0.1)).all()
    rare = (torch.rand(144) < 0.05).long()
    for other in (by_visitors(truth.clamp(max=1), 3, 4), answers_to(rare, [0.99] * 9, 0.9, 2)):
        assert Annotators(2)._with_silence(other)[1] is other


@pytest.mark.parametrize("right", [0.4, 0.9])
def test_true_labels_are_one_more_annotator(right):
    """Of 40 nodes they replace the guess how often a single annotator is right."""
    edges, places = grid(20, 20)
    truth = places[:, 0].long() * 3 // 20
    answers, some = answers_to(truth, [right]), torch.rand(400) < 0.1
    both = torch.cat([answers, truth.where(some, -1)[:, None]], 1)
    found = [Annotators(3).fit(edges, each, **QUICK) for each in (answers, both)]
    alone, beside = (nll_loss(each.probs[~some].log(), truth[~some]) for each in found)
    assert beside < alone - 0.05
    assert "no node has two answers" in found[0].summary()
    assert "no node has two answers" not in found[1].summary()


def test_digits_of_which_three_in_ten_are_asked():
    """Nodes without answers keep their calibration. Matrices that were shrunk to a mean of few
    answers gave an NLL of .18, and a confidence of .07 below the accuracy."""
    data, nll, gap = digits(), [], []
    truth, edges = data.y[:900], data.edge_index[:, (data.edge_index < 900).all(0)]
    for seed in range(4):
        torch.manual_seed(seed)
        answers = answers_to(truth, [0.3, 0.4, 0.5, 0.6, 0.7], 0.0, labels=10)
        answers[torch.rand(900) >= 0.3] = -1
        found = Annotators(10).fit(edges, answers, **QUICK)
        nll.append(nll_loss(found.probs.log(), truth))
        gap.append((found.predict() == truth).double().mean() - found.probs.amax(1).mean())
    assert sum(nll) / 4 < 0.155
    assert abs(sum(gap) / 4) < 0.045
