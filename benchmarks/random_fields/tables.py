# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of docs/results/fields.md."""

import re
from statistics import mean, median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import Paired, average, centre_of, first, frame, table, values

#: Tasks of single fields of 128 x 128 pixels, and what names a field of some number of labels.
LARGE, FIELD = ("letter", "plain"), ("coupling", "seed")
#: By the number of labels: the critical coupling of an infinite grid, and an NMM's longest fit.
CRITICAL = {2: 0.4407, 4: 1.0986, 8: 1.3422}
LONGEST = {2: "NMM, 2000 steps", 4: "NMM, 500 steps", 8: "NMM, 500 steps"}
METHODS = {"mean field": "mean field", "loopy": "loopy BP", "NMM": "NMM"}
NETWORKS, NARROW = ("NMM", "NMM-CNN"), "12 x 40"
SECONDS = {"s": average("seconds", ".1f", of=median)}


def sampling_error(part: DataFrame) -> float:
    """Standard error of a mean over fields."""
    return sum(each**2 for each in values(part, "error")) ** 0.5 / len(part)


def with_error(field: str, error: str) -> shared.Cell:
    """Cell: a value and, if it has one, its standard error."""
    return lambda f, _: " ± ".join(f"{x:.1f}" for name in (field, error) for x in values(f, name))


def closer(gaps: Paired, *form: float) -> str:
    return below(gaps.gaps, 0)


def below(found: list[float], limit: float) -> str:
    return f"{sum(each < limit for each in found)} of {len(found)}" if found else ""


def strips(files: Files) -> str:
    cells = {
        "fields": shared.count,
        "KL, mean field": shared.centre("mean field", 2),
        "KL, NMM's bound": shared.centre("NMM bound", 2),
        "KL, NMM": lambda f, _: f"{centre_of(f['NMM'], 2)} ± {sampling_error(f):.2f}",
        "minus mean field": lambda f, _: Paired([*(f["NMM"] - f["mean field"])]).text(2),
        "worst ratio": lambda f, _: f"{max(f['NMM bound'] / f['mean field']):.2f}",
    }
    cells |= {f"error, {n}": average(f"marginals.{k}", ".4f") for k, n in METHODS.items()}
    cells |= {f"s, {n}": average(f"seconds.{k}", ".1f", of=median) for k, n in METHODS.items()}
    return table(frame(files["fields"], task="strips"), ["coupling"], cells)


def narrow(files: Files, measure: str) -> DataFrame:
    """Rows of narrow grids that have a measure, by labels, method and coupling."""
    rows = []
    for row in files["fields_compared"]:
        if row["task"] not in LARGE and measure in row:
            share = f"{row['coupling'] / CRITICAL[row['labels']]:.1f}"
            rows.append(row | {"share": share, "ours": row["method"] == LONGEST[row["labels"]]})
            rows[-1]["place"] = re.sub(r"\d+", lambda n: n[0].zfill(4), row["method"])
    return frame(sorted(rows, key=lambda row: (row["labels"], row["place"], row["coupling"])))


def field_rivals(files: Files) -> str:
    rows, base = narrow(files, "KL"), {"ours": True}

    def kl(part: DataFrame) -> str:
        error = f" ± {sampling_error(part):.2f}" if values(part, "error") else ""
        return f"{mean(part['KL']):.2f}{error} ({len(part)})" if len(part) else ""

    cells = {
        f"KL, {share} of critical": lambda f, _, share=share: kl(f[f["share"] == share])
        for share in sorted(set(rows.get("share", ())))
    }
    cells |= {"minus NMM": shared.against(base, "KL", 2, by=FIELD)}
    cells |= {"closer than NMM": shared.against(base, "KL", 2, by=FIELD, form=closer)}
    return table(rows, ["labels", "method"], cells | SECONDS)


def named(rows: list[dict]) -> list[dict]:
    """Rows of large fields, by the name of the field."""
    found = (r | {"field": f"{r['task']} {r.get('coupling', r.get('seed'))}"} for r in rows)
    return sorted((r for r in found if r["task"] in LARGE), key=lambda row: row["field"])


def large_bounds(files: Files) -> list[dict]:
    """Rows of large fields, with divergences and their ratios to the mean field's."""
    rows = named(files["fields"])
    for row in rows:
        row |= {name: row[name] + row["log Z"] for name in ("mean field", *NETWORKS)}
        row |= {f"{name} ratio": row[name] / row["mean field"] for name in NETWORKS}
    return rows


def large(files: Files) -> str:
    cells = {"log Z": with_error("log Z", "log Z error")}
    cells |= {"KL, mean field": first("mean field", ".1f")}
    cells |= {f"KL, {name}'s bound": first(name, ".1f") for name in NETWORKS}
    cells |= {f"{name} / mean field": first(f"{name} ratio", ".2f") for name in NETWORKS}
    cells |= {f"s, {n}": first(f"seconds.{k}", ".0f") for k, n in METHODS.items()}
    cells |= {"s, NMM-CNN": first("seconds.NMM-CNN", ".0f")}
    return table(frame(large_bounds(files)), ["field"], cells)


