# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM inside larger programs that are trained. ``test_pyro_table.py`` has losses, handlers."""

from functools import partial

import networkx as nx
import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import to_hood
from pyro import poutine
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch.distributions import constraints

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

#: A ladder whose labels change in the middle, and a mask of what is observed.
HOOD, OBSERVED = to_hood(nx.ladder_graph(8)), torch.arange(16) % 5 > 0
LABELS = (torch.arange(16) % 8 >= 4).long().where(OBSERVED, -1)


def train(model, guide, particles=8, steps=80):
    """The mean loss of the first and of the last fifth of the steps."""
    elbo = TraceGraph_ELBO(num_particles=particles, vectorize_particles=particles > 1)
    svi = SVI(model, guide, Adam({"lr": 0.06}), elbo)
    losses = torch.tensor([svi.step() for _ in range(steps)])
    assert losses.isfinite().all()
    return losses[: steps // 5].mean(), losses[-steps // 5 :].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "collapsed", "particles"),
    [("reward_to_go", False, 8), ("one_step_credit", True, 8), ("no_score", False, 1),
     ("reward_to_go", True, 1)],
)  # fmt: skip
def test_svi_raises_the_bound(estimator, collapsed, particles):
    def program(field):
        ones = torch.ones(16, 2, dtype=torch.double)
        alpha = pyro.param("alpha", ones, constraint=constraints.positive)
        logits = pyro.param("logits", torch.zeros(HOOD.num_edges))
        field(HOOD, alpha, logits, LABELS, OBSERVED, collapsed=collapsed)

    guide = partial(ordered_guide, estimator=estimator)
    before, after = train(partial(program, nmm), partial(program, guide), particles)
    assert after < before - 3
    store = pyro.get_param_store()
    mix = NeighborMixture(HOOD, store["alpha"], store["logits"])
    bound = mix.elbo(LABELS, OBSERVED, 200).mean().detach()
    torch.testing.assert_close(-after, bound, atol=1.0, rtol=0)


@pytest.mark.slow
def test_hyperprior_on_alpha_beside_the_ordered_guide():
    logits = torch.zeros(HOOD.num_edges)

    def model():
        sharpness = pyro.sample("sharpness", dist.LogNormal(0.0, 1.0))
        base = pyro.sample("base", dist.Normal(0.0, 1.0).expand([16, 2]).to_event(2))
        alpha = (base + sharpness[..., None, None]).exp()
        nmm(HOOD, alpha, logits, LABELS, OBSERVED, collapsed=True)

    auto = AutoNormal(poutine.block(model, hide=["c", "y"]))

    def guide():
        values = auto()
        alpha = (values["base"] + values["sharpness"][..., None, None]).exp()
        ordered_guide(HOOD, alpha, logits, LABELS, OBSERVED, collapsed=True)

    before, after = train(model, guide, steps=150)
    assert after < before - 3
    median = auto.median()
    mix = NeighborMixture(HOOD, (median["base"] + median["sharpness"]).exp(), logits)
    right = mix.marginals().argmax(-1)[OBSERVED] == LABELS[OBSERVED]
    assert right.double().mean() > 0.9
