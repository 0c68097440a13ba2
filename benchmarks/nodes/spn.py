# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
SPN (Qu, Cai and Tang 2022, "Neural Structured Prediction for Inductive Node Classification", ICLR,
https://github.com/DeepGraphLearning/SPN): a conditional random field of node potentials
:math:`\log \tau_s` and edge potentials :math:`\log \tau_{st} - \log \tau_s \tau_t` (equations 2
and 9). The proxy problem (10) fits the networks :math:`\tau` to the labels of nodes and of both
ends of edges. Refinement (3, 11) follows the gradient of the likelihood, with marginals of loopy
belief propagation (12).

Three things differ from the authors' code, whose graphs are fully labelled. The likelihood is of
the subgraph of labelled nodes, and prediction clamps their labels. An edge has one potential, the
mean over its two directions. Messages sum probabilities as in equation 12, run until they settle
and count every edge once; the code adds logarithms, runs two steps and counts every edge half.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.utils import scatter

#: Factors of edge logits, from the authors' code; the power of the ends' marginals in an edge's
#: potential is 1 in equation 9 and .1 in their code.
SHARPNESS, SHARES = (100.0, 10.0, 2.0, 1.0, 0.5, 0.2, 0.1), (1.0, 0.1)
#: Learning rates of the proxy problem, and of nodes and edges in refinement; the authors' first.
RATES, REFINED = (0.01, 0.005), ((1e-3, 2e-4), (1e-4, 2e-5))
#: Epochs between two evaluations on the held-out nodes.
CHECKED_EVERY = 5
CLAMPED = -30.0


class Field(NamedTuple):
    """Log potentials of nodes ``(N, C)`` and of ``edges`` ``(2, P)``, ``(P, C, C)``."""

    edges: Tensor
    nodes: Tensor
    pairs: Tensor

    def clamped(self, y: Tensor, known: Tensor) -> Field:
        """The field in which known nodes can have no other label."""
        sure = F.one_hot(y.where(known, 0), self.nodes.shape[1]).bool()
        kept = torch.where(sure, 0.0, CLAMPED)
        return self._replace(nodes=torch.where(known[:, None], kept, self.nodes))

    def scaled(self, factor: float) -> Field:
        return self._replace(nodes=factor * self.nodes, pairs=factor * self.pairs)

    def within(self, nodes: Tensor) -> Field:
        """The field of the subgraph of some nodes, a mask."""
        inside = nodes[self.edges].all(0)
        number = nodes.cumsum(0) - 1
        return Field(number[self.edges[:, inside]], self.nodes[nodes], self.pairs[inside])


class Messages:
    """Loopy belief propagation. Its messages persist if potentials change."""

    def __init__(self, field: Field, maximum: bool = False) -> None:
        self.field, self.maximum = field, maximum
        size = field.edges.shape[1]
        self.source, self.target = torch.cat([field.edges, field.edges.flip(0)], 1)
        self.back = torch.arange(2 * size).roll(size)
        both = torch.cat([field.pairs, field.pairs.mT])
        self.gain = both if maximum else (both - both.amax((1, 2), keepdim=True)).exp()
        self.own = field.nodes.clone()
        self.sent = field.nodes.new_zeros(2 * size, field.nodes.shape[1])

    def logits(self) -> Tensor:
        """Unnormalised log beliefs of nodes, ``(N, C)``."""
        return self.own + scatter(self.sent, self.target, dim_size=len(self.own))

    def cavity(self) -> Tensor:
        """Log beliefs of each message's sender without its receiver, ``(2 P, C)``."""
        return (self.logits()[self.source] - self.sent[self.back]).log_softmax(-1)

    def messages(self, cavity: Tensor, along: Tensor | slice = slice(None)) -> Tensor:
        """Equation 12 for all directed edges or some."""
        cavity, gain = cavity.log_softmax(-1), self.gain[along]
        if self.maximum:
            return (cavity[:, :, None] + gain).amax(1).log_softmax(-1)
        new = torch.bmm(cavity.exp()[:, None], gain)[:, 0]
        return new.clamp(min=1e-30).log().log_softmax(-1)

    def run(self, steps: int = 30, damped_from: int = 5) -> Messages:
        for step in range(steps):
            new = self.messages(self.cavity())
            self.sent = new if step < damped_from else (self.sent + new) / 2
        return self

    def marginals(self) -> Tensor:
        return self.logits().softmax(-1)

    def tables(self) -> Tensor:
        """Joint distributions of the ends of edges, ``(P, C, C)``."""
        first, second = self.cavity().split(len(self.field.pairs))
        joint = self.field.pairs + first[:, :, None] + second[:, None]
        return joint.flatten(1).softmax(-1).view_as(joint)


def chained(field: Field, y: Tensor, nodes: Tensor, rings: int = 3) -> float:
    """
    Log-probability of labels by the chain rule: each node's belief after the nodes before it have
    been clamped and messages have passed ``rings`` edges from them. It is exact on trees. On other
    graphs it is of another, proper distribution, because each factor is one.
    """
    state, total = Messages(field).run(), 0.0
    believed, num_nodes = state.logits(), len(state.own)
    out = state.source.argsort()
    first = F.pad(state.source.bincount(minlength=num_nodes).cumsum(0), (1, 0)).tolist()
    for node in nodes.tolist():
        total += believed[node].log_softmax(-1)[y[node]].item()
        own = torch.full_like(state.own[node], CLAMPED)
        own[y[node]] = 0.0
        believed[node] += own - state.own[node]
        state.own[node], front = own, [node]
        for _ in range(rings):
            if not front:
                break  # the node has no edges
            sent = torch.cat([out[first[each] : first[each + 1]] for each in front])
            new = state.messages(believed[state.source[sent]] - state.sent[state.back[sent]], sent)
            believed.index_add_(0, state.target[sent], new - state.sent[sent])
            state.sent[sent] = new
            front = state.target[sent].unique().tolist()
    return total


class EdgeNetwork(nn.Module):
    """Logits of the labels of both ends of edges, ``(P, C, C)``."""

    def __init__(self, make: Callable[[int], nn.Module], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.hidden, self.thin = make(width), nn.Dropout(0.5)
        self.pair, self.num_classes = nn.Linear(2 * width, num_classes**2), num_classes

    def forward(self, data: Data, edges: Tensor) -> Tensor:
        hidden = self.thin(self.hidden(data.x, data.edge_index))
        there, back = (
            self.pair(torch.cat([hidden[i], hidden[j]], -1)).unflatten(-1, (self.num_classes,) * 2)
            for i, j in (edges, edges.flip(0))
        )
        return (there + back.mT) / 2


def field_of(edges: Tensor, nodes: Tensor, pairs: Tensor, sharpness: float, share: float) -> Field:
    """Equation 9, from logits. An edge's own table gives the marginals of its ends."""
    tau = (sharpness * pairs).flatten(1).softmax(-1).view_as(pairs) + 1e-7
    ends = tau.sum(2).log()[:, :, None] + tau.sum(1).log()[:, None]
    return Field(edges, nodes.log_softmax(-1), tau.log() - share * ends)


def likelihood_loss(field: Field, y: Tensor) -> Tensor:
    """
    Equation 11 of a fully labelled graph. Its gradient is that of the negative log-likelihood per
    node if belief propagation is exact.
    """
    with torch.no_grad():
        state = Messages(field).run()
        marginals, tables = state.marginals(), state.tables()
    i, j = field.edges
    each = torch.arange(len(tables))
    gain = field.nodes.gather(1, y[:, None]).sum() - (marginals * field.nodes).sum()
    gain = gain + field.pairs[each, y[i], y[j]].sum() - (tables * field.pairs).sum()
    return -gain / len(y)


def score(logits: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy and mean log-likelihood."""
    if len(y) == 0:
        return 0.0, 0.0
    hits = (logits.argmax(-1) == y).double().mean().item()
    return hits, -F.cross_entropy(logits, y).item()


class Fit:
    """A fit of SPN to a graph: ``make`` gives a network with so many outputs."""

    def __init__(self, make: Callable[[int], nn.Module], data: Data, num_epochs: int) -> None:
        one_way = data.edge_index[0] < data.edge_index[1]
        self.edges, self.data, self.num_epochs = data.edge_index[:, one_way], data, num_epochs
        self.make, self.num_classes = make, int(data.y.max()) + 1
        known, held = data.train_mask, data.val_mask
        self.taught = known[self.edges].all(0)
        self.checked = (known | held)[self.edges].all(0) & ~self.taught

    def logits(self, networks: nn.ModuleDict, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of all nodes and of some edges."""
        pairs = networks["edges"](self.data, edges)
        return networks["nodes"](self.data.x, self.data.edge_index), pairs

    def field(self, networks: nn.ModuleDict, sharpness: float, share: float) -> Field:
        networks.eval()
        with torch.no_grad():
            return field_of(self.edges, *self.logits(networks, self.edges), sharpness, share)

    def quality(self, field: Field) -> tuple[float, float]:
        """Accuracy and log-likelihood of the held-out nodes given the known labels."""
        data = self.data
        beliefs = Messages(field.clamped(data.y, data.train_mask)).run().marginals()
        return score(beliefs[data.val_mask].clamp(min=1e-12).log(), data.y[data.val_mask])

    def proxy(self, rate: float) -> nn.ModuleDict:
        """Equation 10, each network at its best epoch on the held-out nodes and edges."""
        data, size, best = self.data, self.num_classes, {}
        nodes = self.make(size)
        networks = nn.ModuleDict({"nodes": nodes, "edges": EdgeNetwork(self.make, size)})
        both = data.y[self.edges[0]] * size + data.y[self.edges[1]]
        adam = torch.optim.Adam(networks.parameters(), lr=rate, weight_decay=5e-4)
        for epoch in range(self.num_epochs):
            networks.train()
            adam.zero_grad()
            nodes, pairs = self.logits(networks, self.edges[:, self.taught])
            loss = F.cross_entropy(nodes[data.train_mask], data.y[data.train_mask])
            if self.taught.any():
                loss = loss + F.cross_entropy(pairs.flatten(1), both[self.taught])
            loss.backward()
            adam.step()
            if epoch % CHECKED_EVERY:
                continue
            networks.eval()
            with torch.no_grad():
                nodes, pairs = self.logits(networks, self.edges[:, self.checked])
            found = {"nodes": score(nodes[data.val_mask], data.y[data.val_mask])}
            found["edges"] = score(pairs.flatten(1), both[self.checked])
            for part, value in found.items():
                if part not in best or value > best[part][0]:
                    best[part] = value, copy.deepcopy(networks[part].state_dict())
        for part, (_, state) in best.items():
            networks[part].load_state_dict(state)
        return networks

    def refined(self, networks: nn.ModuleDict, rates: tuple, sharpness: float, share: float):
        """Fields of some epochs of refinement, each with its quality and epoch."""
        data, networks, found = self.data, copy.deepcopy(networks), []
        parts = zip(("nodes", "edges"), rates, strict=True)
        adam = torch.optim.Adam({"params": networks[k].parameters(), "lr": r} for k, r in parts)
        for epoch in range(1, self.num_epochs // 4 + 1):
            networks.train()
            adam.zero_grad()
            edges = self.edges[:, self.taught]
            field = field_of(edges, *self.logits(networks, edges), sharpness, share)
            likelihood_loss(field.within(data.train_mask), data.y[data.train_mask]).backward()
            adam.step()
            if epoch % CHECKED_EVERY == 0:
                field = self.field(networks, sharpness, share)
                found.append((self.quality(field), epoch, field))
        return found

    def best(self) -> tuple[Field, dict]:
        """
        The field with the known labels clamped, and its settings. Held-out nodes choose all
        settings by accuracy, then likelihood, and the scale by likelihood.
        """
        trials = []
        for rate in RATES:
            networks = self.proxy(rate)
            for sharpness, share in product(SHARPNESS, SHARES):
                field = self.field(networks, sharpness, share)
                settings = {"lr": rate, "sharpness": sharpness, "share": share, "refined": 0}
                trials.append((self.quality(field), settings, field, networks))
        *first, networks = max(trials, key=lambda trial: trial[0])
        found, settings = [first], first[1]
        for rates in REFINED:
            each = self.refined(networks, rates, settings["sharpness"], settings["share"])
            more = settings | {"refined lr": rates[0]}
            found += [(quality, more | {"refined": epoch}, f) for quality, epoch, f in each]
        _, settings, field = max(found, key=lambda trial: trial[0])
        scales = [2.0 ** (n / 4) for n in range(-12, 5)]
        scale = max(scales, key=lambda each: self.quality(field.scaled(each))[1])
        field = field.scaled(scale).clamped(self.data.y, self.data.train_mask)
        return field, settings | {"scale": scale}
