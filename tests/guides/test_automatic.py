# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Programs whose guide is one line, against sums over all labellings."""

import copy
import itertools
import math
import pickle
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import label_probs
from pyro import infer, poutine
from pyro.contrib.autoname import name_count, scope
from pyro.infer import SVI, TraceGraph_ELBO, autoguide
from pyro.infer.importance import vectorized_importance_weights
from pyro.optim import Adam
from scipy.special import logsumexp
from torch import nn

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains, check_program
from pyro_nmm.models import nmm, node_plate

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 0, 2, 3], [1, 0, 2, 1, 0, 2, 3, 2]]), 4)


def numbers(*values):
    return torch.tensor(values, dtype=torch.double)


LOGITS = torch.linspace(-1, 1, HOOD.num_edges).double()
ALPHA = numbers([0.4, 0.8], [0.9, 0.3], [0.3, 0.3], [0.7, 1.2])
X, FEATURE = numbers(-0.5, 1.2, 0.1, 2.0), torch.linspace(-1, 2, 4).double()
Y = torch.tensor([0, 1, 1, 0])
KNOWN = torch.tensor([True, True, False, True])
WEIGHTS, RATES, COUNTS = numbers(-1.0, 2.0), numbers(1.0, 4.0), numbers(0.0, 3.0, 1.0, 6.0)
TABLE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
NOISE = numbers([0.8, 0.2], [0.3, 0.7])
MATRICES = NOISE.expand(HOOD.num_edges, 2, 2)
PROGRAMS = {}


def program(exact, **options):
    """Puts a program into the matrix, with its log-likelihood by brute force."""

    def put(model):
        PROGRAMS[model.__name__] = model, exact, options
        return model

    return put


def kappa():
    return pyro.param("kappa", numbers(0.7)[0], constraint=dist.constraints.positive)


def field(y=None, observed=None, alpha=ALPHA, logits=LOGITS, collapsed=True, **options):
    return nmm(HOOD, kappa() * alpha, logits, y, observed, collapsed=collapsed, **options)


def prior(k, alpha=ALPHA, logits=LOGITS, relabel=None, hood=HOOD):
    """All labellings, and their log-probabilities."""
    labels, probs = label_probs(hood, k * alpha, logits, relabel)
    return torch.as_tensor(labels), np.log(probs)


def of_labels(k, y=Y, some=slice(None), **options):
    """log p of the labels of some nodes."""
    labels, log_probs = prior(k, **options)
    return logsumexp(log_probs[(labels[:, some] == y[some]).all(-1).numpy()])


def summed(below):
    """log p(x), where ``below`` is log p(x | y) of the rows of a table of labellings."""

    def exact(k):
        labels, log_probs = prior(k)
        return logsumexp(log_probs + below(labels).numpy())

    return exact


def normal(loc, scale=1.0, x=X):
    return dist.Normal(loc, scale).log_prob(x).sum(-1)


@program(summed(lambda y: normal(2.0 * y - 0.5)))
def mixture():
    pyro.sample("x", dist.Normal(2.0 * field() - 0.5, 1.0).to_event(1), obs=X)


@program(summed(lambda y: normal(y[..., None, :].double(), x=TABLE).sum(-1)))
def as_many_features_as_nodes():
    y = field()[..., None, :]  # nodes are the second dimension of two of the same size
    pyro.sample("x", dist.Normal(1.0 * y, 1.0).expand((*y.shape[:-2], 4, 4)).to_event(2), obs=TABLE)


@program(partial(of_labels, relabel=MATRICES.numpy()))
def label_noise_on_edges():
    field(Y, relabel=MATRICES)


@program(partial(of_labels, some=KNOWN))
def partly_observed_labels():
    field(Y, KNOWN)


@program(summed(lambda y: normal(1.0 * y[..., KNOWN], x=X[KNOWN])))
def rows_of_latent_labels():
    pyro.sample("x", dist.Normal(1.0 * field(None, KNOWN), 1.0).to_event(1), obs=X[KNOWN])


