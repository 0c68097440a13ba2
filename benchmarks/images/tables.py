# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of images.py's results, for report.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import mean

from benchmarks.shared.common import grouped, pick
from benchmarks.shared.references import PAPER_IMAGES
from benchmarks.shared.writing import Paired, Rows, centre, costs, made, scores, sections

SETS = {"bsds300": "BSD300", "kodak24": "Kodak24"}
METHODS = {
    "U-Net": "U-Net, squared error",
    "U-Net-log": "U-Net, log of it",
    "U-Net-widths": "U-Net with widths",
    "NMM-one-width": "NMM of one width",
    "NMM": "NMM",
    "NMM-one-step-credit": "NMM, `one_step_credit`",
    "NMM-Gaussian": "NMM, Gaussian, γ = 5",
    "NMM-paper": "NMM, Gaussian, γ = 5, one phase",
}
#: Standard deviation of the noise of rows that do not name it; rate of all networks but one.
NOISE, RATE = 25.0, 1e-3
#: A method, what it is compared with, and what they differ in.
STEPS = {
    ("U-Net-widths", "U-Net-log"): "a width for each pixel, no neighbours",
    ("NMM", "NMM-one-width"): "a width for each pixel, with neighbours",
    ("NMM-one-width", "U-Net-log"): "neighbours, one width",
    ("NMM", "U-Net-widths"): "neighbours, a width for each pixel",
    ("NMM", "U-Net-log"): "both",
    ("NMM-Gaussian", "U-Net-log"): "neighbours, the paper's Gaussians and γ",
    ("NMM-paper", "U-Net-log"): "the same, in one phase on the bound",
}


def tables(rows: Rows) -> dict[str, str]:
    tested = {denoised: 3, denoising_steps: 3, joint_images: 3, denoising_levels: 4}
    return made(tested | {denoising_validated: 4, denoising_cost: 1}, rows)


def size(settings: dict) -> str:
    rate = f", rate {settings['lr']:g}" if settings["lr"] != RATE else ""
    run = f", {settings['run']} run" if "run" in settings else ""
    middles = f", middles of {settings['crop']}" if "crop" in settings else ""
    return f"{settings['width']} filters, {settings['num_steps']:,} steps{rate}{run}{middles}"


def usual(settings: dict) -> bool:
    """Whether it is of the networks that were trained first, at the rate of them all."""
    return settings["lr"] == RATE and "run" not in settings


def sized(rows: Rows, task: str) -> Rows:
    """
    Rows of a task with their noise, and with their settings as a text, so that they can be grouped;
    the longest trained first.
    """
    found = [
        row | {"network": json.dumps(row["settings"], sort_keys=True)} | {"noise": noise_of(row)}
        for row in pick(rows, task=task)
    ]
    return sorted(found, key=lambda row: -row["settings"]["num_steps"])


def noise_of(row: dict) -> float:
    return row.get("noise", NOISE)


def titled(known: Rows) -> list[tuple[dict[str, str], Rows]]:
    """What tables say of a network, its images and their noise, and all rows of these."""
    return [
        ({"network": size(part[0]["settings"]), "images": images, "noise": f"{noise:g}"}, part)
        for (_, images, noise), part in sections(
            known, network=(), dataset=SETS, noise=None
        ).items()
    ]


def at_levels(rows: Rows) -> list[tuple[dict[str, str], Rows]]:
    """
    All test rows, by network, images and noise. The best likelihood is that of the width, or factor
    of all widths, that validation images chose.
    """
    known = sized(rows, "test")
    for row in known:
        row["chosen"] = row.get("log p, scaled", row.get("log p, logistic"))
        row["best"] = row["log p"] if row["chosen"] is None else row["chosen"]
    return titled(known)


def tested(rows: Rows) -> list[tuple[dict[str, str], Rows]]:
    """Those of one noise, which all networks were tested with."""
    return [
        ({name: title[name] for name in ("network", "images")}, part)
        for title, part in at_levels(rows)
        if part[0]["noise"] == NOISE
    ]


def seeds(part: Rows) -> list[int]:
    return sorted({row["seed"] for row in part})


def by_image(part: Rows, field: str) -> list[float]:
    """Means over seeds."""
    known = grouped([row for row in part if field in row], "image")
    return [mean(row[field] for row in found) for found in known.values()]


def between(ours: Rows, base: Rows, field: str, other: str = "") -> Paired:
    """By image: means over the seeds that both have been tested with."""
    theirs, gaps = scores(base, other or field, ("image", "seed")), {}
    for (image, seed), value in scores(ours, field, ("image", "seed")).items():
        if (image, seed) in theirs:
            gaps.setdefault(image, []).append(value - theirs[image, seed])
    return Paired([mean(each) for each in gaps.values()])


