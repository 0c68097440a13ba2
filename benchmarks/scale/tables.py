# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/speed.md and docs/results/batches.md."""

from __future__ import annotations

import numpy as np
from pandas import DataFrame

from benchmarks.shared.tables import (
    GRAPHS,
    Cell,
    Paired,
    against,
    average,
    count,
    frame,
    ordered,
    spread,
    table,
)

Files = dict[str, list[dict]]
CODES = {"loop": "loop over nodes in PyTorch", "compiled": "compiled loops (CPU, numba)"}
CODES |= {"sweeps": "tensor code (any device)"}
CUTS = {"random": "at random", "groups": "Louvain's groups"}
#: Nodes of ogbn-papers100M (Hu et al. 2020), its edges in both directions and to itself, labels.
PAPERS = 111_059_956, 2 * 1_615_685_872 + 111_059_956, 172


def text(form: str) -> Cell:
    """Cell: columns of the only row in a format; empty if one of them is missing."""
    return lambda part, peers: "" if "nan" in (found := form.format_map(part.iloc[0])) else found


def flat(rows: list[dict], **key) -> DataFrame:
    """A frame whose nested values have names with a space, with ``seconds`` as ``ms`` too."""
    found = frame(rows, **key)
    found.columns = found.columns.str.replace(".", " ")
    times = found.filter(regex="^seconds")
    return found.join((1e3 * times).rename(columns=lambda name: name.replace("seconds", "ms")))


def gradient_variance(files: Files) -> str:
    """How noisy is each estimator's gradient, and which share of the score term does it have?"""
    rows = frame(files["gradient_variance"])
    noise = rows[rows["estimator"] == "reinforce"].set_index("labelled")["sd"]
    rows["ratio"] = rows["labelled"].map(noise) / rows["sd"]
    # A mean that is within twice its own noise says nothing.
    rows["mean"] = rows["mean"].where(rows["mean"] > 2 * rows["sd"] / rows["steps"] ** 0.5)
    cells = {"steps": text("{steps}"), "\\|mean\\|": text("{mean:.2f}"), "sd": text("{sd:,.2f}")}
    cells |= {"sd of `reinforce` / sd": text("{ratio:,.0f}")}
    cells |= {"share of the score term": text("{score:.2f} ± {score error:.2f}")}
    return table(rows, ["labelled", "estimator"], cells)


def estimator_noise(files: Files) -> str:
    """What do particles change in the noise of a gradient and in the time of a step?"""
    rows = flat(files["samples"], task="gradients")
    cells = {"T = {}": text("{sd:,.2f} ({ms:.1f} ms)")}
    return table(rows, ["labelled", "estimator"], cells, across="particles")


def draws_of_marginals(files: Files) -> str:
    """How many draws do marginals of the posterior need?"""
    rows = flat(files["samples"], task="marginals")
    rows["weights"] = rows["weighted"].map({False: "equal", True: "weighted"})
    rows["error"] *= 1e3
    rows["of the truth itself"] = (1e3 * rows["error of the reference"]).map("{:.2f}".format)
    down = ["labelled", "weights", "of the truth itself"]
    return table(rows, down, {"T = {:,}": text("{error:.2f} ({ms:.0f} ms)")}, across="draws")


def particles_of_likelihood(files: Files) -> str:
    """How many particles does log p of labels need, and how far is the bound from it?"""
    rows = flat(files["samples"], task="likelihood")
    names = rows["particles"].map("P = {:,}".format).where(rows["particles"] > 0, "the bound")
    cells = {"{}": text("{mean:,.2f} ± {sd:.2f} ({ms:.0f} ms)")}
    return table(rows.assign(name=names), ["labelled"], cells, across="name")


def draws(files: Files) -> str:
    """How long does one draw of q(c | y) take?"""
    rows = flat(files["speed"], task="draw").rename(columns={"particles": "T"})
    rows["times"] = rows["ms"][rows["code"] == "loop"].mean() / rows["ms"]
    rows["code"] = ordered(rows["code"], CODES)
    cells = {"nodes": text("{nodes:,}"), "edges": text("{edges:,}"), "ms": text("{ms:,.1f}")}
    return table(rows, ["code", "T"], cells | {"against the loop": text("{times:,.0f} ×")})


