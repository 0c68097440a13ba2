# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of stored rows: pages hold them, no row is hidden, and new names appear."""

import json
from contextlib import suppress
from functools import cache

import pytest
from stored import few, kind, stored

from benchmarks import report
from benchmarks.shared.tables import Paired

#: Files that the tables of a room read. Rows of ``calibration`` are the room's on_top.
FILES = {
    report.nodes: ("nodes", "nodes_rivals", "repelling", "calibration"),
    report.on_top: ("calibration",),
    report.tabular: ("tabular",),
    report.fields: ("fields", "fields_compared", "deviations"),
    report.latent: ("hidden", "annotators"),
    report.crowds: ("crowds",),
    report.links: ("links", "deviations"),
    report.images: ("images",),
    report.scale: ("gradient_variance", "samples", "speed", "device", "large", "epochs",
                   "tightness", "batches", "inference"),
}  # fmt: skip
#: Rows of another task, without which a table of the task cannot be made.
NEEDED = {"cortex": "halves"}


def test_pages_hold_the_tables_of_the_stored_rows(capsys):
    texts = {path: path.read_text() for path in report.PAGES}
    tables = report.main([])
    assert capsys.readouterr().out.count("\n| ---") == len(tables)
    for path, text in report.written(texts, tables).items():
        for name in report.markers(text):
            assert report.insert(texts[path], name, tables[name]) == texts[path], name
        assert text == texts[path]
    files = report.whole(texts, tables)
    assert {path: path.read_text() for path in files} == files
    assert {*(report.DOCS / "results" / "rows").glob("*")} == {*files}
    with pytest.raises(ValueError, match="0 pages have the markers <!-- other -->"):
        report.written(texts, tables | {"other": ""})
    with pytest.raises(ValueError, match="no table is called strips"):
        report.written(texts, {k: v for k, v in tables.items() if k != "strips"})


def test_a_page_shows_an_excerpt_and_links_the_whole_table():
    table = "| a | b | c |\n| --- | ---: | ---: |\n| one | 1 | x, y |\n| two | 2 | z |"
    marked = "<!-- t | lines: ^one|three | columns: a, c -->\nold\n<!-- end of t -->"
    shown = report.insert(marked, "t", table).split("\n")[1:-1]
    assert shown == ["| a | c |", "| --- | ---: |", "| one | x, y |"]
    page = report.DOCS / "results" / "page.md"
    with pytest.raises(ValueError, match=r"page.md shows an excerpt of t: link rows/t.csv"):
        report.whole({page: marked}, {"t": table})
    files = report.whole({page: f"{marked} [all](rows/t.csv)"}, {"t": table})
    assert files == {page.parent / "rows" / "t.csv": 'a,b,c\none,1,"x, y"\ntwo,2,z\n'}
    with pytest.raises(ValueError, match="no line of the table a b c has four"):
        report.insert(marked.replace("^one|three", "four"), "t", table)
    with pytest.raises(ValueError, match=r"the table a \| b \| c has no column d"):
        report.insert(marked.replace("a, c", "a, d"), "t", table)
    commas = "| a | a, m | m |\n| --- | --- | --- |\n| 1 | 2 | 3 |"
    assert report.excerpt(commas, columns="m, a, m, a").split("\n")[2] == "| 3 | 2 | 1 |"
    alone = "<!-- t | lines: none -->\n<!-- end of t -->"
    assert report.insert(alone.replace("\n", "\nold\n"), "t", table) == alone
    twice = "| a | b | a |\n| --- | --- | --- |\n| 1 | 2 | 3 |"
    assert report.excerpt(twice, columns="a, a").split("\n")[2] == "| 1 | 3 |"
    bars = "| p(c \\| d) | m |\n| --- | --- |\n| 1 | 2 |"
    assert report.excerpt(bars, columns="m, p(c \\| d)").split("\n")[2] == "| 2 | 1 |"
    assert [
        *report.whole({page: "<!-- t | lines: none --> (rows/t.csv)"}, {"t": bars}).values()
    ] == ["p(c | d),m\n1,2\n"]


class Watched(dict):
    """Files by name, and the names of those that a table reads."""

    read = frozenset()

    def __getitem__(self, name):
        self.read |= {name}
        return super().__getitem__(name)


@cache
def read_by(make):
    files = Watched({name: few(name)[:3] for names in FILES.values() for name in names})
    text_of(make, files)
    return files.read


def parts(room, name):
    """Rows of a file by their task, if tables of the room show them."""
    tasks, own = {}, {report.fields: "fields", report.links: "links"}.get(room)
    for row in few(name):
        if name != "deviations" or row["task"] == own:
            tasks.setdefault(row.get("task"), []).append(row)
    return tasks


def text_of(make, files):
    with suppress(Exception):  # no row is left, or none of the table's task
        return make(files)
    return ""


def samples(rows):
    """Rows of some kinds, by kind: every value that names a row is in one of them."""
    kinds, seen = {}, set()
    for row in rows:
        values = json.loads(kind(row)).items()
        kinds.setdefault(kind(row), [])
        if not seen.issuperset(values) or kinds[kind(row)]:
            seen.update(values)
            kinds[kind(row)].append(row)
    return [rows for rows in kinds.values() if rows]


#: Their tables need more than two rows of a kind. The pages, which hold all, are compared.
WHOLE = {("links", "attention"), ("deviations", "links"), ("gradient_variance", None)}
WHOLE |= {("epochs", None)}
CASES = [
    pytest.param(room, name, task, id=f"{name} {task}")
    for room, names in FILES.items() for name in names for task in parts(room, name)
    if (room, name) != (report.nodes, "calibration") and (name, task) not in WHOLE
]  # fmt: skip


@pytest.mark.parametrize(("room", "name", "task"), CASES)
def test_every_row_is_shown(room, name, task, monkeypatch):
    """Without the rows of a kind, a table differs."""
    monkeypatch.setattr(Paired, "p", 1.0)  # for speed
    every = parts(room, name)
    kinds, more = samples(every[task]), every.get(NEEDED.get(task), [])
    others = {other: few(other) for other in FILES[room]}

    def files(*left_out):
        rows = [row for part in kinds if part not in left_out for row in part]
        return others | {name: rows + more}

    makers = [make for make in room.TABLES if name in read_by(make)]
    whole = {make: text for make in makers if "| ---" in (text := text_of(make, files()))}
    assert whole
    for part in kinds[:: 1 + len(kinds) // 8]:  # not all, for speed
        assert any(text_of(make, files(part)) != text for make, text in whole.items()), part[0]


@pytest.mark.parametrize(
    ("room", "name", "task", "field"),
    [
        (report.nodes, "nodes", "pairs", "method"),
        (report.on_top, "calibration", "splits", "method"),
        (report.fields, "fields_compared", "plain", "method"),
        (report.latent, "annotators", "simulated", "graph"),
        (report.links, "links", "compare", "guide"),
        (report.images, "images", "test", "method"),
        (report.scale, "speed", "draw", "code"),
        (report.scale, "gradient_variance", None, "estimator"),
    ],
)
def test_rows_under_new_names_appear(room, name, task, field):
    """Nothing is looked up in a list of what is known."""
    rows = parts(room, name)[task]
    files = {other: few(other) for other in FILES[room]}
    files[name] = [*rows[:40], rows[0] | {field: "another one"}]
    assert any("another one" in text_of(make, files) for make in room.TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("room", [room for room in FILES if hasattr(room, "FIGURES")])
def test_figures_are_drawn(room, tmp_path):
    files = {name: stored(name) for name in FILES[room]}
    for make in room.FIGURES.values():
        make(files).savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
