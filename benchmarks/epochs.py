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

import json
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyro
import torch
from common import GRAPHS, arguments, start, table
from nodes_fits import BACKBONES, load
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch.nn import functional as F

from pyro_nmm.guides import AmortizedNMM, Consistency
from pyro_nmm.guides.fitting.loop import unvalidated
from pyro_nmm.models import NMMNetwork


def steps(kind: str, data, hood, args) -> dict:
    """Closures, each one epoch: gradients and an optimiser's step, no validation."""
    classes = int(data.y.max()) + 1
    build = partial(BACKBONES[kind], data.num_features)
    width = 64 if kind == "gcn" else 32
    alone = build(classes)
    network = NMMNetwork(build(classes), build(width, attention=True), num_classes=classes)
    if data.x.layout == torch.strided:
        for module in (alone, network.labels, network.attention):
            module.dropout = 0.0
    alone, network = alone.to(args.device).train(), network.to(args.device).train()
    inputs = (data.x, data.edge_index)
    known = {"y": data.y, "observed": data.train_mask}

    def backbone() -> None:
        out = alone(*inputs)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()

    def networks() -> None:
        alpha, logits = network(hood, *inputs)
        (alpha.sum() + logits.sum()).backward()

    consistency = Consistency(data.num_nodes, classes).to(args.device)
    pyro.clear_param_store()

    def nmm(loss=Trace_ELBO, consistency=None) -> Callable[[], None]:
        program = AmortizedNMM(hood, network, consistency=consistency)
        elbo = loss(num_particles=4, vectorize_particles=True, max_plate_nesting=0)

        def backward() -> None:
            with unvalidated():
                elbo.loss_and_grads(program.model, program.guide, *inputs, **known)

        return backward

    def epoch(optimizer, backward):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        if data.x.is_cuda:
            torch.cuda.synchronize()

    adam = partial(torch.optim.Adam, lr=0.01)
    shared = adam(network.parameters())
    return {
        "backbone": partial(epoch, adam(alone.parameters()), backbone),
        "networks": partial(epoch, shared, networks),
        "NMM": partial(epoch, shared, nmm()),
        "NMM + consistency": partial(epoch, shared, nmm(TraceGraph_ELBO, consistency)),
        "NMM, TraceGraph_ELBO": partial(epoch, shared, nmm(TraceGraph_ELBO)),
    }


def tables(rows: list[dict]) -> dict[str, str]:
    """Of the stored measurements, for ``report.py``."""
    lines = [[GRAPHS.get(row["dataset"], row["dataset"]), row["backbone"].upper(),
              *(f"{row['ms'][name]:.1f}" for name in ("backbone", "networks", "NMM")),
              *(f"{ratio:.2f}" for ratio in row["ratios"])] for row in rows]  # fmt: skip
    head = (
        "graph | backbone | backbone, ms | networks, ms | NMM, ms | NMM / networks | "
        "with consistency | by TraceGraph_ELBO"
    )
    return {"epochs": table(head, lines, left=2)}


def main(args) -> list[dict]:
    if args.smoke:
        args.datasets, args.repeats = ["digits"], 2
    start(args.num_threads)
    pyro.set_rng_seed(0)
    rows = []
    for dataset in args.datasets:
        data, hood = load(args, dataset)
        for kind in args.backbones:
            times: dict[str, list[float]] = {}
            closures = steps(kind, data, hood, args)
            for _ in range(args.repeats + 2):
                for name, step in closures.items():
                    began = time.perf_counter()
                    step()
                    times.setdefault(name, []).append(time.perf_counter() - began)
            row = {name: 1000 * statistics.median(each[2:]) for name, each in times.items()}
            ratios = [row[name] / row["networks"] for name in list(row)[2:]]
            rows.append({"dataset": dataset, "backbone": kind, "ms": row, "ratios": ratios})
            print(rows[-1], flush=True)
    print(tables(rows)["epochs"])
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def parser() -> ArgumentParser:
    return arguments(
        __doc__, (), "seconds, on the digits", {"backbones": BACKBONES},
        datasets=["cora", "citeseer", "pubmed"], backbones=["gcn", "gat", "appnp"], repeats=30,
        num_threads=1, device="cpu", data_root=Path, results=Path,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
