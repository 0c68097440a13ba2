# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
SPN (Qu, Cai and Tang 2022, "Neural Structured Prediction for Inductive Node Classification", ICLR,
https://github.com/DeepGraphLearning/SPN): a conditional random field whose potentials are networks,

.. math::

    p(y \mid x) = \frac{1}{Z} \exp \Big( \sum_s \theta_s(y_s) + \sum_{(s, t)} \theta_{st}(y_s, y_t)
    \Big), \qquad \theta_s = \log \tau_s, \qquad \theta_{st} = \log \frac{\tau_{st}}{\tau_s \tau_t}

(its equations 2 and 9). The proxy problem (10) fits the networks :math:`\tau` to the labels of
single nodes and of both ends of edges; refinement (3, 11) goes on by the gradient of the
likelihood, with the marginals of loopy belief propagation (12).

What differs from the authors' code, and why: their graphs are apart and labelled whole, here one
graph has some labels, so the likelihood is that of the subgraph of labelled nodes, and prediction
clamps them; an edge has one potential, the mean of what the network gives for its two directions;
messages sum probabilities as equation 12 does (the code adds logarithms), run until they settle and
count every edge once (the code runs two steps and counts it half).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.utils import scatter

#: Candidates of the authors' code for what multiplies an edge's logits.
SHARPNESS = (100.0, 10.0, 2.0, 1.0, 0.5, 0.2, 0.1)
#: How much of the ends' marginals an edge's potential leaves out: 1 in equation 9, .1 in the code.
SHARES = (1.0, 0.1)
#: Of the proxy problem, and of refinement: nodes, edges. The README's are .01 and (.001, .0002).
RATES, REFINED = (0.01, 0.005), ((1e-3, 2e-4), (1e-4, 2e-5))
#: Epochs from one look at the held-out nodes to the next.
CHECKED_EVERY = 5
CLAMPED = -30.0


class Field(NamedTuple):
    """Log potentials of nodes ``(N, C)`` and of edges ``(P, C, C)``, which are pairs ``(2, P)``."""

    edges: Tensor
    nodes: Tensor
    pairs: Tensor

    def clamped(self, y: Tensor, known: Tensor) -> Field:
        """Where labels are known, no other one is possible."""
        sure = F.one_hot(y.where(known, 0), self.nodes.shape[1]).bool()
        kept = torch.where(sure, 0.0, CLAMPED)
        return self._replace(nodes=torch.where(known[:, None], kept, self.nodes))

    def scaled(self, factor: float) -> Field:
        return self._replace(nodes=factor * self.nodes, pairs=factor * self.pairs)

    def within(self, nodes: Tensor) -> Field:
        """Of the subgraph of some nodes, a mask."""
        inside = nodes[self.edges].all(0)
        number = nodes.cumsum(0) - 1
        return Field(number[self.edges[:, inside]], self.nodes[nodes], self.pairs[inside])


class Messages:
    """Loopy belief propagation, whose messages may go on after potentials have changed."""

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
        """``(N, C)``: logarithms of what nodes believe, up to a constant."""
        return self.own + scatter(self.sent, self.target, dim_size=len(self.own))

    def cavity(self) -> Tensor:
        """``(2 P, C)``: what the sender of a message believes without its receiver."""
        return (self.logits()[self.source] - self.sent[self.back]).log_softmax(-1)

    def messages(self, cavity: Tensor, along: Tensor | slice = slice(None)) -> Tensor:
        """Equation 12, along all directed edges or some."""
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
        """``(P, C, C)``: joint distributions of the ends of edges."""
        size = len(self.field.pairs)
        first, second = self.cavity().split(size)
        joint = self.field.pairs + first[:, :, None] + second[:, None]
        return joint.flatten(1).softmax(-1).view_as(joint)


def chained(field: Field, y: Tensor, nodes: Tensor, rings: int = 3) -> float:
    r"""
    :math:`\sum_k \log b(y_{i_k} \mid y_{i_1}, ..., y_{i_{k-1}})` in nats, of nodes in an order: the
    beliefs after those before have been clamped, and messages about it have gone so many edges far.
    It is :math:`\log p` on trees; on other graphs, where the field's own normaliser is out of
    reach, it is the logarithm of a distribution all the same, for every factor is one.
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


class Networks(nn.Module):
    """The networks of nodes and of edges: ``make`` gives one with so many outputs."""

    def __init__(self, make: Callable[[int], nn.Module], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.of_nodes, self.of_edges = make(num_classes), make(width)
        self.thin, self.pair = nn.Dropout(0.5), nn.Linear(2 * width, num_classes**2)
        self.num_classes = num_classes

    def forward(self, data: Data, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, C)`` and ``(P, C, C)``."""
        hidden = self.thin(self.of_edges(data.x, data.edge_index))
        there, back = (
            self.pair(torch.cat([hidden[i], hidden[j]], -1)).unflatten(-1, (self.num_classes,) * 2)
            for i, j in (edges, edges.flip(0))
        )
        return self.of_nodes(data.x, data.edge_index), (there + back.mT) / 2


def field_of(edges: Tensor, nodes: Tensor, pairs: Tensor, sharpness: float, share: float) -> Field:
    """Equation 9, from logits. The ends' marginals are those of the edge's own table."""
    tau = (sharpness * pairs).flatten(1).softmax(-1).view_as(pairs) + 1e-7
    ends = tau.sum(2).log()[:, :, None] + tau.sum(1).log()[:, None]
    return Field(edges, nodes.log_softmax(-1), tau.log() - share * ends)


def likelihood_loss(field: Field, y: Tensor) -> Tensor:
    """
    Equation 11 of a graph with all labels: its gradient is that of minus the log-likelihood a node,
    where belief propagation is exact.
    """
    with torch.no_grad():
        state = Messages(field).run()
        marginals, tables = state.marginals(), state.tables()
    i, j = field.edges
    each = torch.arange(len(tables))
    gain = field.nodes.gather(1, y[:, None]).sum() - (marginals * field.nodes).sum()
    gain = gain + field.pairs[each, y[i], y[j]].sum() - (tables * field.pairs).sum()
    return -gain / len(y)


class Fitted(NamedTuple):
    """The field with the known labels clamped, and what the held-out nodes have chosen."""

    field: Field
    settings: dict


class Fit:
    """A fit of SPN to a graph; :meth:`best` does it all."""

    def __init__(self, make: Callable[[int], nn.Module], data: Data, num_epochs: int) -> None:
        one_way = data.edge_index[0] < data.edge_index[1]
        self.edges, self.data, self.num_epochs = data.edge_index[:, one_way], data, num_epochs
        self.make, self.num_classes = make, int(data.y.max()) + 1
        known, held = data.train_mask, data.val_mask
        self.taught = known[self.edges].all(0)
        self.checked = (known | held)[self.edges].all(0) & ~self.taught

    def score(self, logits: Tensor, y: Tensor) -> tuple[float, float]:
        if len(y) == 0:
            return 0.0, 0.0
        hits = (logits.argmax(-1) == y).double().mean().item()
        return hits, -F.cross_entropy(logits, y).item()

    def quality(self, field: Field) -> tuple[float, float]:
        """Of the held-out nodes, given the known labels."""
        data = self.data
        beliefs = Messages(field.clamped(data.y, data.train_mask)).run().marginals()
        return self.score(beliefs[data.val_mask].clamp(min=1e-12).log(), data.y[data.val_mask])

    def proxy(self, rate: float) -> Networks:
        """Equation 10, each network at its best epoch on the held-out nodes and edges."""
        data, networks = self.data, Networks(self.make, self.num_classes)
        both = data.y[self.edges[0]] * self.num_classes + data.y[self.edges[1]]
        adam = torch.optim.Adam(networks.parameters(), lr=rate, weight_decay=5e-4)
        best = {"of_nodes": (-1.0, 0.0), "of_edges": (-1.0, 0.0)}
        kept = copy.deepcopy(networks.state_dict())
        for epoch in range(self.num_epochs):
            networks.train()
            adam.zero_grad()
            nodes, pairs = networks(data, self.edges[:, self.taught])
            loss = F.cross_entropy(nodes[data.train_mask], data.y[data.train_mask])
            if self.taught.any():
                loss = loss + F.cross_entropy(pairs.flatten(1), both[self.taught])
            loss.backward()
            adam.step()
            if epoch % CHECKED_EVERY:
                continue
            networks.eval()
            with torch.no_grad():
                nodes, pairs = networks(data, self.edges[:, self.checked])
            found = {
                "of_nodes": self.score(nodes[data.val_mask], data.y[data.val_mask]),
                "of_edges": self.score(pairs.flatten(1), both[self.checked]),
            }
            for part, value in found.items():
                if value > best[part]:
                    best[part] = value
                    names = (part, "pair") if part == "of_edges" else (part,)
                    kept |= {
                        name: tensor.clone()
                        for name, tensor in networks.state_dict().items()
                        if name.startswith(names)
                    }
        networks.load_state_dict(kept)
        return networks

    def potentials(self, networks: Networks, sharpness: float, share: float) -> Field:
        networks.eval()
        with torch.no_grad():
            return field_of(self.edges, *networks(self.data, self.edges), sharpness, share)

    def refined(self, networks: Networks, rates, sharpness: float, share: float):
        """The best of epochs by the held-out nodes, as (quality, field)."""
        data, networks = self.data, copy.deepcopy(networks)
        edge_parts = [*networks.of_edges.parameters(), *networks.pair.parameters()]
        groups = [{"params": networks.of_nodes.parameters(), "lr": rates[0]}]
        adam = torch.optim.Adam([*groups, {"params": edge_parts, "lr": rates[1]}])
        found = []
        for epoch in range(self.num_epochs // 4):
            networks.train()
            adam.zero_grad()
            edges = self.edges[:, self.taught]
            field = field_of(edges, *networks(data, edges), sharpness, share)
            part = field.within(data.train_mask)
            likelihood_loss(part, data.y[data.train_mask]).backward()
            adam.step()
            if epoch % CHECKED_EVERY == CHECKED_EVERY - 1:
                field = self.potentials(networks, sharpness, share)
                found.append((self.quality(field), epoch + 1, field))
        return found

    def best(self) -> Fitted:
        """All choices by the held-out nodes: accuracy, then likelihood; the scale by the latter."""
        trials = []
        for rate in RATES:
            networks = self.proxy(rate)
            for sharpness in SHARPNESS:
                for share in SHARES:
                    field = self.potentials(networks, sharpness, share)
                    more = {"lr": rate, "sharpness": sharpness, "share": share}
                    trials.append((self.quality(field), more | {"refined": 0}, field, networks))
        first = max(trials, key=lambda trial: trial[0])
        found, (_, chosen, _, networks) = [first[:3]], first
        for rates in REFINED:
            each = self.refined(networks, rates, chosen["sharpness"], chosen["share"])
            found += [(q, chosen | {"refined": n, "refined lr": rates[0]}, f) for q, n, f in each]
        _, settings, field = max(found, key=lambda trial: trial[0])
        scales = [2.0 ** (n / 4) for n in range(-12, 5)]
        scale = max(scales, key=lambda each: self.quality(field.scaled(each))[1])
        field = field.scaled(scale).clamped(self.data.y, self.data.train_mask)
        return Fitted(field, settings | {"scale": scale})
