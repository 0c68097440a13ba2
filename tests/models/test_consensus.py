# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A consensus of annotators: its parts by hand, its inputs, and what dependent errors do to it."""

import math
from dataclasses import replace

import pytest
import torch
from crowds import EDGES, QUICK, TRUTH, answers_to, by_visitors
from torch.nn.functional import one_hot
from torch_geometric.utils import grid, to_dense_adj

from pyro_nmm import sources
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models import Annotators, CopyingAnnotators, accuracy, fit_field
from pyro_nmm.models.annotators import consensus
from pyro_nmm.models.annotators.agreement import (
    count_pairs,
    excess_agreement,
    matrices,
    permuted,
)
from pyro_nmm.models.annotators.answers import Entries
from pyro_nmm.models.annotators.consensus import (
    ALONE,
    OWN,
    LeftOut,
    Walk,
    consensus_of,
    fit_powers,
    left_out_answers,
    potts_labels,
    refit_powers,
    standard_errors,
)
from pyro_nmm.models.annotators.consensus import STRENGTH as PULL
from pyro_nmm.models.annotators.model import STRENGTHS
from pyro_nmm.models.annotators.quality import _by_label, fit_confusion


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
    logits = field.prior(hood, field.edge_attr)[1].detach().double()
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
        return PULL * total / max(1, len(neighbours[node])) ** 0.5

    part = torch.tensor([0, 1, 1, 0, 0])
    found = potts_labels(Walk.on_graph(edges, 5), evidence, part)
    for number in range(2):
        own = (OWN * evidence).masked_fill((part == number)[:, None], 0)
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
    """Matrices without a part of the nodes; the others' evidence and one's own add up. Half of the
    prior's weight is on the right answer; the user's own weight goes first."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5])
    answers[::9, 1] = number - 1
    emission = Annotators(3, strength=strength, num_answers=number)
    field = fitted(answers, emission)
    part = torch.arange(256) % 4
    found = left_out_answers(field, answers, field.probs, part)
    assert len(found.node) == (answers >= 0).sum()
    for group in range(4):
        rest = answers.masked_fill((part == group)[:, None], -1)
        weight = strength or emission.shrinking(rest, field.probs).strength
        prior = torch.full((3, number), 1 / (number - 1)).double()
        prior[range(3), range(3)] = 1
        counts = (weight / 2 * prior).repeat(3, 1, 1)
        for node, annotator in (rest >= 0).nonzero().tolist():
            counts[annotator, :, rest[node, annotator]] += field.probs[node].double()
        log_table = (counts / counts.sum(-1, keepdim=True)).log()
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


class Other(Annotators):
    """Of whose answers nothing is known but their likelihood."""

    def maximise(self, data, probs, values):
        return super().maximise(data, probs, values) | {"more": torch.zeros(())}


class Uncopied(CopyingAnnotators):
    """Whom nobody copies."""

    def maximise(self, data, probs, values):
        found = Annotators.maximise(self, data, probs, values)
        return found | {"copies": torch.eye(data.shape[1])}


@pytest.mark.parametrize("other", [Other(3), Uncopied(3)])
def test_left_out_answers_of_other_models(other):
    """Independent annotators take a sum. Other ones ask the likelihood for each answer."""
    answers, part = answers_to(TRUTH, [0.8, 0.6, 0.5], missing=0.5), torch.arange(256) % 4
    answers[0, 1:] = -1  # one answer alone
    field = fitted(answers)
    fields = field, replace(field, emission=other)
    quick, slow = (left_out_answers(f, answers, field.probs, part) for f in fields)
    for name, one, two in zip(quick._fields, quick, slow, strict=True):
        torch.testing.assert_close(one, two, msg=name)
    assert not quick.others[quick.node == 0].any()


def test_powers_are_the_best_ones():
    """Of a likelihood by loops, on a mesh around them."""
    answers = answers_to(TRUTH, [0.8, 0.6, 0.5, 0.5], missing=0.1)
    field = fitted(answers)
    left_out = left_out_answers(field, answers, field.probs, torch.arange(256) % 8)
    first, second = torch.rand(2, 256, 3).double().softmax(-1)
    found = fit_powers(torch.stack([first, second], 1).log(), left_out)
    assert 0 < found[-1] < 1

    def score(one, other, w, r):
        total = -((math.log(w / (1 - w)) - 0.5) ** 2) / 2.88
        total += sum(math.log(b) / 2 - b for b in (one, other))
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


def test_permuted_answers_keep_counts():
    """An annotator's answers about the nodes of a label stay there, in any order."""
    answers = answers_to(TRUTH, [0.8, 0.6])
    found = permuted(Entries.of(answers), TRUTH).table()
    assert ((found < 0) == (answers < 0)).all()
    assert (found != answers).any()
    for label in range(3):
        here = label == TRUTH
        assert torch.equal(found[here].sort(0).values, answers[here].sort(0).values)
    small = torch.arange(3)[:, None].expand(3, 1)
    small, labels = Entries.of(small), torch.zeros(3).long()
    orders = {tuple(permuted(small, labels).answer.tolist()) for _ in range(200)}
    assert len(orders) == 6


