# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Draws of the parameters: their distribution, and the queries that are averaged over them."""

import networkx as nx
import pytest
import torch
from graphs import to_hood

from pyro_nmm import NeighborMixture, Posterior, blocks
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.models import StackedNMM, compatibility
from pyro_nmm.models.stacked import fit as uncertainty
from pyro_nmm.models.stacked.fit import (
    NUM_DRAWS,
    Fold,
    agreement,
    deviations,
    label_gradients,
    label_log_probs,
)
from pyro_nmm.models.stacked.formula import Priors
from pyro_nmm.models.stacked.table import GraphScores


@pytest.fixture
def problem():
    hood = to_hood(nx.connected_caveman_graph(12, 5))
    y = torch.arange(12).repeat_interleave(5) % 3
    scores = torch.nn.functional.one_hot(y, 3) + torch.randn(60, 3)
    train = torch.arange(60) % 4 == 0
    return hood, scores, y, train, torch.arange(60) % 4 == 1


@pytest.fixture(params=[True, False], ids=["pool", "scores"])
def fitted(request, problem):
    return StackedNMM(3, pool=request.param).fit(*problem, num_steps=30)


def given(stacked, problem):
    hood, scores, y, train, held_out = problem
    data = stacked._read(hood, scores, y, train | held_out, None)
    return Fold.of(stacked.formula, data, held_out)


