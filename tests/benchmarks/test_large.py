# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of large graphs, on small ones."""

import pytest
import torch

from benchmarks.scale import large, run


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def test_every_query_runs():
    for query in large.QUERIES:
        row = large.one_query(query, 200, 1000, 4)
        assert row["edges"] <= 1200
        assert 0 <= row["above"] <= row["peak"]
        assert row["seconds"] > 0


@pytest.mark.slow
def test_queries_have_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(large, "QUERIES", {"condition": (2000, 20_000, 4)})
    command = ["scale", "--parts", "1", "100", "--results", str(tmp_path / "speed.jsonl")]
    rows = run.main(command).rows
    assert [row["nodes"] for row in rows] == [2000]
    assert len(run.main(command).rows) == 1


@pytest.mark.slow
def test_stages(tmp_path, monkeypatch):
    """Marginals in blocks are compared inside with those at once."""
    monkeypatch.setattr(large, "in_a_process", lambda threads, function, *args: function(*args))
    command = ["sizes", "--sizes", "500", "--results", str(tmp_path / "large.jsonl")]
    rows = run.main(command).rows
    assert len(run.main(command).rows) == len(rows) == 7
    assert len({row["stage"] for row in rows}) == 7
    assert len({row["edges"] for row in rows}) == 1
