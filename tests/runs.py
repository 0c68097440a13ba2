# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Small runs of the loops that fit, and the data that they are fitted to."""

import torch
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.guides import fit_classifier, fit_nmm
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.backbones import gcn


def ring(nodes=12):
    """A ring of two classes; four nodes each train and validate."""
    around = torch.arange(nodes)
    edges = torch.stack([around, (around + 1) % nodes])
    x = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(1))
    masks = {name: (around % 3) == k for k, name in enumerate(("train_mask", "val_mask"))}
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=around // 6, **masks)


def changed(**changes):
    data = ring()
    for name, value in changes.items():
        data[name] = value
    return data


def fit(path, kind="nmm", data=None, hood=None, network=None, seed=0, skipped=0, **options):
    data = ring() if data is None else data
    torch.manual_seed(seed)
    torch.randn(skipped)
    options = {"num_epochs": 20, "checkpoint": path} | options
    if kind == "classifier":
        network = gcn(4, 2) if network is None else network()
        out, scores = fit_classifier(network, data, **options)
        return out.detach(), scores
    if network is None:
        network = NMMNetwork(gcn(4, 2), gcn(4, 3, attention=True), num_classes=2)
    else:
        network = network()
    hood = Neighborhood(data.edge_index, data.num_nodes) if hood is None else hood
    mix, scores = fit_nmm(network, data, hood, **options)
    return mix.alpha, scores


def pair(label=None, attention=None, **options):
    labels = label or gcn(4, 2)
    return NMMNetwork(labels, attention or gcn(4, 3, attention=True), num_classes=2, **options)
