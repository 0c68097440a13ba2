# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The mixture of memberships: density by quadrature, choices by enumeration, gradients."""

import functools
import itertools

import pyro
import pytest
import torch
from pyro.distributions import ImproperUniform
from pyro.infer import Trace_ELBO
from torch import nn
from torch.distributions import constraints

from pyro_nmm import MembershipMixture, NeighborChoice, Neighborhood
from pyro_nmm.guides import MarginalGuide
from pyro_nmm.ops.enumeration import enumerate_choices

TEMPERATURE = 0.7


def problem(num_communities=2):
    """Four nodes, of two to four neighbours."""
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3, 0], [1, 0, 2, 1, 3, 2, 2]])
    hood = Neighborhood(edge_index, 4)
    log_odds = (1.5 * torch.randn(4, num_communities)).requires_grad_()
    return hood, log_odds, torch.randn(hood.num_edges, requires_grad=True)


def mixture():
    return MembershipMixture(*problem(), TEMPERATURE)


def test_density_sums_to_one():
    """Over a lattice, node by node: nodes are independent. The density is smooth at its step."""
    mix = mixture()
    line = torch.linspace(-60, 60, 241)
    lattice = torch.cartesian_prod(line, line)
    typical = mix.sample()
    values = typical.repeat(4, len(lattice), 1, 1)
    for node in range(4):
        values[node, :, node] = lattice
    cell = (line[1] - line[0]) ** 2
    # The sum over a node's vectors leaves the other nodes' density: their product is that of all,
    # to the power of three.
    whole = mix.log_prob(values).exp().sum(1) * cell
    torch.testing.assert_close(whole.log().sum(), 3 * mix.log_prob(typical))


def test_density_at_infinity():
    """Zero, in every direction."""
    mix, s = mixture(), mixture().sample()
    for far in itertools.product([-torch.inf, 0, torch.inf], repeat=2):
        value = s.clone()
        value[1] = torch.tensor(far)
        assert (mix.log_prob(value) == -torch.inf) == any(far)


def test_choices():
    """p(c) p(s | c) = p(s) p(c | s) for every c, and their sum over c is p(s)."""
    mix = mixture()
    s = mix.sample((3,))
    c = torch.tensor(list(itertools.product(*mix.hood.source.split(mix.hood.ptr.diff().tolist()))))
    c = c[:, None].expand(-1, 3, -1)
    joint = NeighborChoice(mix.hood, mix.logits).log_prob(c) + mix.given(c).log_prob(s)
    assert torch.allclose(joint.logsumexp(0), mix.log_prob(s))
    assert torch.allclose(joint - mix.choices(s).log_prob(c), mix.log_prob(s).expand_as(joint))


@pytest.mark.parametrize("estimator", ["linear", "detached"])
@pytest.mark.parametrize("off", [-torch.inf, -1000.0])
def test_edges_that_are_switched_off(estimator, off):
    hood, log_odds, logits = problem()
    gone = torch.zeros(hood.num_edges, dtype=torch.bool)
    gone[[0, 4]] = True  # the first one of its row, and another
    logits = logits.detach().masked_fill(gone, off).requires_grad_()
    mix = MembershipMixture(hood, log_odds, logits, TEMPERATURE, estimator)
    s = mix.rsample()
    grads = torch.autograd.grad(mix.log_prob(s), [log_odds, logits])
    assert mix.log_prob(s).isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][gone] == 0).all()


