# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/pyro.md, and the small field that their tests share."""

import re
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from bounds import PATH, expected_bound
from documents import ROOT
from graphs import parameters
from pyro.infer import TraceGraph_ELBO

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

#: Name of a row to what it says: its status, and the sentence beside it.
ROWS = {
    name.strip(): (status, told)
    for name, status, told in re.findall(
        r"^\| ([^|]+) \| (works|refused|limit) \| (.*) \|$",
        (ROOT / "docs" / "pyro.md").read_text(),
        re.MULTILINE,
    )
}
#: Name of a row to its test.
CHECKS = {}
Y = torch.tensor([0, 0, 1])


def row(*names):
    """The test of a row; of several, if it takes the name."""

    def register(check):
        for name in names:
            assert name not in CHECKS, name
            CHECKS[name] = partial(check, name) if len(names) > 1 else check
        return check

    return register


def vectorized(kind=TraceGraph_ELBO, size=100, nesting=0, **options):
    return kind(num_particles=size, vectorize_particles=True, max_plate_nesting=nesting, **options)


def losses(model, guide, steps=20, **options):
    elbo = vectorized(**options)
    return torch.tensor([elbo.loss(model, guide) for _ in range(steps)])


class Pair:
    """Observed labels of three nodes: ``model`` and ``guide``."""

    def __init__(self, estimator="reward_to_go", in_guide=lambda leaf: leaf):
        pyro.clear_param_store()
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.in_guide = alpha.log().requires_grad_(), in_guide
        self.estimator = estimator

    @property
    def alpha(self):
        return self.log_alpha.detach().exp()

    def model(self, y=Y, **options):
        leaf = pyro.param("log_alpha", self.log_alpha)
        return nmm(PATH, leaf.exp(), self.logits, y, collapsed=True, **options)

    def guide(self, y=Y, **options):
        leaf = self.in_guide(pyro.param("log_alpha", self.log_alpha))
        options = {"collapsed": True, "estimator": self.estimator} | options
        ordered_guide(PATH, leaf.exp(), self.logits, y, **options)

    def bound(self, y=Y):
        return expected_bound(PATH, self.log_alpha.exp(), self.logits, y)

    def log_prob(self, y=Y):
        return NeighborMixture(PATH, self.log_alpha.exp(), self.logits).log_prob(y)

    def gradient(self, truth):
        return torch.autograd.grad(truth, self.log_alpha, retain_graph=True)[0]


class Parent(Pair):
    """A continuous parent of ``alpha``."""

    def prior(self):
        return dist.Normal(0.0, 0.5).expand([3, 2]).to_event(2)

    def model(self):
        shift = pyro.sample("shift", self.prior())
        nmm(PATH, self.alpha * shift.exp(), self.logits, Y, collapsed=True)

    def guide_given(self, shift):
        ordered_guide(PATH, self.alpha * shift.exp(), self.logits, Y, collapsed=True)
