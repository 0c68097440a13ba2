# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What it changes where links and fields deviate from the paper, each measured once:

    python benchmarks/deviations_links_fields.py links fields --data-root F

Tasks: ``links`` (DGLFRM's attention by a network of its own, as wide as the memberships, on the
splits and with the settings of link_prediction.py's ``compare``, whose rows are the other half of
each pair) and ``fields`` (NMM-CNN with and without the groups of pixels among its inputs, on the
fields of mrf.py's ``strips``). Each fit appends one line to ``--results``, and what is there
already is not run again. ``benchmarks/report.py`` makes the table, with the rows that denoising.py
and node_classification.py have of their own deviations.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import link_prediction
import mrf
import pyro
import torch
from records import Records

from pyro_nmm import Neighborhood
from pyro_nmm.datasets.links import link_split
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import ConvolutionalNMM, coarse_to_fine, grid_edges, ising

RESULTS = Path(__file__).parent / "results" / "deviations.jsonl"


def links(args, results: Records) -> None:
    compared = link_prediction.Results(link_prediction.RESULTS)
    data = link_prediction.load(args, "nips12")
    settings = compared.chosen("nips12", "nmm")
    settings = settings | {"own_attention": True, "width": settings["num_communities"]}
    for seed in link_prediction.compared(args, "nips12"):
        key = {"task": "links", "dataset": "nips12", "change": "own attention", "seed": seed}
        if results.has(**key):
            continue
        split = link_split(data.edge_index, data.num_nodes, seed).to(args.device)
        pair, row = link_prediction.fit(args, data, split, "nmm", settings, seed)
        del row["curve"]
        for part in ("val", "test"):
            row[part] = link_prediction.scores(pair, data, split, part, args.num_samples)
        results.add(**key, **row)


def fields(args, results: Records) -> None:
    height, width = (8, 4) if args.smoke else (40, 12)
    hood, order = Neighborhood.grid(height, width, args.radius), coarse_to_fine(height, width)
    seeds = range(1 if args.smoke else args.num_field_seeds)
    for seed, coupling in itertools.product(seeds, (0.2, 0.4, 0.6)):
        noise = torch.randn(height * width, generator=torch.Generator().manual_seed(seed))
        field = ising(grid_edges(height, width), coupling, 0.5 * noise)
        settings = {"num_steps": args.num_field_steps, "radius": args.radius}
        key = {"task": "fields", "coupling": coupling, "seed": seed, "settings": settings}
        for change, groups in (("", True), ("no groups", False)):
            if results.has(**key, change=change):
                continue
            pyro.set_rng_seed(0)
            network = ConvolutionalNMM(args.radius, groups=groups)
            mix, _ = fit_mixture(
                field, hood, network, order=order, num_steps=args.num_field_steps, num_samples=4,
                lr=0.003,
            )  # fmt: skip
            log_z = field.log_normalizer().item()
            bound, error = mrf.loss(mix, field, order, 1024, 64)
            row = {"bound": bound + log_z, "error": error}
            row["mean field"] = mean_field(field, num_random=12).losses[0].item() + log_z
            results.add(**key, change=change, **row)


TASKS = {"links": links, "fields": fields}


def main(args) -> Records:
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    if args.smoke:
        args.num_splits, args.num_steps, args.num_field_steps, args.radius = 1, 3, 3, 1
    results = Records(args.results)
    for task in args.tasks:
        TASKS[task](args, results)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--num-splits", type=int, default=5)
    parser.add_argument("--num-searched", type=int, default=2, help="as of link_prediction.py")
    parser.add_argument("--num-samples", type=int, default=100, help="memberships at the test")
    parser.add_argument("--num-steps", type=int, default=500, help="of the links")
    parser.add_argument("--num-field-seeds", type=int, default=2)
    parser.add_argument("--num-field-steps", type=int, default=1000)
    parser.add_argument("--radius", type=int, default=3, help="of the fields' windows")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="seconds")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
