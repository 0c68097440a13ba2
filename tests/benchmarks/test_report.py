# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pages hold the tables of the stored rows, and every stored row is in one."""

import json
from functools import cache

import pytest

from benchmarks import report, verdicts
from benchmarks.shared.records import RESULTS
from benchmarks.shared.tables import Paired

#: Names of what is measured; rows that differ in other values alone are repetitions.
NAMES = "split", "coupling", "noise", "share", "ratio", "labels", "settings"


@cache
def files():
    return report.stored(RESULTS)


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


class Asked(dict):
    """Stored rows that note which files a table reads."""

    def __init__(self, *given):
        super().__init__(*given)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


@cache
def readers(name):
    """Tables that read a file, and their texts."""
    found = {}
    for make in (make for room in report.ROOMS for make in room.TABLES):
        asked = Asked(files())
        text = make(asked)
        if name in asked.names:
            found[make] = text
    return found


def kinds(rows):
    """The first row of every kind."""
    found = {}
    for number, row in enumerate(rows):
        names = {k: v for k, v in row.items() if isinstance(v, str | bool) or k in NAMES}
        found.setdefault(json.dumps(names | {"image": ""}, sort_keys=True), number)
    return found.values()


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json*")))
def test_every_row_is_shown(name, monkeypatch):
    """Without a row some table is another one."""
    monkeypatch.setattr(Paired, "p", 1.0)  # for speed
    readers.cache_clear()
    rows, last = files()[name], {}
    for number in kinds(rows):
        row, left = rows[number], files() | {name: rows[:number] + rows[number + 1 :]}
        likely = sorted(readers(name), key=lambda make: make is not last.get(row.get("task")))
        shown = next((make for make in likely if make(left) != readers(name)[make]), None)
        assert shown, row
        last[row.get("task")] = shown


def test_no_table_needs_more_than_forty_lines():
    for make in (verdicts.verdicts, *(make for room in report.ROOMS for make in room.TABLES)):
        code = make.__code__
        lines = [line for _, _, line in code.co_lines() if line]
        assert max(lines) - code.co_firstlineno <= 40, make.__name__
