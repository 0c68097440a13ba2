# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Out-of-fold predictions of a classifier that learns the labels of a consensus."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.inits import glorot

from pyro_nmm.arguments import as_tensor, expect, expect_all
from pyro_nmm.datasets import seed_batch
from pyro_nmm.edges import edges_of
from pyro_nmm.fitting import with_gradients
from pyro_nmm.models.estimators import probabilities_of, with_probabilities
from pyro_nmm.sparse import csr_of_entries, to_csr

Progress = Callable[[range], Iterable[int]]
#: Parts of the nodes; a node's prediction comes from training without its part.
NUM_FOLDS = 5
#: Adam's learning rate, weight decay and most steps.
LR, DECAY, NUM_EPOCHS = 0.01, 5e-4, 400
#: One in so many nodes stops a training early: it is scored after every few steps, and training
#: ends after so many steps without a better score.
HELD_OUT, EVERY, PATIENCE = 10, 5, 100
#: Features with fewer entries than this share are kept as a sparse matrix.
SPARSE = 0.1
#: In larger graphs a step learns from a batch of nodes, and later hops draw some neighbours.
LARGE, BATCH, NUM_NEIGHBORS = 50_000, 512, 5


def out_of_fold(
    graph: Any, classifier: Any, pred_probs: Any, shape: tuple[int, int], progress: Progress
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """From label distributions and the nodes to learn from, to predictions; None without any."""
    if pred_probs is not None:
        if classifier is not None:
            raise ValueError("give classifier or pred_probs, not both")
        probs = expect("pred_probs", as_tensor("pred_probs", pred_probs), shape, kind="float")
        expect_all("pred_probs", probs, probs >= 0, "be probabilities")
        total = probs.double().sum(1)
        expect_all("pred_probs", total, (total - 1).abs() < 1e-3, "have rows that sum to one")
        return lambda targets, rows: probs.to(targets)
    x = graph.x if isinstance(graph, Data) else None
    if classifier is None and x is None:
        return None
    if x is None:
        raise ValueError("classifier needs features: give PyG's Data with x as graph")
    data = Data(as_tensor("graph.x", x), edges_of(graph)[0], num_nodes=shape[0])
    return OutOfFold(classifier, data, progress)


@dataclass(frozen=True)
class OutOfFold:
    """A network, a scikit-learn classifier or None for a GCN, which learns uncertain labels and
    predicts them out of fold, as cleanlab does. A network's training stops early by the cross
    entropy of nodes that it does not learn from.
    """

    classifier: Any
    data: Data
    progress: Progress = iter

    def __post_init__(self) -> None:
        x = expect("graph.x", self.data.x, (int(self.data.num_nodes or 0), "F"))
        values = x if x.layout == torch.strided else x.values()
        expect_all("graph.x", values, values.isfinite(), "be finite")
        if isinstance(self.classifier, nn.Module):
            if not any(value.requires_grad for value in self.classifier.parameters()):
                cure = "unfreeze a layer, or pass its probabilities as pred_probs"
                raise ValueError(f"classifier has no parameter that requires_grad: {cure}")
        elif self.classifier is not None and not hasattr(self.classifier, "fit"):
            must = "a network, or have fit and predict_proba"
            raise ValueError(f"classifier must be {must}, got {type(self.classifier).__name__}")

    @with_gradients
    @torch.no_grad()  # but for the steps of a training
    def __call__(self, targets: Tensor, rows: Tensor) -> Tensor:
        """Predictions ``(N, C)``, from ``targets`` ``(N, C)`` of the nodes in a mask ``rows``."""
        fold = torch.randperm(len(rows), device=rows.device) % NUM_FOLDS
        probs, learn, x = torch.empty_like(targets), self._learn_rows, self.data.x.to_dense()
        if self.classifier is None or isinstance(self.classifier, nn.Module):
            learn = self._learn
            if len(x) <= LARGE:  # not every layer of a user's network takes a sparse matrix
                x = _sparse(self.data.x) if self.classifier is None else self.data.x
            x = x.to(torch.get_default_dtype())
            x = x if x.layout == torch.strided or self.classifier is not None else _Kept(x)
        for number in self.progress(range(NUM_FOLDS)):
            here = fold == number
            probs[here] = learn(x, targets, rows & ~here)[here].to(probs)
        return probs

    def _learn(self, x: "Tensor | _Kept", targets: Tensor, rows: Tensor) -> Tensor:
        network, edges = self._network(len(x) <= LARGE, targets.shape[1])
        adam = torch.optim.Adam(network.parameters(), LR, weight_decay=DECAY)
        nodes = rows.nonzero()[:, 0]
        nodes = nodes[torch.randperm(len(nodes), device=nodes.device)]
        number = len(nodes) // HELD_OUT
        train, held_out = nodes[number:], self._batch(network, x, edges, nodes[:number])

        def loss(batch: tuple) -> Tensor:
            inputs, place, seeds = batch
            logits = network(*inputs)
            if (got := tuple(logits.shape)) != (must := (len(inputs[0]), targets.shape[1])):
                raise ValueError(f"classifier must return logits of shape {must}, got {got}")
            return cross_entropy(logits[place], targets[seeds].to(logits))

        # A loop of its own: with the checks of `pyro_nmm.fitting.train` it takes 1.3 times as long.
        best, least, last = network.state_dict(), math.inf, 0
        for epoch in range(NUM_EPOCHS):
            network.train().zero_grad()
            with torch.enable_grad():
                loss(self._batch(network, x, edges, train)).backward()
            adam.step()
            if number and epoch % EVERY == 0:
                network.eval()
                if (value := loss(held_out).item()) < least:
                    best, least, last = deepcopy(network.state_dict()), value, epoch
            if number and epoch - last >= PATIENCE:
                break
        if number:
            network.load_state_dict(best)
        if self.classifier is None and len(x) > LARGE:
            edges = _normalized(edges, len(x))  # products of it make no messages of all edges
        logits = network.eval()(x, edges)
        expect_all("logits of classifier", logits, ~logits.isnan(), "not be NaN")
        return logits.softmax(-1)

    def _network(self, whole: bool, num_labels: int) -> tuple[nn.Module, Any]:
        """A network with new parameters, and the edges as it reads them."""
        x, edges = self.data.x, self.data.edge_index
        if self.classifier is not None:
            layers = self.classifier.modules()
            if not whole and any(getattr(layer, "cached", False) for layer in layers):
                must = f"have no cached layer in a graph of more than {LARGE} nodes"
                raise ValueError(f"classifier must {must}: use cached=False")
            return _fresh(self.classifier).to(x.device), edges
        network = _GCN(x.shape[1], num_labels).to(x.device)
        return network, _normalized(edges, len(x)) if whole else edges

    def _batch(self, network: nn.Module, x: Any, edges: Any, nodes: Tensor) -> tuple:
        """Inputs of the network, places in its output, and the nodes there: of a large graph some
        nodes only, with the neighbours that the network reads."""
        if len(x) <= LARGE or not len(nodes):
            return (x, edges), nodes, nodes
        seeds = nodes[torch.randint(len(nodes), (BATCH,), device=nodes.device)].unique()
        hops = sum(isinstance(layer, MessagePassing) for layer in network.modules())
        hops = 2 if self.classifier is None else hops
        batch = seed_batch(Data(x, edges), seeds, max(1, hops), NUM_NEIGHBORS)
        ends = batch.edge_index
        if self.classifier is None:
            ends = _normalized(ends, len(batch.x))
        return (batch.x, ends), slice(len(seeds)), seeds

    def _learn_rows(self, x: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        """scikit-learn's classifiers learn each row's most probable label. One more row of each
        label is counted, because a fold may lack some."""
        labels = targets.argmax(1)[rows].cpu().numpy()
        if len(set(labels.tolist())) < 2:  # which scikit-learn refuses
            share = torch.bincount(torch.from_numpy(labels), minlength=targets.shape[1]).to(targets)
            return ((share + 1) / (len(labels) + len(share))).expand_as(targets)
        model = deepcopy(self.classifier).fit(x[rows].cpu().numpy(), labels)
        model = with_probabilities("classifier", model)
        learned = probabilities_of("classifier", model, x.cpu().numpy())
        probs = targets.new_zeros(targets.shape)
        columns = torch.as_tensor(model.classes_, device=probs.device)
        probs[:, columns] = torch.from_numpy(learned).to(probs)
        return (len(labels) * probs + 1) / (len(labels) + probs.shape[1])


def _fresh(network: nn.Module) -> nn.Module:
    """A copy with new parameters of layers that can draw them, unless some are frozen."""
    network = deepcopy(network)
    for module in network.modules():
        trained = all(value.requires_grad for value in module.parameters())
        if trained and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return network.train()


def _sparse(x: Tensor) -> Tensor:
    if x.layout != torch.strided or x.count_nonzero() >= SPARSE * x.numel():
        return x
    return to_csr(x)


def _normalized(edge_index: Tensor, size: int) -> "_Kept":
    """The matrix of a GCN's layers, ``(N, N)``: its products take half the time of edge lists."""
    (source, target), weight = gcn_norm(edge_index, num_nodes=size)
    return _Kept(csr_of_entries(target, source, weight, (size, size)))


class _GCN(nn.Module):
    """PyG's GCN of two layers, at half the time."""

    def __init__(self, num_features: int, num_labels: int) -> None:
        super().__init__()
        sizes = (num_features, 64), (64, num_labels)
        self.weights = nn.ParameterList(torch.empty(size) for size in sizes)
        self.biases = nn.ParameterList(torch.zeros(size[1]) for size in sizes)
        for weight in self.weights:
            glorot(weight)

    def forward(self, x: Any, edges: Any) -> Tensor:
        hidden = (edges @ (x @ self.weights[0]) + self.biases[0]).relu()
        hidden = dropout(hidden, 0.5, self.training)
        return edges @ (hidden @ self.weights[1]) + self.biases[1]


class _Kept:
    """A sparse matrix and its transpose, which PyTorch sorts anew for each gradient."""

    def __init__(self, matrix: Tensor) -> None:
        rows = torch.arange(len(matrix), device=matrix.device)
        rows = rows.repeat_interleave(matrix.crow_indices().diff())
        entries = matrix.col_indices(), rows, matrix.values()
        self.matrix = matrix
        self.transpose = csr_of_entries(*entries, (matrix.shape[1], matrix.shape[0]))

    def __len__(self) -> int:
        return len(self.matrix)

    def __matmul__(self, dense: Tensor) -> Tensor:
        return _Product.apply(self.matrix, self.transpose, dense)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transpose: Tensor, dense: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ dense

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return None, None, ctx.transpose @ grad
