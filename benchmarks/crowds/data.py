# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs with answers of people or of weak classifiers, and controls with independent errors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.base import ClassifierMixin
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid, kneighbors_graph
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from benchmarks.latent import noisy
from benchmarks.nodes import load

#: A classifier, and the features that it sees.
Weak = tuple[ClassifierMixin, np.ndarray]
#: Labelled rows of each digit's classifier, and labelled rows a class of the words' classifiers.
ROWS, A_CLASS = 60, 20


def neighbours(x: np.ndarray, number: int = 10) -> Tensor:
    graph = kneighbors_graph(x, number).tocoo()
    ends = torch.from_numpy(np.stack([graph.row, graph.col])).long()
    return to_undirected(ends, num_nodes=len(x))


def weak_answers(x: np.ndarray, y: np.ndarray, classifiers: list[Weak], rows: int, seed: int):
    """Each one is trained on rows of its own, about which it gives no answer."""
    rng, found = np.random.default_rng(seed), np.full((len(y), len(classifiers)), -1)
    for column, (model, features) in enumerate(classifiers):
        train = rng.permutation(len(y))[:rows]
        while len(np.unique(y[train])) <= y.max():
            train = rng.permutation(len(y))[:rows]
        model.fit(x[train][:, features], y[train])
        found[:, column] = model.predict(x[:, features])
        found[train, column] = -1
    return torch.from_numpy(found)


def digits(root: Path, seed: int) -> Data:
    """Seven classifiers of all pixels, halves, or the middle of an image."""
    data, _ = load("digits", root)
    x, y, image = data.x.numpy(), data.y.numpy(), np.arange(64).reshape(8, 8)
    parts = [image[:4], image[4:], image[:, :4], image[:, 4:], image[2:6, 2:6]]
    top, bottom, left, right, middle = (part.ravel() for part in parts)
    classifiers = [
        (DecisionTreeClassifier(random_state=seed), image.ravel()),
        (DecisionTreeClassifier(max_depth=8, random_state=seed + 1), image.ravel()),
        (GaussianNB(var_smoothing=1e-2), top),
        (LogisticRegression(max_iter=500), bottom),
        (KNeighborsClassifier(3), left),
        (NearestCentroid(), right),
        (LogisticRegression(max_iter=500), middle),
    ]
    answers = weak_answers(x, y, classifiers, ROWS, seed)
    return Data(x=data.x, y=data.y, edge_index=data.edge_index, answers=answers)


def words(name: str, root: Path, seed: int) -> Data:
    """Five classifiers, each of a fifth of the words."""
    data, _ = load(name, root)
    dense = data.x.to_dense() if data.x.layout != torch.strided else data.x
    x, y = (dense.numpy() > 0).astype(float), data.y.numpy()
    parts = np.array_split(np.random.default_rng(seed).permutation(x.shape[1]), 5)
    classifiers = [
        BernoulliNB(),
        MultinomialNB(),
        LogisticRegression(max_iter=300),
        ExtraTreesClassifier(50, random_state=seed),
        BernoulliNB(alpha=0.1),
    ]
    pairs = list(zip(classifiers, parts, strict=True))
    answers = weak_answers(x, y, pairs, A_CLASS * (int(y.max()) + 1), seed)
    return Data(x=dense, y=data.y, edge_index=data.edge_index, answers=answers)


def music(root: Path, seed: int) -> Data:
    """44 people about the genres of 700 songs."""
    rows = pd.read_csv(root / "music/mturk_answers.csv", lineterminator="\r")
    rows.columns = ["worker", "task", "truth", "label"]
    songs = pd.read_csv(root / "music/music_genre_gold.csv")
    truth = pd.Categorical(songs.iloc[:, -1])
    rows["label"] = pd.Categorical(rows["label"], truth.categories).codes
    wide = rows.pivot(index="task", columns="worker", values="label").reindex(songs.iloc[:, 0])
    x = StandardScaler().fit_transform(songs.iloc[:, 1:-1])
    answers = torch.from_numpy(wide.fillna(-1).to_numpy().astype(int))
    y = torch.from_numpy(truth.codes.astype(int))
    return Data(x=torch.from_numpy(x).float(), y=y, edge_index=neighbours(x), answers=answers)


def labelme(root: Path, seed: int) -> Data:
    """59 people about 1,000 of 2,688 images of scenes; 1,188 others are a test set."""
    stored = np.load(root / "labelme/labelme.npz")
    x = stored["features"].astype(float)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    answers, split = torch.full((len(x), stored["answers"].shape[1]), -1), stored["split"]
    answers[torch.from_numpy(split == 0)] = torch.from_numpy(stored["answers"]).long()
    data = Data(x=torch.from_numpy(x).float(), edge_index=neighbours(x), answers=answers)
    data.y, data.test = torch.from_numpy(stored["labels"]).long(), torch.from_numpy(split == 2)
    return data


SETS: dict[str, Callable[[Path, int], Data]] = {
    "digits": digits,
    "cora": partial(words, "cora"),
    "pubmed": partial(words, "pubmed"),
    "music": music,
    "labelme": labelme,
    "citeseer": partial(words, "citeseer"),
}
#: The annotator that is alone, of the sets with classifiers.
ALONE = {"digits": 6, "cora": 2, "pubmed": 2, "citeseer": 2}
KINDS = ["all", "control", "one", "one, a tenth"]
#: Mean share of right answers of five simulated annotators, and share of the nodes they are asked.
SHARES = {"a tenth": 0.1, "a third": 1 / 3, "all nodes": 1.0}
SIMULATED = {
    f"{q} right, {name}": (q, share) for q in (0.5, 0.7, 0.9) for name, share in SHARES.items()
}


def answered(name: str, kind: str, root: Path, seed: int) -> Data:
    """Every answer, the same confusions with independent errors, one annotator's answers, or those
    of simulated annotators."""
    data, torch_rng = SETS[name](root, seed), torch.Generator().manual_seed(seed)
    if kind in SIMULATED:
        right, share = SIMULATED[kind]
        torch.manual_seed(seed)
        data.answers = noisy(data.y, right + torch.linspace(-0.08, 0.08, 5), int(data.y.max()) + 1)
        data.answers[torch.rand(len(data.y)) >= share] = -1
        data.all = torch.ones(len(data.y), dtype=torch.bool)
    elif kind == "control":
        data.answers = independent(data.answers, data.y, torch_rng)
    elif kind != "all":
        data.answers = data.answers[:, [ALONE[name]]].clone()
        if kind == "one, a tenth":
            data.answers[torch.rand(len(data.y), generator=torch_rng) >= 0.1] = -1
    return data


def independent(answers: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Each annotator's answers about the nodes of each label, in a random order."""
    # Rows depend on this order of draws; `permuted` in annotators/agreement.py has another one.
    found = answers.clone()
    for column in found.unbind(1):
        for label in range(int(y.max()) + 1):
            rows = ((y == label) & (column >= 0)).nonzero()[:, 0]
            column[rows] = column[rows[torch.randperm(len(rows), generator=generator)]]
    return found
