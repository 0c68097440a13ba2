# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What an epoch of an NMM costs, over the networks that it runs:

    python benchmarks/epochs.py --data-root FOLDER

Per backbone, in one process and in turn, so that a busy machine slows all alike: an epoch of
the backbone alone, forward and backward passes of the NMM's two networks (their edge scores
included), an epoch of the NMM as ``fit_nmm`` has it, through Pyro's ``Trace_ELBO``, one with
consistency, which ``fit_nmm`` takes through ``TraceGraph_ELBO``, and one without through
``TraceGraph_ELBO``, which has the same gradient. Medians and ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch.nn import functional as F

from benchmarks.nodes.fits import BACKBONES, backbone, load, nmm_network
from benchmarks.shared.common import GRAPHS, started, store, table
from benchmarks.shared.timing import in_turn, timed
from pyro_nmm.guides import AmortizedNMM, Consistency
from pyro_nmm.guides.fitting.loop import unvalidated


def steps(kind: str, data, hood) -> dict[str, Callable[[], float]]:
    """An epoch's seconds, of gradients and an optimiser's step, without validation."""
    classes, device = int(data.y.max()) + 1, data.y.device
    alone = backbone(kind, data, classes).to(device).train()
    network = nmm_network(kind, data).to(device).train()
    inputs, train = (data.x, data.edge_index), data.train_mask
    consistency = Consistency(data.num_nodes, classes).to(device)
    pyro.clear_param_store()

    def classify() -> None:
        F.cross_entropy(alone(*inputs)[train], data.y[train]).backward()

    def both() -> None:
        alpha, logits = network(hood, *inputs)
        (alpha.sum() + logits.sum()).backward()

    def nmm(loss, consistency=None) -> Callable[[], None]:
        program = AmortizedNMM(hood, network, consistency=consistency)
        elbo = loss(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
        known = {"y": data.y, "observed": train}

        def backward() -> None:
            with unvalidated():
                elbo.loss_and_grads(program.model, program.guide, *inputs, **known)

        return backward

    def epoch(optimizer, backward) -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()
        if data.x.is_cuda:
            torch.cuda.synchronize()

    one, shared = (torch.optim.Adam(module.parameters(), lr=0.01) for module in (alone, network))
    epochs = {
        "backbone": (one, classify),
        "networks": (shared, both),
        "NMM": (shared, nmm(Trace_ELBO)),
        "NMM + consistency": (shared, nmm(TraceGraph_ELBO, consistency)),
        "NMM, TraceGraph_ELBO": (shared, nmm(TraceGraph_ELBO)),
    }
    return {name: lambda how=how: timed(epoch, *how)[1] for name, how in epochs.items()}


def tables(rows: list[dict]) -> dict[str, str]:
    """Of the stored measurements, for ``report.py``."""
    lines = []
    for row in rows:
        cells = [GRAPHS.get(row["dataset"], row["dataset"]), row["backbone"].upper()]
        cells += [f"{row['ms'][name]:.1f}" for name in ("backbone", "networks", "NMM")]
        lines.append(cells + [f"{ratio:.2f}" for ratio in row["ratios"]])
    times, ratios = "backbone, ms | networks, ms | NMM, ms", "with consistency | by TraceGraph_ELBO"
    head = f"graph | backbone | {times} | NMM / networks | {ratios}"
    return {"epochs": table(head, lines, left=2)}


def main(argv: list[str] | None = None) -> list[dict]:
    args = started(
        argv, __doc__, smoke={"datasets": ["digits"], "repeats": 2},
        choices={"backbones": BACKBONES}, datasets=["cora", "citeseer", "pubmed"],
        backbones=["gcn", "gat", "appnp"], repeats=30, device="cpu", data_root=Path, results=Path,
    )  # fmt: skip
    pyro.set_rng_seed(0)
    rows = []
    for dataset, kind in itertools.product(args.datasets, args.backbones):
        functions = steps(kind, *load(dataset, args.data_root, args.device))
        turns = in_turn(functions, args.repeats + 2)  # the first two warm up
        ms = {name: 1000 * median(seconds[2:]) for name, seconds in turns.items()}
        ratios = [ms[name] / ms["networks"] for name in list(ms)[2:]]
        rows.append({"dataset": dataset, "backbone": kind, "ms": ms, "ratios": ratios})
    print(tables(rows)["epochs"])
    store(args.results, rows)
    return rows


if __name__ == "__main__":
    main()
