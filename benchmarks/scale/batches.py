# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Mini-batches against the whole graph: random ones, and cluster-wise ones, which share sources.

    python benchmarks/batches.py training bound --data-root F

Tasks: ``training`` (public split, an NMM on GCN with the settings of ``nodes.py``), ``bound`` (what
the sum over batches loses of the bound and of the likelihood, and what a posterior of each batch's
own known labels is worth, at the parameters of one training on the whole graph) and ``throughput``
(``examples/distributed.py`` with two processes against one; needs the machine for itself). Clusters
are communities by Louvain's method, at two resolutions: fine ones lie side by side in coarse ones.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyro
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import index_to_mask

from benchmarks.nodes.fits import DEFAULT, evaluate, load
from benchmarks.nodes.run import chosen
from benchmarks.shared.common import RESULTS, Records, read, run
from benchmarks.shared.louvain import louvain
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import seed_batch, with_in_degree
from pyro_nmm.guides import SeedLoss
from pyro_nmm.guides.fitting.loop import train
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.backbones import RandomInput

INPUTS = ("x", "edge_index", "edge_weight")
WAYS = ("random", "clusters")
WHOLE = "whole graph"
#: Of the seeds' own neighbourhoods, and of two layers behind them.
HOPS = 3
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "distributed.py"


@cache
def prepared(name: str, root: Path | None) -> tuple[Data, Neighborhood, Tensor]:
    """A graph with dense features and weights of all edges, and its nodes' two communities."""
    data, hood = load(name, root, "cpu")
    data = data.clone()
    data.x = data.x.to_dense()
    groups = torch.stack([louvain(data, resolution) for resolution in (1.0, 16.0)])
    data.edge_index, data.edge_weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    return with_in_degree(data), hood, groups


def settings_of(name: str) -> dict:
    """Those of nodes.py's table: the backbone's own search."""
    rows = read(RESULTS / "nodes.jsonl")
    found = DEFAULT if name == "digits" else chosen(rows, dataset=name, backbone="gcn",
                                                    method="backbone")  # fmt: skip
    return {key: found[key] for key in ("lr", "weight_decay", "dropout", "floor", "gamma")}


def make_network(data: Data, settings: dict) -> NMMNetwork:
    """As nodes.py's, but for normalisation, which is the data's."""
    drop, size = settings["dropout"], data.num_features
    # Few of a bag of words are there at all; PubMed's and the digits' inputs stay whole, as there.
    thin = drop if (data.x != 0).double().mean() < 0.05 else 0.0
    options = {"dropout": drop, "normalize": False}
    labels = GCN(size, 16, 2, out_channels=int(data.y.max()) + 1, **options)
    attention = GCN(size, 64, 1, **options)
    parts = (RandomInput(part, thin) for part in (labels, attention))
    more = {key: settings[key] for key in ("floor", "gamma")}
    return NMMNetwork(*parts, num_classes=int(data.y.max()) + 1, **more)


def cut(nodes: Tensor, size: int, way: str, groups: Tensor) -> Iterator[Tensor]:
    """Nodes in batches: in random order, or cluster after cluster in random order."""
    nodes = nodes[torch.randperm(len(nodes))]
    if way == "clusters":
        for group in groups.flip(0):  # the coarse one last, so that it leads
            place = torch.randperm(int(group.max()) + 1)[group[nodes]]
            nodes = nodes[place.argsort(stable=True)]
    return iter(nodes.split(size))


def fit(key: dict, data: Data, hood: Neighborhood, groups: Tensor, num_epochs: int):
    """The mixture of the best epoch; epochs and steps."""
    pyro.set_rng_seed(key["seed"])
    settings = settings_of(key["dataset"])
    network = make_network(data, settings)
    loss, steps = SeedLoss(network, inputs=INPUTS), 0
    seeds = data.train_mask.nonzero()[:, 0]
    inputs, known = [data[name] for name in INPUTS], (data.y, data.train_mask)

    def batches() -> Iterator[tuple[Data, Tensor | None]]:
        if key["way"] == WHOLE:
            yield data, seeds
            return
        for part in cut(seeds, key["batch_size"], key["way"], groups):
            yield seed_batch(data, part, HOPS), None

    def backward() -> float:
        """An epoch; the loop makes its last step."""
        nonlocal steps
        for number, batch in enumerate(batches()):
            if number:
                optimizer.step()
            optimizer.zero_grad()
            value = loss(*batch)
            value.backward()
            steps += 1
        return value.item()

    def validate() -> tuple[float, float]:
        mix = NeighborMixture(hood, *network(hood, *inputs), validate_args=False)
        probs = mix.condition(*known, num_samples=8).marginals()[data.val_mask]
        y = data.y[data.val_mask]
        hits = (probs.argmax(-1) == y).double().mean().item()
        return hits, mean_log_prob(probs.clamp(min=1e-12), y).item()

    first = [part.network.convs[0] for part in (network.labels, network.attention)]
    decayed = [p for layer in first for p in layer.parameters()]
    rest = [p for p in network.parameters() if all(p is not other for other in decayed)]
    groups_of = [{"params": decayed, "weight_decay": settings["weight_decay"]}, {"params": rest}]
    optimizer = torch.optim.Adam(groups_of, lr=settings["lr"])
    curve = train(network, optimizer, backward, validate, num_epochs=num_epochs, patience=100)
    with torch.no_grad():
        return NeighborMixture(hood, *network(hood, *inputs)), len(curve), steps


