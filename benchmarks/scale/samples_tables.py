# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of samples.py's results, for report.py; samples_figures.py has the curves."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

from benchmarks.shared.common import grouped, pick, wrapped
from benchmarks.shared.writing import Rows, made


def tables(rows: Rows) -> dict[str, str]:
    makers = {estimator_noise: 2, draws_of_marginals: 2, particles_of_likelihood: 1}
    return made(makers | {samples_claim: 0}, rows)


def estimator_noise(rows: Rows) -> Iterator[dict]:
    """Of a step's gradient, and the milliseconds of a step, over particles."""
    parts = grouped(pick(rows, task="gradients"), "seed", "labelled", "estimator")
    for (_, labelled, estimator), part in parts.items():
        yield {"labelled": f"{labelled:,}", "estimator": f"`{estimator}`"} | {
            f"T = {row['particles']}": f"{row['sd']:,.2f} ({1e3 * row['seconds']:.1f} ms)"
            for row in part
        }


def draws_of_marginals(rows: Rows) -> Iterator[dict]:
    """Total variation in thousandths, over draws."""
    parts = grouped(pick(rows, task="marginals"), "seed", "labelled", "weighted")
    for (_, labelled, weighted), part in parts.items():
        line = {"labelled": f"{labelled:,}", "weights": "weighted" if weighted else "equal"}
        for row in part:
            cell = f"{1e3 * row['error']:.2f} ({1e3 * row['seconds']:.0f} ms)"
            line[f"T = {row['draws']:,}"] = cell
        yield line | {"of the truth itself": f"{1e3 * part[0]['error of the reference']:.2f}"}


def particles_of_likelihood(rows: Rows) -> Iterator[dict]:
    """log p of the labels, in nats, by the bound and with more and more particles."""
    for (_, labelled), part in grouped(pick(rows, task="likelihood"), "seed", "labelled").items():
        line = {"labelled": f"{labelled:,}"}
        for row in part:
            name = f"P = {row['particles']:,}" if row["particles"] else "the bound"
            took = f"{1e3 * row['seconds']:.0f} ms"
            line[name] = f"{row['mean']:,.2f} ± {row['sd']:.2f} ({took})"
        yield line


def samples_claim(rows: Rows) -> str:
    """What the tables say, in sentences."""
    parts = grouped(pick(rows, task="gradients"), "labelled", "estimator").items()
    noise = {key: {row["particles"]: row["sd"] for row in part} for key, part in parts}
    ratios = []
    for (labelled, estimator), sd in noise.items():
        other = noise.get((labelled, "one_step_credit"), {})
        found = [value / other[size] for size, value in sd.items() if size in other]
        if estimator == "reward_to_go" and found:
            ratios.append(f"{min(found):.2g} to {max(found):.2g} times with {labelled:,} labels")
    errors = [
        f"{row['error']:.4f} with {row['labelled']:,} labels"
        for row in pick(rows, task="marginals", draws=64, weighted=False)
    ]
    gaps = []
    for (labelled,), part in grouped(pick(rows, task="likelihood"), "labelled").items():
        mean = {row["particles"]: row["mean"] for row in part}
        gap = (mean.get(0, nan) - mean[max(mean)]) / labelled
        gaps.append(f"{gap:+.4f} with {labelled:,} labels")
    return wrapped(
        f"Under equal particles the noise of `reward_to_go` is that of `one_step_credit` "
        f"{', '.join(ratios)}. With 64 draws of equal weight the posterior marginals of the other "
        f"nodes are off by a total variation of {', '.join(errors)}. The bound differs from the "
        f"estimate with most particles by {', '.join(gaps)}, in nats a labelled node."
    )
