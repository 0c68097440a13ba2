# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""SPN's rows of nodes_rivals.py beside those of other methods on the same splits."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from benchmarks.nodes.runs import NAMES, label
from benchmarks.shared.common import GRAPHS, grouped, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, p_text, scores, sections

#: What stands beside SPN in the tables, in this order.
PUBLISHED = ("temperature", "GMNN", "Potts on C&S", "StackedNMM, scores alone", "StackedNMM")
RANDOM = ("backbone, temperature", "NMM", "NMM, stacked", "backbone, stacked")
SCORES = {"nll": ("NLL", -1), "joint": ("log p(test \\| train)", 1)}


def tables(files: dict[str, Rows]) -> dict[str, str]:
    return made({spn: 3, spn_random: 3, spn_claim: 0}, files)


def flat(row: dict) -> dict:
    """Scores on the test nodes beside the others; a joint that was not measured is absent."""
    pll = row.get("pairs", row.get("conditional", row.get("own product")))
    return row | row["test"] | {"pll": pll}


def both(files: dict[str, Rows], task: str) -> dict[tuple, Rows]:
    """Cells with SPN's rows and those of others on its runs."""
    ours = [flat(row) for row in pick(files.get("nodes_rivals", []), task=task)]
    if task == "published":
        fields, by, others = ("dataset", "backbone"), ("split", "fold"), PUBLISHED
        theirs = pick(files["calibration"], task="splits")
    else:
        fields, by, others = ("dataset", "backbone", "ratio"), ("seed",), RANDOM
        theirs = pick(files["nodes"], task="pairs")
    cells, known = {}, grouped([flat(row) for row in theirs if row["method"] in others], *fields)
    for key, part in sections(ours, **dict.fromkeys(fields) | {"dataset": GRAPHS.keys()}).items():
        seen = {tuple(row[name] for name in by) for row in part}
        shared = [r for r in known.get(key, []) if tuple(r[name] for name in by) in seen]
        named = GRAPHS.get(key[0], key[0]), NAMES.get(key[1], key[1]), *key[2:]
        methods = sections(part + shared, method=["SPN", *others])
        cells[named] = [row for found in methods.values() for row in found]
    return cells


def gap(part: Rows, field: str, method: str, by: tuple[str, ...]) -> Paired:
    """Another method minus SPN, run by run."""
    theirs = scores(part, field, by, method=method)
    return Paired.of(theirs, scores(part, field, by, method="SPN"))


def lines(cells: dict[tuple, Rows], by: tuple[str, ...], heads: tuple[str, ...]) -> Iterator[dict]:
    for key, part in cells.items():
        for (method,), found in sections(part, method=names(part)).items():
            line = dict(zip(heads, map(str, key), strict=True))
            line["method"] = label(method, key[1]) if len(key) > 2 else method
            line["runs"] = f"{len(found)}"
            line["accuracy"] = f"{100 * mean(row['accuracy'] for row in found):.1f}"
            if "max-product" in found[0]:
                line["accuracy"] += f" ({100 * mean(row['max-product'] for row in found):.1f})"
            for field, (name, sign) in SCORES.items():
                values = [row[field] for row in found if row.get(field) is not None]
                if values:
                    line[name] = f"{mean(values):.3f} ({median(values):.3f})"
                    change = gap(part, field, method, by)
                    text = change.text(3) + change.mark(sign) if method != "SPN" else ""
                    line[name, "minus SPN"] = text
            line["ECE"] = f"{mean(row['ece'] for row in found):.3f}"
            line["PLL"] = f"{mean(row['pll'] for row in found):.3f}"
            change = gap(part, "pll", method, by)
            line["PLL", "minus SPN"] = change.text(3) + change.mark() if method != "SPN" else ""
            edges = [row["taught edges"] for row in found if "taught edges" in row]
            line["edges taught"] = f"{mean(edges):.0f}" if edges else ""
            yield line


def names(part: Rows) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in part))


def spn(files: dict[str, Rows]) -> Iterator[dict]:
    """On the published splits."""
    return lines(both(files, "published"), ("split", "fold"), ("graph", "backbone"))


def spn_random(files: dict[str, Rows]) -> Iterator[dict]:
    """On random splits with more and more known labels."""
    return lines(both(files, "random"), ("seed",), ("graph", "backbone", "ratio"))


def spn_claim(files: dict[str, Rows]) -> str:
    """What SPN's edges add, and what StackedNMM differs from it."""
    cells = both(files, "published")
    if not cells:
        return "Nothing has been measured yet."
    texts = []
    for (graph, backbone), part in cells.items():
        ours = pick(part, method="SPN")
        change, joint, hits = (
            gap(part, field, "StackedNMM", ("split", "fold"))
            for field in ("nll", "joint", "accuracy")
        )
        edges, refined = mean(r["taught edges"] for r in ours), [r["settings"] for r in ours]
        added = mean(row["joint"] + row["nll"] for row in ours)
        points, nats, jointly = (
            f"{unit * each.mean:+.{digits}f}" + (f" ({p_text(each.p)})" if each.tested else "")
            for each, digits, unit in ((hits, 1, 100), (change, 3, 1), (joint, 3, 1))
        )
        texts.append(
            f"{graph} with {backbone} ({len(ours)} of 15 runs): SPN's edges are taught by "
            f"{edges:.0f} pairs of labelled neighbours, held-out nodes keep a refined field in "
            f"{sum(each['refined'] > 0 for each in refined)} runs, and its log p(test | train) "
            f"is {added:+.3f} nats a node from the sum of its own marginals; StackedNMM minus "
            f"SPN: accuracy {points} points, NLL {nats}, log p(test | train) {jointly}."
        )
    return wrapped(" ".join(texts))