def corrected(files: Files) -> str:
    """Fits that start at the mean field, against it."""
    rows = []
    for row in files["fields"]:
        if "corrected" not in row["task"]:
            continue
        kind = row.get("kind", f"{row.get('labels')} labels")
        name = row["seed"] if kind == "letter" else row["coupling"]
        rows.append(row | {"fields": f"{kind} {name}" if "kind" in row else kind, "name": name})
        rows[-1]["ratio"] = row["bound"] / row["mean field"]
        rows[-1]["coupling"] = "" if "kind" in row else row["coupling"]
    base, by = {"method": "NMM"}, ("name", "seed", "run")

    def gain(part: DataFrame, peers: DataFrame) -> str:
        """The ratio of mean gains over the mean field, of fits that both methods have."""
        pairs = part.merge(peers[peers["method"] == "NMM"], on=by, suffixes=("", " of NMM"))
        ours, theirs = (pairs[f"mean field{of}"] - pairs[f"bound{of}"] for of in ("", " of NMM"))
        return f"{ours.mean() / theirs.mean():.2f}"

    cells = {
        "fits": shared.count, "KL, mean field": average("mean field", ".2f"),
        "KL, bound": average("bound", ".2f"),
        "largest ratio to the mean field": average("ratio", ".2f", of=max),
        "closer": lambda f, _: below(values(f, "ratio"), 1),
        "gain / NMM's": gain, "minus NMM": shared.against(base, "bound", 2, by=by),
        "CPU s": average("seconds.fit", ".0f", of=median),
    }  # fmt: skip
    return table(frame(rows), ["fields", "coupling", "method"], cells)


def large_rivals(files: Files) -> str:
    rows = named(files["fields_compared"])

    def cell(part: DataFrame, peers: DataFrame) -> str:
        own = with_error("KL", "error")(part, peers)
        return f"{own} ({first('seconds', '.0f')(part, peers)} s)"

    return table(frame(rows), ["field"], {"KL, {}": cell}, across="method")


def amortized(files: Files) -> str:
    lines = []
    for row in pick(files["fields"], task="amortized"):
        free, network = row["mean field"], row["NMM-CNN"]
        gaps = Paired([b - a for a, b in zip(free, network, strict=True)])
        line = {"starts at": row.get("start", "even labels"), "NMM-CNN closer": closer(gaps)}
        line |= {"mean field": centre_of(free, 2)}
        line |= {"NMM-CNN, bound": centre_of(network, 2), "difference": gaps.text(2)}
        line |= {f"{k}, ms": f"{1e3 * median(v):.0f}" for k, v in row["seconds"].items()}
        lines.append(line | {"training, s": f"{row['train seconds']:.0f}"})
    return shared.markdown(lines, 0)


def many_fields(files: Files) -> str:
    lines, rows = [], pick(files["fields"], task="many fields")
    for row in rows:
        (free, *_) = pick(rows, fields=row["fields"], method="mean field")
        gaps = [kl - other for kl, other in zip(row["KL"], free["KL"], strict=True)]
        line = {"fields": row["fields"], "method": row["method"]}
        line["closer than the mean field"] = "" if row is free else below(gaps, 0)
        line["KL"] = centre_of(row["KL"], 2)
        line["log Z minus exact"] = f"{mean(e):+.2f}" if (e := row.get("log Z error")) else ""
        line["error of marginals"] = f"{mean(row['error']):.4f}"
        lines.append(line | {"CPU ms": f"{1e3 * median(row['seconds']):.0f}"})
    return shared.markdown(lines, 2)


#: How names of methods begin: a colour and a marker.
FAMILIES = {
    "mean field": ("#999999", "s"),
    "chains": ("#000000", "D"),
    "windows": ("#009E73", "^"),
    "VAN": ("#CC79A7", "v"),
    "NMM of half": ("#D55E00", "o"),
    "NMM": ("#0072B2", "o"),
}


def field_seconds(files: Files) -> Figure:
    rows = frame(row for row in files["fields_compared"] if row["task"] == "strips" and "KL" in row)
    begins = rows.method.map(lambda name: next(each for each in FAMILIES if name.startswith(each)))
    rows["family"] = shared.ordered(begins, list(FAMILIES))
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(10.8, 4.4), layout="constrained")
    for axis, ((coupling,), part) in zip(axes, shared.groups(rows, ["coupling"]), strict=True):
        for (family,), own in shared.groups(part, ["family"]):
            line = own.groupby("method").agg({"seconds": "median", "KL": "mean"})
            line = line.assign(seconds=line.seconds.clip(lower=1e-2)).sort_values(["seconds", "KL"])
            color, marker = FAMILIES[family]
            axis.plot(*line.to_numpy().T, color=color, marker=marker, ms=5, lw=1.2, label=family)
        axis.set(xscale="log", yscale="log", xlabel="seconds, one thread")
        axis.set_title(f"coupling {coupling}", fontsize=10)
    axes[0].set_ylabel("KL divergence, nats (12 x 40 pixels)")
    figure.legend(handles=axes[0].lines, loc="outside lower center", ncols=4, frameon=False)
    return figure


TABLES = (strips, field_rivals, large, large_rivals, amortized)
TABLES += (corrected, many_fields)
FIGURES = {"field_seconds.png": field_seconds}
