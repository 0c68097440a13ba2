# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Train node classification on mini-batches, in one process or in several (DistributedDataParallel):

    python examples/distributed.py
    torchrun --nproc_per_node 2 examples/distributed.py --checkpoint output/distributed.pt
    torchrun --nproc_per_node 2 examples/distributed.py --graph cora --data-root FOLDER

The digits come with scikit-learn; cora, citeseer and pubmed are read from --data-root, or
downloaded by PyG. An interrupted run continues with --checkpoint FILE --resume.
"""

from __future__ import annotations

import gc
import os
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pyro
import torch
import torch.distributed as dist
from common import GRAPHS, load_graph, options
from pyro.infer import Trace_ELBO
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import k_hop_subgraph

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import NMMNetwork, nmm

INPUTS = ("x", "edge_index", "edge_weight")
LAYERS = 2
#: Settings that a resumed run must share with the interrupted one.
SETTINGS = ("graph", "batch_size", "num_particles", "lr", "weight_decay", "dropout", "seed")


def start() -> tuple[int, int, torch.device]:
    """Rank of this process, number of processes, and device, from the variables of torchrun."""
    rank, world, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        # If another process has died, waiting ends after a minute.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    return rank, world, device


def prepare(data: Data) -> Data:
    # Degrees of the whole graph: degrees in a batch are too small at its border.
    data.edge_index, data.edge_weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    return data


def make_network(args, data: Data) -> NMMNetwork:
    layer = {"dropout": args.dropout, "normalize": False}
    classes = int(data.y.max()) + 1
    labels = GCN(data.num_features, 16, LAYERS, out_channels=classes, **layer)
    attention = GCN(data.num_features, 64, 1, **layer)
    return NMMNetwork(labels, attention, num_classes=classes, floor=0.1, gamma=2.0)


def seed_batch(data: Data, seeds: Tensor, num_hops: int) -> Data:
    """The seeds, then all nodes within so many hops, with all edges into the hops before the last:
    the batches of ``NeighborLoader``, without a package for it."""
    reached, inner = (
        k_hop_subgraph(seeds, hops, data.edge_index, num_nodes=data.num_nodes)[0]
        for hops in (num_hops, num_hops - 1)
    )
    nodes = torch.cat([seeds, reached[~torch.isin(reached, seeds)]])
    inside = torch.isin(data.edge_index[1], inner)
    batch = data.edge_subgraph(inside).subgraph(nodes)
    batch.batch_size, batch.n_id, batch.e_id = len(seeds), nodes, inside.nonzero()[:, 0]
    return batch


class SeedLoss(nn.Module):
    """Minus the bound on the joint log-likelihood of a batch's seeds, divided by ``total``. The
    batch must have every edge into a seed.
    """

    def __init__(self, network: nn.Module, num_particles: int) -> None:
        super().__init__()
        self.network = network
        self.elbo = Trace_ELBO(num_particles, max_plate_nesting=0, vectorize_particles=True)

    def forward(self, batch: Data, total: float) -> Tensor:
        if not batch.batch_size:
            # Every parameter takes part, or other processes would wait for its gradient.
            return torch.stack([(0 * p).sum() for p in self.parameters()]).sum()
        seeds = torch.arange(batch.num_nodes, device=batch.y.device) < batch.batch_size
        # The model needs the seeds' rows alone; the network sees all edges.
        hood = Neighborhood(batch.edge_index[:, seeds[batch.edge_index[1]]], batch.num_nodes)
        parameters = self.network(hood, *(batch[name] for name in INPUTS))
        given = hood, *parameters, batch.y, seeds
        model, guide = (partial(part, *given, collapsed=True) for part in (nmm, ordered_guide))
        return self.elbo.differentiable_loss(model, guide) / total


def loader(data: Data) -> Callable[[Tensor], Data]:
    """Function from seeds to their batch, with complete hops for the seeds and for each layer."""
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        sampled = NeighborLoader(data, [-1] * (LAYERS + 1))
        return lambda seeds: sampled(seeds) if len(seeds) else seed_batch(data, seeds, 1)
    return partial(seed_batch, data, num_hops=LAYERS + 1)


def run_epoch(step: Callable, seeds: Tensor, args, epoch: int, rank: int, world: int) -> None:
    """Run one epoch: the same number of steps in all processes, each with its share of seeds."""
    # A separate generator gives all processes the same order, whatever they have drawn.
    order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(epoch))
    # Orders, particles and dropout differ by process, and a resumed run repeats them.
    pyro.set_rng_seed(args.seed + 1 + epoch * world + rank)
    for chunk in seeds[order].split(args.batch_size):
        # DistributedDataParallel averages gradients, so the total is seeds per process. A process
        # without seeds in the last chunk has a zero gradient, so that the others need not wait.
        step(chunk[rank::world], total=len(chunk) / world)


def report(network: nn.Module, data: Data) -> dict[str, float]:
    """Scores of the test nodes, given the training labels."""
    hood, test = Neighborhood(data.edge_index, data.num_nodes), data.test_mask
    network.eval()
    with torch.no_grad():
        mix = NeighborMixture(hood, *network(hood, *(data[name] for name in INPUTS)))
    known = mix.condition(data.y, data.train_mask, num_samples=64)
    hits = known.predict()[test] == data.y[test]
    joint = mix.log_likelihood(data.y, test, given=data.train_mask)
    return {"accuracy": hits.double().mean().item(), "nats a node": joint.item() / int(test.sum())}


def train(args, network: NMMNetwork, data: Data, rank: int, world: int) -> None:
    loss: nn.Module = SeedLoss(network, args.num_particles)
    if dist.is_initialized():
        loss = DistributedDataParallel(loss)
    parts = [network.labels, network.attention]
    decayed = {"params": [p for part in parts for p in part.parameters()]}
    groups = [decayed | {"weight_decay": args.weight_decay}, {"params": [network.omega]}]
    optimizer = torch.optim.Adam(groups, lr=args.lr)
    batch_of, seeds = loader(data), data.train_mask.nonzero()[:, 0]

    settings = {name: getattr(args, name) for name in SETTINGS} | {"world": world}
    done = 0
    if args.resume:
        # Only the first process needs the file; it sends the state to the others.
        box = [load_checkpoint(args.checkpoint) if rank == 0 else None]
        if dist.is_initialized():
            dist.broadcast_object_list(box, device=data.y.device)
        if (state := box[0]) is not None:
            if state["settings"] != settings:
                raise ValueError(f"{args.checkpoint} is of {state['settings']}, not {settings}")
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["epochs"]

    def step(share: Tensor, total: float) -> None:
        optimizer.zero_grad()
        loss(batch_of(share), total=total).backward()
        optimizer.step()

    for epoch in range(done, args.num_epochs):
        network.train()
        run_epoch(step, seeds, args, epoch, rank, world)
        last = epoch + 1 == args.num_epochs
        if rank == 0 and args.checkpoint and (last or (epoch + 1) % args.save_every == 0):
            state = {"settings": settings, "epochs": epoch + 1, "network": network.state_dict()}
            save_checkpoint(state | {"optimizer": optimizer.state_dict()}, args.checkpoint)


def main(args) -> dict[str, float] | None:
    """Train, and return the scores in the first process."""
    rank, world, device = start()
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)  # the network's weights are the same everywhere
    data = prepare(load_graph(args.graph, args.data_root)).to(device)
    network = make_network(args, data).to(device)
    train(args, network, data, rank, world)
    if dist.is_initialized():
        # First free the wrapper: destroying the group while it exists may wait for ever. The other
        # processes need not wait for the report.
        gc.collect()
        dist.destroy_process_group()
    if rank > 0:
        return None
    pyro.set_rng_seed(args.seed)
    scores = report(network, data)
    print(f"{args.graph}, {world} processes, {args.num_epochs} epochs: test accuracy "
          f"{scores['accuracy']:.4f}, log p(test | train) {scores['nats a node']:.4f} nats a node",
          flush=True)  # fmt: skip
    return scores


def parser() -> ArgumentParser:
    return options(
        __doc__, None, {"graph": GRAPHS}, graph="digits",
        data_root=(Path, "folder of PyG's Planetoid data"), num_epochs=60,
        batch_size=(32, "seeds a step, of all processes"), num_particles=4, lr=0.02,
        weight_decay=5e-4, dropout=0.5, seed=0,
        checkpoint=(Path, "file, written by the first process"),
        save_every=(10, "epochs"), resume=(False, "continue from --checkpoint"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
