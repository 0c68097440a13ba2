# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of docs/results/on-top.md, from the rows of calibration.jsonl."""

from math import nan
from statistics import median

from pandas import DataFrame

from benchmarks.on_top.run import ELSEWHERE, METHODS, OURS, POOL, SCORES
from benchmarks.on_top.uses import SHARES, SHOWN, UPDATED
from benchmarks.shared import tables as shown
from benchmarks.shared.tables import Cell, Paired, against, average, count, spread, table

CELL, RUN = ["graph", "backbone"], ["split", "fold"]
SCORED = {"NLL": "nll", "Brier": "brier", "ECE": "ece"}
JOINT = "log p(test \\| train)"
PARAMETERS = {"pool.log_scale": "log s", "pool.neighbors": "a", "pool.labels": "λ"}
PARAMETERS |= {"pool.agreement": "η", "pool.offsets": "sd of b", "log_kappa": "log κ"}
PARAMETERS |= {"log_floor": "log ε", "gamma": "γ", "similarity": "β"}
#: Columns that name lines: the fields that they show, and the order of their values.
NAMES = {
    "graph": ("dataset", shown.GRAPHS),
    "backbone": ("backbone", {"gcn": "GCN", "gat": "GAT", "mlp": "MLP"}),
    "method": ("method", list(METHODS)),
    "asked by": ("method", ()),
    "edge weights": ("method", ()),
    "known": ("share", {share: f"{100 * share:.0f} %" for share in SHARES}),
    "nodes": ("size", None),
    "communities": ("communities", {False: "no", True: "yes"}),
}
Files = dict[str, list[dict]]


def rows_of(files: Files, task: str) -> DataFrame:
    """Rows of a task, with the columns that name lines, and with fields that tables read."""
    rows = shown.frame(files["calibration"], task=task)
    fields = {
        "joint",
        "pairs",
        "own product",
        "nll",
        "brier",
        *(name for name, _ in NAMES.values()),
    }
    rows = rows.assign(**dict.fromkeys(fields - {*rows}, nan))
    return rows.assign(
        **{k: shown.ordered(rows[name], order) for k, (name, order) in NAMES.items()}
    )


def only(method: str, cell: Cell) -> Cell:
    """Cell of one method's rows."""
    return lambda part, peers: cell(part[part["method"] == method], peers)


def bracketed(cell: Cell, inside: Cell) -> Cell:
    """Two cells in one, the second in brackets."""

    def both(part: DataFrame, peers: DataFrame) -> str:
        more = inside(part, peers)
        return cell(part, peers) + (f" ({more})" if more else "")

    return both


def percent(field: str) -> Cell:
    return lambda part, peers: average(field, ".1f", 100)(part, peers) + " %"


def gap(rows: DataFrame, ours: str, theirs: str, field: str) -> Paired:
    """One method minus another, run by run."""
    return Paired.rows(*(rows[rows["method"] == name] for name in (ours, theirs)), field, RUN)


def minus(ours: str, theirs: str, field: str) -> Cell:
    """Cell: one method minus another, with a paired t-test."""
    return lambda part, peers: gap(part, ours, theirs, field).brief(4)


def rivals(rows: DataFrame) -> list[str]:
    own = OURS, POOL, SCORES, ELSEWHERE
    return [name for name in rows["method"].unique() if name not in own]


def mark(change: Paired, number: int) -> str:
    """† better and ‡ worse, with Bonferroni's correction for the number of rivals."""
    return "" if change.p * number >= 0.05 else " †" if change.mean < 0 else " ‡"


def ours_minus(field: str) -> Cell:
    """Cell: StackedNMM minus the method of the line."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        method = part["method"].iloc[0]
        change = gap(peers, OURS, method, field)
        return "" if method == OURS else change.spread(3) + mark(change, len(rivals(peers)))

    return cell


def best(rows: DataFrame, field: str, ours: str = OURS) -> tuple[str, Paired]:
    """The rival with the best mean, and one of our methods minus it."""
    found = {name: gap(rows, ours, name, field) for name in rivals(rows)}
    return max(found.items(), key=lambda item: item[1].mean)


def calibration(files: Files) -> str:
    """How good are the probabilities of each method?"""
    rows = rows_of(files, "splits")
    rows["PLL"] = rows["pairs"].fillna(rows["own product"])
    cells: dict = {"runs": count, "accuracy": average("accuracy", ".1f", 100)}
    for name in ("NLL", "Brier"):
        field = SCORED[name]
        cells |= {name: shown.centre(field, 3), (name, "ours minus"): ours_minus(field)}
    cells |= {"ECE": average("ece", ".3f"), "PLL": average("PLL", ".3f")}
    cells |= {JOINT: average("joint", ".3f"), "s": average("fit seconds", ".1f", of=median)}
    return table(rows, [*CELL, "method"], cells)


def minus_best(field: str, digits: int) -> Cell:
    """Cell: StackedNMM minus the best rival, with † if it is better than every rival."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        (rival, change), names = best(part, field), rivals(part)
        sure = all(mark(gap(part, OURS, name, field), len(names)) == " †" for name in names)
        return f"{change.mean:+.{digits}f} ({rival}){' †' * sure}"

    return cell


