# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of images.py's results, for report.py."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from common import centre, costs, difference, grouped, made, names, pick, table
from references import PAPER_IMAGES

SETS = {"bsds300": "BSD300", "kodak24": "Kodak24"}
METHODS = {
    "U-Net": "U-Net, squared error",
    "U-Net-log": "U-Net, log of it",
    "U-Net-widths": "U-Net with widths",
    "NMM-one-width": "NMM of one width",
    "NMM": "NMM",
    "NMM-one-step-credit": "NMM, `one_step_credit`",
    "NMM-Gaussian": "NMM, Gaussian, γ = 5",
}
#: In the order of the methods; others are grey.
COLORS = ("#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2")
#: A method, what it is compared with, and what they differ in.
STEPS = {
    ("U-Net-widths", "U-Net-log"): "a width for each pixel, no neighbours",
    ("NMM", "NMM-one-width"): "a width for each pixel, with neighbours",
    ("NMM-one-width", "U-Net-log"): "neighbours, one width",
    ("NMM", "U-Net-widths"): "neighbours, a width for each pixel",
    ("NMM", "U-Net-log"): "both",
}
Part = dict[tuple, dict]


def size(settings: dict) -> str:
    middles = f", middles of {settings['crop']}" if "crop" in settings else ""
    return f"{settings['width']} filters, {settings['num_steps']:,} steps{middles}"


def text_of(settings: dict) -> str:
    return json.dumps(settings, sort_keys=True)


def tested(rows: list[dict]) -> dict[tuple[str, str], dict[str, Part]]:
    """By settings (as text) and dataset: of every method, rows by seed and image."""
    found: dict[tuple[str, str], dict[str, Part]] = {}
    for row in pick(rows, task="test"):
        block = text_of(row["settings"]), row["dataset"]
        part = found.setdefault(block, {}).setdefault(row["method"], {})
        part[row["seed"], row["image"]] = row
    return dict(sorted(found.items(), key=lambda item: (-steps_of(item[0]), item[0])))


def steps_of(block: tuple[str, str]) -> int:
    return json.loads(block[0])["num_steps"]


def title(block: tuple[str, str]) -> list[str]:
    return [size(json.loads(block[0])), SETS.get(block[1], block[1])]


def by_image(part: Part, field: str) -> list[float]:
    """Means over seeds, images in the order of their names."""
    known = grouped([row for row in part.values() if field in row], "image")
    return [mean(row[field] for row in known[image]) for image in sorted(known)]


def paired(base: Part, ours: Part, field: str) -> list[tuple[float, float]]:
    """By image: means over the seeds that both have been tested with."""
    shared = [k for k in base if k in ours and field in base[k] and field in ours[k]]
    columns = [by_image({k: part[k] for k in shared}, field) for part in (base, ours)]
    return list(zip(*columns, strict=True))


def with_scaled(part: Part) -> Part:
    """With the likelihood of the width, or factor of all widths, that validation images chose."""
    names = ("log p, scaled", "log p, logistic", "log p")
    return {k: row | {"best": next(row[n] for n in names if n in row)} for k, row in part.items()}


def denoised(rows: list[dict]) -> str:
    """Means and medians over images, and differences from the U-Net paired by image."""
    lines = []
    for block, found in tested(rows).items():
        known = names(METHODS, found)
        base = found[next(iter(known))]
        for method, name in known.items():
            part = found[method]
            cells = [f"{len({s for s, _ in part})}", f"{len(part)}"]
            for field, digits in (("PSNR", 2), ("log p", 3)):
                cells.append(centre(by_image(part, field), digits))
                gaps = paired(base, part, field) if part is not base else []
                cells.append(difference(gaps, digits))
            scaled = [row.get("log p, scaled", row.get("log p, logistic")) for row in part.values()]
            cells.append("" if None in scaled else f"{mean(scaled):.3f}")
            cells.append(f"{100 * mean(by_image(part, 'coverage')):.1f} %")
            cells.append(f"{mean(by_image(part, 'length')):.1f}")
            whole = "crop" not in json.loads(block[0])
            cells.append(PAPER_IMAGES.get((block[1], method), "") if whole else "")
            lines.append([*title(block), name, *cells])
    head = (
        "network | images | method | seeds | rows | PSNR, dB | minus the first row's | log p | "
        "minus the first row's | log p, width by validation | in 90 % intervals | their length | "
        "PSNR in the paper"
    )
    return table(head, lines, left=3)


