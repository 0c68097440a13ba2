# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sites that ``poutine.block`` hides inside of a program, where no handler around it sees them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro.distributions import Independent
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nmm.guides.program import sample_sites

SUMS = 'infer={"enumerate": "parallel"}'


def is_enumerated(site: Any) -> bool:
    """Whether a latent site is to be enumerated in the model, so that no guide draws it."""
    return site["infer"].get("enumerate") == "parallel" and not site["is_observed"]


@contextmanager
def through_blocks(
    see: Callable[[Any], None] = lambda site: None, sums: bool = True
) -> Iterator[None]:
    """Let data, and enumerated sites, pass the blocks inside if a guide ``sums`` over these, and
    ``see`` other sites that the blocks hide."""
    depth, process, hidden = len(_PYRO_STACK), BlockMessenger._process_message, []

    def before(block: BlockMessenger, site: Any) -> None:
        process(block, site)
        # The first handler is that of the run around the program.
        inside = any(each is block for each in _PYRO_STACK[depth + 1 :])
        if not (inside and site["stop"] and site["type"] == "sample"):
            return
        data = site["is_observed"] or site_is_subsample(site)
        if sums and (data or is_enumerated(site)):
            site["stop"] = False
        elif not data:
            hidden.append((block, site))

    def after(block: BlockMessenger, site: Any) -> None:
        if hidden and hidden[-1][0] is block and hidden[-1][1] is site:
            see(hidden.pop()[1])

    # Of the class, because a program may make its blocks while it runs. Pyro's stack is one for
    # all threads, too.
    handler: Any = BlockMessenger
    handler._process_message, handler._postprocess_message = before, after
    try:
        yield
    finally:
        handler._process_message = process
        del handler._postprocess_message


def check_hidden(
    run: Callable[[dict[str, Tensor]], Trace], sums: Sequence[str] | None = None
) -> None:
    """Refuse a program with hidden draws that its fields or its data depend on.

    :param sums: names of enumerated sites, which other sites may depend on, but no field; ``None``
        if nothing sums them out.
    """
    hidden: dict[str, Tensor] = {}
    reveal = sums is not None

    def note(site: Any) -> None:
        if "nmm" in site["infer"]:
            raise ValueError(
                f"poutine.block hides site {site['name']!r} of a field: leave it visible"
            )
        hidden[site["name"]] = site["value"]

    with through_blocks(note, reveal):
        first = run({})
    if not hidden and not sums:
        return
    fixed: dict[str, Any] = {k: site["value"] for k, site in first.iter_stochastic_nodes()}

    def draw_another(site: Any) -> None:
        with torch.random.fork_rng(devices=[]):  # dropout is that of the first run
            site["value"] = _another(site["fn"], hidden[site["name"]])

    for names in (hidden, sums):
        if not names:
            continue
        more = {name: _another(first.nodes[name]["fn"], fixed[name]) for name in sums or ()}
        with through_blocks(draw_another if names is hidden else lambda site: None, reveal):
            second = run(fixed | (more if names is sums else {}))
        for name, site in sample_sites(first).items():
            field = "nmm" in site["infer"]
            changes = name in second and _differ(site, second.nodes[name])
            if changes and names is hidden:
                raise ValueError(
                    f"poutine.block hides random sites {[*names]} from the guide, and site "
                    f"{name!r} depends on them: leave them visible"
                    + (f", or sum discrete ones out by {SUMS}" if reveal else "")
                )
            if changes and field:
                raise ValueError(
                    f"the field of site {name!r} depends on the enumerated sites {names}: a guide "
                    f"can sum out such sites below labels only, so sample them in a guide by hand"
                )


def _differ(first: Any, second: Any) -> bool:
    """Whether densities of a site differ, or the parameters of its field."""
    pair = [
        [scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"])]
        for site in (first, second)
    ]
    for terms, site in zip(pair, (first, second), strict=True):
        if "nmm" in site["infer"]:  # choices of different sources do not show their concentration
            prior = site["infer"]["nmm"][0]
            terms += [prior.alpha, prior.logits]
    return any(
        a.shape != b.shape or not torch.allclose(a, b, equal_nan=True)
        for a, b in zip(*pair, strict=True)
    )


def _another(fn: Any, value: Tensor) -> Tensor:
    """Another value: in a finite support the next one, because a draw may be the same."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    if not fn.support.is_discrete:
        return fn().expand(value.shape)
    if not getattr(fn, "has_enumerate_support", False) or fn.event_dim:
        return value + 1
    support = fn.enumerate_support(expand=False).flatten().to(value)
    place = (support == value.unsqueeze(-1)).long().argmax(-1)
    return support[(place + 1) % len(support)]
