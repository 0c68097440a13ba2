# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fields of a Pyro program: where its traces have them, and the evidence of their labels."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from pyro.distributions import Independent
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nmm import EvidenceConditional, OrderedConditional
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.models.plates import beside, kind_of

#: A run of a program with given values of its sites.
Run = Callable[[dict[str, Tensor]], Any]


class Field(NamedTuple):
    """A :func:`~pyro_nmm.models.nmm` of a program, as a run of the program left it."""

    name: str  #: of the site of its choices
    latent: bool  #: whether its labels are
    prior: Parameters
    observed: Tensor | None
    trace: Any

    def site(self, kind: str) -> str:
        """The name of its site ``z``, ``u`` or ``y``."""
        return beside(self.name, kind)

    @property
    def names(self) -> set[str]:
        return {self.name, *map(self.site, "zuy")} & self.trace.nodes.keys()

    @property
    def collapsed(self) -> bool:
        return self.site("z") not in self.trace

    def labels(self) -> Tensor:
        """``(..., N)``, zero where not ``observed``."""
        y = self.trace.nodes[self.site("y")]["value"]
        return self._of_nodes(y.movedim(-1, 0)).movedim(0, -1)

    def evidence(self, run: Run) -> Tensor:
        """``(..., N, C)`` of latent labels by :func:`evidence_of`, zero where not ``observed``."""
        return self._of_nodes(evidence_of(run, self).movedim(-2, 0)).movedim(0, -2)

    def _of_nodes(self, values: Tensor) -> Tensor:
        hood = self.prior.hood
        nodes = hood.restrict(self.observed).nodes
        return values.new_zeros(hood.num_nodes, *values.shape[1:]).index_copy(0, nodes, values)

    def conditional(self, run: Run, order: Tensor | None = None) -> InOrder:
        """Its choices given its labels; or both given the rest of the program."""
        prior = self.prior  # which keeps what it computes beside its fields
        hood, alpha, logits, channel = prior.hood, prior.alpha, prior.logits, prior.channel
        if not self.latent and channel.certain:
            y = self.labels()
            given = hood, alpha, logits, y, self.observed, order
            return OrderedConditional(*given, relabel=channel)
        evidence = (
            self.evidence(run) if self.latent else self.prior.evidence(self.labels(), self.observed)
        )
        arguments = hood, self.prior.table, logits, evidence, self.observed, order
        return EvidenceConditional(*arguments, relabels=not channel.keeps)


def fields_of(trace: Any, latent: Iterable[str]) -> dict[str, Field]:
    """The fields of a run by the names of their choices, in order, and which labels are latent."""
    fields = {}
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and "nmm" in site["infer"] and kind_of(name) == "c":
            prior, observed = site["infer"]["nmm"]
            field = Field(name, beside(name, "y") in latent, prior, observed, trace)
            if field.latent and not prior.channel.keeps:
                raise ValueError(
                    f"field {name!r} has latent labels and edges that relabel: observe its labels, "
                    f"or leave out relabel"
                )
            fields[name] = field
    return fields


def evidence_of(run: Run, field: Field) -> Tensor:
    r"""
    ``(..., n, C)``: the log-likelihood of the rest of a program, in nats, at every label of every
    node, by a run with each label in turn. Cost: ``C + 1`` runs.

    :raises ValueError: where it is no sum over nodes, which a run with random labels shows.
    """
    y, size = field.trace.nodes[field.site("y")]["value"], field.prior.num_classes

    def terms(labels: Tensor) -> dict[str, tuple[Tensor, bool]]:
        return dict(_terms(run({field.site("y"): labels}), field, y.shape[-1]))

    columns = [terms(torch.full_like(y, label)) for label in range(size)]
    labels = torch.randint_like(y, size)
    evidence = field.prior.logits.new_zeros(*y.shape, size)
    for name, (value, by_node) in terms(labels).items():
        table = torch.stack([column[name][0] for column in columns], -1)
        if by_node:
            evidence = evidence + table
            table = table.gather(-1, labels.expand(table.shape[:-1])[..., None])
        if not torch.allclose(table, value[..., None].expand_as(table), 1e-4, 1e-5):
            raise ValueError(
                f"the log-probability of site {name!r} is no sum over the nodes of "
                f"{field.site('y')!r}: let each entry of its dimension of nodes, right of all "
                f"plates or in a node_plate, depend on the label of its own node; or fit a "
                f"MixtureGuide"
            )
    return evidence


def _terms(trace: Any, field: Field, size: int) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Log-probabilities of the other sites, ``(..., n)`` where they have a dimension of nodes."""
    nodes = trace.nodes
    for name, site in nodes.items():
        if site["type"] != "sample":
            continue
        # A field that is drawn later has no part.
        later = "nmm" in site["infer"] and not nodes[beside(name, "c")]["is_observed"]
        if name not in field.names and not later and not site_is_subsample(site):
            yield name, _by_node(trace, site, field, size)


def _by_node(trace: Any, site: Any, field: Field, size: int) -> tuple[Tensor, bool]:
    fn, events = site["fn"], 0
    while isinstance(fn, Independent):
        fn, events = fn.base_dist, events + fn.reinterpreted_batch_ndims
    log_prob = fn.log_prob(site["value"])
    # The field's own scale, such as that of its plates, is one of its evidence too.
    scale, mask = site["scale"] / field.trace.nodes[field.name]["scale"], site["mask"]
    scale, mask = (
        part.reshape(part.shape + (1,) * events) if isinstance(part, Tensor) else part
        for part in (scale, mask)
    )
    log_prob = scale_and_mask(log_prob, scale, mask)
    batch = log_prob.dim() - events
    outside = {f.name for f in trace.nodes[field.name]["cond_indep_stack"]}
    plates = [f for f in site["cond_indep_stack"] if f.dim is not None and f.name not in outside]
    dims = [dim for dim in range(batch, log_prob.dim()) if log_prob.shape[dim] == size]
    over = [frame for frame in plates if (frame.full_size or frame.size) == size]
    for dim in reversed(range(batch, log_prob.dim())):
        log_prob = log_prob if dim in dims[:1] else log_prob.sum(dim)
    if not dims and over:
        nodes = over[0]
        log_prob = log_prob.unsqueeze(-1).transpose(nodes.dim - 1, -1)
        if nodes.size < size:
            full = log_prob.new_zeros(*log_prob.shape[:-1], size)
            log_prob = full.index_copy(-1, trace.nodes[nodes.name]["value"], log_prob)
        plates.remove(nodes)
    by_node = bool(dims or over)
    for frame in plates:
        log_prob = log_prob.sum(frame.dim - by_node, keepdim=True)
    while log_prob.dim() > by_node and log_prob.shape[0] == 1:
        log_prob = log_prob[0]
    return log_prob, by_node
