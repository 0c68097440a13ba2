# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The README's program with a prior, as it stands there, and what it is fitted by."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains, FieldGibbs
from pyro_nmm.models import nmm


def of_members(hood: Neighborhood, y: Tensor | None = None) -> None:
    """One labelling of the karate club by four labels."""
    kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    alpha = kappa[..., None, None] * torch.full((34, 4), 0.25)
    nmm(hood, alpha, torch.zeros(hood.num_edges), y, collapsed=True)


def by_readme(model: Callable, y: Tensor, args) -> dict[str, Tensor]:
    pyro.clear_param_store()
    guide = AutoNMM(model, estimator=Chains())
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    for _ in range(200):
        svi.step(y)
    return draws_of(guide, y)


def by_kernel_of_readme(model: Callable, y: Tensor, args) -> dict[str, Tensor]:
    mcmc = MCMC(FieldGibbs(model), num_samples=100, warmup_steps=50, disable_progbar=True)
    mcmc.run(y)
    return mcmc.get_samples()


def draws_of(guide: AutoNMM, labels: Tensor) -> dict[str, Tensor]:
    """A thousand draws of each parameter from a guide that was fitted."""
    with torch.no_grad():
        draws = [guide.parents(labels) for _ in range(1000)]
    return {name: torch.stack([draw[name].flatten()[0] for draw in draws]) for name in draws[0]}
