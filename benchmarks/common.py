# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What all benchmarks need: stored measurements, arguments, time and memory, a graph, Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import psutil
import pyro
import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
#: Names in tables; what else is stored comes after them, as it is stored.
GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast"}
GRAPHS |= {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def read(path: Path) -> list[dict]:
    """Lines of JSON; none of a file that is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pick(rows: list[dict], **key) -> list[dict]:
    """Rows with these values; a value of ``None`` is also that of a row without the field."""
    return [row for row in rows if all(row.get(k) == v for k, v in key.items())]


def grouped(rows: list[dict], *fields: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some fields, in the order of their first row."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return found


def chosen(rows: list[dict], quality: Callable, num_splits: int = 1, **key) -> dict:
    """Settings of the search's best trial, by ``quality`` of its rows."""
    trials = grouped(pick(rows, task="search", **key), "trial")
    if not trials or min(map(len, trials.values())) < num_splits:
        raise ValueError(f"search of {' '.join(key.values())} has not been run to its end")
    return max(trials.values(), key=quality)[0]["settings"]


class Records:
    """
    A file with a line of JSON for each measurement, so that a run may be interrupted; without a
    path, they are only printed.
    """

    def __init__(self, path: Path | None) -> None:
        if path and path.exists() and not (text := path.read_text()).endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1])  # without a line that was cut short
        self.path, self.rows = path, read(path) if path else []

    def missing(self, **key) -> Iterator[dict]:
        """
        Keys that no row has yet. Lists, tuples and ranges stand for each of their values, the
        first field in the outermost loop; a field that is ``None`` must be absent.
        """
        each = [v if isinstance(v, list | tuple | range) else [v] for v in key.values()]
        for values in itertools.product(*each):
            found = dict(zip(key, values, strict=True))
            if not self.has(**found):
                yield {k: v for k, v in found.items() if v is not None}

    def has(self, **key) -> bool:
        return bool(pick(self.rows, **key))

    def add(self, **row) -> None:
        self.rows.append(row)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(self.line(row), flush=True)

    def line(self, row: dict) -> str:
        """What is printed of a measurement."""
        return str({k: v for k, v in row.items() if k != "curve"})


def arguments(
    doc: str, tasks=(), smoke: str = "", choices: dict | None = None, **options
) -> argparse.ArgumentParser:
    """
    A benchmark's options by name: a default, whose type they have, or a type alone; in a tuple
    with a help text. A list takes one value or more. ``choices`` are those of some options.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if tasks:
        parser.add_argument("tasks", nargs="+", choices=tasks)
    for name, option in options.items():
        value, text = option if isinstance(option, tuple) else (option, None)
        default, kind = (None, value) if isinstance(value, type) else (value, type(value))
        more = {"nargs": "+", "type": type(value[0])} if kind is list else {"type": kind}
        more |= {"default": default, "help": text, "choices": (choices or {}).get(name)}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    if smoke:
        parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def start(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    pyro.enable_validation(False)


def run(args, tasks: dict[str, Callable], *values: Sequence) -> Records:
    """Each of the tasks asked for, with each of the values, the last in the innermost loop."""
    results = Records(args.results)
    for task, *each in itertools.product(args.tasks, *values):
        tasks[task](args, results, *each)
    return results


class PeakMemory(threading.Thread):
    """Largest resident memory of this process while it runs, read every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.process, self.done = psutil.Process(), threading.Event()
        self.start_bytes = self.peak = self.process.memory_info().rss
        self.start()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self._read()

    def stop(self) -> int:
        """The peak, in bytes."""
        self.done.set()
        self._read()
        return self.peak

    def _read(self) -> None:
        self.peak = max(self.peak, self.process.memory_info().rss)


def cost(makers: dict[str, Callable[[], Callable[[], float]]], repeats: int) -> dict:
    """
    Of two functions that return the seconds of their step: peak memory, each made after the one
    before and with it in memory; then medians of ``repeats`` turns, and of their ratios.
    """
    runs, memory = {}, {}
    for name, make in makers.items():
        runs[name] = make()
        runs[name]()
        watcher = PeakMemory()
        runs[name]()
        memory[name] = watcher.stop() / 2**20
    turns = [[run() for run in runs.values()] for _ in range(repeats)]
    seconds = dict(zip(runs, map(median, zip(*turns, strict=True)), strict=True))
    return {"ratio": median(b / a for a, b in turns), "MiB": memory, "seconds": seconds}


def in_a_process(script: str, *arguments: object):
    """What a script prints in its last line, in a process of its own."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def citation_like(num_nodes: int, num_links: int, seed: int = 0) -> Tensor:
    """
    An undirected graph with hubs, in linear time: every link joins a random node to an
    end of an earlier link or, half of the time, to any earlier node.

    :return: ``edge_index`` of shape ``(2, 2 * num_links)`` with both directions.
    """
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


def table(head: str, rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """In Markdown, the first columns aligned to the left; without rows that have nothing else."""
    align = ["---"] * left + ["---:"] * (head.count(" | ") + 1 - left)
    lines = [" | ".join(row) for row in (align, *rows) if any(row[left:])]
    return "\n".join(f"| {line} |" for line in (head, *lines))


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of 99 characters."""
    whole = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(text, 99, subsequent_indent=indent, **whole)
