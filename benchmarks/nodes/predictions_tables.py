# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of the labels that mixtures predict by each rule, from nodes.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.nodes.runs import Rows, label, parts, runs
from benchmarks.shared.common import wrapped
from benchmarks.shared.writing import Paired, made, p_text, spread

OTHERS = {"sequential": "in turn", "joint": "jointly"}


def tables(rows: Rows) -> dict[str, str]:
    return made({predicted: 3, predicted_claim: 0}, rows)


def cells(rows: Rows) -> dict[tuple, Rows]:
    return parts(runs(rows, "predicted"), "dataset", "backbone", "method")


def of(part: Rows, rule: str, field: str) -> dict:
    """A rule's values by seed."""
    return {(row["seed"],): row["rules"][rule][field] for row in part}


def gap(part: Rows, rule: str, field: str) -> Paired:
    """A rule minus every node's own most probable label."""
    return Paired.of(of(part, rule, field), of(part, "one by one", field))


def predicted(rows: Rows) -> Iterator[dict]:
    """Accuracy, and the log-probability of the labelling that is predicted, seed by seed."""
    for (graph, backbone, method), part in cells(rows).items():
        line = {"graph": graph, "mixture": label(method, backbone), "seeds": f"{len(part)}"}
        first = of(part, "one by one", "accuracy").values()
        line["accuracy, one by one"] = spread(first, 1, 100)
        for rule, name in OTHERS.items():
            line[f"{name} minus that, points"] = gap(part, rule, "accuracy").text(2, 100)
        for rule, name in OTHERS.items():
            changed = mean(of(part, rule, "changed").values())
            line[f"labels changed {name}"] = f"{changed:.1f}"
        first = of(part, "one by one", "log prob").values()
        line["log p of that labelling, nats a node"] = spread(first, 4)
        for rule, name in OTHERS.items():
            line[f"{name} minus that"] = gap(part, rule, "log prob").text(4)
        truth = of(part, "one by one", "of the true labels").values()
        yield line | {"log p of the true labels": spread(truth, 3)}


def predicted_claim(rows: Rows) -> str:
    """What prediction in turn and jointly change, over all mixtures."""
    found = {
        f"{graph}, {label(method, backbone)}": part
        for (graph, backbone, method), part in cells(rows).items()
    }
    if not found:
        return "Nothing has been measured yet."
    texts = []
    for rule, name in OTHERS.items():
        hits = {key: gap(part, rule, "accuracy") for key, part in found.items()}
        nats = [gap(part, rule, "log prob").mean for part in found.values()]
        labels = [mean(of(part, rule, "changed").values()) for part in found.values()]
        means = [100 * each.mean for each in hits.values()]
        clear = [
            f"{key} {100 * each.mean:+.2f}, {p_text(each.p)}"
            for key, each in hits.items()
            if each.clear()
        ]
        sure = f": {'; '.join(clear)}" if clear else ""
        texts.append(
            f"Predicted {name}, {min(labels):.1f} to {max(labels):.1f} test labels change (means "
            f"over seeds, {len(found)} mixtures), the accuracy by {min(means):+.2f} to "
            f"{max(means):+.2f} points, significantly in {len(clear)}{sure}, and the labelling's "
            f"log-probability by {min(nats):+.4f} to {max(nats):+.4f} nats a node."
        )
    return wrapped(" ".join(texts))
