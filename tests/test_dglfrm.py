# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The latent feature model of graphs and its two guides."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Beta, Kumaraswamy
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam
from scipy.integrate import quad
from torch.distributions import kl_divergence
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected

from pyro_nmm import Neighborhood
from pyro_nmm.guides import DGLFRMGuide
from pyro_nmm.models import DGLFRM
from pyro_nmm.sticks import stick_logits

NUM_NODES, NUM_FEATURES, NUM_COMMUNITIES = 6, 5, 3


def graph():
    edge_index = to_undirected(torch.tensor([[0, 1, 2, 2, 3, 4], [1, 2, 0, 3, 4, 5]]))
    x = torch.bernoulli(torch.full((NUM_NODES, NUM_FEATURES), 0.4))
    return edge_index, x, torch.tensor([[0, 1], [5, 4]])


def make(kind, num_features=0, **options):
    target = DGLFRM(NUM_NODES, NUM_COMMUNITIES, num_features, hidden=(4, 3), concentration=2.0)
    if kind == "identity":
        hood = Neighborhood(torch.zeros(2, 0, dtype=torch.long), NUM_NODES)
    else:
        hood = None if kind == "original" else Neighborhood(graph()[0], NUM_NODES)
    return DGLFRMGuide(target, NUM_FEATURES, hood, hidden=4, **options)


@pytest.mark.parametrize(("a", "b", "prior"), [(2.0, 0.7, 3.0), (0.6, 2.5, 0.8), (4.0, 1.3, 5.0)])
def test_divergence_of_sticks(a, b, prior):
    p, q = Kumaraswamy(torch.tensor(a), torch.tensor(b)), Beta(torch.tensor(prior), 1.0)

    def integrand(v):
        v = torch.tensor(v)
        log_p = p.log_prob(v)
        return (log_p.exp() * (log_p - q.log_prob(v))).item()

    assert kl_divergence(p, q).item() == pytest.approx(quad(integrand, 0, 1)[0], abs=1e-6)


def test_stick_logits():
    v = torch.rand(4, 7)
    assert torch.allclose(stick_logits(v).sigmoid(), v.cumprod(-1))
    for dtype in (torch.float, torch.double):
        ends = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.5]], dtype=dtype, requires_grad=True)
        odds = stick_logits(ends)
        assert odds.isfinite().all()
        assert torch.autograd.grad(odds.sum(), ends)[0].isfinite().all()


def test_prior_graphs():
    """More concentrated sticks leave more memberships; features come along."""
    sizes = []
    for concentration in (1.0, 30.0):
        model = DGLFRM(20, 8, 5, concentration=concentration)
        trace = poutine.trace(model.model).get_trace()
        assert trace.nodes["x"]["value"].shape == (20, 5)
        assert trace.nodes["edges"]["value"].max() < 20
        sizes.append((trace.nodes["s"]["value"] > 0).sum().item())
    assert sizes[0] < sizes[1]


def test_attention_to_oneself_is_the_original():
    """Every log-density agrees, at the same draws."""
    edge_index, x, held_out = graph()
    original, identity = make("original"), make("identity")
    shared = original.encoder.state_dict()
    identity.encoder.load_state_dict(shared, strict=False)
    identity.target.load_state_dict(original.target.state_dict())
    original.eval(), identity.eval()
    draw = poutine.trace(original.guide).get_trace(edge_index, x, held_out)
    for mine, other in ((original.guide, identity.guide), (original.model, identity.model)):
        values = []
        for program in (mine, other):
            pyro.clear_param_store()
            trace = poutine.trace(poutine.replay(program, draw))
            values.append(trace.get_trace(edge_index, x, held_out).log_prob_sum())
        assert torch.allclose(*values)


def gradient(pair, elbo, num_steps, names):
    """Mean and standard error of the derivatives towards some of the encoder's parameters."""
    data, found = graph(), []
    parameters = dict(pair.encoder.named_parameters())
    for _ in range(num_steps):
        pair.zero_grad()
        elbo.loss_and_grads(pair.model, pair.guide, *data)
        found.append(torch.cat([parameters[name].grad.flatten() for name in names]))
    found = torch.stack(found)
    return found.mean(0), found.std(0) / num_steps**0.5


@pytest.mark.slow
def test_local_estimator():
    """It agrees with the pathwise one, which is tested by enumeration, on the whole model."""
    names = ["gamma", "omega", "heads.3.lin.weight", "log_sticks"]
    state, results = None, []
    for estimator, num_columns in (("pathwise", None), ("local", None), ("local", 3)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = make("nmm", NUM_FEATURES, estimator=estimator, num_columns=num_columns, width=2)
        state = state or pair.state_dict()
        pair.load_state_dict(state)
        pair.eval()
        results.append(gradient(pair, TraceMeanField_ELBO(), 400, names))
    for mean, error in results[1:]:
        z = (mean - results[0][0]) / (error.square() + results[0][1].square()).sqrt()
        assert z.abs().max() < 4
        assert (mean[:2].abs() / error[:2]).max() > 5  # there is something to estimate


def test_bounds_agree():
    """Every ELBO of Pyro's has the same mean, with choices summed out and with a site c."""
    losses = []
    for marginal, elbo in (
        (True, TraceMeanField_ELBO()), (True, Trace_ELBO()), (False, TraceGraph_ELBO())
    ):  # fmt: skip
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = make("nmm", NUM_FEATURES, marginal=marginal).eval()
        with torch.no_grad():
            draws = [elbo.loss(pair.model, pair.guide, *graph()) for _ in range(300)]
        draws = torch.tensor(draws)
        losses.append((draws.mean(), draws.var() / len(draws)))
    for mean, variance in losses[1:]:
        assert abs(mean - losses[0][0]) < 4 * (variance + losses[0][1]).sqrt()


@pytest.mark.parametrize("kind", ["original", "nmm"])
def test_learns(kind):
    """Links of the karate club come out on top of other pairs."""
    data = KarateClub()[0]
    x = data.x.to(torch.get_default_dtype())
    target = DGLFRM(34, 6, hidden=(8, 4), concentration=3.0)
    hood = None if kind == "original" else Neighborhood(data.edge_index, 34)
    pair = DGLFRMGuide(target, 34, hood, hidden=8, dropout=0.0)
    svi = SVI(pair.model, pair.guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    losses = [svi.step(data.edge_index, x) for _ in range(200)]
    assert sum(losses[-20:]) < sum(losses[:20])
    pairs = torch.combinations(torch.arange(34)).T
    linked = torch.zeros(34, 34, dtype=torch.bool)
    linked[tuple(data.edge_index)] = True
    logits = pair.link_logits(pairs, data.edge_index, x)
    linked = linked[tuple(pairs)]
    better = (logits[linked][:, None] > logits[~linked]).double().mean()
    assert better > 0.7
    assert pair.training


def test_bad_input():
    with pytest.raises(ValueError, match="concentration and temperature must be positive"):
        DGLFRM(5, 3, concentration=0.0)
    with pytest.raises(ValueError, match="hood must have the 5 nodes of target, got 6"):
        DGLFRMGuide(DGLFRM(5, 3), 4, Neighborhood(graph()[0], 6))
    pair = make("nmm")
    vectorized = TraceMeanField_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=0)
    with pytest.raises(NotImplementedError, match="vectorize_particles=False"):
        vectorized.loss_and_grads(pair.model, pair.guide, *graph())
