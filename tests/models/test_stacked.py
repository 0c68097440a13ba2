# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM of every kind: its formulas, its limits, its posteriors and its gradients."""

import itertools

import networkx as nx
import numpy as np
import oracle
import pyro
import pytest
import torch
from graphs import house, to_hood
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from stacking import FEW, KINDS, cliques, few_labels, made, mask, moved, numbers, place
from torch_geometric.utils import erdos_renyi_graph

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional, Posterior, blocks
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import PooledScores, StackedNMM, marginals_in_blocks, temperature_scaling
from pyro_nmm.models.stacked.fit import NUM_DRAWS, surrogate
from pyro_nmm.models.stacked.formula import DAMPING, SHRINKAGE, STEPS, with_own_sources
from pyro_nmm.models.stacked.table import GraphScores
from pyro_nmm.sources import communities

PAIRS = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
#: Two partitions of the house's five nodes.
MEMBERS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_parameters_are_the_formula(kind, weighted):
    hood, scores, y, known = (
        place(kind, house(), MEMBERS),
        torch.randn(5, 3),
        torch.arange(5) % 3,
        mask(5, 0, 3),
    )
    stacked = moved(made(kind), 1.0)
    weight = torch.rand(hood.num_edges) + 0.5 if weighted else None
    values = {name: value.detach() for name, value in stacked.named_parameters()}
    if stacked.pool is None:
        probs, share = (values["log_scale"].exp() * scores).softmax(-1), 1.0
    else:
        probs, share = stacked.pool(stacked.pool.terms(hood, scores, y, known, weight)), 1 / 3
    groups = [torch.stack([probs[MEMBERS[p] == g].mean(0) for g in (0, 1)]) for p in (0, 1)]
    kappas = [values["log_kappa"].exp().expand(5)]
    if "communities" in kind:
        probs = torch.cat([probs, *groups])
        kappas.append(values["log_kappa_community"].exp().expand(4))
    kappa = torch.cat(kappas)[:, None]
    floor = values["log_floor"].exp() * (share if stacked.pool is None else share * kappa)
    alpha, logits, *relabel = stacked(hood, scores, y, known, weight)
    torch.testing.assert_close(alpha, kappa * probs + floor)
    attention = {}
    edges = list(zip(hood.target.tolist(), hood.source.tolist(), strict=True))
    for e, (i, j) in enumerate(edges):
        cosine = probs[i] @ probs[j] / (probs[i].norm() * probs[j].norm())
        value = values["similarity"] * cosine + values["gamma"] * (i == j)
        attention[i, j] = value.exp() * (1 if weight is None else weight[e])
        if j < 5:
            torch.testing.assert_close(logits[e], attention[i, j].log())
        else:  # a row's sources ascend: its nodes came before
            nodes = sum(attention[i, k] for k in range(5) if (i, k) in attention)
            odds = (logits[e].exp() / nodes) / attention[i, j]
            torch.testing.assert_close(odds, values["community"].exp())
    if kind == "relabelled":
        rate, keep = values["odds"].sigmoid(), torch.eye(3)
        for (i, j), change in zip(edges, relabel[0], strict=True):
            mixed = (1 - rate) * keep + rate * stacked.compatibility.to(keep)
            torch.testing.assert_close(change, keep if i == j else mixed)
    assert len(relabel) == (kind == "relabelled")


