# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM in training: the cost of an epoch, how tight the bound stays, and mini-batches."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import DEFAULT, backbone, chosen, evaluate, load, nmm_network, node_scores
from benchmarks.shared.louvain import louvain
from benchmarks.shared.records import RESULTS, Records, read
from benchmarks.shared.timing import in_turn, timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import inner_edges, random_split, seed_batch, with_in_degree
from pyro_nmm.guides import AmortizedNMM, Consistency, SeedLoss, fit_nmm
from pyro_nmm.guides.fitting import train
from pyro_nmm.metrics import mean_log_prob

INPUTS = ("x", "edge_index", "edge_weight")
WHOLE = "whole graph"
#: Of the seeds' own neighbourhoods, and of two layers behind them.
HOPS = 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


def epochs(args, results: Records) -> None:
    """Milliseconds of an epoch, and ratios to the passes of an NMM's two networks."""
    pyro.set_rng_seed(0)
    for key in results.missing(dataset=args.datasets, backbone=["gcn", "gat", "appnp"]):
        functions = epochs_of(key["backbone"], *load(key["dataset"], args.data_root, "cpu"))
        turns = in_turn(functions, args.repeats + 2)  # the first two warm up
        ms = {name: 1000 * median(seconds[2:]) for name, seconds in turns.items()}
        results.add(**key, ms=ms, ratios=[ms[name] / ms["networks"] for name in list(ms)[2:]])


def epochs_of(kind: str, data: Data, hood: Neighborhood) -> dict[str, Callable[[], float]]:
    """Seconds of gradients and of an optimiser's step, without validation."""
    train_mask, classes = data.train_mask, int(data.y.max()) + 1
    alone, network = backbone(kind, data, classes).train(), nmm_network(kind, data).train()
    optimizers = {module: Adam(module.parameters(), lr=0.01) for module in (alone, network)}
    inputs, consistency = (data.x, data.edge_index), Consistency(data.num_nodes, classes)
    y = data.y[train_mask]
    pyro.clear_param_store()

    def bound(loss: type, **options) -> Callable[[], None]:
        program = AmortizedNMM(hood, network, **options)
        elbo = loss(4, max_plate_nesting=0, vectorize_particles=True)
        programs = program.model, program.guide
        return lambda: elbo.loss_and_grads(*programs, *inputs, y=data.y, observed=train_mask)

    def epoch(module: nn.Module, backward: Callable[[], None]) -> None:
        optimizers[module].zero_grad()
        backward()
        optimizers[module].step()

    how = {
        "backbone": (alone, lambda: cross_entropy(alone(*inputs)[train_mask], y).backward()),
        "networks": (network, lambda: sum(p.sum() for p in network(hood, *inputs)).backward()),
        "NMM": (network, bound(Trace_ELBO)),
        "NMM + consistency": (network, bound(TraceGraph_ELBO, consistency=consistency)),
        "NMM, TraceGraph_ELBO": (network, bound(TraceGraph_ELBO)),
    }
    return {name: lambda parts=parts: timed(epoch, *parts)[1] for name, parts in how.items()}


def tightness(args, results: Records) -> None:
    """Every ten epochs of an NMM-GCN, on 400 pairs of test nodes and on all test nodes."""
    wanted = [key["epoch"] for key in results.missing(epoch=range(0, args.num_epochs + 1, 10))]
    if not wanted:
        return
    pyro.set_rng_seed(10)
    data, hood = load(args.datasets[0], args.data_root, "cpu")
    data = random_split(data, 0.2, 0.1, 0.3, seed=10)
    pairs = inner_edges(data.edge_index, data.test_mask)[:, :400]
    network = nmm_network("gcn", data)

    def watched(every: range) -> Iterator[int]:
        for epoch in every:
            if epoch % 10 == 0:
                with torch.no_grad():
                    mix = NeighborMixture(hood, *network.eval()(hood, data.x, data.edge_index))
                    row = nats(mix, data, pairs)  # also if it is stored: training shares its draws
                if epoch in wanted:
                    results.add(epoch=epoch, **row)
            yield epoch

    number = args.num_epochs + 1
    fit_nmm(network, data, hood, lr=0.02, num_epochs=number, patience=number, progress=watched)


