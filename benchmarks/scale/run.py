# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Training, mini-batches, and all tasks of noise, speed and memory. README.md explains them."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import backbone, chosen, evaluate, load, nmm_network, node_scores
from benchmarks.scale import calls, paths, speed
from benchmarks.scale.speed import seconds
from benchmarks.shared.graphs import louvain
from benchmarks.shared.records import RESULTS, Records, command, read
from benchmarks.shared.timing import timed
from benchmarks.shared.training import (
    Consistency,
    ConsistentNMM,
    SeedLoss,
    best_epoch,
    train_nmm,
)
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import inner_edges, random_split, seed_batch
from pyro_nmm.guides import AmortizedNMM

INPUTS = ("x", "edge_index", "edge_weight")
WHOLE = "whole graph"
#: The seeds' own neighbourhoods, and two layers behind them.
HOPS = 3


def epochs(args, results: Records) -> None:
    pyro.set_rng_seed(0)
    for key in results.missing(dataset=args.datasets, backbone=["gcn", "gat", "appnp"]):
        functions = epochs_of(key["backbone"], *load(key["dataset"], args.data_root))
        ms = {name: 1000 * time for name, time in seconds(args.repeats, functions, timed).items()}
        results.add(**key, ms=ms, ratios=[ms[name] / ms["networks"] for name in list(ms)[2:]])


def epochs_of(kind: str, data: Data, hood: Neighborhood) -> dict[str, Callable[[], None]]:
    """Gradients and an optimiser's step, without validation."""
    train_mask, classes = data.train_mask, int(data.y.max()) + 1
    alone, network = backbone(kind, data, classes).train(), nmm_network(kind, data).train()
    inputs, consistency = (data.x, data.edge_index), Consistency(data.num_nodes, classes)
    consistent = partial(ConsistentNMM, consistency=consistency)
    y = data.y[train_mask]
    pyro.clear_param_store()

    def bound(loss: type, kind: Callable = AmortizedNMM) -> Callable[[], None]:
        program = kind(hood, network)
        elbo = loss(4, max_plate_nesting=0, vectorize_particles=True)
        programs = program.model, program.guide
        return lambda: elbo.loss_and_grads(*programs, *inputs, y=data.y, observed=train_mask)

    def epoch(optimizer: Adam, backward: Callable[[], None]) -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    first, both = (partial(epoch, Adam(net.parameters(), lr=0.01)) for net in (alone, network))
    return {
        "backbone": partial(first, lambda: cross_entropy(alone(*inputs)[train_mask], y).backward()),
        "networks": partial(both, lambda: sum(p.sum() for p in network(hood, *inputs)).backward()),
        "NMM": partial(both, bound(Trace_ELBO)),
        "NMM + consistency": partial(both, bound(TraceGraph_ELBO, consistent)),
        "NMM, TraceGraph_ELBO": partial(both, bound(TraceGraph_ELBO)),
    }


def tightness(args, results: Records) -> None:
    if not any(results.missing(epoch=range(0, args.num_epochs + 1, 10))):
        return
    pyro.set_rng_seed(10)
    data, hood = load(args.datasets[0], args.data_root)
    data = random_split(data, 0.2, 0.1, 0.3, seed=10)
    pairs = inner_edges(data.edge_index, data.test_mask)[:, :400]
    network = nmm_network("gcn", data)

    def watched(every: range) -> Iterator[int]:
        for epoch in every:
            if epoch % 10 == 0:
                found = network.eval()(hood, data.x, data.edge_index)
                row = nats(NeighborMixture(hood, *found), data, pairs)
                # Stored rows are measured again, because training shares their draws.
                for key in results.missing(epoch=epoch):
                    results.add(**key, **row)
            yield epoch

    number = args.num_epochs + 1
    train_nmm(network, data, hood, lr=0.02, num_epochs=number, patience=number, progress=watched)


