# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Answers of people and of weak classifiers, combined. README.md explains the tasks."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import torch
from sklearn.base import ClassifierMixin
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid, kneighbors_graph
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import to_undirected

from benchmarks.latent import AnnotatedPotts, Found, majority, spread_labels
from benchmarks.nodes import load, node_scores
from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.training import descend
from pyro_nmm import NeighborMixture, sources
from pyro_nmm.models import Annotators, accuracy
from pyro_nmm.models.hidden import mixture_em

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


def answered(name: str, kind: str, root: Path, seed: int) -> Data:
    """Every answer, the same confusions with independent errors, or one annotator's answers."""
    data, torch_rng = SETS[name](root, seed), torch.Generator().manual_seed(seed)
    if kind == "control":
        data.answers = independent(data.answers, data.y, torch_rng)
    elif kind != "all":
        data.answers = data.answers[:, [ALONE[name]]].clone()
        if kind == "one, a tenth":
            data.answers[torch.rand(len(data.y), generator=torch_rng) >= 0.1] = -1
    return data


def independent(answers: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Each annotator's answers about the nodes of each label, in a random order."""
    found = answers.clone()
    for column in found.unbind(1):
        for label in range(int(y.max()) + 1):
            rows = ((y == label) & (column >= 0)).nonzero()[:, 0]
            column[rows] = column[rows[torch.randperm(len(rows), generator=generator)]]
    return found


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


def out_of_fold(data: Data, targets: Tensor, rows: Tensor, num_folds: int = 5) -> Tensor:
    """Predictions ``(N, C)``, each by a network that has not learned the node's target."""
    found, fold = torch.empty_like(targets), torch.randperm(len(rows)) % num_folds
    for number in range(num_folds):
        here = fold == number
        found[here] = network(data, targets, rows & ~here)[here]
    return found


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
        prior = out_of_fold(data, targets, there)
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


FILE = RESULTS / "crowds.jsonl"
OURS, FIELD = "Annotators", "Annotators, answers independent"
WITH, CROWDLAB = "Annotators, pred_probs of a GCN", "GCN, CROWDLAB"
#: Methods without features of the nodes, and NETWORKS, which read them.
METHODS: dict[str, Callable[[Data], Tensor]] = {
    "majority": votes,
    "Dawid-Skene": partial(crowd_kit, "DawidSkene"),
    "GLAD": partial(crowd_kit, "GLAD"),
    "MACE": partial(crowd_kit, "MACE"),
    "label spreading": label_spreading,
    "Potts": potts,
}
NETWORKS: dict[str, Callable[[Data], Tensor]] = {
    "GCN on the majority": partial(gcn, hard=True),
    "GCN on vote shares": partial(gcn, hard=False),
    "GCN, CrowdLayer": crowd_layer,
    CROWDLAB: crowdlab,
    "GCN, EM: posterior": partial(raykar, read="posterior"),
    "GCN, EM: network": partial(raykar, read="network"),
}
#: Nodes of the side of a grid, shares of answers that repeat a common guess, and its accuracy.
SIDE, STRENGTHS, COMMON, SIMULATIONS = 20, [0.0, 0.3, 0.6], 0.6, 200


def scores(probs: Tensor, data: Data) -> dict:
    """Of answered nodes, and of test nodes without answers."""
    parts = {"answered": (data.answers >= 0).any(1)}
    parts |= {"test": data.test} if "test" in data else {}
    clear = (probs := probs.double().clamp(min=1e-12)) / probs.sum(-1, keepdim=True)
    return {name: node_scores(clear[rows], data.y[rows]) for name, rows in parts.items()}


def answers(args, results: Records) -> None:
    for name in args.sets:
        kinds = KINDS[: 4 if name in ALONE else 2]
        for key in results.missing(task="answers", set=name, kind=kinds, seed=args.seeds,
                                   method=[OURS, WITH, *METHODS, *NETWORKS]):  # fmt: skip
            if key["method"] == CROWDLAB and "one" in key["kind"]:
                continue  # its weights come from nodes with two answers
            data = answered(name, key["kind"], args.data_root, key["seed"])
            found = {key["method"]: (METHODS | NETWORKS | {WITH: with_network}).get(key["method"])}
            found = own(data) if key["method"] == OURS else found
            for method, make in found.items():
                pyro.set_rng_seed(key["seed"])
                begin = time.process_time()
                probs = make(data)
                seconds = time.process_time() - begin
                row = key | {"method": method}
                results.add(**row, seconds=seconds, **scores(probs, data))


def with_network(data: Data) -> Tensor:
    """A GCN learns a first consensus out of fold, and a second one has its predictions."""
    people, rows = Annotators(int(data.y.max()) + 1), (data.answers >= 0).any(1)
    first = people.fit(data.edge_index, data.answers)
    learned = out_of_fold(data, first.probs.double(), rows)
    return people.fit(data.edge_index, data.answers, pred_probs=learned).probs


def own(data: Data) -> dict[str, Callable[[Data], Tensor]]:
    """Our consensus and the field before the pool, of one fit."""
    size, kept = int(data.y.max()) + 1, {}

    def default(data: Data) -> Tensor:
        kept["fit"] = Annotators(size).fit(data.edge_index, data.answers)
        return kept["fit"].probs

    return {OURS: default, FIELD: lambda data: kept["fit"].field.probs}


def noisy(y: Tensor, accuracies: Tensor, num_labels: int) -> Tensor:
    """``(N, M)`` answers, a third of them missing; errors are uniform over the other labels."""
    size = len(y), len(accuracies)
    shift = torch.randint(1, num_labels, size)
    answers = (y[:, None] + shift * (torch.rand(size) >= accuracies)) % num_labels
    return answers.masked_fill(torch.rand(size) < 1 / 3, -1)


def grid_mixture(side: int, num_labels: int) -> NeighborMixture:
    """Labels of a grid, whose sources are four pixels apart."""
    hood = sources.grid(side, side, stride=4)
    alpha = torch.full((hood.num_sources, num_labels), 0.2 / num_labels)
    return NeighborMixture(hood, alpha, torch.zeros(hood.num_edges))


def shared(y: Tensor, right: Tensor, strength: float) -> Tensor:
    """Answers of annotators who repeat a common guess in a share of the cases."""
    own, size = noisy(y, right, 3), len(y)
    guess = (y + torch.randint(1, 3, (size,)) * (torch.rand(size) >= COMMON)) % 3
    return torch.where((torch.rand(own.shape) < strength) & (own >= 0), guess[:, None], own)


def coverage(args, results: Records) -> None:
    mixture = grid_mixture(SIDE, 3)
    for key in results.missing(task="coverage", strength=STRENGTHS, seed=range(SIMULATIONS)):
        pyro.set_rng_seed(key["seed"])
        y, right = mixture.sample(), 0.4 + 0.55 * torch.rand(5)
        truth = (1 - key["strength"]) * right + key["strength"] * COMMON
        answers = shared(y, right, key["strength"])
        found = Annotators(3).fit(mixture.hood, answers)
        row = {name: value.tolist() for name, value in accuracy(found)._asdict().items()}
        results.add(**key, **row, accuracies=truth.tolist())


TASKS = answers, coverage
OPTIONS: dict = {"sets": ["music", "labelme", "digits", "cora", "pubmed"], "data_root": Path}
OPTIONS |= {"seeds": [0, 1, 2, 3, 4], "choices": {"sets": list(SETS)}}
main = command(__doc__, TASKS, **OPTIONS, results=FILE)

if __name__ == "__main__":
    main()
