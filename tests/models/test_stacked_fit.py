# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: what it finds, folds side by side, uncertainty and evidence."""

import copy
import math
import re
from dataclasses import replace

import networkx as nx
import pytest
import torch
from graphs import house, to_hood
from stacking import (
    FEW,
    few_labels,
    fit_on_all_edges,
    log_prior,
    log_score,
    made,
    mask,
    prior_of,
    shared_labels,
)

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.stacked import bounded_temperature
from pyro_nmm.models.stacked.fit import Fold, agreement, parts_of
from pyro_nmm.models.stacked.table import GraphScores


@pytest.fixture(scope="module")
def shared():
    return shared_labels()


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
    stacked = made("scores").fit(hood, scores, y, train, held_out)
    # 0.5 was true; the prior's mean, 2.7, and the gap of the bound draw it upwards.
    assert 0.2 < stacked.log_kappa.exp().item() < 2.0
    assert stacked.log_scale.item() == pytest.approx(math.log(0.25), abs=1)
    # Better than temperature scaling on nodes that neither has seen, alone and in pairs.
    probs = (scores / temperature_scaling(scores, y, held_out)).softmax(-1)
    mix = stacked.mixture(hood, scores)
    alone = log_score(mix.condition(y, train, num_samples=64), y, test)
    assert alone - probs[test, y[test]].log().mean() > 0.02
    assert mix.log_likelihood(y, observed=test, given=train, num_particles=64) / 200 > alone
    order = torch.cat([train.nonzero()[:, 0], held_out.nonzero()[:, 0]])
    prior = prior_of(stacked, scores, y, held_out)

    @torch.no_grad()
    def objective():
        q = OrderedConditional(hood, *stacked(hood, scores), y, train | held_out, order=order)
        torch.manual_seed(1)
        bound = q.log_terms(q.sample((400,)))[:, 200:].sum(-1).mean()
        return (bound + log_prior(stacked, prior)).item()

    best = objective()
    for name in stacked.prior:
        parameter = stacked.get_parameter(name)
        for step in (-1.0, 1.0):
            parameter.data += step
            assert objective() < best, (name, step)
            parameter.data -= step


@pytest.mark.slow
def test_fit_beats_its_limits_on_new_nodes(shared):
    hood, scores, y, train, held_out, _, test = shared
    torch.manual_seed(0)
    stacked = StackedNMM(4).fit(hood, scores, y, train, held_out)
    ours = log_score(stacked.posterior(hood, scores, y, train), y, test)
    alone = made("scores").fit(hood, scores, y, train, held_out)
    scaled = (scores / temperature_scaling(scores, y, held_out)).log_softmax(-1)
    assert ours > log_score(alone.posterior(hood, scores, y, train), y, test) + 0.01
    assert ours > scaled[test, y[test]].mean().item() + 0.1
    assert stacked.pool.offsets.argmin() == 0  # the label that the classifier prefers
    mix = stacked.mixture(hood, scores, y, train)
    assert mix.log_likelihood(y, test, train, 64).item() / 120 > ours


