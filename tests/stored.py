# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Stored rows of the benchmarks, and the lines of the tables that show them."""

import json
import re
from collections import Counter
from functools import cache

from benchmarks.shared.records import RESULTS, read

#: Columns of numbers that name what was measured.
NAMES = "trial labels size number nodes epoch particles draws processes batch_size step ratio "
NAMES += "level share noise coupling strength"
NAMES = NAMES.split()


@cache
def stored(name):
    return read(RESULTS / f"{name}.jsonl")


def kind(row):
    """Everything that names what a row measures, but its seed or split."""
    named = {k: v for k, v in row.items() if isinstance(v, str) or k in NAMES}
    more = {"settings": json.dumps(row["settings"])} if "image" in row else {}
    return json.dumps(named | more)


@cache
def few(name):
    """The first two rows of each kind."""
    kinds = {}
    for row in stored(name):
        kinds.setdefault(re.sub(r'"image": "[^"]*"', "", kind(row)), []).append(row)
    return [row for rows in kinds.values() for row in rows[:2]]


def lines(text):
    """Lines of a table as dictionaries; of headings that are equal the last one."""
    head, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]
                      for line in text.splitlines())  # fmt: skip
    return [dict(zip(head, cells, strict=True)) for cells in body]


def counts(rows):
    """Numbers of rows by task."""
    return Counter(row.get("task") for row in rows)
