# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pages hold the tables of the stored rows; each room tests that its rows are all shown."""

import re

import pytest

from benchmarks import report


def test_pages_hold_the_tables_of_the_stored_rows(capsys):
    texts = {path: path.read_text() for path in report.PAGES}
    tables = report.main(report.parser().parse_args([]))
    assert capsys.readouterr().out.count("\n| ---") == len(tables)
    for path, text in report.written(texts, tables).items():
        for name in report.markers(text):
            assert report.insert(texts[path], name, tables[name]) == texts[path], name
        assert text == texts[path]
    with pytest.raises(ValueError, match="0 pages have the markers <!-- other -->"):
        report.written(texts, tables | {"other": ""})
    with pytest.raises(ValueError, match="no table is called strips"):
        report.written(texts, {k: v for k, v in tables.items() if k != "strips"})


def test_no_table_needs_more_than_forty_lines():
    for make in (make for room in report.ROOMS for make in room.TABLES):
        code = make.__code__
        lines = [line for _, _, line in code.co_lines() if line]
        assert max(lines) - code.co_firstlineno <= 40, make.__name__


def test_numbers_of_the_head_table_stand_in_tables_of_the_pages():
    """Those with a decimal point; each line of the table links its page."""
    lines = [line for line in report.PAGES[0].read_text().splitlines() if "(results/" in line]
    assert len(lines) > 15
    for line in lines:
        pages = re.findall(r"\((results/.*?\.md)\)", line)
        text = "".join((report.DOCS / page).read_text() for page in pages)
        tables = re.findall(r"^\|.*", text, re.MULTILINE)
        known = set(re.findall(r"\d*\.\d+", " ".join(tables)))
        assert set(re.findall(r"\d*\.\d+", line)) <= known, line
