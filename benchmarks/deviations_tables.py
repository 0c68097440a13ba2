# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Where this library deviates from the paper, and what each deviation changes, for report.py."""

from __future__ import annotations

from collections.abc import Iterator

import images_tables
from common import GRAPHS, Pairs, difference, grouped, names, pick, table

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
    "estimator horizon": (
        "gradient",
        "REINFORCE; tried: `horizon`",
        "`later` up to 300 labels, unbiased too",
    ),
    "estimator em": (
        "gradient",
        "REINFORCE; tried: `em`",
        "`later` up to 300 labels, unbiased too",
    ),
    "sequential": ("prediction", "joint: one node after another", "marginals"),
}
LINKS = {"own attention": ("DGLFRM's attention", "a network of its own, as wide as memberships",
                           "first layer shared, 16 outputs")}  # fmt: skip
FIELDS = {"no groups": ("NMM-CNN's input", "potentials", "and the groups of the order")}
IMAGES = {
    "NMM-horizon": ("gradient", "REINFORCE; tried: `horizon`", "`em`: no score term"),
    "NMM-Gaussian": ("concentrations, attention", "Gaussian of one width, γ = 5",
                     "logistic of a width for each pixel, γ learned"),
    "NMM-one-width": ("widths", "one width", "a width for each pixel"),
}  # fmt: skip
Line = list[str]
#: Of a measure: pairs (here, changed), the factor of its unit, and digits.
Effects = dict[str, tuple[Pairs, float, int]]


def tables(rows: dict[str, list[dict]]) -> dict[str, str]:
    """Each deviation undone alone: what is measured with the paper's choice, minus ours."""
    lines = [*nodes(rows["nodes"]), *images(rows["images"]),
             *links(rows["deviations"], rows["links"]), *fields(rows["deviations"])]  # fmt: skip
    head = "experiment | what | in the paper | here | measured on | the paper's minus ours"
    return {"from paper": table(head, lines, left=5)}


def line(where: str, change: str, known: dict, effects: Effects, unit: str) -> Line:
    what, paper, here = known.get(change, (change, "", ""))
    gaps = {name: difference([(factor * a, factor * b) for a, b in pairs], digits)
            for name, (pairs, factor, digits) in effects.items()}  # fmt: skip
    number = max(len(pairs) for pairs, _, _ in effects.values())
    cells = "; ".join(f"{name} {gap}" for name, gap in gaps.items() if gap)
    return [where, what, paper, here, f"{number} {unit}", cells]


def nodes(rows: list[dict]) -> Iterator[Line]:
    """Test accuracy in points and NLL, paired by seed with the row of no change."""
    found = grouped(pick(rows, task="deviations"), "dataset", "backbone")
    for (dataset, kind), part in found.items():
        where = f"NMM-{kind.upper()}, {GRAPHS.get(dataset, dataset)}"
        by = {change: {row["seed"]: row for row in each}
              for (change,), each in grouped(part, "change").items()}  # fmt: skip
        base = by.pop("none", {})
        hits = [
            (r["test"]["accuracy"], r["sequential"]) for r in base.values() if "sequential" in r
        ]
        for change in names(NODES, ["sequential"] * bool(hits) + list(by)):
            effects = {"accuracy": (hits, 100, 1)}
            if change != "sequential":
                both = [(base[s]["test"], by[change][s]["test"]) for s in base if s in by[change]]
                effects = {"accuracy": ([(a["accuracy"], b["accuracy"]) for a, b in both], 100, 1),
                           "NLL": ([(a["nll"], b["nll"]) for a, b in both], 1, 3)}  # fmt: skip
            yield line(where, change, NODES, effects, "seeds")


def links(rows: list[dict], compared: list[dict]) -> Iterator[Line]:
    for (dataset, change), part in grouped(pick(rows, task="links"), "dataset", "change").items():
        ours = pick(compared, task="compare", guide="nmm", dataset=dataset)
        here = {row["seed"]: row for row in ours}
        both = [(here[row["seed"]], row) for row in part if row["seed"] in here]
        effects = {m: ([(a["test"][m], b["test"][m]) for a, b in both], 1, 2)
                   for m in ("AP", "AUC")}  # fmt: skip
        effects["bound"] = [(-a["loss"], -b["loss"]) for a, b in both], 1, 4
        yield line(f"NMM-DGLFRM, {GRAPHS.get(dataset, dataset)}", change, LINKS, effects, "splits")


def fields(rows: list[dict]) -> Iterator[Line]:
    by = {change: {(row["coupling"], row["seed"]): row["bound"] for row in part}
          for (change,), part in grouped(pick(rows, task="fields"), "change").items()}  # fmt: skip
    base = by.pop("", {})
    for change, found in by.items():
        both = [(base[key], found[key]) for key in base if key in found]
        effects = {"KL's bound, nats": (both, 1, 2)}
        yield line("NMM-CNN on 12 x 40 pixels", change, FIELDS, effects, "fields")


def images(rows: list[dict]) -> Iterator[Line]:
    """Test images where there are, or else the mean over validation images."""
    done = set()
    for block, found in images_tables.tested(rows).items():
        for change in IMAGES:
            if change in found and "NMM" in found:
                parts = [images_tables.with_scaled(found[m]) for m in ("NMM", change)]
                effects = {"PSNR": (images_tables.paired(*parts, "PSNR"), 1, 2),
                           "log p": (images_tables.paired(*parts, "best"), 1, 3)}  # fmt: skip
                where = "NMM denoiser, " + ", ".join(images_tables.title(block))
                done.add((change, images_tables.steps_of(block)))
                yield line(where, change, IMAGES, effects, "images")
    trained = [row for row in pick(rows, task="train") if "log p" in row]
    last = {(r["method"], r["seed"], images_tables.size(r["settings"])): r for r in trained}
    for (change, seed, size), row in last.items():
        base = last.get(("NMM", seed, size))
        if change in IMAGES and base and (change, row["settings"]["num_steps"]) not in done:
            effects = {field: ([(base[field], row[field])], 1, digits)
                       for field, digits in (("PSNR", 2), ("log p", 3), ("joint", 3))}  # fmt: skip
            yield line(f"NMM denoiser, {size}, validation", change, IMAGES, effects, "seed")
