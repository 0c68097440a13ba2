# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Known labels of some nodes of a hidden field."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import expect, expect_all
from pyro_nmm.models.hidden.emissions import Emission, Values


def allowed_labels(known: Tensor | None, hood: Neighborhood, num_labels: int) -> Tensor:
    """``(N, C)`` evidence of labels ``(N,)``: zero where unknown (-1) and for the known label, else
    minus infinity."""
    allowed = torch.zeros(hood.num_nodes, num_labels, device=hood.device)
    if known is None:
        return allowed
    if known.dtype == torch.bool:
        cure = "torch.where(mask, y, -1)"
        raise ValueError(f"known must hold labels, -1 where unknown, not a mask: pass {cure}")
    known = expect("known", known, (hood.num_nodes,), kind="labels", like=hood)
    good = (known >= -1) & (known < num_labels)
    expect_all("known", known, good, f"lie in 0..{num_labels - 1}, or be -1 where unknown")
    other = known[:, None] != torch.arange(num_labels, device=hood.device)
    return allowed.masked_fill(other & (known >= 0)[:, None], -torch.inf)


def start_of(emission: Emission, data: Any, hood: Neighborhood, known: Tensor | None) -> Values:
    """The emission's start. Known labels, if any, give names to labels that have none: the start
    is then an M-step with the nodes whose labels are known."""
    values = emission.start(data, hood)
    if known is None or getattr(emission, "named", False):
        return values
    probs = one_hot(known.clamp(min=0).long(), emission.num_labels) * (known >= 0)[:, None]
    of_known = emission.maximise(data, probs.to(next(iter(values.values()))), values)
    # Types have no names, and all nodes tell more about them than the known ones.
    return values | {"types": of_known["types"]} if "types" in values else of_known
