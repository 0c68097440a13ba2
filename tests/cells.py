# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Numbers of a page, and the cells of result tables that they quote. ``tests/docs/cells/PAGE.txt`` has
a line for each number of ``PAGE.md``, in their order. The left side is copied from the page, and
the right side is a cell or the reason why there is none::

    0.516 = calibration > Cora > MLP > StackedNMM > NLL
    81.9 ± 0.7 = accuracy > GCN > backbone > Cora: accuracy, %
    .219 = pooled links > AP > all splits [4]
    0.765 | 0.068 = methods on tables > KEEL > C&S > accuracy & ECE
    66 % = 100 x methods on tables > KEEL > C&S > NMM below it, share of cells
    0.06 = methods on tables > KEEL > classifier > NLL - methods on tables > KEEL > C&S > NLL
    84.3 = the paper's figure

A cell is a table by the name in its marker, labels that one row has, and a column. If the left side
has several numbers, the cell has them in this order; [4] begins at the cell's fourth. Several
columns share them equally. ``A - B`` is a difference of two cells, ``A : B`` a ratio.
"""

import csv
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from documents import RESULTS, ROOT

FOLDER = ROOT / "tests" / "docs" / "cells"
NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+)(?![\w.]*\w)")
#: Numbers that need a line: decimal fractions and percentages.
MEASURED = re.compile(r"(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+|\d*)\.\d+(?![\w.]*\w)|\d+(?= ?%))")
#: What a page says that is no prose.
HIDDEN = r"```.*?```|<!--.*?-->|\]\([^)]*\)|`[^`\n]*`|https?://\S+"
MARKED = r"<!-- (?!end of )([^|\n]*?)(?: \| [^\n]*)? -->\n((?:\|.*\n)*)<!-- end of \1 -->"


def numbers(text):
    return [Decimal(found.replace(",", "")) for found in NUMBER.findall(text)]


def split(row):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@cache
def tables():
    """Rows of cells by table, headings first; also what a page does not show of its table."""
    found = {}
    for path in RESULTS:
        text = path.read_text()
        for name, lines in re.findall(MARKED, text):
            found[name] = [split(line) for line in lines.splitlines()]
    for path in (ROOT / "docs" / "results" / "rows").glob("*.csv"):
        found[path.stem.replace("-", " ")] = [*csv.reader(path.read_text().splitlines())]
    return {
        name: [row for row in rows if set("".join(row)) - {*"-:"}] for name, rows in found.items()
    }


def rows_of(name):
    if name not in tables():
        raise ValueError(f"no table is called {name!r}")
    return tables()[name]


def cells_of(address):
    """Texts of the cells at an address: ``table > label > column``, or several columns with &."""
    name, *labels, columns = (part.strip() for part in address.split(" > "))
    head, *rows = rows_of(name)
    columns, begin = columns.split(" & "), 0
    if any(head.count(column) > 1 for column in columns) and {*labels[-1:]} & {*head}:
        begin = head.index(labels.pop()) + 1
    found = [row for row in rows if {*labels} <= {*row}]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {name!r} have {' > '.join(labels)!r}: one must")
    for column in columns:
        number = head[begin:].count(column)
        if not number or (number > 1 and not begin):
            raise ValueError(
                f"{number} columns of {name!r} are {column!r}, of {' | '.join(head)}: one must, or "
                "one after another column, table > label > column before > column"
            )
        yield found[0][head.index(column, begin)]


def digits(number):
    return max(0, -number.as_tuple().exponent)


def half(number):
    """Half a unit of the last digit: how far a rounded number may be off."""
    return Decimal(5).scaleb(-digits(number) - 1)


def sources(source, count):
    """Value, its error and the text of the cell, for each of some numbers that quote a source."""
    if parts := re.fullmatch(r"(.*) ([-:]) (.*)", source):
        (a, _, text), (b, _, more) = (next(sources(part, 1)) for part in parts.group(1, 3))
        value = a - b if parts[2] == "-" else a / b
        error = half(a) + half(b) if parts[2] == "-" else (half(a) + abs(value) * half(b)) / abs(b)
        yield value, error, f"{text} {parts[2]} {more}"
        return
    factor, address, start = re.fullmatch(r"(?:(\d+) x )?(.*?)(?: \[(\d+)\])?", source).groups()
    texts = [*cells_of(address)]
    each, first = count // len(texts), int(start or 1) - 1
    if each * len(texts) != count:
        raise ValueError(f"{count} numbers cannot be shared by {len(texts)} columns")
    for text in texts:
        found = numbers(text)[first : first + each]
        if len(found) < each:
            raise ValueError(f"the cell is {text!r}, which has too few numbers")
        yield from ((value * int(factor or 1), Decimal(0), text) for value in found)


def agrees(quoted, value, error=Decimal(0), signed=False):
    """Whether a quoted number is a value, of some error, rounded."""
    value = value if signed else abs(value)
    return digits(quoted) <= digits(value) and abs(quoted - value) <= half(quoted) + error


@dataclass(frozen=True)
class Quote:
    """A line of a page's file: numbers of the page, and their source or the reason for none."""

    quoted: str
    source: str

    def __str__(self):
        return f"{self.quoted} = {self.source}"

    @classmethod
    def of(cls, line):
        return cls(*(part.strip() for part in line.split(" = ", 1)))

    def fault(self):
        """What is wrong with the quoted numbers, or an empty text."""
        if " > " not in self.source:
            return "" if self.source else "no cell and no reason"
        found = NUMBER.findall(self.quoted)
        try:
            for number, (value, error, text) in zip(
                found, sources(self.source, len(found)), strict=True
            ):
                signed = number[0] in "+-"
                if not agrees(Decimal(number.replace(",", "")), value, error, signed):
                    return f"the cell is {text!r}"
        except ValueError as error:
            return str(error)
        return ""


def file_of(path):
    """The lines of a page: ``cells/index.txt`` of docs/index.md, ``cells/README.txt``."""
    above = ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT
    return FOLDER / path.relative_to(above).with_suffix(".txt")


def quotes(path):
    lines = file_of(path).read_text().splitlines() if file_of(path).exists() else []
    return [Quote.of(line) for line in lines if line and not line.startswith("#")]


def prose(path):
    """Text of a page in one line, without the tables that are generated."""
    text = re.sub(MARKED, " ", path.read_text())
    text = re.sub(HIDDEN, " ", text, flags=re.DOTALL)
    return " ".join(text.split())


def faults(path, text=None):
    """
    What is wrong with the numbers of a page, or of another ``text`` with the page's lines: a quote
    that is not there, or not what its cell has, and each number that no line quotes.
    """
    text, place = prose(path) if text is None else text, 0
    for quote in quotes(path):
        pattern = rf"(?<![\w.+-]){re.escape(quote.quoted)}(?![\w.]*\w)"
        match = re.compile(pattern).search(text, place)
        if not match:
            after = text[max(0, place - 50) : place]
            yield f"{path.name} has no {quote.quoted!r} (= {quote.source}) after {after!r}"
            continue
        yield from uncited(path, text, place, match.start())
        place = match.end()
        if fault := quote.fault():
            near = text[max(0, match.start() - 50) : place]
            yield f"{path.name}, {near!r}: {quote.source}: {fault}"
    yield from uncited(path, text, place, len(text))


def uncited(path, text, start, end):
    for match in MEASURED.finditer(text, start, end):
        near = text[max(0, match.start() - 60) : match.end()]
        yield f"{path.name}, {near!r}: no line in {file_of(path).relative_to(ROOT)}"
