# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of batches.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.shared.common import GRAPHS, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, scores, sections, spread

WHOLE = "whole graph"
WAYS = {WHOLE: WHOLE, "random": "random", "clusters": "cluster-wise"}
#: What "as good as the whole graph" was to mean: half a point, and nats a node.
ACCURACY, NATS = 0.005, 0.02
#: Headings, and whose differences they have: of all labels, of the test labels given the known.
LOST = {"bound": "bound, all labels", "estimate": "log p, all labels"}
LOST |= {"train bound": "bound, training labels", "train estimate": "log p, training labels"}
LOST |= {"joint": "log p(test \\| train)", "alone": "-NLL"}


def tables(rows: Rows) -> dict[str, str]:
    makers = {batch_training: 3, batch_claim: 0, batch_bounds: 3, batch_throughput: 2}
    return made(makers, rows)


def cells(rows: Rows, task: str) -> Iterator[tuple[str, str, Rows, Rows]]:
    """Graph, batches, rows, and the rows of the whole graph."""
    found = [row | {"size": row.get("batch_size") or 0} for row in pick(rows, task=task)]
    for (graph,), part in sections(found, dataset=GRAPHS).items():
        whole = pick(part, way=WHOLE)
        for (_, way), own in sections(part, size=None, way=WAYS).items():
            size = own[0]["size"]
            yield graph, f"{way}, {size}" if size else way, own, whole


def flat(rows: Rows) -> Rows:
    return [row | row["test"] for row in rows]


def batch_training(rows: Rows) -> Iterator[dict]:
    """Scores of the test nodes, and their paired differences from the whole graph's."""
    for graph, name, own, whole in cells(rows, "training"):
        own, whole = flat(own), flat(whole)
        line = {"graph": graph, "batches, seeds in each": name, "runs": f"{len(own)}"}
        for field, heading, digits, unit in (
            ("accuracy", "accuracy", 1, 100),
            ("joint", "log p(test \\| train), nats a node", 3, 1),
        ):
            line[heading] = spread(scores(own, field).values(), digits, unit)
            gap = Paired.of_rows(own, whole, field) if own != whole else Paired([])
            line[heading, "minus whole graph's"] = gap.spread(digits, unit) + gap.mark()
        for field in ("epochs", "steps"):
            line[field] = f"{mean(row[field] for row in own):.0f}"
        yield line


def batch_claim(rows: Rows) -> str:
    """Whether batches train as well as the whole graph does, in the terms set beforehand."""
    texts, unsure = [], 0
    for graph, name, own, whole in cells(rows, "training"):
        if own == whole:
            continue
        gaps = [Paired.of_rows(flat(own), flat(whole), field) for field in ("accuracy", "joint")]
        if not len(gaps[0]):
            continue
        within = gaps[0].mean >= -ACCURACY and gaps[1].mean >= -NATS
        unsure += gaps[0].error > ACCURACY or gaps[1].error > NATS
        runs = f"{len(gaps[0])} run{'s' * (len(gaps[0]) > 1)}"
        texts.append(
            f"{graph}, {name}, {runs}: {gaps[0].spread(1, 100)} points and "
            f"{gaps[1].spread(3)} nats, the mean {'within' if within else 'not within'}"
        )
    if not texts:
        return "Nothing has been measured yet."
    return wrapped(
        f"Aimed at: at most {100 * ACCURACY} points of accuracy and {NATS} nats a node of "
        f"log p(test | train) below training on the whole graph. Found, paired by seed: "
        f"{'; '.join(texts)}. In {unsure} of {len(texts)} a standard error is larger than what is "
        f"aimed at, so that these runs do not settle it."
    )


def batch_bounds(rows: Rows) -> Iterator[dict]:
    """The whole graph's values in nats a node, and what the sum over batches has less or more."""
    for graph, name, own, whole in cells(rows, "bound"):
        line = {"graph": graph, "batches, nodes in each": name, "runs": f"{len(own)}"}
        for field, heading in LOST.items():
            gap = Paired.of_rows(own, whole, field)
            values = scores(own, field).values()
            line[heading] = spread(values, 3) if own == whole else gap.spread(4) + gap.mark()
        gap = Paired.of_rows(own, whole, "hits")
        hits = scores(own, "hits").values()
        line["accuracy"] = spread(hits, 1, 100) if own == whole else gap.spread(1, 100)
        yield line


def batch_throughput(rows: Rows) -> Iterator[dict]:
    """Seconds an epoch, and how many times as fast two processes are."""
    found = pick(rows, task="throughput")
    for (graph, number), part in sections(found, dataset=GRAPHS, processes=None).items():
        one = scores(found, "seconds", ("repeat",), dataset=part[0]["dataset"], processes=1)
        own = scores(part, "seconds", ("repeat",))
        ratios = [one[key] / value for key, value in own.items() if key in one]
        yield {
            "graph": graph,
            "processes": f"{number}",
            "runs": f"{len(part)}",
            "seconds an epoch": spread(own.values(), 3),
            "times as fast as one": spread(ratios, 2) if number > 1 else "",
        }
