# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The site loads nothing from another host. Sphinx itself ends a build at a link to nowhere.

The test of built pages needs ``make docs``, which runs it after a build.
"""

import re

import pytest
from documents import DOCUMENTS, RESULTS, ROOT, TUTORIALS, elsewhere

SITE = ROOT / "docs" / "_build" / "html"
STATIC = sorted((ROOT / "docs" / "_static").iterdir())


def test_resources_on_another_host_are_found():
    page = """
        <link rel="stylesheet" href="https://a.org/x.css"><link rel="next" href="https://b.org">
        <script src="//c.org/x.js"></script><img src="local.png"><a href="https://d.org">d</a>
        <style>@import "http://e.org/x.css"; p { background: url('https://f.org/x.png') }</style>
        <p style="background: url(https://g.org/x.png)"></p> ![picture](https://h.org/x.png)
        """
    hosts = [re.search(r"//(\w)\.org", address)[1] for address in elsewhere(page)]
    assert hosts == ["a", "c", "e", "f", "g", "h"]


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *RESULTS, *TUTORIALS, *STATIC], ids=lambda path: path.name
)
def test_page_loads_nothing_from_another_host(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    if path in STATIC:  # a script names what it loads in a string
        assert not re.findall(r"['\"`](?:https?:)?//[^'\"`]+", text)
    assert not elsewhere(text)


@pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site")
def test_built_pages_load_nothing_from_another_host():
    pages = [path for path in SITE.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) > 40
    for path in [*pages, *SITE.glob("_static/**/*.css")]:
        assert not elsewhere(path.read_text()), path
    assert (SITE / "_static" / "mathjax" / "tex-chtml.js").exists()