@program(summed(lambda y: normal(1.0 * y)))
def plate_of_nodes():
    with node_plate(HOOD, field()) as (nodes, y):
        pyro.sample("x", dist.Normal(1.0 * y, 1.0), obs=X[nodes])


@program(summed(lambda y: normal(1.0 * y, math.sqrt(2.0))), guide=True)
def latent_variable_of_each_node():
    with node_plate(HOOD, field()) as (nodes, y):
        h = pyro.sample("h", dist.Normal(1.0 * y, 1.0))
        pyro.sample("x", dist.Normal(h, 1.0), obs=X[nodes])


@program(summed(lambda y: (y * FEATURE).sum(-1)))
def factor():
    with node_plate(HOOD, field()) as (nodes, y):
        pyro.factor("x", y * FEATURE[nodes])


def bayesian(k):
    grid = torch.linspace(-5, 5, 201).double()
    at = torch.stack([normal(theta * WEIGHTS[prior(1.0)[0]]) for theta in grid])
    log_p = logsumexp(prior(k)[1] + at.numpy(), 1) + normal(grid[:, None], x=numbers(0.3)).numpy()
    return logsumexp(log_p + dist.Normal(0.0, 1.0).log_prob(grid).numpy()) + math.log(10 / 200)


@program(bayesian, guide=True)
def bayesian_network():
    theta = pyro.sample("theta", dist.Normal(numbers(0.0)[0], 1.0))
    pyro.sample("w", dist.Normal(theta, 1.0), obs=numbers(0.3)[0])
    loc = theta[..., None] * WEIGHTS[field()]
    pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=X)


NETWORK = nn.Linear(1, 3).double()


def of_network(k):
    scores, mean = (out := NETWORK(FEATURE[:, None]).detach())[:, :2].exp(), out[:, 2]
    labels, log_probs = prior(k, scores)
    return logsumexp(log_probs + normal(mean * labels).numpy())


@program(of_network)
def shared_network():
    outputs = pyro.module("network", NETWORK)(FEATURE[:, None])
    y = field(alpha=outputs[:, :2].exp())
    pyro.sample("x", dist.Normal(outputs[:, 2] * y, 1.0).to_event(1), obs=X)


GRAPHS = numbers(1.0, 2.0, 0.5)[:, None, None] * ALPHA


def of_graphs(k):
    return sum(logsumexp(prior(k, alpha)[1] + normal(1.0 * prior(k)[0], x=x).numpy())
               for alpha, x in zip(GRAPHS, TABLE, strict=False))  # fmt: skip


@program(of_graphs)
def plate_of_graphs():
    with pyro.plate("graphs", 3):
        pyro.sample("x", dist.Normal(1.0 * field(alpha=GRAPHS), 1.0).to_event(1), obs=TABLE[:3])


@program(summed(lambda y: normal(1.0 * y)), power=0.5)
def scaled():
    with poutine.scale(scale=2.0):
        pyro.sample("x", dist.Normal(1.0 * field(), 1.0).to_event(1), obs=X)


# Fields that depend on one another


def alpha_of(y):
    return torch.stack([0.1 + 2.0 * y, 2.1 - 2.0 * y], -1).double()


def given_first(k, below):
    """log p, where ``below`` is that of the rest given the labels of the first field."""
    labels, log_probs = prior(k)
    return logsumexp([first + below(y) for y, first in zip(labels, log_probs, strict=True)])


def of_fields(y, k=0.7):
    return normal(1.0 * y) + of_labels(k, alpha=alpha_of(y))


def of_latent_fields(y, k=0.7):
    labels, log_probs = prior(k, alpha_of(y))
    return normal(1.0 * y) + logsumexp(log_probs + normal(2.0 * labels, x=FEATURE).numpy())


