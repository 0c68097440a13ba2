# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Combinations of answers by rivals: votes, models of annotators, spreading, networks."""

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from benchmarks.latent import AnnotatedPotts, Found, majority, spread_labels
from pyro_nmm.models import Annotators
from pyro_nmm.models.latent import mixture_em


def votes(data: Data) -> Tensor:
    return majority(data.answers, int(data.y.max()) + 1).probs


def crowd_kit(method: str, data: Data) -> Tensor:
    """Equal shares at nodes without answers."""
    from crowdkit import aggregation

    node, worker = (data.answers >= 0).nonzero(as_tuple=True)
    answers = {"task": node, "worker": worker, "label": data.answers[node, worker]}
    frame = pd.DataFrame({name: column.numpy() for name, column in answers.items()})
    options = {"MACE": {"random_state": 0}, "DawidSkene": {"n_iter": 100}}.get(method, {})
    found = getattr(aggregation, method)(**options).fit_predict_proba(frame)
    size = int(data.y.max()) + 1
    probs = torch.full((len(data.y), size), 1 / size, dtype=torch.double)
    columns = torch.tensor([int(column) for column in found.columns])
    rows = torch.from_numpy(found.index.to_numpy())
    probs[rows] = 0.0
    probs[rows[:, None], columns] = torch.from_numpy(found.to_numpy())
    return probs


def label_spreading(data: Data) -> Tensor:
    """From the votes; a node without any starts with none."""
    own = votes(data) * (data.answers >= 0).any(1)[:, None]
    probs = spread_labels(Found(own), data.edge_index).probs
    total = probs.sum(1, keepdim=True)
    return torch.where(total > 0, probs / total, 1 / own.shape[1])


def potts(data: Data) -> Tensor:
    emission = Annotators(int(data.y.max()) + 1)
    values, probs = mixture_em(emission, data.answers, emission.start(data.answers, None))
    field = AnnotatedPotts(emission, data.answers, data.edge_index)
    return field.mean_field(Found(probs, {}, values)).probs


def network(data: Data, targets: Tensor, rows: Tensor, num_epochs: int = 200) -> Tensor:
    """A GCN of 64 hidden units, trained on label distributions of rows."""
    model = GCN(data.num_features, 64, 2, targets.shape[1], dropout=0.5)
    adam = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    for _ in range(num_epochs):
        adam.zero_grad()
        logits = model(data.x, data.edge_index)[rows]
        cross_entropy(logits, targets[rows].float()).backward()
        adam.step()
    return model.eval()(data.x, data.edge_index).softmax(-1).detach()


def gcn(data: Data, hard: bool) -> Tensor:
    shares, there = votes(data), (data.answers >= 0).any(1)
    targets = one_hot(shares.argmax(1), shares.shape[1]) if hard else shares
    return network(data, targets, there)