@torch.no_grad()
def nats(mix: NeighborMixture, data: Data, pairs: Tensor) -> dict[str, float]:
    """Nats a node: of pairs the exact likelihood and the bound, of the test set estimates."""
    exact = mix.pairwise(pairs)[torch.arange(pairs.shape[1]), *data.y[pairs]].log()
    masks = [index_to_mask(pair, data.num_nodes) for pair in pairs.T]
    bound = torch.stack([mix.elbo(data.y, mask, num_samples=64).mean() for mask in masks])
    found = {"pair exact": exact, "pair bound": bound, "pair gap": exact - bound}
    row, size = {name: x.mean().item() / 2 for name, x in found.items()}, int(data.test_mask.sum())
    estimate = mix.log_likelihood(data.y, data.test_mask, num_particles=256).item() / size
    elbo = mix.elbo(data.y, data.test_mask, num_samples=32).mean().item() / size
    return row | {"test bound": elbo, "test estimate": estimate}


@cache
def prepared(name: str, root: Path | None) -> tuple[Data, Neighborhood, Tensor]:
    """A graph with dense features and edge weights, and its nodes' coarse and fine communities."""
    data, hood = load(name, root)
    data = data.clone()
    data.x = data.x.to_dense()
    groups = torch.stack([louvain(data, resolution) for resolution in (1.0, 16.0)])
    data.edge_index, data.edge_weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    return data, hood, groups


def cut(nodes: Tensor, key: dict, groups: Tensor) -> Sequence[Tensor]:
    """Nodes in batches: in random order, or cluster after cluster in random order."""
    if key["way"] == WHOLE:
        return [nodes]
    nodes = nodes[torch.randperm(len(nodes))]
    if key["way"] == "clusters":
        for group in groups.flip(0):  # the coarse one last, so that it leads
            place = torch.randperm(int(group.max()) + 1)[group[nodes]]
            nodes = nodes[place.argsort(stable=True)]
    return nodes.split(key["batch_size"])


def fit(key: dict, args) -> tuple[NeighborMixture, int]:
    """The mixture of the best epoch, by the settings of node classification; epochs."""
    pyro.set_rng_seed(key["seed"])
    name, searched = key["dataset"], read(RESULTS / "nodes.jsonl")
    settings = chosen(searched, dataset=name, backbone="gcn", method="backbone")
    drop, decay = {"dropout": settings["dropout"]}, settings["weight_decay"]
    options = {option: settings[option] for option in ("floor", "gamma")}
    network = nmm_network("gcn", load(name, args.data_root)[0], drop, **options)
    data, hood, groups = prepared(name, args.data_root)
    for layer in (*network.labels.network.convs, *network.attention.network.convs):
        layer.cached = layer.normalize = False  # edges have the whole graph's weights
    loss, seeds = SeedLoss(network, inputs=INPUTS), data.train_mask.nonzero()[:, 0]
    named = network.named_parameters()  # the first layers alone are decayed
    params = [{"params": p, "weight_decay": decay * (".convs.0." in name)} for name, p in named]
    optimizer = Adam(params, lr=settings["lr"])

    def step(epoch: int) -> None:
        for part in cut(seeds, key, groups):
            whole = key["way"] == WHOLE
            batch = data if whole else seed_batch(data, part, HOPS)
            own = data.train_mask if whole else torch.arange(batch.num_nodes) < len(part)
            optimizer.zero_grad()
            loss(batch, own).backward()
            optimizer.step()

    def mixture() -> NeighborMixture:
        return NeighborMixture(hood, *network(hood, *(data[name] for name in INPUTS)))

    def validate() -> tuple[float, float]:
        post = mixture().condition(data.y, data.train_mask, num_samples=8)
        found = node_scores(post.marginals()[data.val_mask], data.y[data.val_mask])
        return found["accuracy"], -found["nll"]

    curve = best_epoch(network, range(args.num_epochs), step, validate, patience=100)
    with torch.no_grad():
        return mixture(), len(curve)


