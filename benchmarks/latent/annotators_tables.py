# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of annotators.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from benchmarks.shared.common import GRAPHS, grouped, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, bullets, made, scores, sections, spread

OURS, BASE = "NMM, types", "Dawid-Skene"
#: Methods in the order of lines.
METHODS = {"majority": "majority vote", "GCN": "GCN by itself"}
METHODS |= {"true numbers": "posterior at the true numbers"}
METHODS |= {name: name for name in ("Dawid-Skene", "label spreading")}
METHODS |= {"Potts, mean field": "Potts, mean field", "Potts, Gibbs": "Potts, Gibbs sampling"}
#: Of each the answers choose whether annotators may copy, of ours also where the sources lie.
FAMILIES = ("Dawid-Skene", "label spreading", "Potts, mean field", "Potts, Gibbs", "NMM")
CHOSEN = ", chosen"
#: Who ours is compared with.
RIVALS = {"majority": "majority vote"} | {k + CHOSEN: METHODS[k] for k in FAMILIES[:-1]}
#: Cells in which a classifier is one more annotator.
BESIDE = "copies and a GCN"
SIMULATED = {"simulated": "", "model": "drawn from the NMM, "}


def tables(rows: Rows) -> dict[str, str]:
    makers = {annotators_claim: 0, cortex: 2, cortex_sections: 3, cortex_clusterings: 1}
    makers |= {cortex_halves: 1, simulated_graphs: 1, simulated_differences: 1}
    makers |= {simulated_annotators: 2, simulated_fits: 2, annotators_coverage: 0}
    return made(makers, rows)


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
        "log p(left out)": within(part, "left out", 2),
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
                    "kappa": spread([row["kappa"] for row in found], 4),
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


def simulations(rows: Rows) -> dict[str, Rows]:
    """By task, graph, what annotators there are, and their accuracy."""
    found = {}
    for task, prefix in SIMULATED.items():
        orders = {"graph": GRAPHS, "cell": None, "level": (0.9, 0.7, 0.5)}
        for (graph, cell, level), part in sections(pick(rows, task=task), **orders).items():
            found[f"{graph}, {prefix}{cell}, {level}"] = part
    return found


def with_chosen(part: Rows) -> Rows:
    """And, seed by seed, the consensus of every family that predicts best what is left out."""
    best = []
    for family in FAMILIES:
        for found in grouped([r for r in part if r["method"].startswith(family)], "seed").values():
            every = {"method": family + CHOSEN, "seconds": sum(row["seconds"] for row in found)}
            best.append(max(found, key=lambda row: row["left out"]) | every)
    return part + best


def simulated_annotators(rows: Rows) -> Iterator[dict]:
    """Accuracy, log score and calibration in every cell, of what the answers choose."""
    order = METHODS | {family + CHOSEN: METHODS.get(family, family) for family in FAMILIES}
    for name, part in simulations(rows).items():
        known = [row for row in with_chosen(part) if row["method"].endswith(CHOSEN)]
        known += [row for row in part if not row["method"].startswith(FAMILIES)]
        for (method,), found in sections(known, method=order).items():
            yield {"cell": name, "method": method} | cell(found)


def cell(found: Rows) -> dict:
    line = {"seeds": f"{len(found)}"}
    for field, digits in (("accuracy", 3), ("log score", 3), ("ECE", 3), ("Brier", 3)):
        line[field] = spread((row[field] for row in found), digits)
    return line | {"seconds": f"{mean(row['seconds'] for row in found):.1f}"}


def simulated_fits(rows: Rows) -> Iterator[dict]:
    """Every fit, and how well each predicts what is left out."""
    for name, part in simulations(rows).items():
        known = [row for row in part if row["method"].startswith(FAMILIES)]
        for (method,), found in sections(known, method=METHODS).items():
            line = cell(found)
            for field, heading, digits in (
                ("left out", "log p(left out)", 3),
                ("kappa", "kappa", 4),
            ):
                values = [row[field] for row in found if row.get(field) is not None]
                line[heading] = spread(values, digits)
            yield {"cell": name, "fit": method} | line


def gaps(part: Rows, rival: str, field: str) -> Paired:
    """What the answers choose of ours, minus a rival, seed by seed."""
    part = with_chosen(part)
    ours = scores(part, field, method="NMM" + CHOSEN)
    return Paired.of(ours, scores(part, field, method=rival))