def missed(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the scores on which a rival has a better mean."""
    return ", ".join(s for s, field in SCORED.items() if best(part, field)[1].mean >= 0) or "none"


def missed_cells(files: Files) -> str:
    """Is StackedNMM better than the best of its rivals?"""
    rows, cells = rows_of(files, "splits"), {"runs": only(OURS, count)}
    for name, digits in {"NLL": 4, "Brier": 4, "ECE": 3}.items():
        cells[f"{name} minus the best rival's"] = minus_best(SCORED[name], digits)
    cells["ECE minus GATS's"] = lambda part, peers: gap(part, OURS, "GATS", "ece").spread(3)
    return table(rows[rows["backbone"] != "MLP"], CELL, cells | {"missed": missed})


def contributions(files: Files) -> str:
    """What do the pool, the NMM and the priors contribute?"""
    rows = rows_of(files, "splits")
    rows["beyond"] = rows["joint"] + rows["nll"]
    cells = {
        "NLL minus the pool's": minus(OURS, POOL, "nll"),
        "joint plus NLL": only(OURS, average("beyond", ".3f")),
        "scores alone: NLL minus temperature's": minus(SCORES, "temperature", "nll"),
        "scores alone: joint plus NLL": only(SCORES, average("beyond", ".3f")),
        "the other graph's priors: NLL minus the best rival's": (
            lambda part, peers: best(part, "nll", ELSEWHERE)[1].brief(4)
        ),
        "ECE minus temperature's": minus(OURS, "temperature", "ece"),
    }
    return table(rows, CELL, cells)


def over_nodes(files: Files) -> str:
    """Do the differences hold for other test nodes?"""
    rows = rows_of(files, "bootstrap").rename(columns={"nll": "NLL", "brier": "Brier"})
    rows = rows.melt([*CELL, "method"], ["NLL", "Brier"], "ours minus", "interval")
    cells = {"{}": lambda part, peers: "{1:+.3f} to {2:+.3f}".format(*part["interval"].iloc[0])}
    return table(rows, [*CELL, "ours minus"], cells, across="method")


def new_labels(files: Files) -> str:
    """Which method makes the most of labels that are observed later?"""
    rows = rows_of(files, "labels")
    scores = bracketed(average("nll", ".3f"), average("ece", ".3f"))
    cells = {name: only(name, scores) for name in rows["method"].unique()}
    for rival in ("C&S", "vector scaling, shrunk"):
        cells[f"NLL, updated minus {rival}"] = minus(UPDATED, rival, "nll")
    cells["update, s"] = only(UPDATED, average("seconds", ".1f", of=median))
    return table(rows, [*CELL, "known"], cells | {"splits": only(UPDATED, count)})


def counts_in_sets(files: Files) -> str:
    """How well does each model predict how many nodes of a set have a label?"""
    cells: dict = {"splits": count}
    for model in ("joint", "own product", "temperature"):
        cells[model, f"{model}: coverage"] = percent(f"{model}.coverage")
        cells[model, "width"] = average(f"{model}.width", ".2f")
        cells[model, "CRPS"] = average(f"{model}.CRPS", ".4f")
    rows = rows_of(files, "counts")
    for model in ("own product", "temperature"):
        rows[model] = rows["joint.CRPS"] / rows[f"{model}.CRPS"] - 1
        cells[f"CRPS, joint against {model}, %"] = spread(model, 1, 100)
    return table(rows, [*CELL, "nodes"], cells)


def twenty_questions(files: Files) -> str:
    """Which rule asks for the most useful labels?"""
    cells: dict = {}
    for number in SHOWN:
        nll, accuracy = f"curve.{number}.nll", percent(f"curve.{number}.accuracy")
        cells[f"{number} answers"] = bracketed(average(nll, ".3f"), accuracy)
    for base in ("entropy", "at random"):
        cells[f"{number} answers, NLL minus {base}"] = against(base, nll, 4, by=["split"])
    cells |= {"correlation with entropy": average("alike", ".4f"), "draws": count}
    return table(rows_of(files, "questions"), ["communities", "asked by"], cells)


def weights_of_edges(files: Files) -> str:
    """Do edge weights improve StackedNMM?"""
    cells = {"runs": count}
    for name, field in (SCORED | {JOINT: "joint"}).items():
        change = against("none", field, 4, by=RUN, form=Paired.spread)
        cells[name] = bracketed(average(field, ".4f"), change)
    return table(rows_of(files, "weights"), ["edge weights"], cells)


def calibration_priors(files: Files) -> str:
    """Which parameters fit nearly all labels best?"""
    cells = {name: spread(f"numbers.{field}", 2) for field, name in PARAMETERS.items()}
    return table(rows_of(files, "priors"), CELL, {"fits": count} | cells)


TABLES = (calibration, missed_cells, contributions, over_nodes, new_labels, counts_in_sets)
TABLES += (twenty_questions, weights_of_edges, calibration_priors)