def test_excess_agreement_with_sure_labels():
    """Known labels: the share of pairs that agree, above chance by hand; copies have one."""
    right = torch.full((20_000,), 0.6)
    truth = torch.randint(3, (20_000,))
    answers = answers_to(truth, [0.6, 0.6, 0.6], missing=0.2)
    probs = one_hot(truth, 3).double()
    log_prior = probs.clamp(min=1e-9).log()
    found = excess_agreement(probs, log_prior, 0.5, answers)
    assert abs(found.excess) < 3 * found.error + 1e-3
    assert not found.found
    same = torch.rand(20_000) < 0.5
    copied = answers[:, 0].where(same & (answers[:, 0] >= 0) & (answers[:, 1] >= 0), answers[:, 1])
    answers[:, 1] = copied
    pairs = excess_agreement(probs, log_prior, 0.5, answers, count_pairs)
    by_chance = (right**2 + 2 * 0.2**2).mean()  # .6 right, .2 each of the two wrong answers
    both = (answers[:, 0] >= 0) & (answers[:, 1] >= 0)
    agree = (answers[:, 0] == answers[:, 1])[both].double().mean()
    excess = pairs.excess[0, 1].item()
    assert excess == pytest.approx(((agree - by_chance) / (1 - by_chance)).item(), abs=0.02)
    assert excess == pytest.approx(0.5, abs=0.03)
    assert pairs.found.nonzero().tolist() == [[0, 1], [1, 0]]


def test_dependence_of_a_sparse_table():
    """Replicates of people who give few answers each: as expected of independent errors."""
    truth = torch.randint(2, (2000,))
    answers = by_visitors(truth, 4, 40)
    probs = one_hot(truth, 2).double()
    log_prior = probs.clamp(min=1e-9).log()
    found = excess_agreement(probs, log_prior, 1.0, answers)
    assert abs(found.expected) < 0.02
    assert not found.found
    first = answers[torch.arange(2000), (answers >= 0).long().argmax(1)]
    copies = answers.where((answers < 0) | (torch.rand(answers.shape) < 0.5), first[:, None])
    assert excess_agreement(probs, log_prior, 1.0, copies).found


@pytest.mark.parametrize("each", [1, 3])
def test_pairs_of_many_people_with_few_answers(each):
    """Values are moderate, unknown where two people share no node, and can be printed."""
    asked = torch.rand(256, 40).argsort(1) < each
    answers = answers_to(TRUTH, [0.8] * 40, missing=0.0).masked_fill(~asked, -1)
    found = Annotators(3).fit(EDGES, answers, **QUICK).pairs()
    shared = (answers >= 0).double()
    never = (shared.mT @ shared == 0).fill_diagonal_(False)
    for table in found:
        assert table.shape == (40, 40)
        assert table[never].isnan().all()
        assert (table[table.isfinite()].abs() < 100).all()
    assert never.any()
    if each > 1:
        assert found.excess[~never].isfinite().double().mean() > 0.5
    assert not found.found[never].any()
    assert "40 annotators" in str(found)


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
    assert score(start) < score(found) <= score(once) + 1e-3


