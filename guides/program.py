# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fields of a Pyro program: where its traces have them, and the evidence of their labels."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Set
from itertools import product
from typing import Any, NamedTuple

import torch
from pyro.distributions import Categorical, Delta, Dirichlet, Independent, MaskedDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.provenance import extract_provenance, get_provenance, track_provenance
from pyro.poutine.runtime import get_plates
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor
from torch.nn.functional import one_hot

from pyro_nmm import EvidenceConditional, NeighborMixture, OrderedConditional
from pyro_nmm.distributions.conditional import Conditional
from pyro_nmm.distributions.factors import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.joint import LogJoint
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.models.plates import kind_of
from pyro_nmm.ops.counts import posterior_alpha

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
        """The name of its site ``z``, ``u`` or ``y``; empty if it has none."""
        return site_of(self.trace, self.name, kind)

    def value(self, kind: str) -> Tensor:
        return self.trace.nodes[self.site(kind)]["value"]

    @property
    def latent(self) -> bool:
        """Whether its labels are."""
        return self.site("y") in self.latents

    @property
    def names(self) -> set[str]:
        return set(map(self.site, "czuy")) - {""}

    @property
    def collapsed(self) -> bool:
        return not self.site("z")

    @property
    def unknown(self) -> list[str]:
        """The sites that a draw of its conditional has: choices, then labels of its own."""
        borrowed = [] if self.prior.channel.keeps else ["u"]
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

    def conditional(self, run: Run, order: Tensor | None = None) -> Conditional:
        """Its choices given its labels, or both given the rest of the program."""
        prior, keeps = self.prior, self.prior.channel.keeps
        given = prior.hood, prior.alpha, prior.logits
        if not self.latent and keeps:
            return OrderedConditional(*given, self.labels(), self.observed, order)
        shown = None if self.latent else prior.evidence(self.labels(), self.observed)
        evidence = self.evidence(run) if shown is None else shown
        return EvidenceConditional(*given, evidence, self.observed, order, relabels=not keeps)

    @property
    def batch_shape(self) -> Size:
        return self.value("c").shape[:-1]

    def log_joint(self) -> LogJoint:
        """Of a :meth:`draw`, differentiable in the parameters of this run."""
        part = self.prior.of_rows(self.prior.hood.restrict(self.observed))
        return LogJoint(part, self.batch_shape)

    def distributions(self, states: dict[str, Tensor]) -> Tensor:
        """Label distributions given states, drawn."""
        return Dirichlet(posterior_alpha(self.prior.alpha, *self.draw(states))).sample()

    def draw(self, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Choices and labels."""
        c, *labels = (states[name] for name in self.unknown)
        return c, labels[0] if labels else self.value("y").expand(c.shape)

    def posterior(self, run: Run, num_samples: int | None, num_sweeps: int) -> Any:
        """Its posterior given the rest of the program; a list of posteriors for a batch."""
        prior, hood, channel = self.prior, self.prior.hood, self.prior.channel
        data = self.evidence(run) if self.latent else one_hot(self.labels(), prior.num_classes)
        shape, posteriors = self.batch_shape, []
        parts = (
            part.detach().expand(*shape, *part.shape[-dim:]).reshape(-1, *part.shape[-dim:])
            for part, dim in ((prior.alpha, 2), (prior.logits, 1), (data, 2))
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


def sample_sites(trace: Any) -> dict[str, Any]:
    """The sites of a run that draw or have data, without those of plates that subsample."""
    sites = trace.nodes.items()
    return {k: s for k, s in sites if s["type"] == "sample" and not site_is_subsample(s)}


def site_of(trace: Any, name: str, kind: str) -> str:
    """The site of a kind of the same field, whatever ``name_count`` does, or ``""``."""
    field = trace.nodes[name]["infer"]["nmm"]
    sites = (k for k, site in sample_sites(trace).items() if site["infer"].get("nmm") is field)
    return next((k for k in sites if kind_of(k) == kind), "")


def fields_of(trace: Any, latents: Set[str]) -> dict[str, Field]:
    """The fields of a run by the names of their choices, in order, and which sites are latent."""
    fields = {}
    for name, site in sample_sites(trace).items():
        if "nmm" in site["infer"] and kind_of(name) == "c":
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
    y, size, sites = trace.nodes[name_y]["value"], field.prior.num_classes, sample_sites(trace)
    below = {k: sites[k] for k in [*sites][[*sites].index(name_y) + 1 :]}
    later = [name for name, site in below.items() if "nmm" in site["infer"]]
    given = {k for k, s in below.items() if "nmm_counts" in s["infer"]}
    fixed = {name: trace.nodes[name]["value"] for name in field.names.union(later, given)}
    rest = [k for k in below if k not in later or (given_later and kind_of(k) != "z")]

    def terms(values: dict[str, Tensor]) -> dict[str, dict[Any, Tensor]]:
        tables: dict[str, dict[Any, Tensor]] = defaultdict(dict)
        for starts in product(*(range(0, f.full_size, f.size) for f in parts.values())):
            places = {
                name: start + torch.arange(parts[name].size, device=y.device)
                for name, start in zip(parts, starts, strict=True)
            }
            subsamples = {name: place % parts[name].full_size for name, place in places.items()}
            changed = run(fixed | values | subsamples)
            for term in [*_summed_terms(changed, rest, field), *_terms(changed, rest, field)]:
                frames[term.name] = term.frames
                _add_tables(tables[term.name], changed, term, field, places)
        return tables

    frames: dict[str, list] = {}
    labels = torch.randint_like(y, size)
    columns = [terms({name_y: torch.full_like(y, label)}) for label in range(size)]
    at_random = terms({name_y: labels})

    def differ(name: str, tables: dict, kind: Any = "all") -> bool:
        return not torch.allclose(tables[name][kind], at_random[name][kind], 1e-6, 1e-6)

    for name, tables in at_random.items():
        if tables["all"].isnan().any():
            raise ValueError(
                f"the log-probability of site {name!r} is nan: its data or parameters hold nan. "
                f"Leave nodes without data out by .mask(measured), and their data at a number"
            )
    depend = [name for name in at_random if any(differ(name, column) for column in columns)]
    inside = {f.name: f for name in depend for f in frames[name]}
    part = {name: f for name, f in inside.items() if (f.full_size or 0) > f.size}
    if part and not parts:
        local = [
            k
            for k, s in below.items()
            if k in field.latents
            and k not in later
            and any(f.name in part for f in s["cond_indep_stack"])
        ]
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
                if name in below and isinstance(below[name]["fn"], Unit):  # of pyro.factor
                    raise ValueError(
                        f"the {what}: give a pyro.factor one entry for each node, under "
                        f"node_plate(hood, y) as (nodes, y), or fit a MixtureGuide"
                    )
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
        changed = terms(
            {k: torch.randint_like(fixed[k], c) for k, c in others.items()} | {name_y: labels}
        )
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


class Term(NamedTuple):
    """Log-probabilities of a site, with its own dimensions on the right, ``events`` of them."""

    name: str
    log_prob: Tensor
    events: int
    frames: list  #: plates around the site, and not around the field
    nodes: dict[str, Tensor]  #: of entries of a :func:`node_plate` with an index


def _terms(trace: Any, names: list[str], field: Field) -> Iterator[Term]:
    """Of the sites that do not depend on an enumerated one."""
    summed = _depend_on_enumerated(trace, names)
    for name in names:
        if name not in summed:
            frames = _frames(trace.nodes[name], field)
            scale = _own_scale(trace.nodes[name], field, frames)
            log_prob, events = log_probs(trace, name, scale)
            yield Term(name, log_prob, events, frames, trace.nodes[name]["infer"].get("nodes", {}))


def _depend_on_enumerated(trace: Any, names: list[str]) -> list[str]:
    dims = {trace.nodes[name]["infer"].get("_enumerate_dim") for name in names} - {None}
    if not dims:
        return []
    shapes = {k: trace.nodes[k]["fn"].log_prob(trace.nodes[k]["value"]).shape for k in names}
    return [k for k, s in shapes.items() if any(len(s) >= -d and s[d] > 1 for d in dims)]


def _summed_terms(trace: Any, names: list[str], field: Field) -> Iterator[Term]:
    """Of enumerated sites and of those that depend on these, by Pyro's sum-product."""
    names = _depend_on_enumerated(trace, names)
    if not names:
        return
    trace.symbolize_dims()
    # Plates around the guide, such as particles, are none of the run's.
    known = set(trace.symbol_to_dim.values())
    around = {f.dim: chr(ord("A") + n) for n, f in enumerate(get_plates()) if f.dim not in known}
    factors: OrderedDict = OrderedDict()
    frames: dict[str, Any] = {}
    nodes: dict[str, Tensor] = {}
    sums: set[str] = set()
    for name in names:
        site = trace.nodes[name]
        symbols, infer = around | site["infer"]["_dim_to_symbol"], site["infer"]
        term = packed.pack(site["fn"].log_prob(site["value"]), symbols)
        term = packed.scale_and_mask(term, mask=packed.pack(site["mask"], symbols))
        stack = [f.name for f in site["cond_indep_stack"] if f.vectorized]
        ordinal = frozenset([*map(trace.plate_to_symbol.get, stack), *around.values()])
        factors.setdefault(ordinal, []).append(term)
        frames |= {symbols[f.dim]: f for f in _frames(site, field)}
        nodes |= infer.get("nodes", {})
        if "_enumerate_dim" in infer:
            sums.add(symbols[infer["_enumerate_dim"]])
    scales = [torch.as_tensor(trace.nodes[name]["scale"]) for name in names]
    if any((scale != scales[0]).any() for scale in scales):
        raise ValueError(f"sites {names} share an enumerated site: give them one scale")
    dims = trace.symbol_to_dim | {symbol: dim for dim, symbol in around.items()}
    for number, (ordinal, terms) in enumerate(contract_tensor_tree(factors, sums, {}).items()):
        plates = [frames[symbol] for symbol in ordinal if symbol in frames]
        scale = _own_scale(trace.nodes[names[0]], field, plates)
        for term in terms:
            log_prob = packed.unpack(term, dims) * scale
            yield Term(f"{' and '.join(names)} ({number})", log_prob, 0, plates, nodes)


def _add_tables(tables: dict, trace: Any, term: Term, field: Field, places: dict) -> None:
    """Adds log-probabilities of a site: ``all``, and ``(..., n)`` by dimensions of size ``n``."""
    frames, size = term.frames, field.value("y").shape[-1]
    # Places of plates that subsample count once, and sites of no such plate at the first ones.
    if any(place[0] > 0 for name, place in places.items() if name not in {f.name for f in frames}):
        return
    log_prob, events = term.log_prob, term.events
    for frame in frames:
        if frame.name in places:
            new = places[frame.name] < frame.full_size
            log_prob = log_prob.where(new.view(-1, *[1] * (events - frame.dim - 1)), 0.0)
    all_of = [tables["all"]] if "all" in tables else []
    tables["all"] = torch.cat([*all_of, log_prob.flatten()])
    inner = dict.fromkeys(range(-events, 0)) | {f.dim - events: f for f in frames}
    for dim, frame in inner.items():
        number = log_prob.shape[dim] if frame is None else frame.full_size or frame.size
        places_of = None if frame is None else term.nodes.get(frame.name)
        if size == number or places_of is not None:
            others = [other for other in inner if other != dim]
            table = log_prob.sum(others, keepdim=True) if others else log_prob
            table = table.unsqueeze(-1).transpose(dim - 1, -1)
            table = table.reshape(*table.shape[: table.dim() - events - 1], -1)
            if frame is not None:
                rows = trace.nodes[frame.name]["value"]
                rows = rows if places_of is None else places_of[rows]
                table = table.new_zeros(*table.shape[:-1], size).index_add(-1, rows, table)
            while table.dim() > 1 and table.shape[0] == 1:
                table = table[0]
            tables[dim] = table + tables[dim] if dim in tables else table


def log_probs(trace: Any, name: str, scale: Any) -> tuple[Tensor, int]:
    """Log-probabilities of a site before the sum over its event, and the event's dimensions."""
    site, events = trace.nodes[name], 0
    fn, mask = site["fn"], site["mask"]
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


def _own_scale(site: Any, field: Field, frames: list) -> Any:
    """The scale of a site as evidence: without its plates', and without the field's own."""
    scale = site["scale"] / field.trace.nodes[field.name]["scale"]
    for frame in frames:
        scale = scale * frame.size / (frame.full_size or frame.size)
    return scale


def _of_field(trace: Any, name: str) -> Tensor:
    """``(..., N)``: factors of a field's site by node or, of labels that it borrows, by source."""
    prior, observed = trace.nodes[name]["infer"]["nmm"]
    hood, value = prior.hood.restrict(observed), trace.nodes[name]["value"]
    rows, c = prior.of_rows(hood), trace.nodes[site_of(trace, name, "c")]["value"]
    if kind_of(name) == "c":
        terms = NeighborChoice(hood, rows.logits).log_terms(c)
    elif kind_of(name) == "y" and not rows.channel.keeps:
        borrowed = trace.nodes[site_of(trace, name, "u")]["value"]
        terms = Categorical(rows.channel.shown_probs(hood, c, borrowed)).log_prob(value)
    else:
        terms = ChosenLabels(prior.alpha, c).log_terms(value)
        sources = terms.new_zeros(*terms.shape[:-1], prior.alpha.shape[-2])
        return sources.scatter_add(-1, c.expand(terms.shape), terms)
    nodes = terms.new_zeros(*terms.shape[:-1], hood.num_nodes)
    return nodes.index_copy(-1, hood.nodes, terms)


def check_tracked(run: Run, field: Field) -> None:
    """Refuse sites below latent labels whose log-probabilities have lost track of these."""
    name, nodes = field.site("y"), field.trace.nodes
    sites = sample_sites(field.trace)
    later = (k for k, s in sites.items() if "nmm" in s["infer"])
    fixed = {k: nodes[k]["value"] for k in field.names.union(later)}
    y, size = fixed[name], field.prior.num_classes
    tracked = run(fixed | {name: track_provenance(y, frozenset([name]))})
    changed = run(fixed | {name: (y + 1) % size})
    for key in [*sites][[*sites].index(name) + 1 :]:
        site, other = tracked.nodes[key], changed.nodes[key]
        log_prob = site["fn"].log_prob(site["value"])
        plain: Any = extract_provenance(log_prob)[0]
        if not torch.equal(plain, other["fn"].log_prob(other["value"])):
            refuse_lost(key, name, site["fn"], log_prob, name)


def refuse_lost(site: str, labels: str, fn: Any, log_prob: Any, drawn: str) -> None:
    """Refuse a log-probability that depends on labels without provenance of their draw."""
    if drawn in get_provenance(log_prob):
        return
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    cause = (
        "assignments such as out[i] = y, NumPy, tolist() and torch.vmap lose it; indexing, gather, "
        "torch.where and stack keep it"
    )
    if any(isinstance(v, Tensor) and drawn in get_provenance(v) for v in vars(fn).values()):
        cause = f"its distribution {type(fn).__name__} loses it: use Trace_ELBO"
    raise ValueError(
        f"site {site!r} depends on the labels {labels!r}, but Pyro has lost track of it, and "
        f"TraceGraph_ELBO would be biased: {cause}"
    )