def denoising_steps(rows: list[dict]) -> str:
    """Where the likelihood comes from: one difference at a time, paired by image."""
    lines = []
    for block, found in tested(rows).items():
        for (ours, base), what in STEPS.items():
            if ours not in found or base not in found:
                continue
            parts = [with_scaled(found[method]) for method in (base, ours)]
            seeds = sorted({s for s, _ in parts[0].keys() & parts[1].keys()})
            if not seeds:
                continue
            gaps = paired(*parts, "best")
            each = [[{k: r for k, r in p.items() if k[0] == seed} for p in parts] for seed in seeds]
            means = [mean(b - a for a, b in paired(*pair, "best")) for pair in each]
            cells = [f"{len(seeds)}", difference(paired(*parts, "PSNR"), 2), difference(gaps, 3)]
            cells.append(f"{sum(b > a for a, b in gaps)} of {len(gaps)}")
            cells.append(", ".join(f"{value:+.3f}" for value in means))
            lines.append([*title(block), what, *cells])
    head = (
        "network | images | added | seeds | PSNR, dB | log p | images that gain | "
        "log p, seed by seed"
    )
    return table(head, lines, left=3)


def joint_images(rows: list[dict]) -> str:
    """What pixels say of each other: the bound of whole images minus the sum of marginals."""
    lines = []
    for block, found in tested(rows).items():
        for method, name in names(METHODS, found).items():
            part = {k: row for k, row in found[method].items() if "joint" in row}
            if part:
                cells = [f"{len({s for s, _ in part})}", centre(by_image(part, "joint"), 3)]
                for suffix in ("", ", scaled"):
                    columns = by_image(part, "log p" + suffix), by_image(part, "joint" + suffix)
                    cells.append(difference(list(zip(*columns, strict=True)), 3))
                lines.append([*title(block), name, *cells])
    head = (
        "network | images | method | seeds | log p of whole images, at least | minus marginals | "
        "minus marginals, widths by validation"
    )
    return table(head, lines, left=3)


def denoising_cost(rows: list[dict]) -> str:
    found = pick(rows, task="cost")
    lines = [[f"{row['settings']['batch_size']} patches", *costs(row)] for row in found]
    return table("a step | U-Net, ms | NMM, ms | ratio | U-Net, MiB | NMM, MiB", lines)


def denoising_validated(rows: list[dict]) -> str:
    """At the end of training, on the middles of the images that are no part of it."""
    lines = []
    blocks = [row | {"block": text_of(row["settings"])} for row in pick(rows, task="train")]
    for (_, method, seed), part in grouped(blocks, "block", "method", "seed").items():
        part.sort(key=lambda row: row["step"])
        row, name = part[-1], METHODS.get(method, method)
        points = [(f"{r['step']:,}", f"{r['PSNR']:.2f}") for r in part]
        columns = map(", ".join, zip(*points, strict=True))
        likelihoods = (f"{row[f]:.4f}" if f in row else "" for f in ("log p", "joint"))
        lines.append([size(row["settings"]), name, f"{seed}", *columns, *likelihoods])
    head = "network | part | seed | steps | PSNR, dB | log p at the last | joint"
    return table(head, lines, left=4)


TABLES = (denoised, denoising_steps, joint_images, denoising_validated, denoising_cost)


def tables(rows: list[dict]) -> dict[str, str]:
    return made(TABLES, rows)


def curves(rows: list[dict]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Validation PSNR over steps of the largest networks; from the trunk on which they stand."""
    watched = pick(rows, task="train")
    largest = max((row["settings"]["num_steps"] for row in watched), default=0)
    watched = [row for row in watched if row["settings"]["num_steps"] == largest]
    parts: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in watched:
        parts.setdefault((row["method"], row["seed"]), []).append((row["step"], row["PSNR"]))
    trunks = {seed: sorted(points) for (method, seed), points in parts.items() if method == "trunk"}
    lines = {}
    for (method, seed), points in parts.items():
        trunk = trunks.get(seed, [])
        below = {"U-Net": [], "U-Net-log": trunk}.get(method, trunk[-1:])
        if method != "trunk":
            lines[method, seed] = sorted(below + points)
    return lines


def curves_figure(rows: list[dict], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    lines, colors = curves(rows), dict(zip(METHODS, COLORS, strict=False))
    for method, name in names(METHODS, [method for method, _ in lines]).items():
        for seed, points in ((s, p) for (m, s), p in lines.items() if m == method):
            looks = {"color": colors.get(method, "#999999"), "marker": "o", "ms": 3, "lw": 1.2}
            axis.plot(*zip(*points, strict=True), label=name if seed == 0 else None, **looks)
    axis.set(xlabel="step", ylabel="PSNR on validation images, dB")
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")
        figure.savefig(path / "denoising_steps.png", dpi=150)
    plt.close(figure)
