# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Stored measurements, a line of JSON each, and the arguments of the commands that take them."""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyro
import torch

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # Windows, where one process at a time may append
    flock = None

#: Rows by the name of the file that stores them.
Files = dict[str, list[dict]]
RESULTS = Path(__file__).parent.parent / "results"
EPILOG = """
Each measurement appends a line to --results and is not repeated, so a run may be interrupted. Two
processes may share a file. If they measure the same, both store it, so give them different options.
`python -m benchmarks.report` prints the tables of all stored rows.
"""


def read(path: Path) -> list[dict]:
    """Lines of JSON; none of a file that does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, lines: str = "") -> None:
    """Append to a file, without a last line that was cut short; one process at a time."""
    with path.open("ab") as file:
        if flock:
            flock(file, LOCK_EX)
        file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(lines.encode())


def pick(rows: list[dict], **key) -> list[dict]:
    """Rows with these values; ``None`` also matches a row without the field."""
    return [row for row in rows if all(row.get(k) == v for k, v in key.items())]


def chosen(rows: list[dict], quality: Callable, num_splits: int = 1, **key) -> dict:
    """Settings of a search's best trial, by ``quality`` of the trial's rows."""
    trials: dict[int, list[dict]] = {}
    for row in pick(rows, task="search", **key):
        trials.setdefault(row["trial"], []).append(row)
    if not trials or min(map(len, trials.values())) < num_splits:
        raise ValueError(f"search of {' '.join(map(str, key.values()))} has not been finished")
    return max(trials.values(), key=quality)[0]["settings"]


class Records:
    """A file of measurements; without a path, they are only printed."""

    def __init__(self, path: Path | None) -> None:
        if path and path.exists() and not path.read_bytes().endswith(b"\n"):
            append(path)
        self.path, self.rows = path, read(path) if path else []

    def missing(self, **key) -> Iterator[dict]:
        """
        Keys that no row has yet. Lists, tuples and ranges stand for each of their values, the
        first field in the outermost loop; a field that is ``None`` must be absent.
        """
        each = [v if isinstance(v, list | tuple | range) else [v] for v in key.values()]
        for values in itertools.product(*each):
            found = dict(zip(key, values, strict=True))
            if not pick(self.rows, **found):
                yield {k: v for k, v in found.items() if v is not None}

    def add(self, **row) -> None:
        self.rows.append(row)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k != "curve"}, flush=True)


def arguments(doc: str | None, choices: dict | None = None, **options) -> argparse.ArgumentParser:
    """Options by name: a default, often a list, or a type; in a tuple with a help text."""
    parser = argparse.ArgumentParser(
        description=doc, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        value, text = option if isinstance(option, tuple) else (option, None)
        default, kind = (None, value) if isinstance(value, type) else (value, type(value))
        more = {"nargs": "+", "type": type(value[0])} if kind is list else {"type": kind}
        more |= {"default": default, "help": text, "choices": (choices or {}).get(name)}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser


def start(threads: int) -> None:
    torch.set_num_threads(threads)
    pyro.enable_validation(False)


def command(doc: str | None, tasks: Iterable[Callable], **options) -> Callable[..., Records]:
    """The ``main`` of some tasks, which are functions of the arguments and of stored records."""
    named = {task.__name__: task for task in tasks}
    parser = arguments(doc, threads=1, **options)
    parser.add_argument("tasks", nargs="+", choices=named)

    def main(argv: list[str] | None = None) -> Records:
        args = parser.parse_args(argv)
        start(args.threads)
        results = Records(args.results)
        for name in args.tasks:
            named[name](args, results)
        return results

    return main
