# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Classify nodes by a graph neural network alone, by an NMM on top of the trained network, and by
an NMM trained end to end with the network.

    python examples/node_classification.py --dataset digits --output output/digits.png
    python examples/node_classification.py --dataset cora --backbone appnp

The digits come with scikit-learn; cora, citeseer and pubmed are downloaded by PyG, or read
from --data-root.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import torch
from common import GRAPHS, load_graph, options, progress_bar
from common import scores as label_scores
from drawing.node_classification import draw
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.nn import APPNP, GAT, GCN, MLP, Sequential

from pyro_nmm import Neighborhood
from pyro_nmm.guides import fit_nmm
from pyro_nmm.models import NMMNetwork, StackedNMM, temperature_scaling

BACKBONES = "gcn", "gat", "appnp"


class RandomInput(nn.Module):
    """A network with dropout of its input, and of all features of a node (Feng et al. 2020)."""

    def __init__(self, network, dropout: float, drop_nodes: float) -> None:
        super().__init__()
        self.network, self.dropout, self.drop_nodes = network, dropout, drop_nodes

    def forward(self, x, edge_index):
        kept = F.dropout(x.new_ones(len(x), 1), self.drop_nodes, self.training)
        return self.network(F.dropout(x, self.dropout, self.training) * kept, edge_index)


def make(kind: str, num_features: int, width: int, dropout: float, drop_nodes=0.0, layers=2):
    """A network of the paper, or one layer of it for the attention."""
    many, one = {"dropout": dropout}, layers == 1
    if kind == "gcn":
        hidden = width if one else 16
        network = GCN(num_features, hidden, layers, width, cached=True, **many)
    elif kind == "gat":
        hidden = width if one else 8 * 16
        network = GAT(num_features, hidden, layers, width, act="elu", heads=8, **many)
    else:
        steps = [
            (MLP([num_features, 64, width], norm=None, **many), "x -> x"),
            (APPNP(K=10, alpha=0.1, cached=True), "x, edge_index -> x"),
        ]
        network = Sequential("x, edge_index", steps)
    return RandomInput(network, dropout, drop_nodes)


def networks(args, data, num_classes: int):
    """Backbone of the classifier, and the one or two backbones of the NMM."""
    backbone = partial(make, args.backbone, data.num_features, dropout=args.dropout)
    alone, width = backbone(num_classes), 64 if args.backbone == "gcn" else 32
    if args.shared:
        parts = (backbone(num_classes + width, drop_nodes=0.5), None)
    else:
        parts = (backbone(num_classes, drop_nodes=0.5), backbone(width, layers=1))
    return alone, NMMNetwork(*parts, num_classes=num_classes, floor=0.1, gamma=2.0)


def train(network, data, args):
    """Logits ``(N, C)`` of a classifier: of the steps, the most accurate on validation nodes."""
    inputs, best, logits = (data.x, data.edge_index), -1.0, None
    adam = {"lr": args.lr, "weight_decay": args.weight_decay}
    optimizer = torch.optim.Adam(network.parameters(), **adam)
    for _ in progress_bar(range(args.num_steps), desc=args.backbone):
        optimizer.zero_grad()
        out = network.train()(*inputs)[data.train_mask]
        cross_entropy(out, data.y[data.train_mask]).backward()
        optimizer.step()
        with torch.no_grad():
            now = network.eval()(*inputs)
        accuracy = (now.argmax(1) == data.y)[data.val_mask].double().mean().item()
        if accuracy > best:
            best, logits = accuracy, now
    return logits


def independent(probs, pairs):
    """Tables ``(P, C, C)`` of pairs whose labels are independent."""
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]


def scores(probs, data, pairs, table) -> dict:
    p, y = probs[data.test_mask], data.y[data.test_mask]
    pair = table[torch.arange(len(table)), *data.y[pairs]].clamp(min=1e-24)
    square = (p - one_hot(y, p.shape[1])).square().sum(1).mean().item()
    return label_scores(p, y, least=1e-12) | {"Brier": square, "PLL": pair.log().mean().item()}


def show(results: dict) -> None:
    columns = list(next(iter(results.values())))
    print(f"{'':24}", *(f"{name:>9}" for name in columns))
    for name, row in results.items():
        print(f"{name:24}", *(f"{row[column]:9.4f}" for column in columns))


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    data = load_graph(args.dataset, args.data_root, args.split).to(args.device)
    num_classes, y = int(data.y.max()) + 1, data.y
    hood = Neighborhood(data.edge_index, data.num_nodes)
    pairs = data.edge_index[:, data.test_mask[data.edge_index].all(0)]
    pairs = pairs[:, pairs[0] < pairs[1]]  # of test nodes that are neighbours, each once
    alone, network = (net.to(args.device) for net in networks(args, data, num_classes))

    name = args.backbone.upper()
    logits = train(alone, data, args)
    probs = logits.softmax(-1)
    scaled = (logits / temperature_scaling(logits, y, data.val_mask)).softmax(-1)
    results = {
        name: scores(probs, data, pairs, independent(probs, pairs)),
        f"{name} + temperature": scores(scaled, data, pairs, independent(scaled, pairs)),
    }

    def on_top(logits):
        """Fit an NMM on top of trained scores, to the validation nodes."""
        stacked = StackedNMM(num_classes).fit(hood, logits, y, data.train_mask, data.val_mask)
        mix = stacked.mixture(hood, logits, y, data.train_mask)
        post = mix.condition(y, data.train_mask, num_samples=64)
        return mix, post.marginals(), scores(post.marginals(), data, pairs, post.pairwise(pairs))

    together, rival = f"{name} + StackedNMM", f"{name} + temperature"
    top, marginals, results[together] = on_top(logits)

    # An NMM trained end to end.
    mix, _ = fit_nmm(
        network, data, hood, num_steps=args.num_steps, lr=args.lr, weight_decay=args.weight_decay,
        progress=partial(progress_bar, desc=f"NMM-{name}"),
    )  # fmt: skip
    post = mix.condition(y, data.train_mask, num_samples=64)
    results[f"NMM-{name}"] = scores(post.marginals(), data, pairs, post.pairwise(pairs))
    results[f"NMM-{name} + StackedNMM"] = on_top(mix.alpha.log())[-1]

    show(results)
    size = int(data.test_mask.sum())
    joint = top.log_likelihood(y, data.test_mask, data.train_mask, num_particles=64).item() / size
    print(f"{size} test nodes; pairs are the {pairs.shape[1]} edges between them")
    print(
        f"log p(y_test | y_train) per node: {together} {joint:.4f}, "
        f"independent labels of {rival} {-results[rival]['NLL']:.4f}"
    )
    if args.output:
        shown = {rival: scaled, together: marginals}
        shown = {f"{key}: NLL {results[key]['NLL']:.3f}": p for key, p in shown.items()}
        draw(args, data, top, shown)
    return results | {"joint": joint}


def parser() -> ArgumentParser:
    choices = {"dataset": GRAPHS, "backbone": BACKBONES}
    return options(
        __doc__, "node_classification.png", choices, dataset="digits", backbone="gcn",
        shared=(False, "one network for alpha and attention"), split=(0, "number of the split"),
        num_steps=200, lr=0.02, weight_decay=5e-4, dropout=0.5,
        node=(int, "to be drawn; default an uncertain test node"), seed=0, device="cpu",
        num_threads=(1, "results depend on it"),
        data_root=(Path, "folder that holds Cora/raw and the like"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
