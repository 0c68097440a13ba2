# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Gradients of stock TraceGraph_ELBO against the enumerated gradient of the bound."""

import itertools
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import house, parameters, shared_sources, star, two_triangles
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_nmm import ChosenLabels, NeighborChoice, OrderedConditional
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.ops.score_costs import ScoreEstimator

PARTICLES, STEPS = 250, 80  # 20,000 draws
MASK = {
    "house": torch.tensor([True, True, False, True, True]),
    "star": None,
    "two_triangles": None,
    "shared": torch.tensor([True, False, True, True, True]),
}
HOODS = {"house": house, "star": star, "two_triangles": two_triangles}
HOODS |= {"shared": shared_sources}


class Problem:
    """A graph, labels and leaf parameters, with the exact bound of its program."""

    def __init__(self, name, extra=False):
        self.hood, self.observed, self.extra = HOODS[name](), MASK[name], extra
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha = alpha.log()
        self.y = torch.randint(2, (self.hood.num_nodes,))
        self.weight = torch.tensor(0.4)
        self.leaves = [self.log_alpha, self.logits, self.weight]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def outside(self, c):
        """A site of the surrounding program that depends on the choices."""
        return dist.Normal(self.weight * c.to(self.weight.dtype).sum(-1), 1.0)

    def model(self, **options):
        with pyro.poutine.trace() as tape:
            nmm(self.hood, self.log_alpha.exp(), self.logits, self.y, self.observed, **options)
        if self.extra:
            pyro.sample("x", self.outside(tape.trace.nodes["c"]["value"]), obs=torch.tensor(1.5))

    def guide(self, **options):
        alpha = self.log_alpha.exp()
        ordered_guide(self.hood, alpha, self.logits, self.y, self.observed, **options)

    def exact_gradient(self):
        """Mean over all orders, sum over all choices."""
        rows = self.hood.restrict(self.observed)
        choices = rows.source[enumerate_choices(rows)]
        bounds = []
        for order in itertools.permutations(rows.nodes.tolist()):
            q = OrderedConditional(
                self.hood, self.log_alpha.exp(), self.logits, self.y, self.observed,
                torch.tensor(order),
            )  # fmt: skip
            bound = q.log_labels(choices).sum(-1)
            if self.extra:
                bound = bound + self.outside(choices).log_prob(torch.tensor(1.5))
            bounds.append((q.log_prob(choices).exp() * bound).sum())
        loss = -torch.stack(bounds).mean()
        return self.flat(torch.autograd.grad(loss, self.leaves, allow_unused=True))

    def flat(self, grads):
        pairs = zip(grads, self.leaves, strict=True)
        return torch.cat(
            [torch.zeros_like(x).flatten() if g is None else g.flatten() for g, x in pairs]
        )

    def sampled_gradient(self, elbo, model, guide):
        for leaf in self.leaves:
            leaf.grad = None
        elbo.loss_and_grads(model, guide)
        return self.flat([leaf.grad for leaf in self.leaves])


def vectorized(particles=PARTICLES, nesting=0):
    return TraceGraph_ELBO(particles, max_plate_nesting=nesting, vectorize_particles=True)


def z_scores(problem, elbo, model, guide, steps=STEPS):
    grads = torch.stack([problem.sampled_gradient(elbo, model, guide) for _ in range(steps)])
    error = grads.std(0) / steps**0.5
    difference = grads.mean(0) - problem.exact_gradient()
    # Coordinates that no draw changes must be exact.
    return torch.where(error > 1e-12, difference / error.clamp(min=1e-12), difference * 1e10)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [False, True], ids=["alone", "with a site on c"])
@pytest.mark.parametrize("collapsed", [False, True], ids=["teaching", "collapsed"])
@pytest.mark.parametrize("estimator", ["reward_to_go", "reinforce"])
@pytest.mark.parametrize("name", HOODS)
def test_unbiased(name, estimator, collapsed, extra):
    problem = Problem(name, extra)
    guide = partial(problem.guide, collapsed=collapsed, estimator=estimator)
    scores = z_scores(problem, vectorized(), partial(problem.model, collapsed=collapsed), guide)
    assert scores.abs().max() < 4, scores


@pytest.mark.slow
def test_unbiased_without_other_draws():
    """Parameters of their own for each particle: the baseline is then a second draw."""
    problem = Problem("house")

    def own(fn):
        alpha = problem.log_alpha.exp().expand(PARTICLES, -1, -1)
        fn(problem.hood, alpha, problem.logits, problem.y, problem.observed, collapsed=True)

    scores = z_scores(problem, vectorized(), partial(own, nmm), partial(own, ordered_guide))
    assert scores.abs().max() < 4, scores