def of_two(y, k=0.7):
    labels, log_probs = prior(k)
    return logsumexp(log_probs + normal(y - 1.0 * labels, 0.4).numpy())


def chain(below):
    return lambda k: given_first(k, partial(below, k=k))


@program(chain(of_fields))
def chain_of_fields():
    with scope(prefix="a"):
        y = field()
    with scope(prefix="b"):
        field(Y, alpha=alpha_of(y))
    pyro.sample("x", dist.Normal(1.0 * y, 1.0).to_event(1), obs=X)


@program(chain(of_latent_fields))
def chain_of_latent_fields():
    with scope(prefix="a"):
        y = field()
    with scope(prefix="b"):
        second = field(alpha=alpha_of(y), collapsed=False)
    pyro.sample("x", dist.Normal(1.0 * y, 1.0).to_event(1), obs=X)
    pyro.sample("w", dist.Normal(2.0 * second, 1.0).to_event(1), obs=FEATURE)


def logits_of(y):
    return 3.0 * LOGITS * (1.0 - 2.0 * y[..., HOOD.row])


def of_attention(y, k=0.7):
    return of_labels(k, logits=logits_of(y), relabel=MATRICES.numpy())


@program(chain(of_attention))
def attention_by_labels():
    with scope(prefix="a"):
        y = field()
    with scope(prefix="b"):
        field(Y, logits=logits_of(y), relabel=MATRICES)


@program(chain(of_two))
def two_fields_of_one_site():
    with scope(prefix="a"):
        first = field()
    with scope(prefix="b"):
        second = field()
    pyro.sample("x", dist.Normal(first - 1.0 * second, 0.4).to_event(1), obs=X)


@pytest.fixture(autouse=True)
def _fresh():
    pyro.clear_param_store()
    torch.manual_seed(0)


BOUND = "reward_to_go"


def guide_of(name, **options):
    wide = partial(autoguide.AutoNormal, init_scale=1.0)
    options = {"estimator": BOUND} | options
    return AutoNMM(PROGRAMS[name][0], **({"guide": wide} if PROGRAMS[name][2] else {}), **options)


def particles(name, guide, number):
    """Log-weights of particles, a trace of the guide, and the model at its values."""
    guide()
    model = PROGRAMS[name][0] if isinstance(name, str) else name
    sites = poutine.trace(model).get_trace().nodes.values()
    frames = [frame for site in sites for frame in site.get("cond_indep_stack", ())]
    size = max((-frame.dim for frame in frames if frame.dim is not None), default=0)
    return vectorized_importance_weights(
        model, guide, num_samples=number, max_plate_nesting=size, normalized=False
    )


ORDERED = [name for name in PROGRAMS if name != "two_fields_of_one_site"]
TOGETHER = ["mixture", "label_noise_on_edges", "plate_of_graphs", "scaled",
            "chain_of_latent_fields", "attention_by_labels", "two_fields_of_one_site"]  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_weights_of_draws_average_to_the_likelihood(name):
    """E[p(x, c, y) / q(c, y)] = p(x) for every guide that covers the posterior."""
    _, exact, options = PROGRAMS[name]
    log_weights = particles(name, guide_of(name), 2000)[0].detach()
    log_weights = options.get("power", 1.0) * log_weights - exact(0.7)
    weights = log_weights.exp()
    error = weights.std() / math.sqrt(len(weights))
    assert abs(weights.mean() - 1) < 4 * error + 1e-9
    assert error < 0.1
    assert -1.5 - 2 * options.get("guide", 0) < log_weights.mean() < 4 * error


