# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A consensus of annotators: its parts by hand, its inputs, and what dependent errors do to it."""

import math

import pytest
import torch
from crowds import EDGES, QUICK, TRUTH, answers_to
from torch.nn.functional import nll_loss, one_hot
from torch_geometric.data import Data
from torch_geometric.utils import grid, to_dense_adj

from pyro_nmm import sources
from pyro_nmm.models import Annotators, accuracy, fit_field
from pyro_nmm.models.annotators.answers import Entries
from pyro_nmm.models.annotators.pool import (
    ALONE,
    SHARE,
    STRENGTH,
    LeftOut,
    Walk,
    fit_powers,
    gate,
    left_out_answers,
    potts_labels,
    refit_powers,
    standard_errors,
)
from pyro_nmm.models.annotators.quality import _by_label, fit_confusion

NOTHING = torch.zeros(256, 3).double()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


def fitted(answers, emission=None, edge_attr=None, graph=None):
    hood = sources.hops(EDGES, 256)[0] if graph is None else graph
    return fit_field(emission or Annotators(3), hood, answers, edge_attr, num_starts=1, **QUICK)


def test_a_walk_is_label_spreading():
    """The limit is the solution of a linear system; nodes of the same part read nothing of it."""
    edges, _ = grid(3, 4)
    own = torch.rand(12, 3).double().softmax(-1)
    dense = to_dense_adj(edges)[0].double()
    dense.fill_diagonal_(0)
    shares = dense / dense.sum(1, keepdim=True)
    expected = torch.linalg.solve(torch.eye(12).double() - 0.9 * shares, 0.1 * own)
    expected = expected / expected.sum(1, keepdim=True)
    walk = Walk.on_graph(edges, 12)
    ends = walk.ends(own)
    torch.testing.assert_close(ends / ends.sum(1, keepdim=True), expected, atol=0.01, rtol=0)
    part = torch.arange(12) % 3
    found, changed = walk.labels(own, part), own.clone()
    changed[part == 1] = torch.tensor([1.0, 0.0, 0.0]).double()
    again = walk.labels(changed, part)
    torch.testing.assert_close(again[part == 1], found[part == 1])
    assert (again[part == 0] != found[part == 0]).any()
    alone = torch.zeros(12, 3).double()
    alone[0, 2] = 1.0
    places = walk.labels(alone, (torch.arange(12) != 0).long())  # node 0 meets no label of others
    assert places[0].tolist() == [1 / 3] * 3
    assert torch.equal(places[1:], alone[:1].expand(11, 3))


def test_a_walk_over_sources_follows_the_attention():
    hood, hops = sources.hops(EDGES, 256)
    field = fitted(answers_to(TRUTH, [0.8, 0.7]), edge_attr=hops, graph=hood)
    logits = field.prior(hood, *field.inputs)[1].detach().double()
    weight = torch.zeros(256, hood.num_sources).double()
    weight[hood.target, hood.source] = hood.log_softmax(logits).exp()
    step = weight @ (weight / weight.sum(0)).T
    own = torch.rand(256, 3).double().softmax(-1)
    expected = torch.linalg.solve(torch.eye(256).double() - 0.5 * step, 0.5 * own)
    torch.testing.assert_close(Walk.on_field(field).ends(own), expected, atol=1e-5, rtol=1e-4)


def test_the_field_of_neighbours_is_a_fixed_point():
    """Of loops over nodes, on a graph with a node of three neighbours and one without any."""
    edges = torch.tensor([[0, 0, 0, 1], [1, 2, 3, 2]])
    evidence = (2 * torch.rand(5, 3)).double()
    neighbours = [[1, 2, 3], [0, 2], [0, 1], [0], []]

    def pull(labels, node):
        total = sum((labels[other] for other in neighbours[node]), torch.zeros(3).double())
        return STRENGTH * total / max(1, len(neighbours[node])) ** 0.5

    part = torch.tensor([0, 1, 1, 0, 0])
    found = potts_labels(Walk.on_graph(edges, 5), evidence, part)
    for number in range(2):
        own = evidence.masked_fill((part == number)[:, None], 0)
        labels = own.softmax(-1)
        for _ in range(100):
            moved = torch.stack([(own[i] + pull(labels, i)).softmax(-1) for i in range(5)])
            labels = (labels + moved) / 2
        for node in (part == number).nonzero()[:, 0].tolist():
            expected = pull(labels, node).softmax(-1)
            torch.testing.assert_close(found[node], expected, atol=1e-3, rtol=1e-3)
    known = torch.tensor([[0.0, -torch.inf, -torch.inf]]).double().expand(5, 3)
    assert (potts_labels(Walk.on_graph(edges, 5), known, part)[:4, 0] > 1 / 3).all()


