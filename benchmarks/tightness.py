# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How tight the bound stays while an NMM-GCN trains, the paper's figure of exact pair marginals:

    python benchmarks/tightness.py --data-root FOLDER

On pairs of test nodes the likelihood is exact; on all test nodes together it is estimated by
sequential Monte Carlo with many particles.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pyro
import torch
from common import arguments, start

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import digits, inner_edges, planetoid, random_split
from pyro_nmm.guides import fit_nmm
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.backbones import gcn


@torch.no_grad()
def measure(network, hood, data, pairs, args) -> dict:
    """Nats per node: of pairs the exact likelihood and the bound, of the test set estimates."""
    mix = NeighborMixture(hood, *network.eval()(hood, data.x, data.edge_index))
    number = torch.arange(pairs.shape[1])
    exact = mix.pairwise(pairs)[number, data.y[pairs[0]], data.y[pairs[1]]].log()
    bound = torch.empty_like(exact)
    for k, pair in enumerate(pairs.T):
        observed = torch.zeros_like(data.test_mask)
        observed[pair] = True
        bound[k] = mix.elbo(data.y, observed, num_samples=64).mean()
    size = int(data.test_mask.sum())
    estimate = mix.log_likelihood(data.y, data.test_mask, num_particles=args.num_particles)
    return {
        "pair exact": exact.mean().item() / 2,
        "pair bound": bound.mean().item() / 2,
        "pair gap": (exact - bound).mean().item() / 2,
        "test bound": mix.elbo(data.y, data.test_mask, num_samples=32).mean().item() / size,
        "test estimate": estimate.item() / size,
    }


def main(args) -> list[dict]:
    if args.smoke:
        args.dataset, args.num_epochs, args.every, args.num_pairs = "digits", 4, 2, 5
    start(args.num_threads)
    pyro.set_rng_seed(args.seed)
    data = digits() if args.dataset == "digits" else planetoid(args.dataset, args.data_root)
    data = random_split(data, 0.2, 0.1, 0.3, args.seed)
    hood = Neighborhood(data.edge_index, data.num_nodes)
    pairs = inner_edges(data.edge_index, data.test_mask)[:, : args.num_pairs]
    features, classes = data.num_features, int(data.y.max()) + 1
    network = NMMNetwork(gcn(features, classes), gcn(features, 64, attention=True),
                         num_classes=classes)  # fmt: skip
    rows = []

    def watch(epochs):
        for epoch in epochs:
            if epoch % args.every == 0:
                rows.append({"epoch": epoch} | measure(network, hood, data, pairs, args))
                print("  ".join(f"{k} {v:.4f}" if k != "epoch" else f"epoch {v:4d}"
                                for k, v in rows[-1].items()))  # fmt: skip
            yield epoch

    fit_nmm(network, data, hood, lr=args.lr, num_epochs=args.num_epochs + 1,
            patience=args.num_epochs + 1, progress=watch)  # fmt: skip
    gap = max(abs(row["pair gap"]) for row in rows)
    rest = max(row["test estimate"] - row["test bound"] for row in rows)
    print(f"largest gaps: {gap:.4f} nats per node of pairs, {rest:.4f} of the test set")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.results:
        args.results.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args, pairs.shape[1], int(data.test_mask.sum()))
    return rows


def draw(rows: list[dict], args, num_pairs: int, num_test: int) -> None:
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axis, first, second, title in (
        (left, "pair exact", "pair bound", f"{num_pairs} pairs of test nodes"),
        (right, "test estimate", "test bound", f"all {num_test} test nodes together"),
    ):
        name = "exact" if first == "pair exact" else f"SMC, {args.num_particles} particles"
        axis.plot(epochs, [row[first] for row in rows], color="#0072B2", lw=3, alpha=0.5,
                  label=name)  # fmt: skip
        axis.plot(epochs, [row[second] for row in rows], "--", color="#D55E00", label="bound")
        axis.set(xlabel="epoch", ylabel="log p(y), nats per node", title=title)
        axis.legend(frameon=False)
    figure.savefig(args.output, dpi=150)
    plt.close(figure)
    print(f"picture: {args.output}")


def parser() -> ArgumentParser:
    return arguments(
        __doc__, (), "seconds, on the digits", {"dataset": ["digits", "cora", "citeseer"]},
        dataset="cora", num_epochs=200, every=(10, "epochs between measurements"), num_pairs=400,
        num_particles=256, lr=0.02, seed=10, num_threads=1, data_root=Path,
        output=Path("output/tightness.png"), results=Path,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