@pytest.mark.parametrize("num_communities", [2, 3])
def test_rounded_memberships(num_communities):
    """Rounding gives the mixture of Bernoulli vectors; its 4^K tables fit the samples."""
    hood, log_odds, logits = problem(num_communities)
    mix, num_draws = MembershipMixture(hood, log_odds, logits, TEMPERATURE), 20000
    patterns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=num_communities)))
    bernoulli = torch.distributions.Bernoulli(logits=log_odds.detach())
    table = bernoulli.log_prob(patterns[:, None]).sum(-1).exp()
    table = hood.sum(hood.softmax(logits.detach()) * table[:, hood.source])
    assert torch.allclose(table.sum(0), torch.ones(4))
    found = (mix.sample((num_draws,)) > 0).to(patterns)
    counts = (found[:, None] == patterns[:, None]).all(-1).sum(0)
    chi = ((counts - num_draws * table) ** 2 / (num_draws * table)).sum(0)
    freedom = 2**num_communities - 1
    assert (chi < freedom + 4.5 * (2 * freedom) ** 0.5).all()


def test_linear_estimator_of_a_linear_loss():
    """is the true gradient, in every draw."""
    hood, log_odds, logits = problem()
    s = MembershipMixture(hood, log_odds, logits, TEMPERATURE, "linear").rsample()
    weight = torch.randn(4, 2)
    found = torch.autograd.grad((weight * s).sum(), logits)[0]
    mean = hood.softmax(logits)[:, None] * log_odds[hood.source] / TEMPERATURE
    exact = torch.autograd.grad((weight[hood.target] * mean).sum(), logits)[0]
    assert torch.allclose(found, exact)


def target():
    """A program whose log-density ties all memberships together."""
    s = pyro.sample("s", ImproperUniform(constraints.independent(constraints.real, 2), (), (4, 2)))
    pyro.factor("f", score(s))


def score(s):
    b = s.sigmoid()
    overlap = b @ b.mT
    return 2 * torch.tanh(overlap - 0.7).sum((-2, -1)) - 0.05 * s.square().sum((-2, -1))


class Given(nn.Module):
    """A network that only holds its outputs."""

    def __init__(self, log_odds, logits):
        super().__init__()
        self.log_odds, self.logits = nn.Parameter(log_odds), nn.Parameter(logits)

    def forward(self, hood):
        return self.log_odds, self.logits


def moments(samples):
    return samples.mean(0), samples.std(0) / len(samples) ** 0.5


@functools.cache
def enumerated(num_draws=4000, num_batches=50):
    """
    A problem and the gradient of its E[log q(s) - f(s)], summed over all choices, with draws of s
    alone.
    """
    torch.manual_seed(0)
    hood, log_odds, logits = problem()
    choices = hood.source[enumerate_choices(hood)]
    mix = MembershipMixture(hood, log_odds, logits, TEMPERATURE)
    found = []
    for _ in range(num_batches):
        u = torch.rand(num_draws // num_batches, 1, 4, 2).clamp(1e-12, 1 - 1e-12)
        s = (log_odds[choices] + u.logit()) / TEMPERATURE
        weight = NeighborChoice(hood, logits).log_prob(choices).exp()
        loss = (weight * (mix.log_prob(s) - score(s))).sum(-1).mean()
        found.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, [log_odds, logits])])
        )
    return hood, log_odds.detach(), logits.detach(), *moments(torch.stack(found))


@pytest.mark.slow
def test_gradients():
    """
    Against the enumerated gradient, exact towards the log-odds alone. 20,000 draws notice a tenth
    of the largest entry.
    """
    hood, log_odds, logits, exact, exact_error = enumerated()
    network = Given(log_odds.clone(), logits.clone())
    family = functools.partial(MembershipMixture, temperature=TEMPERATURE)
    pair = MarginalGuide(hood, network, target, family, site="s")
    elbo = Trace_ELBO(num_particles=500, vectorize_particles=True, max_plate_nesting=0)
    found = []
    for _ in range(40):
        network.zero_grad()
        elbo.loss_and_grads(pair.model, pair.guide)
        found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    mean, error = moments(torch.stack(found))
    z = ((mean - exact) / (error**2 + exact_error**2).sqrt()).abs().split([8, hood.num_edges])
    assert z[0].max() < 4.5
    assert z[1].max() > 10
    assert (exact.abs() / exact_error).max() > 20  # there is something to estimate