@pytest.mark.parametrize(("strength", "number"), [(None, 4), (7.0, 3)])
def test_left_out_answers_by_hand(strength, number):
    """Matrices without a part of the nodes; the others' evidence and one's own add up."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5])
    answers[::9, 1] = number - 1
    emission = Annotators(3, strength=strength, num_answers=number)
    field = fitted(answers, emission)
    part = torch.arange(256) % 4
    found = left_out_answers(field, Entries.of(answers), field.probs, part)
    assert len(found.node) == (answers >= 0).sum()
    for group in range(4):
        rest = answers.masked_fill((part == group)[:, None], -1)
        counts = torch.zeros(3, 3, number).double()
        for node, annotator in (rest >= 0).nonzero().tolist():
            counts[annotator, :, rest[node, annotator]] += field.probs[node].double()
        log_table = emission.shrunk(counts).log()
        for node in (part == group).nonzero()[:3, 0].tolist():
            seen = [(m, a) for m, a in enumerate(answers[node].tolist()) if a >= 0]
            each = {m: log_table[m, :, a] for m, a in seen}
            total = sum(each.values(), torch.zeros(3).double())
            torch.testing.assert_close(found.evidence[node], total, atol=1e-5, rtol=1e-4)
            rows = (found.node == node).nonzero()[:, 0]
            for row, (m, a) in zip(rows.tolist(), seen, strict=True):
                torch.testing.assert_close(found.single[row], each[m], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(found.others[row], total - each[m], atol=1e-5, rtol=1e-4)
                others = [b for other, b in seen if other != m]
                same = sum(b == a for b in others) / max(1, len(others))
                assert found.same[row].item() == pytest.approx(same)


def test_left_out_answers_given_types():
    """Each answer's likelihood, and the likelihood of a table without it."""
    answers, emission = answers_to(TRUTH, [0.8, 0.6, 0.5], missing=0.5), Annotators(3, num_types=4)
    answers[0] = torch.tensor([2, -1, -1])
    field, entries = fitted(answers, emission), Entries.of(answers)
    found = left_out_answers(field, entries, field.probs, torch.zeros(256).long())
    values = emission.without(entries.at(torch.zeros(256).bool()), field.probs, field.values)
    torch.testing.assert_close(found.evidence, emission.log_prob(values, answers))
    rest, alone = answers[entries.node].clone(), torch.full((len(entries.node), 3), -1)
    rows = torch.arange(len(rest))
    alone[rows, entries.annotator], rest[rows, entries.annotator] = entries.answer, -1
    torch.testing.assert_close(found.single, emission.log_prob(values, alone))
    torch.testing.assert_close(found.others, emission.log_prob(values, rest))
    assert not found.others[found.node == 0].any()


def test_powers_are_the_best_ones():
    """Of a likelihood by loops, on a mesh around them."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5, 0.5], missing=0.1)
    field = fitted(answers)
    left_out = left_out_answers(field, Entries.of(answers), field.probs, torch.arange(256) % 8)
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


def test_known_labels_move_powers():
    """Without known labels nothing; a thousand that contradict the neighbours lower their power."""
    around, evidence = torch.rand(2, 2000, 3).double().softmax(-1)
    known = torch.distributions.Categorical(evidence).sample()
    start, priors = torch.tensor([1.0, 0.2]).double(), around.log()[:, None]
    assert refit_powers(start, priors, evidence.log(), torch.full((2000,), -1)) is start
    power, weight = refit_powers(start, priors, evidence.log(), known)
    assert power < 0.3
    assert 0.7 < weight < 1.3


def test_confusion_beside_the_neighbours():
    """EM raises the likelihood, and finds the matrices if neighbours know the label's chances."""
    truth = torch.randint(3, (20_000,))
    around = (4 * torch.rand(20_000, 3)).double().softmax(-1)
    truth = torch.distributions.Categorical(around).sample()
    given = answers_to(truth, [0.7], missing=0.0)[:, 0]
    entries, start = Entries.of(given[:, None]), torch.full((1, 3, 3), 0.25).double()
    start.diagonal(dim1=1, dim2=2).fill_(0.5)
    found = fit_confusion(start, around, entries)
    assert (found.diagonal(dim1=1, dim2=2) - 0.7).abs().max() < 0.05

    def score(table):
        return (around * table[0, :, given].T).sum(1).log().sum()

    once = fit_confusion(found, around, entries)
    assert score(start) < score(found) <= score(once) + 0.1  # the prior is random


