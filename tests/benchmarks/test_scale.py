# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of large graphs, on small ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import scale

    torch.set_default_dtype(torch.float)
    return scale


def test_every_query_runs(scale):
    for query in scale.QUERIES:
        row = scale.one_query(query, 200, 1000, 4)
        assert row["nodes"] == 200
        assert row["edges"] <= 1200
        assert 0 <= row["above"] <= row["peak"]
        assert row["seconds"] > 0


@pytest.mark.slow
def test_table(tmp_path):
    path = tmp_path / "speed.jsonl"
    command = [sys.executable, str(FOLDER / "speed.py"), "--tables", "4", "--scale-nodes", "5000"]
    command += ["--queries", "condition", "--results", str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "exponent of time" in out
    assert [json.loads(line)["nodes"] for line in path.read_text().splitlines()] == [500, 5000]
