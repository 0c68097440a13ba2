# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of repelling.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.shared.common import pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, scores, sections, spread

#: Each with the same on plain edges, which it is compared with.
METHODS = {"backbone": "temperature scaling", "stacked": "StackedNMM"}
METHODS |= {"stacked, relabelled": "StackedNMM, relabelling", "NMM": "NMM"}
METHODS |= {"NMM, relabelled": "NMM, relabelling"}
PLAIN = {"stacked, relabelled": "stacked", "NMM, relabelled": "NMM"}
#: Headings, and what is better.
SCORES = {"NLL": -1, "log p(test \\| train)": 1, "PLL": 1}


def tables(rows: Rows) -> dict[str, str]:
    return made({repelling: 3, repelling_claim: 0, repelling_generated: 1}, rows)


def cells(rows: Rows) -> dict[tuple, Rows]:
    """By graph and backbone, each row with its scores on the test nodes under their headings."""
    found = [
        row | row["test"] | {"NLL": row["test"]["nll"], "log p(test \\| train)": row["joint"],
                             "PLL": row.get("conditional", row.get("own product"))}
        for row in pick(rows, task="graphs")
    ]  # fmt: skip
    return sections(found, dataset=(), backbone=("mlp", "gcn"))


def by_split(rows: Rows, field: str, method: str) -> dict:
    return scores(rows, field, ("split",), method=method)


def gain(part: Rows, method: str, field: str) -> Paired:
    """What relabelling changes, split by split."""
    return Paired.of(by_split(part, field, method), by_split(part, field, PLAIN[method]))


def repelling(rows: Rows) -> Iterator[dict]:
    """Each method's scores, and the paired differences from the same on plain edges."""
    for (graph, backbone), part in cells(rows).items():
        for (name,), found in sections(part, method=METHODS).items():
            method = found[0]["method"]
            line = {"graph": graph, "backbone": backbone.upper(), "model": name}
            line["splits"] = f"{len(found)}"
            line["accuracy"] = spread(by_split(part, "accuracy", method).values(), 1, 100)
            for field, sign in SCORES.items():
                line[field] = spread(by_split(part, field, method).values(), 3)
                if method in PLAIN:
                    change = gain(part, method, field)
                    line[field, "minus plain"] = change.spread(3) + change.mark(sign)
                else:
                    line[field, "minus plain"] = ""
            yield line


def repelling_claim(rows: Rows) -> str:
    """In how many cells relabelling is better and worse, for both ways of using it."""
    texts = []
    for method, plain in PLAIN.items():
        changes = [gain(part, method, "log p(test \\| train)") for part in cells(rows).values()]
        changes = [change for change in changes if len(change)]
        if not changes:
            continue
        means = [change.mean for change in changes]
        clear = [sum(change.clear(sign) for change in changes) for sign in (1, -1)]
        texts.append(
            f"{METHODS[plain]} with relabelling edges has a higher log p(test | train) than with "
            f"plain ones in {sum(value > 0 for value in means)} of {len(means)} cells (graph and "
            f"backbone), significantly in {clear[0]}, and a significantly lower one in {clear[1]}; "
            f"the difference is {min(means):+.3f} to {max(means):+.3f} nats a node, on average "
            f"{mean(means):+.3f}."
        )
    return wrapped(" ".join(texts) or "Nothing has been measured yet.")


def repelling_generated(rows: Rows) -> Iterator[dict]:
    """Log-likelihoods of new draws, in nats a node, over seeds."""
    found = pick(rows, task="generated")
    names = {"truth": "the truth", "relabelled": "fitted, relabelling", "plain": "fitted, plain"}
    for field, name in (names | {"independent": "independent labels"}).items():
        values = scores(found, field)
        missing = Paired.of(values, scores(found, "truth"))
        yield {
            "model of the new labels": name,
            "graphs": f"{len(values)}",
            "log p(y) a node": spread(values.values(), 3),
            "minus the truth's": missing.spread(3) if field != "truth" else "",
        }