def test_one_particle_is_enough():
    problem = Problem("house")
    model, guide = (partial(f, collapsed=True) for f in (problem.model, problem.guide))
    grad = problem.sampled_gradient(TraceGraph_ELBO(), model, guide)
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
@pytest.mark.parametrize("name", HOODS)
def test_teaching_and_collapsed_agree_draw_by_draw(name, estimator):
    problem = Problem(name, extra=True)
    for seed in range(20):
        grads = []
        for collapsed in (False, True):
            pyro.set_rng_seed(seed)
            guide = partial(problem.guide, collapsed=collapsed, estimator=estimator)
            model = partial(problem.model, collapsed=collapsed)
            grads.append(problem.sampled_gradient(vectorized(4), model, guide))
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
def test_trace_elbo_has_the_same_gradient(estimator, kernels):
    """Draw by draw, tracked or not, and as a differentiable loss."""
    problem, gradients = Problem("house"), []
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
        gradients.append(problem.flat([leaf.grad for leaf in problem.leaves]))
    assert gradients[0].abs().max() > 0.01
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, rtol=0, atol=1e-10)


def test_variance_falls_and_the_biased_ones_stay_close():
    problem, variance = Problem("house"), {}
    exact = problem.exact_gradient()
    em = None
    for estimator in ("no_score", "one_step_credit", "reward_to_go", "reinforce"):
        guide = partial(problem.guide, collapsed=True, estimator=estimator)
        model = partial(problem.model, collapsed=True)
        grads = torch.stack(
            [problem.sampled_gradient(vectorized(4), model, guide) for _ in range(600)]
        )
        variance[estimator] = grads.var(0).sum()
        if estimator == "no_score":
            em = (grads.mean(0) - exact).norm()
            error = (grads.var(0).sum() / len(grads)).sqrt()
            assert em > 5 * error  # the score term is there
        if estimator == "one_step_credit":
            assert (grads.mean(0) - exact).norm() < 0.2 * em
    assert variance["one_step_credit"] < variance["reinforce"] / 16
    assert variance["reward_to_go"] < variance["reinforce"] / 4


class PerNode(GraphDistribution):
    """Nodes as a batch dimension, as a plate over nodes would have them."""

    def __init__(self, sample, log_prob, size):
        self._sample, self._log_prob = sample, log_prob
        super().__init__(torch.Size([size]), torch.Size())

    support = dist.constraints.nonnegative_integer

    def sample(self, sample_shape=()):
        return self._sample(self._extended_shape(sample_shape))

    def log_prob(self, value):
        return self._log_prob(value)


@pytest.mark.slow
def test_a_plate_over_nodes_is_caught():
    """Pyro then keeps for each choice its own node's cost only: a silent bias."""
    problem = Problem("star")
    hood, y, n = problem.hood, problem.y, problem.hood.num_nodes

    def labels(alpha, c):
        def per_node(value):
            parts = [
                ChosenLabels(alpha, c[..., :i]).log_prob(value[..., :i]) if i else c.sum(-1) * 0.0
                for i in range(n + 1)
            ]
            return torch.stack(parts, -1).diff(dim=-1)

        return PerNode(None, per_node, n)

    def model():
        alpha = problem.log_alpha.exp()
        log_l = hood.log_softmax(problem.logits)
        with pyro.plate("nodes", n):
            c = pyro.sample(
                "c", PerNode(None, lambda c: log_l[hood.find(c.view(-1, n))].view(c.shape), n)
            )
            pyro.sample("y", labels(alpha, c), obs=y)

    def guide():
        q = OrderedConditional(hood, problem.log_alpha.exp(), problem.logits, y)
        place = q.order.argsort()

        def log_prob(c):
            return q._evaluate(c)[2][..., place]

        with pyro.plate("nodes", n):
            pyro.sample("c", PerNode(lambda shape: q.sample(shape[:-1]), log_prob, n))

    scores = z_scores(problem, vectorized(nesting=1), model, guide)
    assert scores.abs().max() > 8

    # The same program as one event passes, so it is the plate that fails.
    def joint_guide():
        problem.guide(collapsed=True, estimator="reinforce")

    scores = z_scores(problem, vectorized(), partial(problem.model, collapsed=True), joint_guide)
    assert scores.abs().max() < 4


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reward_to_go", "reinforce"])
def test_unbiased_below_a_discrete_site(estimator):
    """Parameters that depend on a sample of the program: they carry its provenance."""
    problem = Problem("house")
    hood, observed, y = problem.hood, problem.observed, problem.y
    rate = torch.tensor(0.3, requires_grad=True)
    problem.leaves = [problem.log_alpha, problem.logits, rate]

    def program(fn):
        x = pyro.sample("x", dist.Bernoulli(torch.sigmoid(rate)))
        # One shape for the guess of the plates and for vectorized particles.
        alpha = (problem.log_alpha * (1 + x)[..., None, None]).exp()
        fn(hood, alpha, problem.logits, y, observed, collapsed=True)

    def exact():
        rows = hood.restrict(observed)
        choices = rows.source[enumerate_choices(rows)]
        loss = 0.0
        for value, prob in ((0.0, 1 - torch.sigmoid(rate)), (1.0, torch.sigmoid(rate))):
            alpha, bounds = (problem.log_alpha * (1 + value)).exp(), []
            for order in itertools.permutations(rows.nodes.tolist()):
                q = OrderedConditional(
                    hood, alpha, problem.logits, y, observed, torch.tensor(order)
                )
                bounds.append((q.log_prob(choices).exp() * q.log_labels(choices).sum(-1)).sum())
            loss = loss - prob * torch.stack(bounds).mean()
        return problem.flat(torch.autograd.grad(loss, problem.leaves))

    problem.exact_gradient = exact
    guide = partial(program, partial(ordered_guide, estimator=estimator))
    scores = z_scores(problem, vectorized(), partial(program, nmm), guide)
    assert scores.abs().max() < 4, scores


