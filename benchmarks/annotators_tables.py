# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of annotators.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from common import GRAPHS, grouped, pick, wrapped
from writing import Paired, Rows, made, scores, sections, spread

OURS, BASE = "NMM, types", "Dawid-Skene"
#: Methods in the order of the columns and lines.
METHODS = {"majority": "majority vote", "Dawid-Skene": "Dawid-Skene"}
METHODS |= {"label spreading": "label spreading", "Potts, mean field": "Potts, mean field"}
METHODS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "GCN": "GCN by itself"}
METHODS |= {"true numbers": "posterior at the true numbers"}
#: Of a consensus whose settings the answers choose; and who it is compared with.
CHOSEN = "NMM, chosen"
RIVALS = ("majority", "Dawid-Skene", "label spreading", "Potts, mean field", "Potts, Gibbs")
SIMULATED = {"simulated": "classifier", "model": "copying"}


def tables(rows: Rows) -> dict[str, str]:
    makers = {annotators_claim: 0, cortex: 2, cortex_sections: 3, cortex_clusterings: 1}
    makers |= {cortex_halves: 1, simulated_differences: 1, simulated_annotators: 2}
    return made(makers | {simulated_sources: 2, annotators_coverage: 0}, rows)


def fits(rows: Rows) -> Rows:
    """Of sections of cortex, with a number of labels."""
    return [row for row in pick(rows, task="cortex") if row.get("labels") is not None]


def chosen_labels(rows: Rows) -> dict[str, int]:
    """By section: the number of labels for which two halves of the clusterings agree most."""
    found = {}
    for (name,), part in sections(pick(rows, task="halves"), section=None).items():
        by_number = {k: v for (k,), v in grouped(part, "labels").items()}
        found[name] = max(by_number, key=lambda k: mean(row["agreement"] for row in by_number[k]))
    return found


def within(part: Rows, field: str, digits: int) -> str:
    """The mean over sections of means over starts ± the spread of starts within a section."""
    values = [[row[field] for row in found] for found in grouped(part, "section").values()]
    middle = f"{mean(map(mean, values)):.{digits}f}"
    sds = [stdev(found) ** 2 for found in values if len(found) > 1]
    return middle + (f" ± {mean(sds) ** 0.5:.{digits}f}" if sds else "")


def line_of(part: Rows, name: str) -> dict:
    number = [len(found) for found in grouped(part, "section").values()]
    return {
        "method": name,
        "sections x starts": f"{len(number)} x {min(number)}"
        + (f" to {max(number)}" if max(number) > min(number) else ""),
        "ARI": within(part, "ARI", 3),
        "accuracy": within(part, "accuracy", 3),
        "log score": within(part, "log score", 2),
        "ECE": within(part, "ECE", 3),
        "confidence": within(part, "confidence", 3),
        "entropy": within(part, "entropy", 2),
        "seconds": f"{mean(row['seconds'] for row in part):.1f}",
    }


def cortex(rows: Rows) -> Iterator[dict]:
    """Means over the sections, by the number of labels; first the number that is chosen."""
    known, best = fits(rows), chosen_labels(rows)
    parts = [("chosen", [row for row in known if best.get(row["section"]) == row["labels"]])]
    parts += [(f"{number}", part) for (number,), part in sections(known, labels=None).items()]
    for name, part in parts:
        for (method,), found in sections(part, method=METHODS).items():
            yield {"labels": name} | line_of(found, method)


def cortex_sections(rows: Rows) -> Iterator[dict]:
    """By section, with the number of labels that is chosen there."""
    best = chosen_labels(rows)
    for (name,), part in sections(fits(rows), section=None).items():
        if name in best:
            of_number = pick(part, labels=best[name])
            for (method,), found in sections(of_number, method=METHODS).items():
                numbers = {} if found[0].get("kappa") is None else {
                    "score": spread([row["score"] for row in found], 3),
                    "kappa": spread([row["kappa"] for row in found], 3),
                }  # fmt: skip
                yield (
                    {"section": name, "labels": f"{best[name]}"} | line_of(found, method) | numbers
                )


def cortex_clusterings(rows: Rows) -> Iterator[dict]:
    """The clusterings by themselves; the best of them is known by hindsight only."""
    rows = [row for row in pick(rows, task="cortex") if row.get("labels") is None]
    for (name,), part in sections(rows, section=None).items():
        votes = pick(part, method="majority")
        single = [row["ARI"] for row in part if row["method"] != "majority"]
        yield {
            "section": name,
            "majority vote, ARI": spread((row["ARI"] for row in votes), 3),
            "log score": spread((row["log score"] for row in votes), 2),
            "ECE": spread((row["ECE"] for row in votes), 3),
            "single clustering, mean ARI": spread(single, 3),
            "the best by hindsight": f"{max(single):.3f}" if single else "",
        }


def cortex_halves(rows: Rows) -> Iterator[dict]:
    """Agreement of two halves, mean over three ways to halve the clusterings."""
    for (name,), part in sections(pick(rows, task="halves"), section=None).items():
        line = {"section": name}
        for (number,), found in sections(part, labels=None).items():
            line[f"{number} labels"] = spread((row["agreement"] for row in found), 3)
        yield line | {"chosen": f"{chosen_labels(rows)[name]}"}


