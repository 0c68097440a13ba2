# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What a process of ``test_distributed.py`` does: ``python ranks.py FOLDER NAME ...``, with the
variables that torchrun would set. What each function found is stored in the folder.
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
from pyro.distributions import Normal
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import barabasi_albert_graph

from pyro_nmm.datasets import seed_batch, with_in_degree
from pyro_nmm.fitting import fingerprint
from pyro_nmm.guides import SeedLoss
from pyro_nmm.models import NMMNetwork

WORLD, STEPS = 2, 20
#: Seeds of the steps, the last of which leaves a process without any.
SIZES = [8] * (STEPS - 2) + [5, 1]
#: A run of the example. Of its 90 seeds one is left for the last step of an epoch.
SMALL = "--num-epochs", 2, "--save-every", 1, "--batch-size", 89, "--checkpoint"


def problem(seed=0):
    """A graph, the same everywhere, and a network of this seed."""
    pyro.set_rng_seed(0)  # NumPy's generator, too, which PyG's random graphs come from
    data = Data(x=torch.randn(80, 4), edge_index=barabasi_albert_graph(80, 2))
    data.y = torch.randint(3, (80,))
    torch.manual_seed(seed)
    labels, attention = GraphSAGE(4, 8, 2, out_channels=3, dropout=0.5), GraphSAGE(4, 5, 1)
    network = NMMNetwork(labels, attention, num_classes=3, floor=0.1)
    return with_in_degree(data), SeedLoss(network), torch.optim.Adam(network.parameters(), 0.02)


def seeds_of(step):
    return torch.randperm(80, generator=torch.Generator().manual_seed(step))[: SIZES[step]]


def part(loss, data, step, rank):
    """A process's part of a step, with draws of its own."""
    pyro.set_rng_seed(1 + WORLD * step + rank)
    seeds = seeds_of(step)
    return loss(seed_batch(data, seeds[rank::WORLD], 3), total=len(seeds) / WORLD)


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


def random_numbers(rank):
    """What a plate takes of its elements, with a seed that all share and with one for each."""

    def model():
        with pyro.plate("data", 1000, subsample_size=5) as index:
            pyro.sample("x", Normal(0.0, 1.0))
        return index

    found = {}
    for name, seed in (("shared", 0), ("own", 10 + rank)):
        pyro.set_rng_seed(seed)
        found[name] = model()
    return found


def resumed(rank):
    """The example goes on from broken.pt: how many epochs that file had."""
    example, path = load("examples/distributed.py"), Path(sys.argv[1], "broken.pt")
    args = example.parser().parse_args([*map(str, SMALL), str(path), "--resume"])
    torch.set_default_dtype(torch.float)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    data, done = example.prepare(example.load_graph("digits", None)), torch.load(path)["epochs"]
    dist.barrier()
    example.train(args, example.make_network(args, data), data, rank, WORLD)
    torch.set_default_dtype(torch.double)
    return {"epochs": done}


def fingerprints(rank=0):
    """Lines that name a run of a module with a set and a function."""
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    module.names, module.call, module.dtype = {"a", "b", "c"}, lambda x: x, torch.half
    optimizer = torch.optim.Adam([torch.ones(1)])
    settings = {"function": nn.functional.relu, "x": torch.eye(2).expand(3, 2, 2), "path": iter,
                "narrow": torch.ones(1).bfloat16()}  # fmt: skip
    return dict(fingerprint({"module": module, "optimizer": optimizer}, settings))


def waiting(rank):
    """Steps for ever; the test ends the other process."""
    data, loss, _ = problem()
    wrapped = DistributedDataParallel(loss)
    while True:
        part(wrapped, data, 0, rank).backward()
        Path(sys.argv[1], f"running.{rank}").touch()


if __name__ == "__main__":
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[2:]:
        torch.save(globals()[name](rank), Path(sys.argv[1], f"{name}.{rank}.pt"))
        gc.collect()
    dist.destroy_process_group()
