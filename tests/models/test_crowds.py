# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Crowds that mislead a consensus: it is as good as the vote, or warns."""

import pytest
import torch
from crowds import QUICK, answers_to, by_visitors
from torch.nn.functional import nll_loss
from torch_geometric.utils import grid

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import digits
from pyro_nmm.models import Annotators, NormalEmission, accuracy, fit_field
from pyro_nmm.models.annotators.answers import Entries

EDGES, PLACES = grid(12, 12)
HALVES = (PLACES[:, 0] >= 6).long()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


def accuracies(found, answers, truth):
    """Of the consensus, the vote, in which ties count for half, and the field."""
    votes = Entries.of(answers).votes(2)
    vote = (votes[:, 1] > votes[:, 0]).long()
    hits = (vote == truth).double().where(votes[:, 0] != votes[:, 1], 0.5).mean()
    right = [(each.predict() == truth).double().mean().item() for each in (found, found.field)]
    return right[0], hits.item(), right[1]


@pytest.mark.parametrize(
    ("per_task", "each", "option"),
    [
        (1, 1, None),
        (1, 1, "known"),
        (3, 1, None),
        (3, 3, "known"),
        (3, 3, "strength"),
        (5, 3, None),
    ],
)
def test_two_labels_and_few_answers_of_each(per_task, each, option):
    """On a graph that labels do not follow, the consensus is the vote. It was .5."""
    truth = torch.randint(2, (144,))
    answers = by_visitors(truth, per_task, each)
    known = truth.where(torch.rand(144) < 0.1, -1) if option == "known" else None
    people = Annotators(2, strength=4.0 if option == "strength" else None)
    right, vote, _ = accuracies(people.fit(EDGES, answers, known=known, **QUICK), answers, truth)
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
    votes = Entries.of(answers).votes(labels).double()
    right = (found.predict() == truth).double().mean()
    assert right >= (votes.argmax(1) == truth).double().mean() - 0.03
    assert abs(found.probs.amax(1).mean() - right) < 0.08
    assert found.powers == {"shares": 1.0, "walk": 0.0, "potts": 0.0, "answers": 1.0}
    assert "0% of the pool" in found.summary()
    assert "are few" not in found.summary()


def prior_of(people, number=1):
    """``(M, C, K)`` confusion matrices without any answer."""
    silent = torch.zeros(1, number).long(), torch.zeros(1, people.num_labels)
    return people.maximise(*silent, {})["confusion"]


def test_the_right_answer_is_the_most_probable_one():
    for answers, right in {2: 2 / 3, 3: 0.5, 5: 0.5}.items():
        prior = prior_of(Annotators(2, num_answers=answers))[0]
        torch.testing.assert_close(prior.diagonal(), torch.full((2,), right))


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


@pytest.mark.parametrize("follows", [True, False])
def test_labels_that_nobody_gives(follows):
    """Three of six labels are named, and no node gets another one, unless it is known."""
    truth = PLACES[:, 0].long() // 4 if follows else torch.randint(3, (144,))
    answers = answers_to(truth, [0.6] * 5, missing=0.0)
    found = Annotators(6).fit(EDGES, answers, **QUICK)
    assert found.predict().max() < 3
    assert found.field.predict().max() < 3
    known = torch.full((144,), -1)
    known[:4] = 5
    found = Annotators(6).fit(EDGES, answers, known=known, **QUICK)
    assert (found.predict()[:4] == 5).all()


@pytest.mark.parametrize(("follows", "least"), [(True, 0.85), (False, 0.55)])
def test_few_observed_labels_that_nobody_gives(follows, least):
    """Four nodes of a label that no answer names do not spread it. It had up to 144 of 144."""
    known = torch.full((144,), -1)
    known[:4] = 5
    for seed in range(4):
        torch.manual_seed(seed)
        truth = PLACES[:, 0].long() // 4 if follows else torch.randint(3, (144,))
        found = Annotators(6).fit(EDGES, answers_to(truth, [0.6] * 5, 0.0), known=known, **QUICK)
        right = found.predict() == truth
        assert right[4:].double().mean() > least
        assert (found.predict() == 5).sum() < 30


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


def test_evidence_and_counts_by_loops():
    """Also of annotators who answer about few nodes; an answer out of range is an error."""
    answers, people = by_visitors(HALVES, 3, 4), Annotators(2)
    probs = torch.rand(144, 2).softmax(-1)
    confusion = torch.rand(answers.shape[1], 2, 2).softmax(-1)
    expected, counts = torch.zeros(144, 2), prior_of(people, answers.shape[1])
    for node, annotator in (answers >= 0).nonzero().tolist():
        answer = answers[node, annotator]
        expected[node] += confusion[annotator, :, answer].log()
        counts[annotator, :, answer] += probs[node]
    found = people.log_prob({"confusion": confusion}, answers)
    torch.testing.assert_close(found, expected)
    values = people.maximise(answers, probs, {"confusion": confusion})
    torch.testing.assert_close(values["confusion"], counts / counts.sum(-1, keepdim=True))
    with pytest.raises(IndexError):
        people.log_prob({"confusion": confusion}, answers + (answers == 1))
    with pytest.raises(ValueError, match="must be -1 where missing, got -2"):
        people.log_prob({"confusion": confusion}, answers - 1)


@pytest.mark.parametrize("kind", ["clusters", "types", "features"])
def test_known_labels_name_labels(kind):
    """One start of labels without names: sixteen known labels name them."""
    hits = []
    for number in range(2):
        torch.manual_seed(number)
        known = HALVES.where(torch.randperm(144) < 16, -1)
        if kind == "features":
            hood, x = Neighborhood.grid(12, 12), 2.0 * HALVES[:, None] + torch.randn(144, 1)
            found = fit_field(NormalEmission(2), hood, x, known=known, num_starts=1, **QUICK)
        else:
            people = Annotators(2, num_types=3 if kind == "types" else None, aligned=False)
            answers = answers_to(HALVES, [0.8] * 3, missing=0.0, labels=2)
            found = people.fit(EDGES, answers, known=known, num_starts=1, **QUICK)
        hits.append((found.predict() == HALVES).double().mean())
    assert min(hits) > 0.8
