# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Plates, handlers and networks that fit a program, and programs that do not fit."""

from functools import partial
from itertools import product

import pyro
import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from graphs import star
from pyro import poutine
from pyro.infer import Predictive, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro_rows import Y, in_plate, vectorized

from pyro_nmm.guides import AmortizedNMM, MixtureGuide, density, ordered_guide
from pyro_nmm.models import FreeNMM, nmm


@pytest.mark.parametrize("name", ["alpha", "logits", "y"])
def test_plates_in_which_one_argument_differs(name):
    """A plate of as many fields as nodes, in which a handler may have an entry for each field."""
    hood, alpha, logits = house_and_parameters()
    values = {"alpha": alpha, "logits": logits, "y": LABELS}
    values[name] = values[name].expand(5, *values[name].shape)
    mask = partial(poutine.mask, mask=torch.ones(5, dtype=torch.bool))
    for handler, collapsed in product((lambda program: program, mask), (False, True)):
        programs = (partial(f, hood, collapsed=collapsed, **values) for f in (nmm, ordered_guide))
        plated = (in_plate(handler(program), size=5) for program in programs)
        assert torch.tensor(vectorized(size=3, nesting=1).loss(*plated)).isfinite()


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
        (partial(predicted, True, False), "'c' has 2 nodes .* observed selects 5 here"),
        (partial(predicted, False, True), "'c' has 2 nodes .* observed selects 5 here"),
        (wide_network, "network gives 3 or more labels, but target's site 'y'"),
        (lambda: ordered_guide(*house_and_parameters(), None), "y is required"),
    ],
)
def test_programs_that_do_not_fit(run, match):
    with pytest.raises(ValueError, match=match):
        run()
