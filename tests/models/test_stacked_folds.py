# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A StackedNMM's folds of labels side by side, evidence and share, and uncertain parameters."""

import pytest
import torch
from stacking import FEW, KINDS, cliques, made, numbers

from pyro_nmm import Neighborhood, NeighborMixture, Posterior, blocks
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.fit import Fold, deviations, expected_share, label_gradients
from pyro_nmm.models.stacked.formula import Priors
from pyro_nmm.models.stacked.table import GraphScores

FOLDS = 3


@pytest.fixture
def problem():
    """Cliques whose labels nearly agree, half of them observed, and scores of three classifiers."""
    hood, scores, y, *_ = cliques()
    scores = scores + 2 * torch.nn.functional.one_hot(y, 3)
    y = torch.where(torch.rand(60) < 0.1, torch.randint(3, (60,)), y)
    folds = torch.arange(60) % 6
    return hood, scores + torch.randn(FOLDS, 60, 3), y, folds.where(folds < FOLDS, -1)


def copies(hood, scores, y, folds):
    """The same problem on three copies of the graph, one after the other."""
    edges = torch.stack([hood.source, hood.target])
    wide = Neighborhood(torch.cat([edges + 60 * k for k in range(FOLDS)], 1), FOLDS * 60)
    masks = torch.cat([(folds >= 0) & (folds != k) for k in range(FOLDS)])
    out = torch.cat([folds == k for k in range(FOLDS)])
    return wide, scores.reshape(-1, 3), y.repeat(FOLDS), masks, out


@pytest.mark.parametrize("weighted", [False, True])
def test_folds_are_copies_of_the_graph(problem, weighted):
    hood, folds = problem[0], problem[3]
    weight = torch.rand(hood.num_edges) + 0.5 if weighted else None
    wide = weight.repeat(FOLDS) if weighted else None
    fits = []
    options = {"folds": folds, "edge_weight": weight}, {"edge_weight": wide}
    for arguments, more in zip((problem[:3], copies(*problem)), options, strict=True):
        torch.manual_seed(0)
        fits.append(made("scores").fit(*arguments, **more, num_steps=30).state_dict())
    for name, value in fits[0].items():
        torch.testing.assert_close(value, fits[1][name], rtol=1e-6, atol=1e-8)


def test_marginals_are_a_linear_pool(problem):
    """Of the NMM and temperature scaling, or the probabilities beside it."""
    hood, scores, y, folds = problem
    stacked = StackedNMM(3).fit(hood, scores, y, folds=folds, **FEW)
    known, share = folds >= 0, float(stacked.share)
    graph = hood, scores[0], y, known
    posterior = stacked.posterior(*graph, num_draws=0)
    beside = torch.rand(60, 3) + 0.1
    beside = beside / beside.sum(-1, keepdim=True)
    other = stacked.posterior(*graph, num_draws=0, beside=beside.numpy()).marginals()
    stacked.share.fill_(1.0)
    nmm = stacked.posterior(*graph, num_draws=0).marginals()
    scaled = (scores[0] / stacked.pool.temperature).softmax(-1)
    expected, with_others = (
        torch.where(known[:, None], nmm, share * nmm + (1 - share) * each)
        for each in (scaled, beside)
    )
    mixed = posterior.marginals()
    for found, wanted in ((mixed, expected), (other, with_others)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    share_of_two = (posterior.sample((4000,)) == 2).double().mean(0)
    assert (share_of_two - mixed[:, 2]).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("agree", [0.0, 0.4, 1.0])
def test_share_is_the_posterior_mean_of_a_weight(agree):
    """By quadrature; few labels leave it near the prior's mean, many decide."""
    first, second = torch.randn(2, 7)
    grid = torch.linspace(0, 1, 20001).double()
    terms = grid[:, None] * first.exp() + (1 - grid[:, None]) * second.exp()
    density = grid ** (5 * agree) * (1 - grid) ** (5 * (1 - agree)) * terms.prod(1)
    mean = float((grid * density).sum() / density.sum())
    assert expected_share(first, second, agree) == pytest.approx(mean, abs=1e-3)
    better = torch.full((300,), -0.1)
    assert expected_share(better, better - 2, agree) > 0.97
    prior = (1 + 5 * agree) / 7
    assert expected_share(better[:1], better[:1], agree) == pytest.approx(prior, abs=1e-3)
    assert expected_share(torch.full((90,), -torch.inf), better[:90], agree) < 0.08


def test_share_follows_the_graph():
    """Neighbours that agree earn the NMM a larger share than random edges."""
    y = torch.arange(200) % 2
    scores = torch.randn(FOLDS, 200, 2)
    folds = torch.where(torch.rand(200) < 0.6, torch.arange(200) % FOLDS, -1)
    inside = torch.randint(100, (2, 800)) * 2
    inside[:, ::2] += 1
    share = []
    for edges in (inside, *torch.randint(200, (3, 2, 800))):
        hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), 200)
        share.append(StackedNMM(2).fit(hood, scores, y, folds=folds, num_steps=60).share)
    # Of random graphs it may be .8 by chance.
    assert share[0] > 0.9
    assert share[0] > max(share[1:]) + 0.1