def simulations(rows: Rows) -> dict[tuple, Rows]:
    """By task, graph, accuracy, and whether there is a classifier or a copy."""
    rows = [row for row in rows if row.get("task") in SIMULATED]
    found = {}
    for task, extra in SIMULATED.items():
        part = sections(
            pick(rows, task=task), **{extra: None, "graph": GRAPHS, "level": (0.9, 0.7, 0.5)}
        )
        found |= {cell_name(task, *key): of_cell for key, of_cell in part.items()}
    return found


def cell_name(task: str, extra: bool, graph: str, level: float) -> str:
    if task == "model":
        kind = "drawn from the NMM" + (", one copies" if extra else "")
    else:
        kind = "and a GCN" if extra else "annotators"
    return f"{graph}, {kind}, {level}"


def with_chosen(part: Rows) -> Rows:
    """And, seed by seed, the consensus of ours that predicts best what is left out."""
    best = []
    for found in grouped([r for r in part if r["method"].startswith("NMM")], "seed").values():
        every = {"method": CHOSEN, "seconds": sum(row["seconds"] for row in found)}
        best.append(max(found, key=lambda row: row["left out"]) | every)
    return part + best


def simulated_annotators(rows: Rows) -> Iterator[dict]:
    """Accuracy, log score and calibration of every method in every cell."""
    order = METHODS | {CHOSEN: "NMM, chosen by the answers"}
    for name, part in simulations(rows).items():
        known = [row for row in with_chosen(part) if not is_ours(row["method"])]
        for (method,), found in sections(known, method=order).items():
            yield {"cell": name, "method": method} | cell(found)


def is_ours(method: str) -> bool:
    return method.startswith("NMM") and method != CHOSEN


def cell(found: Rows) -> dict:
    line = {"seeds": f"{len(found)}"}
    for field, digits in (("accuracy", 3), ("log score", 3), ("ECE", 3), ("Brier", 3)):
        line[field] = spread((row[field] for row in found), digits)
    return line | {"seconds": f"{mean(row['seconds'] for row in found):.1f}"}


def simulated_sources(rows: Rows) -> Iterator[dict]:
    """All fits of ours, and how well each predicts what is left out."""
    for name, part in simulations(rows).items():
        known = [row for row in part if is_ours(row["method"])]
        for (method,), found in sections(known, method=()).items():
            line = cell(found)
            line["log p(left out)"] = spread((row["left out"] for row in found), 3)
            line["score"] = spread((row["score"] for row in found), 3)
            line["kappa"] = spread((row["kappa"] for row in found), 3)
            yield {"cell": name, "fit": method} | line


def gaps(part: Rows, rival: str, field: str) -> Paired:
    """What the answers choose of ours, minus a rival, seed by seed."""
    part = with_chosen(part)
    return Paired.of(scores(part, field, method=CHOSEN), scores(part, field, method=rival))


def simulated_differences(rows: Rows) -> Iterator[dict]:
    """Paired differences from the rivals: accuracy in points, and log score in nats."""
    for name, part in simulations(rows).items():
        line = {"cell": name}
        for rival in RIVALS:
            for field, unit, digits in (("accuracy", 100, 1), ("log score", 1, 3)):
                found = gaps(part, rival, field)
                line[f"{METHODS[rival]}: {field}"] = found.spread(digits, unit) + found.mark()
        yield line


def annotators_claim(rows: Rows) -> str:
    """What the tables say: sections of cortex, then simulated annotators."""
    best = chosen_labels(rows)
    known = [row for row in fits(rows) if best.get(row["section"]) == row["labels"]]
    texts = []
    ours = grouped(pick(known, method=OURS), "section")
    theirs = grouped(pick(known, method=BASE), "section")
    if ours and theirs:
        means = [{k: mean(r["ARI"] for r in part) for k, part in each.items()}
                 for each in (ours, theirs)]  # fmt: skip
        above = sum(means[0][k] > means[1][k] for k in means[0] if k in means[1])
        texts.append(
            f"Cortex, with the number of labels that the clusterings choose: mean ARI "
            f"{mean(means[0].values()):.3f} over {len(means[0])} sections, Dawid-Skene "
            f"{mean(means[1].values()):.3f}; above it in {above}. "
        )
    cells = simulations(rows)
    if cells:
        counts = [
            sum(all(gaps(part, rival, field).mean > 0 for rival in RIVALS)
                for part in cells.values())
            for field in ("accuracy", "log score")
        ]  # fmt: skip
        texts.append(
            f"Simulated annotators: more accurate than majority, Dawid-Skene, label spreading and "
            f"both Potts fields in {counts[0]} of {len(cells)} cells, of a better log score than "
            f"all in {counts[1]}."
        )
    return wrapped("".join(texts).strip()) or "Nothing has been measured yet."


def annotators_coverage(rows: Rows) -> str:
    rows = pick(rows, task="coverage")
    if not rows:
        return "Nothing has been measured yet."
    covered = [inside for row in rows for inside in row["covered"]]
    each = [zip(row["mean"], row["truth"], row["low"], row["high"], strict=True) for row in rows]
    flat = [values for part in each for values in part]
    bias = mean(found - truth for found, truth, _, _ in flat)
    width = mean(high - low for _, _, low, high in flat)
    return wrapped(
        f"In {len(rows)} simulations of {len(rows[0]['covered'])} annotators, 90 % intervals of "
        f"their accuracies cover {100 * mean(covered):.1f} % of the true ones; the mean width is "
        f"{width:.3f}, the mean error {bias:+.4f}."
    )
