# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Combinations of answers by rivals: votes, models of annotators, spreading, networks."""

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from benchmarks.latent import AnnotatedPotts, Found, majority, spread_labels
from benchmarks.shared.fits import descend
from pyro_nmm.models import Annotators
from pyro_nmm.models.hidden import mixture_em

NUM_EPOCHS = 200


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


def network(data: Data, targets: Tensor, rows: Tensor) -> Tensor:
    """A GCN of 64 hidden units, trained on label distributions of rows."""
    model, adam = new_network(data, targets.shape[1])
    loss = lambda: cross_entropy(logits(model, data)[rows], targets[rows])  # noqa: E731
    return logits(descend(model, adam, loss, NUM_EPOCHS), data).softmax(-1).detach()


def new_network(data: Data, num_labels: int, *more: Tensor) -> tuple[GCN, Adam]:
    model = GCN(data.num_features, 64, 2, num_labels, dropout=0.5, cached=True)
    parameters = {"params": model.parameters(), "weight_decay": 5e-4}
    return model, Adam([parameters, *({"params": [each]} for each in more)], 0.01)


def logits(model: GCN, data: Data) -> Tensor:
    return model(data.x, data.edge_index).double()


def gcn(data: Data, hard: bool) -> Tensor:
    shares, there = votes(data), (data.answers >= 0).any(1)
    targets = one_hot(shares.argmax(1), shares.shape[1]) if hard else shares
    return network(data, targets.double(), there)


def raykar(data: Data, read: str, num_steps: int = 10) -> Tensor:
    """Dawid-Skene with a GCN as the prior of the labels, by EM (Raykar et al. 2010)."""
    emission, there = Annotators(int(data.y.max()) + 1), (data.answers >= 0).any(1)
    probs = votes(data).double()
    model, adam = new_network(data, probs.shape[1])
    loss = lambda: cross_entropy(logits(model, data)[there], probs[there])  # noqa: E731
    for _ in range(num_steps):
        prior = logits(descend(model, adam, loss, 30), data).softmax(-1).detach()
        values = emission.maximise(data.answers, probs, {})
        probs = (prior.log() + emission.log_prob(values, data.answers)).softmax(-1)
    return {"network": prior, "posterior": probs}[read]


def crowd_layer(data: Data) -> Tensor:
    """A GCN behind each annotator's confusion matrix (Rodrigues and Pereira 2018)."""
    node, annotator = (data.answers >= 0).nonzero(as_tuple=True)
    given, size = data.answers[node, annotator], int(data.y.max()) + 1
    scores = (4 * torch.eye(size)).repeat(data.answers.shape[1], 1, 1).double().requires_grad_()
    model, adam = new_network(data, size, scores)

    def loss() -> Tensor:
        rows = scores.log_softmax(-1)[annotator, :, given]
        return -(logits(model, data).log_softmax(-1)[node] + rows).logsumexp(-1).mean()

    return logits(descend(model, adam, loss, NUM_EPOCHS), data).softmax(-1).detach()


def crowdlab(data: Data, num_rounds: int = 2) -> Tensor:
    """CROWDLAB of cleanlab (Goh et al. 2022) with a GCN, out of fold, trained on its consensus."""
    from cleanlab.multiannotator import get_label_quality_multiannotator

    there, size = (data.answers >= 0).any(1), int(data.y.max()) + 1
    probs = one_hot(votes(data).argmax(1), size).double()
    table = data.answers[there].double()
    table = pd.DataFrame(table.masked_fill(table < 0, torch.nan).numpy())
    for _ in range(num_rounds):
        targets = one_hot(probs.argmax(1), size).double()
        prior, fold = torch.empty_like(targets), torch.randperm(len(there)) % 5
        for number in range(5):
            here = fold == number
            prior[here] = network(data, targets, there & ~here)[here]
        found = get_label_quality_multiannotator(
            table, prior[there].numpy(), return_weights=True, verbose=False
        )
        quality, weights = found["label_quality"], torch.from_numpy(found["annotator_weight"])
        several = quality["num_annotations"] != 1
        right = quality["annotator_agreement"][several].mean()
        given = torch.full((size, size), (1 - right) / (size - 1)).fill_diagonal_(right).double()
        sums = found["model_weight"] * prior
        for weight, answers in zip(weights, data.answers.T, strict=True):
            sums[answers >= 0] += weight * given[answers[answers >= 0]]
        probs = sums / sums.sum(-1, keepdim=True)
    return probs
