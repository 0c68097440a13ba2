# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A consensus of annotators: its parts by hand, and what graphs and copies do."""

import math
from dataclasses import replace

import pytest
import torch
from crowds import EDGES, QUICK, TRUTH, answers_to
from torch.nn.functional import nll_loss, one_hot
from torch_geometric.utils import grid, to_dense_adj

from pyro_nmm import sources
from pyro_nmm.models import Annotators, accuracy, fit_field
from pyro_nmm.models.annotators.answers import Answers
from pyro_nmm.models.annotators.pool import (
    ALONE,
    STRENGTH,
    LeftOut,
    Walk,
    fit_powers,
    gate,
    left_out_answers,
    pool_of,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


def fitted(answers, emission=None, edge_attr=None, graph=None):
    hood = sources.hops(EDGES, 256)[0] if graph is None else graph
    return fit_field(emission or Annotators(3), hood, answers, edge_attr, num_starts=1, **QUICK)


@pytest.mark.parametrize("kind", ["graph", "sources"])
def test_a_walk_is_label_spreading(kind):
    """The limit is the solution of a linear system; on sources steps follow the attention."""
    if kind == "graph":
        edges, size, damping = grid(3, 4)[0], 12, 0.9
        dense = to_dense_adj(edges)[0].double().fill_diagonal_(0)
        step, walk = dense / dense.sum(1, keepdim=True), Walk.on_graph(edges, size)
        torch.testing.assert_close(walk.there.to_dense(), step)  # loops are no steps
    else:
        hood, hops = sources.hops(EDGES, 256)
        field = fitted(answers_to(TRUTH, [0.8, 0.7]), edge_attr=hops, graph=hood)
        weight, size, damping = torch.zeros(256, hood.num_sources).double(), 256, 0.5
        logits = field.prior(hood, field.edge_attr)[1].detach().double()
        weight[hood.target, hood.source] = hood.log_softmax(logits).exp()
        step, walk = weight @ (weight / weight.sum(0)).T, Walk.on_field(field)
    own, part = torch.rand(size, 3).double().softmax(-1), torch.arange(size) % 3
    found, eye = walk.labels(own, part), torch.eye(size).double()
    for number in range(3):
        seen = own.masked_fill((part == number)[:, None], 0)
        ends = torch.linalg.solve(eye - damping * step, (1 - damping) * seen)
        expected = (ends / ends.sum(1, keepdim=True))[part == number]
        torch.testing.assert_close(found[part == number], expected, atol=0.01, rtol=0)
    lone = torch.zeros(size, 3).double().index_fill(0, torch.tensor([0]), 1.0)
    assert walk.labels(lone, (part != 0).long() + (eye[0] == 0).long())[0].tolist() == [1 / 3] * 3


def test_the_field_of_neighbours_is_a_fixed_point():
    """Of loops over nodes, on a graph with a node of three neighbours and one without any."""
    edges = torch.tensor([[0, 0, 0, 1], [1, 2, 3, 2]])
    evidence = (2 * torch.rand(5, 3)).double()
    neighbours = [[1, 2, 3], [0, 2], [0, 1], [0], []]

    def pull(labels, node):
        total = sum((labels[other] for other in neighbours[node]), torch.zeros(3).double())
        return STRENGTH * total / max(1, len(neighbours[node])) ** 0.5

    part = torch.tensor([0, 1, 1, 0, 0])
    found = Walk.on_graph(edges, 5).potts(evidence, part)
    for number in range(2):
        own = evidence.masked_fill((part == number)[:, None], 0)
        labels = own.softmax(-1)
        for _ in range(100):
            moved = torch.stack([(own[i] + pull(labels, i)).softmax(-1) for i in range(5)])
            labels = (labels + moved) / 2
        for node in (part == number).nonzero()[:, 0].tolist():
            expected = pull(labels, node).softmax(-1)
            torch.testing.assert_close(found[node], expected, atol=1e-3, rtol=1e-3)


def test_dependent_errors():
    """Five annotators who repeat one guess: counted as independent they are far too certain."""
    guess = answers_to(TRUTH, [0.6], missing=0.0)
    own = answers_to(TRUTH, [0.6] * 5, missing=0.2)
    same = torch.where((torch.rand(256, 5) < 0.8) & (own >= 0), guess, own)
    gaps, powers = {}, {}
    for name, answers in {"independent": own, "dependent": same}.items():
        torch.manual_seed(0)
        found = Annotators(3).fit(EDGES, answers)
        right = (found.predict() == TRUTH).float().mean()
        gaps[name] = (found.probs.amax(1).mean() - right).item()
        powers[name] = found.powers["answers"]
        before = found.field.probs.amax(1).mean() - (found.field.predict() == TRUTH).float().mean()
        if name == "dependent":
            assert before > 0.15
            assert abs(gaps[name]) < before - 0.05
            quality = accuracy(found)
            there = answers >= 0
            right = ((answers == TRUTH[:, None]) & there).sum(0) / there.sum(0)
            assert ((quality.low < right) & (quality.high > right)).all()
            assert (accuracy(found.field).mean > 0.7).all()
    assert powers["dependent"] < 0.7 * powers["independent"]
    assert abs(gaps["independent"]) < 0.1


def test_information_gain_by_enumeration():
    """The label's entropy now, minus its mean after each possible answer."""
    answers = answers_to(TRUTH, [0.9, 0.6, 0.4], missing=0.6)
    found = Annotators(3).fit(EDGES, answers, **QUICK)
    counts = Annotators(3).maximise(answers, found.probs.double(), {})
    gain, table = found.information_gain(), counts["confusion"]
    for node in range(0, 256, 25):
        now = found.probs[node].double()
        for annotator in range(3):
            joint = now[:, None] * table[annotator]
            after = joint / joint.sum(0)
            mean = (joint.sum(0) * torch.special.entr(after).sum(0)).sum()
            expected = torch.special.entr(now).sum() - mean
            if answers[node, annotator] >= 0:
                expected = torch.zeros(())
            assert gain[node, annotator].item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_few_answers_leave_a_wide_interval():
    answers = answers_to(TRUTH, [0.8, 0.8, 0.8], missing=0)
    answers[3:, 2] = -1
    quality = accuracy(Annotators(3).fit(EDGES, answers, **QUICK))
    width = quality.high - quality.low
    assert width[2] > 0.3 > 0.2 > width[0]


@pytest.mark.parametrize("types", [None, 4])
def test_left_out_answers(types):
    """The likelihood of each answer, and of the others at its node, without a part of the nodes."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5], missing=0.5)
    answers[0] = torch.tensor([2, -1, -1])
    emission, part = Annotators(3, num_types=types), torch.arange(256) % 4
    field, entries = fitted(answers, emission), Answers.of(answers)
    found = left_out_answers(field, entries, field.probs, part)
    places = torch.cat([((part == number)[entries.node]).nonzero()[:, 0] for number in range(4)])
    assert torch.equal(found.node, entries.node[places])
    for number in range(4):
        rest, inside = entries.at(part != number), entries.at(part == number)
        values, rows = emission.without(rest, field.probs, field.values), part[found.node] == number
        others, alone = answers[inside.node].clone(), torch.full((len(inside.node), 3), -1)
        row = torch.arange(len(others))
        alone[row, inside.annotator], others[row, inside.annotator] = inside.answer, -1
        near = emission.log_prob(values, answers)[part == number]
        torch.testing.assert_close(found.evidence[part == number], near)
        torch.testing.assert_close(found.single[rows], emission.log_prob(values, alone))
        torch.testing.assert_close(found.others[rows], emission.log_prob(values, others))
        there = (others >= 0).sum(1)
        same = ((others == inside.answer[:, None]) & (others >= 0)).sum(1) / there.clamp(min=1)
        torch.testing.assert_close(found.same[rows], same.double())
    assert not found.others[found.node == 0].any()


def test_powers_are_the_best_ones():
    """Of a likelihood by loops, on a mesh around them."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5, 0.5], missing=0.1)
    field = fitted(answers)
    left_out = left_out_answers(field, Answers.of(answers), field.probs, torch.arange(256) % 8)
    first, second = torch.rand(2, 256, 3).double().softmax(-1)
    found = fit_powers(torch.stack([first, second], 1).log(), left_out)
    assert 0 < found[-1] < 1

    def score(one, other, w, r):
        total = math.log(w * (1 - w)) + sum(math.log(b) - b for b in (one, other))
        for node, others, own, same in zip(*left_out[1:], strict=True):
            label = (first[node] ** one * second[node] ** other * (w * others).exp()).double()
            alone = (label / label.sum() * own.exp()).sum().item()
            copied = r * bool((others != 0).any())
            total += math.log((1 - copied) * alone + copied * same)
        return total

    rates = [0.001, 0.01, 0.03, 0.1, 0.2]
    best = max(score(*found.tolist(), r) for r in rates)
    for place, factor in [(0, 1.5), (0, 0.7), (1, 1.5), (1, 0.7), (2, 1.1), (2, 0.9)]:
        other = found.clone()
        other[place] *= factor
        if other[-1] < 1:
            assert max(score(*other.tolist(), r) for r in rates) < best + 0.05


def test_the_pool_has_no_order_of_labels_or_annotators():
    answers, turn = answers_to(TRUTH, [0.8, 0.6, 0.5]), torch.tensor([2, 0, 1])
    field, edges = fitted(answers), Walk.on_graph(EDGES, 256)
    confusion, back = field.values["confusion"], turn.argsort()
    pools = []
    for table, probs, matrices in (
        (answers, field.probs, confusion),
        (answers[:, [1, 2, 0]], field.probs, confusion[[1, 2, 0]]),
        (torch.where(answers < 0, -1, turn[answers]), field.probs[:, back],
         confusion[:, back][..., back]),
    ):  # fmt: skip
        torch.manual_seed(1)
        like = replace(field, probs=probs, values={"confusion": matrices})
        pools.append(pool_of(like, table, edges).probs)
    torch.testing.assert_close(pools[1], pools[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(pools[2][:, turn], pools[0], atol=1e-4, rtol=0)


def test_matrices_of_annotators_who_resemble_each_other():
    """Few answers leave the matrix of all annotators, or the prior's; many their own shares."""
    people, true = Annotators(3), torch.tensor([[8.0, 1, 1], [1, 7, 2], [2, 2, 6]]).double() / 10
    found = people.shrunk(torch.stack([1e6 * true, 1e6 * true.flip(0), 0 * true]))
    torch.testing.assert_close(found[:2], torch.stack([true, true.flip(0)]), atol=1e-3, rtol=0)
    torch.testing.assert_close(found[2], (true + true.flip(0)) / 2, atol=1e-3, rtol=0)
    prior = torch.full((3, 3), 1 / 4).fill_diagonal_(1 / 2).double()
    torch.testing.assert_close(people.shrunk(torch.zeros(1, 3, 3).double())[0], prior)
    named = torch.tensor([True, True, False])  # nothing shows a label that no answer names
    torch.testing.assert_close(people.shrunk(100 * true[None] * named)[0, 2], prior[2])


@pytest.mark.parametrize("right", [[0.8, 0.6, 0.5], [0.8]])
def test_the_pool_is_its_formula(right):
    """Priors and evidence to their powers; the answers' power is below one on a graph that fits."""
    answers = answers_to(TRUTH, right)
    found = Annotators(3).fit(EDGES, answers, **QUICK)
    evidence = (found.probs.double().log() - found.log_prior) / found.powers["answers"]
    asked = (answers >= 0).any(1)
    flat = evidence[~asked] - evidence[~asked].mean(1, keepdim=True)
    torch.testing.assert_close(flat, torch.zeros_like(flat), atol=1e-3, rtol=0)
    assert list(found.priors) == ["shares", "walk", "potts"]
    assert found.powers["shares"] == 0
    assert 0 < found.powers["answers"] < 1
    if len(right) == 1:  # an answer is evidence for the label that it names
        own = evidence[asked].gather(1, answers[asked])
        assert (own[:, 0] == evidence[asked].amax(1)).double().mean() > 0.9
        assert list(found.powers.values()) == pytest.approx([0.0, 1.0, ALONE, ALONE])
        assert "no node has two answers" in found.summary()


def test_a_graph_counts_as_it_predicts():
    """The shuffled graph counts for little, with the answers' power near one, and is named; some
    edges count for more, and the whole graph in full."""
    answers, used = answers_to(TRUTH, [0.8, 0.6, 0.5]), []
    for kept in (0.0, 0.15, 1.0):
        torch.manual_seed(0)
        edges = torch.where(torch.rand(EDGES.shape[1]) < kept, EDGES, torch.randperm(256)[EDGES])
        found = Annotators(3).fit(edges, answers, **QUICK)
        used.append(1 - found.powers["shares"])
        assert ("a graph that does not fit" in found.summary()) == (used[-1] < 1)
        if kept == 0:
            simple = found.field.emission.alone(Answers.of(answers), {})
            assert nll_loss(found.probs.log(), TRUTH) < nll_loss(simple.log(), TRUTH) + 0.05
    assert used[0] < 0.5
    assert used[2] == 1
    assert used[0] <= used[1]


def test_gates_read_nodes_with_answers_alone():
    """The gain of each node with answers, by a loop, in standard errors."""
    prior, single = torch.rand(30, 3).double().softmax(-1), torch.randn(40, 3).double()
    node, more, gains = torch.arange(40) % 20, prior - prior[:20].mean(0), torch.zeros(20).double()
    single += 1.8 * more[node]
    answers = LeftOut(torch.zeros(30, 3), node, single, single, torch.zeros(40))
    for i, shares in zip(node.tolist(), single.softmax(-1), strict=True):
        gains[i] += shares @ more[i]
    expected = gains.mean() / (gains.std(correction=0) / 20**0.5) - 1
    assert 0.1 < expected < 0.9  # neither end
    assert gate(prior, answers) == pytest.approx(expected.item())
    prior[20:] = torch.eye(3)[0].double()
    assert gate(prior, answers) == pytest.approx(expected.item())


def test_clusterings_with_a_rare_number():
    """A part of the nodes without the largest number leaves matrices of the same size."""
    answers = answers_to(TRUTH, [0.9, 0.8, 0.8], missing=0.0)
    answers[0] = torch.tensor([3, 4, 3])
    emission = Annotators(3, num_types=4, aligned=False)
    found = emission.fit(EDGES, answers, num_starts=1, num_steps=30, num_draws=5)
    assert found.field.values["confusion"].shape[-1] == 5
    assert torch.allclose(found.probs.sum(1), torch.tensor(1.0))


def test_probabilities_of_a_classifier():
    """They help nodes with and without answers where the graph does not, and have a power."""
    truth = torch.randint(3, (256,))
    probs = (2 * torch.randn(256, 3) + 4 * one_hot(truth, 3)).softmax(-1)
    answers = answers_to(truth, [0.6] * 3, missing=0.0)
    answers[torch.rand(256) < 0.5] = -1
    answered, found = (answers >= 0).any(1), []
    for option in ({}, {"pred_probs": probs.numpy()}):
        torch.manual_seed(0)
        found.append(Annotators(3).fit(EDGES, answers, **option, **QUICK))
    assert list(found[1].powers) == ["shares", "walk", "potts", "classifier", "answers"]
    for rows, gain in ((answered, 0.1), (~answered, 0.2)):
        scores = [-nll_loss(each.probs[rows].log(), truth[rows]) for each in found]
        assert scores[1] > scores[0] + gain
    one = Annotators(3).fit(EDGES, answers[:, :1], pred_probs=probs, **QUICK).powers
    weight = 1 - one["shares"]
    assert weight > 0.5  # the classifier predicts answers, and the graph none
    assert one["answers"] == pytest.approx(weight * ALONE + 1 - weight)
    assert one["walk"] < 0.1