@pytest.mark.parametrize("right", [[0.8, 0.6, 0.5], [0.8]])
def test_the_pool_is_its_formula(right):
    """Priors and evidence to their powers; the answers' power is below one on a graph that fits."""
    answers = answers_to(TRUTH, right)
    found = Annotators(3).fit(EDGES, answers, **QUICK)
    logits = found.log_prior
    evidence = (found.probs.double().log() - logits) / found.powers["answers"]
    asked = (answers >= 0).any(1)
    flat = evidence[~asked] - evidence[~asked].mean(1, keepdim=True)
    torch.testing.assert_close(flat, torch.zeros_like(flat), atol=1e-3, rtol=0)
    assert list(found.priors) == ["shares", "walk", "potts"]
    assert found.powers["shares"] == 0
    assert 0 < found.powers["answers"] < 1
    for prior in found.priors.values():
        torch.testing.assert_close(prior.sum(1), torch.ones(256))
    own = evidence[asked].gather(1, answers[asked].amax(1, keepdim=True))
    if len(right) == 1:  # an answer is evidence for the label that it names
        assert (own[:, 0] == evidence[asked].amax(1)).double().mean() > 0.9


def test_a_graph_counts_as_it_predicts():
    """The shuffled graph counts for little, with the answers' power near one; some edges for more,
    and the whole graph in full. The walk and the Potts model share one gate."""
    answers, used = answers_to(TRUTH, [0.8, 0.6, 0.5]), []
    for kept in (0.0, 0.15, 1.0):
        torch.manual_seed(0)
        edges = torch.where(torch.rand(EDGES.shape[1]) < kept, EDGES, torch.randperm(256)[EDGES])
        powers = Annotators(3).fit(edges, answers, **QUICK).powers
        used.append(1 - powers["shares"])
        if used[-1] == 0:
            assert (powers["walk"], powers["potts"], powers["answers"]) == (0, 0, 1)
    assert used[0] < 0.5
    assert used[2] == 1
    assert used[0] <= used[1]


def test_labels_from_answers_alone():
    """A fixed point of shares, matrices and labels; of one annotator the prior's matrices."""
    answers = answers_to(TRUTH, [0.9, 0.8, 0.8, 0.7])
    people, none = Annotators(3), torch.zeros(256, 3)
    probs = people.alone(answers, none, {})
    entries = Entries.of(answers)
    matrices = people.shrunk(entries.confusion(probs[entries.node], 3))
    share = (probs.sum(0) + 1) / 259
    again = share.expand(256, 3).clone()
    for node, annotator in (answers >= 0).nonzero().tolist():
        again[node] *= matrices[annotator, :, answers[node, annotator]]
    again = again / again.sum(1, keepdim=True)
    torch.testing.assert_close(probs, again, atol=0.01, rtol=0.05)
    assert (probs.argmax(1) == TRUTH).double().mean() > 0.8
    one = people.alone(answers[:, :1], none, {})
    seen = answers[:, 0] >= 0
    assert one[seen].gather(1, answers[seen, :1]).sub(0.5).abs().max() < 1e-6
    known = torch.full((256, 3), -torch.inf)
    known[:, 2] = 0
    assert (people.alone(answers, known, {})[:, 2] == 1).all()


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


def test_one_annotator():
    found = Annotators(3).fit(EDGES, answers_to(TRUTH, [0.6], missing=0.0), **QUICK)
    assert list(found.powers.values()) == pytest.approx([0.0, 1.0, ALONE, ALONE])
    assert "no node has two answers" in found.summary()
    known = TRUTH.where(torch.arange(256) % 4 == 0, -1)
    found = Annotators(3).fit(EDGES, found.answers, known=known, **QUICK)
    assert "powers are defaults" not in found.summary()


