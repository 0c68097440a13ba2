# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of docs/results.md on noise levels, tiles and spectra of images, for report.py."""

from __future__ import annotations

from statistics import mean

from benchmarks.images import joint_tables as joint
from benchmarks.images.tables import (
    NOISE,
    RATE,
    SETS,
    at_levels,
    between,
    gap,
    seeds,
    sized,
    titled,
)
from benchmarks.shared.common import grouped, pick, wrapped
from benchmarks.shared.writing import Rows, bullets, made

#: A method and what it is compared with at every noise.
PAIRS = {
    ("NMM", "U-Net-log"): "the NMM minus the control",
    ("U-Net-widths", "U-Net-log"): "widths without neighbours minus the control",
    ("NMM", "U-Net-widths"): "the NMM minus widths",
}
#: The paper's setting, and what it is compared with.
PAPER = {
    ("NMM-Gaussian", "U-Net-log"): "The NMM in two phases, minus its control",
    ("NMM-paper", "U-Net-log"): "The NMM in one phase, minus that control",
    ("NMM-paper", "NMM-Gaussian"): "The NMM in one phase, minus that in two",
    ("NMM", "NMM-Gaussian"): "Ours at this rate, minus the paper's in two phases",
}
Titled = list[tuple[dict[str, str], Rows]]


def tables(rows: Rows) -> dict[str, str]:
    makers = [
        second_run_claim,
        levels_claim,
        tiles_claim,
        spectra_claim,
        paper_setting_claim,
        denoising_why,
    ]
    return made(dict.fromkeys(makers, 0), rows)


def several(rows: Rows) -> Titled:
    """Test rows of networks that were tested with more than one noise."""
    known = at_levels(rows)
    networks = {part[0]["network"] for _, part in known if part[0]["noise"] != NOISE}
    return [(title, part) for title, part in known if part[0]["network"] in networks]


def at_one(rows: Rows, task: str) -> Titled:
    """Rows of a task at the noise that all have."""
    return [each for each in titled(sized(rows, task)) if each[1][0]["noise"] == NOISE]


def second_run_claim(rows: Rows) -> str:
    """How far the same seeds lead, trained again elsewhere."""
    last = {}
    for row in sorted(sized(rows, "train"), key=lambda row: row["step"]):
        settings = dict(row["settings"])
        run = settings.pop("run", "")
        same = tuple(settings.items()), row["method"], row["seed"]
        last.setdefault(same, {})[run] = row
    twice = [runs for runs in last.values() if len(runs) > 1]
    if not twice:
        return "Nothing has been measured yet."
    texts = []
    for field, unit in (("PSNR", "dB"), ("log p", "nats a value")):
        each = [[run[field] for run in runs.values() if field in run] for runs in twice]
        gaps = [max(values) - min(values) for values in each if len(values) > 1]
        texts.append(f"{mean(gaps):.3f} {unit} on average, {max(gaps):.3f} at most ({field})")
    return wrapped(
        f"At the end of training, {len(twice)} networks of the same seeds differ from those of the "
        f"first run on the validation images by {' and '.join(texts)}."
    )


def levels_claim(rows: Rows) -> str:
    """What an NMM and what widths change at each noise, on the same networks."""
    lines = []
    for (noise,), known in grouped([t for t, _ in several(rows)], "noise").items():
        parts = [(t, p) for t, p in several(rows) if t in known]
        texts = []
        for both, what in PAIRS.items():
            found = [(t["images"], gap(p, "best", *both), gap(p, "PSNR", *both)) for t, p in parts]
            each = [
                f"{nats.spread(3)} nats and {psnr.spread(2)} dB on {name}"
                for name, nats, psnr in found
                if nats
            ]
            texts += [f"{what} {', '.join(each)}"] if each else []
        lines.append(f"*Noise {noise}*: {'; '.join(texts)}.")
    return bullets(lines) if lines else "Nothing has been measured yet."


def gains(part: Rows, method: str) -> dict[str, float]:
    """By side of the tile: what its pixels say of each other, and those of the whole image."""
    known = pick(part, method=method)
    fields = {f"{n} x {n}": f"joint {n}" for n in joint.sides(known)} | {"whole": "joint"}
    return {name: between(known, known, field, "log p").mean for name, field in fields.items()}


def tiles_claim(rows: Rows) -> str:
    """How much of what whole images say is known from small tiles."""
    lines = []
    for title, part in at_one(rows, "tiles"):
        found = gains(part, "NMM")
        whole, number = found.pop("whole"), len(seeds(part))
        shares = [f"{100 * value / whole:.0f} % in {name}" for name, value in found.items()]
        lines.append(
            f"{title['images']}: whole images {whole:+.4f} nats a value, of which tiles have "
            f"{', '.join(shares)} (NMM, noise {title['noise']}, {number} seed{'s' * (number > 1)})."
        )
    return bullets(lines) if lines else "Nothing has been measured yet."


def at_lag(part: Rows, field: str, name: str, number: int = 0) -> float:
    """A mean over rows, of correlations at a lag or of ties."""
    known = [row[field][name] for row in part]
    return mean(value[number] if isinstance(value, list) else value for value in known)


