# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Programs that are trained, and programs that do not fit: plates, handlers and networks."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from graphs import star, to_hood
from pyro import poutine
from pyro.infer import SVI, Predictive, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from pyro_rows import Pair, Y, in_plate, vectorized
from torch.distributions import constraints

from pyro_nmm import ChosenLabels, NeighborChoice, NeighborMixture, OrderedConditional
from pyro_nmm.guides import AmortizedNMM, MixtureGuide, density, ordered_guide
from pyro_nmm.models import FreeNMM, nmm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "collapsed", "particles"),
    [("reward_to_go", False, 8), ("one_step_credit", True, 8), ("no_score", False, 1),
     ("reward_to_go", True, 1)],
)  # fmt: skip
def test_svi_raises_the_bound(estimator, collapsed, particles):
    """On a ladder whose labels change in the middle, a fifth of them unobserved."""
    hood, observed = to_hood(nx.ladder_graph(8)), torch.arange(16) % 5 > 0
    labels = (torch.arange(16) % 8 >= 4).long().where(observed, -1)

    def program(field):
        alpha = pyro.param("alpha", torch.ones(16, 2), constraint=constraints.positive)
        logits = pyro.param("logits", torch.zeros(hood.num_edges))
        field(hood, alpha, logits, labels, observed, collapsed=collapsed)

    elbo = TraceGraph_ELBO(num_particles=particles, vectorize_particles=particles > 1)
    guide = partial(ordered_guide, estimator=estimator)
    svi = SVI(partial(program, nmm), partial(program, guide), Adam({"lr": 0.06}), elbo)
    losses = torch.tensor([svi.step() for _ in range(80)])
    assert losses.isfinite().all()
    before, after = losses[:16].mean(), losses[-16:].mean()
    assert after < before - 3
    store = pyro.get_param_store()
    mix = NeighborMixture(hood, store["alpha"], store["logits"])
    bound = mix.elbo(labels, observed, 200).mean().detach()
    torch.testing.assert_close(-after, bound, atol=1.0, rtol=0)


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score"])
def test_losses_that_take_the_entropy_term_for_its_value(estimator):
    """Its control variate has no value."""
    pair, losses = Pair(estimator), []
    pyro.enable_validation(False)
    for kind in (TraceGraph_ELBO, TraceMeanField_ELBO):
        pyro.set_rng_seed(5)
        losses.append(vectorized(kind, 8).loss(pair.model, pair.guide))
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("law", [NeighborChoice, OrderedConditional, ChosenLabels, NeighborMixture])
def test_no_law_is_enumerated(law):
    with pytest.raises(NotImplementedError, match=f"{law.__name__} has too many values"):
        law.enumerate_support(object.__new__(law))


def losses(handler, **options):
    """Of both programs on the house in a handler, in both forms."""
    hood, alpha, logits = house_and_parameters()
    options = {"alpha": alpha, "logits": logits, "y": LABELS} | options
    for collapsed in (False, True):
        programs = (partial(f, hood, collapsed=collapsed, **options) for f in (nmm, ordered_guide))
        yield partial(vectorized(size=3, nesting=1).loss, *map(handler, programs))


def nodes(size):
    return partial(in_plate, size=size, name="nodes")


def with_entries(kind, value):
    return partial(getattr(poutine, kind), **{kind: value})


ONES = {"mask": torch.ones(5, dtype=torch.bool), "scale": torch.ones(5, dtype=torch.double)}


@pytest.mark.parametrize(
    ("handler", "match"),
    [(nodes(size), rf"plate 'nodes' of size {size} surrounds one labelling") for size in (3, 5)]
    + [
        (with_entries(kind, value), rf"poutine.{kind} of shape .* observed=")
        for kind, ones in ONES.items()
        for value in (ones, ones[:, None])
    ],
)
def test_handlers_over_nodes(handler, match):
    for loss in losses(handler):
        with pytest.raises(ValueError, match=match):
            loss()


@pytest.mark.parametrize("name", ["alpha", "logits", "y"])
def test_plates_in_which_one_argument_differs(name):
    """A plate of as many fields as nodes, in which a handler may have an entry for each field."""
    _, alpha, logits = house_and_parameters()
    value = {"alpha": alpha, "logits": logits, "y": LABELS}[name]
    batch = {name: value.expand(5, *value.shape)}
    for handler in (lambda f: f, *(with_entries(kind, ones) for kind, ones in ONES.items())):
        for loss in losses(lambda f, handler=handler: nodes(5)(handler(f)), **batch):
            assert torch.tensor(loss()).isfinite()


@pytest.mark.parametrize(
    "handler", [nodes(1), *(with_entries(kind, ones[0]) for kind, ones in ONES.items())]
)
def test_handlers_of_one_number(handler):
    for loss in losses(handler):
        assert torch.tensor(loss()).isfinite()


class Bayesian(PyroModule):
    def __init__(self):
        super().__init__()
        self.scores = PyroSample(pyro.distributions.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

    def forward(self, hood):
        return self.scores.exp(), torch.zeros(hood.num_edges)


def test_networks_that_sample():
    """The network with random weights is an error, which says how to write both programs."""
    hood, network = star(2), Bayesian()
    program = AmortizedNMM(hood, Bayesian())
    with pytest.raises(ValueError, match=r"network has a sample site 'scores'.*ordered_guide"):
        TraceGraph_ELBO().loss(program.model, program.guide, y=Y)

    def model():
        nmm(hood, *network(hood), Y)

    weights = AutoNormal(poutine.block(model, hide=["z", "c", "y"]))

    def guide():
        conditioned = poutine.block(poutine.condition(network, data=weights()))
        ordered_guide(hood, *conditioned(hood), Y)

    assert torch.tensor(TraceGraph_ELBO().loss(model, guide)).isfinite()


def predicted(parallel, collapsed):
    """A guide of other nodes than the model's."""
    hood, alpha, logits = house_and_parameters()
    observed = torch.tensor([True, False, True, False, False])
    model = partial(nmm, hood, alpha, logits, collapsed=collapsed)
    guide = partial(ordered_guide, hood, alpha, logits, LABELS, observed, collapsed=collapsed)
    Predictive(model, guide=guide, num_samples=3, parallel=parallel)()


def wide_network():
    target = density(lambda y: y.sum(-1).double(), num_nodes=3, num_classes=2)
    family = MixtureGuide(star(2), FreeNMM(star(2), 3), target)
    vectorized(size=20).loss(family.model, family.guide)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (partial(predicted, parallel, collapsed), "'c' has 2 nodes .* observed selects 5 here")
        for parallel in (False, True)
        for collapsed in (False, True)
    ]
    + [
        (wide_network, "network gives 3 or more labels, but target's site 'y'"),
        (lambda: ordered_guide(*house_and_parameters(), None), "y is required"),
    ],
)
def test_programs_that_do_not_fit(run, match):
    with pytest.raises(ValueError, match=match):
        run()
