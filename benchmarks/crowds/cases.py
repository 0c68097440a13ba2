# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Small crowds that mislead a consensus: few answers of each person, silence, graphs that fit no
label."""

import warnings
from collections.abc import Callable

import numpy as np
import pyro
import torch
from sklearn.neighbors import kneighbors_graph
from torch import Tensor
from torch_geometric.utils import to_undirected

from benchmarks.latent import majority
from benchmarks.nodes import node_scores
from benchmarks.shared.records import Records
from pyro_nmm.models import Annotators
from pyro_nmm.models.hidden import mixture_em

#: Graphs by the distance between the means of the labels' features: number of nearest rows.
GRAPHS = {"fits": (2.0, 10), "fits in part": (1.0, 6), "unrelated": (0.0, 5), "dense": (0.0, 10)}
SEEDS, LABELS = range(1000, 1010), [2, 3, 4]


def graph_of(kind: str, size: int, labels: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Edges between nearest rows of Normal features, and the labels."""
    truth = rng.integers(labels, size=size)
    if kind == "complete":
        return torch.ones(size, size).fill_diagonal_(0).nonzero().T, torch.from_numpy(truth)
    distance, number = GRAPHS[kind]
    angle = 2 * np.pi * truth / labels
    x = distance * np.stack([np.cos(angle), np.sin(angle)], 1) + rng.normal(size=(size, 2))
    near = kneighbors_graph(x, number).tocoo()
    ends = torch.from_numpy(np.stack([near.row, near.col])).long()
    return to_undirected(ends, num_nodes=size), torch.from_numpy(truth)


def people(truth: Tensor, labels: int, rng: np.random.Generator, number: int) -> Tensor:
    """Of accuracies .5 to .9; three answers in ten are missing."""
    size, right = (len(truth), number), rng.uniform(0.5, 0.9, number)
    wrong = (truth.numpy()[:, None] + rng.integers(1, labels, size=size)) % labels
    answers = np.where(rng.random(size) < right, truth.numpy()[:, None], wrong)
    answers[rng.random(size) < 0.3] = -1
    return torch.from_numpy(answers)


def visitors(
    truth: Tensor, labels: int, rng: np.random.Generator, per_task: int, each: int
) -> Tensor:
    """People of accuracy .75, who give ``each`` answers, ``per_task`` about a node."""
    task = np.tile(np.arange(len(truth)), per_task)
    worker = np.empty_like(task)
    worker[rng.permutation(len(task))] = np.arange(len(task)) // each
    right = truth.numpy()[task]
    wrong = (right + rng.integers(1, labels, size=len(task))) % labels
    answers = np.full((len(truth), worker.max() + 1), -1)
    answers[task, worker] = np.where(rng.random(len(task)) < 0.75, right, wrong)
    return torch.from_numpy(answers[:, (answers >= 0).any(0)])


def one_sided(truth: Tensor, labels: int, rng: np.random.Generator, number: int) -> Tensor:
    """Each names one label, at 7 in 10 of its nodes and 1 in 10 of the others, or is silent."""
    label = np.arange(number) % labels
    rate = np.where(truth.numpy()[:, None] == label, 0.7, 0.1)
    answers = np.where(rng.random(rate.shape) < rate, label, -1)
    return torch.from_numpy(answers[:, (answers >= 0).any(0)])


#: Annotators by name: their graphs, numbers of nodes, and a function of truth, labels and numbers.
Case = tuple[list[str], list[int], Callable, list[dict]]
CASES: dict[str, Case] = {
    "one answer each": (["fits"], [150], visitors, [{"per_task": n, "each": 1} for n in (1, 3, 7)]),
    "few answers each": (["unrelated"], [150], visitors, [
        {"per_task": 5, "each": n} for n in (2, 5)
    ]),
    "one label or silence": (["fits", "unrelated"], [200], one_sided, [
        {"number": n} for n in (4, 8, 12)
    ]),
    "people, dense graph": (["dense", "complete"], [20, 40], people, [{"number": 5}]),
    "people": (["fits", "fits in part", "unrelated"], [60], people, [
        {"number": n} for n in (3, 15)
    ]),
}  # fmt: skip


def cases(args, results: Records) -> None:
    for name, (graphs, sizes, make, options) in CASES.items():
        for option in options:
            for key in results.missing(task="cases", case=name, graph=graphs, nodes=sizes,
                                       option=[option], labels=LABELS, seed=SEEDS):  # fmt: skip
                results.add(**key, **scores(key, make, option))


def scores(key: dict, make: Callable, option: dict) -> dict:
    """Of the vote, Dawid and Skene's model without the graph, the field and the consensus."""
    place = list(CASES).index(key["case"])
    rng = np.random.default_rng([key["seed"], place, key["nodes"], key["labels"]])
    edges, truth = graph_of(key["graph"], key["nodes"], key["labels"], rng)
    answers, emission = make(truth, key["labels"], rng, **option), Annotators(key["labels"])
    pyro.set_rng_seed(key["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = emission.fit(edges, answers)
    data = emission.check(found.field.hood, answers)
    simple = mixture_em(emission, data, emission.start(data, found.field.hood))[1]
    vote = majority(answers, key["labels"]).probs
    methods = {"majority": vote, "Dawid-Skene": simple, "field": found.field.probs}
    rows: dict = {"powers": found.powers, "warned": "warning: " in found.summary()}
    for name, probs in (methods | {"Annotators": found.probs}).items():
        clear = (probs := probs.double().clamp(min=1e-12)) / probs.sum(-1, keepdim=True)
        rows[name] = node_scores(clear, truth) | {"confidence": clear.amax(1).mean().item()}
    return rows
