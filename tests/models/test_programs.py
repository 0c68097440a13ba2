# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM inside larger programs: each test trains or samples one."""

from functools import partial

import networkx as nx
import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import house, parameters, to_hood, two_triangles
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import SVI, Predictive, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch.distributions import constraints

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm


def vectorized():
    """Made anew: one that has run knows its plates, and draws nothing to find them."""
    return TraceGraph_ELBO(num_particles=8, vectorize_particles=True)


def field(num_classes=2):
    """A ladder whose labels change in the middle, and a mask of what is observed."""
    hood = to_hood(nx.ladder_graph(8))
    y = (torch.arange(16) % 8 >= 4).long()
    observed = torch.ones(16, dtype=torch.bool)
    observed[::5] = False
    return hood, y.where(observed, -1), observed


def learned(hood, num_classes=2, name=""):
    ones = torch.ones(hood.num_nodes, num_classes)
    alpha = pyro.param(name + "alpha", ones, constraint=constraints.positive)
    return alpha, pyro.param(name + "logits", torch.zeros(hood.num_edges))


def train(model, guide, elbo=vectorized, steps=80, lr=0.06):
    svi = SVI(model, guide, Adam({"lr": lr}), elbo())
    losses = torch.tensor([svi.step() for _ in range(steps)])
    assert losses.isfinite().all()
    return losses[: steps // 5].mean(), losses[-steps // 5 :].mean()


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score"])
@pytest.mark.parametrize("elbo", [vectorized, TraceGraph_ELBO], ids=["8", "1"])
def test_svi_raises_the_bound(collapsed, estimator, elbo):
    hood, y, observed = field()

    def program(fn):
        fn(hood, *learned(hood), y, observed, collapsed=collapsed)

    guide = partial(ordered_guide, estimator=estimator)
    before, after = train(partial(program, nmm), partial(program, guide), elbo)
    assert after < before - 3
    store = pyro.get_param_store()
    mix = NeighborMixture(hood, store["alpha"], store["logits"])
    bound = mix.elbo(y, observed, 200).mean().detach()
    torch.testing.assert_close(-after, bound, atol=1.0, rtol=0)


@pytest.mark.slow
def test_hyperprior_on_alpha_beside_the_ordered_guide():
    hood, y, observed = field()

    def model():
        sharpness = pyro.sample("sharpness", dist.LogNormal(0.0, 1.0))
        base = pyro.sample("base", dist.Normal(0.0, 1.0).expand([16, 2]).to_event(2))
        alpha = (base + sharpness[..., None, None]).exp()
        nmm(hood, alpha, torch.zeros(hood.num_edges), y, observed, collapsed=True)
        return alpha

    with_alpha = AutoNormal(poutine.block(model, hide=["c", "y"]))

    def guide():
        values = with_alpha()
        alpha = (values["base"] + values["sharpness"][..., None, None]).exp()
        ordered_guide(hood, alpha, torch.zeros(hood.num_edges), y, observed, collapsed=True)

    before, after = train(model, guide, steps=150)
    assert after < before - 3
    median = with_alpha.median()
    alpha = (median["base"] + median["sharpness"]).exp()
    mean = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges)).marginals()
    assert (mean.argmax(-1)[observed] == y[observed]).double().mean() > 0.9


@pytest.mark.slow
def test_two_models_in_one_program():
    hood, y, observed = field()

    def program(fn):
        for name, labels in (("left", y), ("right", 1 - y)):
            with scope(prefix=name):
                fn(hood, *learned(hood, name=name), labels, observed)

    sites = poutine.trace(partial(program, nmm)).get_trace().stochastic_nodes
    assert {"left/z", "left/c", "right/z", "right/c"} <= set(sites)
    before, after = train(partial(program, nmm), partial(program, ordered_guide))
    assert after < before - 6
    first, second = (pyro.param(name + "alpha").argmax(-1)[observed] for name in ("left", "right"))
    assert (first != second).double().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True])
def test_replicated_fields_in_a_plate(collapsed):
    hood, y, observed = field()
    fields = torch.stack([y, y, 1 - y])

    def program(fn):
        alpha, logits = learned(hood)
        with pyro.plate("fields", 3):
            fn(hood, alpha, logits, fields, observed, collapsed=collapsed)

    trace = poutine.trace(partial(program, nmm)).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["c"]["value"].shape == (3, int(observed.sum()))
    assert trace.nodes["y"]["log_prob"].shape == (3,)
    elbo = partial(TraceGraph_ELBO, num_particles=4, vectorize_particles=True)
    before, after = train(partial(program, nmm), partial(program, ordered_guide), elbo)
    assert after < before - 2
    # Parameters shared by all fields: the bound is the sum of the three.
    store = pyro.get_param_store()
    mix = NeighborMixture(hood, store["alpha"], store["logits"])
    bound = mix.elbo(fields, observed, 200).mean(0).sum().detach()
    torch.testing.assert_close(-after, bound, atol=2.0, rtol=0)