def test_summary(problem):
    hood, scores, y, folds = problem
    cross_entropy, stacked = torch.nn.functional.cross_entropy, StackedNMM(3)
    with pytest.raises(ValueError, match="summary needs a fit with a pool"):
        stacked.summary()
    stacked.fit(hood, scores, y, folds=folds, num_steps=20)
    nll, lines = stacked.evidence.nll, stacked.summary().splitlines()
    assert [line[:20].strip() for line in lines[1:]] == [*nll, "share of the NMM"]
    rows = (folds >= 0).nonzero()[:, 0]
    raw, part, truth = scores[folds[rows], rows], folds[rows], y[rows]
    assert nll["classifier"] == pytest.approx(cross_entropy(raw, truth).item(), rel=1e-5)
    parts = [(part == k, temperature_scaling(raw, truth, part != k)) for k in range(FOLDS)]
    losses = [cross_entropy(raw[out] / t, truth[out]) for out, t in parts]
    assert all(out.sum() == len(rows) / FOLDS for out, _ in parts)
    expected = sum(losses).item() / FOLDS  # each label by the temperature of other folds
    assert nll["temperature scaling"] == pytest.approx(expected, rel=1e-4)
    stacked.fit(hood, scores[0], y, folds == 0, folds == 1, **FEW)
    nll = stacked.evidence.nll
    assert tuple(nll) == ("classifier", "temperature scaling", "pool", "NMM")
    assert "share" not in stacked.summary()
    loss = cross_entropy(scores[0][folds == 1], y[folds == 1])
    assert nll["classifier"] == pytest.approx(loss.item(), rel=1e-5)
    stacked.update(hood, scores[0], y, folds == 0, folds > 0, **FEW)
    assert stacked.evidence is None


@pytest.fixture(params=["pool", "scores"])
def fitted(request):
    """A module, its problem, and the labels that are held out."""
    given = cliques()
    stacked = made(request.param).fit(*given, **FEW)
    return stacked, given, fold_of(stacked, *given)


def fold_of(stacked, hood, scores, y, train, held_out, weight=None):
    data = GraphScores(hood, scores, y, train | held_out, weight)
    return Fold.of(stacked.formula, data, held_out)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_labels(kind, weighted, monkeypatch):
    """One backward pass has those of each label alone, in blocks of any size."""
    given = cliques()
    weight = torch.rand(given[0].num_edges) + 0.5 if weighted else None
    stacked = made(kind).fit(*given, edge_weight=weight, **FEW)
    fold, columns = fold_of(stacked, *given, weight), []
    mixture = NeighborMixture(fold.hood, *stacked.formula(fold.hood, fold.inputs, fold.edge_weight))
    for row in fold.held_out.nonzero()[:, 0]:
        stacked.zero_grad()
        mixture.marginals()[row, fold.y[row]].log().backward(retain_graph=True)
        columns.append(torch.cat([value.grad.view(-1) for value in stacked.parameters()]))
    for size in (blocks.NUMBERS, 500):
        monkeypatch.setattr(blocks, "NUMBERS", size)
        torch.testing.assert_close(label_gradients(stacked.formula, fold), torch.stack(columns))


def test_distribution_of_the_draws(fitted):
    """Their mean is the fit; their covariance is the sandwich."""
    stacked, _, fold = fitted
    formula, priors = stacked.formula, Priors.of(stacked.declared, stacked.prior)
    found = deviations(formula, priors, [fold], number=40_000).double()
    torch.testing.assert_close(found[::2], -found[1::2])
    gradients = label_gradients(formula, fold)
    fisher = gradients.T @ gradients
    inverse = torch.linalg.inv(fisher + priors.precision(formula.values).double().diag())
    expected = inverse @ fisher @ inverse
    error = found[::2].T.cov() - expected
    sd = expected.diagonal().clamp(min=1e-12).sqrt()
    assert (error / sd / sd[:, None]).abs().max() < 0.05


def test_draws_are_saved_and_parameters_set_by_hand_have_none(fitted):
    stacked, (hood, scores, y, train, _), _ = fitted
    again = made("pool" if stacked.pool else "scores")
    again.load_state_dict(stacked.state_dict())
    assert torch.equal(again.deviations, stacked.deviations)
    by_hand = numbers(StackedNMM(3), gamma=1.0)
    assert type(by_hand.posterior(hood, scores, y, train)) is Posterior
    stacked.update(hood, scores, y, train, ~train, **FEW)
    assert not torch.equal(again.deviations, stacked.deviations)
