# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The site loads nothing from another host. Sphinx itself ends a build at a link to nowhere.

Tests of built pages need ``make docs``, which runs them after a build.
"""

import re

import pytest
from documents import DOCUMENTS, RESULTS, ROOT, TUTORIALS, Page, elsewhere, in_css

SITE = ROOT / "docs" / "_build" / "html"
STATIC = sorted((ROOT / "docs" / "_static").iterdir())
built = pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site")


def pages():
    """Built pages by path; what MathJax and other extensions ship in _static are none."""
    found = {path: path.read_text() for path in SITE.rglob("*.html") if "_static" not in path.parts}
    return {path: Page(html) for path, html in found.items()}


def test_resources_on_another_host_are_found():
    page = Page(
        """
        <link rel="stylesheet" href="https://a.org/x.css"><link rel="next" href="https://b.org">
        <script src="//c.org/x.js"></script><img src="local.png"><a href="https://d.org">d</a>
        <style>@import "http://e.org/x.css"; p { background: url('https://f.org/x.png') }</style>
        <p id="here" style="background: url(https://g.org/x.png)"></p>
        """
    )
    hosts = [re.search(r"//(\w)\.org", address)[1] for address in elsewhere(page.resources)]
    assert hosts == ["a", "c", "e", "f", "g"]


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_page_loads_nothing_from_another_host(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)", text) + re.findall(r":img-top: (\S+)", text)
    assert not elsewhere(pictures + Page(text).resources)


@pytest.mark.parametrize("path", STATIC, ids=lambda path: path.name)
def test_own_styles_and_scripts_load_nothing_from_another_host(path):
    text = path.read_text()
    assert not elsewhere(in_css(text) + re.findall(r"['\"`]((?:https?:)?//[^'\"`]+)", text))


@built
def test_built_pages_load_nothing_from_another_host():
    found = pages()
    assert len(found) > 40
    for path, page in found.items():
        assert not elsewhere(page.resources), path
    for path in SITE.glob("_static/**/*.css"):
        assert not elsewhere(in_css(path.read_text())), path
    assert (SITE / "_static" / "mathjax" / "tex-chtml.js").exists()
