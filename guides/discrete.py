# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Discrete sites of no field in MCMC: draws from full conditionals, and proposals."""

from itertools import product
from typing import Any

import torch
from pyro.distributions import Categorical, Independent, MaskedDistribution
from torch import Tensor

from pyro_nmm.guides.program import Run


def values_of(name: str, site: Any) -> Tensor:
    """``(S, ...)``: the values that one element of a discrete site can have."""
    fn = site["fn"]
    while isinstance(fn, Independent | MaskedDistribution):
        fn = fn.base_dist
    try:
        values = fn.enumerate_support(expand=False)
    except NotImplementedError:
        kind = type(fn).__name__
        raise ValueError(
            f"site {name!r} is discrete and its values cannot be enumerated, because it is a "
            f"{kind}: give it finitely many values, such as Categorical(logits=Poisson(2.0)"
            f".log_prob(torch.arange(50.0))) for a Poisson"
        ) from None
    return values.reshape(-1, *fn.event_shape)


def other_value(value: Tensor, values: Tensor) -> Tensor:
    """A value of a site with another one of ``values`` in one element, all equally likely."""
    changed = value.reshape(-1, *values.shape[1:]).clone()
    place, step = torch.randint(len(changed), ()), torch.randint(1, max(2, len(values)), ())
    changed[place] = values[(_numbers(changed[place], values) + step) % len(values)]
    return changed.view_as(value)


def redraw(run: Run, name: str, together: bool) -> tuple[Tensor, bool]:
    """A draw of a site from its full conditional, element after element, by a run of the program
    at each value.

    :param together: whether to propose all elements of the site's plates at once, each by the
        densities in its element of the plates. These are exact if no site depends on several
        elements. Otherwise a Metropolis step corrects them.
    :return: the value, and whether the elements were independent.
    """
    here = run({}).nodes
    site = here[name]
    value, values = site["value"].clone(), values_of(name, site)
    frames = [f for f in site["cond_indep_stack"] if f.vectorized] if together else []
    shape = value.shape[: value.dim() - values.dim() + 1]
    first = len(shape) - site["fn"].event_dim + values.dim() - 1  # dimensions left of the event
    plates = {frame.dim + first for frame in frames}
    sizes = (range(n) if dim not in plates else [slice(None)] for dim, n in enumerate(shape))
    independent = True
    for place in product(*sizes):
        tables, new = [], value.clone()
        for option in values:
            new[place] = option
            trace = run({name: new})
            if trace.nodes.keys() != here.keys():
                raise ValueError(
                    f"site {name!r} decides which sites there are: let the program have all of "
                    f"them at each value, and choose by torch.where"
                )
            tables.append(_log_probs(trace, frames))
        lowest = torch.finfo(tables[0].dtype).min  # also of impossible values
        q = Categorical(logits=torch.stack(tables, -1).nan_to_num(lowest, neginf=lowest))
        number = q.sample()
        new[place] = values[number]
        if frames:
            ends = [run({name: v}).log_prob_sum() for v in (new, value)]
            back = q.log_prob(_numbers(value[place], values)) - q.log_prob(number)
            log_ratio = ends[0] - ends[1] + back.sum()
            independent &= bool(log_ratio.abs() < 1e-4 * (1 + ends[1].abs()))
            if not log_ratio.exp() > torch.rand(()):
                continue
        value = new
    return value, independent


def _numbers(elements: Tensor, values: Tensor) -> Tensor:
    """Which of the values elements have."""
    batch = elements.shape[: elements.dim() - values.dim() + 1]
    same = elements.reshape(*batch, 1, -1) == values.reshape(len(values), -1)
    return same.all(-1).long().argmax(-1)


def _log_probs(trace: Any, frames: list) -> Tensor:
    """The log-density of a run in each element of plates, of sites that are in all of them."""
    trace.compute_log_prob()
    names, total = {frame.name for frame in frames}, torch.zeros(())
    for site in trace.nodes.values():
        if site["type"] == "sample" and names <= {f.name for f in site["cond_indep_stack"]}:
            log_prob, kept = site["log_prob"], {frame.dim for frame in frames}
            others = [dim for dim in range(-log_prob.dim(), 0) if dim not in kept]
            total = total + (log_prob.sum(others) if others else log_prob)
    return total
