# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What ``check_program`` finds in programs that are nearly right."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import PATH
from graphs import parameters
from pyro.contrib.autoname import scope
from pyro.ops.indexing import Vindex
from pyro_rows import LOCS, X, Y
from torch import nn

from pyro_nmm.guides import (
    AmortizedNMM,
    HiddenFieldGuide,
    MixtureGuide,
    check_program,
    evidence_guide,
    ordered_guide,
)
from pyro_nmm.models import FreeNMM, NormalEmission, nmm, node_plate


class Program:
    """A measurement of each node, and the mean of each label."""

    def __init__(self, below, factor=1.0, scales=None):
        self.prior, self.below = (PATH, *parameters(PATH, 2)), below
        self.factor, self.scales = factor, scales

    def loc(self):
        return pyro.sample("loc", dist.Normal(LOCS, 0.3).to_event(1))

    def model(self):
        loc = self.loc()
        y = nmm(*self.prior, collapsed=True)
        with pyro.poutine.scale(scale=1.0 if self.scales is None else self.scales):
            self.below(loc, y)

    def guide(self):
        evidence = dist.Normal(self.loc()[..., None, :], 0.5).log_prob(X[:, None])
        evidence_guide(*self.prior, self.factor * evidence, collapsed=True)

    def check(self):
        return check_program(self.model, self.guide, num_runs=16)


def observe(mean):
    pyro.sample("x", dist.Normal(mean, 0.5).to_event(1), obs=X)


def at_labels(loc, y):
    return Vindex(loc[..., None, :])[..., y]


def right(loc, y):
    observe(at_labels(loc, y))


def test_right_programs():
    program, state = Program(right), torch.get_rng_state()
    checked = program.check()
    assert abs(checked.loss - checked.vectorized_loss) < 6 * checked.standard_error
    assert torch.equal(torch.get_rng_state(), state)


def test_subsamples_scales_and_other_sites():
    """All of these are right, and there is nothing to warn of."""

    def in_plate(loc, y, size=None):
        means = loc.squeeze(-2) if loc.dim() > 1 else loc  # (..., 2), of particles
        with node_plate(PATH, y, subsample_size=size) as (nodes, y):
            mean = Vindex(means[..., None, :])[..., y]
            pyro.sample("x", dist.Normal(mean, 0.5), obs=X[nodes])

    for size in (None, 2, 2):
        Program(partial(in_plate, size=size)).check()
    halved = Program(right)
    halves = (pyro.poutine.scale(p, scale=0.5) for p in (halved.model, halved.guide))
    check_program(*halves, num_runs=8)

    def noisy(loc, y):
        right(loc, y)
        pyro.sample("other", dist.Normal(at_labels(loc, y)[..., 0], 1.0))

    program = Program(noisy)

    def guide():
        program.guide()
        pyro.sample("other", dist.Normal(0.0, 1.0))

    check_program(program.model, guide, num_runs=8)


def test_lost_labels_of_a_family():
    """Below a ``MixtureGuide``, whose labels are sites of their own."""

    def target():
        uniform = dist.Categorical(torch.ones(3, 2, dtype=torch.double)).to_event(1)
        assigned(LOCS, pyro.sample("y", uniform))

    pair = MixtureGuide(PATH, FreeNMM(PATH, 2), target)
    with pytest.raises(ValueError, match="'x' depends on the labels 'y', but Pyro has lost track"):
        check_program(pair.model, pair.guide, num_runs=8)


def test_pairs_of_this_library():
    class Random(nn.Module):
        """Of one run, which model and guide share."""

        def forward(self, hood):
            return torch.rand(3, 2) + 0.5, torch.zeros(hood.num_edges)

    for pair, labels in (
        (AmortizedNMM(PATH, FreeNMM(PATH, 2)), {"y": Y}),
        (AmortizedNMM(PATH, Random()), {"y": Y}),
        (HiddenFieldGuide(NormalEmission(2), PATH, X[:, None]), {}),
    ):
        check_program(pair.model, pair.guide, **labels, num_runs=16)
        assert not pyro.get_param_store().keys()  # as before


def test_several_fields():
    """The labels of the first field are parents of the second one's."""
    alpha, logits = parameters(PATH, 2)

    def program(field, **options):
        with scope(prefix="first"):
            y = field(PATH, alpha, logits, **options, collapsed=True)
        shift = torch.nn.functional.one_hot(y, 2)
        with scope(prefix="second"):
            last = nmm if field is nmm else ordered_guide
            last(PATH, alpha + shift, logits, Y, collapsed=True)

    zeros = {"evidence": torch.zeros(3, 2)}
    with pytest.warns(UserWarning, match="'second/y' changes by .* nats, but the evidence .* by 0"):
        check_program(lambda: program(nmm), lambda: program(evidence_guide, **zeros), num_runs=16)


def assigned(loc, y):
    mean = torch.zeros(y.shape)
    mean[...] = at_labels(loc, y)
    observe(mean)


def listed(loc, y):
    observe(torch.tensor(at_labels(loc, y).tolist()))


def by_node(loc, y):
    observe(at_labels(loc, y) + 0 * loc[..., 0] * torch.ones(3))


def plate(loc, y):
    with pyro.plate("nodes", 3):
        pyro.sample("x", dist.Normal(at_labels(loc, y), 0.5), obs=X)


def first_particle(loc, y):
    observe(at_labels(loc.reshape(-1, 2)[0], y))


def unvalidated(loc, y):
    right(loc, y)
    pyro.factor("more", torch.tensor(float(pyro.infer.util.is_validation_enabled())))


@pytest.mark.parametrize(
    ("below", "match"),
    [
        (assigned, "'x' depends on the labels 'y', but Pyro has lost track"),
        (listed, "'x' depends on the labels 'y', but Pyro has lost track"),
        (by_node, "with vectorized particles the program fails: .*None"),
        (plate, r"'x' has .*dimension -3 belongs to no plate.*\.to_event\(1\).*node_plate"),
        (first_particle, "'x' has the log-probability .* reads values of another particle.*Vindex"),
        (unvalidated, "with pyro.enable_validation and .* without"),
    ],
)
def test_wrong_programs(below, match):
    with pytest.raises(ValueError, match=match):
        Program(below).check()


@pytest.mark.parametrize("options", [{"factor": 0.5}, {"scales": 3.0}])
def test_evidence_of_another_program(options):
    with pytest.warns(UserWarning, match=r"log-likelihood of 'x' changes by .* evidence_guide by"):
        Program(right, **options).check()
