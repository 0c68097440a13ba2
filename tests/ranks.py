# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What a process of ``test_distributed.py`` does: ``python ranks.py FOLDER``, with the variables that
torchrun would set. What it found is stored in the folder.
"""

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import pyro
import torch
import torch.distributed as dist
from documents import load
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.utils import barabasi_albert_graph

WORLD, STEPS = 2, 20
#: Seeds of the steps, the last of which leaves a process without any.
SIZES = [8] * (STEPS - 2) + [5, 1]
EXAMPLE = load("examples/distributed.py")


def problem(seed=0):
    """A graph, the same everywhere, and a network of this seed."""
    pyro.set_rng_seed(0)  # NumPy's generator, too, which PyG's random graphs come from
    edges = barabasi_albert_graph(80, 2)
    weight = torch.rand(edges.shape[1])
    data = Data(x=torch.randn(80, 4), edge_index=edges, edge_weight=weight)
    data.y = torch.arange(80) % 3
    torch.manual_seed(seed)
    args = EXAMPLE.parser().parse_args([])
    loss = EXAMPLE.SeedLoss(EXAMPLE.make_network(args, data), args.num_particles)
    return data, loss, torch.optim.Adam(loss.parameters(), 0.02)


def part(loss, data, step, rank):
    """A process's part of a step, with draws of its own."""
    pyro.set_rng_seed(1 + WORLD * step + rank)
    generator = torch.Generator().manual_seed(step)
    seeds = torch.randperm(80, generator=generator)[: SIZES[step]]
    return loss(EXAMPLE.seed_batch(data, seeds[rank::WORLD], 3), total=len(seeds) / WORLD)


def gradients(loss):
    return torch.cat([p.grad.flatten() for p in loss.parameters()])


def parameters(loss):
    return torch.cat([p.detach().flatten() for p in loss.parameters()])


def together(rank):
    """Steps under DistributedDataParallel; each process has begun with another network."""
    data, loss, optimizer = problem(seed=rank)
    found, wrapped = {"own start": parameters(loss)}, DistributedDataParallel(loss)
    found["start"] = parameters(loss)
    for step in range(STEPS):
        optimizer.zero_grad()
        part(wrapped, data, step, rank).backward()
        found.setdefault("gradient", gradients(loss).clone())
        optimizer.step()
    return found | {"end": parameters(loss)}


def one_after_the_other():
    """The same in one process: the parts of a step in turn, gradients averaged."""
    data, loss, optimizer = problem()
    found = {"start": parameters(loss)}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (part(loss, data, step, rank) / WORLD).backward()
        found.setdefault("gradient", gradients(loss).clone())
        optimizer.step()
    return found | {"end": parameters(loss)}


if __name__ == "__main__":
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.save(together(rank), Path(sys.argv[1], f"{rank}.pt"))
    gc.collect()
    dist.destroy_process_group()
