# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains know what consumes their states, and which data these have seen."""

from functools import partial

import pyro
import pytest
import torch
from oracle import of_hood
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.distributions import LogNormal, Normal
from pyro.infer import (
    SVI,
    Importance,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceTMC_ELBO,
)
from pyro.infer.autoguide import AutoDelta, init_to_value
from pyro.infer.importance import vectorized_importance_weights
from pyro.infer.predictive import WeighedPredictive
from pyro.optim import Adam
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains, evidence_guide, ordered_guide
from pyro_nmm.models import nmm

STAR = Neighborhood(torch.tensor([[0, 0, 0], [1, 2, 3]]), 4)
OWN = (STAR.source == STAR.target).double()
ALPHA, LOGITS = torch.full((4, 2), 0.2).double(), -2.0 * OWN
X = torch.tensor([0.1, 1.3, -0.9, 0.4]).double()
LABELS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
WARNS = "changed since the step before"


def emission(y):
    return Normal(1.5 * y, 1.0)


def latent(x=X):
    gap = pyro.sample("gap", LogNormal(0.0, 1.0))
    y = nmm(STAR, ALPHA, LOGITS, collapsed=True)
    pyro.sample("x", Normal(gap[..., None] * y, 1.0).to_event(1), obs=x)


def auto(estimator, model=latent):
    start = init_to_value(values={"gap": torch.tensor(1.5)})
    return AutoNMM(model, partial(AutoDelta, init_loc_fn=start), estimator=estimator)


def joint(evidence=None, alpha=ALPHA, logits=LOGITS):
    """All labellings, and log p(y) plus the evidence ``(4, 2)`` of the labels."""
    oracle = of_hood(STAR, alpha, logits)
    labels, log_probs = torch.tensor(oracle.labels), torch.tensor(oracle.log_prob).flatten()
    more = 0.0 if evidence is None else evidence[torch.arange(4), labels].sum(-1)
    return labels, log_probs + more


def scores(x=X, loc=0.0):
    """Evidence ``(4, 2)`` of measurements."""
    return Normal(loc + 1.5 * torch.arange(2), 1.0).log_prob(x[:, None])


def near(drawn, probs):
    error = (probs * (1 - probs) / len(drawn)).sqrt()
    assert ((drawn.double().mean(0).view(-1) - probs).abs() < 4.5 * error).all()


def by_hand(model, guide):
    trace = poutine.trace(guide).get_trace()
    replayed = poutine.trace(poutine.replay(model, trace=trace)).get_trace()
    return replayed.log_prob_sum() - trace.log_prob_sum()


def of_loss(kind, *options, **more):
    return lambda model, guide: kind(*options, **more).loss_and_grads(model, guide)


WEIGHING = {
    "Importance": lambda model, guide: Importance(model, guide, 5).run(),
    "WeighedPredictive": lambda *pair: WeighedPredictive(pair[0], guide=pair[1], num_samples=5)(),
    "vectorized": lambda *pair: vectorized_importance_weights(
        *pair, num_samples=5, max_plate_nesting=1
    ),
    "RenyiELBO": of_loss(RenyiELBO, 0.5, 2),
    "TraceTMC_ELBO": of_loss(TraceTMC_ELBO, 2),
    "by hand": by_hand,
}


def ordered(estimator):
    given = STAR, ALPHA, LOGITS, LABELS[0]
    run = {"collapsed": True}
    return partial(nmm, *given, **run), partial(ordered_guide, *given, estimator=estimator, **run)


@pytest.mark.filterwarnings("ignore:num_samples not provided")
@pytest.mark.parametrize("pair", [ordered, lambda chains: (latent, auto(chains))])
@pytest.mark.parametrize("name", WEIGHING)
def test_weights_are_refused(name, pair):
    with pytest.raises(ValueError, match=r"(?s)weighs draws by .* Trace_ELBO, TraceGraph_ELBO or"):
        WEIGHING[name](*pair(Chains()))


@pytest.mark.parametrize("estimator", ["reward_to_go", "no_score"])
def test_control_variates_under_renyi(estimator):
    with pytest.raises(ValueError, match=f'(?s)estimator="reinforce".*"{estimator}" would bias'):
        WEIGHING["RenyiELBO"](*ordered(estimator))
    RenyiELBO(0.5, 2).loss(*ordered(estimator))  # the value is right


@pytest.mark.parametrize("parallel", [True, False])
def test_predictions_start_anew(parallel):
    """Not from copies of one state, and the states of the fit stay."""
    guide, number = auto(Chains()), 4000 if parallel else 400
    svi = SVI(latent, guide, Adam({"lr": 0.0}), TraceGraph_ELBO())
    for _ in range(3):
        svi.step()
    states = guide.chains["c"].states.clone()
    drawn = Predictive(latent, guide=guide, num_samples=number, parallel=parallel)()["y"]
    assert torch.equal(guide.chains["c"].states, states)
    labels, log_joint = joint(scores())
    near(drawn, log_joint.softmax(0) @ labels.double())


def test_predictions_of_two_fields():
    """The labels of one are in the concentrations of the other, so that each depends on both."""

    def model():
        with scope(prefix="a"):
            y = nmm(STAR, ALPHA, LOGITS, collapsed=True)
        with scope(prefix="b"):
            y = nmm(STAR, ALPHA + one_hot(y, 2), LOGITS, collapsed=True)
            pyro.sample("x", emission(y).to_event(1), obs=X)

    labels, first = joint()
    second = (joint(scores(), ALPHA + one_hot(y, 2))[1] for y in labels)
    table = torch.stack([a + b for a, b in zip(first, second, strict=True)])
    probs = table.flatten().softmax(0).view(len(labels), -1).double()
    guide = AutoNMM(model, estimator=Chains())
    drawn = Predictive(model, guide=guide, num_samples=4000, parallel=True)()
    near(drawn["a/y"], probs.sum(1) @ labels.double())
    near(drawn["b/y"], probs.sum(0) @ labels.double())


