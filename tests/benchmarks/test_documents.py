# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documents hold the tables that the stored results give."""

from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def test_tables_of_the_documents_are_those_of_the_results():
    """Every table between markers is what the committed results give, and all have a place."""
    report = import_module("benchmarks.report")
    texts = {path: path.read_text() for path in report.DOCUMENTS}
    tables = report.main(report.parser().parse_args([]))
    for path, text in report.written(texts, tables).items():
        for name in report.markers(text):
            assert report.insert(texts[path], name, tables[name]) == texts[path], name
        assert text == texts[path]
    with pytest.raises(ValueError, match="0 of the documents have markers <!-- other -->"):
        report.written(texts, tables | {"other": ""})
    with pytest.raises(ValueError, match="no table is called strips"):
        report.written(texts, {k: v for k, v in tables.items() if k != "strips"})
