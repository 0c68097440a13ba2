# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fields of a Pyro program: where its traces have them, and the evidence of their labels."""

from collections.abc import Callable, Set
from itertools import product
from typing import Any, NamedTuple

import torch
from pyro.distributions import Categorical, Delta, Independent, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import EvidenceConditional, NeighborMixture, OrderedConditional
from pyro_nmm.distributions.factors import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.models.plates import beside, kind_of
from pyro_nmm.relabel import KEEP

#: A run of a program with given values of its sites.
Run = Callable[[dict[str, Tensor]], Any]


class Field(NamedTuple):
    """A :func:`~pyro_nmm.models.nmm` of a program, as a run of the program left it."""

    name: str  #: of the site of its choices
    latents: Set[str]  #: names of the program's latent sites
    prior: Parameters
    observed: Tensor | None
    trace: Any

    def site(self, kind: str) -> str:
        """The name of its site ``z``, ``u`` or ``y``."""
        return beside(self.name, kind)

    def value(self, kind: str) -> Tensor:
        return self.trace.nodes[self.site(kind)]["value"]

    @property
    def parameters(self) -> tuple:
        """``hood``, ``alpha``, ``logits`` and the channel."""
        prior = self.prior
        return prior.hood, prior.alpha, prior.logits, prior.channel

    @property
    def latent(self) -> bool:
        """Whether its labels are."""
        return self.site("y") in self.latents

    @property
    def names(self) -> set[str]:
        return set(map(self.site, "czuy")) & self.trace.nodes.keys()

    @property
    def collapsed(self) -> bool:
        return self.site("z") not in self.trace

    @property
    def unknown(self) -> list[str]:
        """The sites that a draw of its conditional has: choices, then labels of its own."""
        borrowed = [] if self.prior.channel.certain else ["u"]
        return [self.name, *map(self.site, "y" if self.latent else borrowed)]

    def labels(self) -> Tensor:
        """``(..., N)``, zero where not ``observed``."""
        return self._of_nodes(self.value("y").movedim(-1, 0)).movedim(0, -1)

    def evidence(self, run: Run, given_later: bool = True) -> Tensor:
        """``(..., N, C)`` of latent labels by :func:`evidence_of`, zero where not ``observed``."""
        return self._of_nodes(evidence_of(run, self, given_later).movedim(-2, 0)).movedim(0, -2)

    def _of_nodes(self, values: Tensor) -> Tensor:
        hood = self.prior.hood
        nodes = hood.restrict(self.observed).nodes
        return values.new_zeros(hood.num_nodes, *values.shape[1:]).index_copy(0, nodes, values)

    def conditional(self, run: Run, order: Tensor | None = None) -> InOrder:
        """Its choices given its labels, or both given the rest of the program."""
        hood, alpha, logits, channel = self.parameters
        if not self.latent and channel.certain:
            given = hood, alpha, logits, self.labels(), self.observed, order
            return OrderedConditional(*given, relabel=channel)
        shown = () if self.latent else (self.labels(), self.observed)
        evidence = self.prior.evidence(*shown) if shown else self.evidence(run)
        arguments = hood, self.prior.table, logits, evidence, self.observed, order
        return EvidenceConditional(*arguments, relabels=not channel.keeps)

    def posterior(self, run: Run, num_samples: int | None, num_sweeps: int) -> Any:
        """Its posterior given the rest of the program; a list of posteriors for a batch."""
        hood, alpha, logits, channel = self.parameters
        data = self.evidence(run) if self.latent else one_hot(self.labels(), alpha.shape[-1])
        shape, posteriors = self.value("c").shape[:-1], []
        parts = (
            part.detach().expand(*shape, *part.shape[-dim:]).reshape(-1, *part.shape[-dim:])
            for part, dim in ((self.prior.table, 2), (logits, 1), (data, 2))
        )
        for table, scores, of_nodes, relabel in zip(*parts, channel.split(shape), strict=True):
            if channel.keeps:
                w = of_nodes if self.latent else of_nodes.to(table).log()
                q = EvidenceConditional(hood, table, scores, w, self.observed)
                posteriors.append(q.posterior(num_samples, num_sweeps=num_sweeps))
            else:  # sweeps would have borrowed labels
                mix = NeighborMixture(hood, table, scores, relabel=relabel)
                y = of_nodes.argmax(-1)
                posteriors.append(mix.condition(y, self.observed, num_samples, weighted=True))
        return posteriors if shape else posteriors[0]


def fields_of(trace: Any, latents: Set[str]) -> dict[str, Field]:
    """The fields of a run by the names of their choices, in order, and which sites are latent."""
    fields = {}
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and "nmm" in site["infer"] and kind_of(name) == "c":
            prior, observed = site["infer"]["nmm"]
            field = fields[name] = Field(name, latents, prior, observed, trace)
            if field.latent and not field.prior.channel.keeps:
                cure = "observe its labels, or leave out relabel"
                raise ValueError(f"field {name!r} has latent labels and edges that relabel: {cure}")
    return fields