def observed_pair(chains):
    def program(field, theta, y, **options):
        logits = LOGITS + theta[1] * OWN
        field(STAR, ALPHA * theta[0].exp(), logits, y, collapsed=True, **options)

    return partial(program, nmm), partial(program, ordered_guide, estimator=chains)


def latent_pair(chains):
    """The data of a step are measurements."""

    def model(theta, x):
        y = nmm(STAR, ALPHA * theta[0].exp(), LOGITS, collapsed=True)
        pyro.sample("x", Normal(theta[1] + 1.5 * y, 1.0).to_event(1), obs=x)

    def guide(theta, x):
        evidence = Normal(theta[1] + 1.5 * torch.arange(2), 1.0).log_prob(x[:, None])
        evidence_guide(
            STAR, ALPHA * theta[0].exp(), LOGITS, evidence, collapsed=True, estimator=chains
        )

    return model, guide


def log_prob(kind, theta, data):
    """By enumeration."""
    alpha = ALPHA * theta[0].exp()
    if kind == "labels":
        labels, found = joint(None, alpha, LOGITS + theta[1] * OWN)
        return float(found[(labels == data).all(-1)])
    return float(joint(scores(data, theta[1]), alpha)[1].logsumexp(0))


SETS = {
    "labels": (observed_pair, LABELS),
    "measurements": (latent_pair, torch.stack([X, torch.tensor([2.0, -0.5, 1.8, 0.9]).double()])),
}


@pytest.mark.parametrize("kind", SETS)
def test_data_of_each_step(kind):
    """``for y in loader: svi.step(y)`` has the gradient of each set, and a warning."""
    make, sets = SETS[kind]
    pair, theta = make(Chains(num_sweeps=1)), torch.zeros(2, requires_grad=True)
    elbo, found = Trace_ELBO(300, vectorize_particles=True, max_plate_nesting=0), []

    def step(number):
        elbo.differentiable_loss(*pair, theta, sets[number % 2]).backward()
        found.append(-theta.grad)
        theta.grad = None

    step(0)
    for number in range(1, 60):
        with pytest.warns(UserWarning, match=rf"{WARNS}.*a pyro\.plate around the field"):
            step(number)
    found = torch.stack(found[4:]).view(-1, 2, 2)
    steps = 1e-3 * torch.eye(2, dtype=torch.double)
    for number, data in enumerate(sets):
        ends = ((log_prob(kind, s, data), log_prob(kind, -s, data)) for s in steps)
        truth = torch.tensor([(a - b) / 2e-3 for a, b in ends])
        mean, error = found[:, number].mean(0), found[:, number].std(0) / len(found) ** 0.5
        assert ((mean - truth).abs() < 4.5 * error + 1e-4).all(), (mean, truth, error)


@pytest.mark.filterwarnings("error")
def test_data_in_a_plate():
    """The cure: each set has a chain of its own, and there is nothing to warn of."""
    chains = Chains()

    def program(field, numbers, **options):
        with pyro.plate("sets", 2, subsample=numbers):
            field(STAR, ALPHA, LOGITS, LABELS[numbers], collapsed=True, **options)

    pair = partial(program, nmm), partial(program, ordered_guide, estimator=chains)
    for kind in (Trace_ELBO, TraceGraph_ELBO):
        for step in range(4):
            kind(max_plate_nesting=1).loss_and_grads(*pair, torch.tensor([step % 2]))
    assert chains.states.shape == (1, 2, 1, 4)


def test_other_data_in_a_plate_are_named():
    chains = Chains()

    def program(field, y, **options):
        with pyro.plate("batch", len(y)):
            field(STAR, ALPHA, LOGITS, y, collapsed=True, **options)

    pair = partial(program, nmm), partial(program, ordered_guide, estimator=chains)
    Trace_ELBO().loss(*pair, LABELS)
    with pytest.warns(UserWarning, match=f"{WARNS}.*plate 'batch' the number of data sets as size"):
        Trace_ELBO().loss(*pair, LABELS.flip(0))
    with pytest.raises(ValueError, match="other elements in each step needs its full size"):
        Trace_ELBO().loss(*pair, LABELS[:1])


@pytest.mark.filterwarnings("error")
def test_steps_of_parameters_are_no_other_data():
    make, sets = SETS["measurements"]
    pair, theta = make(Chains()), torch.zeros(2, requires_grad=True)
    adam = torch.optim.Adam([theta], 0.1)
    for _ in range(30):
        adam.zero_grad()
        Trace_ELBO().differentiable_loss(*pair, theta, sets[0]).backward()
        adam.step()


def masked(mask):
    y = nmm(STAR, ALPHA, LOGITS, collapsed=True)
    pyro.sample("x", emission(y).mask(mask).to_event(1), obs=X)


def of_rows(observed):
    y = nmm(STAR, ALPHA, LOGITS, observed=observed, collapsed=True)
    pyro.sample("x", emission(y).to_event(1), obs=X[observed])


def test_other_masks_and_rows_of_a_program():
    """Another mask is other data, and other observed rows have data of their own."""
    masks = torch.tensor([[True, True, False, True], [True, False, True, True]])
    guide = AutoNMM(masked, estimator=Chains())
    guide(masks[0])
    with pytest.warns(UserWarning, match=WARNS):
        guide(masks[1])
    guide(masks[1].clone())
    guide = AutoNMM(of_rows, estimator=Chains())
    for step in range(4):
        guide(masks[step % 2])