def steps(files: Files) -> str:
    """How long does a step of the bound take, over a step of a GCN?"""
    rows = flat(files["speed"], task="step")
    rows["plain"] = rows["ms bound"] / rows["ms GCN"]
    rows["thinned"] = rows["ms bound"] / rows["ms GCN, input dropout"]
    cells = {"T = {}": text("{plain:.2f} ({thinned:.2f})"), "T = {}, ms": text("{ms bound:.1f}")}
    return table(rows, ["labelled", "estimator"], cells, across="particles")


def evidence_steps(files: Files) -> str:
    """How long does a step with latent labels take, over one with observed labels?"""
    rows = flat(files["speed"], task="evidence")
    rows["ratio"] = rows["ms evidence"] / rows["ms observed"]
    cells = {"nodes": text("{nodes:,}"), "edges": text("{edges:,}"), "labels": text("{classes}")}
    cells |= {"T": text("{particles}"), "observed, ms": text("{ms observed:.1f}")}
    cells |= {"evidence, ms": text("{ms evidence:.1f}"), "ratio": text("{ratio:.2f}")}
    return table(rows, ["estimator"], cells)


def by_size(rows: DataFrame, name: str, cells: dict[str, Cell]) -> str:
    """A table by edges, with exponents of time since the size before in the same ``group``."""
    rows = rows.assign(group=ordered(rows["group"])).sort_values(["group", "edges"])
    logs = np.log(rows[["seconds", "edges"]]).groupby(rows["group"], observed=True).diff()
    rows["exponent"] = logs["seconds"] / logs["edges"]
    rows["nodes"] = rows["nodes"].map("{:,}".format)
    rows[["peak", "above"]] /= 1e9
    cells = {"edges": text("{edges:,}")} | cells
    cells |= {"exponent of time": text("{exponent:.2f}"), "peak memory, GB": text("{peak:.2f}")}
    return table(rows, [name, "nodes"], cells)


def growth(files: Files) -> str:
    """How do time and memory of a step of the bound grow with the graph?"""
    rows = frame(files["speed"], task="growth").assign(group="step", step="all labels observed")
    cells = {"seconds a step": text("{seconds:.3f}"), "memory above start, GB": text("{above:.3f}")}
    return by_size(rows, "step", cells)


def scale(files: Files) -> str:
    """How do time and memory of queries grow with the graph?"""
    rows = frame(files["speed"], task="scale").rename(columns={"query": "group", "name": "query"})
    return by_size(rows, "query", {"labels": text("{classes}"), "seconds": text("{seconds:.2f}")})


def large_graphs(files: Files) -> str:
    """How do time and memory of a StackedNMM grow, up to ten million nodes?"""
    rows = frame(files["large"], task="sizes")
    empty = (rows["peak"] - rows["above"]).groupby(rows["nodes"]).transform("min")
    work = PAPERS[1] * PAPERS[2] / (rows["edges"] * rows["classes"])
    hours = (rows["seconds"] * work / 3600).where(rows["nodes"] == rows["nodes"].max())
    rows = rows.assign(group=rows["stage"], memory=(rows["peak"] - empty) / 1e9, hours=hours)
    cells = {"seconds": text("{seconds:.2f}"), "papers100M, hours": text("{hours:.1f}")}
    cells |= {"of the graph and the stage, GB": text("{memory:.3f}")}
    return by_size(rows, "stage", cells)


def cut_graphs(files: Files) -> str:
    """What would ranks of a cluster have to exchange, if a graph were cut into parts?"""
    rows = frame(files["large"], task="cuts")
    rows["graph"], rows["cut by"] = ordered(rows["graph"], GRAPHS), ordered(rows["way"], CUTS)
    rows["largest"] *= rows["parts"] / rows["nodes"]
    rows["cut"] *= 100 / rows["edges"]
    rows["halo"] /= rows["nodes"]
    rows["sent"] = 2 * rows["halo"] * 4e-9 * PAPERS[0] * PAPERS[2] / rows["parts"]
    cells = {"nodes": text("{nodes:,}"), "largest part": text("{largest:.2f} of the mean")}
    cells |= {"edges between parts": text("{cut:.0f} %")}
    cells |= {"halo, nodes for each node": text("{halo:.2f}"), "papers100M, GB": text("{sent:.1f}")}
    return table(rows, ["graph", "cut by", "parts"], cells)


