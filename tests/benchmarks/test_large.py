# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of large graphs, on small ones."""

import pytest
import torch
from torch_geometric.data import Data

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


def test_parts_of_a_graph(tmp_path, monkeypatch):
    """Eight triangles in a ring: groups are triangles, of which no inner edge is cut."""
    first = 3 * torch.arange(8)
    links = [(first + a, (first + b) % 24) for a, b in ((0, 1), (0, 2), (1, 2), (2, 3))]
    ends = torch.cat([torch.stack(link) for link in links], 1)
    both = torch.cat([ends, ends.flip(0)], 1)
    data = Data(edge_index=both, y=torch.zeros(24), num_nodes=24)
    monkeypatch.setattr(large, "planetoid", lambda name, root: data)
    command = ["cuts", "--datasets", "cora", "--parts", "2"]
    random, groups = run.main([*command, "--results", str(tmp_path / "large.jsonl")]).rows
    assert groups["cut"] <= 16 < random["cut"]
    assert groups["halo"] <= groups["cut"]
    assert groups["largest"] == 12
