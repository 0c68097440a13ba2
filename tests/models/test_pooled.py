# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM on pooled scores: the pool, its limits, new labels, and what users give it."""

import copy
import itertools
from dataclasses import replace

import networkx as nx
import numpy as np
import oracle
import pytest
import torch
from graphs import house, to_hood
from hypothesis import given
from hypothesis import strategies as st

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.models import PooledScores, StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.fit import folds_of, surrogate
from pyro_nmm.models.stacked.formula import DAMPING, SHRINKAGE, STEPS, with_own_sources
from pyro_nmm.models.stacked.table import GraphScores
from pyro_nmm.sources import communities


def mask(size, *nodes):
    found = torch.zeros(size, dtype=torch.bool)
    found[list(nodes)] = True
    return found


def reached_by_walks(hood, y, known, num_classes):
    """The formula's R, by dense powers of W."""
    size = hood.num_nodes
    walk = torch.zeros(size, size)
    for i in range(size):
        nearby = hood.source[hood.ptr[i] : hood.ptr[i + 1]]
        walk[i, nearby] = 1 / len(nearby)
    labels = torch.zeros(size, num_classes)
    labels[known, y[known]] = 1.0
    power = [torch.linalg.matrix_power(walk, r) @ labels for r in range(STEPS + 1)]
    series = sum((1 - DAMPING) * DAMPING**r * term for r, term in enumerate(power[:-1]))
    return walk, labels, series + DAMPING**STEPS * power[-1]


@given(seed=st.integers(0, 2**16))
def test_pool_is_that_of_the_formula(seed):
    torch.manual_seed(seed)
    hood = to_hood(nx.gnp_random_graph(9, 0.3, seed=seed))
    scores, y = 2 * torch.randn(9, 3), torch.randint(3, (9,))
    known = torch.rand(9) < 0.4
    pool = PooledScores(3)
    pool.temperature.fill_(1.7)
    for number in pool.parameters():
        number.data.normal_()
    walk, labels, reached = reached_by_walks(hood, y, known, 3)
    share = (labels.sum(0) + 1) / (labels.sum() + 3)
    above = (reached + SHRINKAGE * share) / (reached.sum(-1, keepdim=True) + SHRINKAGE) / share
    nearby = (walk @ (scores / 1.7).softmax(-1) + 1e-3).log()
    logits = pool.log_scale.exp() * scores / 1.7 + pool.neighbors * nearby
    logits = logits + pool.labels * above.log() + pool.offsets
    own = (scores / 1.7).softmax(-1)
    agree = (own * (walk @ own)).sum(-1, keepdim=True)
    logits = logits + pool.agreement * (agree - 0.75) * scores / 1.7
    terms = pool.terms(hood, scores, y, known)
    torch.testing.assert_close(pool(terms), logits.softmax(-1))


def test_no_label_known_says_nothing():
    terms = PooledScores(3).terms(house(), torch.randn(5, 3), torch.full((5,), -1), mask(5))
    torch.testing.assert_close(terms[2], torch.zeros(5, 3))


def test_communities_have_no_part_in_the_pool():
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    plain, shared = Neighborhood(edges, 3), communities(edges, 3, torch.tensor([0, 0, 1]))
    inputs = torch.randn(3, 2), torch.tensor([1, 0, 0]), mask(3, 0)
    pool = PooledScores(2)
    torch.testing.assert_close(pool.terms(shared, *inputs), pool.terms(plain, *inputs))


def at_the_limit(stacked):
    """No sharing, no floor, attention to oneself, and no other evidence than scores."""
    for name, value in {"log_kappa": 30.0, "log_floor": -60.0, "gamma": 60.0}.items():
        getattr(stacked, name).data.fill_(value)
    for parameter in stacked.pool.parameters():
        parameter.data.zero_()
    return stacked


