# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Where this library deviates from the paper, and what each deviation changes, for report.py."""

from __future__ import annotations

from collections.abc import Iterator

import images_tables
from common import GRAPHS, difference, grouped, names, pick, table

#: The change back to the paper's choice (or to another one): where, in the paper, and here.
NODES = {
    "link softplus + 1": ("concentrations", "softplus + 1", "exp, floor 0.1"),
    "link square + 1": ("concentrations", "square + 1", "exp, floor 0.1"),
    "link exp + 1": ("concentrations", "floor 1", "exp, floor 0.1"),
    "gamma 0": ("attention to oneself", "γ starts at 0", "γ starts at 2"),
    "200 epochs": ("training", "200 epochs", "400 epochs"),
    "weight decay .005": ("weight decay", ".005", "chosen from a pool by validation"),
    "paper's, softplus + 1": ("all of it", "softplus + 1, rate .01", "ours"),
    "paper's, square + 1": ("all of it", "square + 1, rate .01", "ours"),
    "paper's, softplus + 1, lr .05": ("all of it", "softplus + 1, rate .05", "ours"),
    "paper's, square + 1, lr .05": ("all of it", "square + 1, rate .05", "ours"),
    "estimator one_step_credit": (
        "gradient",
        "REINFORCE; tried: `one_step_credit`",
        "`reward_to_go` up to 300 labels, unbiased too",
    ),
    "estimator no_score": (
        "gradient",
        "REINFORCE; tried: `no_score`",
        "`reward_to_go` up to 300 labels, unbiased too",
    ),
    "sequential": ("prediction", "joint: one node after another", "marginals"),
}
OWN = "a network of its own, as wide as memberships"
LINKS = {"own attention": ("DGLFRM's attention", OWN, "first layer shared, 16 outputs")}
FIELDS = {"no groups": ("NMM-CNN's input", "potentials", "and the groups of the order")}
IMAGES = {
    "NMM-one-step-credit": (
        "gradient",
        "REINFORCE; tried: `one_step_credit`",
        "`no_score`: no score term",
    ),
    "NMM-Gaussian": (
        "concentrations, attention",
        "Gaussian of one width, γ = 5",
        "logistic of a width for each pixel, γ learned",
    ),
    "NMM-one-width": ("widths", "one width", "a width for each pixel"),
}
Line = list[str]


def tables(rows: dict[str, list[dict]]) -> dict[str, str]:
    """Each deviation undone alone: what is measured with the paper's choice, minus ours."""
    lines = [*nodes(rows["nodes"]), *images(rows["images"])]
    lines += [*links(rows["deviations"], rows["links"]), *fields(rows["deviations"])]
    head = "experiment | what | in the paper | here | measured on | the paper's minus ours"
    return {"from paper": table(head, lines, left=5)}


def line(where: str, change: str, known: dict, on: str, gaps: dict[str, str]) -> Line:
    cells = "; ".join(f"{name} {gap}" for name, gap in gaps.items() if gap)
    return [where, *known.get(change, (change, "", "")), on, cells]


def gap(both: list[tuple[dict, dict]], field: str, digits: int, unit: float = 1) -> str:
    """Of rows here and changed."""
    return difference([(unit * a[field], unit * b[field]) for a, b in both], digits)


def nodes(rows: list[dict]) -> Iterator[Line]:
    """Test accuracy in points and NLL, paired by seed with the row of no change."""
    found = grouped(pick(rows, task="deviations"), "dataset", "backbone")
    for (dataset, kind), part in found.items():
        where = f"NMM-{kind.upper()}, {GRAPHS.get(dataset, dataset)}"
        by: dict[str, dict] = {}
        for row in part:
            by.setdefault(row["change"], {})[row["seed"]] = row["test"]
        base, one_by_one = by.pop("none", {}), pick(part, change="none")
        hits = [(r["test"], {"accuracy": r["sequential"]}) for r in one_by_one if "sequential" in r]
        for change in names(NODES, ["sequential"] * bool(hits) + list(by)):
            both, gaps = hits, {}
            if change != "sequential":
                both = [(base[seed], test) for seed, test in by[change].items() if seed in base]
                gaps = {"NLL": gap(both, "nll", 3)}
            gaps = {"accuracy": gap(both, "accuracy", 1, 100)} | gaps
            yield line(where, change, NODES, f"{len(both)} seeds", gaps)


def links(rows: list[dict], compared: list[dict]) -> Iterator[Line]:
    for (dataset, change), part in grouped(pick(rows, task="links"), "dataset", "change").items():
        ours = pick(compared, task="compare", guide="nmm", dataset=dataset)
        here = {row["seed"]: row for row in ours}
        both = [(here[row["seed"]], row) for row in part if row["seed"] in here]
        tests = [(a["test"], b["test"]) for a, b in both]
        gaps = {measure: gap(tests, measure, 2) for measure in ("AP", "AUC")}
        gaps["bound"] = gap(both, "loss", 4, -1)
        where = f"NMM-DGLFRM, {GRAPHS.get(dataset, dataset)}"
        yield line(where, change, LINKS, f"{len(both)} splits", gaps)


def fields(rows: list[dict]) -> Iterator[Line]:
    rows = pick(rows, task="fields")
    here = {(row["coupling"], row["seed"]): row for row in pick(rows, change="")}
    for (change,), part in grouped(rows, "change").items():
        places = [(row["coupling"], row["seed"]) for row in part]
        both = [
            (here[place], row) for place, row in zip(places, part, strict=True) if place in here
        ]
        if change:
            gaps = {"KL's bound, nats": gap(both, "bound", 2)}
            yield line("NMM-CNN on 12 x 40 pixels", change, FIELDS, f"{len(both)} fields", gaps)


def images(rows: list[dict]) -> Iterator[Line]:
    """Test images where there are, or else the mean over validation images."""
    done = set()
    for block, found in images_tables.tested(rows).items():
        for change in (change for change in IMAGES if change in found and "NMM" in found):
            parts = [images_tables.with_scaled(found[method]) for method in ("NMM", change)]
            pairs = {field: images_tables.paired(*parts, field) for field in ("PSNR", "best")}
            gaps = {"PSNR": difference(pairs["PSNR"], 2), "log p": difference(pairs["best"], 3)}
            where = "NMM denoiser, " + ", ".join(images_tables.title(block))
            done.add((change, images_tables.steps_of(block)))
            yield line(where, change, IMAGES, f"{len(pairs['PSNR'])} images", gaps)
    trained = [row for row in pick(rows, task="train") if "log p" in row]
    last = {(r["method"], r["seed"], images_tables.size(r["settings"])): r for r in trained}
    for (change, seed, size), row in last.items():
        base = last.get(("NMM", seed, size))
        if change in IMAGES and base and (change, row["settings"]["num_steps"]) not in done:
            digits = {"PSNR": 2, "log p": 3, "joint": 3}
            gaps = {field: gap([(base, row)], field, digits[field]) for field in digits}
            yield line(f"NMM denoiser, {size}, validation", change, IMAGES, "1 seed", gaps)
