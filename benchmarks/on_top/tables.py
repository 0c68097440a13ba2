# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of docs/results/on-top.md, from the rows of calibration.jsonl."""

from __future__ import annotations

from statistics import median

from pandas import DataFrame

from benchmarks.on_top.labels import SHOWN, UPDATED
from benchmarks.on_top.run import ELSEWHERE, METHODS, OURS, POOL, SCORES
from benchmarks.shared import tables as shown
from benchmarks.shared.tables import Cell, Paired, against, average, count, ordered, spread, table

CELL, RUN = ["graph", "backbone"], ["split", "fold"]
JOINT = "log p(test \\| train)"
PARAMETERS = {"pool.log_scale": "log s", "pool.neighbors": "a", "pool.labels": "λ"}
PARAMETERS |= {"pool.agreement": "η", "pool.offsets": "sd of b", "log_kappa": "log κ"}
PARAMETERS |= {"log_floor": "log ε", "gamma": "γ", "similarity": "β"}
#: Columns that exist without rows, too.
FIELDS = ("dataset", "backbone", "method", "pairs", "own product", "joint", "nll", "share", "size")
FIELDS += ("communities", "joint.CRPS", "own product.CRPS", "temperature.CRPS")
Files = dict[str, list[dict]]


def rows_of(rows: list[dict], task: str) -> DataFrame:
    """Rows of a task, with graphs, backbones and methods in the order of lines."""
    found = shown.frame(rows, task=task)
    found = found.reindex(columns=list(dict.fromkeys([*found, *FIELDS])))
    found["graph"] = ordered(found["dataset"], shown.GRAPHS)
    found["backbone"] = ordered(found["backbone"], {"gcn": "GCN", "gat": "GAT", "mlp": "MLP"})
    return found


def splits(files: Files) -> DataFrame:
    """Runs of all methods on the published splits."""
    rows = rows_of(files["calibration"], "splits")
    rows["PLL"] = rows["pairs"].fillna(rows["own product"])
    rows["beyond"] = rows["joint"] + rows["nll"]
    rows["method"] = ordered(rows["method"], METHODS.keys())
    return rows


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


def calibration(files: Files) -> str:
    """How good are the probabilities of each method?"""
    cells = {
        "runs": count,
        "accuracy": average("accuracy", ".1f", 100),
        "NLL": shown.centre("nll", 3),
        ("NLL", "ours minus"): ours_minus("nll"),
        "Brier": shown.centre("brier", 3),
        ("Brier", "ours minus"): ours_minus("brier"),
        "ECE": average("ece", ".3f"),
        "PLL": average("PLL", ".3f"),
        JOINT: average("joint", ".3f"),
        "s": average("fit seconds", ".1f", of=median),
    }
    return table(splits(files), [*CELL, "method"], cells)


def from_rivals(rows: DataFrame, field: str, ours: str = OURS) -> list[tuple[str, Paired]]:
    """One of our methods minus every rival, the rival with the best mean first."""
    found = {name: gap(rows, ours, name, field) for name in rivals(rows)}
    return sorted(found.items(), key=lambda item: -item[1].mean)


def missed_cells(files: Files) -> str:
    """Is StackedNMM better than the best of its rivals?"""
    rows, lines = splits(files), []
    for (graph, backbone), part in shown.groups(rows[rows["backbone"] != "MLP"], CELL):
        runs, missed = f"{(part['method'] == OURS).sum()}", []
        line = {"graph": graph, "backbone": backbone, "runs": runs}
        for name, field, digits in (("NLL", "nll", 4), ("Brier", "brier", 4), ("ECE", "ece", 3)):
            found = from_rivals(part, field)
            rival, change = found[0]
            sure = all(mark(each, len(found)) == " †" for _, each in found)
            text = f"{change.mean:+.{digits}f} ({rival}){' †' * sure}"
            line[f"{name} minus the best rival's"] = text
            missed += [name] * (change.mean >= 0)
        line["ECE minus GATS's"] = gap(part, OURS, "GATS", "ece").spread(3)
        lines.append(line | {"missed": ", ".join(missed) or "none"})
    return shown.markdown(lines, 2)