def test_temperature_scaling_and_a_bias_are_limits():
    hood, scores, y = house(), torch.randn(5, 3).double(), torch.tensor([0, 1, 2, 1, 0])
    stacked, known = at_the_limit(StackedNMM(3).double()), mask(5, 0, 1)
    temperature = temperature_scaling(scores, y, mask(5, 2, 3, 4))
    stacked.pool.temperature.fill_(temperature)
    found = stacked.mixture(hood, scores, y, known).marginals()
    torch.testing.assert_close(found[2:], (scores / temperature).softmax(-1)[2:])
    torch.testing.assert_close(found[:2], torch.eye(3)[:2].double())  # what is known
    bias = torch.tensor([0.3, -1.0, 0.2])
    stacked.pool.offsets.data.copy_(bias)
    found = stacked.mixture(hood, scores, y, known).marginals()
    torch.testing.assert_close(found[2:], (scores / temperature + bias).softmax(-1)[2:])


def test_parameters_are_those_of_the_formula():
    torch.manual_seed(0)
    hood, scores, y, known = house(), torch.randn(5, 3), torch.arange(5) % 3, mask(5, 0, 3)
    stacked = StackedNMM(3)
    for number in stacked.parameters():
        number.data.normal_()
    probs = stacked.pool(stacked.pool.terms(hood, scores, y, known))
    kappa, floor = stacked.log_kappa.exp(), stacked.log_floor.exp()
    alpha, logits = stacked(hood, scores, y, known)
    torch.testing.assert_close(alpha, kappa * (probs + floor / 3))
    for e, (i, j) in enumerate(zip(hood.target, hood.source, strict=True)):
        cosine = probs[i] @ probs[j] / (probs[i].norm() * probs[j].norm())
        torch.testing.assert_close(
            logits[e], stacked.similarity * cosine + stacked.gamma * (i == j)
        )


def test_posterior_is_that_of_the_enumeration():
    """Of the other nodes, in which the known ones have a part by alpha alone."""
    torch.manual_seed(0)
    hood, scores = house(), torch.randn(5, 2)
    y, known, stacked = torch.tensor([1, 0, 0, 0, 0]), mask(5, 0), StackedNMM(2)
    stacked.gamma.data.fill_(0.4)
    alpha, logits = (t.detach() for t in stacked(hood, scores, y, known))
    table = oracle.of_hood(hood, alpha, logits)
    posterior = stacked.posterior(hood, scores, y, known)
    torch.testing.assert_close(posterior.marginals()[3], torch.tensor(table.marginal(3)))
    pair = posterior.pairwise(torch.tensor([[1], [3]]))[0]
    torch.testing.assert_close(pair, torch.tensor(table.marginal(1, 3)))
    assert torch.equal(posterior.marginals()[0], torch.tensor([0.0, 1.0]))
    assert (posterior.sample((50,))[:, 0] == 1).all()
    # A new label is one that alpha does not know.
    joint = torch.tensor(table.marginal(2, 3))[0]
    more = stacked.mixture(hood, scores, y, known).condition(y, mask(5, 0, 2))
    torch.testing.assert_close(more.marginals()[3], joint / joint.sum())
    drawn = posterior.condition(y, mask(5, 2), num_samples=4000).marginals()[3]
    torch.testing.assert_close(drawn, joint / joint.sum(), rtol=0, atol=0.02)


@given(seed=st.integers(0, 2**16))
def test_what_is_set_apart_changes_nothing_else(seed):
    """Labels of all sets of other nodes are as likely as before, where edges relabel too."""
    torch.manual_seed(seed)
    hood, known = house(), torch.rand(5) < 0.5
    known[0], known[1] = False, True
    alpha, logits, y = torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges), torch.randint(2, (5,))
    relabel = torch.rand(hood.num_edges, 2, 2)
    relabel = relabel / relabel.sum(-1, keepdim=True)
    others = (~known).nonzero()[:, 0]
    labels = torch.tensor(list(itertools.product(range(2), repeat=len(others))))
    for more in ((), (relabel,)):
        before = NeighborMixture(hood, alpha, logits, *more)
        data = GraphScores(hood, alpha[: hood.num_nodes], y, known)
        (after,) = with_own_sources(data, data.scores, 1.0, [(alpha, logits, *more)])
        torch.testing.assert_close(
            after.log_marginal(others, labels), before.log_marginal(others, labels)
        )
        torch.testing.assert_close(after.marginals()[known].argmax(-1), y[known])


