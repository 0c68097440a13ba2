# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sites that a guide does not see, subsamples that it does not draw, and labels that Pyro loses."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro import poutine
from pyro.infer import (
    SVI,
    Trace_ELBO,
    TraceEnum_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value
from pyro.optim import Adam

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains, check_program, ordered_guide
from pyro_nmm.models import nmm, node_plate

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
ALPHA = torch.tensor([[0.4, 0.8], [0.9, 0.3], [0.3, 0.3]]).double()
LOGITS = torch.linspace(-1, 1, HOOD.num_edges).double()
X = torch.tensor([[0.2, 2.6, -0.4], [1.1, 2.9, 0.3]]).double()
INDEX, LONG = torch.tensor([2, 0, 2, 2, 0]), torch.tensor([0.9, -0.2, 1.4, 0.3, 0.8]).double()
GAP = torch.tensor(1.5).double()
PARENT = "depends on the enumerated sites"


def labels():
    return nmm(HOOD, ALPHA, LOGITS, collapsed=True)


def gap_of():
    return pyro.sample("gap", dist.LogNormal(torch.zeros(()).double(), 1.0))


def replicates():
    """Each of two measurements of a node has a component of its own, and a node a scale."""
    gap = gap_of()
    with node_plate(HOOD, labels(), dim=-1) as (_, y):
        wide = pyro.sample("wide", dist.Bernoulli(0.2), infer={"enumerate": "parallel"})
        with pyro.plate("replicates", 2, dim=-2):
            kinds = dist.Categorical(torch.tensor([0.5, 0.3, 0.2]).double())
            m = pyro.sample("m", kinds, infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(gap * y + 0.7 * m, 1.0 + wide), obs=X)


def measured_with_outliers():
    """Three measurements of node 2, two of node 0, none of node 1, each perhaps an outlier."""
    gap = gap_of()
    with node_plate(HOOD, labels(), index=INDEX) as (rows, y):
        m = pyro.sample("m", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(gap * y + 2.0 * m, 1.0), obs=LONG[rows])


def scores(name, gap):
    """``(3, 2)``: log-likelihoods of the nodes' measurements by hand."""
    y, normal = gap * torch.arange(2), dist.Normal
    if name == "replicates":
        by_scale = []
        for wide, p in ((0, 0.8), (1, 0.2)):
            terms = [math.log(q) + normal(y + 0.7 * m, 1.0 + wide).log_prob(X[..., None])
                     for m, q in enumerate((0.5, 0.3, 0.2))]  # fmt: skip
            by_scale.append(math.log(p) + torch.stack(terms).logsumexp(0).sum(0))
        return torch.stack(by_scale).logsumexp(0)
    terms = [math.log(p) + normal(y + 2.0 * m, 1.0).log_prob(LONG[:, None])
             for m, p in ((0, 0.7), (1, 0.3))]  # fmt: skip
    found = torch.stack(terms).logsumexp(0)
    return torch.zeros(3, 2).double().index_add(0, INDEX, found)


def exact(name, gap):
    """log p(x | gap), and probabilities of labels, by enumeration."""
    oracle = of_hood(HOOD, ALPHA, LOGITS)
    table = torch.tensor(oracle.labels)
    terms = torch.tensor(oracle.log_prob).flatten()
    terms = terms + scores(name, gap)[torch.arange(3), table].sum(-1)
    probs = terms.softmax(0) @ torch.nn.functional.one_hot(table, 2).double().flatten(1)
    return terms.logsumexp(0), probs.view(3, 2)


def inside(model):
    """A block that is made while the program runs."""
    with poutine.block(hide=["m", "wide"]):
        return model()


HIDDEN = {
    "visible": lambda model: model,
    "hidden": lambda model: poutine.block(model, hide=["m", "wide"]),
    "hidden inside": lambda model: partial(inside, model),
}
MODELS = {"replicates": replicates, "measured_with_outliers": measured_with_outliers}


def auto(model, estimator="reward_to_go"):
    delta = partial(AutoDelta, init_loc_fn=init_to_value(values={"gap": GAP}))
    return AutoNMM(model, delta, estimator=estimator)


@pytest.mark.parametrize("estimator", ["reward_to_go", Chains()])
@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize("name", MODELS)
def test_evidence(name, hide, estimator):
    """Of long formats, and with enumerated sites summed out: the exact posterior at the medians."""
    guide = auto(HIDDEN[hide](MODELS[name]), estimator)
    guide()
    found = guide.posterior(num_samples=None, num_sweeps=0)["c"].marginals()
    torch.testing.assert_close(found, exact(name, GAP)[1])


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name):
    """Of the likelihood, by chains in the loss that enumerates."""
    guide = auto(HIDDEN["hidden"](MODELS[name]), Chains(num_sweeps=8))
    guide()
    elbo = TraceEnum_ELBO(300, vectorize_particles=True, max_plate_nesting=2)
    (parameter,) = guide.parameters()
    found = []
    for _ in range(12):
        parameter.grad = None
        elbo.loss_and_grads(MODELS[name], guide)
        found.append(-parameter.grad)
    found = torch.stack(found[2:])
    log_gap = GAP.log().clone().requires_grad_()
    log_joint = exact(name, log_gap.exp())[0] + dist.LogNormal(0.0, 1.0).log_prob(log_gap.exp())
    (truth,) = torch.autograd.grad(log_joint, log_gap)
    error = found.std() / len(found) ** 0.5
    assert (found.mean() - truth).abs() < 5 * error
    assert error < 0.1


