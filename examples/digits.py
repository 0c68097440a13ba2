# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
scikit-learn's 1797 digits on their nearest-neighbour graph, one label in ten known:
an NMM on a GCN against the same GCN alone.

    python examples/digits.py --output output/digits.png
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected
from torchmetrics.functional.classification import multiclass_calibration_error
from tqdm import trange

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork

CLASSES = 10
GCN_COLOR, NMM_COLOR = "#E69F00", "#0072B2"


def load(seed: int, num_neighbors: int = 8) -> Data:
    """Images, their nearest-neighbour graph, and a split of 10 / 10 / 80 percent."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float) / 16
    graph = kneighbors_graph(digits.data, num_neighbors)
    edge_index = to_undirected(from_scipy_sparse_matrix(graph)[0])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    data = Data(x=x, edge_index=edge_index, y=torch.tensor(digits.target))
    for name, part in zip(("train", "val", "test"), order.split([180, 180, 1437]), strict=True):
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[part] = True
        data[name + "_mask"] = mask
    return data


def backbone(data: Data) -> GCN:
    return GCN(data.num_features, 64, num_layers=2, out_channels=CLASSES, dropout=0.5)


def log_likelihood(probs, y, mask) -> float:
    return probs[mask, y[mask]].clamp(min=1e-12).log().mean().item()


def train_gcn(data: Data, args):
    """The backbone alone, weights of the best validation likelihood."""
    model = backbone(data).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    best, curve = (-torch.inf, None), []
    for epoch in trange(args.num_steps, desc="GCN", unit="epoch"):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                probs = model.eval()(data.x, data.edge_index).softmax(-1)
            curve.append((epoch + 1, log_likelihood(probs, data.y, data.val_mask)))
            if curve[-1][1] > best[0]:
                best = curve[-1][1], probs
    return best[1], curve


def settings(args, name) -> dict:
    """Weight decay as for the GCN, but not on omega, which it would switch off."""
    decay = 0.0 if name.endswith("omega") else args.weight_decay
    return {"lr": args.lr, "weight_decay": decay}


def train_nmm(data: Data, args):
    """The NMM on the same backbone, weights of the best validation likelihood."""
    hood = Neighborhood(data.edge_index, data.num_nodes)
    attention = GCN(data.num_features, 64, num_layers=1)
    network = NMMNetwork(backbone(data), attention, num_classes=CLASSES, floor=0.1)
    program = AmortizedNMM(hood, network.to(args.device), estimator=args.estimator)
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True)
    svi = SVI(program.model, program.guide, Adam(partial(settings, args)), elbo)
    inputs, best, curve = (data.x, data.edge_index), (-torch.inf, None), []
    for epoch in trange(args.num_steps, desc="NMM", unit="epoch"):
        svi.step(*inputs, y=data.y, observed=data.train_mask)
        if epoch % 5 == 4:
            post = program.mixture(*inputs).condition(data.y, data.train_mask, num_samples=8)
            curve.append((epoch + 1, log_likelihood(post.marginals(), data.y, data.val_mask)))
            if curve[-1][1] > best[0]:
                best = curve[-1][1], copy.deepcopy(network.state_dict())
    network.load_state_dict(best[1])
    return program.mixture(*inputs), curve


def pair_log_likelihood(table, pairs, y) -> float:
    return table[torch.arange(pairs.shape[1]), y[pairs[0]], y[pairs[1]]].log().mean().item()


def scores(probs, data: Data, pairs, table=None) -> dict:
    """Test metrics; without a table, pairs are taken as independent."""
    y, test = data.y, data.test_mask
    product = probs[pairs[0], :, None] * probs[pairs[1], None, :]
    return {
        "accuracy": (probs.argmax(-1) == y)[test].double().mean().item(),
        "log-lik.": log_likelihood(probs, y, test),
        "ECE": multiclass_calibration_error(probs[test], y[test], CLASSES, n_bins=15).item(),
        "pair log-lik.": pair_log_likelihood(product if table is None else table, pairs, y),
    }


def main(args) -> dict:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    data = load(args.seed).to(args.device)
    probs, gcn_curve = train_gcn(data, args)
    mix, nmm_curve = train_nmm(data, args)

    post = mix.condition(data.y, data.train_mask, num_samples=64)
    inside = data.test_mask[data.edge_index].all(0) & (data.edge_index[0] < data.edge_index[1])
    pairs = data.edge_index[:, inside]
    marginals = post.marginals()
    results = {
        "GCN": scores(probs, data, pairs),
        "NMM, own product": scores(marginals, data, pairs),
        "NMM on the GCN": scores(marginals, data, pairs, post.pairwise(pairs)),
    }
    names = list(results["GCN"])
    print(
        f"{'test, ' + str(int(data.test_mask.sum())) + ' digits':18}", *(f"{n:>14}" for n in names)
    )
    for name, row in results.items():
        print(f"{name:18}", *(f"{row[n]:>14.4f}" for n in names))
    print(f"pairs are the {pairs.shape[1]} edges inside the test set")
    if args.output:
        draw(args, data, mix, probs, marginals, gcn_curve, nmm_curve)
    return results


def reliability(axis, probs, y, color, label) -> None:
    confidence, prediction = probs.max(-1)
    hit = (prediction == y).to(probs.dtype)
    # Most digits are near-certain: bins of equal width in log-odds, with at least 20 digits.
    odds = torch.logit(confidence.clamp(max=1 - 1e-6))
    bins = (odds / 1.5).floor().clamp(0, 6)
    parts = [bins == b for b in range(7) if (bins == b).sum() >= 20]
    x = torch.stack([confidence[part].mean() for part in parts]).logit(1e-6)
    share = torch.stack([hit[part].mean() for part in parts])
    error = (share * (1 - share) / torch.stack([part.sum() for part in parts])).sqrt()
    low, high = (share - error).clamp(0.3).logit(1e-4), (share + error).logit(1e-4)
    share = share.logit(1e-4)
    axis.errorbar(x, share, (share - low, (high - share).clamp(min=0)), fmt="o-", ms=5, capsize=2,
                  color=color, label=label)  # fmt: skip


def draw(args, data, mix, gcn, nmm, gcn_curve, nmm_curve) -> None:
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    data, gcn, nmm = data.cpu(), gcn.cpu(), nmm.cpu()
    test, y = data.test_mask, data.y
    left.plot([0, 10], [0, 10], color="0.7", lw=1)
    reliability(left, gcn[test], y[test], GCN_COLOR, "GCN")
    reliability(left, nmm[test], y[test], NMM_COLOR, "NMM on the GCN")
    ticks = torch.tensor([0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 0.9999])
    names = [f"{t:g}" for t in [0.5, 0.7, 0.9, 0.97, 0.99, 0.999]] + [">0.9999"]
    left.set_xticks(ticks.logit(), names, fontsize=8)
    left.set_yticks(ticks.logit(), [*names[:-1], "1"], fontsize=8)
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(-0.3, 10.2), ylim=(-0.3, 9.7))
    left.set_title("Reliability on the test set, ± one standard error")
    left.legend(frameon=False, loc="lower right")
    for curve, color, label in (
        (gcn_curve, GCN_COLOR, "GCN"),
        (nmm_curve, NMM_COLOR, "NMM on the GCN"),
    ):
        middle.plot(*zip(*curve, strict=True), color=color, label=label)
    middle.set(xlabel="epoch", ylabel="nats per node", title="Validation log-likelihood")
    middle.set_ylim(bottom=max(-0.7, min(v for _, v in gcn_curve + nmm_curve)))
    middle.legend(frameon=False)

    # The least certain test digit, and where its attention goes.
    hood = mix.hood
    node = int(nmm.max(-1).values.masked_fill(~test, 2.0).argmin())
    row = slice(int(hood.ptr[node]), int(hood.ptr[node + 1]))
    order = mix.attention[row].argsort(descending=True)
    sources = hood.source[row][order][:9].tolist()
    right.axis("off")
    best = nmm[node].topk(2)
    pair = ", ".join(f"{k}: {p:.2f}" for p, k in zip(*map(torch.Tensor.tolist, best), strict=True))
    right.set_title(
        f"Attention of the least certain test digit\np({pair}), true label {int(y[node])}"
    )
    others = [j for j in sources if j != node]
    sources = others + [node] * (node in sources)
    weight = mix.attention[row][
        torch.stack([(hood.source[row] == j).nonzero()[0, 0] for j in sources])
    ]
    angle = torch.arange(len(sources)) * 2 * torch.pi / len(others) + 0.3
    places = torch.stack([angle.cos(), angle.sin()], -1) * 1.15
    for j, where, w in zip(sources, places.tolist(), weight.tolist(), strict=False):
        x0, y0 = (0.0, 0.0) if j == node else where
        size = 0.3 if j == node else 0.2
        right.plot([0, x0], [0, y0], color=NMM_COLOR, lw=25 * w, alpha=0.6, zorder=1)
        image = data.x[j].view(8, 8)
        box = (x0 - size, x0 + size, y0 - size, y0 + size)
        right.imshow(image, cmap="gray_r", extent=box, zorder=2)
        known = f", known {int(y[j])}" if data.train_mask[j] else ""
        text = f"itself {w:.2f}" if j == node else f"{w:.2f}{known}"
        right.text(x0, y0 - size - 0.03, text, ha="center", va="top", fontsize=8, zorder=3,
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    right.set(xlim=(-1.5, 1.5), ylim=(-1.55, 1.5), aspect="equal")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)
    plt.close(figure)
    print(f"picture: {args.output}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--estimator", default="later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("output/digits.png"))
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
