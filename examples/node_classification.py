# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Classify nodes by a graph neural network alone, by an NMM on top of the trained network, and by
an NMM trained end to end with the network.

    python examples/node_classification.py --dataset digits --output output/digits.png
    python examples/node_classification.py --dataset cora --backbone appnp

The digits come with scikit-learn; cora, citeseer and pubmed are downloaded by PyG, or read
from --data-root. With --checkpoint FOLDER an interrupted run continues.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import torch
from common import GRAPHS, load_graph, options, progress_bar
from common import scores as label_scores
from drawing.node_classification import draw

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import inner_edges
from pyro_nmm.guides import Consistency, fit_classifier, fit_nmm
from pyro_nmm.metrics import brier, independent_pairs, pair_log_likelihood
from pyro_nmm.models import NMMNetwork, StackedNMM, temperature_scaling
from pyro_nmm.models.backbones import appnp, gat, gcn

BACKBONES = {"gcn": gcn, "gat": gat, "appnp": appnp}


def networks(args, data, num_classes: int):
    """Backbone of the classifier, and the one or two backbones of the NMM."""
    backbone = partial(BACKBONES[args.backbone], data.num_features, dropout=args.dropout)
    alone, width = backbone(num_classes), 64 if args.backbone == "gcn" else 32
    if args.shared:
        parts = (backbone(num_classes + width, drop_nodes=0.5), None)
    else:
        parts = (backbone(num_classes, drop_nodes=0.5), backbone(width, attention=True))
    return alone, NMMNetwork(*parts, num_classes=num_classes, floor=0.1, gamma=2.0)


def timed(fit, *args, label: str, **options):
    """Result of a fit, its validation curve, and seconds per epoch of this run."""
    count = 0

    def progress(epochs):
        nonlocal count
        for epoch in progress_bar(epochs, desc=label, unit="epoch"):
            yield epoch
            count += 1

    start = time.perf_counter()
    result, curve = fit(*args, progress=progress, **options)
    return result, curve, (time.perf_counter() - start) / count if count else None


def scores(probs, data, pairs, table, seconds=None) -> dict:
    p, y = probs[data.test_mask], data.y[data.test_mask]
    return label_scores(p, y, least=1e-12) | {
        "Brier": brier(p, y).item(),
        "PLL": pair_log_likelihood(table.clamp(min=1e-24), data.y, pairs).item(),
        "s/epoch": seconds,
    }


def show(results: dict) -> None:
    columns = list(next(iter(results.values())))
    print(f"{'':24}", *(f"{name:>9}" for name in columns))
    for name, row in results.items():
        cells = (f"{row[c]:9.4f}" if row[c] is not None else f"{'':9}" for c in columns)
        print(f"{name:24}", *cells)


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    data = load_graph(args.dataset, args.data_root, args.split).to(args.device)
    num_classes, y = int(data.y.max()) + 1, data.y
    hood = Neighborhood(data.edge_index, data.num_nodes)
    pairs = inner_edges(data.edge_index, data.test_mask)
    alone, network = (net.to(args.device) for net in networks(args, data, num_classes))
    files = {name: args.checkpoint and args.checkpoint / f"{name}.pt" for name in ("alone", "nmm")}
    how = {"lr": args.lr, "weight_decay": args.weight_decay, "num_epochs": args.num_epochs}

    name = args.backbone.upper()
    logits, curve, seconds = timed(
        fit_classifier, alone, data, label=name, checkpoint=files["alone"], **how
    )
    probs = logits.softmax(-1)
    scaled = (logits / temperature_scaling(logits, y, data.val_mask)).softmax(-1)
    results = {
        name: scores(probs, data, pairs, independent_pairs(probs, pairs), seconds),
        f"{name} + temperature": scores(scaled, data, pairs, independent_pairs(scaled, pairs)),
    }

    def on_top(logits):
        """Fit an NMM on top of trained scores, to the validation nodes."""
        stacked = StackedNMM(num_classes).fit(hood, logits, y, data.train_mask, data.val_mask)
        mix = stacked.mixture(hood, logits, y, data.train_mask)
        post = mix.condition(y, data.train_mask, num_samples=64)
        return mix, post.marginals(), scores(post.marginals(), data, pairs, post.pairwise(pairs))

    results[f"{name} + StackedNMM"] = on_top(logits)[-1]

    # An NMM trained end to end, with consistency regularisation on unlabelled nodes.
    consistency = Consistency(data.num_nodes, num_classes, weight=args.consistency).to(args.device)
    mix, nmm_curve, seconds = timed(
        fit_nmm, network, data, hood, label=f"NMM-{name}", checkpoint=files["nmm"],
        consistency=consistency if args.consistency else None, **how,
    )  # fmt: skip
    post = mix.condition(y, data.train_mask, num_samples=64)
    results[f"NMM-{name}"] = scores(post.marginals(), data, pairs, post.pairwise(pairs), seconds)
    top, marginals, row = on_top(mix.alpha.log())
    results[f"NMM-{name} + StackedNMM"] = row

    show(results)
    size = int(data.test_mask.sum())
    joint = top.log_likelihood(y, data.test_mask, data.train_mask, num_particles=64).item() / size
    print(f"{size} test nodes; pairs are the {pairs.shape[1]} edges between them")
    rival, last = f"{name} + temperature", f"NMM-{name} + StackedNMM"
    print(
        f"log p(y_test | y_train) per node: {joint:.4f}, last row; "
        f"sum of marginals of {rival}: {-results[rival]['NLL']:.4f}"
    )
    if args.output:
        curves = {name: curve, f"NMM-{name}": nmm_curve}
        draw(args, data, top, {rival: scaled, last: marginals}, curves)
    return results | {"joint": joint}


def parser() -> ArgumentParser:
    choices = {"dataset": GRAPHS, "backbone": BACKBONES}
    return options(
        __doc__, "node_classification.png", choices, dataset="digits", backbone="gcn",
        shared=(False, "one network for alpha and attention"), split=(0, "number of the split"),
        num_epochs=200, lr=0.02, weight_decay=5e-4, dropout=0.5,
        consistency=(0.5, "weight; 0: bound alone"),
        node=(int, "to be drawn; default an uncertain test node"), seed=0, device="cpu",
        num_threads=(1, "results depend on it"),
        data_root=(Path, "folder that holds Cora/raw and the like"),
        checkpoint=(Path, "folder for resumable checkpoints"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