def recorded(monkeypatch, name):
    """Arguments and value of each call of a function of the module."""
    calls, function = [], getattr(consensus, name)

    def record(*args, **options):
        calls.append((args, function(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(consensus, name, record)
    return calls


@pytest.mark.parametrize("right", [[0.8, 0.6, 0.5], [0.8]])
def test_the_pool_is_its_formula(monkeypatch, right):
    """One annotator's matrix comes from the mean of the field and a first pool."""
    answers, walk = answers_to(TRUTH, right), Walk.on_graph(EDGES, 256)
    field = fitted(answers)
    left_out, pools = recorded(monkeypatch, "left_out_answers"), recorded(monkeypatch, "_pool")
    found = consensus_of(field, answers, walk)
    used, evidence = [args[2] for args, _ in left_out], [each.evidence for _, each in left_out]
    _, powers, log_prior, _ = pools[0][1]
    first = (log_prior + powers[-1] * evidence[0]).softmax(-1).float()
    again = [] if len(right) > 1 else [(field.probs + first) / 2]
    torch.testing.assert_close(used, [field.probs, *again])
    logits = found.powers["answers"] * evidence[-1]
    for name, prior in found.priors.items():
        logits = logits + found.powers[name] * prior.double().log()
    torch.testing.assert_close(found.probs, logits.softmax(-1).float(), atol=1e-5, rtol=1e-4)
    assert 0 < found.powers["answers"] < 1


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
            assert found.dependence.found
            assert found.pairs().excess.shape == (5, 5)
            assert "errors are dependent" in found.summary()
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
    gain, table = found.information_gain(), matrices(found.probs, answers, 3)
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
    assert list(found.powers.values()) == pytest.approx(ALONE[2])
    assert "no node has two answers" in found.summary()
    assert "unknown with one answer" in found.summary()
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
    for probs in _by_label(people):
        torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))


def test_a_graph_that_does_not_fit(monkeypatch):
    """It is named, and answers keep their weight, which is better than to lower it."""
    answers, shuffled = answers_to(TRUTH, [0.8, 0.7, 0.6, 0.6]), torch.randperm(256)[EDGES]
    found = []
    for graph, least in ((EDGES, 0.7), (EDGES, 0.0), (shuffled, 0.7), (shuffled, 0.0)):
        monkeypatch.setattr(consensus, "UNINFORMED", least)
        torch.manual_seed(0)
        found.append(Annotators(3).fit(graph, answers, **QUICK))
    good, same, bad, lowered = found
    assert torch.equal(good.probs, same.probs)
    assert "a graph that does not fit" not in good.summary()
    assert "a graph that does not fit" in bad.summary()
    assert bad.powers["answers"] > 1.5 * lowered.powers["answers"]
    assert mean_log_prob(bad.probs, TRUTH) > mean_log_prob(lowered.probs, TRUTH) + 0.1


def test_what_priors_know_beyond_their_mean():
    """Unequal shares of labels are no sign that the graph fits."""
    truth = TRUTH.repeat(9).sub(1).clamp(min=0)
    prior = torch.full((len(truth), 3), 0.1).scatter(1, truth[:, None], 0.8).double().log()
    node = torch.arange(len(truth)).repeat(2)
    own = torch.full((len(node), 3), 0.25).double()
    own = own.scatter(1, answers_to(truth, [0.5, 0.5], missing=0).T.reshape(-1, 1), 0.5).log()
    answers = LeftOut(torch.zeros_like(prior), node, torch.zeros_like(own), own, own[:, 0])
    assert standard_errors(prior, answers) > 5
    assert standard_errors(prior.exp().mean(0).log().expand_as(prior), answers).abs() < 0.01
    assert standard_errors(prior[torch.randperm(len(truth))], answers) < 2
    alone = LeftOut(*(each[:1] for each in answers))
    assert abs(standard_errors(prior[:1], alone)) < 0.01


def test_strength_by_marginal_likelihood():
    """The mean over strengths, by products over one answer after the other."""
    labels, size = torch.arange(90) % 3, 3
    answers = torch.where(torch.rand(90, 2) < 0.6, labels[:, None], torch.randint(3, (90, 2)))
    logs = []
    for strength in STRENGTHS:
        total = -(math.log(strength / 10) ** 2) / 2
        for given in answers.T:
            seen = torch.full((size, size), strength / 4).fill_diagonal_(strength / 2)
            for label, answer in zip(labels, given, strict=True):
                total += (seen[label, answer] / seen[label].sum()).log().item()
                seen[label, answer] += 1
        logs.append(total)
    weights = torch.tensor(logs).softmax(0)
    probs = one_hot(labels).float()
    found = Annotators(3).shrinking(answers, probs).strength
    assert found == pytest.approx((weights * torch.tensor(STRENGTHS)).sum().item(), rel=1e-3)
    for same in (Annotators(3, strength=2.0), Annotators(3, num_types=4)):
        assert same.shrinking(answers, probs) is same
