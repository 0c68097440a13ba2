# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The ordered guide where edges relabel: draws in order, gradients and predictions."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from bounds import check_gradient, mean_over_orders
from cases import KINDS, everything, permutations, random_case
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer import Trace_ELBO, TraceGraph_ELBO, WeighedPredictive
from torch.nn.functional import one_hot

from pyro_nmm import EvidenceConditional, NeighborMixture, OrderedConditional
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.ops.sampling import draw_by_sweeps

GRAPHS = {"star": partial(star, 3), "house": house, "shared": shared_sources}


@pytest.mark.parametrize("name", GRAPHS)
def test_permutations_in_order(kernels, name):
    """q(c | y) sums to one, and its weights to p(y), for every order."""
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, 3)
    relabel, y = permutations(hood, 3), torch.randint(3, (hood.num_nodes,))
    mix, choices = NeighborMixture(hood, alpha, logits, relabel), enumerate_choices(hood)
    c = hood.source[choices]
    for _ in range(3):
        q = mix.choices(y, order=torch.randperm(hood.num_nodes))
        log_q, bound = q.log_prob(c), q.log_labels(c).sum(-1)
        torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0))
        torch.testing.assert_close((log_q + bound).logsumexp(0), mix.log_prob(y))


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(["random", "hubs", "grid", "sources"]))
def test_permutations_are_evidence(kernels, seed, kind):
    """Bit for bit the choices, their probabilities and what they are charged with."""
    hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, kind)
    size, generator = alpha.shape[-1], torch.Generator().manual_seed(seed)
    ranks = torch.rand(hood.num_edges, size, generator=generator)
    relabel = ranks.argsort(-1)
    matrices = one_hot(relabel, size).double()
    evidence = Parameters.of(hood, alpha, logits, matrices).evidence(y, observed)
    way = ("reward_to_go", "one_step_credit")[seed % 2]
    one = OrderedConditional(hood, alpha, logits, y, observed, order, way, relabel)
    two = EvidenceConditional(hood, alpha, logits, evidence, observed, order, way)
    draws = [q._draw(shape, uniforms) for q in (one, two)]
    assert torch.equal(draws[0].edges, draws[1].edges)
    one._draw, two._draw = (lambda *_, d=d: d for d in draws)
    one, two = one.expand(shape), two.expand(shape)
    c, both = one.sample(), two.sample()
    assert torch.equal(torch.stack([c, one.borrowed(c)], -2), both)
    assert torch.equal(one.borrowed(c.clone()), both[..., 1, :])
    torch.testing.assert_close(one.log_prob(c), two.log_prob(both))
    torch.testing.assert_close(one.log_prob(c.clone()), two.log_prob(both))
    torch.testing.assert_close(one.log_labels(c), two.log_evidence(both))
    costs = one.log_labels(c).detach()
    torch.testing.assert_close(one._costs(draws[0], costs), two._costs(draws[1], costs))


def test_compiled_draw_is_the_fixed_point():
    hood = house()
    alpha, logits = parameters(hood, 3)
    q = OrderedConditional(
        hood, alpha, logits, torch.randint(3, (5,)), relabel=permutations(hood, 3)
    )
    uniforms = torch.rand(50, 5, dtype=torch.double)
    one = q._draw(torch.Size([50]), uniforms)
    two = draw_by_sweeps(q.rows, q._flat(torch.Size([50])), uniforms)
    assert all(map(torch.equal, (*one[:2], *one.counts), (*two[:2], *two.counts)))


class Program:
    """Observed labels of a path of three nodes, and leaf parameters."""

    def __init__(self, kind):
        self.hood = to_hood(nx.path_graph(3))
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha, self.kind = alpha.log(), kind
        self.weight = torch.randn(self.hood.num_edges)
        self.flips = permutations(self.hood, 2)
        self.y = torch.tensor([0, 1, 1])
        self.leaves = [self.log_alpha, self.logits] + [self.weight] * (kind == "matrices")
        for leaf in self.leaves:
            leaf.requires_grad_()

    def arguments(self):
        relabel = self.flips
        if self.kind == "matrices":
            keep = self.weight.sigmoid().view(-1, 1, 1)
            relabel = keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)
        return self.hood, self.log_alpha.exp(), self.logits, relabel

    def model(self, **options):
        pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for a parameter before it derives
        *arguments, relabel = self.arguments()
        nmm(*arguments, self.y, relabel=relabel, **options)

    def guide(self, **options):
        *arguments, relabel = self.arguments()
        ordered_guide(*arguments, self.y, relabel=relabel, **options)

    def loss(self):
        """The negative bound: a mean over orders, a sum over choices and borrowed labels."""
        *arguments, relabel = self.arguments()
        if self.kind == "permutations":
            relabel = one_hot(relabel, 2).double()
        value = everything(self.hood, 2)
        evidence = Parameters.of(*arguments, relabel).evidence(self.y)

        def bound(order):
            q = EvidenceConditional(*arguments, evidence, order=order)
            log_q, bounds = q.log_prob(value), q.log_evidence(value).sum(-1)
            there = log_q.isfinite()
            return (log_q[there].exp() * bounds[there]).sum()

        return -mean_over_orders(torch.arange(3), bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "kind", "estimator", "collapsed"),
    [
        (TraceGraph_ELBO, "permutations", "reward_to_go", False),
        (TraceGraph_ELBO, "matrices", "reinforce", True),
        (Trace_ELBO, "permutations", "reinforce", True),
        (Trace_ELBO, "matrices", "reward_to_go", True),
        (TraceGraph_ELBO, "matrices", "reward_to_go", False),
        (Trace_ELBO, "matrices", "reinforce", False),
    ],
)
def test_gradient(loss, kind, estimator, collapsed):
    """20,000 draws notice a gradient that is off by 4 % of its length."""
    check_gradient(Program(kind), loss, estimator, collapsed)


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_predictive(kind, collapsed):
    """
    Three labels of the other nodes by Pyro's weighed predictive, against the exact conditional:
    20,000 draws notice a probability that is off by .02.
    """
    hood = to_hood(nx.path_graph(4))
    mix = NeighborMixture(hood, *parameters(hood, 3, scale=1.0), KINDS[kind](hood, 3))
    y, observed = torch.tensor([1, -1, 2, -1]), torch.tensor([True, False, True, False])
    given, options = (mix.hood, mix.alpha, mix.logits, y, observed), {"relabel": mix.relabel}
    options["collapsed"] = collapsed
    guide = partial(ordered_guide, **options)
    model = partial(nmm, predict=True, **options)
    draws = WeighedPredictive(model, guide=guide, num_samples=20_000, parallel=True)(*given)
    weights = draws.log_weights.softmax(0)
    hit = one_hot(draws.samples["y_rest"] @ torch.tensor([3, 1]), 9).double()
    rest = torch.tensor([1, 3])
    exact = mix.condition(y, observed).log_marginal(rest, labellings(2, 3)).exp()
    error = (weights[:, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert ((weights @ hit - exact).abs() < 4 * error).all()
    total = draws.log_weights.exp()
    truth = mix.log_marginal(torch.tensor([0, 2]), y[observed]).exp()
    assert (total.mean() - truth).abs() < 4 * total.std() / len(total) ** 0.5 + 1e-9
