# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Numbers in prose stand in tables. A page lists its exceptions in a comment of its own."""

import re

import pytest
from documents import RESULTS, ROOT, tables_of

README, ANSWERS = ROOT / "README.md", ROOT / "docs" / "results.md"
NUMBER = r"(?<![\w.])\d*\.\d+(?![\w.]*\w)"


def numbers(text):
    """Decimal fractions, without a leading zero."""
    return {number.lstrip("0") for number in re.findall(NUMBER, text)}


def in_tables(text):
    return numbers(" ".join(re.findall(r"^\|.*", text, re.MULTILINE)))


def in_prose(text):
    for code in (r"```.*?```", r"<!--.*?-->", r"\]\([^)]*\)", r"`[^`]*`", r"https?://\S+"):
        text = re.sub(code, " ", text, flags=re.DOTALL)
    return numbers(" ".join(re.findall(r"^(?!\|).*", text, re.MULTILINE)))


def exceptions(text, place="in no table"):
    return numbers(" ".join(re.findall(rf"<!-- numbers {place}: (.*?) -->", text, re.DOTALL)))


@pytest.mark.parametrize("path", [*RESULTS, ANSWERS], ids=lambda path: path.name)
def test_numbers_of_prose_stand_in_tables_of_the_page(path):
    text, known = path.read_text(), numbers(tables_of(path))
    assert in_prose(text) <= known | exceptions(text)
    assert not exceptions(text) & in_tables(text)


def test_numbers_of_the_readme_stand_in_its_output_or_in_tables_of_the_results():
    text, pages = README.read_text(), "\n".join(path.read_text() for path in RESULTS)
    printed = numbers(" ".join(re.findall(r"```\n.*?```", text, re.DOTALL)))
    known = numbers(" ".join(map(tables_of, RESULTS))) | printed | exceptions(text)
    assert in_prose(text) <= known
    reproduced = text[text.index("## Does the paper") : text.index("## Two commands")]
    assert in_tables(reproduced) <= in_tables(pages) | numbers(pages)


def test_tables_of_the_answers_quote_the_pages_that_they_link():
    text = ANSWERS.read_text()
    paper = exceptions(text, "of the paper")
    for section in text.split("\n## ")[1:]:
        pages = re.findall(r"\((results/.*?\.md)", section)
        known = numbers("\n".join(tables_of(ANSWERS.parent / page) for page in pages))
        assert in_tables(section) <= known | paper, section.splitlines()[0]