def test_known_labels_are_kept():
    known = torch.where(torch.rand(256) < 0.2, TRUTH, -1)
    answers = answers_to(TRUTH, [0.5, 0.4])
    without = Annotators(3).fit(EDGES, answers, **QUICK)
    found = Annotators(3).fit(EDGES, answers, known=known, **QUICK)
    rows = known >= 0
    assert (found.probs[rows, known[rows]] == 1).all()
    assert (found.field.probs[rows, known[rows]] == 1).all()
    rest = ~rows
    right = [(each.predict() == TRUTH)[rest].float().mean() for each in (without, found)]
    assert right[1] > right[0]
    marginals = found.field.latents(answers).posterior(4, num_sweeps=5).marginals()
    assert torch.allclose(marginals[rows, known[rows]], torch.tensor(1.0))


@pytest.mark.parametrize("types", [None, 4])
def test_clusterings_with_a_rare_number(types):
    """A part of the nodes without the largest number leaves matrices of the same size."""
    answers = answers_to(TRUTH, [0.9, 0.8, 0.8], missing=0.0)
    answers[0] = torch.tensor([3, 4, 3])
    emission = Annotators(3, num_types=types, aligned=False)
    found = emission.fit(EDGES, answers, num_starts=1, num_steps=30, num_draws=5)
    assert found.field.values["confusion"].shape[-1] == 5
    assert torch.allclose(found.probs.sum(1), torch.tensor(1.0))


def test_a_few_answers_leave_a_wide_interval():
    """Under shares of the labels and rows of matrices that are probabilities."""
    answers = answers_to(TRUTH, [0.8, 0.8, 0.8], missing=0)
    answers[3:, 2] = -1
    people = Annotators(3).fit(EDGES, answers, **QUICK)
    quality = accuracy(people)
    width = quality.high - quality.low
    assert width[2] > 0.3 > 0.2 > width[0]
    for probs in _by_label(people, 0.9, ""):
        torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))


def test_a_graph_that_does_not_fit():
    """It is named, and labels come from the answers alone."""
    answers, shuffled = answers_to(TRUTH, [0.8, 0.7, 0.6, 0.6]), torch.randperm(256)[EDGES]
    good, bad = (Annotators(3).fit(graph, answers, **QUICK) for graph in (EDGES, shuffled))
    assert good.powers["shares"] == 0
    assert "a graph that does not fit" not in good.summary()
    assert bad.powers["shares"] > 0.5
    assert "a graph that does not fit" in bad.summary()
    simple = bad.field.emission.alone(answers, torch.zeros(256, 3), {})
    assert nll_loss(bad.probs.log(), TRUTH) < nll_loss(simple.log(), TRUTH) + 0.05


def test_what_priors_know_beyond_their_mean():
    """Unequal shares of labels are no sign that the graph fits."""
    truth = TRUTH.repeat(9).sub(1).clamp(min=0)
    prior = torch.full((len(truth), 3), 0.1).scatter(1, truth[:, None], 0.8).double().log()
    node = torch.arange(len(truth)).repeat(2)
    own = torch.full((len(node), 3), 0.25).double()
    own = own.scatter(1, answers_to(truth, [0.5, 0.5], missing=0).T.reshape(-1, 1), 0.5).log()
    answers = LeftOut(torch.zeros_like(prior), node, torch.zeros_like(own), own, own[:, 0])
    none = torch.zeros_like(prior)
    assert standard_errors(prior, answers, none) > 5
    mean = prior.exp().mean(0).log().expand_as(prior)
    assert standard_errors(mean, answers, none).abs() < 0.01
    assert standard_errors(prior[torch.randperm(len(truth))], answers, none) < 2
    alone = LeftOut(*(each[:1] for each in answers))
    assert abs(standard_errors(prior[:1], alone, none[:1])) < 0.01
    # Known labels count as answers that are right.
    known = none.masked_fill(one_hot(truth, 3) == 0, -torch.inf)
    few = none.where(torch.arange(len(truth))[:, None] >= 40, known)
    nobody = LeftOut(*(each[:0] for each in answers))
    assert standard_errors(prior, nobody, few) > 5
    assert (gate(prior, answers, none), gate(mean, answers, none)) == (1, 0)


