# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Gradients of stock TraceGraph_ELBO against the enumerated gradient of the bound."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import check_against, check_gradient, gradients, mean_over_orders
from graphs import house, parameters, shared_sources, star, two_triangles
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_nmm import OrderedConditional
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm
from pyro_nmm.ops.enumeration import enumerate_choices

PARTICLES, STEPS = 1250, 16  # 20,000 draws
HOODS = {"house": house, "star": partial(star, 3), "two_triangles": two_triangles}
HOODS |= {"shared": shared_sources}
MASK = {
    "house": torch.tensor([True, True, False, True, True]),
    "star": None,
    "two_triangles": torch.tensor([True, True, False, True, True]),
    "shared": torch.tensor([True, False, True, True, True]),
}
ESTIMATORS = "reward_to_go", "no_score", "reinforce"


class Problem:
    """
    A graph, labels and leaf parameters, with the exact bound of its program.

    :param bool extra: whether a site of the surrounding program depends on the choices.
    """

    def __init__(self, name, extra=False):
        self.hood, self.observed, self.extra = HOODS[name](), MASK[name], extra
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha = alpha.log()
        self.y = torch.randint(2, (self.hood.num_nodes,))
        self.weight = torch.tensor(0.4)
        self.leaves = [self.log_alpha, self.logits] + [self.weight] * extra
        for leaf in self.leaves:
            leaf.requires_grad_()

    def outside(self, c):
        return dist.Normal(self.weight * c.to(self.weight.dtype).sum(-1), 1.0)

    def model(self, **options):
        with pyro.poutine.trace() as tape:
            nmm(self.hood, self.log_alpha.exp(), self.logits, self.y, self.observed, **options)
        if self.extra:
            pyro.sample("x", self.outside(tape.trace.nodes["c"]["value"]), obs=torch.tensor(1.5))

    def guide(self, **options):
        alpha = self.log_alpha.exp()
        ordered_guide(self.hood, alpha, self.logits, self.y, self.observed, **options)

    def loss(self, scale=1.0):
        """The negative bound: a mean over orders, a sum over choices."""
        rows = self.hood.restrict(self.observed)
        choices = rows.source[enumerate_choices(rows)]
        rest = self.outside(choices).log_prob(torch.tensor(1.5)) if self.extra else 0.0
        given = self.hood, (scale * self.log_alpha).exp(), self.logits, self.y, self.observed

        def bound(order):
            q = OrderedConditional(*given, order)
            return (q.log_prob(choices).exp() * (q.log_terms(choices).sum(-1) + rest)).sum()

        return -mean_over_orders(rows.nodes, bound)

    def sampled(self, elbo, estimator, collapsed=True, steps=1):
        """``(steps, n)`` gradients."""
        guide = partial(self.guide, collapsed=collapsed, estimator=estimator)
        model = partial(self.model, collapsed=collapsed)
        return gradients(elbo, model, guide, self.leaves, steps)[1]


def vectorized(particles=PARTICLES, nesting=0):
    return TraceGraph_ELBO(particles, max_plate_nesting=nesting, vectorize_particles=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "estimator", "collapsed", "extra"),
    [
        ("house", "reward_to_go", True, True),
        ("star", "reinforce", False, True),
        # Alone: the noise of another site would hide costs of the wrong component.
        ("two_triangles", "reward_to_go", True, False),
        ("shared", "reward_to_go", False, True),
    ],
)
def test_unbiased(name, estimator, collapsed, extra):
    """20,000 draws notice a gradient that is off by 6 % of its length, on "shared" by 13 %."""
    check_gradient(Problem(name, extra), TraceGraph_ELBO, estimator, collapsed)


@pytest.mark.slow
def test_unbiased_without_other_draws():
    """Parameters of their own for each particle: the baseline is then a second draw."""
    problem = Problem("house")

    def own(fn):
        alpha = problem.log_alpha.exp().expand(PARTICLES, -1, -1)
        fn(problem.hood, alpha, problem.logits, problem.y, problem.observed, collapsed=True)

    programs = partial(own, nmm), partial(own, ordered_guide)
    found = gradients(vectorized(), *programs, problem.leaves, STEPS)
    check_against(problem.loss(), problem.leaves, *found)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", HOODS)
def test_teaching_and_collapsed_agree_draw_by_draw(name, estimator):
    problem = Problem(name, extra=True)
    for seed in range(2):
        grads = []
        for collapsed in (False, True):
            pyro.set_rng_seed(seed)
            grads.append(problem.sampled(vectorized(4), estimator, collapsed))
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_trace_elbo_has_the_same_gradient(estimator, kernels):
    """Draw by draw, tracked or not, and as a differentiable loss."""
    problem, grads = Problem("house"), []
    guide = partial(problem.guide, collapsed=True, estimator=estimator)

    def model():
        pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for a parameter before it derives
        problem.model(collapsed=True)

    programs = model, guide
    ways = [
        TraceGraph_ELBO(5, vectorize_particles=True, max_plate_nesting=1).loss_and_grads,
        Trace_ELBO(5, vectorize_particles=True, max_plate_nesting=1).loss_and_grads,
        lambda *pair: Trace_ELBO(5, vectorize_particles=True, max_plate_nesting=1)
        .differentiable_loss(*pair).backward(),
    ]  # fmt: skip
    for way in ways:
        torch.manual_seed(3)
        problem.log_alpha.grad = problem.logits.grad = None
        way(*programs)
        grads.append(torch.cat([leaf.grad.flatten() for leaf in problem.leaves]))
    assert grads[0].abs().max() > 0.01
    for other in grads[1:]:
        torch.testing.assert_close(grads[0], other, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_variance_falls():
    """
    The variance of 60 gradients is known to a fifth. On this graph it is 40 times that of
    reward-to-go for REINFORCE.
    """
    problem, variance, gap = Problem("house"), {}, {}
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(problem.loss(), problem.leaves)])
    for estimator in ESTIMATORS:
        grads = problem.sampled(vectorized(64), estimator, steps=60)
        variance[estimator] = grads.var(0).sum()
        gap[estimator] = (grads.mean(0) - truth).norm()
    assert gap["no_score"] > 5 * (variance["no_score"] / 60).sqrt()  # the score term is there
    assert variance["reward_to_go"] < variance["reinforce"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reward_to_go", "reinforce"])
def test_unbiased_below_a_discrete_site(estimator):
    """Parameters that depend on a sample of the program: they carry its provenance."""
    problem = Problem("house")
    hood, observed, y = problem.hood, problem.observed, problem.y
    rate = torch.tensor(0.3, requires_grad=True)
    leaves = [problem.log_alpha, problem.logits, rate]
    prob = torch.sigmoid(rate)
    truth = (1 - prob) * problem.loss() + prob * problem.loss(scale=2.0)
    level = truth.item()

    def program(fn):
        x = pyro.sample("x", dist.Bernoulli(torch.sigmoid(rate)))
        # One shape for the guess of the plates and for vectorized particles.
        alpha = (problem.log_alpha * (1 + x)[..., None, None]).exp()
        fn(hood, alpha, problem.logits, y, observed, collapsed=True)
        return x

    def model():
        # A constant cost of x has no gradient: this one takes most of the noise away.
        pyro.factor("level", level + 0.0 * program(nmm))

    guide = partial(program, partial(ordered_guide, estimator=estimator))
    found = gradients(vectorized(), model, guide, leaves, STEPS)
    check_against(truth - level, leaves, *found)
