# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Zachary's karate club: 34 members, four communities, one labelled member in each.

The graph is small enough for exact answers. The example compares the bound with the exact
likelihood, and sampled posterior marginals with exact ones.

    python examples/karate.py --output output/karate.png
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial

import matplotlib.pyplot as plt
import networkx as nx
import pyro
from common import options, progress_bar
from plotting import canvas, save
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito, colour-blind safe


def main(args) -> dict:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    data = KarateClub()[0].to(args.device)
    hood = Neighborhood(data.edge_index, data.num_nodes)
    labels = GCN(data.num_features, 16, num_layers=2, out_channels=4, dropout=0.5)
    attention = GCN(data.num_features, 16, num_layers=1)
    network = NMMNetwork(labels, attention, num_classes=4, link="softplus", floor=0.05)
    network = network.to(args.device)
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(num_particles=8, vectorize_particles=True)
    svi = SVI(program.model, program.guide, Adam(partial(settings, args.lr)), elbo)

    inputs, labelled = (data.x, data.edge_index), data.train_mask
    nodes = labelled.nonzero()[:, 0]
    curve = []
    for step in progress_bar(range(args.num_steps), desc="karate"):
        svi.step(*inputs, y=data.y, observed=labelled)
        if step % 5 == 0 or step == args.num_steps - 1:
            mix = program.mixture(*inputs)
            bound = mix.elbo(data.y, labelled, num_samples=256).mean()
            curve.append((step, bound.item(), mix.log_marginal(nodes, data.y[nodes]).item()))

    # Posterior of the unlabelled members: exact, and from samples as on large graphs.
    truth = mix.condition(data.y, labelled)
    post = mix.condition(data.y, labelled, num_samples=256)
    rest = ~labelled
    accuracy = (truth.predict()[rest] == data.y[rest]).double().mean().item()
    error = (truth.marginals() - post.marginals()).abs().max().item()
    _, bound, log_prob = curve[-1]
    choices = int(hood.restrict(labelled).ptr.diff().prod())
    print(f"log p(y) of the 4 labels, exact over {choices} choices  {log_prob:8.4f}")
    print(f"lower bound, mean of 256 samples                   {bound:8.4f}")
    print(f"largest error of a sampled posterior marginal      {error:8.4f}")
    print(f"accuracy on the other {int(rest.sum())} members                   {accuracy:8.4f}")
    if args.output:
        draw(args, data, mix, truth, curve)
    return {"accuracy": accuracy, "bound": bound, "log_prob": log_prob, "error": error}


def settings(lr, name) -> dict:
    """Parameter groups with weight decay on all but omega: decay would switch off its attention."""
    return {"lr": lr, "weight_decay": 0.0 if name.endswith("omega") else 0.02}


def draw(args, data, mix, posterior, curve) -> None:
    figure, (left, right) = canvas(1, 2, (12, 6), width_ratios=(1, 2.1))
    steps, bound, log_prob = zip(*curve, strict=True)
    left.plot(steps, log_prob, color="black", label=r"$\log p(y_\tau)$, exact")
    left.plot(steps, bound, "--", color="#D55E00", label="lower bound, 256 samples")
    gap = max(abs(a - b) for a, b in zip(bound, log_prob, strict=True))
    title = f"Bound and likelihood differ by at most {gap:.4f}"
    left.set(xlabel="SVI step", ylabel="nats", title=title)
    left.legend(frameon=False)

    hood, attention = mix.hood, mix.attention.cpu()
    graph = nx.Graph(data.edge_index.T.tolist())
    place = nx.spring_layout(graph, k=0.5, iterations=500, seed=5)
    place = {i: (1.3 * float(place[i][0]), 1.5 * float(place[i][1])) for i in graph}
    source, target = hood.source.tolist(), hood.target.tolist()
    for j, i, weight in zip(source, target, attention.tolist(), strict=True):
        if i != j and weight > 0.15:
            style = {"arrowstyle": "-|>", "color": "0.25", "connectionstyle": "arc3,rad=0.15"}
            style |= {"linewidth": 4 * weight, "shrinkA": 9, "shrinkB": 12, "mutation_scale": 11}
            right.annotate("", place[j], place[i], arrowprops=style, zorder=1)
    nx.draw_networkx_edges(graph, place, ax=right, edge_color="0.9", width=0.8)
    marginals = posterior.marginals().cpu()
    for i in range(data.num_nodes):
        known = bool(data.train_mask[i])
        ring = plt.Circle(place[i], 0.066, color="black" if known else "white", zorder=2)
        right.add_patch(ring)
        wedges, *_ = right.pie(marginals[i].numpy(), colors=COLORS, radius=0.055, center=place[i])
        for wedge in wedges:
            wedge.set_zorder(3)
        wrong = int(marginals[i].argmax()) != int(data.y[i])
        right.text(*place[i], f"{i}", ha="center", va="center", fontsize=7, zorder=4,
                   fontweight="bold" if wrong else "normal",
                   color="#B00000" if wrong else "black")  # fmt: skip
    handles = [plt.Line2D([], [], marker="o", ls="", color=c, ms=9) for c in COLORS]
    handles += [plt.Line2D([], [], marker="o", ls="", mfc="none", mec="black", mew=2.2, ms=9),
                plt.Line2D([], [], marker="$7$", ls="", color="#B00000", ms=7)]  # fmt: skip
    names = [f"community {k}" for k in range(4)] + ["labelled", "predicted wrongly"]
    right.legend(handles, names, frameon=False, loc="best", fontsize=9)
    x, y = zip(*place.values(), strict=True)
    right.set(xlim=(min(x) - 0.1, max(x) + 0.1), ylim=(min(y) - 0.1, max(y) + 0.1), aspect="equal")
    right.set_title(
        "Posterior marginals (pies) and attention above 0.15 (arrows, to the neighbour)"
    )
    right.axis("off")
    save(figure, args.output)


def parser() -> ArgumentParser:
    return options(__doc__, "karate.png", num_steps=150, lr=0.02, seed=0, device="cpu")


if __name__ == "__main__":
    main(parser().parse_args())