def evidence_of(run: Run, field: Field, given_later: bool = True, parts: Any = None) -> Tensor:
    r"""``(..., n, C)``: the log-likelihood of the rest of a program, in nats, at every label of
    every node: ``C + 1`` runs, with each label in turn and with random labels.

    :param given_later: whether states of fields below, without ``z``, belong to the rest.
    :param parts: plates that subsample below the labels. Labels depend on all of their elements,
        so that each run becomes several, which together have all.
    :raises ValueError: where it is no sum over nodes, which the random labels show.
    """
    trace, name_y, parts = field.trace, field.site("y"), parts or {}
    y, size, names = trace.nodes[name_y]["value"], field.prior.num_classes, list(trace.nodes)
    sites = ((name, trace.nodes[name]) for name in names[names.index(name_y) + 1 :])
    below = {k: s for k, s in sites if s["type"] == "sample" and not site_is_subsample(s)}
    later = [name for name, site in below.items() if "nmm" in site["infer"]]
    fixed = {name: trace.nodes[name]["value"] for name in field.names.union(later)}
    rest = [k for k in below if k not in later or (given_later and kind_of(k) != "z")]

    def terms(values: dict[str, Tensor]) -> dict[str, dict[Any, Tensor]]:
        tables: dict[str, dict[Any, Tensor]] = {name: {} for name in rest}
        for starts in product(*(range(0, f.full_size, f.size) for f in parts.values())):
            places = {name: start + torch.arange(parts[name].size, device=y.device)
                      for name, start in zip(parts, starts, strict=True)}  # fmt: skip
            subsamples = {name: place % parts[name].full_size for name, place in places.items()}
            changed = run(fixed | values | subsamples)
            for name in rest:
                _add_tables(tables[name], changed, name, field, places)
        return tables

    labels = torch.randint_like(y, size)
    columns = [terms({name_y: torch.full_like(y, label)}) for label in range(size)]
    at_random = terms({name_y: labels})

    def differ(name: str, tables: dict, kind: Any = "all") -> bool:
        return not torch.allclose(tables[name][kind], at_random[name][kind], 1e-6, 1e-6)

    depend = [name for name in rest if any(differ(name, column) for column in columns)]
    inside = {f.name: f for name in depend for f in _frames(below[name], field)}
    part = {name: f for name, f in inside.items() if (f.full_size or 0) > f.size}
    if part and not parts:
        local = [k for k, s in below.items() if k in field.latents and k not in later
                 and any(f.name in part for f in s["cond_indep_stack"])]  # fmt: skip
        if local or not part.keys() <= field.latents:
            raise ValueError(
                f"labels {name_y!r} depend on all elements of plates {[*part]}, which subsample"
                f"{f' and have latent sites {local}' if local else ''}: leave out subsample_size "
                f"and create_plates of these plates"
            )
        return evidence_of(run, field, given_later, part)
    evidence, found = field.prior.logits.new_zeros(*y.shape, size), {}
    for name, tables in at_random.items():
        for kind in list(tables)[1:]:
            table = torch.stack([column[name][kind] for column in columns], -1)
            if name not in depend and not table.requires_grad:
                continue  # a constant
            shape = torch.broadcast_shapes(table.shape[:-1], y.shape)
            picked = table.expand(*shape, size).gather(-1, labels.expand(shape)[..., None])
            if torch.allclose(picked[..., 0], tables[kind].expand(shape), 1e-4, 1e-5):
                evidence, found[name] = evidence + table, kind
                break
        else:
            if name in depend:
                what = f"log-probability of site {name!r} is no sum over the nodes of {name_y!r}"
                if len(tables) == 1:  # perhaps of the measured nodes alone
                    cure = "give each node an entry, and leave some out by .mask(measured), as in "
                    cure += "Normal(loc, scale).mask(measured).to_event(1); or fit a MixtureGuide"
                    number = y.shape[-1]
                    raise ValueError(f"the {what}, without a dimension of {number} nodes: {cure}")
                raise ValueError(
                    f"the {what}: let each entry of its dimension of nodes, right of all plates or "
                    f"in a node_plate, depend on the label of its own node; or fit a MixtureGuide"
                )
    undrawn = [k for k in later if kind_of(k) == "y" and not below[k]["is_observed"]]
    if undrawn and depend and not given_later:
        others = {k: trace.nodes[k]["infer"]["nmm"][0].num_classes for k in undrawn}
        changed = terms({k: torch.randint_like(fixed[k], c) for k, c in others.items()}
                        | {name_y: labels})  # fmt: skip
        for name in depend:
            if differ(name, changed, found[name]):
                raise ValueError(
                    f"site {name!r} depends on {name_y!r} and on labels that are drawn later, of "
                    f"{undrawn}: use estimator=Chains(...), with which each field is drawn given "
                    f"the states of the others"
                )
    return evidence


