# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of link prediction, in small."""

from importlib import import_module

import pytest
import torch
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_dense_adj


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
def test_benchmark_of_link_prediction(tmp_path):
    benchmark, tables = (
        import_module("benchmarks.links.run"),
        import_module("benchmarks.links.tables"),
    )
    path = tmp_path / "links.jsonl"
    tasks = ["reproduce", "search", "compare", "memberships", "katz", "cost"]
    tasks += ["--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 6 + (2 + 3) + 6 + 1 + 3 + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    found = tables.tables(rows)
    for name in ("links", "against paper", "bounds", "reproduced", "memberships", "link cost"):
        assert found[name].count("\n") > 1
    import_module("benchmarks.figures").link_bound(rows, tmp_path)
    assert (tmp_path / "link_bound.png").stat().st_size > 10_000


@pytest.mark.slow
def test_deviations_of_links_and_fields(tmp_path):
    benchmark = import_module("benchmarks.links.deviations")
    tasks = ["links", "fields", "--smoke", "--results", str(tmp_path / "deviations.jsonl")]
    rows = benchmark.main(tasks).rows
    assert [row["change"] for row in rows] == ["own attention", *["", "no groups"] * 3]
    assert rows[0]["settings"]["width"] == rows[0]["settings"]["num_communities"]
    assert len(benchmark.main(tasks).rows) == len(rows)


def test_katz_counts_walks():
    """Against powers of the adjacency matrix, with more pairs than one block."""
    katz, edge_index = import_module("benchmarks.shared.references"), KarateClub()[0].edge_index
    graph = to_dense_adj(edge_index)[0].double()
    powers = torch.stack([graph.matrix_power(n) for n in range(1, 5)])
    pairs = torch.cartesian_prod(torch.arange(34), torch.arange(34)).T
    counts = katz.walks(edge_index, 34, pairs, longest=4)
    assert torch.equal(counts, powers.flatten(1))
    whole = torch.linalg.inv(torch.eye(34) - 0.001 * graph) - torch.eye(34)
    torch.testing.assert_close(
        katz.katz_index(counts, 0.001), whole.flatten(), rtol=1e-4, atol=1e-9
    )