def cells(args, results: Records, task: str) -> Iterator[dict]:
    """Keys without a row: of the whole graph, then of batches."""
    each = {"task": task, "dataset": args.datasets, "seed": range(args.num_seeds)}
    yield from results.missing(**each, way=WHOLE)
    for size in args.batch_sizes:
        yield from results.missing(**each, way=["random", "clusters"], batch_size=size)


def training(args, results: Records) -> None:
    for key in cells(args, results, "training"):
        data, *_ = prepared(key["dataset"], args.data_root)
        mix, epochs = fit(key, args)
        parts = -(-int(data.train_mask.sum()) // key.get("batch_size", data.num_nodes))
        results.add(**key, **evaluate(mix, data, joint=True), epochs=epochs, steps=epochs * parts)


def bound(args, results: Records) -> None:
    fitted = cache(lambda name, seed: fit({"dataset": name, "seed": seed, "way": WHOLE}, args)[0])
    for key in cells(args, results, "bound"):
        data, _, groups = prepared(key["dataset"], args.data_root)
        mix = fitted(key["dataset"], key["seed"])
        pyro.set_rng_seed(key["seed"])
        results.add(**key, **in_parts(mix, data, cut(torch.arange(len(data.y)), key, groups)))


def in_parts(mix: NeighborMixture, data: Data, parts: Sequence[Tensor]) -> dict[str, float]:
    """Sums over batches, in nats a node; test labels are given the batch's training labels."""
    y, sums, train, test = data.y, Counter(), data.train_mask, data.test_mask
    for mask in (index_to_mask(part, data.num_nodes) for part in parts):
        for name, whole in (("", torch.ones_like(mask)), ("train ", train)):
            if (own := mask & whole).any():
                sums[name + "bound"] += mix.elbo(y, own, 32).mean().item() / int(whole.sum())
                sums[name + "estimate"] += mix.log_likelihood(y, own).item() / int(whole.sum())
        if (asked := mask & test).any():
            known, size = mask & train if (mask & train).any() else None, int(test.sum())
            sums["joint"] += mix.log_likelihood(y, asked, known).item() / size
            post = mix if known is None else mix.condition(y, known, num_samples=64)
            found = node_scores(post.marginals()[asked], y[asked])
            sums["alone"] -= found["nll"] * int(asked.sum()) / size
            sums["hits"] += found["accuracy"] * int(asked.sum()) / size
    return sums


def throughput(args, results: Records) -> None:
    each = {"dataset": args.datasets, "processes": [1, 2], "repeat": range(args.num_seeds)}
    for key in results.missing(task="throughput", **each):
        short, long = (timed(example, key, args.data_root, number)[1] for number in (5, 45))
        results.add(**key, seconds=(long - short) / 40)


def example(key: dict, root: Path | None, num_epochs: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(key["processes"]), Path(__file__).parents[2] / "examples" / "distributed.py"]
    command += ["--graph", key["dataset"], "--num-epochs", str(num_epochs)]
    command += ["--data-root", root] if root else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


TASKS = [speed.variance, speed.gradients, speed.marginals, speed.likelihood]
TASKS += [speed.draw, speed.step, speed.evidence, speed.growth, speed.device]
TASKS += [speed.scale, speed.sizes, epochs, tightness]
TASKS += [training, bound, throughput]
TASKS += [paths.concentration, paths.sweeps, paths.path_growth]
TASKS += [calls.calls]
OPTIONS = {"shares": [0.05, 1.0], "samples": ([1, 8], "particles or draws"), "repeats": 30}
OPTIONS |= {"datasets": ["cora", "pubmed"], "sizes": [10**4, 10**5], "parts": [1, 10]}
OPTIONS |= {"batch_sizes": [20], "num_seeds": 3, "num_epochs": 400, "data_root": Path}
OPTIONS |= {"code": ("now", "a name of the code whose calls are counted")}
main = command(__doc__, TASKS, **OPTIONS, results=Path)

if __name__ == "__main__":
    main()
