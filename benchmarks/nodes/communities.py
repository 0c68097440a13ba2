# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What communities as sources change in StackedNMM: a table, and the paragraph above it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.nodes.runs import Rows, gap, parts, runs
from benchmarks.shared.common import pick, wrapped
from benchmarks.shared.writing import p_text, scores, spread

#: Of StackedNMM's rows; those of other methods are compared with them.
PLAIN = "backbone, stacked"


def cells(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """Name, backbone and rows of every graph and kind of split."""
    known = [{"ratio": None} | row for row in runs(rows, "communities")]
    for ratio in dict.fromkeys(row["ratio"] for row in known):
        which = "public split" if ratio is None else f"random splits, {ratio}"
        here = [row for row in known if row["ratio"] == ratio]
        for (graph, backbone), part in parts(here, "dataset", "backbone").items():
            yield f"{graph}, {which}", backbone, part


def named(method: str, backbone: str) -> str:
    kind = method.split(", ")[1]
    if kind == "temperature":
        return f"{backbone} + temperature"
    given = f", {kind.split()[0]} at {resolution(method)}" if " " in kind else ""
    return f"StackedNMM on {backbone}{given}"


def resolution(method: str) -> str:
    return f"{float(method.split()[-1]):g}"


def order(method: str) -> tuple:
    """Temperature, StackedNMM, then communities by their resolution."""
    kind = method.split(", ")[1].split()
    return ["temperature", "stacked", "communities", "weighted"].index(kind[0]), *kind[1:]


def communities(rows: Rows) -> Iterator[dict]:
    """Joint likelihood, NLL and PLL, each with the paired difference from StackedNMM."""
    for name, backbone, part in cells(rows):
        for row in part:
            row["PLL"] = row.get("conditional", row["own product"])
        for method in sorted({row["method"] for row in part}, key=order):
            line = {"": name, "on one classifier": named(method, backbone)}
            line["runs"] = f"{len(pick(part, method=method))}"
            heads = {"log p(test \\| train)": "joint", "NLL": "nll", "PLL": "PLL"}
            for head, field in heads.items():
                line[head] = spread(scores(part, field, method=method).values(), 3)
                change = gap(part, field, method, PLAIN)
                sign = -1 if field == "nll" else 1
                text = change.spread(4) + change.mark(sign) if method != PLAIN else ""
                line[head, "minus StackedNMM's"] = text
            seen = scores(part, "val joint", method=method).values()
            line["log p(validation \\| train)"] = spread(seen, 3)
            yield line


def with_communities(rows: Rows) -> str:
    """What the resolution that the validation nodes choose changes in each cell."""
    found = []
    for name, backbone, part in cells(rows):
        methods = {row["method"] for row in part if row["method"][-1].isdigit()}
        seen = {m: scores(part, "val joint", method=m) for m in sorted(methods, key=order)}
        seen = {method: mean(values.values()) for method, values in seen.items() if values}
        if not seen:
            continue
        best = max(seen, key=lambda method: seen[method])
        joint, nll = (gap(part, field, best, PLAIN) for field in ("joint", "nll"))
        above = sum(each > 0 for each in joint.gaps)
        old = mean(scores(part, "joint", method=PLAIN).values())
        found.append(
            f"{name} ({backbone}): {old:.3f} becomes {old + joint.mean:.3f}, {joint.spread(4)}, "
            f"{p_text(joint.p)}, higher in {above} of {len(joint)}, NLL {nll.mean:+.4f} "
            f"({best.split()[-2]} at {resolution(best)})"
        )
    if not found:
        return "Nothing has been measured yet."
    return wrapped(
        f"Per test node, log p(test | train) of StackedNMM without communities and with those of "
        f"the row whose mean log p(validation | train) is the highest: {'; '.join(found)}."
    )
