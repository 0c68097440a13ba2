# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How tables state differences: paired, with their spread, and the median beside the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median, stdev

from scipy.stats import ttest_rel

Table = Callable[..., str]
Pairs = Sequence[tuple[float, float]]


def p_value(pairs: Pairs) -> str:
    """Of a t-test, paired; nothing of fewer than three pairs or of pairs that are all alike."""
    gaps = {ours - theirs for theirs, ours in pairs}
    if len(pairs) < 3 or len(gaps) < 2:
        return ""
    theirs, ours = zip(*pairs, strict=True)
    p = ttest_rel(ours, theirs).pvalue
    small = next((limit for limit in ("1e-6", "0.001") if p < float(limit)), None)
    return f"p < {small.lstrip('0')}" if small else f"p = {p:.3f}".replace("0.", ".")


def difference(pairs: Pairs, digits: int) -> str:
    """Mean of the second minus the first ± sd, the median, and the p-value."""
    if not pairs:
        return ""
    gaps = [ours - theirs for theirs, ours in pairs]
    spread = f" ± {stdev(gaps):.{digits}f}" if len(gaps) > 1 else ""
    inside = [f"median {median(gaps):+.{digits}f}"] if len(gaps) > 1 else []
    inside += [p] if (p := p_value(pairs)) else []
    return f"{mean(gaps):+.{digits}f}{spread}" + (f" ({', '.join(inside)})" if inside else "")


def centre(values: Sequence[float], digits: int) -> str:
    """The mean, and the median in brackets."""
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (
        f" ({median(values):.{digits}f})" if len(values) > 1 else ""
    )


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± sd."""
    if not values:
        return ""
    sd = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{sd}"


def names(known: dict[str, str], found: Iterable[str]) -> dict[str, str]:
    """Names of all that is stored: known ones first, others as they are stored."""
    found = list(dict.fromkeys(found))
    stored = [key for key in known if key in found] + [key for key in found if key not in known]
    return {key: known.get(key, key) for key in stored}
