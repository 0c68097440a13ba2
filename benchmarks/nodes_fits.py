# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of node classification's benchmark: graphs, settings and networks."""

from __future__ import annotations

import random

import pyro
import torch

from pyro_nmm import Neighborhood
from pyro_nmm.datasets.nodes import digits, planetoid, random_split, select_split
from pyro_nmm.guides import Agreement, fit_classifier, fit_nmm
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.backbones import appnp, gat, gcn, mlp

BACKBONES = {"gcn": gcn, "gat": gat, "appnp": appnp, "mlp": mlp}
AGREEMENT = ("weight", "temperature", "memory")
#: Where nothing was searched for: random splits with many labels.
DEFAULT = {
    "lr": 0.02, "weight_decay": 5e-4, "dropout": 0.5, "floor": 0.1, "gamma": 2.0,
    "weight": 0.5, "temperature": 0.5, "memory": 0.9,
}  # fmt: skip


def load(args, name: str):
    if name == "digits":
        data = random_split(digits(), 0.05, 0.1, 0.5, seed=0)
    else:
        data = select_split(planetoid(name, args.data_root))
    hood = Neighborhood(data.edge_index, data.num_nodes)
    return data.to(args.device), hood.to(args.device)


def random_settings(method: str, dataset: str, rng: random.Random) -> dict:
    """One draw from the appendix's pools, and ours."""
    heavy = [5e-4, 2e-3, 5e-3]
    pools = {"lr": [0.01, 0.03, 0.05], "weight_decay": heavy, "dropout": [0.5, 0.6, 0.7]}
    if method != "backbone":
        # The backbones' own searches chose the heavier decays on PubMed.
        decays = heavy if dataset == "pubmed" else [2e-4, 5e-4, 1e-3]
        pools = {"lr": [0.01, 0.02, 0.03], "weight_decay": decays, "dropout": [0.5, 0.6]}
        if method == "NMM + agreement":
            values = [0.5, 1.0], [0.3, 0.5, 0.7], [0.8, 0.95]
            pools |= zip(AGREEMENT, values, strict=True)
        pools |= {"floor": [0.01, 0.1, 1.0], "gamma": [0.0, 2.0, 3.0]}
    return {name: rng.choice(pool) for name, pool in pools.items()}


def fit(method: str, kind: str, data, hood, settings: dict, seed: int, args, **options):
    """Logits of a classifier, or a NeighborMixture; and the validation curve."""
    pyro.set_rng_seed(seed)
    classes, agreement = int(data.y.max()) + 1, None
    drop = {"dropout": settings["dropout"]}
    if "agreement" in method:
        agreement = Agreement(data.num_nodes, classes, **{n: settings[n] for n in AGREEMENT})
        agreement.to(args.device)
        drop["drop_nodes"] = 0.5

    def build(width, **extra):
        module = BACKBONES[kind](data.num_features, width, **drop | extra)
        if data.x.layout == torch.strided:
            module.dropout = 0.0  # most of an epoch, where the features are dense
        return module

    options = {
        "lr": settings["lr"], "weight_decay": settings["weight_decay"],
        "num_epochs": args.num_epochs, "agreement": agreement,
    } | options  # fmt: skip
    if "NMM" not in method:
        return fit_classifier(build(classes).to(args.device), data, **options)
    labels = build(classes)
    attention = build(64 if kind == "gcn" else 32, attention=True, drop_nodes=0.0)
    more = {"floor": settings["floor"], "gamma": settings["gamma"]}
    more["link"] = settings.get("link", "exp")
    network = NMMNetwork(labels, attention, num_classes=classes, **more)
    options.setdefault("estimator", "horizon" if int(data.train_mask.sum()) > 300 else "later")
    return fit_nmm(network.to(args.device), data, hood, **options)
