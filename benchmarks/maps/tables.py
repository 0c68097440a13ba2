# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/maps.md."""

from statistics import mean, median

from pandas import DataFrame

from benchmarks.maps.run import METHODS, OURS
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import Cell, Paired, against, average, centre, count, frame, values

SPLITS = {"spatial": "blocks", "random": "random counties"}


def rows_of(files: Files, task: str) -> DataFrame:
    rows = frame(files["maps"], task=task)
    rows["held out"] = shared.ordered(rows["split"], SPLITS)
    return rows.assign(method=shared.ordered(rows["method"], METHODS.keys()))


def with_error(gap: Paired, digits: int, unit: float = 1) -> str:
    """Mean ± standard error, the median, and the number of splits."""
    if len(gap) < 2:
        return f"{unit * gap.mean:+.{digits}f} (one split)" if len(gap) else ""
    middle = f"median {unit * median(gap.gaps):+.{digits}f}, {len(gap)} splits"
    return f"{unit * gap.mean:+.{digits}f} ± {unit * gap.error:.{digits}f} ({middle})"


def minus(field: str, digits: int, unit: float = 1) -> Cell:
    """Cell: the method minus the NMM, over the splits that both have."""
    return against(OURS, field, digits, unit, form=with_error)


def maps(files: Files) -> str:
    rows = rows_of(files, "compare")
    cells: dict = {"splits": count, "NLL (median)": centre("nll", 3)}
    cells["NLL minus NMM's"] = minus("nll", 3)
    cells["accuracy, %"] = average("accuracy", ".1f", 100)
    cells["accuracy minus NMM's"] = minus("accuracy", 1, 100)
    cells |= {"Brier": average("brier", ".3f"), "Brier minus NMM's": minus("brier", 3)}
    cells |= {"ECE": average("ece", ".3f"), "s": average("seconds", ".1f", of=median)}
    return shared.table(rows, ["held out", "method"], cells)


def inside(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the number of splits whose observed agreement is in the 90 % interval."""
    name = "agreement"
    found = part[f"{name}.observed"].between(part[f"{name}.low"], part[f"{name}.high"])
    return f"{found.sum()} of {len(found)}"


def map_dependence(files: Files) -> str:
    rows = rows_of(files, "compare").dropna(subset="agreement.observed")
    rows["joint draws"] = rows["has joint draws"].map({True: "yes", False: "no"})
    cells: dict = {"joint": lambda part, peers: part["joint draws"].iloc[0], "splits": count}
    cells["agreement of neighbours"] = average("agreement.observed", ".3f")
    cells["in draws"] = average("agreement.mean", ".3f")
    cells["observed in 90 % interval"] = inside
    cells["totals of blocks in 90 % interval, %"] = average("blocks.covered", ".0f", 100)
    cells["width, share of a block"] = average("blocks.width", ".3f")
    return shared.table(rows, ["held out", "method"], cells)


def fraction(hops: int) -> Cell:
    """Cell: mean attention to sources at a number of hops."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        found = [row[hops] if hops < len(row) else 0.0 for row in part["found.attention"]]
        return f"{mean(found):.2f}"

    return cell


def fewest(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the median over splits of the fewest effective draws of a parameter."""
    sizes = part.filter(like="found.effective draws.")
    found = sizes.min(axis=1).dropna()
    return f"{found.median():.0f}" if len(found) else ""


def reach(part: DataFrame, peers: DataFrame) -> str:
    """Cell: chosen hops or sources, and the number of splits."""
    name = "hops" if values(part, "settings.hops") else "radius"
    found = part[f"settings.{name}"].astype(int).value_counts().sort_index()
    return ", ".join(f"{value} ({number} x)" for value, number in found.items())


def map_attention(files: Files) -> str:
    rows = rows_of(files, "compare")
    rows = rows[rows["found.attention"].notna()]
    cells: dict = {"splits": count, "hops": reach}
    cells |= {name: centre(f"found.{name}.mean", 2) for name in ("rho", "kappa", "gamma")}
    cells |= {f"attention at {k}": fraction(k) for k in range(4)}
    cells |= {"fewest effective draws": fewest, "s": average("seconds", ".0f", of=median)}
    return shared.table(rows, ["held out", "method"], cells)


def map_chains(files: Files) -> str:
    lines = []
    for row in pick(files["maps"], task="chains"):
        for name, found in row["chains"].items():
            shown = name if name.startswith("beta") else f"log {name}"
            line = {"method": row["method"], "parameter": shown, "R-hat": f"{found['R-hat']:.2f}"}
            line["draws"] = f"{2 * row['settings']['draws']}"
            line["effective draws"] = f"{found['effective draws']:.0f}"
            lines.append(line)
    return shared.markdown(lines, 2)


def map_settings(files: Files) -> str:
    rows = rows_of(files, "search")
    names = [name for name in rows if name.startswith("settings.")]

    def text(row) -> str:
        found = row[names].dropna()
        return ", ".join(f"{k.removeprefix('settings.')} {v:g}" for k, v in found.items())

    rows["setting"] = rows.apply(text, axis=1)
    least = rows.groupby(["split", "seed", "method"], observed=True)["nll"].transform("min")
    rows["chosen"] = (rows["nll"] == least).astype(float)
    cells = {"splits": count, "validation NLL (median)": centre("nll", 3)}
    cells["chosen"] = average("chosen", ".0f", of=sum)
    return shared.table(rows, ["held out", "method", "setting"], cells)


TABLES = maps, map_dependence, map_attention, map_chains, map_settings