@given(seed=st.integers(0, 2**16), weighted=st.booleans(), in_blocks=st.booleans())
def test_pool_is_the_formula(seed, weighted, in_blocks):
    """By dense powers of the walk's matrix."""
    torch.manual_seed(seed)
    hood = to_hood(nx.gnp_random_graph(9, 0.3, seed=seed))
    scores, y, known = 2 * torch.randn(9, 3), torch.randint(3, (9,)), torch.rand(9) < 0.4
    weight = torch.rand(hood.num_edges) + 0.1 if weighted else torch.ones(hood.num_edges)
    pool = moved(PooledScores(3), 1.0)
    pool.temperature.fill_(1.7)
    walk = torch.zeros(9, 9).index_put((hood.target, hood.source), weight)
    walk, labels = walk / walk.sum(1, keepdim=True), torch.zeros(9, 3)
    labels[known, y[known]] = 1.0
    power = [torch.linalg.matrix_power(walk, r) @ labels for r in range(STEPS + 1)]
    reached = sum((1 - DAMPING) * DAMPING**r * term for r, term in enumerate(power[:-1]))
    reached = reached + DAMPING**STEPS * power[-1]
    share = (labels.sum(0) + 1) / (labels.sum() + 3)
    above = (reached + SHRINKAGE * share) / (reached.sum(-1, keepdim=True) + SHRINKAGE) / share
    own = (scores / 1.7).softmax(-1)
    agree = (own * (walk @ own)).sum(-1, keepdim=True)
    logits = (pool.log_scale.exp() + pool.agreement * (agree - 0.75)) * scores / 1.7
    logits = logits + pool.neighbors * (walk @ own + 1e-3).log()
    logits = logits + pool.labels * above.log() + pool.offsets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "NUMBERS", 7 if in_blocks else blocks.NUMBERS)
        terms = pool.terms(hood, scores, y, known, weight if weighted else None)
    torch.testing.assert_close(pool(terms), logits.softmax(-1))


def test_pool_without_known_labels_and_with_communities():
    hood, scores, pool = house(), torch.randn(5, 3), PooledScores(3)
    terms = pool.terms(hood, scores, torch.full((5,), -1), mask(5))
    torch.testing.assert_close(terms[2], torch.zeros(5, 3))
    shared = place("communities", hood, MEMBERS)
    torch.testing.assert_close(pool.terms(shared, scores, torch.full((5,), -1), mask(5)), terms)


def test_temperature_scaling_and_a_bias_are_limits():
    """No sharing, no floor, attention to oneself, and no other evidence than scores."""
    hood, scores, y = house(), torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    stacked, known = (
        numbers(StackedNMM(3), log_kappa=30.0, log_floor=-60.0, gamma=60.0),
        mask(5, 0, 1),
    )
    temperature, bias = temperature_scaling(scores, y, ~known), torch.tensor([0.3, -1.0, 0.2])
    for parameter in stacked.pool.parameters():
        parameter.data.zero_()
    stacked.pool.temperature.fill_(temperature)
    for offsets in (torch.zeros(3), bias):
        stacked.pool.offsets.data.copy_(offsets)
        found = stacked.mixture(hood, scores, y, known).marginals()
        expected = (scores / temperature + offsets).softmax(-1).float()
        torch.testing.assert_close(found[2:].float(), expected[2:])
        torch.testing.assert_close(found[:2], torch.eye(3)[:2].to(found))  # the known labels


@pytest.mark.parametrize("kind", ["pool", "communities of scores"])
def test_posterior_is_the_enumeration(kind):
    """Known nodes are evidence for scores alone, and a part of alpha with a pool."""
    hood, scores = place(kind, house(), MEMBERS), torch.randn(5, 2)
    stacked, y = numbers(made(kind, 2), gamma=0.4), torch.tensor([1, 0, 0, 0, 0])
    alpha, logits = (value.detach() for value in stacked(hood, scores, y, mask(5, 0)))
    table = oracle.of_hood(hood, alpha, logits)
    mix, posterior = (
        call(hood, scores, y, mask(5, 0)) for call in (stacked.mixture, stacked.posterior)
    )
    if kind != "pool":
        labels = torch.tensor(table.labels)
        torch.testing.assert_close(mix.log_prob(labels), torch.tensor(table.log_prob))
        joint = torch.tensor(table.marginal(0, 3))[1]
        given_one = mix.condition(y, mask(5, 0)).marginals()
        torch.testing.assert_close(given_one[3], joint / joint.sum())
        return
    torch.testing.assert_close(posterior.marginals()[3], torch.tensor(table.marginal(3)))
    pair = posterior.pairwise(torch.tensor([[1], [3]]))[0]
    torch.testing.assert_close(pair, torch.tensor(table.marginal(1, 3)))
    assert torch.equal(posterior.marginals()[0], torch.tensor([0.0, 1.0]))
    assert (posterior.sample((50,))[:, 0] == 1).all()
    joint = torch.tensor(table.marginal(2, 3))[0]  # given a new label, which alpha does not know
    more = mix.condition(y, mask(5, 0, 2))
    torch.testing.assert_close(more.marginals()[3], joint / joint.sum())
    drawn = posterior.condition(y, mask(5, 2), num_samples=4000).marginals()[3]
    torch.testing.assert_close(drawn, joint / joint.sum(), rtol=0, atol=0.02)


