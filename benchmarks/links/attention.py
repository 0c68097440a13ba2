# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
NMM-DGLFRM's attention as the paper's appendix D.2.1 has it, on the splits of links.py:

    python benchmarks/links_attention.py attention attended --data-root F

"To compute L_i from v_i, we use the same amortization structure as DGLFRM": two graph convolutions,
the second as wide as there are communities. That may be read as a network of its own, or as one
whose first layer the memberships share. Task ``attention`` runs both on the splits of the search,
beside links.py's own (first layer shared, 16 outputs); ``attended`` runs the one with the best
bound there, if it is above that of links.py's, on the splits of ``compare``. By the bound, because
links.py chooses the NMM's settings by it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.links import run as links
from benchmarks.shared.common import RESULTS, Records, grouped, pick, run

#: What the appendix may be read as; the second layer is as wide as there are communities.
READINGS = {"a network of its own": True, "first layer shared": False}


def changed(rows: list[dict], dataset: str, reading: str) -> dict:
    """The NMM's settings, with attention by this reading."""
    settings = links.chosen(rows, dataset, "nmm")
    wide = {"own_attention": READINGS[reading], "width": settings["num_communities"]}
    return settings | wide


def best_reading(rows: list[dict], dataset: str) -> str | None:
    """The reading with the best bound on the splits of the search; none if links.py's is above."""
    trials = grouped(pick(rows, task="attention", dataset=dataset), "reading")
    losses = {reading: mean(row["loss"] for row in part) for (reading,), part in trials.items()}
    settings = links.chosen(rows, dataset, "nmm")
    ours = pick(rows, task="search", dataset=dataset, guide="nmm", settings=settings)
    best = min(losses, key=losses.__getitem__, default=None)
    return best if best and losses[best] < mean(row["loss"] for row in ours) else None


def measured(args, results: Records, key: dict, parts: list[str]) -> None:
    settings = changed(results.rows, key["dataset"], key["reading"])
    known = *links.problem(args, key["dataset"], key["seed"]), "nmm", settings, key["seed"]
    row = links.measure(args, *known, parts=parts)
    del row["curve"]
    results.add(**key, **row)


def attention(args, results: Records) -> None:
    seeds = range(args.num_searched)
    each = {"dataset": args.datasets, "seed": seeds, "reading": list(READINGS)}
    for key in results.missing(task="attention", **each):
        measured(args, results, key, ["val"])


def attended(args, results: Records) -> None:
    for dataset in args.datasets:
        if reading := best_reading(results.rows, dataset):
            each = {"dataset": dataset, "seed": links.compared(args, dataset), "reading": reading}
            for key in results.missing(task="attended", **each):
                measured(args, results, key, ["val", "test"])


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (attention, attended), choices={"datasets": links.DATASETS[:-1]},
        smoke={"datasets": ["nips12"], "num_searched": 1, "num_splits": 1, "num_steps": 3},
        datasets=["nips12", "cora"], num_searched=(2, "splits of the search"),
        num_splits=(10, "compared"), num_samples=(100, "memberships at the test"), num_steps=500,
        data_root=Path, device="cpu", results=RESULTS / "links.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
