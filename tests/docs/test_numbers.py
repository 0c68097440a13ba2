# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Each number of a page that has a file in ``cells`` equals the cell that it quotes. On other pages of
results, numbers of prose stand in a table of the page, or in a comment of exceptions.
"""

import itertools
import re

import cells
import pytest
from documents import RESULTS, ROOT, tables_of

QUOTING = [ROOT / "README.md", ROOT / "docs" / "results.md"]
QUOTING += [path for path in RESULTS if cells.file_of(path).exists()]
OTHERS = [path for path in RESULTS if path not in QUOTING]
NUMBER = r"(?<![\w.])\d*\.\d+(?![\w.]*\w)"


def numbers(text):
    """Decimal fractions, without a leading zero."""
    return {number.lstrip("0") for number in re.findall(NUMBER, text)}


@pytest.mark.parametrize("path", QUOTING, ids=lambda path: path.name)
def test_each_number_is_that_of_its_cell(path):
    found = [*cells.faults(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_numbers_of_prose_stand_in_tables_of_the_page(path):
    text = path.read_text()
    known, shown = numbers(tables_of(path)), numbers("\n".join(re.findall(r"(?m)^\|.*", text)))
    excepted = numbers(" ".join(re.findall(r"<!-- numbers in no table: (.*?) -->", text)))
    assert numbers(cells.prose(path)) <= known | excepted
    assert not excepted & shown


@pytest.mark.parametrize("path", QUOTING, ids=lambda path: path.name)
def test_numbers_that_change_places_are_faults(path):
    text = cells.prose(path)
    pairs = list(itertools.pairwise(cells.MEASURED.finditer(text)))
    pairs = [(a, b) for a, b in pairs if a[0] != b[0]]
    for a, b in pairs[:: len(pairs) // 10 + 1]:
        swapped = text[: a.start()] + b[0] + text[a.end() : b.start()] + a[0] + text[b.end() :]
        assert next(cells.faults(path, swapped), ""), f"{a[0]} and {b[0]} may change places"


def test_errors_name_page_number_and_cell():
    (page, *_), text = QUOTING, cells.prose(QUOTING[0])
    line = next(q for q in cells.quotes(page) if re.fullmatch(r"[\d.]+ = (.* > ){3,}.*", f"{q}"))
    table, *_, column = line.source.split(" > ")
    for source, fault in {
        f"none > {column}": "no table is called 'none'",
        f"{table} > none > {column}": f"0 rows of {table!r} have 'none'",
        line.source.replace(column, "none"): f"0 columns of {table!r} are 'none'",
        f"{line.source} [99]": "too few numbers",
        "": "no cell and no reason",
    }.items():
        assert fault in cells.Quote(line.quoted, source).fault(), source
    (cell,) = cells.cells_of(line.source)
    assert cells.Quote("98.765", line.source).fault() == f"the cell is {cell!r}"
    (fault,) = cells.faults(page, f"{text} NLL {line.quoted}")
    assert fault.startswith(f"{page.name}, ")
    assert f"{line.quoted}': no line in tests/docs/cells/{page.stem}.txt" in fault
    assert f"\n    {line.quoted} = " in fault
    missing, *_ = cells.faults(page, text.replace(line.quoted, "98.765"))
    assert missing.startswith(f"{page.name} has no {line.quoted!r} (= {line.source})")
