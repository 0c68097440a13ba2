# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Results of Pyro for ArviZ, whose version 1 does not read them any more."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.poutine import Trace
from torch import Tensor

from pyro_nmm.guides.program import fields_of, log_probs, sample_sites
from pyro_nmm.models.plates import beside, kind_of

if TYPE_CHECKING:
    from xarray import DataTree


def to_datatree(
    draws: MCMC | Mapping[str, Tensor],
    model: Callable | None = None,
    *args: Any,
    posterior_predictive: Mapping[str, Tensor] | None = None,
    log_likelihood: Mapping[str, Tensor] | bool = False,
    coords: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> "DataTree":
    r"""Draws of any Pyro program as an ``xarray.DataTree``, for ArviZ's summaries and plots.

    Groups are ``posterior``, ``sample_stats`` of an ``MCMC``, and, by a run of the ``model``,
    ``observed_data``. Dimensions have the names of plates; labels, choices and counts of
    a field have the dimension ``node``, whose coordinates are node ids.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import MCMC, NUTS
    >>> def model(x):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("place", len(x)):
    ...         pyro.sample("x", dist.Normal(loc, 1.0), obs=x)
    >>> x = torch.tensor([0.3, -0.1, 1.2])
    >>> mcmc = MCMC(NUTS(model), num_samples=20, warmup_steps=10, disable_progbar=True)
    >>> mcmc.run(x)
    >>> tree = to_datatree(mcmc, model, x, log_likelihood=True)
    >>> dict(tree.log_likelihood.sizes)
    {'chain': 1, 'draw': 20, 'place': 3}

    The log-likelihood of a draw :math:`s` has an entry for each element of a plate or of
    ``.to_event``,

    .. math::

        \log p(x_i \mid \theta^{(s)}) ,

    for ``arviz.loo`` and ``compare``, where :math:`\theta` has all latent sites: also the latent
    label of a measurement and the ``z`` of counts, for which ``loo`` may warn of large ``k``.
    Labels of an ``nmm`` depend on one another: theirs are given all other labels,
    :meth:`~pyro_nmm.OrderedConditional.leave_one_out`, and need draws of the choices, as of
    ``save_params=["kappa", "c"]``.

    :param draws: an ``MCMC`` after its run, or draws ``(S, ...)`` by the names of sites, such as
        ``Predictive(guide, num_samples=S)(...)`` has of any guide.
    :param model: the program, and its ``args`` and ``kwargs``, for dimensions and data.
    :param posterior_predictive: draws ``(S, ...)`` of ``Predictive(model, draws)``.
    :param log_likelihood: entries ``(S, ...)`` by the names of sites, or whether to compute them,
        by a run of the model at each draw.
    :param coords: coordinates by the names of dimensions, such as names of places; of all nodes
        also where ``observed`` leaves some out.
    :return: a tree whose arrays are ``(chain, draw, ...)``. A scope's slash is a dot in its names.
    :raises ValueError: for ``log_likelihood`` without a model, or of no site, and draws of another
        number. Cost: one run of the model, and ``S`` with ``log_likelihood``.
    :raises ImportError: without ``arviz-base``: ``pip install pyro-nmm[arviz]``.
    """
    import arviz_base

    grouped = dict(draws.get_samples(group_by_chain=True) if isinstance(draws, MCMC) else draws)
    if not isinstance(draws, MCMC):
        grouped = {name: torch.as_tensor(value)[None] for name, value in grouped.items()}
    if not grouped:
        raise ValueError("draws has no sites")
    shape = next(iter(grouped.values())).shape[:2]
    if wrong := [name for name, value in grouped.items() if value.shape[:2] != shape]:
        raise ValueError(f"draws of {wrong} are not {shape[1]} as those of other sites")
    found: dict[str, dict[str, Any]] = {}
    if isinstance(draws, MCMC):
        found["sample_stats"] = _statistics(draws, *shape)
    sites: dict[str, Any] = {}

    def run(values: dict[str, Tensor]) -> Trace:
        assert model
        with torch.no_grad(), poutine.block():
            return poutine.trace(poutine.condition(model, data=values)).get_trace(*args, **kwargs)

    flat = {name: value.flatten(0, 1) for name, value in grouped.items()}
    if model is not None:
        sites = sample_sites(run({name: value[0] for name, value in flat.items()}))
        seen = _observed(sites, grouped)
        found["observed_data"] = {name: site["value"] for name, site in seen.items()}
        # A guide's draws have sites of its own.
        named = {k for k, s in sites.items() if not s["infer"].get("is_auxiliary")}
        grouped = {name: value for name, value in grouped.items() if name in named}
    found["posterior"] = grouped
    if log_likelihood is True:
        if model is None:
            raise ValueError("log_likelihood=True runs the model: give it, and its arguments")
        each = (run({k: v[s] for k, v in flat.items()}) for s in range(shape.numel()))
        entries = [_log_likelihood(trace, grouped) for trace in each]
        log_likelihood = {name: torch.stack([row[name] for row in entries]) for name in entries[0]}
        if not log_likelihood:
            raise ValueError(
                'log_likelihood has no site: labels of an nmm need draws of "c", which MCMC keeps '
                'by FieldGibbs(model) with save_params=[..., "c"]'
            )
    for group, given in (
        ("posterior_predictive", posterior_predictive),
        ("log_likelihood", log_likelihood),
    ):
        if given:
            values = {name: torch.as_tensor(value) for name, value in given.items()}
            if wrong := [k for k, v in values.items() if v.shape[:1] != (shape.numel(),)]:
                raise ValueError(f"{group} of {wrong} must have {shape.numel()} draws, as draws")
            found[group] = {name: value.unflatten(0, shape) for name, value in values.items()}
    dims, known = {}, {_plain(name): value for name, value in (coords or {}).items()}
    for name in sites:
        dims[_plain(name)], own = _dimensions(name, sites)
        for dim, (nodes, number) in own.items():
            given = known.get(dim, nodes)
            whole = len(given) == number > len(nodes)
            known[dim] = np.asarray(given)[nodes] if whole else given
    arrays = {
        group: {_plain(k): np.asarray(torch.as_tensor(v).cpu()) for k, v in each.items()}
        for group, each in found.items()
    }
    return arviz_base.from_dict(arrays, dims=dims, coords=known)


def _plain(name: str) -> str:
    """A name of a site or dimension in a tree, whose paths have slashes."""
    return name.replace("/", ".")


def _statistics(mcmc: MCMC, num_chains: int, num_draws: int) -> dict[str, Any]:
    diverging = torch.zeros(num_chains, num_draws, dtype=torch.bool)
    of_chains = [mcmc._diagnostics[k] for k in range(num_chains)]
    for chain, each in enumerate(of_chains):
        diverging[chain, list(each.get("divergences", []))] = True
    found: dict[str, Any] = {"diverging": diverging}
    if all("log density" in each for each in of_chains):
        found["lp"] = torch.stack([each["log density"] for each in of_chains])
    return found


def _observed(sites: dict[str, Any], draws: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sites with data, which conditioned and ``pyro.deterministic`` sites are not."""
    return {
        name: site
        for name, site in sites.items()
        if site["is_observed"] and name not in draws and not site["infer"].get("_deterministic")
    }


def _log_likelihood(trace: Trace, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of each observed site's elements at one draw; of labels of a field if it has choices."""
    sites = sample_sites(trace)
    if lost := [
        name
        for name, site in sites.items()
        if not (site["is_observed"] or ("nmm" in site["infer"] and kind_of(name) != "y"))
    ]:
        raise ValueError(
            f"log_likelihood needs draws of the sites {lost}, which MCMC keeps by save_params"
        )
    seen = _observed(sites, draws)
    plain = {name: site for name, site in seen.items() if "nmm" not in site["infer"]}
    found = {name: log_probs(trace, name, site["scale"])[0] for name, site in plain.items()}
    for field in fields_of(trace, set()).values():
        if field.site("y") in seen and draws.keys() >= set(field.unknown):
            states = [field.value("c"), *([] if field.prior.channel.keeps else [field.value("u")])]
            q = field.conditional(lambda values: trace)
            value = torch.stack(states, -2) if q.latent else states[0]
            found[field.site("y")] = q.leave_one_out(value)
    return found


def _dimensions(name: str, sites: dict[str, Any]) -> tuple[list[str], dict[str, tuple]]:
    """Names of a site's dimensions; of nodes the coordinates, and the number of all."""
    site = sites[name]
    value, event = site["value"], site["fn"].event_dim
    dims = [f"{name}_dim_{k}" for k in range(value.dim())]
    for frame in site["cond_indep_stack"]:
        if frame.dim is not None and value.dim() - event + frame.dim >= 0:
            dims[value.dim() - event + frame.dim] = frame.name
    kind, found = ("nmm_counts" if "nmm_counts" in site["infer"] else "nmm"), {}
    if of := site["infer"].get(kind):
        # The name of labels or counts has a number that no other field has.
        y = next(k for k, s in sites.items() if s["infer"].get(kind) is of and kind_of(k) == "y")
        node, source, label = (beside(y, dim) for dim in ("node", "source", "label"))
    if of and kind_of(name) == "z":
        dims[-2:] = source, label
    elif of:
        place = -2 if kind == "nmm_counts" else -1
        dims[place:] = [node, label][:-place]
        hood = of[0].hood
        nodes = hood.restrict(of[1]).nodes.cpu().numpy()
        found[_plain(dims[place])] = nodes, hood.num_nodes
    return [*map(_plain, dims)], found