def parent(kind):
    def model():
        kappa = pyro.sample("kappa", kind)
        nmm(HOOD, ALPHA * (0.5 + kappa), LOGITS, torch.tensor([0, 1, 1]), collapsed=True)

    return model


def discrete_below():
    """Nothing sums the outliers out."""
    gap = gap_of()
    with node_plate(HOOD, labels()) as (_, y):
        m = pyro.sample("m", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(gap * y + 2.0 * m, 1.0), obs=X[0])


@pytest.mark.parametrize("wrap", [partial(poutine.block, hide=["kappa", "m"]), lambda m: partial(
    lambda model: poutine.block(model, hide=["kappa", "m"])(), m)])  # fmt: skip
@pytest.mark.parametrize(
    ("model", "match"),
    [
        (parent(dist.LogNormal(0.0, 1.0)), r"hides random sites \['kappa'\].*'c' depends"),
        (discrete_below, r"sites \['m'\].*'x' depends.*\"enumerate\": \"parallel\""),
        (config_enumerate(parent(dist.Bernoulli(0.5))), rf"{PARENT} \['kappa'\]"),
    ],
)  # fmt: skip
def test_hidden_draws_are_refused(model, match, wrap):
    for estimator in ("reward_to_go", Chains()):
        with pytest.raises(ValueError, match=match):
            AutoNMM(wrap(model), estimator=estimator)()


GROUPS = torch.tensor([-1.4, 1.3]).repeat_interleave(10).double()


def grouped(x, rows):
    """A loader gives rows and their numbers; each row has a parameter of its own."""
    gap_of()
    with pyro.plate("rows", 20, subsample=rows):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(()).double(), 2.0))
        pyro.sample("x", dist.Normal(mean, 0.1), obs=x)
    nmm(HOOD, ALPHA, LOGITS, torch.tensor([0, 1, 1]), collapsed=True)


def test_explicit_subsamples():
    """By ``create_plates``; without it the subsample is refused, a row of docs/pyro.md."""

    def plates(x, rows):
        return pyro.plate("rows", 20, subsample=rows, dim=-1)

    guide = AutoNMM(grouped, create_plates=plates)
    svi = SVI(grouped, guide, Adam({"lr": 0.1}), Trace_ELBO())
    for step in range(300):
        rows = torch.arange(10) + 10 * (step % 2)
        svi.step(GROUPS[rows], rows)
    every = torch.arange(20)
    found = guide.median(GROUPS, every)["mean"]
    torch.testing.assert_close(found, GROUPS, atol=0.3, rtol=0)


def extra_dimension():
    mean = gap_of()[..., None] * torch.nn.functional.one_hot(labels(), 2)[..., 0]
    pyro.sample("x", dist.Normal(mean[..., None, :].expand(2, 3), 1.0).to_event(1), obs=X)


def factor():
    pyro.factor("x", -((labels().double() ** 2).sum(-1) ** 2))


@pytest.mark.parametrize("run", [lambda m: AutoNMM(m)(), lambda m: check_program(m, AutoNMM(m))])
@pytest.mark.parametrize(
    ("model", "match"),
    [
        (extra_dimension, "site 'x' has values or parameters of batch shape"),
        (factor, r"'x' is no sum over the nodes of 'y': give a pyro\.factor one entry"),
    ],
)
def test_the_site_below_is_blamed(run, model, match):
    with pytest.raises(ValueError, match=match):
        run(model)


def test_nan_in_the_data():
    def model():
        pyro.sample("x", dist.Normal(labels(), 1.0).to_event(1), obs=X[0].where(X[0] < 1, math.nan))

    with pyro.validation_enabled(False), pytest.raises(ValueError, match="site 'x' is nan"):
        AutoNMM(model)()


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: AutoNMM(replicates, AutoNormal(replicates)), r"pass the class, AutoNMM\(model, "),
        (lambda: AutoNMM(replicates, estimator=Chains), r"got the class Chains: write Chains\(\)"),
        (lambda: ordered_guide(HOOD, ALPHA, LOGITS, torch.zeros(3).long(), estimator=Chains),
         r"got the class Chains: write Chains\(\)"),
        (lambda: check_program(1, 2), "model must be a Pyro program, a function, got 1"),
        (lambda: check_program(replicates, replicates()), "guide must be a Pyro program"),
        (lambda: node_plate(HOOD, torch.zeros(3).long(), subsample_size=100),
         "subsample_size must be at most the 3 nodes, got 100"),
        (lambda: node_plate(HOOD, torch.zeros(3).long(), index=[0, 3]), "index holds node id 3"),
        (
            lambda: node_plate(HOOD, torch.zeros(3).long(), index=torch.tensor([]).long()),
            "index must have at least one measurement",
        ),
        (lambda: node_plate(HOOD, torch.zeros(2).long(), torch.tensor([True, True, False]),
                            index=[0, 2]), "index has node 2, which observed leaves out"),
        (lambda: check_program(replicates, AutoDelta(poutine.block(replicates, expose=["gap"]))),
         "the guide lacks the site 'c' of a field"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pytest.raises(ValueError, match=match):
        run()
