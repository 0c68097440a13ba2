# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Hidden label fields: 64 x 64 pixels of three labels, of which a Normal variable of unknown mean and
width is seen. An NMM of strided sources against the mean field of a Potts field.

    python benchmarks/hidden.py normalizers select compare

Tasks: ``normalizers`` (log Z of Potts fields, which their evidence needs), ``select`` (the stride
and radius of the sources, by log p(w) of seeds of their own; no true label is read) and
``compare``. Fields are ``smooth`` (smoothed noise, cut at its terciles: neither model), ``potts``
(Gibbs sampling at a coupling of 0.95) and ``nmm`` (sources of stride 4).
"""

from __future__ import annotations

import math

import pyro
import torch
from torch import Tensor

from benchmarks.latent.hidden_fits import (
    CLASSES,
    HiddenField,
    annealed_log_evidence,
    fit_by_bound,
    fit_by_sweeps,
    found_by,
    found_by_potts,
    gibbs,
    independent,
    log_normalizer,
    scores,
    strided,
)
from benchmarks.shared.common import RESULTS, Records, chosen, pick, run
from pyro_nmm import NeighborMixture
from pyro_nmm.models import grid_edges, potts

KINDS = ("smooth", "potts", "nmm")
#: Standard deviations of the emission, whose means are one apart.
NOISE = (0.5, 1.0)
#: Of the Potts field's candidates; at 0 it is no graph.
COUPLINGS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
#: Strides and radii of the sources.
SOURCES = ((2, 3), (4, 6), (6, 9))
#: Seeds of the fields that choose one.
SELECTION = 100


def smooth(size: int) -> Tensor:
    """Normal noise under a Gaussian window of four pixels, cut at its terciles."""
    frequency = torch.fft.fftfreq(size)
    window = -2 * (4 * math.pi) ** 2 * (frequency[:, None].square() + frequency.square())
    noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(size, size)) * window.exp()).real
    values = noise.flatten().contiguous()
    return torch.bucketize(values, values.quantile(torch.tensor([1 / 3, 2 / 3])))


def truth(kind: str, noise: float, seed: int, size: int, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """Labels, and what is seen of them."""
    pyro.set_rng_seed(seed)
    if kind == "smooth":
        y = smooth(size)
    elif kind == "potts":
        field = potts(grid_edges(size, size), 0.95, torch.zeros(size * size, CLASSES))
        y = gibbs(field, torch.randint(CLASSES, (1, size * size)), num_sweeps)[0][0]
    else:
        hood, distance = strided(size, stride=4, radius=6)
        alpha = torch.full((hood.num_sources, CLASSES), 0.2)
        y = NeighborMixture(hood, alpha, -2.0 * distance).sample()
    return y, y - 1 + noise * torch.randn(size * size)


def normalizers(args, results: Records) -> None:
    for key in results.missing(task="normalizers", size=args.size, coupling=COUPLINGS):
        pyro.set_rng_seed(0)
        value, error = log_normalizer(args.size, key["coupling"], args.anneal)
        results.add(**key, **{"log Z": value, "error": error})


def fields(args) -> dict:
    return {"size": args.size, "field": args.fields, "noise": args.noise}


def select(args, results: Records) -> None:
    settings = [{"stride": stride, "radius": radius} for stride, radius in SOURCES]
    for key in results.missing(task="search", **fields(args), seed=SELECTION, settings=settings):
        _, w = truth(key["field"], key["noise"], key["seed"], args.size, args.sweeps)
        field = HiddenField(w, args.size, **key["settings"])
        fit_by_bound(field, args.num_steps)
        value, error, _ = annealed_log_evidence(field, args.anneal)
        trial = settings.index(key["settings"])
        results.add(**key, trial=trial, **{"log evidence": value, "error": error})


def compare(args, results: Records) -> None:
    known = pick(results.rows, task="normalizers", size=args.size)
    log_z = {row["coupling"]: row["log Z"] for row in known}
    for key in results.missing(task="compare", **fields(args), seed=range(args.seeds)):
        y, w = truth(key["field"], key["noise"], key["seed"], args.size, args.sweeps)
        best = chosen(
            results.rows, lambda rows: rows[0]["log evidence"], size=args.size,
            field=key["field"], noise=key["noise"],
        )  # fmt: skip
        found = {"independent": independent(w), **found_by_potts(w, args.size, log_z, args)}
        for name, fit in (("NMM, bound", fit_by_bound), ("NMM, sweeps", fit_by_sweeps)):
            field = HiddenField(w, args.size, **best)
            fit(field, args.num_steps)
            found[name] = found_by(field, args.anneal, args.sweeps)
        for method, result in found.items():
            row = {"bound": result.bound, "log evidence": result.log_evidence}
            row |= {"error": result.error, "settings": result.settings}
            results.add(**key, method=method, **scores(y, result), **row)


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (normalizers, select, compare), choices={"fields": KINDS},
        smoke={"size": 10, "num_steps": 3, "sweeps": 8, "anneal": 4, "rounds": 1, "seeds": 1,
               "noise": [0.5]},
        size=64, fields=list(KINDS), noise=list(NOISE), seeds=3,
        num_steps=(250, "of a fit"), sweeps=(500, "of Gibbs sampling, in eight chains"),
        anneal=(400, "steps of annealed importance sampling"),
        rounds=(2, "of variational EM for every coupling"), results=RESULTS / "hidden.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