def test_gradients_of_labels(problem, fitted):
    fold, columns = given(fitted, problem), []
    found = label_gradients(fitted.formula, fold)
    mixture = NeighborMixture(fold.hood, *fitted.formula(fold.hood, fold.inputs, None))
    rows = fold.held_out.nonzero()[:, 0]
    for row in rows:
        fitted.zero_grad()
        mixture.marginals()[row, fold.y[row]].log().backward(retain_graph=True)
        columns.append(torch.cat([value.grad.view(-1) for value in fitted.parameters()]))
    torch.testing.assert_close(found.to(columns[0]), torch.stack(columns), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", ["none", "weights", "relabel", "blocks"])
def test_offsets_of_all_labels_in_one_pass(problem, change, monkeypatch):
    """As finite differences have them, in as many evaluations for any number of labels."""
    hood, scores, y, train, held_out = problem
    weight = torch.rand(hood.num_edges) + 0.5 if change == "weights" else None
    matrix = compatibility(hood, y, train, 3) if change == "relabel" else None
    if change == "blocks":
        monkeypatch.setattr(blocks, "NUMBERS", 500)
    stacked = StackedNMM(3, compatibility=matrix)
    stacked.fit(*problem, num_steps=5, edge_weight=weight)
    data = stacked._read(hood, scores, y, train | held_out, weight)
    fold, calls = Fold.of(stacked.formula, data, held_out), []

    def counted(*args):
        calls.append(args)
        return label_log_probs(*args)

    monkeypatch.setattr(uncertainty, "label_log_probs", counted)
    found = label_gradients(stacked.formula, fold)
    assert len(calls) == 2 * (found.shape[1] - 3)
    for k, step in enumerate(1e-4 * torch.eye(found.shape[1])[-3:]):
        moved = [stacked.formula.with_values(stacked.formula.numbers() + s) for s in (step, -step)]
        ends = [label_log_probs(formula, fold) for formula in moved]
        slope = (ends[0] - ends[1]) / 2e-4
        torch.testing.assert_close(found[:, k - 3], slope, atol=1e-8, rtol=1e-6)


def test_distribution_of_the_draws(problem, fitted, monkeypatch):
    """Their mean is the fit; their covariance is the sandwich."""
    monkeypatch.setattr(uncertainty, "NUM_DRAWS", 40_000)
    fold = given(fitted, problem)
    priors = Priors.of(fitted.declared, fitted.prior)
    found = deviations(fitted.formula, priors, [fold]).double()
    torch.testing.assert_close(found[::2], -found[1::2])
    gradients = label_gradients(fitted.formula, fold)
    fisher = gradients.T @ gradients
    inverse = torch.linalg.inv(fisher + priors.precision(fitted.formula.values).double().diag())
    expected = inverse @ fisher @ inverse
    error = found[::2].T.cov() - expected
    sd = expected.diagonal().clamp(min=1e-12).sqrt()
    assert (error / sd / sd[:, None]).abs().max() < 0.05


def test_a_fit_has_draws_and_they_move_the_posterior(problem, fitted):
    hood, scores, y, train, _ = problem
    assert fitted.deviations.shape[0] == NUM_DRAWS
    assert fitted.deviations.any()
    posterior = fitted.posterior(hood, scores, y, train)
    assert isinstance(posterior, AveragedPosterior)
    assert len(posterior.members) == NUM_DRAWS
    assert sum(len(each.components) for each in posterior.members) == 64
    spread = torch.stack([each.marginals() for each in posterior.members])[:, ~train].std(0)
    assert spread.max() > 0.01
    exact = fitted.posterior(hood, scores, y, train, num_draws=0)
    assert type(exact) is Posterior
    change = (posterior.marginals() - exact.marginals()).abs().max()
    assert 0 < change < 0.1  # opposite draws: the mean moves by terms of second order only


def test_each_member_has_the_parameters_of_its_draw(problem):
    hood, scores, y, train, held_out = problem
    stacked = StackedNMM(3).fit(hood, scores, y, train, held_out, num_steps=30)
    members = stacked.posterior(hood, scores, y, train, num_draws=2).members
    assert len(members) == 2
    start = torch.nn.utils.parameters_to_vector(stacked.parameters()).detach().clone()
    for change, member in zip(stacked.deviations, members, strict=False):
        torch.nn.utils.vector_to_parameters(start + change, stacked.parameters())
        expected = stacked.mixture(hood, scores, y, train).marginals()
        torch.testing.assert_close(member.marginals()[~train], expected[~train])


def test_draws_are_saved_and_parameters_set_by_hand_have_none(problem, fitted):
    hood, scores, y, train, _ = problem
    again = StackedNMM(3, pool=fitted.pool is not None)
    again.load_state_dict(fitted.state_dict())
    assert torch.equal(again.deviations, fitted.deviations)
    by_hand = StackedNMM(3)
    by_hand.gamma.data.fill_(1.0)
    assert type(by_hand.posterior(hood, scores, y, train)) is Posterior
    fitted.update(hood, scores, y, train, ~train, num_steps=5)
    assert not torch.equal(again.deviations, fitted.deviations)


@pytest.mark.parametrize("num_draws", [-1, 17, 1.5])
def test_bad_numbers_of_draws(problem, fitted, num_draws):
    hood, scores, y, train, _ = problem
    with pytest.raises(ValueError, match="num_draws"):
        fitted.posterior(hood, scores, y, train, num_draws=num_draws)


def test_few_samples_take_few_draws(problem, fitted):
    hood, scores, y, train, _ = problem
    assert len(fitted.posterior(hood, scores, y, train, num_samples=3).members) == 3
    assert type(fitted.posterior(hood, scores, y, train, num_samples=1)) is Posterior


def test_attention_to_oneself_follows_the_agreement_of_neighbours(problem):
    """The prior's mean of gamma is .5 where neighbours always agree, and 4 more where never."""
    hood, scores, y, train, held_out = problem
    strange = torch.randint(3, (60,))
    for labels in (y, strange):
        stacked = StackedNMM(3).fit(hood, scores, labels, train, held_out, num_steps=1, lr=1e-9)
        agree = agreement(GraphScores(hood, scores, labels, train | held_out))
        expected = 0.5 + 4 * (1 - agree) ** 2
        assert stacked.gamma.item() == pytest.approx(expected, abs=1e-6)
    own = StackedNMM(3, prior={"gamma": (1.5, 0.4)})
    own.fit(hood, scores, strange, train, held_out, num_steps=1, lr=1e-9)
    assert own.gamma.item() == pytest.approx(1.5, abs=1e-6)


def test_new_labels_are_evidence_and_in_the_pool(problem):
    """Before an update they are evidence alone, as in ``condition``; after it, both."""
    hood, scores, y, train, new = problem
    stacked = StackedNMM(3).fit(*problem, num_steps=20)
    exact = {"num_samples": None, "num_draws": 0}
    some = new & (torch.arange(60) < 8)
    found = stacked.posterior(hood, scores, y, train, new=some, **exact)
    expected = stacked.posterior(hood, scores, y, train, **exact).condition(y, some)
    torch.testing.assert_close(found.marginals(), expected.marginals())
    stacked.update(hood, scores, y, train, new, num_steps=5)
    assert stacked.updated
    found = stacked.posterior(hood, scores, y, train, new=some, **exact)
    alpha, logits = stacked(hood, scores, y, train | some)
    plain = NeighborMixture(hood, alpha.detach(), logits.detach()).condition(y, some)
    torch.testing.assert_close(found.marginals()[~train], plain.marginals()[~train])
    assert found.observed.equal(train | some)
    assert not stacked.fit(*problem, num_steps=2).updated


def test_new_labels_that_overlap_or_contradict(problem):
    hood, scores, y, train, new = problem
    stacked = StackedNMM(3).fit(*problem, num_steps=2)
    with pytest.raises(ValueError, match="known and new must be disjoint"):
        stacked.posterior(hood, scores, y, train, new=train)
    with pytest.raises(ValueError, match="y holds label 3"):
        stacked.posterior(hood, scores, torch.full_like(y, 3), train, new=new)
