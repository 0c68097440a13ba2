# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Simulation-based calibration: are draws of a posterior draws of it?"""

from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_nmm.arguments import check_integers
from pyro_nmm.fitting import bar

Draws = dict[str, Tensor]


def calibration_ranks(
    model: Callable,
    sample: Callable[[Draws], Draws],
    *args: Any,
    num_sets: int = 100,
    num_draws: int = 19,
    **kwargs: Any,
) -> dict[str, Tensor]:
    r"""Ranks of true values among draws of their posteriors, for data sets that a program makes:
    simulation-based calibration (Talts, Betancourt, Simpson, Vehtari, Gelman 2018,
    https://arxiv.org/abs/1804.06788).

    .. math::

        r_s = \sum_{l=1}^L 1[\theta_{sl} < \theta_s] , \qquad
        \theta_s, y_s \sim p(\theta, y), \quad \theta_{sl} \sim p(\theta \mid y_s)

    are uniform on :math:`0, \dots, L`, of every number of every site, if the draws are independent
    and of the posterior; draws that equal the true value are counted or not at random. Ranks in the
    middle are of draws that are too wide, at both ends of too narrow ones, and at one end of a
    bias. So it tests models, priors, kernels and guides together.

    >>> import pyro
    >>> from pyro.distributions import Normal
    >>> def model(x=None):
    ...     mean = pyro.sample("mean", Normal(0.0, 1.0))
    ...     pyro.sample("x", Normal(mean, 1.0), obs=x)
    >>> def sample(sites):  # here MCMC(FieldGibbs(model), ...).run(sites["y"]), or a guide's fit
    ...     return {"mean": Normal(sites["x"] / 2, 0.5**0.5).sample((19,))}
    >>> ranks = calibration_ranks(model, sample, num_sets=200)
    >>> ranks["mean"].shape, 4 < ranks["mean"].double().std().item() < 8  # 5.8 if uniform
    (torch.Size([200]), True)

    :param model: a Pyro program that draws its data when it is called with ``args`` and ``kwargs``.
    :param sample: from the values of all of its sites to draws ``(S, ...)`` of some of them, of
        which ``num_draws`` are taken at equal distances, up to the last.
    :param int num_draws: ``L``.
    :return: ``(num_sets, ...)`` ranks by the names of the sites. Cost: so many of ``sample``.
    :raises ValueError: for too few draws, draws of what is no site or of another shape, and a
        program that has its data already.
    """
    check_integers(1, num_sets=num_sets, num_draws=num_draws)
    ranks: dict[str, list[Tensor]] = {}
    for _ in bar(range(num_sets)):
        nodes: dict[str, Any] = poutine.trace(model).get_trace(*args, **kwargs).nodes
        drawn = {k: site for k, site in nodes.items() if site["type"] == "sample"}
        given = [
            k for k, s in drawn.items() if s["is_observed"] and not s["infer"].get("_deterministic")
        ]
        if given:
            raise ValueError(f"model has data at sites {given}: call it so that it draws them")
        sites = {name: site["value"] for name, site in drawn.items()}
        for name, draws in sample(sites).items():
            if name not in sites:
                raise ValueError(f"sample returned draws of {name!r}, but sites are {[*sites]}")
            ranks.setdefault(name, []).append(rank(sites[name], draws, num_draws))
    return {name: torch.stack(found) for name, found in ranks.items()}


def rank(value: Tensor, draws: Tensor, num_draws: int) -> Tensor:
    """How many of ``num_draws`` of the draws ``(S, ...)`` are below a value ``(...)``."""
    if len(draws) < num_draws:
        raise ValueError(f"sample must return num_draws={num_draws} or more, got {len(draws)}")
    if draws.shape[1:] != value.shape or draws.isnan().any():
        what = f"numbers of shape (S, {str((*value.shape,))[1:]}"
        raise ValueError(f"sample must return draws that are {what}, got {tuple(draws.shape)}")
    some = draws[torch.arange(1, num_draws + 1) * len(draws) // num_draws - 1]
    equal = (some == value).sum(0)
    return (some < value).sum(0) + (torch.rand_like(equal.double()) * (equal + 1)).long()