def training(args, results: Records) -> None:
    place = {"dataset": args.datasets, "seed": range(args.num_seeds)}
    for size in [None, *args.batch_sizes]:
        each = place | {"way": WHOLE if size is None else list(WAYS), "batch_size": size}
        for key in results.missing(task="training", **each):
            graph = prepared(key["dataset"], args.data_root)
            began = time.process_time()  # the machine does other things too
            mix, epochs, steps = fit(key, *graph, args.num_epochs)
            more = {"epochs": epochs, "steps": steps, "cpu_seconds": time.process_time() - began}
            results.add(**key, **evaluate(mix, graph[0], joint=True), **more,
                        settings=settings_of(key["dataset"]))  # fmt: skip


@cache
def trained(name: str, seed: int, root: Path | None, num_epochs: int) -> NeighborMixture:
    key = {"dataset": name, "seed": seed, "way": WHOLE}
    return fit(key, *prepared(name, root), num_epochs)[0]


def bound(args, results: Records) -> None:
    place = {"dataset": args.datasets, "seed": range(args.num_seeds)}
    for size in [None, *args.parts]:
        each = place | {"way": WHOLE if size is None else list(WAYS), "batch_size": size}
        for key in results.missing(task="bound", **each):
            data, _, groups = prepared(key["dataset"], args.data_root)
            mix = trained(key["dataset"], key["seed"], args.data_root, args.num_epochs)
            pyro.set_rng_seed(key["seed"])
            results.add(**key, **in_parts(mix, data, groups, key["way"], size))


@torch.no_grad()
def in_parts(mix: NeighborMixture, data: Data, groups: Tensor, way: str, size: int | None) -> dict:
    """
    Sums over batches of all nodes, in nats a node: of the bound on all labels and of their
    likelihood, of the same of the training labels, and of the test labels given the training labels
    in the same batch, jointly and node by node.
    """
    every, train_mask, test = torch.arange(data.num_nodes), data.train_mask, data.test_mask
    parts = [every] if size is None else cut(every, size, way, groups)
    names = ("bound", "estimate", "train bound", "train estimate", "joint", "alone", "hits")
    sums = dict.fromkeys(names, 0.0)
    for part in parts:
        mask = index_to_mask(part, data.num_nodes)
        for name, own in (("", mask), ("train ", mask & train_mask)):
            if own.any():
                sums[name + "bound"] += mix.elbo(data.y, own, 32).mean().item()
                sums[name + "estimate"] += mix.log_likelihood(data.y, own).item()
        given, asked = mask & train_mask, mask & test
        if not asked.any():
            continue
        known = given if given.any() else None
        sums["joint"] += mix.log_likelihood(data.y, asked, known).item()
        probs = mix.marginals()
        if known is not None:
            probs = mix.condition(data.y, given, num_samples=64).marginals()
        probs, y = probs[asked].clamp(min=1e-12), data.y[asked]
        sums["alone"] += len(y) * mean_log_prob(probs, y).item()
        sums["hits"] += (probs.argmax(-1) == y).sum().item()
    sizes = {"bound": data.num_nodes, "estimate": data.num_nodes}
    sizes |= dict.fromkeys(("train bound", "train estimate"), int(train_mask.sum()))
    return {name: value / sizes.get(name, int(test.sum())) for name, value in sums.items()}


def throughput(args, results: Records) -> None:
    """Seconds an epoch, from runs of two lengths, so that the start does not count."""
    each = {"dataset": args.datasets, "processes": [1, 2], "repeat": range(args.num_seeds)}
    few, many = args.epochs_timed
    for key in results.missing(task="throughput", **each):
        seconds = [timed(processes, key, args.data_root, n)[1] for n in (few, many)]
        epoch = (seconds[1] - seconds[0]) / (many - few)
        results.add(**key, seconds=epoch, epochs=[few, many], whole=seconds)


def processes(key: dict, root: Path | None, num_epochs: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", key["processes"], EXAMPLE, "--graph", key["dataset"]]
    command += ["--num-epochs", num_epochs] + ([] if root is None else ["--data-root", root])
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def main(argv: list[str] | None = None) -> Records:
    small = {"datasets": ["digits"], "num_epochs": 2, "num_seeds": 1, "batch_sizes": [30]}
    return run(
        argv, __doc__, (training, bound, throughput), smoke=small | {"parts": [600]},
        datasets=["cora", "pubmed"], num_seeds=3, num_epochs=400, batch_sizes=[20],
        parts=[32, 128, 512], epochs_timed=[5, 45], data_root=Path,
        results=RESULTS / "batches.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
