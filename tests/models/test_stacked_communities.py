# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM with communities as sources."""

import itertools
import math

import networkx as nx
import oracle
import pytest
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from runs import fit_on_all_edges

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import StackedNMM
from pyro_nmm.models.stacked.fit import sources_of, surrogate
from pyro_nmm.sources import communities

PRIOR = StackedNMM(pool=False, communities=True).prior
NAMES = list(PRIOR)
PAIRS = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
#: Two partitions of a path of four nodes.
MEMBERS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


def path(members=MEMBERS):
    return communities(PAIRS, 4, members)


def numbers(stacked, **values):
    for name, value in values.items():
        getattr(stacked, name).data.fill_(value)
    return stacked


def test_parameters_are_those_of_the_formula():
    hood, scores = path(), torch.randn(4, 3)
    values = [0.3, 1.2, -2.0, 0.7, -1.4, 0.4, 0.9]
    stacked = numbers(
        StackedNMM(pool=False, communities=True), **dict(zip(NAMES, values, strict=True))
    )
    alpha, logits = stacked(hood, scores)
    probs = (math.exp(0.3) * scores).softmax(-1)
    groups = [[0, 1], [2, 3], [0], [1, 2, 3]]
    shared = torch.stack([probs[group].mean(0) for group in groups])
    above = [math.exp(1.2) * probs, math.exp(0.4) * shared]
    torch.testing.assert_close(alpha, torch.cat(above) + math.exp(-2.0))
    every = torch.cat([probs, shared])
    assert hood.num_edges == 10 + 8
    weight = {}
    for e, (i, j) in enumerate(zip(hood.target.tolist(), hood.source.tolist(), strict=True)):
        cosine = every[i] @ every[j] / (every[i].norm() * every[j].norm())
        weight[i, j] = torch.exp(-1.4 * cosine + 0.7 * (i == j))
        if j < 4:
            torch.testing.assert_close(logits[e], weight[i, j].log())
        else:  # a row's sources ascend: its nodes came before
            nodes = sum(weight[i, k] for k in range(4) if (i, k) in weight)
            odds = (logits[e].exp() / nodes) / weight[i, j]
            torch.testing.assert_close(odds, torch.tensor(0.9).exp())


def test_without_attention_to_communities_there_are_none():
    """Labels of every set of nodes have the probability that StackedNMM(pool=False) gives them."""
    scores = torch.randn(4, 2)
    plain = numbers(StackedNMM(pool=False), log_kappa=-0.5)
    hood = Neighborhood(PAIRS, 4)
    without = numbers(StackedNMM(pool=False, communities=True), log_kappa=-0.5, community=-800.0)
    some = numbers(StackedNMM(pool=False, communities=True), log_kappa=-0.5)
    y = torch.tensor(list(itertools.product(range(2), repeat=4)))
    expected = plain.mixture(hood, scores).log_prob(y)
    torch.testing.assert_close(without.mixture(path(), scores).log_prob(y), expected)
    gap = some.mixture(path(), scores).log_prob(y) - expected
    assert gap.abs().max() > 0.05


def test_all_attention_to_communities():
    """The nodes of one community then share a single label distribution."""
    hood, scores = path(torch.tensor([0, 0, 0, 0])), torch.randn(4, 2)
    stacked = numbers(StackedNMM(pool=False, communities=True), community=800.0)
    alpha = stacked(hood, scores)[0][4]
    mix, draw = stacked.mixture(hood, scores), torch.tensor([1, 0, 1, 1])
    counts = torch.bincount(draw).to(alpha)
    exact = torch.lgamma(alpha + counts).sum() - torch.lgamma(alpha.sum() + 4)
    exact += torch.lgamma(alpha.sum()) - torch.lgamma(alpha).sum()
    torch.testing.assert_close(mix.log_prob(draw), exact)


def test_mixture_is_that_of_the_enumeration():
    hood, scores = path(), torch.randn(4, 2)
    stacked = numbers(
        StackedNMM(pool=False, communities=True), log_kappa_community=-1.0, community=1.5
    )
    alpha, logits = stacked(hood, scores)
    known = oracle.of_hood(hood, alpha, logits.detach())
    mix = stacked.mixture(hood, scores)
    torch.testing.assert_close(
        mix.log_prob(torch.tensor(known.labels)), torch.tensor(known.log_prob)
    )
    posterior = mix.condition(torch.tensor([1, 0, 0, 0]), torch.tensor([1, 0, 0, 0]).bool())
    joint = torch.tensor(known.marginal(0, 3))[1]
    torch.testing.assert_close(posterior.marginals()[3], joint / joint.sum())
    # Three steps away, and yet it matters, through the communities that both are in.
    far = communities(PAIRS, 4, torch.tensor([0, 1, 1, 0]))
    mix = stacked.mixture(far, scores)
    posterior = mix.condition(torch.tensor([1, 0, 0, 0]), torch.tensor([1, 0, 0, 0]).bool())
    assert (posterior.marginals() - mix.marginals())[3].abs().max() > 0.02


