# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Folds of labels side by side: the written-out copies of a graph, and the share of the NMM."""

import networkx as nx
import pytest
import torch
from graphs import to_hood

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, edge_weights, marginals_in_blocks, temperature_scaling
from pyro_nmm.models.stacked import fit, formula
from pyro_nmm.models.stacked.fit import expected_share
from pyro_nmm.models.stacked.table import GraphScores, scores_of_folds
from pyro_nmm.sources import communities

FOLDS = 3


@pytest.fixture
def problem():
    """Cliques whose labels nearly agree, half of them observed, and scores of three classifiers."""
    hood = to_hood(nx.connected_caveman_graph(12, 5))
    y = torch.arange(12).repeat_interleave(5) % 3
    y = torch.where(torch.rand(60) < 0.1, torch.randint(3, (60,)), y)
    folds = torch.arange(60) % 6
    truth = torch.nn.functional.one_hot(y, 3).to(torch.get_default_dtype())
    return hood, truth + torch.randn(FOLDS, 60, 3), y, folds.where(folds < FOLDS, -1)


def copies(hood, scores, y, folds):
    """The same problem on three copies of the graph, one after the other."""
    size = hood.num_nodes
    edges = torch.stack([hood.source, hood.target])
    every = torch.cat([edges + k * size for k in range(FOLDS)], 1)
    wide = Neighborhood(every, FOLDS * size)
    masks = torch.stack([(folds >= 0) & (folds != k) for k in range(FOLDS)]).view(-1)
    out = torch.stack([folds == k for k in range(FOLDS)]).view(-1)
    return wide, scores.reshape(-1, 3), y.repeat(FOLDS), masks, out


@pytest.fixture
def labels_by_copy(monkeypatch, problem):
    """Known labels around a node, relative to the labels' shares in its own copy of the graph."""
    hood, around = problem[0], formula.propagated

    def in_copies(data):
        if data.hood.num_nodes == hood.num_nodes:
            return around(data)
        parts = [part.chunk(FOLDS) for part in (data.scores, data.y, data.known)]
        weights = [None] * FOLDS if data.edge_weight is None else data.edge_weight.chunk(FOLDS)
        every = zip(*parts, weights, strict=True)
        return torch.cat([around(GraphScores(hood, *part)) for part in every])

    monkeypatch.setattr(formula, "propagated", in_copies)