def simulated_differences(rows: Rows) -> Iterator[dict]:
    """Paired differences from the rivals: accuracy in points, and log score in nats."""
    for name, part in simulations(rows).items():
        line = {"cell": name}
        for rival, heading in RIVALS.items():
            for field, unit, digits in (("accuracy", 100, 1), ("log score", 1, 3)):
                found = gaps(part, rival, field)
                line[f"{heading}: {field}"] = found.spread(digits, unit) + found.mark()
        yield line


def simulated_graphs(rows: Rows) -> Iterator[dict]:
    for (name,), (row, *_) in sections(pick(rows, task="graphs"), graph=GRAPHS).items():
        yield {"graph": name, "nodes": f"{row['nodes']:,}", "edges": f"{row['edges']:,}",
               "labels": f"{row['labels']}", "edges within a label": f"{row['within']:.3f}",
               "median degree": f"{row['degree']:.0f}"}  # fmt: skip


def annotators_claim(rows: Rows) -> str:
    """What the tables say: sections of cortex, then simulated annotators."""
    return bullets([*cortex_claims(rows), *simulated_claims(rows)]) or (
        "Nothing has been measured yet."
    )


def cortex_claims(rows: Rows) -> Iterator[str]:
    best = chosen_labels(rows)
    known = [row for row in fits(rows) if best.get(row["section"]) == row["labels"]]
    means = {
        method: {k: mean(r["ARI"] for r in of) for (k,), of in grouped(part, "section").items()}
        for (method,), part in grouped(known, "method").items()
    }
    if OURS not in means or BASE not in means:
        return
    ours, theirs = means.pop(OURS), means.pop(BASE)
    above = sum(ours[k] > theirs[k] for k in ours if k in theirs)
    yield (
        f"*Cortex*, with the number of labels that the clusterings choose: mean ARI of the NMM "
        f"with types {mean(ours.values()):.3f} over {len(ours)} sections, Dawid-Skene "
        f"{mean(theirs.values()):.3f}; above it in {above}. "
        + "; ".join(f"{METHODS.get(k, k)} {mean(v.values()):.3f}" for k, v in means.items())
        + "."
    )
    part = pick(known, method=OURS)
    yield (
        f"*Its calibration there is poor*: the NMM with types is sure of its labels by "
        f"{within(part, 'confidence', 3)}, where {within(part, 'accuracy', 3)} are right."
    )


def simulated_claims(rows: Rows) -> Iterator[str]:
    """In how many cells ours is ahead of each rival: where a GCN is among the annotators, first."""
    cells = simulations(pick(rows, task="simulated"))
    beside = {k: part for k, part in cells.items() if part[0]["cell"] == BESIDE}
    alone = {k: part for k, part in cells.items() if k not in beside}
    left = {
        k: [r for r in part if not r["method"].startswith("NMM")]
        + [r for r in cells.get(k.replace(BESIDE, "copies"), []) if r["method"].startswith("NMM")]
        for k, part in beside.items()
    }
    yield from ahead("a GCN of the same graph is one more annotator", beside)
    yield from ahead("the NMM leaves that GCN out, its rivals do not", left)
    without = {k: cells.get(k.replace(BESIDE, "copies"), []) for k in beside}
    yield from ahead("all leave that GCN out, the same cells", without)
    yield from ahead("annotators alone", alone)
    yield from ahead("the labels are drawn from the model", simulations(pick(rows, task="model")))


def ahead(what: str, cells: dict[str, Rows]) -> Iterator[str]:
    known = {k: part for k, part in cells.items() if len(gaps(part, "majority", "accuracy"))}
    if not known:
        return
    counts = {
        heading: [
            sum(gaps(part, rival, field).mean > 0 for part in known.values())
            for field in ("accuracy", "log score")
        ]
        for rival, heading in RIVALS.items()
    }
    ours = [[row for row in with_chosen(part) if row["method"] == "NMM" + CHOSEN]
            for part in known.values()]  # fmt: skip
    yield (
        f"*Simulated, {what}*, {len(known)} cells: the NMM is more accurate, and of a better log "
        f"score, than "
        + "; ".join(f"{heading} in {n[0]} and {n[1]}" for heading, n in counts.items())
        + f". Its ECE is at most {max(mean(r['ECE'] for r in part) for part in ours):.3f}."
    )


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
