# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of stored rows: pages hold them, and new names appear."""

from functools import cache

import pytest

from benchmarks import report
from benchmarks.shared.records import RESULTS, read


@cache
def stored(name):
    return read(RESULTS / f"{name}.jsonl")


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
    with pytest.raises(ValueError, match="no table is called devices"):
        report.written(texts, {k: v for k, v in tables.items() if k != "devices"})


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
    for hidden in ("<!-- t | lines: none --> (rows/t.csv)", "no markers (rows/t.csv)"):
        files = report.whole({page: hidden}, {"t": bars})
        assert [*files.values()] == ["p(c | d),m\n1,2\n"]
    assert report.written({page: "(rows/t.csv)"}, {"t": bars}) == {page: "(rows/t.csv)"}


@pytest.mark.parametrize(
    ("make", "name", "task", "field"),
    [
        (report.nodes.gains_in_short, "nodes", "pairs", "method"),
        (report.on_top.edge_scores, "calibration", "edges", "method"),
        (report.fields.large_rivals, "fields_compared", "plain", "method"),
        (report.latent.cortex, "annotators", "cortex", "method"),
        (report.links.link_rivals, "links", "compare", "guide"),
        (report.images.denoising_validated, "images", "train", "method"),
        (report.scale.draws, "speed", "draw", "code"),
        (report.scale.gradient_variance, "gradient_variance", None, "estimator"),
    ],
)
def test_rows_under_new_names_appear(make, name, task, field):
    """Nothing is looked up in a list of what is known."""
    row = next(row for row in stored(name) if row.get("task") == task)
    assert "another one" in make({name: [*stored(name), row | {field: "another one"}]})


@pytest.mark.slow
@pytest.mark.parametrize("room", [room for room in report.ROOMS if hasattr(room, "FIGURES")])
def test_figures_are_drawn(room, tmp_path):
    files = {path.stem: stored(path.stem) for path in RESULTS.glob("*.jsonl")}
    for make in room.FIGURES.values():
        make(files).savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