def _frames(site: Any, field: Field) -> list:
    """Vectorized plates around a site and not around the field."""
    outside = {frame.name for frame in field.trace.nodes[field.name]["cond_indep_stack"]}
    return [f for f in site["cond_indep_stack"] if f.dim is not None and f.name not in outside]


def _add_tables(tables: dict, trace: Any, name: str, field: Field, places: dict) -> None:
    """Adds log-probabilities of a site: ``all``, and ``(..., n)`` by dimensions of size ``n``."""
    frames, size = _frames(trace.nodes[name], field), field.value("y").shape[-1]
    # Places of plates that subsample count once, and sites of no such plate at the first ones.
    if any(place[0] > 0 for name, place in places.items() if name not in {f.name for f in frames}):
        return
    log_prob, events = _unsummed(trace, name, field, frames)
    for frame in frames:
        if frame.name in places:
            new = places[frame.name] < frame.full_size
            log_prob = log_prob.where(new.view(-1, *[1] * (events - frame.dim - 1)), 0.0)
    all_of = [tables["all"]] if "all" in tables else []
    tables["all"] = torch.cat([*all_of, log_prob.flatten()])
    inner = dict.fromkeys(range(-events, 0)) | {f.dim - events: f for f in frames}
    for dim, frame in inner.items():
        if size == (log_prob.shape[dim] if frame is None else frame.full_size or frame.size):
            others = [other for other in inner if other != dim]
            table = log_prob.sum(others, keepdim=True) if others else log_prob
            table = table.unsqueeze(-1).transpose(dim - 1, -1)
            table = table.reshape(*table.shape[: table.dim() - events - 1], -1)
            if frame is not None:
                full = table.new_zeros(*table.shape[:-1], size)
                table = full.index_add(-1, trace.nodes[frame.name]["value"], table)
            while table.dim() > 1 and table.shape[0] == 1:
                table = table[0]
            tables[dim] = table + tables[dim] if dim in tables else table


def _unsummed(trace: Any, name: str, field: Field, frames: list) -> tuple[Tensor, int]:
    """Log-probabilities of a site before the sum over its event, and the event's dimensions."""
    site, events = trace.nodes[name], 0
    fn, mask = site["fn"], site["mask"]
    # The field's own scale, such as that of its plates, is one of its evidence too.
    scale = site["scale"] / field.trace.nodes[field.name]["scale"]
    for frame in frames:
        scale = scale * frame.size / (frame.full_size or frame.size)
    if "nmm" in site["infer"]:
        log_prob, events = _of_field(trace, name), 1
    else:
        if isinstance(fn, MaskedDistribution):
            fn, mask = fn.base_dist, fn._mask if mask is None else fn._mask & mask
        while isinstance(fn, Independent):
            fn, events = fn.base_dist, events + fn.reinterpreted_batch_ndims
        if isinstance(fn, Delta) and fn.event_dim and not torch.as_tensor(fn.log_density).any():
            fn, events = Delta(fn.v), events + fn.event_dim
        log_prob = fn.log_prob(site["value"])
    both = scale, mask
    scale, mask = (t.reshape(t.shape + (1,) * events) if isinstance(t, Tensor) else t for t in both)
    return scale_and_mask(log_prob, scale, mask), events


def _of_field(trace: Any, name: str) -> Tensor:
    """``(..., N)``: factors of a field's site by node or, of labels that it borrows, by source."""
    prior, observed = trace.nodes[name]["infer"]["nmm"]
    hood, value = prior.hood.restrict(observed), trace.nodes[name]["value"]
    rows, c = prior.of_rows(hood), trace.nodes[beside(name, "c")]["value"]
    if kind_of(name) == "c":
        terms = NeighborChoice(hood, rows.logits).log_terms(c)
    elif kind_of(name) == "y" and not rows.channel.certain:
        borrowed = trace.nodes[beside(name, "u")]["value"]
        terms = Categorical(rows.channel.shown_probs(hood, c, borrowed)).log_prob(value)
    else:
        chosen = rows.channel.chosen(hood, c) if rows.channel.certain else KEEP
        terms = ChosenLabels(prior.alpha, c, chosen).log_terms(value)
        sources = terms.new_zeros(*terms.shape[:-1], prior.alpha.shape[-2])
        return sources.scatter_add(-1, c.expand(terms.shape), terms)
    nodes = terms.new_zeros(*terms.shape[:-1], hood.num_nodes)
    return nodes.index_copy(-1, hood.nodes, terms)