def test_gradient_of_the_conditional_bound():
    """The surrogate's mean gradient is that of the enumerated bound, in every number."""
    torch.manual_seed(1)
    hood, scores, y = house(), torch.randn(5, 2), torch.tensor([0, 1, 0, 0, 1])
    stacked, order, known = StackedNMM(2), torch.tensor([1, 3, 4, 0, 2]), mask(5, 1, 3)
    numbers = list(stacked.parameters())

    def conditional():
        return OrderedConditional(hood, *stacked(hood, scores, y, known), y, order=order)

    def gradient(value):
        return torch.cat([g.view(-1) for g in torch.autograd.grad(value, numbers)])

    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(5)]
    every, q = torch.tensor(list(itertools.product(*rows))), conditional()
    exact = gradient((q.log_prob(every).exp() * q.log_labels(every)[:, 2:].sum(-1)).sum())
    draws = torch.stack([gradient(surrogate(conditional(), 2, 4)) for _ in range(1500)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()
    weights = q.log_prob(every).detach().exp()
    direct = gradient((weights * conditional().log_labels(every)[:, 2:].sum(-1)).sum())
    assert ((direct - exact).abs() > 4 * error).any()  # without the score it would not pass


@pytest.fixture(scope="module")
def simulated():
    """Labels that cliques share, and a classifier that is biased and sure of itself."""
    torch.manual_seed(0)
    hood = to_hood(nx.connected_caveman_graph(60, 6))
    truth = (2 * torch.randn(60, 4)).repeat_interleave(6, 0).softmax(-1)
    y = NeighborMixture(hood, 0.5 * truth, torch.zeros(hood.num_edges)).sample()
    scores = 3 * truth.log() + 5 * torch.randn(360, 4) + torch.tensor([6.0, 0.0, 0.0, 0.0])
    parts = torch.randperm(360).split([60, 60, 120, 120])
    return hood, scores, y, *(mask(360, *part.tolist()) for part in parts)


def log_score(posterior, y, nodes):
    return posterior.marginals()[nodes, y[nodes]].log().mean().item()


def test_fit_beats_its_limits_on_new_nodes(simulated):
    hood, scores, y, train, held_out, _, test = simulated
    torch.manual_seed(0)
    stacked = StackedNMM(4).fit(hood, scores, y, train, held_out)
    ours = log_score(stacked.posterior(hood, scores, y, train), y, test)
    alone = StackedNMM(pool=False).fit(hood, scores, y, train, held_out)
    scaled = (scores / temperature_scaling(scores, y, held_out)).log_softmax(-1)
    assert ours > log_score(alone.posterior(hood, scores, y, train), y, test) + 0.01
    assert ours > scaled[test, y[test]].mean().item() + 0.1
    assert stacked.pool.offsets.argmin() == 0  # the label that the classifier prefers
    mix = stacked.mixture(hood, scores, y, train)
    assert mix.log_likelihood(y, test, train, 64).item() / 120 > ours


def test_update_learns_from_new_labels():
    """Where labels tell of nodes at a distance, of which few have told anything before."""
    torch.manual_seed(0)
    hood = to_hood(nx.convert_node_labels_to_integers(nx.grid_2d_graph(20, 20)))
    y = 2 * (torch.arange(400) // 20 // 10) + torch.arange(400) % 20 // 10
    scores = torch.nn.functional.one_hot(y, 4) + 2 * torch.randn(400, 4)
    parts = torch.randperm(400).split([10, 15, 75, 300])
    train, held_out, new, test = (mask(400, *part.tolist()) for part in parts)
    stacked = StackedNMM(4).fit(hood, scores, y, train, held_out)
    before = stacked.posterior(hood, scores, y, train)
    given = before.condition(y, held_out | new)
    updated = copy.deepcopy(stacked).update(hood, scores, y, train, held_out | new)
    after = updated.posterior(hood, scores, y, train, new=held_out | new)
    values = [log_score(posterior, y, test) for posterior in (before, given, after)]
    assert values[0] < values[1] < values[2] - 0.2
    alone = updated.posterior(hood, scores, y, train | held_out | new)
    assert values[2] > log_score(alone, y, test)  # as evidence, too
    assert updated.pool.labels > stacked.pool.labels
    assert torch.equal(updated.pool.temperature, stacked.pool.temperature)


def test_no_label_is_told_by_itself(simulated):
    """What a fold's labels are given is the same, whatever they are."""
    hood, scores, y, train, held_out, new, _ = simulated
    stacked, known = StackedNMM(4), held_out | new
    for num_folds in (1, 5):
        torch.manual_seed(1)
        data = GraphScores(hood, scores, y, train | known)
        parts = folds_of(stacked.formula, data, known, num_folds)
        assert sum(int(part.held_out.sum()) for part in parts) == int(known.sum())
        assert len(parts) == num_folds
        for number, part in enumerate(parts):
            # All nodes that are read, by their scores, which are unlike.
            nodes = torch.cdist(part.inputs[0], scores).argmin(-1)
            other = y.clone()
            out = nodes[part.held_out]
            other[out] = (other[out] + 1) % 4
            torch.manual_seed(1)
            again = folds_of(stacked.formula, replace(data, y=other), known, num_folds)[number]
            assert torch.equal(again.inputs, part.inputs)
            assert not (part.given & part.held_out).any()


def test_labels_outside_the_masks_are_never_read(simulated):
    hood, scores, y, train, held_out, new, test = simulated
    for fit in ("fit", "update"):
        results = []
        for other in (0, 99):
            torch.manual_seed(0)
            labels, stacked = torch.where(test | new, other, y), StackedNMM(4)
            getattr(stacked, fit)(hood, scores, labels, train, held_out, num_steps=3)
            results.append(torch.cat([p.view(-1) for p in stacked.parameters()]))
        assert torch.equal(*results)


def test_what_users_have_is_all_the_same(simulated):
    """Arrays, node ids, OGB's columns of labels."""
    hood, scores, y, train, held_out, *_ = simulated
    ids = [m.nonzero()[:, 0] for m in (train, held_out)]
    forms = [
        (scores, y, train, held_out),
        (scores, y[:, None], *ids),
        (scores.numpy(), y.numpy(), train.numpy(), held_out.numpy()),
        (scores.numpy(), y[:, None].numpy(), ids[0].numpy(), ids[1].numpy().astype(np.int32)),
    ]
    found = []
    for form in forms:
        torch.manual_seed(0)
        stacked = StackedNMM(4).fit(hood, *form, num_steps=4)
        found.append(stacked.posterior(hood, *form[:3], num_samples=4).marginals())
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores_are_read_in_single_precision(simulated, dtype):
    hood, scores, *labels = simulated[:5]
    fits = []
    for value in (scores.to(dtype), scores.to(dtype).float()):
        torch.manual_seed(0)
        fits.append(StackedNMM(4).fit(hood, value, *labels, num_steps=3))
    assert repr(fits[0]) == repr(fits[1])
    mixture = fits[0].mixture(hood, scores.to(dtype), *labels[:2])
    assert mixture.alpha.dtype == mixture.logits.dtype == torch.float


def test_another_graph_without_labels(simulated):
    """Numbers of one graph on another, and a classifier that learned from neither."""
    hood, scores, y, _, held_out, *_ = simulated
    nothing = mask(360)
    stacked = StackedNMM(4).fit(hood, scores, y, nothing, held_out, num_steps=5)
    other = to_hood(nx.cycle_graph(7))
    mix = stacked.mixture(other, scores[:7], torch.full((7,), -1), mask(7))
    torch.testing.assert_close(mix.marginals().sum(-1), torch.ones(7).to(scores))
    posterior = stacked.posterior(other, scores[:7], y[:7], mask(7), num_draws=0)
    torch.testing.assert_close(posterior.marginals(), mix.marginals())


def test_saved_and_loaded(simulated, tmp_path):
    hood, scores, y, train, held_out, *_ = simulated
    stacked = StackedNMM(4).fit(hood, scores, y, train, held_out, num_steps=3)
    torch.save(stacked.state_dict(), tmp_path / "stacked.pt")
    again = StackedNMM(4)
    again.load_state_dict(torch.load(tmp_path / "stacked.pt", weights_only=True))
    assert repr(again) == repr(stacked)
    expected = stacked.mixture(hood, scores, y, train).alpha
    found = again.mixture(
        hood, scores, y, train
    ).alpha  # of the scores' type, whatever the module's
    torch.testing.assert_close(found, expected)


def test_progress_sees_the_steps(simulated):
    hood, scores, y, train, held_out, *_ = simulated
    seen = []
    stacked = StackedNMM(4).fit(
        hood, scores, y, train, held_out, num_steps=3,
        progress=lambda steps: [seen.append(step) or step for step in steps],
    )  # fmt: skip
    assert seen == [0, 1, 2]
    assert stacked.log_kappa.isfinite()


def test_probabilities_are_noticed(simulated):
    hood, scores, *labels = simulated[:5]
    with pytest.warns(UserWarning, match=r"look like probabilities.*scores.clamp"):
        StackedNMM(4).fit(hood, scores.softmax(-1), *labels, num_steps=1)


def test_bad_input(simulated):
    hood, scores, y, train, held_out, *_ = simulated

    def fit(num_classes=4, **changes):
        arguments = {"scores": scores, "y": y, "train": train, "held_out": held_out} | changes
        StackedNMM(num_classes).fit(hood, **arguments)

    with pytest.raises(ValueError, match="num_classes is needed"):
        StackedNMM()
    with pytest.raises(ValueError, match=r"scores must have shape \(360, 5\), num_classes col"):
        fit(num_classes=5)
    with pytest.raises(ValueError, match="scores must be a tensor, an array or a nested list"):
        fit(scores=None)
    with pytest.raises(ValueError, match=r"scores must be a tensor .*meta device"):
        fit(scores=scores.to("meta"))
    with pytest.raises(ValueError, match=r"train holds node id 360, but ids lie in 0..359"):
        fit(train=torch.tensor([0, 360]))
    with pytest.raises(ValueError, match="held_out must be a boolean mask"):
        fit(held_out=2 * held_out.long())
    with pytest.raises(ValueError, match="held_out selects no node"):
        fit(held_out=mask(360))
    with pytest.raises(ValueError, match="train and held_out must be disjoint"):
        fit(held_out=train)
    with pytest.raises(ValueError, match="y must hold integer labels"):
        fit(y=y.float())
    stacked = StackedNMM(4)
    with pytest.raises(ValueError, match="observed"):
        stacked(hood.restrict(train), scores, y, train)
    with pytest.raises(ValueError, match="y and known are needed"):
        stacked.mixture(hood, scores)
    with pytest.raises(ValueError, match="train and new must be disjoint"):
        stacked.update(hood, scores, y, train, train)
    with pytest.raises(ValueError, match="num_folds must be an integer of at least 1"):
        stacked.update(hood, scores, y, train, held_out, num_folds=0)
    pool = PooledScores(4)
    with pytest.raises(ValueError, match="finite floating-point logits"):
        pool.terms(hood, scores / 0, y, train)
    with pytest.raises(ValueError, match="y holds label 7 at node"):
        pool.terms(hood, scores, torch.full_like(y, 7), train)
    with pytest.raises(ValueError, match="num_classes must be an integer of at least 2"):
        PooledScores(1)
