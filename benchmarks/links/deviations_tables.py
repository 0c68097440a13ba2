# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Where this library deviates from the paper, and what each deviation changes, for report.py."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.images import tables as images_tables
from benchmarks.nodes import runs as nodes_runs
from benchmarks.shared.common import GRAPHS, grouped, pick
from benchmarks.shared.writing import Paired, Rows, made, sections

LABELS = "`reward_to_go` up to 300 labels, unbiased too"
CREDIT = "REINFORCE; tried: `one_step_credit`"
#: The change back to the paper's choice (or to another one): what, in the paper, and here.
CHANGES = {
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
    "estimator one_step_credit": ("gradient", CREDIT, LABELS),
    "estimator no_score": ("gradient", "REINFORCE; tried: `no_score`", LABELS),
    "sequential": ("prediction", "joint: one node after another", "marginals"),
    "own attention": (
        "DGLFRM's attention",
        "a network of its own, as wide as memberships",
        "first layer shared, 16 outputs",
    ),
    "no groups": ("NMM-CNN's input", "potentials", "and the groups of the order"),
    "NMM-one-step-credit": ("gradient", CREDIT, "`no_score`: no score term"),
    "NMM-Gaussian": (
        "concentrations, attention",
        "Gaussian of one width, γ = 5",
        "logistic of a width for each pixel, γ learned",
    ),
    "NMM-paper": (
        "all of it",
        "Gaussian of one width, γ = 5, one phase on the bound",
        "two phases, of which the second has the NMM",
    ),
    "NMM-one-width": ("widths", "one width", "a width for each pixel"),
}
Line = dict[str, str]


def tables(rows: dict[str, Rows]) -> dict[str, str]:
    return made({from_paper: 5}, rows)


def from_paper(rows: dict[str, Rows]) -> Iterator[Line]:
    """Each deviation undone alone: what is measured with the paper's choice, minus ours."""
    yield from (*nodes(rows["nodes"]), *images(rows["images"]))
    yield from (*links(rows["deviations"], rows["links"]), *fields(rows["deviations"]))


def line(where: str, change: str, on: str, **gaps: tuple) -> Line:
    """What was measured and its differences, each with its digits and maybe a unit."""
    what, paper, here = CHANGES.get(change, (change, "", ""))
    number = max(len(found) for found, *_ in gaps.values())
    texts = [f"{name} {found.text(*form)}" for name, (found, *form) in gaps.items() if found]
    return {
        "experiment": where,
        "what": what,
        "in the paper": paper,
        "here": here,
        "measured on": f"{number} {on}{'s' * (number != 1)}",
        "the paper's minus ours": "; ".join(texts),
    }


def nodes(rows: Rows) -> Iterator[Line]:
    """Test accuracy in points and NLL, paired by seed with the row of no change."""
    known = nodes_runs.runs(rows, "deviations")
    for (graph, backbone), part in nodes_runs.parts(known, "dataset", "backbone").items():
        base = pick(part, change="none")
        for row in [row for row in base if "sequential" in row]:
            hits = {"change": "sequential", "accuracy": row["sequential"]}
            part.append({"seed": row["seed"]} | hits)
        for (change,), changed in sections(part, change=list(CHANGES)).items():
            if change != "none":
                hits = Paired.of_rows(changed, base, "accuracy"), 1, 100
                nll = Paired.of_rows(changed, base, "nll"), 3
                yield line(f"NMM-{backbone}, {graph}", change, "seed", accuracy=hits, NLL=nll)


def links(rows: Rows, compared: Rows) -> Iterator[Line]:
    """On the same splits with the guide as it is here."""
    for (dataset, change), part in grouped(pick(rows, task="links"), "dataset", "change").items():
        ours = pick(compared, task="compare", guide="nmm", dataset=dataset)
        here, changed = ([row | row["test"] for row in known] for known in (ours, part))
        ap, auc = ((Paired.of_rows(changed, here, measure), 2) for measure in ("AP", "AUC"))
        bound = Paired.of_rows(here, changed, "loss"), 4
        where = f"NMM-DGLFRM, {GRAPHS.get(dataset, dataset)}"
        yield line(where, change, "split", AP=ap, AUC=auc, bound=bound)


def fields(rows: Rows) -> Iterator[Line]:
    """On the same strips with all input."""
    known = pick(rows, task="fields")
    for (change,), part in grouped(known, "change").items():
        if change:
            found = Paired.of_rows(part, pick(known, change=""), "bound", ("coupling", "seed"))
            gaps = {"KL's bound, nats": (found, 2)}
            yield line("NMM-CNN on 12 x 40 pixels", change, "field", **gaps)


def without_crop(settings: dict) -> frozenset:
    """What training depends on."""
    return frozenset((name, value) for name, value in settings.items() if name != "crop")


def images(rows: Rows) -> Iterator[Line]:
    """Test images where there are, or else the mean over validation images."""
    done = set()
    for title, part in images_tables.tested(rows):
        for change in CHANGES:
            psnr, best = (images_tables.gap(part, f, change, "NMM") for f in ("PSNR", "best"))
            if psnr:
                done.add((change, without_crop(part[0]["settings"])))
                where = f"NMM denoiser, {title['network']}, {title['images']}"
                yield line(where, change, "image", **{"PSNR": (psnr, 2), "log p": (best, 3)})
    trained = [row for row in images_tables.sized(rows, "train") if "log p" in row]
    for part in grouped(trained, "network", "seed").values():
        settings = part[0]["settings"]
        where = f"NMM denoiser, {images_tables.size(settings)}, validation"
        for change in CHANGES:
            ours, base = pick(part, method=change)[-1:], pick(part, method="NMM")[-1:]
            if ours and base and (change, without_crop(settings)) not in done:
                digits = {"PSNR": 2, "log p": 3, "joint": 3}
                gaps = {name: (Paired.of_rows(ours, base, name), digits[name]) for name in digits}
                yield line(where, change, "seed", **gaps)