def test_em_gradient_is_the_direct_part():
    problem = Problem("house")
    pyro.set_rng_seed(1)
    elbo = vectorized(4)
    guide = partial(problem.guide, collapsed=True, estimator="no_score")
    grad = problem.sampled_gradient(elbo, partial(problem.model, collapsed=True), guide)
    pyro.set_rng_seed(1)
    q = OrderedConditional(
        problem.hood, problem.log_alpha.exp(), problem.logits, problem.y, problem.observed
    )
    loss = -q.log_labels(q.sample((4,))).sum(-1).mean()
    direct = problem.flat(torch.autograd.grad(loss, problem.leaves, allow_unused=True))
    torch.testing.assert_close(grad, direct)


def test_provenance_survives():
    """Without it TraceGraph_ELBO would forget the score of c, silently."""
    from pyro.ops.provenance import get_provenance, track_provenance

    hood = house()
    alpha, logits = parameters(hood, 2)
    y = torch.randint(2, (5,))
    q = OrderedConditional(hood, alpha, logits, y)
    c = track_provenance(q.sample((3,)), frozenset("c"))
    for part in q.score_parts(c):
        assert get_provenance(part) == frozenset("c")
    assert get_provenance(q.log_prob(c)) == frozenset("c")
    assert get_provenance(NeighborChoice(hood, logits).log_prob(c)) == frozenset("c")
    tracked = track_provenance(alpha, frozenset("a"))
    law = ChosenLabels(tracked, c)
    assert get_provenance(law.log_prob(y)) == frozenset("ac")
    q = OrderedConditional(hood, tracked, logits, y)
    assert get_provenance(q.log_prob(c)) == frozenset("ac")
    for leaf in (alpha, logits):
        leaf.requires_grad_()
    given = {"alpha": alpha, "logits": logits, "y": y}
    for name, value in given.items():
        tracked = given | {name: track_provenance(value, frozenset("p"))}
        q = OrderedConditional(hood, **tracked)
        for estimator in ScoreEstimator:
            q.estimator = estimator
            parts = q.score_parts(c)
            if estimator is ScoreEstimator.REINFORCE:  # as of stock distributions: no entropy term
                assert parts.entropy_term == 0
                parts = parts[:2]
            parts = [*parts, q.log_prob(c), q.log_labels(c)]
            for part in parts:
                assert get_provenance(part) == frozenset("cp"), (name, estimator)
                grads = torch.autograd.grad(part.sum(), (alpha, logits), retain_graph=True)
                assert all(grad.abs().sum() > 0 for grad in grads), (name, estimator)
    q = OrderedConditional(hood, alpha, logits, track_provenance(y, frozenset("y")))
    assert get_provenance(q.log_prob(track_provenance(q.sample(), frozenset("c")))) == frozenset(
        "cy"
    )
