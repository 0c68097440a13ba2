# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro's ``Predictive`` of the nodes that are not observed, against sums over all choices."""

from functools import partial

import pyro
import pytest
import torch
from cases import matrices
from graphs import labellings, parameters
from pyro import infer, poutine
from scipy.stats import chi2

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

HOOD = Neighborhood.grid(1, 4)
OBSERVED = torch.tensor([True, False, True, False])
Y = torch.tensor([1, -1, 0, -1])
REST = labellings(2)  # of the other two


class Problem:
    """A path of four nodes, whose edges keep labels or change them by ``relabel``."""

    def __init__(self, collapsed, relabel=None):
        self.alpha, self.logits = parameters(HOOD, 2, scale=1.0)
        self.given = HOOD, self.alpha, self.logits, Y, OBSERVED
        options = {"collapsed": collapsed, "relabel": relabel and relabel(HOOD, 2)}
        self.mix = NeighborMixture(*self.given[:3], options["relabel"])
        self.model = partial(nmm, predict=True, **options)
        self.guide = partial(ordered_guide, **options)


@pytest.mark.parametrize("relabel", [None, matrices])
@pytest.mark.parametrize("collapsed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_make_them_exact(collapsed, relabel):
    problem = Problem(collapsed, relabel)
    options = {"num_samples": 20_000, "parallel": True}
    found = infer.WeighedPredictive(problem.model, guide=problem.guide, **options)(*problem.given)
    mix = problem.mix
    exact = mix.condition(Y, OBSERVED).log_marginal(torch.tensor([1, 3]), REST).exp()
    weights, place = found.log_weights.softmax(0), torch.tensor([2, 1])
    hit = torch.nn.functional.one_hot(found.samples["y_rest"] @ place, 4).double()
    error = (weights[:, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert ((weights @ hit - exact).abs() < 4 * error).all()
    log_evidence = mix.log_marginal(torch.tensor([0, 2]), Y[OBSERVED])
    weight = found.log_weights.exp()
    assert (weight.mean() - log_evidence.exp()).abs() < 4 * weight.std() / len(weight) ** 0.5 + 1e-9


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
        expected = problem.mix.log_prob(everything).exp() * len(y)
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


@pytest.mark.parametrize("observed", [None, torch.ones(4, dtype=torch.bool)])
def test_nothing_to_predict(observed):
    problem = Problem(True)
    with pytest.raises(ValueError, match="predict draws the nodes that observed leaves out"):
        nmm(HOOD, problem.alpha, problem.logits, Y.clamp(min=0), observed, predict=True)
