# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fields of counts of a Pyro program."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from pyro_nmm.distributions.count_conditional import CountConditional
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.guides.program import Run
from pyro_nmm.models.plates import beside


class CountField(NamedTuple):
    """A :func:`~pyro_nmm.models.nmm_counts` of a program, with what samplers ask of a
    :class:`~pyro_nmm.guides.program.Field`. Its states are logarithms of label distributions."""

    name: str  #: of the site of its label distributions
    seen: str  #: of the site of its counts
    prior: Parameters
    observed: Tensor | None
    counts: Tensor
    latent: bool = False
    collapsed: bool = True

    def site(self, kind: str) -> str:
        return {"z": self.name, "y": self.seen}.get(kind, "")

    @property
    def names(self) -> set[str]:
        return {self.name, self.seen}

    @property
    def units(self) -> str:
        """The name of counts of choices among the states."""
        return beside(self.name, "choices of z")

    @property
    def unknown(self) -> list[str]:
        return [beside(self.name, "log z")]

    @property
    def batch_shape(self) -> Size:
        return torch.broadcast_shapes(self.prior.batch_shape, self.counts.shape[:-2])

    def conditional(self, run: Run, order: Tensor | None = None) -> CountConditional:
        rows = self.prior.of_rows(self.prior.hood.restrict(self.observed))
        return CountConditional(rows, self.counts, self.batch_shape)

    def log_joint(self) -> Callable[..., Tensor]:
        """Of counts of choices if there are any, else of label distributions."""
        q = self.conditional(dict)
        return lambda units, log_z: q.log_density(log_z) if units is None else q.log_joint(units)

    def draw(self, states: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        return states.get(self.units), states[self.unknown[0]]

    def distributions(self, log_z: Tensor) -> Tensor:
        """Of the type of ``alpha``, in which small shares underflow."""
        z = log_z.exp().to(self.prior.alpha)
        return z.clamp(min=torch.finfo(z.dtype).tiny)


def count_fields_of(trace: Any, latents: Set[str]) -> dict[str, CountField]:
    """The fields of counts of a run by the names of their label distributions, if latent."""
    sites = [(k, s) for k, s in trace.nodes.items() if "nmm_counts" in s.get("infer", ())]
    fields = {}
    for (name, site), (seen, counts) in zip(sites[::2], sites[1::2], strict=True):
        if name not in latents:
            continue
        if not counts["is_observed"]:
            raise ValueError(f"site {seen!r} has latent counts: give nmm_counts its y")
        prior, observed = site["infer"]["nmm_counts"]
        field = fields[name] = CountField(name, seen, prior, observed, counts["value"])
        shapes = tuple(field.batch_shape), tuple(site["value"].shape[:-2])
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"counts of site {seen!r} have the batch shape {shapes[0]}, but site {name!r} has "
                f"{shapes[1]}: put nmm_counts into a pyro.plate, so that each table of counts has "
                f"label distributions of its own"
            )
    return fields
