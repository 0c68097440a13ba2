# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of what images.py measures of joint distributions of pixels, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from math import log10
from statistics import mean

from benchmarks.images.tables import METHODS, between, seeds, sized, titled
from benchmarks.shared.common import grouped, pick
from benchmarks.shared.writing import Paired, Rows, made, sections, spread

#: Cycles a pixel, and the bins of frequencies.
BANDS = {
    "below 1/16": (0, 2),
    "1/16 to 1/8": (2, 4),
    "1/8 to 1/4": (4, 8),
    "1/4 to 1/2": (8, 16),
    "all": (0, 16),
}
#: A spectrum, with which one it is compared, and what it is of.
SPECTRA = {
    ("sample", "error"): "samples",
    ("apart", "error"): "each value from its marginal, apart",
    ("another", "sample"): "one sample against others: the least to be had",
}


def tables(rows: Rows) -> dict[str, str]:
    return made({denoising_tiles: 4, denoising_spectra: 5}, rows)


def sides(rows: Rows) -> list[int]:
    """Of tiles, as the rows have them."""
    names = {name for row in rows for name in row if name.startswith("joint ")}
    return sorted(int(name.split()[1]) for name in names)


def denoising_tiles(rows: Rows) -> Iterator[dict]:
    """The bound of tiles minus the sum of their marginals: at what scale pixels are correlated."""
    known = sized(rows, "tiles")
    fields = {f"{n} x {n}": f"joint {n}" for n in sides(known)} | {"whole": "joint"}
    for title, every in titled(known):
        for (method,), part in sections(every, method=METHODS).items():
            line = title | {"method": method, "seeds": f"{len(seeds(part))}"}
            line["rows"] = f"{len(part)}"
            for heading, field in fields.items():
                line[heading] = between(part, part, field, "log p").spread(4)
            yield line


def decibels(row: dict, ours: str, base: str, band: tuple[int, int]) -> list[float]:
    """One spectrum over another, bin by bin."""
    pairs = zip(row[ours][slice(*band)], row[base][slice(*band)], strict=True)
    return [10 * log10(above / below) for above, below in pairs]


def by_image(part: Rows, ours: str, base: str, band: tuple[int, int]) -> dict[str, tuple]:
    """The log-spectral distance of every image, and the mean difference; means over seeds."""
    found = {}
    for (image,), known in grouped(part, "image").items():
        each = [decibels(row, ours, base, band) for row in known]
        distances = [mean(x * x for x in gaps) ** 0.5 for gaps in each]
        found[image] = mean(distances), mean(mean(gaps) for gaps in each)
    return found


def distances(part: Rows, ours: str, base: str, band: str = "all") -> dict[str, float]:
    return {image: found[0] for image, found in by_image(part, ours, base, BANDS[band]).items()}


def denoising_spectra(rows: Rows) -> Iterator[dict]:
    """How far spectra of samples are from that of the error, by bands of frequencies."""
    for title, every in titled(sized(rows, "spectra")):
        for (method,), part in sections(every, method=METHODS).items():
            for both, what in SPECTRA.items():
                line = title | {"method": method, "drawn": what, "seeds": f"{len(seeds(part))}"}
                line["rows"] = f"{len(part)}"
                for name, band in BANDS.items():
                    found = by_image(part, *both, band).values()
                    line[name] = spread((distance for distance, _ in found), 1)
                    if name != "all":
                        more = f"{mean(gap for _, gap in found):+.1f}"
                        line[name] += f" ({more})"
                yield line


def closer(part: Rows, ours: tuple[str, str], base: tuple[str, str]) -> Paired:
    """
    A method's spectrum's distance from its error's, minus another's, by image; negative where the
    first is closer. Each is a method and what is drawn.
    """
    found, other = (distances(pick(part, method=m), drawn, "error") for m, drawn in (ours, base))
    return Paired.of(found, other)