@pytest.mark.parametrize("name", TOGETHER)
def test_states_of_chains_have_the_gradient_of_the_likelihood(name):
    """Fisher's identity, by differences."""
    model, exact, options = PROGRAMS[name]
    guide, step = guide_of(name, estimator=Chains(3)), 1e-3
    with pyro.plate("num_particles_vectorized", 1000, dim=-2):
        for _ in range(12):
            trace = poutine.trace(guide).get_trace()
        ends = []
        for sign in (1, -1):
            pyro.get_param_store()["kappa"] = 0.7 * numbers(math.exp(sign * step))[0]
            with poutine.replay(trace=trace), poutine.trace() as sites:
                model()
            sites.trace.compute_log_prob()
            ends.append(sum(
                site["log_prob"].reshape(1000, -1).sum(-1) for site in sites.trace.nodes.values()
                if site["type"] == "sample" and site["log_prob"].numel() >= 1000
            ).detach())  # fmt: skip
    gradient = options.get("power", 1.0) * (ends[0] - ends[1]) / (2 * step)
    truth = (exact(0.7 * math.exp(step)) - exact(0.7 * math.exp(-step))) / (2 * step)
    error = gradient.std() / math.sqrt(len(gradient))
    assert abs(gradient.mean() - truth) < 4 * error
    assert error < 0.1


BELOW = {"chain_of_fields": of_fields, "chain_of_latent_fields": of_latent_fields}
BELOW |= {"two_fields_of_one_site": of_two}


@pytest.mark.parametrize("name", BELOW)
def test_labels_of_chains_are_drawn_given_later_fields(name):
    labels, log_probs = prior(0.7)
    weights = np.exp(log_probs + np.array([BELOW[name](y) for y in labels]))
    exact = torch.as_tensor((weights[:, None] * labels.numpy()).sum(0) / weights.sum())
    guide = guide_of(name, estimator=Chains(5))
    with pyro.plate("num_particles_vectorized", 2000, dim=-2):
        for _ in range(15):
            found = guide()["a/y"].double()
    error = (exact * (1 - exact) / 2000).sqrt()
    assert ((found.mean((0, 1)) - exact).abs() < 4 * error + 1e-3).all()


@pytest.mark.parametrize("name", ["mixture", "plate_of_graphs", "two_fields_of_one_site"])
@pytest.mark.filterwarnings("ignore:at other labels")
def test_programs_pass_the_check(name):
    estimator = Chains() if name == "two_fields_of_one_site" else "reward_to_go"
    guide = guide_of(name, estimator=estimator)
    guide()
    check_program(PROGRAMS[name][0], guide)


def losses(model, guide, number):
    elbo = TraceGraph_ELBO()
    return torch.tensor([elbo.loss(model, guide) for _ in range(number)]).double()


def subsampled_nodes():
    with node_plate(HOOD, field(), subsample_size=3) as (nodes, y):
        pyro.sample("x", dist.Normal(1.0 * y, 1.0), obs=X[nodes])


def subsampled_graphs():
    with pyro.plate("graphs", 3, subsample_size=2) as places:
        y = field(alpha=GRAPHS[places])
        pyro.sample("x", dist.Normal(1.0 * y, 1.0).to_event(1), obs=TABLE[places])


def graphs_of_a_batch():
    return pyro.plate("graphs", 3, subsample=torch.randperm(3)[:2])


def evidence(guide):
    trace = poutine.trace(guide).get_trace()
    fn = trace.nodes["c and y"]["fn"]
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn.data, trace


def test_evidence_has_the_gradient_of_the_program():
    guide, weights = AutoNMM(shared_network, estimator=BOUND), torch.randn(4, 2).double()
    found, _ = evidence(guide)
    loc = NETWORK(FEATURE[:, None])[:, 2:] * torch.arange(2)
    by_hand = dist.Normal(loc, 1.0).log_prob(X[:, None])
    assert torch.allclose(found, by_hand)
    pairs = (
        torch.autograd.grad((weights * table).sum(), NETWORK.weight) for table in (found, by_hand)
    )
    assert torch.allclose(*(gradient for (gradient,) in pairs))


