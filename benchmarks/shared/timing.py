# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How benchmarks measure seconds and memory, and a graph of any size to measure on."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import psutil
import torch
from torch import Tensor

from benchmarks.shared.records import start


def timed(function: Callable, *args, clock: Callable[[], float] = time.perf_counter, **options):
    """What a function returns, and its seconds."""
    began = clock()
    return function(*args, **options), clock() - began


def in_turn(functions: dict[str, Callable[[], float]], repeats: int) -> dict[str, tuple]:
    """What functions return that take turns, so that a busy machine slows all of them equally."""
    turns = [[function() for function in functions.values()] for _ in range(repeats)]
    return dict(zip(functions, zip(*turns, strict=True), strict=True))


def peak_memory(function: Callable, *args, **options):
    """What a function returns, the largest resident memory meanwhile, and its rise, in bytes."""
    memory, done = psutil.Process().memory_info, threading.Event()
    first = peak = memory().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, memory().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        found = function(*args, **options)
    finally:
        done.set()
        thread.join()
    peak = max(peak, memory().rss)
    return found, peak, peak - first


def in_a_process(threads: int, function: Callable, *args):
    """What a function returns, in a new process."""
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, new, start, (threads,)) as pool:
        return pool.submit(function, *args).result()


def citation_like(num_nodes: int, num_links: int, seed: int = 0) -> Tensor:
    """``(2, 2 * num_links)``: an undirected graph with hubs, by links to ends of earlier links."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.arange(1, num_links + 1) % num_nodes
    new[new == 0] = 1
    old = (torch.rand(num_links, generator=generator) * new).long()
    # Following the link that introduced a node to its older end prefers nodes of high degree.
    first = torch.zeros(num_nodes, dtype=torch.long)
    first[new.flip(0)] = old.flip(0)
    old = torch.where(torch.rand(num_links, generator=generator) < 0.5, first[old], old)
    edge_index = torch.stack([new, old])
    return torch.cat([edge_index, edge_index.flip(0)], 1)
