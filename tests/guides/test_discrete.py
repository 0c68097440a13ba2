# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Draws of discrete sites from their full conditionals, beside all values enumerated."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nmm.guides.discrete import redraw, values_of
from pyro_nmm.ops.diagnostics import effective_size

PROBS = torch.tensor([0.3, 0.6, 0.8])


def apart():
    """Each element of the plate has an observation."""
    with pyro.plate("nodes", 3):
        d = pyro.sample("d", dist.Bernoulli(PROBS))
        pyro.sample("x", dist.Normal(d, 0.8), obs=torch.tensor([0.2, 0.9, -0.4]))


def collider():
    """One observation of all elements of the plate, one of each."""
    with pyro.plate("nodes", 3):
        d = pyro.sample("d", dist.Bernoulli(PROBS))
        pyro.sample("x", dist.Normal(d, 2.0), obs=torch.tensor([0.2, 0.9, -0.4]))
    pyro.sample("sum", dist.Normal(d.sum(-1), 0.7), obs=torch.tensor(1.2))


def event():
    """An event of two elements in each element of a plate, which an observation below has, too."""
    with pyro.plate("groups", 2):
        d = pyro.sample("d", dist.Categorical(torch.ones(2, 2, 2) * PROBS[:2]).to_event(1))
        with pyro.plate("times", 2):
            pyro.sample(
                "x", dist.Normal(d.sum(-1), 1.0), obs=torch.tensor([[0.3, 1.7], [0.9, 2.0]])
            )


def one_hot():
    with pyro.plate("nodes", 2):
        d = pyro.sample("d", dist.OneHotCategorical(PROBS.expand(2, 3)))
        pyro.sample(
            "x", dist.Normal((d * torch.arange(3)).sum(-1), 1.0), obs=torch.tensor([0.3, 1.8])
        )


def scaled():
    """Two plates, and a site that is in one of them only."""
    with pyro.plate("rows", 2, dim=-2):
        with pyro.plate("columns", 2, dim=-1), poutine.scale(scale=0.5):
            d = pyro.sample("d", dist.Bernoulli(PROBS[:2]))
        pyro.sample(
            "x", dist.Normal(d.sum(-1, keepdim=True), 0.6), obs=torch.tensor([[0.2], [1.8]])
        )


#: Programs, and whether an element of plates depends on no other.
PROGRAMS = {apart: True, collider: False, event: True, one_hot: True, scaled: False}


def run_of(program, values):
    return poutine.trace(poutine.condition(program, data=values)).get_trace()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_full_conditional(program):
    pyro.set_rng_seed(2)
    site = poutine.trace(program).get_trace().nodes["d"]
    options = values_of("d", site)
    shape = site["value"].shape[: site["value"].dim() - options.dim() + 1]
    states = [options[list(row)].view_as(site["value"])
              for row in product(range(len(options)), repeat=shape.numel())]  # fmt: skip
    logs = torch.stack([run_of(program, {"d": state}).log_prob_sum() for state in states])
    probs, value, together, found = logs.softmax(0), site["value"], True, []
    for _ in range(400):

        def run(more, value=value):
            return run_of(program, {"d": value} | more)

        value, independent = redraw(run, "d", together)
        together = together and independent
        found.append(next(k for k, state in enumerate(states) if state.equal(value)))
    assert together is PROGRAMS[program]
    for state, prob in enumerate(probs):
        here = (torch.tensor(found) == state).double()
        size = effective_size(here[None]) if here.any() else len(here)
        assert (here.mean() - prob).abs() < 4.5 * (prob * (1 - prob) / size) ** 0.5 + 1e-3


@pytest.mark.parametrize("together", [False, True])
def test_a_draw_keeps_the_distribution(together):
    """After exact starts and one draw each, even if elements that are drawn at once depend."""
    pyro.set_rng_seed(3)
    states = [torch.tensor(row) for row in product((0.0, 1.0), repeat=3)]
    logs = torch.stack([run_of(collider, {"d": state}).log_prob_sum() for state in states])
    starts, ends = torch.multinomial(logs.softmax(0), 500, True), []
    for start in starts:

        def run(more, here=states[start]):
            return run_of(collider, {"d": here} | more)

        value, _ = redraw(run, "d", together)
        ends.append(next(k for k, state in enumerate(states) if state.equal(value)))
    shares = torch.tensor(ends).bincount(minlength=8) / 500
    for share, prob in zip(shares, logs.softmax(0), strict=True):
        assert (share - prob).abs() < 4.5 * (prob * (1 - prob) / 500) ** 0.5
    assert starts.tolist() != ends


def test_a_site_that_decides_which_sites_there_are():
    def program():
        if pyro.sample("d", dist.Bernoulli(0.5)):
            pyro.sample("e", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="site 'd' decides which sites there are"):
        redraw(lambda more: run_of(program, {"d": torch.tensor(1.0)} | more), "d", True)


@pytest.mark.parametrize("kind", [dist.Poisson, dist.Geometric])
def test_values_that_cannot_be_enumerated(kind):
    site = {"fn": kind(torch.tensor(0.5))}
    with pytest.raises(
        ValueError, match=rf"site 'd' is discrete .* a {kind.__name__}: give it fin"
    ):
        values_of("d", site)
    cure = dist.Categorical(logits=kind(torch.tensor(0.5)).log_prob(torch.arange(50.0)))
    assert len(values_of("d", {"fn": cure})) == 50