def test_labels_have_evidence_beside_the_subsample():
    guides = (AutoNMM(model, estimator=BOUND) for model in (subsampled_nodes, plate_of_nodes))
    assert torch.allclose(*(evidence(guide)[0] for guide in guides))


@pytest.mark.parametrize("create_plates", [None, graphs_of_a_batch])
def test_subsampled_fields(create_plates):
    options = {"estimator": BOUND, "create_plates": create_plates}
    found, trace = evidence(AutoNMM(subsampled_graphs, **options))
    whole, _ = evidence(AutoNMM(plate_of_graphs, estimator=BOUND))
    assert torch.allclose(found, whole[trace.nodes["graphs"]["value"]])
    assert trace.nodes["c"]["scale"] == 1.5


@pytest.mark.parametrize("model", [subsampled_nodes, subsampled_graphs])
def test_chains_below_subsamples(model):
    guide = AutoNMM(model, estimator=Chains())
    assert math.isfinite(losses(model, guide, 10).sum())


# Queries


def parent(x=X):
    scale = pyro.sample("scale", dist.LogNormal(numbers(0.0)[0], 1.0))
    shift = pyro.sample("shift", dist.Normal(numbers(0.0)[0], 1.0))
    y = nmm(HOOD, scale[..., None, None] * ALPHA, LOGITS, collapsed=True)
    pyro.sample("x", dist.Normal(shift[..., None] + 2.0 * y, 1.0).to_event(1), obs=x)


@pytest.mark.parametrize("name", ["AutoDelta", "AutoIAFNormal"])
def test_other_guides_of_the_parents(name):
    guide = AutoNMM(parent, getattr(autoguide, name))
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(parent, guide, Adam({"lr": 0.05}), elbo)
    assert all(math.isfinite(svi.step()) for _ in range(3))
    assert sorted(guide.median()) == ["scale", "shift"]
    assert [*guide.posterior(num_samples=None, num_sweeps=0)] == ["c"]


def test_posterior_of_one_graph_of_a_plate():
    """At the parameters: the probability of each node's label, by brute force."""
    found = AutoNMM(plate_of_graphs).posterior(num_samples=None, num_sweeps=0)["c"][1]
    labels, log_probs = prior(0.7, GRAPHS[1])
    joint = np.exp(log_probs + normal(1.0 * labels, x=TABLE[1]).numpy())
    share = (joint[:, None] * labels.numpy()).sum(0) / joint.sum()
    assert torch.allclose(found.marginals()[:, 1], torch.as_tensor(share))


@name_count
def numbered(first, second, predict=False):
    """Two fields, whose sites have the numbers of their own kinds."""
    field(Y, KNOWN, collapsed=first)
    field(Y, KNOWN, collapsed=second, predict=predict)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_prediction_of_a_numbered_field(first, second):
    guide, number = AutoNMM(numbered), 4000
    TraceGraph_ELBO().loss(numbered, guide, first, second)
    draws = infer.Predictive(numbered, guide=guide, num_samples=number, parallel=True)
    share = draws(first, second, predict=True)["y_rest"].double().mean()
    labels, log_probs = prior(0.7)
    probs = np.exp(log_probs) * (labels[:, KNOWN] == Y[KNOWN]).all(-1).numpy()
    exact = (probs * labels[:, 2].numpy()).sum() / probs.sum()
    assert abs(share - exact) < 4 * (exact * (1 - exact) / number) ** 0.5


def stepped(guide, optimizer, num_steps):
    svi = SVI(parent, guide, optimizer, TraceGraph_ELBO())
    return [svi.step() for _ in range(num_steps)]


