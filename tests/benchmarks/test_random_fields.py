# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of random fields, in small."""

import importlib.util

import pytest
import torch
from documents import ROOT

from pyro_nmm.models import grid_edges, ising


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
def test_benchmark_of_random_fields(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("fields")  # by its name, as its other processes do
    path = tmp_path / "fields.jsonl"
    tasks = ["strips", "letter", "plain", "amortized", "scaling"]
    tasks += ["--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 3 + 1 + 3 + 1 + 2
    assert len(benchmark.main(tasks).rows) == len(rows)
    for height, width, coupling in ((5, 4, 0.3), (1, 6, 0.5), (6, 1, 0.4), (7, 7, 0.9)):
        field = ising(grid_edges(height, width), coupling, torch.zeros(height * width).double())
        log_z = field.log_normalizer().item()
        assert abs(benchmark.kac_ward(height, width, coupling) - log_z) < 1e-9
