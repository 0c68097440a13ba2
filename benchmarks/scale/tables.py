# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of speed.md and posteriors.md in docs/results."""

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.scale import chains, inference
from benchmarks.shared.records import Files
from benchmarks.shared.tables import GRAPHS, Cell, frame, markdown, ordered, table

CODES = {"loop": "loop over nodes in PyTorch", "compiled": "compiled loops (CPU, numba)"}
CODES |= {"sweeps": "tensor code (any device)"}
SIZES = {"nodes": "{nodes:,.0f}", "edges": "{edges:,.0f}"}


def filled(form: str, part: DataFrame, peers: DataFrame) -> str:
    """Cell: means of a line's columns in a format; empty if one of them is missing."""
    return "" if "nan" in (found := form.format_map(part.mean(numeric_only=True))) else found


def show(rows: DataFrame, down: list[str], cells: dict[str, Cell | str], across: str = "") -> str:
    """A table whose cells may be formats."""
    made = {k: partial(filled, c) if isinstance(c, str) else c for k, c in cells.items()}
    return table(rows, down, made, across)


def rows_of(rows: list[dict], **key) -> DataFrame:
    """A frame with names of graphs, and ``seconds`` as ``ms`` too; spaces for dots in names."""
    found = frame(rows, **key)
    found.columns = found.columns.str.replace(".", " ")
    if "dataset" in found:
        found["graph"] = ordered(found["dataset"], GRAPHS)
    times = found.filter(regex="^seconds")
    return found.join(1e3 * times.set_axis(times.columns.str.replace("seconds", "ms"), axis=1))


def gradient_variance(files: Files) -> str:
    rows = rows_of(files["gradient_variance"])
    noise = rows[rows["estimator"] == "reinforce"].set_index("labelled")["sd"]
    rows["ratio"] = rows["labelled"].map(noise) / rows["sd"]
    # A mean that is within twice its own noise says nothing.
    rows["mean"] = rows["mean"].where(rows["mean"] > 2 * rows["sd"] / rows["steps"] ** 0.5)
    cells = {"steps": "{steps:.0f}", "\\|mean\\|": "{mean:.2f}", "sd": "{sd:,.2f}"}
    cells |= {"sd of `reinforce` / sd": "{ratio:,.0f}"}
    cells |= {"share of the score term": "{score:.2f} ± {score error:.2f}"}
    return show(rows, ["labelled", "estimator"], cells)


def estimator_noise(files: Files) -> str:
    rows = rows_of(files["samples"], task="gradients")
    cells = {"T = {}": "{sd:,.2f} ({ms:.1f} ms)"}
    return show(rows, ["labelled", "estimator"], cells, "particles")


def draws_of_marginals(files: Files) -> str:
    rows = rows_of(files["samples"], task="marginals")
    rows["weights"] = rows["weighted"].map({False: "equal", True: "weighted"})
    rows["error"] *= 1e3
    rows["of the truth itself"] = (1e3 * rows["error of the reference"]).map("{:.2f}".format)
    down = ["labelled", "weights", "of the truth itself"]
    return show(rows, down, {"T = {:,}": "{error:.2f} ({ms:.0f} ms)"}, "draws")


def particles_of_likelihood(files: Files) -> str:
    rows = rows_of(files["samples"], task="likelihood")
    rows["name"] = rows["particles"].map("P = {:,}".format).replace("P = 0", "the bound")
    return show(rows, ["labelled"], {"{}": "{mean:,.2f} ± {sd:.2f} ({ms:.0f} ms)"}, "name")


def draws(files: Files) -> str:
    rows = rows_of(files["speed"], task="draw").rename(columns={"particles": "T"})
    rows["times"] = rows["seconds"][rows["code"] == "loop"].mean() / rows["seconds"]
    rows["code"] = ordered(rows["code"], CODES)
    cells = SIZES | {"ms": "{ms:,.1f}", "against the loop": "{times:,.0f} ×"}
    return show(rows, ["code", "T"], cells)


