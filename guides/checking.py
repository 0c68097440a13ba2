# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A check of a user's program: what Pyro would count wrongly, or lose track of, without a word."""

import math
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.tracegraph_elbo import TrackNonReparam
from pyro.poutine.util import site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from pyro_nmm import ChosenLabels, EvidenceConditional
from pyro_nmm.guides.chains import States
from pyro_nmm.guides.hidden_sites import check_hidden, is_enumerated
from pyro_nmm.guides.program import refuse_lost
from pyro_nmm.models.plates import AgreedSubsamples, beside, check_site, kind_of
from pyro_nmm.provenance import untracked

#: The least number of particles of a vectorized run, of which number one is run again alone. A
#: program that reads the first or the last particle for all shows with three, and not with two.
PARTICLES = 3


def check_program(model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> None:
    r"""Check a pair of Pyro programs with a field before its first fit.

    The check runs the pair with one particle and with vectorized ones, and refuses it if

    * Pyro's validation or a check of this library does,
    * the guide lacks sites of a field, or draws another subsample than the model is given,
    * ``poutine.block`` hides random sites that other sites of the model depend on,
    * a site has a dimension of no plate, which would count particles or labellings repeatedly,
    * a particle alone has another :math:`\log p` than among vectorized ones,
    * Pyro has lost track of a site below latent labels ``(..., n)``, which biases
      ``TraceGraph_ELBO``.

    It warns if the evidence ``(N, C)`` of :func:`evidence_guide` is not the program's own
    :math:`\log p(x_i \mid y_i)`, up to a constant of each node: the bound holds, but it is looser
    than it need be. It does not see which edge a logit belongs to: see
    :func:`~pyro_nmm.edge_values`.

    >>> from pyro.distributions import Normal
    >>> from pyro_nmm.guides import evidence_guide
    >>> from pyro_nmm.models import nmm
    >>> hood, x = Neighborhood.grid(2, 2), torch.tensor([-1.2, 0.3, 1.0, 0.2])
    >>> prior, loc = (hood, torch.ones(4, 2), torch.zeros(hood.num_edges)), torch.tensor([-1.0, 1])
    >>> def model():
    ...     y = nmm(*prior, collapsed=True)
    ...     with pyro.plate("nodes", 4):
    ...         pyro.sample("x", Normal(loc[y], 1.0), obs=x)
    >>> def guide():
    ...     evidence_guide(*prior, Normal(loc, 1.0).log_prob(x[:, None]), collapsed=True)
    >>> check_program(model, guide)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: site 'x' has values or parameters of batch shape (3, 3, 4), whose dimension -3...

    Random numbers and Pyro's store are left as they were.

    :param args, kwargs: of model and guide.
    :raises ValueError: with the site and the cure. Cost: about that of two steps with one particle
        and two with vectorized ones.
    """
    for name, program in (("model", model), ("guide", guide)):
        if not callable(program):
            raise ValueError(f"{name} must be a Pyro program, a function, got {program!r}")
    pair = model, guide, args, kwargs
    store = pyro.get_param_store()
    with torch.random.fork_rng(devices=[]), store.scope(store.get_state()):
        with pyro.validation_enabled(True):
            check_hidden(lambda values: _traced(poutine.condition(model, data=values), pair))
            one = _run(pair)
            _check_labels(pair, one)
            # Another number than all sizes, because particles must not pass for nodes or labels.
            sizes = {n for trace in one for _, s in _sites(trace) for n in s["value"].shape}
            number = next(n for n in count(PARTICLES) if n not in sizes)
            frames = (f for trace in one for _, s in _sites(trace) for f in s["cond_indep_stack"])
            dim = min((f.dim for f in frames if f.dim is not None), default=0) - 1
            try:
                many = _run(pair, -dim, pyro.plate("num_particles_vectorized", number, dim=dim))
            except RuntimeError as failure:
                raise ValueError(
                    f"with vectorized particles the program fails: {str(failure).splitlines()[0]}. "
                    f"Values of particles have more dimensions on the left: write kappa[..., None, "
                    f"None] * probs, with one None more for each plate"
                ) from failure
        _check_particles(pair, one[0], many[0])


def _sites(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "sample")


def _plain(value: Any) -> Tensor:
    return untracked(value.detach())[0][0]


def _traced(program: Callable, pair: tuple) -> poutine.Trace:
    """A run of a program with the arguments of the pair."""
    return poutine.trace(program).get_trace(*pair[2], **pair[3])


def _run(
    pair: tuple, nesting: Any = math.inf, particles: Any = None
) -> tuple[poutine.Trace, poutine.Trace]:
    """One run of model and guide, with the subsamples of plates, which losses leave out."""
    if particles:
        pair = particles(pair[0]), particles(pair[1]), *pair[2:]
    with TrackNonReparam():
        guide_trace = _traced(pair[1], pair)
        model_trace = _replayed(pair, guide_trace)
        drawn = model_trace.copy()
        for name in [name for name, site in _sites(model_trace) if is_enumerated(site)]:
            drawn.remove_node(name)
        check_model_guide_match(drawn, guide_trace, nesting)
        guide_trace.compute_log_prob(lambda name, site: not isinstance(site["fn"], States))
        for trace in (model_trace, guide_trace):
            for _, site in _sites(trace):
                check_site(site)
                if not (site_is_subsample(site) or isinstance(site["fn"], States)):
                    check_site_shape(site, nesting)
    return model_trace, guide_trace


def _replayed(pair: tuple, values: poutine.Trace) -> poutine.Trace:
    """The model at the values of a trace."""
    plates = {name: site["value"] for name, site in _sites(values) if site_is_subsample(site)}
    model = poutine.replay(AgreedSubsamples(plates)(pair[0]), trace=values)
    trace = _traced(model, pair)
    for name, site in _sites(trace):
        missing = name not in values and not (site["is_observed"] or is_enumerated(site))
        if missing and "nmm" in site["infer"]:
            raise ValueError(
                f"the guide lacks the site {name!r} of a field, whose choices and labels would "
                f"come from their prior: call ordered_guide, or evidence_guide if labels are "
                f"latent, in the guide, or make it by AutoNMM(model)"
            )
    trace.compute_log_prob()
    return trace


def _check_particles(pair: tuple, one: poutine.Trace, many: poutine.Trace) -> None:
    """A particle of a vectorized run of the model, run again alone, has the same densities."""

    def of_particle(value: Tensor, event_dim: int, frames: Any) -> Tensor:
        dims = [f.dim - event_dim for f in frames if f.name == "num_particles_vectorized"]
        shared = not dims or value.dim() < -dims[0] or value.shape[dims[0]] == 1
        return value if shared else value.select(dims[0], 1)

    alone = one.copy()
    for name, site in _sites(alone):
        if name in many and not site["is_observed"]:
            event_dim = getattr(site["fn"], "event_dim", 1)  # of a subsample
            frames, value = many.nodes[name]["cond_indep_stack"], many.nodes[name]["value"]
            value = of_particle(_plain(value), event_dim, frames)
            alone.nodes[name] = {**site, "value": value.reshape(site["value"].shape)}
    runs = []
    for seed in (0, 1):
        with pyro.validation_enabled(True), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trace = _replayed(pair, alone)
        runs.append({name: _plain(site["log_prob_sum"]) for name, site in _sites(trace)})
    first, again = runs
    if any(not torch.equal(value, again[name]) for name, value in first.items()):
        return  # the program has random numbers beside its sites, such as dropout
    for name in first.keys() & many.nodes.keys():
        value, site = first[name], many.nodes[name]
        among = of_particle(_plain(site["log_prob"]), 0, site["cond_indep_stack"]).sum()
        if (among - value).abs() > 1e-3 * (1 + value.abs()):
            raise ValueError(
                f"site {name!r} has the log-probability {value:.6g} at the values of one "
                f"particle, and {among:.6g} among vectorized particles: it reads values of "
                f"another particle. Index from the right, as values[..., i], sum over nodes by "
                f"sum(-1), and take a value for each label by Vindex(values[..., None, :])"
                f"[..., y], with one None more for each plate"
            )


def _check_labels(pair: tuple, run: tuple[poutine.Trace, poutine.Trace]) -> None:
    """Sites below latent labels, at other labels: are they tracked, and are they the evidence?"""
    before, guide_trace = run
    for name, site in _sites(guide_trace):
        draw = site["fn"]
        while hasattr(draw, "base_dist"):
            draw = draw.base_dist
        if isinstance(draw, EvidenceConditional) and kind_of(name) == "c and y":
            labels, evidence = beside(name, "y"), _plain(draw.data)
            if evidence.shape[-2] != draw.hood.num_nodes:
                continue
            old = _plain(guide_trace.nodes[labels]["value"])
            evidence = evidence[..., draw.observed_rows.nodes, :].expand(*old.shape, -1)
            possible = evidence.isfinite()
            # Other labels than before, where a node has others.
            others = possible.scatter(-1, old.unsqueeze(-1), False)
            possible = others.where(others.any(-1, keepdim=True), possible).to(evidence)
            new = torch.multinomial(possible.flatten(0, -2), 1).view_as(old)
            below = _below(pair, labels, name, new, before)
            totals = [evidence.gather(-1, y.unsqueeze(-1)).sum(-1) for y in (new, old)]
            frames = {frame for _, other in _sites(before) for frame in other["cond_indep_stack"]}
            whole = all(f.size == (f.full_size or f.size) for f in frames)
            latent = not all(other["is_observed"] for other, _ in below)
            latent = latent or any(is_enumerated(other) for _, other in _sites(before))
            # A subsample, and latent sites below the labels, have evidence of their own.
            if site["mask"] is None and whole and not latent:
                _compare_evidence(name, below, ((totals[0] - totals[1]) * site["scale"]).sum())
        elif isinstance(draw, ChosenLabels) and name in before:
            old = _plain(site["value"])
            new = (old + torch.randint_like(old, 1, draw.num_classes)) % draw.num_classes
            _below(pair, name, name, new, before)


def _below(
    pair: tuple, labels: str, drawn: str, new: Tensor, before: poutine.Trace
) -> list[tuple[Any, Tensor]]:
    """Sites that depend on labels, and by how much they change at ``new`` ones."""
    changed = before.copy()
    changed.nodes[labels] = {**before.nodes[labels], "value": new}
    after, below = _replayed(pair, changed), []
    field = {beside(labels, kind) for kind in ("c", "y", "z", "u")} | {labels}
    for name, site in _sites(before):
        if name in field or name not in after.nodes:
            continue
        sums = [_plain(trace.nodes[name]["log_prob_sum"]).double() for trace in (before, after)]
        if torch.equal(*sums):
            continue
        refuse_lost(name, labels, site["fn"], site["log_prob_sum"], drawn)
        below.append((site, sums[1] - sums[0]))
    return below


def _compare_evidence(name: str, below: list[tuple[Any, Tensor]], evidence: Tensor) -> None:
    change = sum((change for _, change in below), torch.zeros_like(evidence.double()))
    if (change - evidence).abs() > 1e-3 * (1 + evidence.abs() + change.abs()):
        names = ", ".join(repr(str(site["name"])) for site, _ in below) or "no observed site"
        warnings.warn(
            f"at other labels {beside(name, 'y')} the log-likelihood of {names} changes by "
            f"{change:.4g} nats, but the evidence of evidence_guide by {evidence:.4g}: the bound "
            f"is looser than it need be. Give the log-likelihood of each node's observation at "
            f"each label, with the scales of the sites; of fields below, only Chains() have it",
            stacklevel=4,
        )