def test_update_learns_from_new_labels():
    """Labels inform about nodes at a distance, which few labels have shown before."""
    torch.manual_seed(0)
    hood = to_hood(nx.convert_node_labels_to_integers(nx.grid_2d_graph(20, 20)))
    y = 2 * (torch.arange(400) // 20 // 10) + torch.arange(400) % 20 // 10
    scores = torch.nn.functional.one_hot(y, 4) + 2 * torch.randn(400, 4)
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
    scores = 10.0 * torch.nn.functional.one_hot(y).double()
    stacked = made("scores").fit(hood, scores, y, [0, 1], [2, 3], num_steps=30)
    assert 0.05 < stacked.log_scale.exp() < 10
    assert stacked.mixture(hood, scores).marginals().isfinite().all()
    scores = torch.randn(5, 2)
    stacked = made("scores").fit(hood, scores, y, [0, 1], [2], num_steps=60)
    for name, (mean, sd) in prior_of(stacked, scores, y, mask(5, 2)).items():
        assert abs(stacked.get_parameter(name).item() - mean) < 1.5 * sd


def test_scores_with_an_offset_of_each_row():
    """Softmax ignores it; log joints of generative classifiers have it."""
    torch.manual_seed(0)
    y, held_out = torch.randint(2, (200,)), torch.arange(200) < 150
    scores = torch.randn(200, 2) + 2 * torch.nn.functional.one_hot(y)
    plain = bounded_temperature(scores, y, held_out)
    shifted = bounded_temperature(scores + 500 * torch.randn(200, 1), y, held_out)
    assert abs(shifted - plain) < 0.05 * plain
    hood = to_hood(nx.path_graph(200))
    for constant in (torch.ones(200, 2), torch.full((200, 2), 0.5).log()):
        assert bounded_temperature(constant, y, held_out) == 1
        stacked = StackedNMM(2).fit(hood, constant, y, ~held_out, held_out, **FEW)
        assert stacked.posterior(hood, constant, y, ~held_out).marginals().isfinite().all()


@pytest.mark.parametrize("kind", ["pool", "scores"])
@pytest.mark.parametrize("call", ["fit", "update"])
def test_labels_outside_the_masks_are_never_read(kind, call):
    hood, scores, y, train, held_out = few_labels()
    results = []
    for other in (0, 99):
        torch.manual_seed(0)
        labels, stacked = y.where(train | held_out, other), made(kind)
        getattr(stacked, call)(hood, scores, labels, train, held_out, **FEW)
        results.append(torch.nn.utils.parameters_to_vector(stacked.parameters()))
    assert torch.equal(*results)


def test_no_label_is_told_by_itself(shared):
    """What a fold's labels are given is the same, whatever they are."""
    hood, scores, y, train, held_out, new, _ = shared
    formula, known = StackedNMM(4).formula, held_out | new
    for out in parts_of(known, 5):
        folds = []
        for labels in (y, torch.where(out, (y + 1) % 4, y)):
            folds.append(Fold.of(formula, GraphScores(hood, scores, labels, train | known), out))
        assert torch.equal(folds[0].inputs, folds[1].inputs)
        assert not torch.equal(folds[0].y, folds[1].y)
        assert not (folds[0].observed & folds[0].held_out).any()


@pytest.mark.parametrize("weighted", [False, True])
def test_fit_leaves_out_what_it_does_not_need(weighted, kernels):
    """Nodes that no labelled node may choose."""
    problem = few_labels()
    hood, scores, y, train, held_out = problem
    fold = Fold.of(made("scores").formula, GraphScores(hood, scores, y, train | held_out), held_out)
    rows = hood.restrict(train | held_out)
    sources = len(rows.source.unique())
    assert (fold.hood.num_nodes, fold.hood.num_edges) == (sources, rows.num_edges + sources - 14)
    how = {"num_steps": 20, "edge_weight": torch.rand(hood.num_edges) + 0.1 if weighted else None}
    torch.manual_seed(7)
    expected = fit_on_all_edges(made("scores"), *problem, **how)
    torch.manual_seed(7)
    found = made("scores").fit(*problem, **how)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value)


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_fit_that_diverges_leaves_the_module_alone(lr):
    problem, stacked = few_labels(), made("scores").double()
    stacked.fit(*problem, num_steps=3)
    before = [value.clone() for value in stacked.state_dict().values()]
    must = rf"lr={re.escape(str(lr))} is too large.* no longer finite"
    with pytest.raises(ValueError, match=must):
        stacked.fit(*problem, lr=lr)
    assert all(map(torch.equal, stacked.state_dict().values(), before))
    assert stacked.mixture(*problem[:2]).marginals().isfinite().all()


@pytest.mark.parametrize(("pool", "name"), [(True, "pool.labels"), (False, "log_scale")])
def test_prior_is_an_argument(pool, name):
    """A tight one holds the fit where its mean is, and the others are as they were."""
    hood, scores, y, train, held_out = few_labels()
    plain, tight = StackedNMM(3, pool=pool), StackedNMM(3, pool=pool, prior={name: (1.7, 1e-3)})
    assert {n: v for n, v in tight.prior.items() if n != name}.items() <= plain.prior.items()
    assert tight.get_parameter(name).item() == pytest.approx(1.7)  # where a fit begins
    tight.fit(hood, scores, y, train, held_out, num_steps=40)
    mean = 1.7 if pool else 1.7 - math.log(bounded_temperature(scores, y, held_out))
    assert tight.get_parameter(name).item() == pytest.approx(mean, abs=0.01)
    assert tight.gamma.item() != plain.gamma.item()


def test_agreement_of_labelled_neighbours():
    """Between chance and always, of pairs that are both observed; few pairs count less."""
    pairs = torch.tensor([[0, 1, 2, 4, 5], [1, 2, 3, 5, 6]])
    hood = Neighborhood(torch.cat([pairs, pairs.flip(0)], 1), 7)
    y, known = torch.tensor([0, 0, 1, 1, 0, 1, 0]), torch.tensor([True] * 6 + [False])
    data = GraphScores(hood, torch.zeros(7, 2), y, known)
    # Pairs 0-1 and 2-3 of four agree, and three of six labels are equal: as often as by chance.
    assert agreement(data) == 0
    y[5] = 0
    assert agreement(replace(data, known=known & (torch.arange(7) != 2))) == pytest.approx(2 / 12)
    whole = to_hood(nx.disjoint_union(nx.complete_graph(10), nx.complete_graph(10)))
    data = GraphScores(whole, torch.zeros(20, 2), torch.arange(20) // 10, mask(20, *range(20)))
    assert agreement(data) == pytest.approx(90 / 100)
