# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities of the rows of a table by every method, and by the NMM on other graphs."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import RandomTreesEmbedding, StackingClassifier
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer, kneighbors_graph
from sklearn.pipeline import make_pipeline
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCN, CorrectAndSmooth
from torch_geometric.utils import index_to_mask

from benchmarks.shared.fits import descend
from benchmarks.tabular.data import CLIP, NEIGHBORS, SPLIT, Table, log_probs
from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.tabular import NeighborMixtureClassifier

OURS, TEMPERATURE, SCIKIT = "NeighborMixtureClassifier", "temperature, five folds", "temperature"
#: Methods that read the graph and no classifier: once for each table.
ALONE = "label spreading", "GCN, temperature from five folds"


def scaled(parts: Tensor, whole: Tensor, table: Table) -> Tensor:
    """``whole`` at the temperature of the folds' held-out rows."""
    scores, y = table.held_out(parts)
    temperature = temperature_scaling(scores, y, torch.ones(len(y), dtype=torch.bool))
    return (whole / min(max(temperature, 0.05), 20.0)).softmax(1)


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
        pairs = zip(table.parts, table.rests, strict=True)
        parts = torch.stack([smoothed(first, second, start, known) for start, known in pairs])
        whole = smoothed(first, second, log_probs(table.whole), table.folds >= 0)
        held_out = scaled(parts, table.held_out(parts)[0], table)
        loss = F.nll_loss(held_out.clamp(min=1e-12).log(), truth).item()
        return loss, scaled(parts, whole, table)

    trials = (tried(first, second) for first in (0.5, 0.9) for second in (0.5, 0.8))
    return min(trials, key=lambda trial: trial[0])[1]


def gcn(table: Table, num_epochs: int = 100) -> Tensor:
    """Two layers on the graph of neighbours, a fit for each fold and one for all labels."""
    x, y = torch.from_numpy(table.rows).float(), torch.from_numpy(table.labels)

    def logits(known: np.ndarray) -> Tensor:
        torch.manual_seed(0)
        network = GCN(x.shape[1], 64, 2, table.num_classes, dropout=0.5)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=5e-4)
        rows = torch.from_numpy(known)
        loss = lambda: F.cross_entropy(network(x, table.edges)[rows], y[rows])  # noqa: E731
        return descend(network, optimizer, loss, num_epochs)(x, table.edges).detach()

    return scaled(torch.stack([*map(logits, table.rests)]), logits(table.folds >= 0), table)


def half(table: Table) -> Tensor:
    """``StackedNMM`` with every other label held out from the classifier."""
    size, y = len(table.labels), torch.from_numpy(table.labels)
    order = table.labelled[np.argsort(table.folds[table.labelled], kind="stable")]
    train, held_out = (index_to_mask(torch.from_numpy(order[k::2]), size) for k in (0, 1))
    fit = table.make().fit(table.rows[train], table.labels[train])
    probs = np.full((size, table.num_classes), CLIP)
    probs[:, fit.classes_] = fit.predict_proba(table.rows)
    scores, hood = log_probs(probs), Neighborhood(table.edges, size)
    stacked = StackedNMM(table.num_classes).fit(hood, scores, y, train, held_out)
    return stacked.posterior(hood, scores, y, train | held_out).marginals()


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


Method = Callable[[Table], Tensor | np.ndarray]
METHODS: dict[str, Method] = {
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
GRAPHS: dict[str, Method] = {
    "5 neighbours": partial(ours, n_neighbors=5),
    "20 neighbours": partial(ours, n_neighbors=20),
    "Manhattan distance": partial(ours, metric="manhattan"),
    "mutual neighbours": mutual,
    "leaves of random trees": leaves,
}
