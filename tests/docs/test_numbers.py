# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Each number of the README and of the pages of results is the number of the cell it quotes."""

import itertools
import re

import cells
import pytest
from documents import RESULTS, ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *RESULTS]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_each_number_is_that_of_its_cell(path):
    found = [*cells.faults(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_numbers_that_change_places_are_faults(path):
    text = cells.prose(path)
    pairs = list(itertools.pairwise(cells.MEASURED.finditer(text)))
    pairs = [(a, b) for a, b in pairs if a[0] != b[0]]
    for a, b in pairs[:: len(pairs) // 10 + 1]:
        swapped = text[: a.start()] + b[0] + text[a.end() : b.start()] + a[0] + text[b.end() :]
        assert next(cells.faults(path, swapped), ""), f"{a[0]} and {b[0]} may change places"


def test_errors_name_page_number_and_cell():
    (page, *_), text = PAGES, cells.prose(PAGES[0])
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
    missing, *_ = cells.faults(page, text.replace(line.quoted, "98.765"))
    assert missing.startswith(f"{page.name} has no {line.quoted!r} (= {line.source})")
