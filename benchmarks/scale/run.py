# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Training, mini-batches, and all tasks of noise, speed and memory. README.md explains them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import backbone, load, nmm_network
from benchmarks.scale import paths, speed
from benchmarks.scale.speed import seconds
from benchmarks.shared.graphs import inner_edges
from benchmarks.shared.records import Records, command
from benchmarks.shared.timing import timed
from benchmarks.shared.training import (
    Consistency,
    ConsistentNMM,
    train_nmm,
)
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import random_split
from pyro_nmm.guides import AmortizedNMM


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


TASKS = [speed.variance, speed.gradients, speed.marginals, speed.likelihood]
TASKS += [speed.draw, speed.step, speed.growth, speed.device]
TASKS += [speed.scale, epochs, tightness, paths.concentration]
OPTIONS = {"shares": [0.05, 1.0], "samples": ([1, 8], "particles or draws"), "repeats": 30}
OPTIONS |= {"datasets": ["cora", "pubmed"], "sizes": [10**4, 10**5], "parts": [1, 10]}
OPTIONS |= {"num_seeds": 3, "num_epochs": 400, "data_root": Path}
main = command(__doc__, TASKS, **OPTIONS, results=Path)

if __name__ == "__main__":
    main()
