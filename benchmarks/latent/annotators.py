# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Consensus of noisy labels by the NMM and rivals. README.md explains the tasks."""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyro
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.nn import SimpleConv
from torch_geometric.utils import degree, remove_self_loops, to_torch_coo_tensor, to_undirected

from benchmarks.nodes import node_scores
from benchmarks.shared.records import RESULTS, Records, command, pick
from benchmarks.shared.timing import timed as timed_by
from pyro_nmm import sources
from pyro_nmm.fitting import minimise
from pyro_nmm.models import Annotators, fit_field, potts
from pyro_nmm.models.hidden import leave_one_out, mixture_em

#: Chains and steps of Gibbs sampling inside EM, steps of our fits too, and sweeps after it.
NUM_CHAINS, NUM_STEPS, NUM_SWEEPS = 4, 120, 50


class Found(NamedTuple):
    """A consensus: distributions ``(N, C)``, fields of its row, and the emission's parameters."""

    probs: Tensor
    row: dict = {}
    values: dict = {}


def timed(fit: Callable[..., Found], *args) -> Found:
    """With the processor seconds of this process after its start, as others share the machine."""
    found, seconds = timed_by(fit, *args, clock=time.process_time)
    return found._replace(row=found.row | {"seconds": found.row.get("seconds", 0.0) + seconds})


def best(found: Iterable[Found]) -> Found:
    return max(found, key=lambda fit: fit.row["left out"])


def majority(answers: Tensor, num_labels: int) -> Found:
    """Shares of the votes; of a node without any, equal shares."""
    votes = one_hot(answers + 1, num_labels + 1)[..., 1:].sum(1).double()
    votes = torch.where(votes.sum(1, keepdim=True) > 0, votes, 1.0)
    return Found(votes / votes.sum(1, keepdim=True))


def start_of(emission: Annotators, data: Data) -> Found:
    """Dawid-Skene from a random start; with types, the start of our own fit, at its sources."""
    if emission.num_types:
        values = emission.start(data.answers, data.place[0])
        return Found(emission.log_prob(values, data.answers).softmax(-1), {}, values)
    values, probs = mixture_em(emission, data.answers, emission.start(data.answers, None))
    share = (probs.sum(0) + 1) / (len(probs) + emission.num_labels)
    score = (emission.log_prob(values, data.answers) + share.log()).logsumexp(-1).mean().item()
    return Found(probs, {"left out": score}, values)


def spread_labels(start: Found, edge_index: Tensor) -> Found:
    """.8 times the mean of the neighbours and .2 times one's own, until it converges."""
    own = probs = start.probs.float()
    alpha, mean = 0.8 * (degree(edge_index[1], len(own)) > 0)[:, None], SimpleConv("mean")
    for _ in range(50):
        probs = alpha * mean(probs, edge_index) + (1 - alpha) * own
    return Found(probs, start.row)


def rivals(emission: Annotators, data: Data, num_starts: int = 1) -> dict[str, Found]:
    """Dawid-Skene and what starts from it; with types, which need a graph, Potts fields only."""
    field, turns = AnnotatedPotts(emission, data.answers, data.edge_index), range(num_starts)
    fits = {"Potts, mean field": field.mean_field, "Potts, Gibbs": field.gibbs}
    if emission.num_types:
        return {
            f"{name}, types": timed(best, (fit(start_of(emission, data)) for _ in turns))
            for name, fit in fits.items()
        }
    start = timed(best, (start_of(emission, data) for _ in turns))
    found = {"Dawid-Skene": start, "label spreading": timed(spread_labels, start, data.edge_index)}
    return found | {name: timed(fit, start) for name, fit in fits.items()}


def around(matrix: Tensor, labels: Tensor) -> Tensor:
    """Sums over neighbours, of ``(N, ..., C)``."""
    return (matrix @ labels.flatten(1)).unflatten(1, labels.shape[1:])