def test_matrices_of_annotators_who_resemble_each_other():
    """The mean over strengths, by products over one answer after the other."""
    labels, size, strengths = torch.arange(90) % 3, 3, torch.tensor([1.0, 2, 5, 10, 20, 40, 80])
    answers = torch.where(torch.rand(90, 2) < 0.6, labels[:, None], torch.randint(3, (90, 2)))
    counts = torch.zeros(2, size, size).double()
    for annotator, given in enumerate(answers.T):
        for label, answer in zip(labels, given, strict=True):
            counts[annotator, label, answer] += 1

    def towards(mean, tables):
        logs = []
        for strength in strengths.tolist():
            total = 0.0
            for table in tables:
                seen = strength * mean
                for label, answer in table.nonzero().tolist():
                    for _ in range(int(table[label, answer])):
                        total += (seen[label, answer] / seen[label].sum()).log().item()
                        seen[label, answer] += 1
            logs.append(total)
        expected = tables + torch.tensor(logs).softmax(0) @ strengths * mean
        return expected / expected.sum(-1, keepdim=True)

    prior = torch.full((size, size), 1 / 4).fill_diagonal_(1 / 2).double()
    mean = towards(prior, counts.sum(0, keepdim=True))[0]
    torch.testing.assert_close(Annotators(3).shrunk(counts), towards(mean, counts))
    # A label that no answer names has the prior's row.
    named = torch.tensor([True, True, False])
    few = counts * named
    found = Annotators(3).shrunk(few)[:, 2]
    torch.testing.assert_close(found, prior[2].expand(2, 3))
    silent = Annotators(3).shrunk(torch.cat([counts, torch.zeros(1, size, size)]))[2]
    torch.testing.assert_close(silent, mean)
    given = Annotators(3, strength=2.0).shrunk(counts)[0]
    expected = counts[0] + torch.full((size, size), 0.5).fill_diagonal_(1.0)
    torch.testing.assert_close(given, expected / expected.sum(-1, keepdim=True))


def featured():
    """Features that separate three labels, random neighbours, and few answers of three people."""
    truth = torch.randint(3, (256,))
    x = torch.randn(256, 3) + 2 * one_hot(truth, 3)
    answers = answers_to(truth, [0.6] * 3, missing=0.0)
    answers[torch.rand(256) < 0.5] = -1
    return (2 * x).softmax(-1), answers, truth


def test_probabilities_of_a_classifier():
    """They help nodes with and without answers where the graph does not, and have a power."""
    probs, answers, truth = featured()
    graph, answered, found = Data(edge_index=EDGES, num_nodes=256), (answers >= 0).any(1), []
    for option in ({}, {"pred_probs": probs.numpy()}):
        torch.manual_seed(0)
        found.append(Annotators(3).fit(graph, answers, **option, **QUICK))
    with_probs = found[1]
    assert list(with_probs.powers) == ["shares", "walk", "potts", "classifier", "answers"]
    assert "classifier" in with_probs.summary()
    for rows, gain in ((answered, 0.1), (~answered, 0.2)):
        scores = [-nll_loss(each.probs[rows].log(), truth[rows]) for each in found]
        assert scores[1] > scores[0] + gain
    torch.testing.assert_close(with_probs.priors["classifier"], probs, atol=1e-3, rtol=0)
    one = Annotators(3).fit(graph, answers[:, :1], pred_probs=probs, **QUICK).powers
    weight = 1 - one["shares"]
    assert weight > 0.5  # the classifier predicts answers
    assert one["classifier"] == pytest.approx(ALONE, rel=0.5)
    assert one["answers"] == pytest.approx(weight * ALONE + 1 - weight)
    assert one["walk"] < 0.1  # the graph predicts no answer


def test_the_answers_of_one_label_each_have_the_same_share():
    """Copies lower the power of the answers: the sum of the priors' powers is a factor of it."""
    guess = answers_to(TRUTH, [0.6], missing=0.0)
    found = Annotators(3).fit(EDGES, guess.expand(256, 5), **QUICK)
    assert found.powers["answers"] < 0.5 * SHARE


@pytest.mark.parametrize(
    ("message", "probs"),
    [
        (r"pred_probs must have shape \(256, 3\)", torch.rand(256, 2)),
        ("pred_probs must have rows that sum to one", torch.rand(256, 3)),
        ("pred_probs must be probabilities", 2 * torch.eye(3).repeat(86, 1)[:256] - 1 / 3),
        ("pred_probs must be a floating-point", torch.ones(256, 3).long()),
    ],
)
def test_refusals_of_probabilities(message, probs):
    with pytest.raises(ValueError, match=message):
        Annotators(3).fit(EDGES, TRUTH[:, None], pred_probs=probs, **QUICK)
