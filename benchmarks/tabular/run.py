# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on top of scikit-learn's classifiers, beside rivals. README.md explains the tasks."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import RandomTreesEmbedding, StackingClassifier
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer, kneighbors_graph
from sklearn.pipeline import make_pipeline
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCN
from torch_geometric.nn.models import CorrectAndSmooth

from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.timing import timed
from benchmarks.tabular.citation import folds
from benchmarks.tabular.data import (
    CLIP,
    FOLDS,
    KINDS,
    NEIGHBORS,
    SPLIT,
    Table,
    embeddings,
    keel,
    log_probs,
    scores_of,
)
from benchmarks.tabular.scale import new_rows, size
from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.tabular import NeighborMixtureClassifier

FILE = RESULTS / "tabular.jsonl"
OURS, TEMPERATURE, SCIKIT = "NeighborMixtureClassifier", "temperature, five folds", "temperature"
#: Methods that read the graph and no classifier: once for each table.
ALONE = "label spreading", "GCN, temperature from five folds"


def scaled(parts: Tensor, whole: Tensor, table: Table) -> Tensor:
    """``whole`` at the temperature of the folds' held-out rows."""
    scores, y = table.held_out(parts)
    found = temperature_scaling(scores, y, torch.ones(len(y), dtype=torch.bool))
    return (whole / min(max(found, 0.05), 20.0)).softmax(1)


def calibrated(method: str, table: Table) -> np.ndarray:
    wrapped = CalibratedClassifierCV(table.make(), method=method, cv=SPLIT)
    return wrapped.fit(*table.known).predict_proba(table.rows)


def self_training(table: Table) -> np.ndarray:
    wrapped = SelfTrainingClassifier(table.make()).fit(table.rows, table.partly)
    return wrapped.predict_proba(table.rows)


def stacking(table: Table) -> np.ndarray:
    pair = [("own", table.make()), ("near", KNeighborsClassifier(NEIGHBORS))]
    return StackingClassifier(pair, cv=SPLIT).fit(*table.known).predict_proba(table.rows)


def label_spreading(table: Table) -> np.ndarray:
    spread = LabelSpreading(kernel="knn", n_neighbors=NEIGHBORS)
    return np.nan_to_num(spread.fit(table.rows, table.partly).label_distributions_)


def correct_and_smooth(table: Table) -> Tensor:
    """PyG's (Huang et al. 2021): settings and temperature by the folds' held-out rows."""
    y, truth = torch.from_numpy(table.labels), table.held_out(table.parts)[1]

    def smoothed(first: float, second: float, start: Tensor, known: np.ndarray) -> Tensor:
        smoother, mask = CorrectAndSmooth(50, first, 50, second), torch.from_numpy(known)
        probs = smoother.correct(start.softmax(1), y[mask], mask, table.edges).nan_to_num()
        probs = smoother.smooth(probs.clamp(min=0), y[mask], mask, table.edges)
        return probs.clamp(min=1e-9).log()

    def tried(first: float, second: float) -> tuple[float, Tensor]:
        rest = [(table.folds >= 0) & (table.folds != fold) for fold in range(FOLDS)]
        pairs = zip(table.parts, rest, strict=True)
        parts = torch.stack([smoothed(first, second, start, known) for start, known in pairs])
        whole = smoothed(first, second, log_probs(table.whole), table.folds >= 0)
        held_out = scaled(parts, table.held_out(parts)[0], table)
        loss = F.nll_loss(held_out.clamp(min=1e-12).log(), truth).item()
        return loss, scaled(parts, whole, table)

    return min((tried(a, b) for a in (0.5, 0.9) for b in (0.5, 0.8)), key=lambda found: found[0])[1]


