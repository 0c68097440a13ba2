# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rivals that see the features and training links that DGLFRM sees: Katz, VGAE and GraphSAGE."""

from time import process_time

import numpy as np
import pyro
import torch
from scipy.sparse import identity
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import utils
from torch_geometric.nn import MLP, VGAE, GCNConv, GraphSAGE, Linear

from benchmarks.links.protocol import Problem
from pyro_nmm.models.backbones import RandomInput


def walks(edge_index: Tensor, num_nodes: int, pairs: Tensor, longest: int = 6) -> Tensor:
    """``(longest, P)``: numbers of walks between nodes by length, for Katz's index (1953)."""
    graph = utils.to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes).tocsr().astype(float)
    powers, (start, end) = [identity(num_nodes, format="csr")], pairs.numpy()
    for _ in range((longest + 1) // 2):
        powers.append(powers[-1] @ graph)
    # A walk is two walks of half its length that meet.
    halves = ((powers[n // 2], powers[n - n // 2]) for n in range(1, longest + 1))
    counts = [a[start].multiply(b[end]).sum(1) for a, b in halves]
    return torch.from_numpy(np.hstack(counts).T.copy())


def katz_index(counts: Tensor, discount: float) -> Tensor:
    """``(P,)``: the sum of the numbers of walks, each step at a discount."""
    return discount ** torch.arange(1, len(counts) + 1, dtype=counts.dtype) @ counts


def katz(problem: Problem) -> dict:
    """Scores on test links, at the discount with the best average precision on validation links."""
    split, size = problem.split, problem.data.num_nodes
    val, test = (walks(split.train, size, problem.pairs(part)) for part in ("val", "test"))
    rates = (0.1, 0.03, 0.01, 0.003, 0.001)
    best = max(rates, key=lambda rate: problem.scores("val", katz_index(val, rate))["AP"])
    sizes = [split.train.shape[1] // 2, split.val.shape[1], split.test.shape[1]]
    found = problem.scores("test", katz_index(test, best))
    return {"discount": best, "sizes": sizes, "test": found}


class _Gaussians(nn.Module):
    """Means and log-scales of the nodes' vectors, from two graph convolutions."""

    def __init__(self, num_features: int, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first = RandomInput(GCNConv(num_features, hidden, cached=True, bias=False), dropout)
        heads = (GCNConv(hidden, width, cached=True, bias=False) for _ in range(2))
        self.heads, self.dropout = nn.ModuleList(heads), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
        hidden = F.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        return tuple(head(hidden, edge_index) for head in self.heads)


class LinksVGAE(VGAE):
    """PyG's VGAE (Kipf and Welling, 2016), with the normalisation of its one graph cached."""

    def __init__(self, num_features: int, hidden: int = 32, width: int = 16, dropout: float = 0.0):
        super().__init__(_Gaussians(num_features, hidden, width, dropout))

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The authors' loss in expectation. Links weigh as much as all other pairs."""
        number, count, z = len(x), edge_index.shape[1], self.encode(x, edge_index)
        true = utils.add_self_loops(edge_index, num_nodes=number)[0]
        false = utils.negative_sampling(edge_index, number, count)
        linked, apart = (self.decode(z, pairs, sigmoid=False) for pairs in (true, false))
        others = 1 - number / (number**2 - count)  # share of drawn pairs that are no loops
        cost = F.softplus(-linked).sum() / count + others * F.softplus(apart).mean()
        return cost / 2 + self.kl_loss() / number

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``: inner products, of the means in evaluation mode."""
        return self.decode(self.encode(x, edge_index), pairs, sigmoid=False)


class LinksSAGE(nn.Module):
    """GraphSAGE (Hamilton, Ying and Leskovec, 2017) and a perceptron on products of outputs."""

    def __init__(self, num_features: int, hidden: int = 128, layers: int = 1, dropout: float = 0.5):
        super().__init__()
        # GraphSAGE's own first layer does not take sparse features.
        linear = Linear(num_features, hidden, bias=False, weight_initializer="glorot")
        self.first = RandomInput(linear, dropout)
        self.network = GraphSAGE(hidden, hidden, layers, dropout=dropout)
        self.score = MLP([hidden, hidden, hidden, 1], dropout=dropout, norm=None)

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Cross-entropy of a quarter of the links, hidden from the network, and of other pairs."""
        links = edge_index[:, edge_index[0] < edge_index[1]]
        links = links[:, torch.randperm(links.shape[1])]
        count = max(1, links.shape[1] // 4)
        asked, seen = links[:, :count], utils.to_undirected(links[:, count:], num_nodes=len(x))
        pairs = torch.cat([asked, utils.negative_sampling(edge_index, len(x), count)], 1)
        linked = (torch.arange(pairs.shape[1]) < count).to(x.dtype)
        return F.binary_cross_entropy_with_logits(self.logits(pairs, x, seen), linked)

    def logits(self, pairs: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """``(P,)``."""
        z = self.network(self.first(x), edge_index)
        return self.score(z[pairs[0]] * z[pairs[1]]).squeeze(-1)


NETWORKS = {"vgae": LinksVGAE, "sage": LinksSAGE}


def measure(args, problem: Problem, rival: str, settings: dict, seed: int, parts, every=10):
    """Scores at the step with the best AP on validation links, of every few steps and the last."""
    pyro.set_rng_seed(seed)
    x, train, num_steps, looks = problem.data.x, problem.split.train, args.num_steps or 200, []
    network = NETWORKS[rival](problem.data.num_features, **settings)
    began, optimizer = process_time(), torch.optim.Adam(network.parameters(), lr=0.01)

    @torch.no_grad()
    def scores(part: str) -> dict[str, float]:
        return problem.scores(part, network.eval().logits(problem.pairs(part), x, train))

    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        network.train().loss(x, train).backward()
        optimizer.step()
        if step % every == 0 or step == num_steps:
            looks.append({"step": step} | {part: scores(part) for part in parts})
    seconds, best = process_time() - began, max(looks, key=lambda row: row["val"]["AP"])
    return {"settings": settings, "seconds": seconds / num_steps} | best