@pytest.mark.parametrize("estimator", ["reward_to_go", Chains()])
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_resumed_fit(estimator, way):
    first, optimizer = AutoNMM(parent, estimator=copy.deepcopy(estimator)), Adam({"lr": 0.05})
    stepped(first, optimizer, 3)
    random, pickled = torch.get_rng_state(), pickle.dumps(first)
    state, steps = copy.deepcopy((first.state_dict(), optimizer.get_state()))
    losses, median = stepped(first, optimizer, 4), first.median()
    pyro.clear_param_store()
    resumed, optimizer = AutoNMM(parent, estimator=copy.deepcopy(estimator)), Adam({"lr": 0.05})
    if way == "pickle":
        resumed = pickle.loads(pickled)
    else:
        resumed()
        resumed.load_state_dict(state)
    optimizer.set_state(steps)
    torch.set_rng_state(random)
    assert stepped(resumed, optimizer, 4) == losses
    assert resumed.median() == median


# Networks and cost


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, features):
        return self.drop(features)


@pytest.mark.parametrize("estimator", ["reward_to_go", Chains()])
def test_model_and_guide_share_dropout(estimator):
    network, seen = Dropout(), []

    def model():
        alpha, mean = network(ALPHA) + 0.1, network(FEATURE)
        # A mask of 64 entries does not come twice by chance.
        seen.append((alpha, mean, network(torch.ones(64))))
        y = nmm(HOOD, alpha, LOGITS, collapsed=True)
        pyro.sample("x", dist.Normal(mean * y, 1.0).to_event(1), obs=X)

    guide, steps = AutoNMM(model, estimator=estimator), []
    for _ in range(3):
        seen.clear()
        TraceGraph_ELBO().loss(model, guide)
        first = seen[-1]
        assert all(
            torch.equal(*pair) for other in seen[-4:] for pair in zip(first, other, strict=True)
        )
        steps.append(first[2])
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[1], steps[2])


@pytest.mark.parametrize(
    ("name", "estimator", "runs"),
    [
        ("mixture", "reward_to_go", 4),
        ("label_noise_on_edges", "reward_to_go", 1),
        ("label_noise_on_edges", Chains(), 1),
        ("chain_of_latent_fields", Chains(), 9),
    ],
)
def test_runs_of_the_program(name, estimator, runs):
    """One for each field, three for two latent labels, one to start several chains from."""
    number = itertools.count()

    def counted():
        next(number)
        PROGRAMS[name][0]()

    guide = AutoNMM(counted, estimator=estimator)
    guide()
    before = next(number)
    guide()
    assert next(number) - before - 1 == runs


# Refusals


def some_measured():
    pyro.sample("x", dist.Normal(1.0 * field()[..., :3], 1.0).to_event(1), obs=X[:3])


def local_below_subsample():
    with node_plate(HOOD, field(), subsample_size=2) as (nodes, y):
        h = pyro.sample("h", dist.Normal(1.0 * y, 1.0))
        pyro.sample("x", dist.Normal(h, 1.0), obs=X[nodes])


def discrete():
    pyro.sample("k", dist.Bernoulli(0.5))
    field(Y)


def relabelled():
    field(relabel=MATRICES)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (some_measured, {}, r"without a dimension of 4 nodes: .*\.mask\(measured\)"),
        (local_below_subsample, {}, r"plates \['nodes'\].*latent sites \['h'\].*leave out"),
        (subsampled_nodes, {"create_plates": lambda: pyro.plate("nodes", 4, subsample_size=3)},
         "leave out subsample_size and create_plates"),
        (discrete, {}, "site 'k' is discrete and belongs to no nmm"),
        (relabelled, {}, "field 'c' has latent labels and edges that relabel"),
        (two_fields_of_one_site, {"estimator": BOUND},
         r"'x' depends on 'a/y' and on labels that are drawn later, of \['b/y'\].*Chains"),
        (parent, {"guide": autoguide.AutoLaplaceApproximation}, "AutoMultivariateNormal"),
    ],
)  # fmt: skip
def test_refusals(model, options, message):
    def guides():
        for _ in range(30):  # random labels of four nodes may be a palindrome
            AutoNMM(model, **options)()

    with pytest.raises(ValueError, match=message):
        guides()
