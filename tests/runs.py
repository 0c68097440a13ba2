# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Small runs of the loops that fit, and the data that they are fitted to."""

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import fit_nmm
from pyro_nmm.models import NMMNetwork


def ring(nodes=12):
    """A ring of two classes; four nodes have an observed label."""
    around = torch.arange(nodes)
    edges = torch.stack([around, (around + 1) % nodes])
    x = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(1))
    both = torch.cat([edges, edges.flip(0)], 1)
    return Data(x=x, edge_index=both, y=around // 6, train_mask=around % 3 == 0)


def changed(**changes):
    data = ring()
    for name, value in changes.items():
        data[name] = value
    return data


def pair(dropout=0.5, **options):
    labels, attention = GCN(4, 8, 2, 2, dropout=dropout), GCN(4, 3, 1)
    return NMMNetwork(labels, attention, num_classes=2, **options)


def fit(data=ring, network=pair, seed=0, **options):
    torch.manual_seed(seed)
    hood = Neighborhood(ring().edge_index, 12)
    return fit_nmm(network(), data(), hood, **{"num_steps": 8} | options)