def steps(files: Files) -> str:
    rows = rows_of(files["speed"], task="step")
    rows["plain"] = rows["seconds bound"] / rows["seconds GCN"]
    rows["thinned"] = rows["seconds bound"] / rows["seconds GCN, input dropout"]
    cells = {"T = {}": "{plain:.2f} ({thinned:.2f})", "T = {}, ms": "{ms bound:.1f}"}
    return show(rows, ["labelled", "estimator"], cells, "particles")


def by_size(rows: DataFrame, name: str, cells: dict[str, str]) -> str:
    """A table by edges, with exponents of time since the size before in the same ``group``."""
    rows = rows.assign(group=ordered(rows["group"])).sort_values(["group", "edges"])
    logs = np.log(rows[["seconds", "edges"]]).groupby(rows["group"], observed=True).diff()
    rows["exponent"] = logs["seconds"] / logs["edges"]
    rows["nodes"] = rows["nodes"].map("{:,}".format)
    rows[["peak", "above"]] /= 1e9
    cells = {"edges": "{edges:,.0f}"} | cells | {"exponent of time": "{exponent:.2f}"}
    return show(rows, [name, "nodes"], cells | {"peak memory, GB": "{peak:.2f}"})


def growth(files: Files) -> str:
    rows = frame(files["speed"], task="growth").assign(group="step", step="all labels observed")
    cells = {"seconds a step": "{seconds:.3f}", "memory above start, GB": "{above:.3f}"}
    return by_size(rows, "step", cells)


def scale(files: Files) -> str:
    rows = frame(files["speed"], task="scale").rename(columns={"query": "group", "name": "query"})
    return by_size(rows, "query", {"labels": "{classes:.0f}", "seconds": "{seconds:.2f}"})


def of_both(part: DataFrame, peers: DataFrame) -> str:
    """Cell: milliseconds on the processor and on the GPU, of which one may be missing."""
    means = part[["ms cpu", "ms cuda"]].mean()
    return " / ".join("–" if x != x else f"{x:,.1f}" for x in means)


def devices(files: Files) -> str:
    rows = rows_of(files["device"], task="device")
    cells = {"{:,} nodes, CPU / GPU": of_both}
    return show(rows.assign(query=ordered(rows["query"])), ["query"], cells, "nodes")


def epochs(files: Files) -> str:
    rows = rows_of(files["epochs"])
    rows["backbone"] = rows["backbone"].str.upper()
    ratios = "NMM / networks", "with consistency", "by TraceGraph_ELBO"
    rows[[*ratios]] = rows["ratios"].tolist()
    cells = {f"{name}, ms": f"{{ms {name}:.1f}}" for name in ("backbone", "networks", "NMM")}
    return show(rows, ["graph", "backbone"], cells | {name: f"{{{name}:.2f}}" for name in ratios})


def tightness(files: Files) -> str:
    rows = frame(files["tightness"])
    rows["test gap"] = rows["test estimate"] - rows["test bound"]
    names = {"pairs, exact": "pair exact", "pairs, bound": "pair bound", "pairs, gap": "pair gap"}
    names |= {"all, SMC": "test estimate", "all, bound": "test bound", "all, gap": "test gap"}
    return show(rows, ["epoch"], {name: f"{{{field}:.4f}}" for name, field in names.items()})


def _ranked(rows: DataFrame, method: str) -> tuple[float, float]:
    """Graphs whose true concentration has the largest estimate, and all."""
    values = rows.pivot(index="seed", columns="kappa", values=method).dropna()
    return (values.idxmax(axis=1) == 0.4).sum(), len(values)


def concentrations(files: Files) -> str:
    """Mean nats a node over graphs, and how often the true concentration is first."""
    rows, lines = frame(files["path"], task="concentration"), []
    rows[["path", "bound", "particles"]] /= rows["nodes"].iloc[0]
    names = {"bound": "bound", "particles": "64 particles", "path": "path sampling"}
    seconds = {"path": "seconds", "particles": "seconds of particles"}
    for classes, part in rows.groupby("classes"):
        full = part.groupby("seed").filter(lambda graph: len(graph) == rows["kappa"].nunique())
        for method, name in names.items() if len(full) else ():
            means = full.groupby("kappa")[method].mean()
            line = {"labels": f"{classes}", "estimate": name}
            line |= {f"{kappa:g}": f"{value:.4f}" for kappa, value in means.items()}
            line["0.4 is first"] = "{} of {}".format(*_ranked(full, method))
            time = seconds.get(method)
            lines.append(line | {"CPU seconds": f"{full[time].median():.1f}" if time else ""})
    return markdown(lines, 2)


PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOOKS = {"marker": "o", "ms": 3, "lw": 1.2}
#: By task: what is drawn over what, for each of what; and its name.
PANELS = {
    "gradients": ("sd", "particles", "estimator", "standard deviation of the gradient"),
    "marginals": ("error", "draws", "weighted", "error of marginals, total variation"),
    "likelihood": ("relative", "particles", "task", "sd of log p, nats a labelled node"),
}


def samples_figure(files: Files) -> Figure:
    rows = frame(files["samples"])
    rows["relative"] = rows["sd"] / rows["labelled"]
    rows["weighted"] = rows["weighted"].map({False: "equal weights", True: "weighted"})
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.6), layout="constrained")
    for axis, (task, (what, over, each, name)) in zip(axes, PANELS.items(), strict=True):
        part = rows[(rows["task"] == task) & (rows[over] > 0)]
        curves = part.pivot(index=over, columns=[each, "labelled"], values=what)
        curves.columns = [f"{kind}, {labelled:,} labels" for kind, labelled in curves]
        kinds = part[each].nunique()
        looks = LOOKS | {"color": PALETTE[:kinds] * 2, "style": ["-"] * kinds + ["--"] * kinds}
        curves.plot(ax=axis, loglog=True, ylabel=name, **looks)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


#: Lines of the figure of growth, by the beginnings of their names: what the figure calls them.
DRAWN = {
    "Correct and Smooth on CSR": "Correct and Smooth",
    "StackedNMM.fit, posterior": "StackedNMM: fit\nand posterior",
    "a step": "step of\nthe bound",
    "marginals": "marginals",
    "condition": "condition",
}


def growth_figure(files: Files) -> Figure:
    rows = frame([row for row in files["speed"] if row["task"] in ("growth", "scale")])
    rows = rows.fillna({"query": "step", "name": "a step of the bound"})
    size = {"figsize": (5, 6.4), "layout": "constrained"}
    figure, axes = plt.subplots(2, 1, sharex=True, **size)
    ends: list[list[tuple]] = [[], []]
    for (begin, name), color in zip(DRAWN.items(), PALETTE, strict=False):
        part = rows[rows["name"].str.startswith(begin)].sort_values("edges")
        looks = {"marker": "o", "ms": 5, "lw": 2, "color": color}
        for axis, line, end in zip(axes, (part["seconds"], part["peak"] / 1e9), ends, strict=True):
            axis.plot(part["edges"], line, **looks)
            end.append((line.iloc[-1], part["edges"].iloc[-1], name, color))
    axes[0].set(xscale="log", ylabel="seconds", yscale="log")
    axes[1].set(xlabel="edges", ylabel="peak memory, GB", ylim=(0, None))
    for axis, end in zip(axes, ends, strict=True):
        below = -1.0  # names stand where the lines end, or above the name below
        for value, edges, name, color in sorted(end):
            place = (axis.transData + axis.transAxes.inverted()).transform((edges, value))[1]
            below = max(place, below + 0.09 + 0.03 * ("\n" in name))
            offset = 8, 205 * (below - place)  # points, of an axis of 205
            axis.annotate(name, (edges, value), offset, textcoords="offset points", color=color,
                          va="center", fontsize=11)  # fmt: skip
    return figure


NOISE = gradient_variance, estimator_noise, draws_of_marginals, particles_of_likelihood
SPEED = draws, steps, growth, scale, devices, epochs, tightness
TABLES = NOISE + SPEED + (concentrations,) + chains.TABLES + inference.TABLES
FIGURES = {"samples.png": samples_figure, "growth.png": growth_figure}