def test_nested_lists(problem):
    hood, scores, _, folds = problem
    given = (scores, folds), (scores.tolist(), folds.tolist())
    for found, expected in zip(*(scores_of_folds(hood, *each) for each in given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_folds_are_copies_of_the_graph(problem, labels_by_copy, weighted):
    hood, folds = problem[0], problem[3]
    weight = torch.rand(hood.num_edges) + 0.5 if weighted else None
    wide = weight.repeat(FOLDS) if weighted else None
    fits = []
    options = {"folds": folds, "edge_weight": weight}, {"edge_weight": wide}
    for arguments, more in zip((problem[:3], copies(*problem)), options, strict=True):
        torch.manual_seed(0)
        module = StackedNMM(3, prior={"gamma": (0.6, 0.5)})  # others follow the agreement of copies
        fits.append(module.fit(*arguments, **more, num_steps=30).state_dict())
    assert 0 < fits[0].pop("share") < fits[1].pop("share") == 1
    for name, value in fits[0].items():
        torch.testing.assert_close(value, fits[1][name], rtol=1e-6, atol=1e-8)


def test_folds_of_scores_alone_are_copies_too(problem):
    fits = []
    for arguments in (problem[:3], copies(*problem)):
        torch.manual_seed(0)
        options = {"folds": problem[3]} if len(arguments) == 3 else {}
        fits.append(StackedNMM(pool=False).fit(*arguments, **options, num_steps=30).state_dict())
    for name, value in fits[0].items():
        torch.testing.assert_close(value, fits[1][name], rtol=1e-6, atol=1e-8)


def test_folds_of_communities(problem):
    """Communities of a copy are sources of its own nodes only: with no share of the NMM's
    communities, the fit is the one without them."""
    hood, scores, y, folds = problem
    place = communities(torch.stack([hood.source, hood.target]), 60, torch.arange(60) // 5)
    stacked = StackedNMM(3, communities=True, prior={"community": (-30.0, 1e-3)})
    torch.manual_seed(0)
    found = stacked.fit(place, scores, y, folds=folds, num_steps=30).state_dict()
    torch.manual_seed(0)
    plain = StackedNMM(3).fit(hood, scores, y, folds=folds, num_steps=30).state_dict()
    for name in ("gamma", "similarity", "pool.labels", "pool.offsets"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-3, atol=1e-3)


def test_marginals_are_a_linear_pool(problem):
    hood, scores, y, folds = problem
    stacked = StackedNMM(3).fit(hood, scores, y, folds=folds, num_steps=20)
    known, share = folds >= 0, float(stacked.share)
    pooled = stacked.posterior(hood, scores[0], y, known, num_draws=0)
    mixed = pooled.marginals()
    blocks = torch.zeros(60, 3)
    for rows, block in marginals_in_blocks(stacked, hood, scores[0], y, known):
        blocks[rows] = block
    stacked.share.fill_(1.0)
    nmm = stacked.posterior(hood, scores[0], y, known, num_draws=0).marginals()
    alone = (scores[0] / stacked.pool.temperature).softmax(-1)
    expected = torch.where(known[:, None], nmm, share * nmm + (1 - share) * alone)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(blocks, expected, rtol=1e-5, atol=1e-5)
    draws = pooled.sample((4000,))
    share_of_two = (draws == 2).double().mean(0)
    assert (share_of_two - mixed[:, 2]).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("agree", [0.0, 0.4, 1.0])
def test_share_is_the_posterior_mean_of_a_weight(agree):
    """By quadrature; few labels leave it near the prior's mean, many decide."""
    first, second = torch.randn(2, 7)
    grid = torch.linspace(0, 1, 20001).double()
    terms = grid[:, None] * first.exp() + (1 - grid[:, None]) * second.exp()
    density = grid ** (5 * agree) * (1 - grid) ** (5 * (1 - agree)) * terms.prod(1)
    assert expected_share(first, second, agree) == pytest.approx(
        float((grid * density).sum() / density.sum()), abs=1e-3
    )
    better = torch.full((300,), -0.1)
    assert expected_share(better, better - 2, agree) > 0.97
    prior = (1 + 5 * agree) / 7
    assert expected_share(better[:1], better[:1], agree) == pytest.approx(prior, abs=1e-3)
    assert expected_share(torch.full((90,), -torch.inf), better[:90], agree) < 0.08


def test_agreement_of_labelled_neighbours():
    """Between chance and always, of pairs that are both observed; few pairs count less."""
    pairs = torch.tensor([[0, 1, 2, 4, 5], [1, 2, 3, 5, 6]])
    hood = Neighborhood(torch.cat([pairs, pairs.flip(0)], 1), 7)
    y, known = torch.tensor([0, 0, 1, 1, 0, 1, 0]), torch.tensor([True] * 6 + [False])
    data = GraphScores(hood, torch.zeros(7, 2), y, known)
    # Pairs 0-1 and 2-3 of four agree, and three of six labels are equal: as often as by chance.
    assert fit.agreement(data) == 0
    y[5] = 0
    data = GraphScores(hood, torch.zeros(7, 2), y, known & (torch.arange(7) != 2))
    assert fit.agreement(data) == pytest.approx(2 / 12)  # 0-1 and 4-5
    whole = to_hood(nx.disjoint_union(nx.complete_graph(10), nx.complete_graph(10)))
    y = torch.arange(20) // 10
    data = GraphScores(whole, torch.zeros(20, 2), y, torch.ones(20, dtype=torch.bool))
    assert fit.agreement(data) == pytest.approx(90 / 100)


def test_a_refit_that_diverges_gets_no_share(problem, monkeypatch):
    hood, scores, y, folds = problem

    def nan(formula, priors, fold, rows, log_probs, num_steps):
        return torch.full(rows.shape, torch.nan)

    monkeypatch.setattr(fit, "refitted", nan)
    stacked = StackedNMM(3).fit(hood, scores, y, folds=folds, num_steps=5)
    assert 0 < float(stacked.share) < 0.2
    assert stacked.evidence.nll["NMM"] == torch.inf


def test_summary(problem):
    hood, scores, y, folds = problem
    stacked = StackedNMM(3)
    with pytest.raises(ValueError, match="summary needs a fit with a pool"):
        stacked.summary()
    stacked.fit(hood, scores, y, folds=folds, num_steps=20)
    lines = stacked.summary().splitlines()
    assert [line[:20].strip() for line in lines[1:]] == [*stacked.evidence.nll, "share of the NMM"]
    rows = (folds >= 0).nonzero()[:, 0]
    loss = torch.nn.functional.cross_entropy(scores[folds[rows], rows], y[rows])
    assert stacked.evidence.nll["classifier"] == pytest.approx(loss.item(), rel=1e-5)
    own, part, truth = scores[folds[rows], rows], folds[rows], y[rows]
    parts = [(part == k, temperature_scaling(own, truth, part != k)) for k in range(FOLDS)]
    losses = [torch.nn.functional.cross_entropy(own[out] / t, truth[out]) for out, t in parts]
    assert all(out.sum() == len(rows) / FOLDS for out, _ in parts)
    expected = sum(losses).item() / FOLDS  # each label by the temperature of other folds
    assert stacked.evidence.nll["temperature scaling"] == pytest.approx(expected, rel=1e-4)
    stacked.fit(hood, scores[0], y, folds == 0, folds == 1, num_steps=5)
    names = "classifier", "temperature scaling", "pool", "NMM"
    assert tuple(stacked.evidence.nll) == names
    assert "share" not in stacked.summary()
    loss = torch.nn.functional.cross_entropy(scores[0][folds == 1], y[folds == 1])
    assert stacked.evidence.nll["classifier"] == pytest.approx(loss.item(), rel=1e-5)
    stacked.update(hood, scores[0], y, folds == 0, folds > 0, num_steps=5)
    assert stacked.evidence is None


def test_probabilities_beside_the_nmm(problem):
    hood, scores, y, folds = problem
    stacked = StackedNMM(3).fit(hood, scores, y, folds=folds, num_steps=20)
    known, share = folds >= 0, float(stacked.share)
    beside = torch.rand(60, 3) + 0.1
    beside = beside / beside.sum(-1, keepdim=True)
    usual = stacked.posterior(hood, scores[0], y, known).marginals()
    alone = (scores[0] / stacked.pool.temperature).softmax(-1)
    found = stacked.posterior(hood, scores[0], y, known, beside=beside.numpy()).marginals()
    expected = usual + (1 - share) * (beside - alone) * ~known[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for wrong, message in ((beside[:5], "beside must have shape"), (2 * beside, "sum to one")):
        with pytest.raises(ValueError, match=message):
            stacked.posterior(hood, scores[0], y, known, beside=wrong)
    with pytest.raises(ValueError, match="beside needs a pool"):
        StackedNMM(pool=False).posterior(hood, scores[0], y, known, beside=beside)


def test_share_follows_the_graph():
    """Neighbours that agree earn the NMM a large share, random edges a small one."""
    y = torch.arange(200) % 2
    scores = torch.randn(FOLDS, 200, 2)
    folds = torch.where(torch.rand(200) < 0.6, torch.arange(200) % FOLDS, -1)
    inside = torch.randint(100, (2, 800)) * 2
    inside[:, ::2] += 1
    share = {}
    for name, edges in {"same": inside, "random": torch.randint(200, (2, 800))}.items():
        torch.manual_seed(0)
        hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), 200)
        share[name] = float(StackedNMM(2).fit(hood, scores, y, folds=folds, num_steps=60).share)
    assert share["same"] > 0.9 > share["random"] + 0.1


def test_weights_of_edges_reach_every_fold(problem):
    hood, scores, y, folds = problem
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    weight = edge_weights(hood, edges, torch.rand(edges.shape[1]) + 0.1)
    torch.manual_seed(0)
    one = StackedNMM(3).fit(hood, scores, y, folds=folds, edge_weight=weight, num_steps=5)
    torch.manual_seed(0)
    other = StackedNMM(3).fit(hood, scores, y, folds=folds, num_steps=5)
    assert not torch.equal(one.gamma, other.gamma)


def test_arguments_of_folds(problem):
    hood, scores, y, folds = problem
    with pytest.raises(ValueError, match="leave out train, held_out"):
        StackedNMM(3).fit(hood, scores, y, folds >= 0, folds=folds)
    with pytest.raises(ValueError, match="train and held_out are needed"):
        StackedNMM(3).fit(hood, scores[0], y)
    with pytest.raises(ValueError, match=r"scores must have shape \(K, 60, C\)"):
        StackedNMM(3).fit(hood, scores[0], y, folds=folds)
    for wrong in (folds + 1, folds.clamp(max=1)):
        with pytest.raises(ValueError, match=r"folds must hold each of 0\.\.2"):
            StackedNMM(3).fit(hood, scores, y, folds=wrong)