def contributions(files: Files) -> str:
    """What do the pool, the NMM and the priors contribute?"""
    cells = {
        "NLL minus the pool's": minus(OURS, POOL, "nll"),
        "joint plus NLL": only(OURS, average("beyond", ".3f")),
        "scores alone: NLL minus temperature's": minus(SCORES, "temperature", "nll"),
        "scores alone: joint plus NLL": only(SCORES, average("beyond", ".3f")),
        "the other graph's priors: NLL minus the best rival's": (
            lambda part, peers: from_rivals(part, "nll", ELSEWHERE)[0][1].brief(4)
        ),
        "ECE minus temperature's": minus(OURS, "temperature", "ece"),
    }
    return table(splits(files), CELL, cells)


def over_nodes(files: Files) -> str:
    """Do the differences hold for other test nodes?"""
    rows = [
        row | {"ours minus": name, "interval": f"{low:+.3f} to {high:+.3f}"}
        for row in files["calibration"]
        if row["task"] == "bootstrap"
        for name, (_, low, high) in (("NLL", row["nll"]), ("Brier", row["brier"]))
    ]
    down, cells = [*CELL, "ours minus"], {"{}": shown.first("interval")}
    return table(rows_of(rows, "bootstrap"), down, cells, across="method")


def new_labels(files: Files) -> str:
    """Which method makes the most of labels that are observed later?"""
    rows = rows_of(files["calibration"], "labels")
    rows["known"] = [f"{100 * share:.0f} %" for share in rows["share"]]
    scores = bracketed(average("nll", ".3f"), average("ece", ".3f"))
    cells: dict = {name: only(name, scores) for name in rows["method"].unique()}
    for rival in ("C&S", "vector scaling, shrunk"):
        cells[f"NLL, updated minus {rival}"] = minus(UPDATED, rival, "nll")
    cells["update, s"] = only(UPDATED, average("seconds", ".1f", of=median))
    cells["splits"] = only(UPDATED, count)
    return table(rows, [*CELL, "known"], cells)


def counts_in_sets(files: Files) -> str:
    """How well does each model predict how many nodes of a set have a label?"""
    rows = rows_of(files["calibration"], "counts")
    rows["nodes"] = ordered(rows["size"], None)
    cells: dict = {"splits": count}
    for model in ("joint", "own product", "temperature"):
        cells[model, f"{model}: coverage"] = percent(f"{model}.coverage")
        cells[model, "width"] = average(f"{model}.width", ".2f")
        cells[model, "CRPS"] = average(f"{model}.CRPS", ".4f")
    for model in ("own product", "temperature"):
        rows[model] = rows["joint.CRPS"] / rows[f"{model}.CRPS"] - 1
        cells[f"CRPS, joint against {model}, %"] = spread(model, 1, 100)
    return table(rows, [*CELL, "nodes"], cells)


def twenty_questions(files: Files) -> str:
    """Which rule asks for the most useful labels?"""
    rows = rows_of(files["calibration"], "questions")
    rows["communities"] = ordered(rows["communities"], {False: "no", True: "yes"})
    rows["asked by"], cells = rows["method"], {}
    for number in SHOWN:
        nll, accuracy = f"curve.{number}.nll", percent(f"curve.{number}.accuracy")
        cells[f"{number} answers"] = bracketed(average(nll, ".3f"), accuracy)
    for base in ("entropy", "at random"):
        cells[f"{number} answers, NLL minus {base}"] = against(
            {"asked by": base}, nll, 4, by=["split"]
        )
    cells |= {"correlation with entropy": average("alike", ".4f"), "draws": count}
    return table(rows, ["communities", "asked by"], cells)


def weights_of_edges(files: Files) -> str:
    """Do edge weights improve StackedNMM?"""
    rows = rows_of(files["calibration"], "weights")
    rows["edge weights"], cells = rows["method"], {"runs": count}
    for name, field in {"NLL": "nll", "Brier": "brier", "ECE": "ece", JOINT: "joint"}.items():
        change = against({"edge weights": "none"}, field, 4, by=RUN, form=Paired.spread)
        cells[name] = bracketed(average(field, ".4f"), change)
    return table(rows, ["edge weights"], cells)


def calibration_priors(files: Files) -> str:
    """Which parameters fit nearly all labels best?"""
    cells = {name: spread(f"numbers.{field}", 2) for field, name in PARAMETERS.items()}
    return table(rows_of(files["calibration"], "priors"), CELL, {"fits": count} | cells)


TABLES = (calibration, missed_cells, contributions, over_nodes, new_labels, counts_in_sets)
TABLES += (twenty_questions, weights_of_edges, calibration_priors)
