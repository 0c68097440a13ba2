# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro's ``Predictive`` of the nodes that are not observed, against sums over all choices."""

import itertools
from functools import partial

import pyro
import pytest
import torch
from bounds import all_choices
from graphs import labellings, parameters
from pyro import infer, poutine
from scipy.stats import chi2

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM, ordered_guide
from pyro_nmm.models import FreeNMM, nmm

HOOD = Neighborhood.grid(1, 4)
OBSERVED = torch.tensor([True, False, True, False])
Y = torch.tensor([1, -1, 0, -1])
REST = labellings(2)  # of the other two


class Problem:
    def __init__(self, collapsed):
        self.alpha, self.logits = parameters(HOOD, 2, scale=1.0)
        self.given = HOOD, self.alpha, self.logits, Y, OBSERVED
        self.model = partial(nmm, collapsed=collapsed, predict=True)
        self.guide = partial(ordered_guide, collapsed=collapsed)

    def of_order(self, order):
        """``(4,)``: sum over the choices of the observed nodes of q(c | y) p(y_rest | c, y)."""
        c = all_choices(HOOD)[:, None]
        y = torch.stack([Y.where(OBSERVED, torch.cat([r, r])[[0, 0, 0, 1]]) for r in REST])
        mix = NeighborMixture(HOOD, self.alpha, self.logits)
        seen = mix.given(c[..., OBSERVED]).log_prob(Y[OBSERVED])
        rows = HOOD.restrict(~OBSERVED)
        choice = NeighborChoice(rows, self.logits[rows.edge]).log_prob(c[..., ~OBSERVED])
        log_rest = choice + mix.given(c).log_prob(y) - seen
        q = mix.choices(Y, OBSERVED, order).log_prob(c[..., OBSERVED])
        return (q + log_rest).exp().sum(0)

    def orders(self):
        return [self.of_order(torch.tensor(order)) for order in itertools.permutations([0, 2])]

    def draws(self, kind=infer.Predictive, **options):
        return kind(self.model, guide=self.guide, **options)(*self.given)


def place(rest):
    return rest @ torch.tensor([2, 1])


def fits(rest, probs):
    counts = torch.bincount(place(rest), minlength=4)
    expected = probs * len(rest)
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), 3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("collapsed", [False, True])
def test_draws_are_those_of_the_guide(parallel, collapsed):
    problem = Problem(collapsed)
    size = 10_000 if parallel else 400
    draws = problem.draws(num_samples=size, parallel=parallel)
    assert draws["y_rest"].shape == (size, 2)
    orders = problem.orders()
    torch.testing.assert_close(orders[0].sum().item(), 1.0)
    # Draws in parallel share one order, others have their own.
    cases = orders if parallel else [torch.stack(orders).mean(0)]
    assert max(fits(draws["y_rest"], case) for case in cases) > 1e-3
    assert fits(draws["y_rest"].flip(-1), cases[0]) < 1e-6  # the test can fail


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True])
def test_weights_make_them_exact(collapsed):
    problem = Problem(collapsed)
    found = problem.draws(infer.WeighedPredictive, num_samples=40_000, parallel=True)
    mix = NeighborMixture(HOOD, problem.alpha, problem.logits)
    exact = mix.condition(Y, OBSERVED).log_marginal(torch.tensor([1, 3]), REST).exp()
    weights = found.log_weights.softmax(0)
    hit = torch.nn.functional.one_hot(place(found.samples["y_rest"]), 4).double()
    error = (weights[:, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert ((weights @ hit - exact).abs() < 4 * error).all()
    log_evidence = mix.log_marginal(torch.tensor([0, 2]), Y[OBSERVED])
    weight = found.log_weights.exp()
    assert (weight.mean() - log_evidence.exp()).abs() < 4 * weight.std() / len(weight) ** 0.5


def test_prior_draws_are_of_all_nodes():
    problem = Problem(True)
    arguments = HOOD, problem.alpha, problem.logits, None, OBSERVED
    for collapsed in (False, True):
        model = partial(nmm, collapsed=collapsed, predict=True)
        draws = infer.Predictive(model, num_samples=20_000, parallel=True)(*arguments)
        y = torch.empty(20_000, 4, dtype=torch.long)
        y[:, OBSERVED], y[:, ~OBSERVED] = draws["y"], draws["y_rest"]
        everything = labellings(4)
        counts = torch.bincount(y @ torch.tensor([8, 4, 2, 1]), minlength=16)
        mix = NeighborMixture(HOOD, problem.alpha, problem.logits)
        expected = mix.log_prob(everything).exp() * len(y)
        assert chi2.sf(((counts - expected) ** 2 / expected).sum(), 15) > 1e-3


@pytest.mark.parametrize("collapsed", [False, True])
def test_what_is_predicted_stays_marginalised(collapsed):
    problem = Problem(collapsed)
    alpha = problem.alpha.requires_grad_()
    elbo = infer.TraceGraph_ELBO(3, vectorize_particles=True, max_plate_nesting=0)
    found = []
    for predict in (False, True):
        pyro.set_rng_seed(1)
        alpha.grad = None
        model = partial(nmm, collapsed=collapsed, predict=predict)
        loss = elbo.loss_and_grads(model, problem.guide, *problem.given)
        found.append((torch.tensor(loss), alpha.grad.clone()))
    torch.testing.assert_close(*found)
    trace = poutine.trace(problem.model).get_trace(*problem.given)
    assert trace.nodes["y_rest"]["value"].shape == (2,)
    total = trace.log_prob_sum()
    names = trace.nodes.keys() & {"z", "c", "y"}
    own = sum(trace.nodes[name]["log_prob_sum"] for name in names)
    torch.testing.assert_close(total, own)


@pytest.mark.parametrize("collapsed", [False, True])
def test_of_a_network(collapsed):
    network = FreeNMM(HOOD, 2)
    program = AmortizedNMM(HOOD, network, collapsed=collapsed)
    model = partial(program.model, predict=True)
    draws = infer.Predictive(model, guide=program.guide, num_samples=5, parallel=True)
    assert draws(y=Y, observed=OBSERVED)["y_rest"].shape == (5, 2)


@pytest.mark.parametrize("observed", [None, torch.ones(4, dtype=torch.bool)])
def test_nothing_to_predict(observed):
    problem = Problem(True)
    with pytest.raises(ValueError, match="predict draws the nodes that observed leaves out"):
        nmm(HOOD, problem.alpha, problem.logits, Y.clamp(min=0), observed, predict=True)