def nats(mix: NeighborMixture, data: Data, pairs: Tensor) -> dict[str, float]:
    """Nats a node: of pairs the exact likelihood and the bound, of the test set estimates."""
    exact = mix.pairwise(pairs)[torch.arange(pairs.shape[1]), *data.y[pairs]].log()
    masks = [index_to_mask(pair, data.num_nodes) for pair in pairs.T]
    bound = torch.stack([mix.elbo(data.y, mask, num_samples=64).mean() for mask in masks])
    estimate = mix.log_likelihood(data.y, data.test_mask, num_particles=256).item()
    elbo = mix.elbo(data.y, data.test_mask, num_samples=32).mean().item()
    found = {"pair exact": exact, "pair bound": bound, "pair gap": exact - bound}
    row, size = {name: x.mean().item() / 2 for name, x in found.items()}, int(data.test_mask.sum())
    return row | {"test bound": elbo / size, "test estimate": estimate / size}


@cache
def prepared(name: str, root: Path | None) -> tuple[Data, Neighborhood, Tensor]:
    """A graph with dense features and edge weights, and its nodes' coarse and fine communities."""
    data, hood = load(name, root, "cpu")
    data = data.clone()
    data.x = data.x.to_dense()
    groups = torch.stack([louvain(data, resolution) for resolution in (1.0, 16.0)])
    data.edge_index, data.edge_weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    return with_in_degree(data), hood, groups


def settings_of(name: str) -> dict:
    """The settings of node classification: the backbone's own search."""
    place = {"dataset": name, "backbone": "gcn", "method": "backbone"}
    found = DEFAULT if name == "digits" else chosen(read(RESULTS / "nodes.jsonl"), **place)
    return {key: found[key] for key in ("lr", "weight_decay", "dropout", "floor", "gamma")}


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


def fit(key: dict, args) -> tuple[NeighborMixture, int, int]:
    """The mixture of the best epoch; epochs and steps."""
    pyro.set_rng_seed(key["seed"])
    data, hood, groups = prepared(key["dataset"], args.data_root)
    settings, loaded = settings_of(key["dataset"]), load(key["dataset"], args.data_root, "cpu")[0]
    options = {name: settings[name] for name in ("floor", "gamma")}
    network = nmm_network("gcn", loaded, {"dropout": settings["dropout"]}, **options)
    for layer in network.modules():
        if isinstance(layer, GCNConv):
            layer.cached = layer.normalize = False  # edges have the whole graph's weights
    loss, seeds, steps = SeedLoss(network, inputs=INPUTS), data.train_mask.nonzero()[:, 0], 0

    def backward() -> float:
        """An epoch; the loop makes its last step."""
        nonlocal steps
        for number, part in enumerate(cut(seeds, key, groups)):
            if number:
                optimizer.step()
            optimizer.zero_grad()
            whole = key["way"] == WHOLE
            value = loss(data, seeds) if whole else loss(seed_batch(data, part, HOPS))
            value.backward()
            steps += 1
        return value.item()

    def mixture() -> NeighborMixture:
        return NeighborMixture(hood, *network(hood, *(data[name] for name in INPUTS)))

    def validate() -> tuple[float, float]:
        post = mixture().condition(data.y, data.train_mask, num_samples=8)
        found = node_scores(post.marginals()[data.val_mask], data.y[data.val_mask])
        return found["accuracy"], -found["nll"]

    first = [part.network.convs[0] for part in (network.labels, network.attention)]
    decayed = [p for layer in first for p in layer.parameters()]
    rest = [p for p in network.parameters() if all(p is not other for other in decayed)]
    decay = {"params": decayed, "weight_decay": settings["weight_decay"]}
    optimizer = Adam([decay, {"params": rest}], lr=settings["lr"])
    length = {"num_epochs": args.num_epochs, "patience": 100}
    curve = train(network, optimizer, backward, validate, **length)
    with torch.no_grad():
        return mixture(), len(curve), steps


