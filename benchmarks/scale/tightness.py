# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How tight the bound stays while an NMM-GCN trains, the paper's figure of exact pair marginals:

    python benchmarks/tightness.py --data-root FOLDER

On pairs of test nodes the likelihood is exact; on all test nodes together it is estimated by
sequential Monte Carlo with many particles.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pyro
import torch

from benchmarks.shared.common import started, store
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


def draw(rows: list[dict], path: Path, panels: list[tuple[str, str, str, str]]) -> None:
    """Each panel of a title, the column of the truth and its name, and the column of the bound."""
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3.6), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axis, (title, truth, label, bound) in zip(axes, panels, strict=True):
        axis.plot(epochs, [row[truth] for row in rows], "#0072B2", lw=3, alpha=0.5, label=label)
        axis.plot(epochs, [row[bound] for row in rows], "--", color="#D55E00", label="bound")
        axis.set(xlabel="epoch", ylabel="log p(y), nats per node", title=title)
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict]:
    args = started(
        argv, __doc__, smoke={"dataset": "digits", "num_epochs": 4, "every": 2, "num_pairs": 5},
        choices={"dataset": ["digits", "cora", "citeseer"]}, dataset="cora", num_epochs=200,
        every=(10, "epochs between measurements"), num_pairs=400, num_particles=256, lr=0.02,
        seed=10, data_root=Path, output=Path("output/tightness.png"), results=Path,
    )  # fmt: skip
    pyro.set_rng_seed(args.seed)
    data = digits() if args.dataset == "digits" else planetoid(args.dataset, args.data_root)
    data = random_split(data, 0.2, 0.1, 0.3, args.seed)
    hood = Neighborhood(data.edge_index, data.num_nodes)
    pairs = inner_edges(data.edge_index, data.test_mask)[:, : args.num_pairs]
    features, classes = data.num_features, int(data.y.max()) + 1
    labels, attention = gcn(features, classes), gcn(features, 64, attention=True)
    network, rows = NMMNetwork(labels, attention, num_classes=classes), []

    def watched(epochs):
        for epoch in epochs:
            if epoch % args.every == 0:
                rows.append({"epoch": epoch} | measure(network, hood, data, pairs, args))
                print(rows[-1])
            yield epoch

    number = args.num_epochs + 1
    fit_nmm(network, data, hood, lr=args.lr, num_epochs=number, patience=number, progress=watched)
    store(args.results, rows)
    first = f"{pairs.shape[1]} pairs of test nodes", "pair exact", "exact", "pair bound"
    title, name = f"all {int(data.test_mask.sum())} test nodes together", "test estimate"
    second = title, name, f"SMC, {args.num_particles} particles", "test bound"
    draw(rows, args.output, [first, second])
    return rows


if __name__ == "__main__":
    main()