def epochs(files: Files) -> str:
    """What does an epoch of an NMM cost, over the passes of its networks?"""
    rows = flat(files["epochs"])
    rows["graph"], rows["backbone"] = ordered(rows["dataset"], GRAPHS), rows["backbone"].str.upper()
    times = ("backbone", "networks", "NMM")
    ratios = ("NMM / networks", "with consistency", "by TraceGraph_ELBO")
    cells = {f"{name}, ms": text(f"{{ms {name}:.1f}}") for name in times}
    cells |= {name: text(f"{{ratios[{number}]:.2f}}") for number, name in enumerate(ratios)}
    return table(rows, ["graph", "backbone"], cells)


def tightness(files: Files) -> str:
    """How far is the bound from the likelihood while an NMM trains?"""
    rows = frame(files["tightness"])
    rows["gap"] = rows["test estimate"] - rows["test bound"]
    names = {"pairs, exact": "pair exact", "pairs, bound": "pair bound", "pairs, gap": "pair gap"}
    names |= {"all, SMC": "test estimate", "all, bound": "test bound", "all, gap": "gap"}
    cells = {name: text(f"{{{field}:.4f}}") for name, field in names.items()}
    return table(rows, ["epoch"], cells)


def batch_rows(files: Files, task: str, heading: str) -> DataFrame:
    """Rows of the whole graph, then of batches by size; ``heading`` has the kind and the size."""
    rows = frame(files["batches"], task=task)
    rows = rows.sort_values("batch_size", na_position="first", kind="stable")
    sizes = rows["batch_size"].map(", {:.0f}".format).where(rows["batch_size"] > 0, "")
    ways = rows["way"].replace("clusters", "cluster-wise")
    return rows.assign(graph=ordered(rows["dataset"], GRAPHS), **{heading: ways + sizes})


def lost(field: str, digits: int, unit: float = 1) -> Cell:
    """Cell: the paired difference from the whole graph."""
    whole = {"way": "whole graph"}
    return against(whole, field, digits, unit, form=Paired.spread, better=1)


def batch_training(files: Files) -> str:
    """Do mini-batches train as well as the whole graph?"""
    down, gap = ["graph", "batches, seeds in each"], "minus whole graph's"
    joint = "log p(test \\| train), nats a node"
    cells = {"runs": count, "accuracy": spread("accuracy", 1, 100)}
    cells |= {("accuracy", gap): lost("accuracy", 1, 100)}
    cells |= {joint: spread("joint", 3), (joint, gap): lost("joint", 3)}
    cells |= {"epochs": average("epochs", ".0f"), "steps": average("steps", ".0f")}
    return table(batch_rows(files, "training", down[1]), down, cells)


def batch_bounds(files: Files) -> str:
    """What does a sum over batches lose of the bound and of the likelihood?"""
    down = ["graph", "batches, nodes in each"]
    names = {"bound, all labels": "bound", "log p, all labels": "estimate"}
    names |= {"bound, training labels": "train bound", "log p, training labels": "train estimate"}
    names |= {"log p(test \\| train)": "joint", "-NLL": "alone"}

    def cell(whole: Cell, gap: Cell) -> Cell:
        return lambda part, peers: gap(part, peers) or whole(part, peers)

    cells = {name: cell(spread(field, 3), lost(field, 4)) for name, field in names.items()}
    cells["accuracy"] = cell(spread("hits", 1, 100), lost("hits", 1, 100))
    return table(batch_rows(files, "bound", down[1]), down, {"runs": count} | cells)


def batch_throughput(files: Files) -> str:
    """Are two processes faster than one?"""
    rows = frame(files["batches"], task="throughput")
    one = rows[rows["processes"] == 1].set_index(["dataset", "repeat"])["seconds"].rename("one")
    rows = rows.join(one, on=["dataset", "repeat"])
    rows["ratio"] = (rows["one"] / rows["seconds"]).where(rows["processes"] > 1)
    rows["graph"] = ordered(rows["dataset"], GRAPHS)
    cells = {"runs": count, "seconds an epoch": spread("seconds", 3)}
    return table(rows, ["graph", "processes"], cells | {"times as fast as one": spread("ratio", 2)})


NOISE = gradient_variance, estimator_noise, draws_of_marginals, particles_of_likelihood
SPEED = draws, steps, evidence_steps, growth, scale, large_graphs, cut_graphs, epochs, tightness
TABLES = NOISE + SPEED + (batch_training, batch_bounds, batch_throughput)
