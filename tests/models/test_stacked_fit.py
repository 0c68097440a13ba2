# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: what it finds and reads, folds, uncertainty, evidence and share."""

import copy
import math
from dataclasses import replace

import networkx as nx
import pytest
import torch
from graphs import house, to_hood
from stacking import FEW, KINDS, cliques, few_labels, log_score, made, mask, numbers
from torch.nn.functional import cross_entropy, one_hot

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.fit import (
    Fold,
    agreement,
    bounded_temperature,
    deviations,
    evidence_of,
    expected_share,
    label_gradients,
    parts_of,
)
from pyro_nmm.models.stacked.formula import ALONE, RISE, adjusted
from pyro_nmm.models.stacked.table import GraphScores

FOLDS = 3


def on_graph(hood, scores, y, known):
    return GraphScores(hood, scores, y, known, torch.zeros_like(known))


def independent(seed=0):
    """Cliques with labels of four classes, and the scores of an overconfident classifier."""
    torch.manual_seed(seed)
    hood = to_hood(nx.caveman_graph(150, 4))
    truth = torch.randn(600, 4).softmax(-1)
    y = NeighborMixture(hood, 0.5 * truth, torch.zeros(hood.num_edges)).sample()
    parts = torch.randperm(600).split([200, 200, 200])
    return hood, 4 * truth.log(), y, *(mask(600, *part.tolist()) for part in parts)


def test_fit_finds_sharing_and_maximises_its_objective():
    """Around the fit, the held-out bound plus prior falls in every direction."""
    hood, scores, y, train, held_out, test = independent()
    stacked = made("scores", 4).fit(hood, scores, y, train, held_out)
    # 0.5 was true; the prior's mean, 2.7, and the gap of the bound draw it upwards.
    assert 0.2 < stacked.log_kappa.exp().item() < 2.0
    assert 1.5 < stacked.pool.temperature / stacked.pool.log_scale.exp() < 11  # 4 was true
    # Better than temperature scaling on nodes that neither has seen, alone and in pairs.
    probs = (scores / temperature_scaling(scores, y, held_out)).softmax(-1)
    mix = stacked.mixture(hood, scores)
    alone = log_score(mix.condition(y, train, num_samples=64), y, test)
    assert alone - probs[test, y[test]].log().mean() > 0.02
    assert mix.log_likelihood(y, observed=test, given=train, num_particles=64) / 200 > alone
    order = torch.cat([train.nonzero()[:, 0], held_out.nonzero()[:, 0]])

    @torch.no_grad()
    def objective():
        q = OrderedConditional(hood, *stacked(hood, scores), y, train | held_out, order=order)
        torch.manual_seed(1)
        bound = q.log_terms(q.sample((400,)))[:, 200:].sum(-1).mean()
        prior = stacked.formula.prior(stacked.prior, scores)
        return (bound + prior.log_prob(stacked.formula.numbers()).sum()).item()

    best = objective()
    for name in stacked.prior:
        parameter = stacked.get_parameter(name)
        for step in (-1.0, 1.0):
            parameter.data += step
            assert objective() < best, (name, step)
            parameter.data -= step


