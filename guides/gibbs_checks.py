# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a program and its first parameters must be for :class:`~pyro_nmm.guides.FieldGibbs`."""

from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_nmm.guides.count_field import count_fields_of
from pyro_nmm.guides.discrete import values_of
from pyro_nmm.guides.program import fields_of
from pyro_nmm.models.plates import COPIES


def check_start(start: dict[str, Tensor], sites: dict[str, Any]) -> None:
    """Refuse initial parameters that are not those of the program."""
    shapes = {k: (*biject_to(s["fn"].support).inv(s["value"]).shape,) for k, s in sites.items()}
    given = {name: (*value.shape,) for name, value in start.items()}
    if given != shapes:
        raise ValueError(
            f"initial_params must have unconstrained values of all continuous sites and no others, "
            f"of shapes {shapes} in each chain, got {given}: choices, labels and discrete sites "
            f"start from draws"
        )


def of_field(site: Any) -> bool:
    """Whether a site is of a field of labels or of counts."""
    return "nmm" in site["infer"] or "nmm_counts" in site["infer"]


def check_model(trace: Any) -> None:
    """Refuse programs for which the kernel would not sample the posterior."""
    if not fields_of(trace, set()) | count_fields_of(trace, set(trace.stochastic_nodes)):
        raise ValueError("model has no nmm with sampled choices: use the kernel of Pyro itself")
    trace.compute_log_prob()
    check_nan(trace)
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        if site_is_subsample(site):
            if len(site["value"]) < site["fn"].size:
                raise ValueError(f"plate {name!r} subsamples: give MCMC all elements")
        elif any(frame.name in COPIES for frame in site["cond_indep_stack"]):
            raise ValueError(f"site {name!r} has a dimension of particles: give MCMC one copy")
        elif of_field(site):
            scale, mask = torch.as_tensor(site["scale"]), site["mask"]
            if (scale != 1).any() or not (mask is None or torch.as_tensor(mask).all()):
                raise ValueError(
                    f"field of site {name!r} is in poutine.scale or poutine.mask: its choices are "
                    f"drawn without, so leave it out, or fit the field with SVI"
                )
        elif not site["is_observed"] and site["fn"].support.is_discrete:
            values_of(name, site)


def check_nan(trace: Any, masked: bool = False) -> None:
    """Refuse NaN in data; also in ``masked`` data, whose density is right but not its gradient."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or not (site["is_observed"] and site["value"].isnan().any()):
            continue
        if masked or site["log_prob_sum"].isnan():
            cure = "as in Normal(loc, scale).mask(~x.isnan()) with obs=x.nan_to_num()"
            cure = "by observed=" if of_field(site) else cure
            raise ValueError(f"site {name!r} has NaN in its data: leave it out, {cure}")