def test_communities_inform_about_distant_nodes():
    """The two ends of a path share a community; numbers of communities may have gaps."""
    stacked = numbers(made("communities of scores"), log_kappa_community=-1.0, community=1.5)
    scores, y = torch.randn(4, 3), torch.tensor([1, 0, 0, 0])
    members = torch.tensor([0, 1, 1, 0])
    mix, wide = (stacked.mixture(communities(PAIRS, 4, m), scores) for m in (members, 3 * members))
    change = mix.condition(y, mask(4, 0)).marginals() - mix.marginals()
    assert change[3].abs().max() > 0.02
    torch.testing.assert_close(wide.log_prob(y), mix.log_prob(y))


@given(seed=st.integers(0, 2**16))
def test_own_sources_change_nothing_else(seed):
    """Labels of all sets of other nodes are as likely as before, where edges relabel too."""
    torch.manual_seed(seed)
    hood, known = house(), torch.rand(5) < 0.5
    known[0], known[1] = False, True
    alpha, logits, y = torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges), torch.randint(2, (5,))
    relabel = torch.rand(hood.num_edges, 2, 2)
    relabel = relabel / relabel.sum(-1, keepdim=True)
    others = (~known).nonzero()[:, 0]
    labels = torch.tensor(list(itertools.product(range(2), repeat=len(others))))
    data = GraphScores(hood, alpha, y, known)
    for more in ((), (relabel,)):
        before = NeighborMixture(hood, alpha, logits, *more)
        (after,) = with_own_sources(data, data.scores, 1.0, [(alpha, logits, *more)])
        torch.testing.assert_close(
            after.log_marginal(others, labels), before.log_marginal(others, labels)
        )
        torch.testing.assert_close(after.marginals()[known].argmax(-1), y[known])


