# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Stored rows of the benchmarks, and the lines of the tables that show them."""

import re
from collections import Counter
from functools import cache

from benchmarks.shared.records import RESULTS, read


@cache
def stored(name):
    return read(RESULTS / f"{name}.jsonl")


def lines(text):
    """Lines of a table as dictionaries; of headings that are equal the last one."""
    head, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]
                      for line in text.splitlines())  # fmt: skip
    return [dict(zip(head, cells, strict=True)) for cells in body]


def counts(rows):
    """Numbers of rows by task."""
    return Counter(row.get("task") for row in rows)
