# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Neighbours that differ: edges that relabel against plain ones.

    python benchmarks/repelling.py graphs generated --data-root F

Tasks: ``graphs`` (six graphs with ten published splits each: a classifier, what a ``StackedNMM``
makes of it with plain and with relabelling edges, and NMMs trained with both) and ``generated`` (a
graph whose labels come from an NMM that relabels, so that the truth's own likelihood is known). F
holds ``heterophilous/*.npz``. Settings are those of the other benchmarks for many labels; nothing
was searched for.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pyro
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import barabasi_albert_graph, to_torch_csr_tensor, to_undirected

from benchmarks.nodes.fits import DEFAULT, backbone, calibrated, evaluate, nmm_network
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import digits, inner_edges, random_split
from pyro_nmm.guides import AmortizedNMM, fit_classifier, fit_nmm
from pyro_nmm.models import Compatibility, StackedNMM, compatibility

GRAPHS = ["texas", "cornell", "wisconsin", "actor", "minesweeper", "tolokers"]
METHODS = ["backbone", "stacked", "stacked, relabelled", "NMM", "NMM, relabelled"]
BACKBONES = ["mlp", "gcn"]
#: New draws of the labels of a generated graph.
NEW = 4
#: Random starts of a fit to them, of which the likelihood of those labels chooses.
STARTS = 4
#: Pairs of adjacent test nodes, drawn where there are more.
MOST_PAIRS = 5000
#: From so many on a GCN is a product with a sparse matrix.
MANY_EDGES = 10**6


@cache
def load(name: str, split: int, root: Path | None) -> tuple[Data, Neighborhood]:
    if name == "digits":
        data = random_split(digits(), 0.3, 0.2, 0.5, seed=split)
        return data, Neighborhood(data.edge_index, data.num_nodes)
    with np.load(root / "heterophilous" / f"{name}.npz") as file:
        parts = {key: torch.from_numpy(file[key]) for key in file.files}
    x = parts["node_features"].float()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6) if x.shape[1] < 50 else x
    edges = to_undirected(parts["edges"].long().T, num_nodes=len(x))
    names = ("train", "val", "test")
    masks = {f"{name}_mask": parts[f"{name}_masks"][split].bool() for name in names}
    data = Data(x=x, edge_index=edges, y=parts["node_labels"].long(), **masks)
    return data, Neighborhood(edges, len(x))


def pairs_of(data: Data, split: int) -> Tensor:
    pairs = inner_edges(data.edge_index, data.test_mask)
    order = torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(split))
    return pairs[:, order[:MOST_PAIRS]]


@cache
def classifier(name: str, kind: str, split: int, root: Path | None, num_epochs: int) -> Tensor:
    data, _ = load(name, split, root)
    pyro.set_rng_seed(split)
    network = backbone(kind, data, int(data.y.max()) + 1, dropout=DEFAULT["dropout"])
    return fit_classifier(network, data, **schedule(num_epochs))[0]


def schedule(num_epochs: int) -> dict:
    return {key: DEFAULT[key] for key in ("lr", "weight_decay")} | {
        "num_epochs": num_epochs, "criterion": "likelihood", "patience": 50,
    }  # fmt: skip


def multiplied(network: nn.Module, data: Data) -> None:
    """GCNs by sparse matrices, which are several times as fast as messages on a dense graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")
        adjacency = to_torch_csr_tensor(data.edge_index, size=(data.num_nodes, data.num_nodes))
    for module in network.modules():
        if isinstance(module, GCNConv):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0], adjacency, *inputs[2:]))


def fitted(key: dict, data: Data, hood: Neighborhood, scores: Tensor, num_epochs: int):
    """Marginals or a mixture."""
    pyro.set_rng_seed(key["split"])
    method, known = key["method"], (data.y, data.train_mask, data.val_mask)
    if method == "backbone":
        return calibrated(scores, data)
    if "stacked" in method:
        matrix = None
        if "relabelled" in method:
            matrix = compatibility(hood, data.y, data.train_mask, scores.shape[1])
        stack = StackedNMM(pool=False, compatibility=matrix)
        return stack.fit(hood, scores, *known).mixture(hood, scores)
    options = {name: DEFAULT[name] for name in ("floor", "gamma")} | {"link": "exp"}
    drop = {"dropout": DEFAULT["dropout"]}
    network = nmm_network(key["backbone"], data, drop, **options)
    if data.num_edges > MANY_EDGES:
        multiplied(network, data)
    if "relabelled" in method:
        network = Compatibility(network, int(data.y.max()) + 1)
    few = int(data.train_mask.sum()) <= 300
    way = "reward_to_go" if few else "one_step_credit"
    return fit_nmm(network, data, hood, estimator=way, **schedule(num_epochs))[0]


def graphs(args, results: Records) -> None:
    each = {"split": range(args.num_splits), "backbone": args.backbones, "method": args.methods}
    for key in results.missing(task="graphs", dataset=args.datasets, **each):
        name, kind, split = key["dataset"], key["backbone"], key["split"]
        data, hood = load(name, split, args.data_root)
        scores = classifier(name, kind, split, args.data_root, args.num_epochs)
        model, seconds = timed(fitted, key, data, hood, scores, args.num_epochs)
        pairs = pairs_of(data, split)
        pairs = pairs if pairs.shape[1] else None
        row = evaluate(model, data, pairs, joint=True, temperature=calibrated(scores, data))
        results.add(**key, **row, **{"fit seconds": seconds})


class Shared(nn.Module):
    """
    One row of concentrations for all nodes, attention to nodes of many neighbours, and a matrix for
    each of two kinds of edges, or none.
    """

    def __init__(self, kinds: Tensor | None = None) -> None:
        super().__init__()
        self.kinds = kinds
        self.log_alpha = nn.Parameter(torch.zeros(2))
        self.gamma, self.popular = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.scores = nn.Parameter(2 * torch.randn(2, 2, 2))

    def forward(self, hood: Neighborhood) -> tuple[Tensor, ...]:
        alpha = self.log_alpha.exp().expand(hood.num_nodes, -1)
        popular = self.popular * hood.ptr.diff().log()[hood.source]
        found = alpha, popular + self.gamma * (hood.source == hood.target)
        if self.kinds is None:
            return found
        matrices = torch.cat([torch.eye(2)[None], self.scores.softmax(-1)])
        return *found, matrices[self.kinds.where(hood.source != hood.target, 0)]


def generated(args, results: Records) -> None:
    """
    The labels of a random tree come from an NMM in which edges of one kind keep a label and those
    of the other kind flip it. What is fitted to them is measured by new draws of labels on the same
    tree.
    """
    for key in results.missing(task="generated", seed=range(args.num_splits), nodes=args.num_nodes):
        pyro.set_rng_seed(key["seed"])
        hood = Neighborhood(barabasi_albert_graph(args.num_nodes, 1), args.num_nodes)
        kinds = 1 + torch.randint(2, (hood.num_edges,))
        truth = Shared(kinds)
        with torch.no_grad():
            truth.log_alpha.fill_(-2.0)
            truth.popular.fill_(2.0)
            truth.scores.copy_(6 * torch.eye(2)[torch.tensor([[0, 1], [1, 0]])])
            mixtures = {"truth": NeighborMixture(hood, *truth(hood))}
        y, *new = mixtures["truth"].sample((1 + NEW,))
        for name, given in {"plain": None, "relabelled": kinds}.items():
            starts = [shared_fit(hood, Shared(given), y, args.num_epochs) for _ in range(STARTS)]
            mixtures[name] = max(starts, key=lambda mix: mix.log_likelihood(y, num_particles=256))
        found = {
            name: mean(mix.log_likelihood(part, num_particles=256).item() for part in new)
            for name, mix in mixtures.items()
        }
        share = (1 + y.bincount(minlength=2)) / (2 + len(y))
        found["independent"] = mean(share[part].log().sum().item() for part in new)
        results.add(**key, **{name: value / len(y) for name, value in found.items()})


def shared_fit(hood: Neighborhood, network: nn.Module, y: Tensor, steps: int) -> NeighborMixture:
    program = AmortizedNMM(hood, network)
    elbo = Trace_ELBO(4, max_plate_nesting=0, vectorize_particles=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    with pyro.get_param_store().scope():
        for _ in range(steps):
            optimizer.zero_grad()
            elbo.loss_and_grads(program.model, program.guide, y=y)
            optimizer.step()
        return program.mixture()


def main(argv: list[str] | None = None) -> Records:
    small = {"datasets": ["digits"], "num_epochs": 2, "num_splits": 1, "num_nodes": 30}
    return run(
        argv, __doc__, (graphs, generated), smoke=small,
        choices={"methods": METHODS, "backbones": BACKBONES},
        datasets=GRAPHS, methods=METHODS, backbones=BACKBONES, num_splits=10, num_epochs=200,
        num_nodes=(300, "of the generated graph"), data_root=Path,
        results=RESULTS / "repelling.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
