# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What an epoch of an NMM costs, over the networks that it runs:

    python benchmarks/epochs.py --data-root FOLDER

Per backbone, in one process and in turn, so that a busy machine slows all alike: an epoch of
the backbone alone, forward and backward passes of the NMM's two networks (their edge scores
included), an epoch of the NMM, one with agreement, and one through Pyro's SVI. Medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch.nn import functional as F

from pyro_nmm import Neighborhood
from pyro_nmm.datasets.nodes import digits, planetoid, random_split
from pyro_nmm.guides import Agreement, AmortizedNMM
from pyro_nmm.guides.fitting.nodes import nmm_loss
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.backbones import appnp, gat, gcn

BACKBONES = {"gcn": gcn, "gat": gat, "appnp": appnp}


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

    agreement = Agreement(data.num_nodes, classes).to(args.device)
    pyro.clear_param_store()
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)

    def pyro_nmm() -> None:
        elbo.loss_and_grads(program.model, program.guide, *inputs, **known)

    def nmm(agreement=None) -> None:
        nmm_loss(network, data, hood, agreement).backward()

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
        "NMM": partial(epoch, shared, nmm),
        "NMM + agreement": partial(epoch, shared, partial(nmm, agreement)),
        "NMM in Pyro": partial(epoch, shared, pyro_nmm),
    }


def main(args) -> list[dict]:
    if args.smoke:
        args.datasets, args.repeats = ["digits"], 2
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    pyro.set_rng_seed(0)
    rows = []
    heads = ("graph", "backbone", "ms, backbone", "ms, networks", "ms, NMM", "NMM / networks",
             "with agreement / networks", "in Pyro / networks")  # fmt: skip
    print("|", " | ".join(heads), "|\n|---|---|" + "---:|" * 6)
    for dataset in args.datasets:
        if dataset == "digits":
            data = random_split(digits(), 0.05, 0.1, 0.5, seed=0)
        else:
            data = planetoid(dataset, args.data_root)
        data = data.to(args.device)
        hood = Neighborhood(data.edge_index, data.num_nodes)
        for kind in args.backbones:
            times: dict[str, list[float]] = {}
            closures = steps(kind, data, hood, args)
            for repeat in range(args.repeats + 2):
                for name, step in closures.items():
                    start = time.perf_counter()
                    step()
                    if repeat > 1:
                        times.setdefault(name, []).append(time.perf_counter() - start)
            row = {name: 1000 * statistics.median(t) for name, t in times.items()}
            ratios = [row[name] / row["networks"] for name in list(row)[2:]]
            rows.append({"dataset": dataset, "backbone": kind, "ms": row, "ratios": ratios})
            numbers = " | ".join(f"{row[n]:.1f}" for n in ("backbone", "networks", "NMM"))
            shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {dataset} | {kind} | {numbers} | {shown} |")
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", nargs="+", default=["cora", "citeseer", "pubmed"])
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=BACKBONES)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--smoke", action="store_true", help="seconds, on the digits")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
