# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What all benchmarks need: stored measurements, arguments, Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyro
import torch

RESULTS = Path(__file__).parent.parent / "results"
#: Names in tables; what else is stored comes after them, as it is stored.
GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast"}
GRAPHS |= {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
EPILOG = """
Each measurement appends a line to --results, and what is there is not measured again, so that a run
may be interrupted. benchmarks/report.py makes the tables and figures of these files.
"""


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
        raise ValueError(
            f"search of {' '.join(map(str, key.values()))} has not been run to its end"
        )
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
        print({k: v for k, v in row.items() if k != "curve"}, flush=True)


def arguments(doc: str, choices: dict | None = None, **options) -> argparse.ArgumentParser:
    """
    Options by name: a default, whose type they have, or a type alone; in a tuple with a help text.
    A list takes one value or more. ``choices`` are those of some options.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        value, text = option if isinstance(option, tuple) else (option, None)
        default, kind = (None, value) if isinstance(value, type) else (value, type(value))
        more = {"nargs": "+", "type": type(value[0])} if kind is list else {"type": kind}
        more |= {"default": default, "help": text, "choices": (choices or {}).get(name)}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser


def started(argv, doc: str, tasks=(), smoke: dict | None = None, **options) -> argparse.Namespace:
    """
    The arguments of a benchmark, with its threads set. ``smoke`` are the values that options have
    under ``--smoke``, a run of everything in small, which is not stored; what is given besides
    counts more.
    """
    parser = arguments(doc, threads=1, **options)
    if tasks:
        parser.add_argument("tasks", nargs="+", choices=tasks)
    parser.add_argument("--smoke", action="store_true", help="everything in small, not stored")
    parser.epilog = EPILOG
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(**{"results": None} | (smoke or {})))
    start(args.threads)
    return args


def start(threads: int) -> None:
    torch.set_num_threads(threads)
    pyro.enable_validation(False)


def run(argv, doc: str, tasks: Iterable[Callable], **options) -> Records:
    """The tasks that are asked for, functions of arguments and of what has been measured."""
    named = {task.__name__: task for task in tasks}
    args = started(argv, doc, tuple(named), **options)
    results = Records(args.results)
    for name in args.tasks:
        named[name](args, results)
    return results


def store(path: Path | None, rows: list[dict]) -> None:
    """All rows of a run, instead of those of the last one."""
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def table(head: str, rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """In Markdown, the first columns aligned to the left; without rows that have nothing else."""
    align = ["---"] * left + ["---:"] * (head.count(" | ") + 1 - left)
    lines = [" | ".join(row) for row in (align, *rows) if any(row[left:])]
    return "\n".join(f"| {line} |" for line in (head, *lines))


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of 99 characters."""
    whole = {"break_on_hyphens": False, "break_long_words": False}
    joined = re.sub(r" (?=\d+[.)] )", "\0", text)  # a line "1. And" would begin a list
    return textwrap.fill(joined, 99, subsequent_indent=indent, **whole).replace("\0", " ")
