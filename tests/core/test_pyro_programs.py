# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro's other losses, and programs that do not fit: plates, handlers, guides and networks."""

from functools import partial

import pyro
import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from graphs import star
from pyro import poutine
from pyro.infer import (
    JitTraceGraph_ELBO,
    Predictive,
    RenyiELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample

from pyro_nmm import ChosenLabels, NeighborChoice, NeighborMixture, OrderedConditional
from pyro_nmm.guides import AmortizedNMM, MixtureGuide, density, ordered_guide
from pyro_nmm.models import FreeNMM, nmm


def pair_of(estimator="reward_to_go", collapsed=True):
    hood, alpha, logits = house_and_parameters()
    log_alpha = alpha.log().requires_grad_()

    def program(fn):
        leaf = pyro.param("log_alpha", log_alpha)
        fn(hood, leaf.exp(), logits, LABELS)

    guide = partial(ordered_guide, collapsed=collapsed, estimator=estimator)
    model = partial(nmm, collapsed=collapsed)
    return partial(program, model), partial(program, guide), log_alpha, (hood, logits)


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score"])
def test_losses_that_take_the_entropy_term_for_its_value(estimator):
    """Its control variate has no value."""
    model, guide, *_ = pair_of(estimator)
    pyro.enable_validation(False)
    losses = []
    for kind in (TraceGraph_ELBO, TraceMeanField_ELBO):
        pyro.set_rng_seed(5)
        losses.append(kind(8, vectorize_particles=True, max_plate_nesting=0).loss(model, guide))
    assert losses[0] == pytest.approx(losses[1])


def test_renyi_elbo_takes_the_joint_score():
    """The loss is the importance-weighted bound, the gradient its self-normalised one."""
    model, guide, leaf, (hood, logits) = pair_of("reinforce")
    exact = NeighborMixture(hood, leaf.exp(), logits).log_prob(LABELS)
    (wanted,) = torch.autograd.grad(exact, leaf)
    elbo = RenyiELBO(0.0, 4000, vectorize_particles=True, max_plate_nesting=0)
    loss = elbo.loss_and_grads(model, guide)
    assert loss == pytest.approx(-exact.item(), abs=0.02)
    torch.testing.assert_close(-leaf.grad, wanted, atol=0.05, rtol=0.1)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_losses_that_enumerate_or_trace_say_what_to_use():
    model, guide, *_ = pair_of()
    for law in (NeighborChoice, OrderedConditional, ChosenLabels, NeighborMixture):
        with pytest.raises(NotImplementedError, match=f"{law.__name__} has too many values"):
            law.enumerate_support(object.__new__(law))
    with pytest.raises(NotImplementedError, match=r"cannot be traced by torch.jit"):
        JitTraceGraph_ELBO(max_plate_nesting=0).loss_and_grads(model, guide)
    hood, _, logits = house_and_parameters()
    with pytest.raises(NotImplementedError, match="NeighborChoice cannot be traced"):
        torch.jit.trace(lambda s: NeighborChoice(hood, s).sample(), (logits,))


def both(handler, **options):
    hood, alpha, logits = house_and_parameters()
    options = {"alpha": alpha, "logits": logits, "y": LABELS} | options
    for collapsed in (False, True):
        elbo = TraceGraph_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
        programs = (partial(f, hood, collapsed=collapsed, **options) for f in (nmm, ordered_guide))
        yield partial(elbo.loss, *map(handler, programs))


def in_plate(size, subsample_size=None):
    def handler(fn):
        def program():
            with pyro.plate("nodes", size, subsample_size=subsample_size):
                fn()

        return program

    return handler


@pytest.mark.parametrize("plate", [(5,), (3,), (6, 2)])
def test_plates_in_which_nothing_differs(plate):
    for loss in both(in_plate(*plate)):
        with pytest.raises(ValueError, match=r"plate 'nodes' of size \d surrounds one labelling"):
            loss()
    _, alpha, logits = house_and_parameters()
    given = {"alpha": alpha, "logits": logits, "y": LABELS}
    for name in given:
        size = plate[-1]
        more = {name: given[name].expand(size, *given[name].shape)}
        for loss in both(in_plate(*plate), **more):
            assert torch.tensor(loss()).isfinite()
    assert all(torch.tensor(loss()).isfinite() for loss in both(in_plate(1)))


@pytest.mark.parametrize("kind", ["mask", "scale"])
def test_handlers_with_an_entry_for_every_node(kind):
    entry = torch.ones(5, dtype=torch.bool if kind == "mask" else torch.double)
    for value in (entry, entry[:, None]):
        for loss in both(partial(getattr(poutine, kind), **{kind: value})):
            with pytest.raises(ValueError, match=rf"poutine.{kind} of shape .* observed="):
                loss()
    with_number = partial(getattr(poutine, kind), **{kind: entry[0]})
    assert all(torch.tensor(loss()).isfinite() for loss in both(with_number))

    def per_field(fn):
        def program():
            with pyro.plate("fields", 5), getattr(poutine, kind)(**{kind: entry}):
                fn()

        return program

    assert all(torch.tensor(loss()).isfinite() for loss in both(per_field, y=LABELS.expand(5, 5)))


@pytest.mark.parametrize("parallel", [False, True])
def test_guide_of_other_nodes(parallel):
    hood, alpha, logits = house_and_parameters()
    some = torch.tensor([True, False, True, False, False])
    for collapsed in (False, True):
        model = partial(nmm, hood, alpha, logits, collapsed=collapsed)
        guide = partial(ordered_guide, hood, alpha, logits, LABELS, some, collapsed=collapsed)
        with pytest.raises(ValueError, match=r"site 'c' has 2 nodes .* observed selects 5 here"):
            Predictive(model, guide=guide, num_samples=3, parallel=parallel)()


def test_networks_that_sample():
    hood = star(2)

    class Bayesian(PyroModule):
        def __init__(self):
            super().__init__()
            self.scores = PyroSample(pyro.distributions.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

        def forward(self, hood):
            return self.scores.exp(), torch.zeros(hood.num_edges)

    program = AmortizedNMM(hood, Bayesian())
    with pytest.raises(ValueError, match=r"network has a sample site 'scores'.*ordered_guide"):
        TraceGraph_ELBO().loss(program.model, program.guide, y=LABELS[:3])

    # What the message says.
    network = Bayesian()

    def model():
        nmm(hood, *network(hood), LABELS[:3])

    weights = AutoNormal(poutine.block(model, hide=["z", "c", "y"]))

    def guide():
        found = poutine.block(poutine.condition(network, data=weights()))
        ordered_guide(hood, *found(hood), LABELS[:3])

    assert torch.tensor(TraceGraph_ELBO().loss(model, guide)).isfinite()


def test_network_of_more_labels_than_the_target():
    hood = star(2)
    target = density(lambda y: y.sum(-1).double(), num_nodes=3, num_classes=2)
    family = MixtureGuide(hood, FreeNMM(hood, 3), target)
    elbo = TraceGraph_ELBO(20, vectorize_particles=True, max_plate_nesting=0)
    with pytest.raises(ValueError, match="network gives 3 or more labels, but target's site 'y'"):
        elbo.loss(family.model, family.guide)