def test_scale_and_mask():
    hood = house()
    alpha, logits = parameters(hood, 2)
    y = torch.randint(2, (5,))
    leaves = [alpha.log().requires_grad_(), logits.requires_grad_()]

    def gradient(handler):
        for leaf in leaves:
            leaf.grad = None
        pyro.set_rng_seed(3)
        model, guide = (
            handler(partial(fn, hood, leaves[0].exp(), leaves[1], y)) for fn in (nmm, ordered_guide)
        )
        loss = vectorized().loss_and_grads(model, guide)
        return loss, torch.cat([leaf.grad.flatten() for leaf in leaves])

    loss, grad = gradient(lambda fn: fn)
    scaled_loss, scaled_grad = gradient(partial(poutine.scale, scale=2.5))
    assert scaled_loss == pytest.approx(2.5 * loss)
    torch.testing.assert_close(scaled_grad, 2.5 * grad)
    masked_loss, masked_grad = gradient(partial(poutine.mask, mask=torch.tensor(False)))
    assert masked_loss == 0
    assert (masked_grad == 0).all()


@pytest.mark.slow
def test_labels_by_handler_are_labels_by_argument():
    hood, y, observed = field()
    seen = y[observed]

    def by_handler():
        alpha, logits = learned(hood)
        return poutine.condition(nmm, data={"y": seen})(hood, alpha, logits, None, observed)

    def by_argument():
        nmm(hood, *learned(hood), y, observed)

    def guide():
        ordered_guide(hood, *learned(hood), y, observed)

    losses = []
    for model in (by_handler, by_argument):
        pyro.set_rng_seed(5)
        pyro.clear_param_store()
        losses.append(train(model, guide))
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0] - 3


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("collapsed", [False, True])
def test_predictive(parallel, collapsed):
    hood = two_triangles()
    alpha, logits = parameters(hood, 3)
    mix = NeighborMixture(hood, alpha, logits)
    model = partial(nmm, hood, alpha, logits, collapsed=collapsed)
    draws = Predictive(model, num_samples=1500, parallel=parallel)()["y"]
    assert draws.shape == (1500, 5)
    frequency = torch.nn.functional.one_hot(draws, 3).double().mean(0)
    assert (frequency - mix.marginals()).abs().max() < 4 * 0.5 / 1500**0.5

    y, observed = mix.sample(), torch.tensor([True, False, True, True, False])
    guide = partial(ordered_guide, hood, alpha, logits, y, observed, collapsed=collapsed)
    fitted = partial(nmm, hood, alpha, logits, y, observed, collapsed=collapsed)
    sites = Predictive(fitted, guide=guide, num_samples=50, parallel=parallel)()
    assert (sites["y"] == y[observed]).all()


def test_sites_of_both_forms():
    hood = house()
    alpha, logits = parameters(hood, 3)
    for collapsed in (False, True):
        trace = poutine.trace(partial(nmm, hood, alpha, logits, collapsed=collapsed)).get_trace()
        assert ("z" in trace.nodes) == (not collapsed)
        assert trace.nodes["y"]["value"].shape == (5,)
        assert trace.nodes["c"]["value"].shape == (5,)
        assert trace.log_prob_sum().isfinite()


def test_loss_is_an_unbiased_bound_in_both_forms():
    hood, y, observed = field()
    alpha, logits = parameters(hood, 2, scale=0.5)
    elbo = TraceGraph_ELBO(num_particles=4000, vectorize_particles=True)
    expected = NeighborMixture(hood, alpha, logits).elbo(y, observed, 4000)
    for collapsed in (False, True):
        args = (hood, alpha, logits, y, observed)
        model, guide = (partial(f, collapsed=collapsed) for f in (nmm, ordered_guide))
        losses = torch.tensor([elbo.loss(model, guide, *args) for _ in range(10)])
        error = (expected.var() / 4000 + losses.var() / 10).sqrt()
        # Each draw of an order has its own bound.
        assert (expected.mean() + losses.mean()).abs() < 4 * error + 0.05


def test_plain_torch_loop():
    hood, y, observed = field()
    log_alpha = torch.zeros(16, 2, requires_grad=True)
    logits = torch.zeros(hood.num_edges, requires_grad=True)
    optimizer = torch.optim.Adam([log_alpha, logits], lr=0.05)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        args = (hood, log_alpha.exp(), logits, y, observed)
        losses.append(vectorized().loss_and_grads(nmm, ordered_guide, *args))
        optimizer.step()
    assert losses[-1] < losses[0] - 3


def test_guide_needs_labels():
    hood = house()
    with pytest.raises(ValueError, match="y is required"):
        ordered_guide(hood, *parameters(hood, 2), None)