def test_update_learns_from_new_labels():
    """Labels inform about nodes at a distance, which few labels have shown before."""
    torch.manual_seed(0)
    hood = to_hood(nx.convert_node_labels_to_integers(nx.grid_2d_graph(20, 20)))
    y = 2 * (torch.arange(400) // 20 // 10) + torch.arange(400) % 20 // 10
    scores = one_hot(y, 4) + 2 * torch.randn(400, 4)
    parts = torch.randperm(400).split([10, 15, 75, 300])
    train, held_out, new, test = (mask(400, *part.tolist()) for part in parts)
    stacked = StackedNMM(4).fit(hood, scores, y, train, held_out)
    before = stacked.posterior(hood, scores, y, train)
    evidence = before.condition(y, held_out | new)
    updated = copy.deepcopy(stacked).update(hood, scores, y, train, held_out | new)
    after = updated.posterior(hood, scores, y, train, new=held_out | new)
    values = [log_score(posterior, y, test) for posterior in (before, evidence, after)]
    assert values[0] < values[1] < values[2] - 0.2
    alone = updated.posterior(hood, scores, y, train | held_out | new)
    assert values[2] > log_score(alone, y, test)  # as evidence, too
    assert updated.pool.labels > stacked.pool.labels
    assert torch.equal(updated.pool.temperature, stacked.pool.temperature)


def test_perfect_scores_and_little_data():
    """A finite temperature, and parameters near the prior's means."""
    hood, y = house(), torch.tensor([0, 1, 0, 1, 0])
    scores = 10.0 * one_hot(y).double()
    stacked = made("scores", 2).fit(hood, scores, y, [0, 1], [2, 3], num_steps=30)
    assert 0.05 < stacked.pool.log_scale.exp() / stacked.pool.temperature < 10
    assert stacked.mixture(hood, scores).marginals().isfinite().all()
    stacked = StackedNMM(2).fit(hood, torch.randn(5, 2), y, [0, 1], [2], num_steps=60)
    for name, (mean, sd) in stacked.prior.items():
        if name not in ("gamma", "pool.labels"):  # whose means depend on the labels
            assert ((stacked.get_parameter(name) - mean).abs() < 1.5 * sd).all()


def test_scores_with_an_offset_of_each_row():
    """Softmax ignores it; log joints of generative classifiers have it."""
    torch.manual_seed(0)
    y, held_out = torch.randint(2, (200,)), torch.arange(200) < 150
    scores = torch.randn(200, 2) + 2 * one_hot(y)
    plain = bounded_temperature(scores, y, held_out)
    shifted = bounded_temperature(scores + 500 * torch.randn(200, 1), y, held_out)
    assert shifted == pytest.approx(plain, rel=1e-6)
    hood = to_hood(nx.path_graph(200))
    for constant in (torch.ones(200, 2), torch.full((200, 2), 0.5).log()):
        assert bounded_temperature(constant, y, held_out) == 1
        stacked = StackedNMM(2).fit(hood, constant, y, ~held_out, held_out, **FEW)
        assert stacked.posterior(hood, constant, y, ~held_out).marginals().isfinite().all()


@pytest.mark.parametrize("call", ["fit", "update"])
def test_labels_outside_the_masks_are_never_read(call):
    hood, scores, y, train, held_out = few_labels()
    results = []
    for other in (0, 99):
        torch.manual_seed(0)
        labels, stacked = y.where(train | held_out, other), StackedNMM(3)
        getattr(stacked, call)(hood, scores, labels, train, held_out, **FEW)
        results.append(torch.nn.utils.parameters_to_vector(stacked.parameters()))
    assert torch.equal(*results)


def test_nodes_that_no_labelled_node_may_choose_are_left_out():
    hood, scores, y, train, held_out = few_labels()
    formula, folds = made("scores").formula, []
    for more in (0, 7):  # isolated nodes
        wide = Neighborhood(torch.stack([hood.source, hood.target]), 60 + more)
        sets = [torch.cat([s, s.new_zeros(more)]) for s in (y, train & False, train, held_out)]
        data = GraphScores(wide, torch.cat([scores, scores[:more]]), *sets[:3])
        folds.append(vars(Fold.of(formula, data, sets[3])))
    assert repr(folds[0].pop("hood")) == repr(folds[1].pop("hood"))
    torch.testing.assert_close(*folds)


def test_no_label_is_told_by_itself():
    """What a fold's labels are given is the same, whatever they are."""
    hood, scores, y, train, new = cliques()
    formula, known = StackedNMM(3).formula, train | new
    for out in parts_of(known, 5):
        folds = []
        for labels in (y, torch.where(out, (y + 1) % 3, y)):
            folds.append(Fold.of(formula, on_graph(hood, scores, labels, known), out))
        assert torch.equal(folds[0].inputs, folds[1].inputs)
        assert not torch.equal(folds[0].y, folds[1].y)
        assert not (folds[0].observed & folds[0].held_out).any()


@pytest.mark.parametrize(("pool", "name"), [(True, "pool.labels"), (False, "pool.log_scale")])
def test_prior_is_an_argument(pool, name):
    """A tight one holds the fit where its mean is, and the others are as they were."""
    hood, scores, y, train, held_out = few_labels()
    plain, tight = StackedNMM(3, pool=pool), StackedNMM(3, pool=pool, prior={name: (1.7, 1e-3)})
    assert {n: v for n, v in tight.prior.items() if n != name}.items() <= plain.prior.items()
    assert tight.get_parameter(name).item() == pytest.approx(1.7)  # where a fit begins
    tight.fit(hood, scores, y, train, held_out, num_steps=40)
    if not pool:  # whose scores say something about these labels, by chance
        assert tight.get_parameter(name).item() == pytest.approx(1.7, abs=0.01)
    assert tight.gamma.item() != plain.gamma.item()


def test_agreement_of_labelled_neighbours():
    """Between chance and always, of pairs that are both observed; few pairs count less."""
    pairs = torch.tensor([[0, 1, 2, 4, 5], [1, 2, 3, 5, 6]])
    hood = Neighborhood(torch.cat([pairs, pairs.flip(0)], 1), 7)
    y, known = torch.tensor([0, 0, 1, 1, 0, 1, 0]), torch.tensor([True] * 6 + [False])
    data = on_graph(hood, torch.zeros(7, 2), y, known)
    # Pairs 0-1 and 2-3 of four agree, and three of six labels are equal: as often as by chance.
    assert agreement(data) == 0
    y[5] = 0
    assert agreement(replace(data, known=known & (torch.arange(7) != 2))) == pytest.approx(2 / 12)
    whole = to_hood(nx.disjoint_union(nx.complete_graph(10), nx.complete_graph(10)))
    data = on_graph(whole, torch.zeros(20, 2), torch.arange(20) // 10, torch.ones(20).bool())
    assert agreement(data) == pytest.approx(90 / 100)


@pytest.fixture
def problem():
    """Cliques whose labels nearly agree, half of them observed, and scores of three classifiers."""
    hood, scores, y, *_ = cliques()
    scores = scores + 2 * one_hot(y, 3)
    y = torch.where(torch.rand(60) < 0.1, torch.randint(3, (60,)), y)
    folds = torch.arange(60) % 6
    return hood, scores + torch.randn(FOLDS, 60, 3), y, folds.where(folds < FOLDS, -1)


def test_folds_are_copies_of_the_graph(problem):
    hood, scores, y, folds = problem
    edges = torch.stack([hood.source, hood.target])
    wide = Neighborhood(torch.cat([edges + 60 * k for k in range(FOLDS)], 1), FOLDS * 60)
    known = torch.cat([(folds >= 0) & (folds != k) for k in range(FOLDS)])
    out = torch.cat([folds == k for k in range(FOLDS)])
    whole = wide, scores.reshape(-1, 3), y.repeat(FOLDS), known, out
    fits = []
    for given, options in (
        (problem[:3], {"folds": folds}),
        (whole, {}),
    ):
        torch.manual_seed(0)
        fits.append([*made("scores").fit(*given, **options, num_steps=30).parameters()])
    torch.testing.assert_close(*fits, rtol=1e-6, atol=1e-8)


def test_marginals_are_a_linear_pool(problem):
    """Of the NMM and temperature scaling."""
    hood, scores, y, folds = problem
    stacked = StackedNMM(3).fit(hood, scores, y, folds=folds, **FEW)
    known, share = folds >= 0, float(stacked.share)
    posterior = stacked.posterior(hood, scores[0], y, known, num_draws=0)
    stacked.share.fill_(1.0)
    nmm = stacked.posterior(hood, scores[0], y, known, num_draws=0).marginals()
    scaled = (scores[0] / stacked.pool.temperature).softmax(-1)
    expected = torch.where(known[:, None], nmm, share * nmm + (1 - share) * scaled)
    mixed = posterior.marginals()
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    share_of_two = (posterior.sample((4000,)) == 2).double().mean(0)
    assert (share_of_two - mixed[:, 2]).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("agree", [0.0, 0.4, 1.0])
def test_share_follows_the_likelihood(agree):
    """Few labels leave it near the prior's mean, many decide."""
    better = torch.full((300,), -0.1)
    assert expected_share(better, better - 2, agree) > 0.97
    prior = (1 + 5 * agree) / 7
    assert expected_share(better[:1], better[:1], agree) == pytest.approx(prior, abs=1e-3)
    assert expected_share(torch.full((90,), -torch.inf), better[:90], agree) < 0.08


def test_labels_are_no_evidence_for_candidates_that_were_fitted_to_them():
    """Each half has a label of its own, so that what is learned from one misleads for the other."""
    hood, stacked, first = to_hood(nx.cycle_graph(60)), StackedNMM(2), torch.arange(60) < 30
    data = on_graph(hood, torch.zeros(60, 2), first.long(), torch.ones(60).bool())
    fold = Fold.of(stacked.formula, data, data.known)
    prior = stacked.formula.prior(stacked.prior, fold.inputs)
    nll, share = evidence_of(stacked.formula, prior, fold, [first, ~first], 0.5)
    assert nll["temperature scaling"] == pytest.approx(math.log(2))
    assert min(nll["pool"], nll["NMM"]) > math.log(2) + 0.1
    assert share < 0.1


def test_priors_of_one_fit():
    """Labels count for more where scores say nothing, and own labels where neighbours disagree."""
    prior = StackedNMM(2).prior
    (mean, sd), (own, width) = prior["pool.labels"], prior["gamma"]
    assert adjusted(prior, agreement=1.0, silence=0.0) == prior
    changed = {"pool.labels": (mean + RISE * sd, 2 * sd), "gamma": (own + ALONE, width)}
    assert adjusted(prior, agreement=0.0, silence=1.0) == prior | changed


def test_summary(problem):
    """Each label by candidates that were fitted to other folds."""
    hood, scores, y, folds = problem
    stacked = StackedNMM(3)
    with pytest.raises(ValueError, match="summary needs a fit"):
        stacked.summary()
    stacked.fit(hood, scores, y, folds=folds, num_steps=20)
    nll, lines = stacked.evidence.nll, stacked.summary().splitlines()
    assert [line[:20].strip() for line in lines[1:]] == [*nll, "share of the NMM"]
    rows = (folds >= 0).nonzero()[:, 0]
    raw, part, truth = scores[folds[rows], rows], folds[rows], y[rows]
    assert nll["classifier"] == pytest.approx(cross_entropy(raw, truth).item(), rel=1e-5)
    parts = [(part == k, temperature_scaling(raw, truth, part != k)) for k in range(FOLDS)]
    losses = [cross_entropy(raw[out] / t, truth[out]) for out, t in parts]
    assert nll["temperature scaling"] == pytest.approx(sum(losses).item() / FOLDS, rel=1e-4)
    stacked.fit(hood, scores[0], y, folds == 0, folds == 1, **FEW)
    assert tuple(stacked.evidence.nll) == ("classifier", "temperature scaling", "pool", "NMM")
    assert "share" not in stacked.summary()
    stacked.update(hood, scores[0], y, folds == 0, folds > 0, **FEW)
    assert stacked.evidence is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_labels(kind):
    """One backward pass has those of each label alone."""
    hood, scores, y, train, held_out = cliques()
    columns, stacked = [], made(kind).fit(hood, scores, y, train, held_out, **FEW)
    data = on_graph(hood, scores, y, train | held_out)
    fold = Fold.of(stacked.formula, data, held_out)
    mixture = NeighborMixture(fold.hood, *stacked.formula(fold.hood, fold.inputs))
    for row in fold.held_out.nonzero()[:, 0]:
        stacked.zero_grad()
        mixture.marginals()[row, fold.y[row]].log().backward(retain_graph=True)
        columns.append(torch.cat([value.grad.view(-1) for value in stacked.parameters()]))
    torch.testing.assert_close(label_gradients(stacked.formula, fold), torch.stack(columns))


def test_distribution_of_the_draws():
    """Their mean is the fit; their covariance is the sandwich. They are saved."""
    hood, scores, y, train, held_out = cliques()
    stacked = StackedNMM(3).fit(hood, scores, y, train, held_out, **FEW)
    formula = stacked.formula
    fold = Fold.of(formula, on_graph(hood, scores, y, train | held_out), held_out)
    prior = formula.prior(stacked.prior, fold.inputs)
    found = deviations(formula, prior, fold, number=40_000).double()
    torch.testing.assert_close(found[::2], -found[1::2])
    gradients = label_gradients(formula, fold)
    fisher = gradients.T @ gradients
    inverse = torch.linalg.inv(fisher + prior.variance.double().reciprocal().diag())
    expected = inverse @ fisher @ inverse
    error = found[::2].T.cov() - expected
    sd = expected.diagonal().clamp(min=1e-12).sqrt()
    assert (error / sd / sd[:, None]).abs().max() < 0.05
    again = StackedNMM(3)
    again.load_state_dict(stacked.state_dict())
    assert torch.equal(again.deviations, stacked.deviations)
    by_hand = numbers(StackedNMM(3), gamma=1.0)  # without a fit there are none
    assert len(by_hand.posterior(hood, scores, y, train).members) == 1