def gap(part: Rows, field: str, ours: str, base: str) -> Paired:
    return between(pick(part, method=ours), pick(part, method=base), field)


def denoised(rows: Rows) -> Iterator[dict]:
    """Means and medians over images, and differences from the first row paired by image."""
    for title, every in tested(rows):
        known = sections(every, method=METHODS)
        (first, base), *_ = known.items()
        for (method,), part in known.items():
            line = title | {
                "method": method,
                "seeds": f"{len(seeds(part))}",
                "rows": f"{len(part)}",
            }
            for field, heading, digits in (("PSNR", "PSNR, dB", 2), ("log p", "log p", 3)):
                change = between(part, base, field).text(digits) if method not in first else ""
                line[heading] = centre(by_image(part, field), digits)
                line[field, "minus the first row's"] = change
            chosen = [row["chosen"] for row in part]
            paper = PAPER_IMAGES.get((part[0]["dataset"], part[0]["method"]), "")
            yield line | {
                "log p, width by validation": "" if None in chosen else f"{mean(chosen):.3f}",
                "in 90 % intervals": f"{100 * mean(by_image(part, 'coverage')):.1f} %",
                "their length": f"{mean(by_image(part, 'length')):.1f}",
                "PSNR in the paper": "" if "crop" in part[0]["settings"] else paper,
            }


def denoising_steps(rows: Rows) -> Iterator[dict]:
    """Where the likelihood comes from: one difference at a time, paired by image."""
    for title, part in tested(rows):
        for both, what in STEPS.items():
            found = gap(part, "best", *both)
            each = [gap(pick(part, seed=seed), "best", *both) for seed in seeds(part)]
            each = [f"{one.mean:+.3f}" for one in each if one]
            if found:
                yield title | {
                    "added": what,
                    "seeds": f"{len(each)}",
                    "PSNR, dB": gap(part, "PSNR", *both).text(2),
                    "log p": found.text(3),
                    "images that gain": f"{sum(one > 0 for one in found.gaps)} of {len(found)}",
                    "log p, seed by seed": ", ".join(each),
                }


def joint_images(rows: Rows) -> Iterator[dict]:
    """What pixels say of each other: the bound of whole images minus the sum of marginals."""
    for title, every in tested(rows):
        known = [row for row in every if "joint" in row]
        for (method,), part in sections(known, method=METHODS).items():
            scaled = between(part, part, "joint, scaled", "log p, scaled")
            yield title | {
                "method": method,
                "seeds": f"{len(seeds(part))}",
                "log p of whole images, at least": centre(by_image(part, "joint"), 3),
                "minus marginals": between(part, part, "joint", "log p").text(3),
                "minus marginals, widths by validation": scaled.text(3),
            }


def denoising_levels(rows: Rows) -> Iterator[dict]:
    """All noise of the networks that were tested with several, against the same control."""
    several = {part[0]["network"] for _, part in at_levels(rows) if part[0]["noise"] != NOISE}
    for title, every in at_levels(rows):
        if every[0]["network"] not in several:
            continue
        for (method,), part in sections(every, method=METHODS).items():
            name, line = part[0]["method"], title | {"method": method}
            line |= {"seeds": f"{len(seeds(part))}", "rows": f"{len(part)}"}
            for field, heading, digits in (("PSNR", "PSNR, dB", 2), ("best", "log p", 3)):
                change = "" if name == "U-Net-log" else gap(every, field, name, "U-Net-log")
                line[heading] = centre(by_image(part, field), digits)
                line[field, "minus the control's"] = change and change.text(digits)
            joint = between(part, part, "joint", "log p")
            yield line | {
                "whole images minus marginals": joint.text(3) if joint else "",
                "in 90 % intervals": f"{100 * mean(by_image(part, 'coverage')):.1f} %",
                "their length": f"{mean(by_image(part, 'length')):.1f}",
            }


def denoising_cost(rows: Rows) -> Iterator[dict]:
    """A step of training."""
    for row in pick(rows, task="cost"):
        yield {"a step": f"{row['settings']['batch_size']} patches"} | costs(row, {})


def denoising_validated(rows: Rows) -> Iterator[dict]:
    """At the end of training, on the middles of the images that are no part of it."""
    for part in grouped(sized(rows, "train"), "network", "method", "seed").values():
        part = sorted(part, key=lambda row: row["step"])
        last = part[-1]
        yield {
            "network": size(last["settings"]),
            "part": METHODS.get(last["method"], last["method"]),
            "seed": f"{last['seed']}",
            "steps": ", ".join(f"{row['step']:,}" for row in part),
            "PSNR, dB": ", ".join(f"{row['PSNR']:.2f}" for row in part),
            "log p at the last": f"{last['log p']:.4f}" if "log p" in last else "",
            "joint": f"{last['joint']:.4f}" if "joint" in last else "",
        }
