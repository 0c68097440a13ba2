# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of hidden.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.shared.common import pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, scores, sections, spread

FIELDS = {"smooth": "smooth regions", "potts": "Potts", "nmm": "NMM"}
METHODS = {"independent": "no graph", "Potts, mean field": "Potts, mean field"}
METHODS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "NMM, bound": "NMM, fitted by its bound"}
METHODS |= {"NMM, sweeps": "NMM, fitted by sweeps"}
#: Who the others are compared with, and the two fits of an NMM.
RIVAL, OURS = "Potts, mean field", ("NMM, bound", "NMM, sweeps")


def tables(rows: Rows) -> dict[str, str]:
    return made({hidden: 2, hidden_claim: 0, hidden_searches: 2, hidden_normalizers: 1}, rows)


def cells(rows: Rows) -> dict[tuple, Rows]:
    """By field and noise."""
    return sections(pick(rows, task="compare"), field=FIELDS, noise=None)


def gap(part: Rows, method: str, field: str) -> Paired:
    """Minus the mean field of the Potts field, seed by seed."""
    return Paired.of(scores(part, field, method=method), scores(part, field, method=RIVAL))


def hidden(rows: Rows) -> Iterator[dict]:
    """Scores against the true labels, and log-evidence, of means over the seeds."""
    for (name, noise), part in cells(rows).items():
        pixels = part[0]["size"] ** 2
        for (shown,), found in sections(part, method=METHODS).items():
            method = found[0]["method"]
            error = sum(row["error"] ** 2 for row in found) ** 0.5 / len(found)
            values = {
                field: list(scores(found, field).values())
                for field in ("Brier", "accuracy", "NLL", "bound", "log evidence")
            }
            yield {
                "true field, sd of the noise": f"{name}, {noise}",
                "model": shown,
                "seeds": f"{len(found)}",
                "squared error": spread(values["Brier"], 3),
                "minus Potts, mean field": gap(part, method, "Brier").brief(3),
                "accuracy": spread(values["accuracy"], 1, 100),
                "NLL": spread(values["NLL"], 3),
                "bound, nats a pixel": spread(values["bound"], 3, 1 / pixels),
                "log p(w), nats a pixel": spread(values["log evidence"], 3, 1 / pixels),
                "its error, nats": f"{error:.2f}",
                "settings": settings(found),
            }


def settings(rows: Rows) -> str:
    """What was chosen and fitted, seed by seed where it differs."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, value in row["settings"].items():
            texts.setdefault(name, {})[f"{value:.2g}"] = None
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in texts.items())


def hidden_claim(rows: Rows) -> str:
    """In how many cells the NMM, by the fit of higher log p(w), is better than the rival."""
    errors, evidence = [], []
    for part in cells(rows).values():
        ours = [method for method in OURS if len(gap(part, method, "Brier"))]
        if ours:
            best = max(ours, key=lambda method: gap(part, method, "log evidence").mean)
            errors.append(gap(part, best, "Brier").mean)
            evidence.append(gap(part, best, "log evidence").mean / part[0]["size"] ** 2)
    if not errors:
        return "Nothing has been measured yet."
    return wrapped(
        f"The NMM's squared error (of its two fits, that of the higher estimate of log p(w)) is "
        f"below that of the Potts field's mean field in {sum(e < 0 for e in errors)} of "
        f"{len(errors)} cells of field and noise; differences {min(errors):+.3f} to "
        f"{max(errors):+.3f}, on average {mean(errors):+.3f}. Its estimate of log p(w) is lower in "
        f"{sum(e < 0 for e in evidence)} of {len(evidence)}; differences {min(evidence):+.3f} to "
        f"{max(evidence):+.3f} nats a pixel."
    )


def hidden_searches(rows: Rows) -> Iterator[dict]:
    """log p(w) of every stride and radius, on fields of other seeds."""
    found = sections(pick(rows, task="search"), field=FIELDS, noise=None)
    for (name, noise), part in found.items():
        line = {"true field, sd of the noise": f"{name}, {noise}"}
        line |= {"seed": ", ".join(f"{seed}" for (seed,) in sections(part, seed=None))}
        for row in part:
            line[settings([row])] = f"{row['log evidence']:.0f} ± {row['error']:.1f}"
        yield line


def hidden_normalizers(rows: Rows) -> Iterator[dict]:
    """log Z of Potts fields without evidence."""
    for row in pick(rows, task="normalizers"):
        yield {
            "coupling": f"{row['coupling']}",
            "size": f"{row['size']} x {row['size']}",
            "log Z": f"{row['log Z']:.1f} ± {row['error']:.2f}",
        }
