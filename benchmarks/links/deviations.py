# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What it changes where links and fields deviate from the paper, each measured once:

    python benchmarks/deviations.py links fields --data-root F

Tasks: ``links`` (DGLFRM's attention by a network of its own, as wide as the memberships, on the
splits and with the settings of links.py's ``compare``, whose rows are the other half of each pair)
and ``fields`` (NMM-CNN with and without the groups of pixels among its inputs, on the fields of
fields.py's ``strips``). Of their own deviations images.py and nodes.py have the rows.
"""

from __future__ import annotations

from pathlib import Path

import pyro

from benchmarks.links import run as dglfrm
from benchmarks.random_fields import run as mrf
from benchmarks.shared.common import RESULTS, Records, read, run
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import ConvolutionalNMM


def links(args, results: Records) -> None:
    settings = dglfrm.chosen(read(RESULTS / "links.jsonl"), "nips12", "nmm")
    settings |= {"own_attention": True, "width": settings["num_communities"]}
    seeds = dglfrm.compared(args, "nips12")
    for key in results.missing(task="links", dataset="nips12", change="own attention", seed=seeds):
        known = dglfrm.problem(args, "nips12", key["seed"])
        row = dglfrm.measure(args, *known, "nmm", settings, key["seed"])
        del row["curve"]
        results.add(**key, **row)


def fields(args, results: Records) -> None:
    shape = mrf.narrow(args)
    hood, order = mrf.grid(shape, args.radius)
    settings = {"num_steps": args.num_field_steps, "radius": args.radius}
    each = {"seed": range(args.num_field_seeds), "coupling": mrf.COUPLINGS, "settings": settings}
    for key in results.missing(task="fields", **each, change=("", "no groups")):
        field = mrf.random_field(shape, key["coupling"], key["seed"])
        pyro.set_rng_seed(0)
        network = ConvolutionalNMM(args.radius, groups=not key["change"])
        options = {"num_steps": args.num_field_steps, "num_samples": 4, "lr": 0.003}
        mix, _ = fit_mixture(field, hood, network, order=order, **options)
        log_z = field.log_normalizer().item()
        bound, error = mrf.loss(mix, field, order, 1024, 64)
        row = {"bound": bound + log_z, "error": error}
        row["mean field"] = mean_field(field, num_random=12).losses[0].item() + log_z
        results.add(**key, **row)


def main(argv: list[str] | None = None) -> Records:
    smoke = {"num_splits": 1, "num_field_seeds": 1, "radius": 1}
    return run(
        argv, __doc__, (links, fields), smoke=smoke | {"num_steps": 3, "num_field_steps": 3},
        num_splits=5, num_searched=(2, "as of links.py"),
        num_samples=(100, "memberships at the test"), num_steps=(500, "of the links"),
        num_field_seeds=2, num_field_steps=1000, radius=(3, "of the fields' windows"),
        data_root=Path, device="cpu", results=RESULTS / "deviations.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
