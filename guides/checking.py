# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A check of a user's program: what Pyro would count wrongly, or lose track of, without a word."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceGraph_ELBO
from pyro.infer.tracegraph_elbo import TrackNonReparam
from pyro.ops.provenance import get_provenance
from torch import Tensor

from pyro_nmm import ChosenLabels, EvidenceConditional
from pyro_nmm.arguments import check_integers
from pyro_nmm.models.plates import beside, check_site, kind_of
from pyro_nmm.provenance import untracked

#: Particles of a vectorized run. Two would do: a site that counts them repeatedly counts twice.
PARTICLES = 4
#: Standard errors between two means: about one in ten thousand right programs is refused.
ERRORS = 5.0


class ProgramCheck(NamedTuple):
    """Mean losses, in nats, and the standard error of their difference."""

    loss: float  #: one particle at a time
    vectorized_loss: float
    standard_error: float


def check_program(
    model: Callable, guide: Callable, *args: Any, num_runs: int = 40, **kwargs: Any
) -> ProgramCheck:
    r"""Check a pair of Pyro programs with a field before its first fit.

    The check runs the pair under ``TraceGraph_ELBO`` with Pyro's validation, with one particle at a
    time and with vectorized particles, and refuses it if

    * Pyro's validation or a check of this library does,
    * a site has a dimension of no plate, which would count particles or labellings repeatedly,
    * a particle alone has another log-probability than among vectorized ones,
    * the mean log-probability of a site differs between the two kinds of runs,
    * the loss with the same random seed differs without validation,
    * Pyro has lost track of a site below latent labels, which biases ``TraceGraph_ELBO``.

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
    ValueError: site 'x' has values or parameters of batch shape (4, 4, 4), whose dimension -3...

    :param args, kwargs: of model and guide.
    :param int num_runs: of one particle, and as many vectorized particles.
    :return: the mean losses. Random numbers and Pyro's store are left as they were.
    :raises ValueError: with the site and the cure. Cost: about twice ``num_runs`` runs of the pair.
    """
    check_integers(2 * PARTICLES, num_runs=num_runs)
    program = model, guide, args, kwargs
    store = pyro.get_param_store()
    with torch.random.fork_rng(devices=[]), store.scope(store.get_state()):
        with pyro.validation_enabled(True):
            one = _log_probs(program, 1, num_runs)
            _check_labels(program)
            try:
                many = _log_probs(program, PARTICLES, num_runs // PARTICLES)
            except RuntimeError as failure:
                raise ValueError(
                    f"with vectorized particles the program fails: {str(failure).splitlines()[0]}. "
                    f"Values of particles have more dimensions on the left: write kappa[..., None, "
                    f"None] * probs, with one None more for each plate"
                ) from failure
            _check_particles(program)
        _compare(one, many)
        _check_without_validation(program)
    loss, other = (-torch.stack(list(sites.values())).sum(0) for sites in (one, many))
    error = _error_of_difference(loss, other)
    return ProgramCheck(loss.mean().item(), other.mean().item(), error.item())


def _elbo(particles: int) -> TraceGraph_ELBO:
    return TraceGraph_ELBO(num_particles=particles, vectorize_particles=particles > 1)


def _sites(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "sample")


def _plain(value: Any) -> Tensor:
    return untracked(value.detach())[0][0]


def _error_of_difference(first: Tensor, second: Tensor) -> Tensor:
    """Standard error of the difference between two means."""
    return (first.var() / len(first) + second.var() / len(second)).sqrt()


def _log_probs(program: tuple, particles: int, runs: int) -> dict[tuple[str, str], Tensor]:
    """``(runs,)``: what each site of model and guide adds to the bound of a particle."""
    elbo, totals = _elbo(particles), defaultdict(list)
    for _ in range(runs):
        for pair in elbo._get_traces(*program):
            for kind, trace, sign in zip(("model", "guide"), pair, (1, -1), strict=True):
                for name, site in _sites(trace):
                    check_site(site)
                    total = _plain(site["log_prob_sum"]).double().cpu()
                    totals[kind, name].append(sign * total / particles)
    return {key: torch.stack(values) for key, values in totals.items()}


def _run(program: tuple, particles: int) -> tuple[poutine.Trace, poutine.Trace]:
    """One run of model and guide, with the subsamples of plates, which losses leave out."""
    model, guide, args, kwargs = program
    elbo = _elbo(particles)
    if particles > 1:
        elbo._guess_max_plate_nesting(model, guide, args, kwargs)
        model, guide = map(elbo._vectorized_num_particles, (model, guide))
    with TrackNonReparam():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        return _replayed((model, guide, args, kwargs), guide_trace), guide_trace


def _replayed(program: tuple, values: poutine.Trace) -> poutine.Trace:
    """The model at the values of a trace."""
    model, _, args, kwargs = program
    trace = poutine.trace(poutine.replay(model, trace=values)).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    return trace


def _check_particles(program: tuple) -> None:
    """Each particle of a vectorized run of the model, run again alone, has the same densities."""
    (one, _), (many, _) = _run(program, 1), _run(program, PARTICLES)

    def of_particle(value: Tensor, number: int, event_dim: int, frames: Any) -> Tensor:
        dims = [f.dim - event_dim for f in frames if f.name == "num_particles_vectorized"]
        shared = not dims or value.dim() < -dims[0] or value.shape[dims[0]] == 1
        return value if shared else value.select(dims[0], number)

    for number in range(PARTICLES):
        alone = one.copy()
        for name, site in _sites(alone):
            if name in many and not site["is_observed"]:
                event_dim = getattr(site["fn"], "event_dim", 1)  # of a subsample
                frames, value = many.nodes[name]["cond_indep_stack"], many.nodes[name]["value"]
                value = of_particle(_plain(value), number, event_dim, frames)
                alone.nodes[name] = {**site, "value": value.reshape(site["value"].shape)}
        runs = (_replayed(program, alone) for _ in range(2))
        first, again = ({k: _plain(s["log_prob_sum"]) for k, s in _sites(run)} for run in runs)
        if any(not torch.equal(value, again[name]) for name, value in first.items()):
            return  # the program has random numbers beside its sites, such as dropout
        for name in first.keys() & many.nodes.keys():
            value, site = first[name], many.nodes[name]
            log_prob = _plain(site["log_prob"])
            among = of_particle(log_prob, number, 0, site["cond_indep_stack"]).sum()
            if (among - value).abs() > 1e-3 * (1 + value.abs()):
                raise ValueError(
                    f"site {name!r} has the log-probability {value:.6g} at the values of one "
                    f"particle, and {among:.6g} among vectorized particles: it reads values of "
                    f"another particle. Index from the right, as values[..., i], sum over nodes by "
                    f"sum(-1), and take a value for each label by Vindex(values[..., None, :])"
                    f"[..., y], with one None more for each plate"
                )


def _compare(one: dict, many: dict) -> None:
    for place in one.keys() & many.keys():
        first, second = one[place], many[place]
        tolerance = ERRORS * _error_of_difference(first, second) + 1e-4 * (1 + first.mean().abs())
        if (first.mean() - second.mean()).abs() > tolerance:
            program, site = place
            raise ValueError(
                f"site {site!r} of the {program} has a mean log-probability of {first.mean():.4g} "
                f"with one particle and of {second.mean():.4g} with vectorized particles: give "
                f"each dimension a plate, and index from the right, as values[..., i]"
            )


def _check_without_validation(program: tuple) -> None:
    losses = []
    for validate in (True, True, False):
        with pyro.validation_enabled(validate), torch.random.fork_rng(devices=[]):
            losses.append(_elbo(PARTICLES).loss(*program[:2], *program[2], **program[3]))
    if losses[0] != losses[1]:
        return  # it has a state, such as chains
    if abs(losses[0] - losses[2]) > 1e-4 * (1 + abs(losses[0])):
        raise ValueError(
            f"the loss is {losses[0]:.6g} with pyro.enable_validation and {losses[2]:.6g} without, "
            f"with the same random seed: the program must not depend on validation"
        )


def _check_labels(program: tuple) -> None:
    """Sites below latent labels, at other labels: are they tracked, and are they the evidence?"""
    before, guide_trace = _run(program, 1)
    for name, site in _sites(guide_trace):
        draw = site["fn"]
        while hasattr(draw, "base_dist"):
            draw = draw.base_dist
        if isinstance(draw, EvidenceConditional) and kind_of(name) == "c and y":
            labels, evidence = beside(name, "y"), _plain(draw.evidence)
            if evidence.shape[-2] != draw.hood.num_nodes:
                continue
            old = _plain(guide_trace.nodes[labels]["value"])
            evidence = evidence[..., draw.observed_rows.nodes, :].expand(*old.shape, -1)
            possible = evidence.isfinite().to(evidence).flatten(0, -2)
            new = torch.multinomial(possible, 1).view_as(old)
            below = _below(program, labels, name, new, before)
            totals = [evidence.gather(-1, y.unsqueeze(-1)).sum(-1) for y in (new, old)]
            frames = {frame for _, other in _sites(before) for frame in other["cond_indep_stack"]}
            whole = all(f.size == (f.full_size or f.size) for f in frames)
            latent = not all(other["is_observed"] for other, _ in below)
            # A subsample, and latent sites below the labels, have evidence of their own.
            if site["mask"] is None and whole and not latent:
                _compare_evidence(name, below, ((totals[0] - totals[1]) * site["scale"]).sum())
        elif isinstance(draw, ChosenLabels) and name in before:
            old = _plain(site["value"])
            _below(program, name, name, torch.randint_like(old, draw.num_classes), before)


def _below(
    program: tuple, labels: str, drawn: str, new: Tensor, before: poutine.Trace
) -> list[tuple[Any, Tensor]]:
    """Sites that depend on labels, and by how much they change at ``new`` ones."""
    changed = before.copy()
    changed.nodes[labels] = {**before.nodes[labels], "value": new}
    after, below = _replayed(program, changed), []
    field = {beside(labels, kind) for kind in ("c", "y", "z", "u")} | {labels}
    for name, site in _sites(before):
        if name in field or name not in after.nodes:
            continue
        pair = [_plain(trace.nodes[name]["log_prob_sum"]).double() for trace in (before, after)]
        if torch.equal(*pair):
            continue
        if drawn not in get_provenance(site["log_prob_sum"]):
            raise ValueError(
                f"site {name!r} depends on the labels {labels!r}, but Pyro has lost track of it, "
                f"and TraceGraph_ELBO would be biased: assignments such as out[i] = y, NumPy, "
                f"tolist() and torch.vmap lose it; indexing, gather, torch.where and stack keep it"
            )
        below.append((site, pair[1] - pair[0]))
    return below


def _compare_evidence(name: str, below: list[tuple[Any, Tensor]], evidence: Tensor) -> None:
    change = sum((change for _, change in below), torch.zeros_like(evidence.double()))
    if (change - evidence).abs() > 1e-3 * (1 + evidence.abs() + change.abs()):
        names = ", ".join(repr(str(site["name"])) for site, _ in below) or "no observed site"
        warnings.warn(
            f"at other labels {beside(name, 'y')} the log-likelihood of {names} changes by "
            f"{change:.4g} nats, but the evidence of evidence_guide by {evidence:.4g}: the bound "
            f"is looser than it need be. Give the log-likelihood of each node's observation at "
            f"each label, with the scales of the sites",
            stacklevel=4,
        )