def gcn(table: Table, num_epochs: int = 100) -> Tensor:
    """Two layers on the graph of neighbours, a fit for each fold and one for all labels."""
    x, y = torch.from_numpy(table.rows).float(), torch.from_numpy(table.labels)

    def logits(known: np.ndarray) -> Tensor:
        torch.manual_seed(0)
        network = GCN(x.shape[1], 64, 2, table.num_classes, dropout=0.5)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=5e-4)
        rows = torch.from_numpy(known)
        for _ in range(num_epochs):
            optimizer.zero_grad()
            F.cross_entropy(network(x, table.edges)[rows], y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            return network.eval()(x, table.edges)

    rest = [(table.folds >= 0) & (table.folds != fold) for fold in range(FOLDS)]
    return scaled(torch.stack([*map(logits, rest)]), logits(table.folds >= 0), table)


def half(table: Table) -> Tensor:
    """``StackedNMM`` with every other label held out from the classifier."""
    size, y = len(table.labels), torch.from_numpy(table.labels)
    masks = torch.zeros(2, size, dtype=torch.bool)
    order = np.argsort(table.folds[table.labelled], kind="stable")
    for mask, rows in zip(
        masks, (table.labelled[order[::2]], table.labelled[order[1::2]]), strict=True
    ):
        mask[rows] = True
    fit = table.make().fit(table.rows[masks[0]], table.labels[masks[0]])
    probs = np.full((size, table.num_classes), CLIP)
    probs[:, fit.classes_] = fit.predict_proba(table.rows)
    scores, hood = log_probs(probs), Neighborhood(table.edges, size)
    stacked = StackedNMM(table.num_classes).fit(hood, scores, y, *masks)
    return stacked.posterior(hood, scores, y, masks.any(0)).marginals()


def scores_alone(table: Table) -> Tensor:
    """``StackedNMM(pool=False)``, fitted to five folds."""
    y, folds = torch.from_numpy(table.labels), torch.from_numpy(table.folds)
    hood = Neighborhood(table.edges, len(y))
    stacked = StackedNMM(pool=False).fit(hood, table.parts, y, folds=folds)
    return stacked.posterior(hood, log_probs(table.whole), y, folds >= 0).marginals()


def ours(table: Table, graph: object = None, **options) -> np.ndarray:
    options = {"metric": table.metric, "random_state": 0} | options
    model = NeighborMixtureClassifier(table.make(), **options)
    return model.fit(table.rows, table.partly, graph).label_distributions_


def mutual(table: Table) -> np.ndarray:
    near = kneighbors_graph(table.rows, NEIGHBORS)
    return ours(table, near.multiply(near.T))


def leaves(table: Table) -> np.ndarray:
    """Neighbours that share the most leaves of random trees, which read no labels."""
    finder = KNeighborsTransformer(n_neighbors=NEIGHBORS, metric="cosine")
    return ours(table, neighbors=make_pipeline(RandomTreesEmbedding(random_state=0), finder))


METHODS: dict[str, Callable[[Table], Tensor | np.ndarray]] = {
    "classifier": lambda table: table.whole,
    SCIKIT: partial(calibrated, SCIKIT),
    TEMPERATURE: lambda table: scaled(table.parts, log_probs(table.whole), table),
    OURS: ours,
    "C&S": correct_and_smooth,
    "stacking with ten neighbors": stacking,
    "sigmoid": partial(calibrated, "sigmoid"),
    "StackedNMM, half held out": half,
    "StackedNMM, scores alone": scores_alone,
    "self-training": self_training,
    "label spreading": label_spreading,
    "GCN, temperature from five folds": gcn,
}
#: The NMM on other graphs of the rows.
GRAPHS: dict[str, Callable[[Table], Tensor | np.ndarray]] = {
    "5 neighbours": partial(ours, n_neighbors=5),
    "20 neighbours": partial(ours, n_neighbors=20),
    "Manhattan distance": partial(ours, metric="manhattan"),
    "mutual neighbours": mutual,
    "leaves of random trees": leaves,
}


def judge(table: Table, method: str) -> dict:
    """Scores on the judged rows, and seconds, in which fits that methods share count once."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of solvers that stop early
        found, seconds = timed((METHODS | GRAPHS)[method], table)
    probs = torch.as_tensor(found)[table.judged]
    return scores_of(probs, table.labels[table.judged]) | {"seconds": round(seconds, 5)}


def agreement(table: Table) -> float:
    """How far neighbours agree, from chance (0) to always (1), by all labels."""
    source, target = table.labels[table.edges.numpy()]
    chance = np.square(np.bincount(table.labels) / len(table.labels)).sum()
    return round(float(((source == target).mean() - chance) / (1 - chance)), 4)


def tables(args, results: Records) -> None:
    """Every method on tables of KEEL."""
    for seed in args.seeds:
        for name, fields in keel(seed):
            for kind in args.classifiers:
                names = [m for m in args.methods if m not in ALONE or kind == "forest"]
                table = Table(*fields, partial(KINDS[kind], seed))
                key = {"task": "tables", "table": name, "seed": seed, "classifier": kind}
                for each in results.missing(**key, method=names):
                    row = judge(table, each["method"])
                    results.add(**each, **row, agreement=agreement(table))


def images(args, results: Records) -> None:
    """Every method on LabelMe's embeddings with a linear probe."""
    key = {"task": "images", "number": [5, 10, 25, 60], "seed": args.seeds}
    for each in results.missing(**key, method=args.methods):
        table = embeddings(args.data_root, each["number"], each["seed"])
        results.add(**each, **judge(table, each["method"]))


main = command(
    __doc__, (tables, images, new_rows, size, folds), seeds=[0, 1, 2], methods=list(METHODS),
    classifiers=list(KINDS),
    sizes=[4_000, 10_000, 100_000, 1_000_000], graphs=["cora", "citeseer", "pubmed"],
    backbones=["mlp", "gcn"], splits=[0, 1, 2, 3, 4], data_root=Path, results=FILE,
)  # fmt: skip

if __name__ == "__main__":
    main()
