# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/pyro.md, and the small programs that their tests share."""

import re
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from bounds import PATH, expected_bound, expected_evidence_bound
from documents import ROOT
from graphs import labellings, parameters
from pyro.infer import TraceGraph_ELBO
from pyro.ops.indexing import Vindex

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import evidence_guide, ordered_guide
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
Y, X = torch.tensor([0, 0, 1]), torch.tensor([-1.2, 0.3, 1.0], dtype=torch.double)
LOCS = torch.tensor([-0.5, 0.7], dtype=torch.double)
#: Labels of three fields.
FIELDS = torch.tensor([[0, 0, 1], [1, 0, 1], [1, 1, 1]])


def row(*names):
    """The test of a row; of several, if it takes the name."""

    def register(check):
        for name in names:
            assert name not in CHECKS, name
            CHECKS[name] = partial(check, name) if len(names) > 1 else check
        return check

    return register


def inside(context, program):
    """A program inside a context, which is made anew for each run."""

    def run(*args, **options):
        with context():
            return program(*args, **options)

    return run


def in_plate(program, size=3, name="fields", **options):
    return inside(lambda: pyro.plate(name, size, **options), program)


def vectorized(kind=TraceGraph_ELBO, size=100, nesting=0, **options):
    return kind(num_particles=size, vectorize_particles=True, max_plate_nesting=nesting, **options)


def losses(model, guide, steps=20, **options):
    elbo = vectorized(**options)
    return torch.tensor([elbo.loss(model, guide) for _ in range(steps)])


class Pair:
    """Observed labels of three nodes: ``model`` and ``guide``."""

    def __init__(self, estimator="reward_to_go", in_guide=lambda leaf: leaf, collapsed=True):
        pyro.clear_param_store()
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.in_guide = alpha.log().requires_grad_(), in_guide
        self.estimator, self.collapsed = estimator, collapsed

    @property
    def alpha(self):
        return self.log_alpha.detach().exp()

    def mixture(self, alpha=None):
        return NeighborMixture(PATH, self.alpha if alpha is None else alpha, self.logits)

    def model(self, y=Y, **options):
        leaf = pyro.param("log_alpha", self.log_alpha)
        options = {"collapsed": self.collapsed} | options
        return nmm(PATH, leaf.exp(), self.logits, y, **options)

    def guide(self, y=Y, **options):
        leaf = self.in_guide(pyro.param("log_alpha", self.log_alpha))
        options = {"collapsed": self.collapsed, "estimator": self.estimator} | options
        ordered_guide(PATH, leaf.exp(), self.logits, y, **options)

    def at(self, alpha_of, y=Y):
        """Both programs with a function that gives ``alpha``."""
        return [
            lambda field=field, **options: field(
                PATH, alpha_of(), self.logits, y, collapsed=True, **options
            )
            for field in (nmm, ordered_guide)
        ]

    def bound(self, y=Y, alpha=None):
        alpha = self.log_alpha.exp() if alpha is None else alpha
        return expected_bound(PATH, alpha, self.logits, y)

    def log_prob(self, y=Y):
        return self.mixture(self.log_alpha.exp()).log_prob(y)

    def gradient(self, truth):
        return torch.autograd.grad(truth, self.log_alpha, retain_graph=True)[0]


class Parent(Pair):
    """A continuous parent of ``alpha``."""

    def prior(self):
        return dist.Normal(0.0, 0.5).expand([3, 2]).to_event(2)

    def model(self):
        self.at(lambda: self.alpha * pyro.sample("shift", self.prior()).exp())[0]()

    def guide_given(self, shift):
        self.at(lambda: self.alpha * shift.exp())[1]()


class Measured:
    """Latent labels of three nodes, and a measurement of each, as ``below`` writes it."""

    def __init__(self, below=None, x=X):
        pyro.clear_param_store()
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.x = alpha.log().requires_grad_(), x
        self.loc = LOCS.clone().requires_grad_()
        self.below = below or (lambda y: self.sample(y).to_event(1))

    @property
    def prior(self):
        return PATH, pyro.param("log_alpha", self.log_alpha).exp(), self.logits

    def sample(self, y):
        return dist.Normal(pyro.param("loc", self.loc)[y], 0.5)

    def evidence(self, x=None):
        x = self.x if x is None else x
        return self.sample(torch.arange(2)).log_prob(x.unsqueeze(-1))

    def model(self):
        y = nmm(*self.prior, collapsed=True)
        law = self.below(y)
        if law is not None:
            pyro.sample("x", law, obs=self.x)

    def guide(self, **options):
        evidence_guide(*self.prior, self.evidence(), collapsed=True, **options)

    def bound(self, x=None):
        return expected_evidence_bound(*self.prior, self.evidence(x))

    def log_prob(self):
        """The exact ``log p(x)``."""
        y = labellings(3)
        log_prior = NeighborMixture(*self.prior).log_prob(y)
        return (log_prior + self.sample(y).log_prob(self.x).sum(-1)).logsumexp(0)


def measure(means):
    pyro.sample("x", dist.Normal(means, 0.5).to_event(1), obs=X)


def at_labels(means, y):
    return Vindex(means[..., None, :])[..., y]


class Located(Measured):
    """The means of labels are a site, below which ``write`` has the measurements."""

    def __init__(self, write=lambda means, y: measure(at_labels(means, y)), factor=1.0):
        super().__init__()
        self.write, self.factor = write, factor

    def means(self):
        return pyro.sample("means", dist.Normal(LOCS, 0.3).to_event(1))  # (..., 2)

    def model(self):
        means = self.means()
        self.write(means, nmm(*self.prior, collapsed=True))

    def evidence(self):
        law = dist.Normal(self.means()[..., None, :], 0.5)
        return self.factor * law.log_prob(X[:, None])