@pytest.mark.parametrize("kind", ["scores", "pool", "communities of scores"])
def test_gradient_of_the_conditional_bound(kind):
    """The surrogate's mean gradient is the enumerated bound's, in every parameter."""
    torch.manual_seed(1)
    hood = place(kind, to_hood(nx.path_graph(4)), MEMBERS[0, :4])
    stacked, scores = numbers(made(kind, 2), log_kappa=-0.5), torch.randn(4, 2)  # strong sharing
    y, order, known = torch.tensor([0, 1, 0, 0]), torch.tensor([1, 3, 0, 2]), mask(4, 1, 3)
    parameters = list(stacked.parameters())

    def conditional():
        return OrderedConditional(hood, *stacked(hood, scores, y, known), y, order=order)

    def gradient(value):
        slopes = torch.autograd.grad(value, parameters)
        return torch.cat([slope.view(-1) for slope in slopes])

    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(4)]
    every, q = torch.tensor(list(itertools.product(*rows))), conditional()
    exact = gradient((q.log_prob(every).exp() * q.log_labels(every)[:, 2:].sum(-1)).sum())
    weights = q.log_prob(every).detach().exp()
    direct = gradient((weights * conditional().log_labels(every)[:, 2:].sum(-1)).sum())
    draws = torch.stack([gradient(surrogate(conditional(), 2, 20)) for _ in range(100)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()
    assert ((direct - exact).abs() > 4 * error).any()  # without the score it would not pass


@pytest.mark.parametrize("kind", ["scores", "pool", "communities of scores"])
def test_is_a_network_for_svi(kind):
    """Its parameters are parameters of a Pyro program."""
    hood, observed = place(kind, house(), MEMBERS), mask(5, 1, 2, 4)
    program = AmortizedNMM(hood, made(kind, 2).double())
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    y, before = torch.tensor([0, 1, 0, 1, 0]), [p.clone() for p in program.network.parameters()]
    svi.step(torch.randn(5, 2), y, ~observed, y=y, observed=observed)
    assert not any(map(torch.equal, before, program.network.parameters()))
    assert ("pool.labels" in " ".join(pyro.get_param_store().keys())) == (kind == "pool")


@pytest.mark.parametrize("kind", KINDS)
def test_mixture_has_the_gradient_of_scores(kind):
    """As quotients of differences, and none of the fitted parameters."""
    torch.manual_seed(2)
    classes = 3 if kind == "relabelled" else 2
    stacked, hood = moved(made(kind, classes), 0.5), place(kind, house(), MEMBERS)
    labels = torch.tensor([0, 0, 0, 1, 0]), mask(5, 3)

    def loss(scores):
        return stacked.mixture(hood, scores, *labels).marginals()[0, 0]

    scores = torch.randn(5, classes, requires_grad=True)
    assert torch.autograd.gradcheck(loss, scores)
    loss(scores).backward()
    assert scores.grad.abs().max() > 1e-3
    assert all(value.grad is None for value in stacked.parameters())
    assert not loss(scores.detach()).requires_grad


def test_repr_and_state():
    assert "temperature=1, kappa=2.718, floor=0.006738" in repr(made("scores"))
    text = repr(made("communities of scores"))
    assert "kappa_community=0.3679, gamma=2, similarity=1, community=-1" in text
    names = ["log_scale", "log_kappa", "log_floor", "gamma", "similarity", "updated", "deviations"]
    assert list(made("scores").state_dict()) == names


def random_problem(seed, num_nodes=30):
    torch.manual_seed(seed)
    edges = erdos_renyi_graph(num_nodes, 0.15)
    scores, y = 2 * torch.randn(num_nodes, 3), torch.randint(3, (num_nodes,))
    return Neighborhood(edges, num_nodes), scores, y, torch.rand(num_nodes) < 0.3


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(["pool", "communities", "relabelled"]))
def test_blocks_have_the_posterior(seed, kind):
    hood, *labels = random_problem(seed)
    hood = place(kind, hood, torch.randint(4, (30,)))
    weight = torch.rand(hood.num_edges) + 0.1 if kind == "pool" else None
    stacked, seen = moved(made(kind), 1.0), []
    stacked.share.fill_(0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "NUMBERS", 40)
        options = {"edge_weight": weight, "progress": lambda rows: seen.extend(rows) or rows}
        parts = list(marginals_in_blocks(stacked, hood, *labels, **options))
    assert [rows for rows, _ in parts] == seen
    assert len(seen) > 3
    marginals = torch.cat([block for _, block in parts])
    posterior = stacked.posterior(hood, *labels, edge_weight=weight)
    for expected in (stacked.mixture(hood, *labels, weight), posterior):
        torch.testing.assert_close(marginals, expected.marginals(), atol=1e-5, rtol=1e-5)


def test_blocks_of_files(tmp_path):
    """The graph, the scores and the result lie in files."""
    hood, scores, y, known = random_problem(0)
    stacked, scores = moved(StackedNMM(3)), scores.float()
    arrays = []
    for name, values in {"ptr": hood.ptr, "source": hood.source, "scores": scores}.items():
        np.save(tmp_path / name, values.numpy())
        arrays.append(torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="c")))
    stored = Neighborhood.of_rows(30, torch.arange(30), *arrays[:2])
    options = {"mode": "w+", "dtype": np.float32, "shape": (30, 3)}
    out = np.lib.format.open_memmap(tmp_path / "marginals.npy", **options)
    for nodes, probs in marginals_in_blocks(stacked, stored, arrays[2], y, known):
        out[nodes] = probs.numpy()
    out.flush()
    expected = stacked.posterior(hood, scores, y, known).marginals()
    found = torch.from_numpy(np.load(tmp_path / "marginals.npy"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_samples", [64, None])
@pytest.mark.parametrize("kind", ["pool", "scores", "communities", "share"])
def test_posterior_without_known_labels(kind, num_samples):
    torch.manual_seed(0)
    hood, scores, y = place(kind, house(), MEMBERS[0]), torch.randn(5, 3), torch.arange(5) % 3
    stacked = moved(made("pool" if kind == "share" else kind))
    if kind == "share":
        stacked.share.fill_(0.7)
    known = hood, scores, torch.full((5,), -1), mask(5)
    mix, posterior = stacked.mixture(*known), stacked.posterior(*known, num_samples)
    assert not posterior.observed.any()
    torch.testing.assert_close(posterior.marginals(), mix.marginals())
    pairs = torch.tensor([[0, 2, 1], [1, 4, 1]])
    torch.testing.assert_close(posterior.pairwise(pairs), mix.pairwise(pairs))
    joint = (each.log_marginal(pairs[0], y[:3]) for each in (posterior, mix))
    torch.testing.assert_close(*joint)
    rates = torch.nn.functional.one_hot(posterior.sample((20_000,)), 3).double().mean(0)
    error = (mix.marginals() * (1 - mix.marginals()) / 20_000).sqrt()
    assert ((rates - mix.marginals()).abs() < 5 * error + 1e-6).all()
    counts = posterior.counts([torch.arange(5)], 0, 20_000).double()
    wanted = mix.marginals()[:, 0].sum()
    assert abs(counts.mean() - wanted) < 5 * counts.std() / 20_000**0.5
    assert torch.equal(posterior.predict(), mix.marginals().argmax(-1))


@pytest.mark.parametrize("kind", ["pool", "scores"])
def test_posterior_is_averaged_over_draws(kind):
    hood, scores, y, train, held_out = cliques()
    stacked = made(kind).fit(hood, scores, y, train, held_out, **FEW)
    assert stacked.deviations.shape[0] == NUM_DRAWS
    posterior = stacked.posterior(hood, scores, y, train)
    assert isinstance(posterior, AveragedPosterior)
    assert len(posterior.members) == NUM_DRAWS
    assert sum(len(each.components) for each in posterior.members) == 64
    spread = torch.stack([each.marginals() for each in posterior.members])[:, ~train].std(0)
    assert spread.max() > 0.01
    exact = stacked.posterior(hood, scores, y, train, num_draws=0)
    assert type(exact) is Posterior
    change = (posterior.marginals() - exact.marginals()).abs().max()
    assert 0 < change < 0.1  # opposite draws: the mean moves by terms of second order only
    assert len(stacked.posterior(hood, scores, y, train, num_samples=3).members) == 3
    assert type(stacked.posterior(hood, scores, y, train, num_samples=1)) is Posterior
    start = torch.nn.utils.parameters_to_vector(stacked.parameters()).detach().clone()
    if kind == "pool":  # whose known labels are no evidence
        for change, member in zip(stacked.deviations[:3], posterior.members, strict=False):
            torch.nn.utils.vector_to_parameters(start + change, stacked.parameters())
            expected = stacked.mixture(hood, scores, y, train).marginals()
            torch.testing.assert_close(member.marginals()[~train], expected[~train])


def test_new_labels_are_evidence_and_in_the_pool():
    """Before an update they are evidence alone, as in ``condition``; after it, both."""
    hood, scores, y, train, new = cliques()
    stacked = StackedNMM(3).fit(hood, scores, y, train, new, **FEW)
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
    assert not stacked.fit(hood, scores, y, train, new, **FEW).updated


def test_another_graph_without_labels():
    """Parameters of one graph on another, and a classifier that learned from neither."""
    hood, scores, y, _, held_out = few_labels()
    stacked = StackedNMM(3).fit(hood, scores, y, mask(60), held_out, **FEW)
    other = to_hood(nx.cycle_graph(7)), scores[:7], torch.full((7,), -1), mask(7)
    marginals = stacked.mixture(*other).marginals()
    torch.testing.assert_close(marginals.sum(-1), torch.ones(7).to(scores))
    torch.testing.assert_close(stacked.posterior(*other, num_draws=0).marginals(), marginals)