def cells(args, results: Records, task: str) -> Iterator[dict]:
    """Keys without a row: of the whole graph, then of batches."""
    each = {"task": task, "dataset": args.datasets, "seed": range(args.num_seeds)}
    yield from results.missing(**each, way=WHOLE)
    for size in args.batch_sizes:
        yield from results.missing(**each, way=["random", "clusters"], batch_size=size)


def training(args, results: Records) -> None:
    """By mini-batches, and on the whole graph."""
    for key in cells(args, results, "training"):
        data, *_ = prepared(key["dataset"], args.data_root)
        began = time.process_time()  # the machine does other things too
        mix, epochs, steps = fit(key, args)
        more = {"epochs": epochs, "steps": steps, "cpu_seconds": time.process_time() - began}
        more["settings"] = settings_of(key["dataset"])
        results.add(**key, **evaluate(mix, data, joint=True), **more)


def bound(args, results: Records) -> None:
    """What sums over batches lose, at the parameters of one training on the whole graph."""
    fitted = cache(lambda name, seed: fit({"dataset": name, "seed": seed, "way": WHOLE}, args)[0])
    for key in cells(args, results, "bound"):
        data, _, groups = prepared(key["dataset"], args.data_root)
        mix = fitted(key["dataset"], key["seed"])
        pyro.set_rng_seed(key["seed"])
        parts = cut(torch.arange(data.num_nodes), key, groups)
        results.add(**key, **in_parts(mix, data, parts))


@torch.no_grad()
def in_parts(mix: NeighborMixture, data: Data, parts: Sequence[Tensor]) -> dict[str, float]:
    """Sums over batches, in nats a node; test labels are given the batch's training labels."""
    y, sums = data.y, defaultdict(float)
    for part in parts:
        mask = index_to_mask(part, data.num_nodes)
        given, asked = mask & data.train_mask, mask & data.test_mask
        for name, own in (("", mask), ("train ", given)):
            if own.any():
                sums[name + "bound"] += mix.elbo(y, own, 32).mean().item()
                sums[name + "estimate"] += mix.log_likelihood(y, own).item()
        if asked.any():
            known = given if given.any() else None
            sums["joint"] += mix.log_likelihood(y, asked, known).item()
            post = mix if known is None else mix.condition(y, known, num_samples=64)
            probs, truth = post.marginals()[asked], y[asked]
            sums["alone"] += len(truth) * mean_log_prob(probs.clamp(min=1e-12), truth).item()
            sums["hits"] += (probs.argmax(-1) == truth).sum().item()
    sizes = {"bound": data.num_nodes, "estimate": data.num_nodes}
    sizes |= dict.fromkeys(("train bound", "train estimate"), int(data.train_mask.sum()))
    return {
        name: value / sizes.get(name, int(data.test_mask.sum())) for name, value in sums.items()
    }


def throughput(args, results: Records) -> None:
    """Seconds an epoch of examples/distributed.py, by two lengths: the start does not count."""
    each = {"dataset": args.datasets, "processes": [1, 2], "repeat": range(args.num_seeds)}
    for key in results.missing(task="throughput", **each):
        whole = [timed(example, key, args.data_root, number)[1] for number in (5, 45)]
        results.add(**key, seconds=(whole[1] - whole[0]) / 40, epochs=[5, 45], whole=whole)


def example(key: dict, root: Path | None, num_epochs: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(key["processes"]), EXAMPLE, "--graph", key["dataset"]]
    command += ["--num-epochs", str(num_epochs)] + ([] if root is None else ["--data-root", root])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