def test_gradient_of_the_conditional_bound():
    """The surrogate's mean gradient is that of the enumerated bound, in all seven numbers."""
    torch.manual_seed(1)
    hood = path(MEMBERS[0])
    stacked, scores = StackedNMM(pool=False, communities=True), torch.randn(4, 2)
    numbers(stacked, log_kappa=-0.5, log_kappa_community=-0.5, community=1.0)
    y, order = torch.tensor([0, 1, 0, 0]), torch.tensor([1, 3, 0, 2])

    def conditional():
        return OrderedConditional(hood, *stacked(hood, scores), y, order=order)

    def gradient(value):
        return torch.stack(torch.autograd.grad(value, [getattr(stacked, n) for n in NAMES]))

    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(4)]
    every = torch.tensor(list(itertools.product(*rows)))
    q = conditional()
    exact = gradient((q.log_prob(every).exp() * q.log_labels(every)[:, 2:].sum(-1)).sum())
    assert (exact[-2:].abs() > 0.01).all()
    draws = torch.stack([gradient(surrogate(conditional(), 2, 4)) for _ in range(400)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()


def crowds(seed=0, size=20, number=30):
    """Labels that a crowd shares, and scores that know little of them."""
    torch.manual_seed(seed)
    members = torch.arange(number).repeat_interleave(size)
    graph = nx.random_partition_graph([size] * number, 0.1, 0.0, seed=seed)
    edges = torch.tensor(list(graph.edges)).T
    edges = torch.cat([edges, edges.flip(0)], 1)
    shared = torch.distributions.Dirichlet(torch.full((3,), 0.3)).sample((number,))
    y = torch.multinomial(shared[members], 1)[:, 0]
    scores = torch.nn.functional.one_hot(y, 3) + 1.5 * torch.randn(len(y), 3)
    train, held_out, test = torch.zeros(3, len(y), dtype=torch.bool)
    for mask, part in zip((train, held_out, test), torch.randperm(len(y)).chunk(3), strict=True):
        mask[part] = True
    return edges, members, scores, y, train, held_out, test


def test_fit_finds_communities():
    """Where labels are shared, and where the groups are of nobody's making."""
    edges, members, scores, y, train, held_out, test = crowds()
    gains = {}
    plain = Neighborhood(edges, len(y))
    for name, groups in {"true": members, "false": members[torch.randperm(len(y))]}.items():
        hood, values = communities(edges, len(y), groups), []
        for place, stacked in (
            (plain, StackedNMM(pool=False)),
            (hood, StackedNMM(pool=False, communities=True)),
        ):
            stacked.fit(place, scores, y, train, held_out, num_steps=150)
            mix = stacked.mixture(place, scores)
            values.append(mix.log_likelihood(y, test, train) / test.sum())
        gains[name] = (values[1] - values[0]).item()
    assert gains["true"] > 0.2
    assert abs(gains["false"]) < 0.05


def few_labels():
    """60 nodes in two partitions, of which 14 are labelled; most communities have no label."""
    torch.manual_seed(0)
    edges = torch.tensor(list(nx.watts_strogatz_graph(60, 4, 0.3, seed=0).edges)).T
    members = torch.stack([torch.randint(20, (60,)), torch.randint(30, (60,))])
    hood = communities(torch.cat([edges, edges.flip(0)], 1), 60, members)
    scores, y, order = torch.randn(60, 3), torch.randint(3, (60,)), torch.randperm(60)
    train, held_out = torch.zeros(2, 60, dtype=torch.bool)
    train[order[:5]], held_out[order[5:14]] = True, True
    return hood, scores, y, train, held_out


def test_fit_leaves_out_what_it_does_not_need(kernels):
    """Nodes that no labelled node may choose, and that share no community: the same numbers."""
    problem = few_labels()
    part, nodes, sources = sources_of(problem[0], problem[3] | problem[4])
    assert torch.equal(sources[: len(nodes)], nodes)
    assert part.num_nodes == len(nodes) < 60
    assert part.num_sources - part.num_nodes < problem[0].num_sources - 60
    torch.manual_seed(7)
    expected = fit_on_all_edges(StackedNMM(pool=False, communities=True), *problem, num_steps=20)
    torch.manual_seed(7)
    found = StackedNMM(pool=False, communities=True).fit(*problem, num_steps=20)
    for name in NAMES:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert abs(found.community.item() - PRIOR["community"][0]) > 1e-3


def test_is_a_network_for_svi():
    program = AmortizedNMM(path(), StackedNMM(pool=False, communities=True))
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    before = program.network.community.item()
    svi.step(torch.randn(4, 2), y=torch.tensor([0, 1, 0, 1]))
    assert program.network.community.item() != before


def test_community_ids_without_members():
    """Numbers of communities may have gaps; nobody reaches what is in them."""
    scores, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    stacked = numbers(StackedNMM(pool=False, communities=True), log_kappa=-0.5)
    tight, wide = (stacked.mixture(path(m), scores) for m in (MEMBERS[0], 3 * MEMBERS[0]))
    assert isinstance(wide, NeighborMixture)
    torch.testing.assert_close(wide.log_prob(y), tight.log_prob(y))


def test_repr_states_the_fit():
    text = repr(StackedNMM(pool=False, communities=True))
    assert "kappa_community=0.3679, gamma=2, similarity=1, community=-1" in text
    assert "communit" not in repr(StackedNMM(pool=False))
    assert list(StackedNMM(pool=False).state_dict()) == [*NAMES[:5], "updated", "deviations"]


def test_bad_input():
    scores, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    masks = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 0, 1, 0]).bool()
    with pytest.raises(ValueError, match=r"sources that are no nodes.*communities=True"):
        StackedNMM(pool=False).fit(path(), scores, y, *masks)
    with pytest.raises(ValueError, match=r"sources that are no nodes.*communities=True"):
        StackedNMM(pool=False)(path(), scores)
    strange = Neighborhood(torch.tensor([[0, 4, 5, 1], [0, 1, 2, 3]]), 4, num_sources=6)
    for hood in (Neighborhood(PAIRS, 4), strange, path().restrict(masks[0])):
        with pytest.raises(ValueError, match=r"a hood of pyro_nmm.sources.communities.*got Neigh"):
            StackedNMM(pool=False, communities=True).fit(hood, scores, y, *masks)
        with pytest.raises(ValueError, match=r"a hood of pyro_nmm.sources.communities.*got Neigh"):
            StackedNMM(pool=False, communities=True)(hood, scores)
