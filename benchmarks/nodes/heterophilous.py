# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel beside plain edges, on heterophilous graphs and on labels from an NMM."""

from itertools import groupby, product
from statistics import mean

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import barabasi_albert_graph, to_torch_csr_tensor

from benchmarks.nodes.fits import DEFAULT, calibrated, evaluate, fit, stack
from benchmarks.on_top import load, some_pairs
from benchmarks.shared.records import Records
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import Compatibility, compatibility

METHODS = ["backbone", "stacked", "stacked, relabelled", "NMM", "NMM, relabelled"]
SETTINGS = DEFAULT | {"num_epochs": 200, "criterion": "likelihood", "patience": 50}
NUM_NODES, MANY_EDGES = 300, 10**6  # of a tree; with more a GCN multiplies by a sparse matrix


def fitted(key: dict, data: Data, hood: Neighborhood, scores: Tensor):
    """Marginals or a mixture."""
    pyro.set_rng_seed(key["seed"])
    relabels, classes = "relabelled" in key["method"], scores.shape[1]
    if key["method"] == "backbone":
        return calibrated(scores, data)
    if "stacked" in key["method"]:
        matrix = compatibility(hood, data.y, data.train_mask, classes) if relabels else None
        return stack(hood, scores, data, compatibility=matrix)

    def wrap(network: nn.Module) -> nn.Module:
        """GCNs of a dense graph multiply by a sparse matrix, several times as fast as messages."""
        if data.num_edges > MANY_EDGES:
            adjacency = to_torch_csr_tensor(data.edge_index, size=(data.num_nodes, data.num_nodes))
            network.register_forward_pre_hook(lambda _, given: (*given[:-1], adjacency))
        return Compatibility(network, classes) if relabels else network

    return fit(key, data, hood, SETTINGS, wrap)[0]


def graphs(args, results: Records) -> None:
    for name, split in product(args.datasets, range(args.num_splits)):
        data, hood = load(name, split, 0, args.data_root)
        each = {"dataset": name, "split": split, "backbone": args.backbones, "method": METHODS}
        every, pairs = results.missing(task="graphs", **each), some_pairs(data, split)
        for kind, keys in groupby(every, lambda key: key["backbone"]):
            first = {"method": "backbone", "backbone": kind, "seed": split}
            scores, _ = fit(first, data, hood, SETTINGS)
            for key in keys:
                model = fitted(first | key, data, hood, scores)
                results.add(**key, **evaluate(model, data, pairs, joint=True))


class Shared(nn.Module):
    """One row of concentrations, attention to nodes of high degree, and matrices of two kinds."""

    def __init__(self, kinds: Tensor | None = None) -> None:
        super().__init__()
        self.kinds, self.log_alpha = kinds, nn.Parameter(torch.zeros(2))
        self.gamma, self.popular = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.scores = nn.Parameter(2 * torch.randn(2, 2, 2))

    def forward(self, hood: Neighborhood) -> tuple[Tensor, ...]:
        own = hood.source == hood.target
        logits = self.popular * hood.ptr.diff().log()[hood.source] + self.gamma * own
        found = self.log_alpha.exp().expand(hood.num_nodes, -1), logits
        if self.kinds is None:
            return found
        matrices = torch.cat([torch.eye(2)[None], self.scores.softmax(-1)])
        return *found, matrices[self.kinds.where(~own, 0)]


def generated(args, results: Records) -> None:
    """Fits to labels of a random tree whose edges keep or flip a label, measured on new labels."""
    for key in results.missing(task="generated", seed=range(args.num_splits), nodes=NUM_NODES):
        pyro.set_rng_seed(key["seed"])
        hood = Neighborhood(barabasi_albert_graph(NUM_NODES, 1), NUM_NODES)
        kinds = 1 + torch.randint(2, (hood.num_edges,))
        truth = Shared(kinds)
        with torch.no_grad():
            truth.log_alpha.fill_(-2.0)
            truth.popular.fill_(2.0)
            truth.scores.copy_(6 * torch.eye(2)[torch.tensor([[0, 1], [1, 0]])])
            mixtures = {"truth": NeighborMixture(hood, *truth(hood))}
        y, *new = mixtures["truth"].sample((5,))
        for name, given in {"plain": None, "relabelled": kinds}.items():
            starts = [shared_fit(hood, Shared(given), y) for _ in range(4)]
            mixtures[name] = max(starts, key=lambda mix: mix.log_likelihood(y, num_particles=256))
        found = {
            name: mean(mix.log_likelihood(part, num_particles=256).item() for part in new)
            for name, mix in mixtures.items()
        }
        share = (1 + y.bincount(minlength=2)) / (2 + len(y))
        found["independent"] = mean(share[part].log().sum().item() for part in new)
        results.add(**key, **{name: value / len(y) for name, value in found.items()})


def shared_fit(hood: Neighborhood, network: nn.Module, y: Tensor) -> NeighborMixture:
    program = AmortizedNMM(hood, network)
    elbo = Trace_ELBO(4, max_plate_nesting=0, vectorize_particles=True)
    svi = SVI(program.model, program.guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    with pyro.get_param_store().scope():
        for _ in range(SETTINGS["num_epochs"]):
            svi.step(y=y)
        return program.mixture()