class AnnotatedPotts:
    """Dawid-Skene with a Potts prior, fitted by EM and by pseudo-likelihood (Besag 1975)."""

    def __init__(self, emission: Annotators, answers: Tensor, edge_index: Tensor) -> None:
        warnings.filterwarnings("ignore", "Sparse ")  # invariant checks, and a beta state
        self.emission, self.answers, size = emission, answers, len(answers)
        both = to_undirected(remove_self_loops(edge_index)[0], num_nodes=size)
        self.colors = potts(both[:, both[0] < both[1]], 1.0, torch.zeros(size, 2)).colors()
        matrix = to_torch_coo_tensor(both, size=size)
        self.matrix = matrix.to_sparse_csr()
        self.parts = [matrix.index_select(0, color).to_sparse_csr() for color in self.colors]

    def raise_pseudo_likelihood(self, weights: Tensor, labels: Tensor) -> Tensor:
        """Coupling and label weights after a few steps of BFGS from the last ones."""
        weights, sums = weights.clone().requires_grad_(), around(self.matrix, labels)

        def loss() -> Tensor:
            log_probs = (weights[0] * sums + weights[1:]).log_softmax(-1)
            # The first term keeps the weight finite of a label that is no longer used.
            return 1e-4 * weights.square().sum() - (labels * log_probs).sum(-1).mean()

        minimise(loss, [weights], 5)
        return weights.detach()

    def mean_field(self, start: Found) -> Found:
        probs, values = start.probs.float(), start.values
        weights = torch.zeros(self.emission.num_labels + 1)
        evidence = self.emission.log_prob(values, self.answers)
        for _ in range(NUM_STEPS):
            weights = self.raise_pseudo_likelihood(weights, probs)
            for color, matrix in 3 * list(zip(self.colors, self.parts, strict=True)):
                prior = weights[0] * around(matrix, probs) + weights[1:]
                probs = probs.index_copy(0, color, (evidence[color] + prior).softmax(-1))
            values = self.emission.maximise(self.answers, probs, values)
            evidence = self.emission.log_prob(values, self.answers)
        prior = (weights[0] * around(self.matrix, probs) + weights[1:]).log_softmax(-1)
        score = (evidence + prior).logsumexp(-1).mean().item()
        return Found(probs, start.row | {"left out": score})

    def gibbs(self, start: Found) -> Found:
        probs, values, size = start.probs.float(), start.values, self.emission.num_labels
        weights, total, left_out = torch.zeros(size + 1), 0, []
        labels = one_hot(Categorical(probs).sample((NUM_CHAINS,)).T, size).float()
        evidence = self.emission.log_prob(values, self.answers)
        for step in range(NUM_STEPS):
            gain = 1 / max(1, step + 1 - NUM_STEPS // 2)
            weights = weights + gain * (self.raise_pseudo_likelihood(weights, labels) - weights)
            labels, seen, _ = self.sweep(labels, evidence, weights)
            probs = probs + gain * (seen - probs)
            values = self.emission.maximise(self.answers, probs, values)
            evidence = self.emission.log_prob(values, self.answers)
        for _ in range(NUM_SWEEPS):
            labels, seen, logs = self.sweep(labels, evidence, weights)
            total = total + seen / NUM_SWEEPS
            left_out.append(logs)
        logs = torch.cat(left_out, 1)
        score = (math.log(logs.shape[1]) - (-logs).logsumexp(1)).mean().item()
        return Found(total, start.row | {"left out": score})

    def sweep(self, labels: Tensor, evidence: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Labels ``(N, B, C)``, means of their distributions, and log p(answers | neighbours)."""
        seen, logs = torch.zeros_like(evidence), evidence.new_zeros(labels.shape[:2])
        for color, matrix in zip(self.colors, self.parts, strict=True):
            prior, own = weights[0] * around(matrix, labels) + weights[1:], evidence[color, None]
            logits = own + prior
            drawn = one_hot(Categorical(logits=logits).sample(), logits.shape[-1]).float()
            labels = labels.index_copy(0, color, drawn)
            seen[color] = logits.softmax(-1).mean(1)
            logs[color] = (own + prior.log_softmax(-1)).logsumexp(-1)
        return labels, seen, logs


SECTIONS = ["151507", "151509", "151670", "151672", "151673", "151675"]
#: Numbers of labels, and halves of the clusterings: two random ones, and PCA against UMAP.
NUMBERS, HALVINGS = [3, 4, 5, 6, 7, 8], [0, 1, "PCA and UMAP"]
#: One method of every group that is fitted together to a section.
METHODS = ["NMM, types", "NMM", "Dawid-Skene", "Potts, mean field, types"]
#: Types of clusterings, and starts of a fit to them.
NUM_TYPES, STARTS = 16, 5


def section(root: Path, name: str) -> Data:
    """`LieberInstitute/HumanPilot`: clusterings ``answers``, layers ``y``, neighbours, sources."""
    rows = pd.read_csv(root / f"dlpfc/cluster_labels_{name}.csv", dtype=str)
    spots = pd.read_csv(root / f"dlpfc/tissue_positions_{name}.txt", header=None, index_col=0)
    spots = spots.loc[rows.pop("key").str.partition("_")[2], [3, 2]]
    positions = torch.tensor(spots.to_numpy() * [1 / 2, 3**0.5 / 2]).float()
    codes = rows.apply(lambda column: pd.Categorical(column).codes).astype(int)  # -1 is missing
    codes = codes.loc[:, ~codes.columns.str.endswith("_spatial")]  # others use no positions
    truth = torch.tensor(codes.pop("ground_truth").to_numpy())
    pairs = torch.tensor(cKDTree(positions.numpy()).query_pairs(1.1, output_type="ndarray"))
    hood, centres = sources.points(positions, radius=4.2, spacing=3.5)
    place = hood, -0.5 * (centres[hood.source] - positions[hood.target]).square().sum(1)
    edges, answers = to_undirected(pairs.T.contiguous()), torch.tensor(codes.to_numpy())
    return Data(answers=answers, y=truth, edge_index=edges, place=place)


def fitted(emission: Annotators, data: Data, num_starts: int) -> Found:
    """Our fit at the sources of a section."""
    hood, x = data.place
    options = {"num_starts": num_starts, "num_steps": NUM_STEPS}
    field = fit_field(emission, hood, data.answers, x, **options)
    row = {"score": field.score, "left out": leave_one_out(field, data.answers).mean().item()}
    return Found(field.probs, row | {"kappa": field.prior.log_kappa.exp().item()})


def scores(probs: Tensor, y: Tensor) -> dict:
    """Scores of probabilities of labels that have names; 1e-12 stands for smaller ones."""
    found = node_scores(probs := probs.double(), y)
    row = {"accuracy": found["accuracy"], "log score": -found["nll"], "ECE": found["ece"]}
    return row | {"Brier": found["brier"], "confidence": probs.amax(-1).mean().item()}


def clustering_scores(probs: Tensor, y: Tensor) -> dict:
    """Scores under the names that suit best, of nodes of known truth, and adjusted Rand index."""
    probs, y = probs[y >= 0], y[y >= 0]
    found, num_layers = probs.argmax(-1), int(y.max()) + 1
    name = suited(found, y, probs.shape[1], num_layers)
    named = probs.new_zeros(len(probs), num_layers).index_add_(1, name, probs)
    return {"ARI": adjusted_rand_score(y, found), **scores(named, y)}


def suited(labels: Tensor, truth: Tensor, num_labels: int, num_layers: int) -> Tensor:
    """Layers of labels, one to one if possible, else the layer of the largest overlap."""
    both = (labels >= 0) & (truth >= 0)
    counts = one_hot(labels[both], num_labels).T @ one_hot(truth[both], num_layers)
    name, (rows, layers) = counts.argmax(1), linear_sum_assignment(counts, maximize=True)
    name[rows] = torch.tensor(layers)
    return name


def halves(args, results: Records) -> None:
    for key in results.missing(task="halves", section=SECTIONS, labels=NUMBERS, halving=HALVINGS):
        data, order = section(args.data_root, key["section"]), torch.arange(10)
        if isinstance(key["halving"], int):  # else principal components are the first five
            order = torch.randperm(10, generator=torch.Generator().manual_seed(key["halving"]))
        pyro.set_rng_seed(0)
        emission, (hood, edge_attr) = Annotators(key["labels"], num_types=NUM_TYPES), data.place
        options = {"edge_attr": edge_attr, "num_starts": 1, "num_steps": NUM_STEPS}
        parts = (data.answers[:, half] for half in order.split(5))
        fits = [fit_field(emission, hood, answers, **options) for answers in parts]
        results.add(**key, agreement=adjusted_mutual_info_score(*(fit.predict() for fit in fits)))


def chosen_labels(rows: list[dict]) -> dict[str, int]:
    """By section: the number of labels for which two halves of the clusterings agree most."""
    found = pd.DataFrame(pick(rows, task="halves")).groupby(["section", "labels"])
    return found["agreement"].mean().unstack().idxmax(axis=1).to_dict()


def without_fit(answers: Tensor) -> dict[str, Tensor]:
    """Every clustering by itself, and their majority after renaming each to suit the first."""
    size, columns = int(answers.max()) + 1, answers.T
    found = {f"{n + 1}": one_hot(c.clamp(min=0)).double() for n, c in enumerate(columns)}
    names = [suited(column, columns[0], size, size) for column in columns]
    renamed = [torch.where(c < 0, -1, name[c]) for name, c in zip(names, columns, strict=True)]
    return found | {"majority": majority(torch.stack(renamed, 1), size).probs}


def cortex(args, results: Records) -> None:
    best = chosen_labels(results.rows)
    for name in SECTIONS:
        data, keys = section(args.data_root, name), {"task": "cortex", "section": name}
        for key in results.missing(**keys, method="majority"):
            for method, probs in without_fit(data.answers).items():
                results.add(**key | {"method": method}, **clustering_scores(probs, data.y))
        keys |= {"seed": range(args.num_seeds), "labels": best[name], "method": METHODS}
        for key in results.missing(**keys):
            pyro.set_rng_seed(key["seed"])
            types = NUM_TYPES if key["method"].endswith("types") else None
            emission = Annotators(key["labels"], num_types=types, aligned=False)
            if key["method"].startswith("NMM"):
                found = {key["method"]: timed(fitted, emission, data, STARTS)}
            else:
                found = rivals(emission, data, STARTS)
            for method, fit in found.items():
                row = key | {"method": method} | fit.row
                results.add(**row, **clustering_scores(fit.probs, data.y))


OPTIONS = {"num_seeds": 10, "data_root": Path, "results": RESULTS / "annotators.jsonl"}
main = command(__doc__, (halves, cortex), **OPTIONS)

if __name__ == "__main__":
    main()