def spectra_claim(rows: Rows) -> str:
    """Whether samples err as the estimate does."""
    lines = []
    for title, every in at_one(rows, "spectra"):
        nmm, independent = (pick(every, method=name) for name in ("NMM", "U-Net-widths"))
        if not nmm or not independent:
            continue
        far = {drawn: joint.distances(nmm, drawn, base) for drawn, base in joint.SPECTRA}
        theirs = joint.distances(independent, "sample", "error")
        apart = joint.closer(every, ("NMM", "sample"), ("NMM", "apart"))
        widths = joint.closer(every, ("NMM", "sample"), ("U-Net-widths", "sample"))
        bands = {
            name: mean(found[1] for found in joint.by_image(nmm, "sample", "error", band).values())
            for name, band in joint.BANDS.items()
        }
        low, *_, high, _ = bands.items()
        lines.append(
            f"{title['images']}: the distance from the error's spectrum, over all frequencies, is "
            f"{mean(far['sample'].values()):.2f} dB for the NMM's samples, "
            f"{mean(far['apart'].values()):.2f} dB for the same marginals drawn apart "
            f"({apart.text(2)}) and {mean(theirs.values()):.2f} dB for the U-Net with widths "
            f"({widths.text(2)}); {mean(far['another'].values()):.2f} dB is what one sample is "
            f"from others. The NMM's samples have {low[1]:+.1f} dB of the error's power {low[0]} "
            f"cycles a pixel and {high[1]:+.1f} dB at {high[0]}. Adjacent pixels correlate by "
            f"{at_lag(nmm, 'lags', 'error'):.3f} in the error, by "
            f"{at_lag(nmm, 'lags', 'sample'):.3f} in samples."
        )
    return bullets(lines) if lines else "Nothing has been measured yet."


def paper_setting_claim(rows: Rows) -> str:
    """Gaussians and rate of the paper, on the small network."""
    lines = []
    known = [(t, p) for t, p in at_levels(rows) if p[0]["settings"]["lr"] != RATE]
    for both, what in PAPER.items():
        found = [(t["images"], gap(p, "PSNR", *both), gap(p, "best", *both)) for t, p in known]
        each = [f"PSNR {a.text(2)}, log p {b.text(3)} on {name}" for name, a, b in found if a]
        lines += [f"{what}: {'; '.join(each)}."] if each else []
    return bullets(lines) if lines else "Nothing has been measured yet."


def denoising_why(rows: Rows) -> str:
    """What the NMM adds, what would let it add more, and what to take instead."""
    known = [(t, p) for t, p in at_levels(rows) if p[0]["noise"] == NOISE]
    tested = [(t, p) for t, p in known if len(gap(p, "best", "NMM", "U-Net-widths"))]
    tiled, drawn = (
        {t["images"]: pick(p, method="NMM") for t, p in at_one(rows, task)}
        for task in ("tiles", "spectra")
    )
    names = [name for name in SETS.values() if tiled.get(name) and drawn.get(name)]
    if not names or not tested:
        return "Nothing has been measured yet."
    adds = [f"{gains(tiled[name], 'NMM')['whole']:+.3f} nats a value on {name}" for name in names]
    against = [
        f"{gap(p, 'best', 'NMM', 'U-Net-widths').spread(3)} nats and "
        f"{gap(p, 'PSNR', 'NMM', 'U-Net-widths').spread(2)} dB on {t['images']} "
        f"({which(p[0]['settings'])})"
        for t, p in tested
    ]

    def over(field: str, what: str) -> str:
        digits = [f"{at_lag(drawn[name], field, what):.3f}" for name in names]
        return " and ".join(dict.fromkeys(digits))

    totals = " and ".join(f"{mean(row['total'] for row in drawn[name]):.1f}" for name in names)
    lines = [
        f"*What the NMM adds* is what adjacent pixels say of each other, at least "
        f"{' and '.join(adds)}; its single pixels differ from those of the U-Net with widths by "
        f"{' and '.join(against)}.",
        f"*For it to add more*, errors would have to be equal where they are alike: two pixels "
        f"that choose the same neighbour are correlated only because the second repeats the grey "
        f"level of the first, with probability 1 / (A + 1), A = {totals} on average. So adjacent "
        f"grey levels coincide in {over('ties', 'sample')} of a sample's pairs, in "
        f"{over('ties', 'apart')} of the same marginals' drawn apart, and in "
        f"{over('ties', 'error')} of the images'; yet errors of adjacent pixels are correlated by "
        f"{over('lags', 'error')}, smoothly and not by repetition, and those of samples by "
        f"{over('lags', 'sample')} ({' and '.join(names)}).",
        instead(tested),
    ]
    return bullets(lines)


def which(settings: dict) -> str:
    rate = f", rate {settings['lr']:g}" * (settings["lr"] != RATE)
    return f"{settings.get('run', 'first')} run{rate}"


def instead(tested: Titled) -> str:
    """What a user should take: the same U-Net with widths, where it is as good."""
    lost = [t["images"] for t, p in tested if gap(p, "PSNR", "NMM", "U-Net-widths").mean > 0]
    more = [t["images"] for t, p in tested if gap(p, "best", "NMM", "U-Net-widths").mean > 0]
    text = (
        f"*Instead*, for an image, a likelihood of pixels or intervals the same U-Net with widths "
        f"(`fit_images(..., radius=0)`) will do: the NMM's PSNR is above its in {len(lost)} of "
        f"{len(tested)} cases (sets of images and runs), its log p in {len(more)}."
    )
    return f"{text} For samples that err as the estimate does, neither will."
