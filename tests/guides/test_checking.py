# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What ``check_program`` finds in programs that are nearly right."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import PATH
from graphs import parameters
from pyro.contrib.autoname import scope
from pyro_rows import LOCS, Located, X, Y, at_labels, measure

from pyro_nmm.guides import (
    MixtureGuide,
    check_program,
    evidence_guide,
    ordered_guide,
)
from pyro_nmm.models import FreeNMM, nmm


def check(write, **options):
    program = Located(write, **options)
    return check_program(program.model, program.guide)


def test_right_programs():
    program, state = Located(), torch.get_rng_state()
    check_program(program.model, program.guide)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scale_of_both_programs():
    """The evidence is scaled, too, and there is nothing to warn of."""
    halved = Located()
    check_program(*(pyro.poutine.scale(p, scale=0.5) for p in (halved.model, halved.guide)))


def test_lost_labels_of_a_family():
    """Below a ``MixtureGuide``, whose labels are sites of their own."""

    def target():
        uniform = dist.Categorical(torch.ones(3, 2, dtype=torch.double)).to_event(1)
        assigned(LOCS, pyro.sample("y", uniform))

    pair = MixtureGuide(PATH, FreeNMM(PATH, 2), target)
    with pytest.raises(ValueError, match="'x' depends on the labels 'y', but Pyro has lost track"):
        check_program(pair.model, pair.guide)


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
        check_program(lambda: program(nmm), lambda: program(evidence_guide, **zeros))


def assigned(loc, y):
    mean = torch.zeros(y.shape)
    mean[...] = at_labels(loc, y)
    measure(mean)


def listed(loc, y):
    measure(torch.tensor(at_labels(loc, y).tolist()))


def by_node(loc, y):
    measure(at_labels(loc, y) + 0 * loc[..., 0] * torch.ones(3))


def plate(loc, y):
    with pyro.plate("nodes", 3):
        pyro.sample("x", dist.Normal(at_labels(loc, y), 0.5), obs=X)


def first_particle(loc, y):
    measure(at_labels(loc.reshape(-1, 2)[0], y))


@pytest.mark.parametrize(
    ("below", "match"),
    [
        (assigned, "'x' depends on the labels 'y', but Pyro has lost track"),
        (listed, "'x' depends on the labels 'y', but Pyro has lost track"),
        (by_node, "with vectorized particles the program fails: .*None"),
        (plate, r"'x' has .*dimension -3 belongs to no plate.*\.to_event\(1\).*node_plate"),
        (first_particle, "'x' has the log-probability .* reads values of another particle.*Vindex"),
    ],
)
def test_wrong_programs(below, match):
    with pytest.raises(ValueError, match=match):
        check(below)


def thrice(loc, y):
    with pyro.poutine.scale(scale=3.0):
        measure(at_labels(loc, y))


@pytest.mark.parametrize("options", [{"factor": 0.5}, {"write": thrice}])
def test_evidence_of_another_program(options):
    program = Located(**options)
    with pytest.warns(UserWarning, match=r"log-likelihood of 'x' changes by .* evidence_guide by"):
        check_program(program.model, program.guide)
