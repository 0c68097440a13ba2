# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Held-out counties, predictions from draws, and the regression that needs NumPyro."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import grid, k_hop_subgraph

import benchmarks.maps.run as maps
from benchmarks.maps import programs, rivals
from benchmarks.maps.data import KINDS, Problem, spatial_blocks, within_hops
from pyro_nmm import NeighborMixture


@pytest.fixture
def data():
    torch.manual_seed(0)
    edges, places = grid(12, 12)
    return Data(x=torch.randn(144, 2), y=(places[:, 0] > 5).long(), edge_index=edges)


@pytest.mark.parametrize("kind", KINDS)
def test_counties_that_validate_are_training_counties(kind, data):
    test, val = (Problem.of(data, kind, 3, validates) for validates in (False, True))
    assert int(test.scored.sum()) == 29
    assert int(val.scored.sum()) == 23
    assert not (val.scored & ~test.train).any()
    assert torch.equal(val.train, test.train & ~val.scored)
    assert (val.known[test.scored | val.scored] == -1).all()


def test_blocks_are_connected(data, monkeypatch):
    monkeypatch.setattr("benchmarks.maps.data.BLOCK", 10)
    nodes = torch.arange(144) >= 12
    block = spatial_blocks(data.edge_index, nodes, seed=0)
    assert (block[:12] == -1).all()
    assert int((block >= 0).sum()) == 26
    for number in range(int(block.max()) + 1):
        inside = (block == number).nonzero()[:, 0]
        assert len(inside) <= 10
        kept = data.edge_index[:, torch.isin(data.edge_index, inside).all(0)]
        reached = k_hop_subgraph(int(inside[0]), 10, kept, num_nodes=144)[0]
        assert torch.equal(reached, inside)


def test_hops_of_edges(data):
    hood, hops = within_hops(data, 2)
    assert torch.equal(hops == 0, hood.source == hood.target)
    row = slice(*hood.ptr[[65, 66]])
    assert hops[row].long().bincount().tolist() == [1, 8, 16]  # PyG's grid has diagonals


def test_prediction_of_a_draw_is_the_mixture_given_choices(data):
    """Beside the library's posterior with the same choices, whose labels are conditioned on."""
    problem = Problem.of(data, "spatial", 0)
    program = programs.Borrowed(problem, {"hops": 1, "around": False})
    draw = {"beta": torch.randn(3), "kappa": torch.tensor(2.0), "rho": torch.tensor(0.7)}
    alpha, logits = program.alpha(draw), program.logits(draw)
    rows = program.hood.restrict(problem.train)
    draw["c"] = rows.source[rows.ptr[:-1]]
    probs, labels = program.predict({name: value[None] for name, value in draw.items()})
    counts = torch.zeros(144, 2)
    counts.index_put_((draw["c"], data.y[problem.train]), torch.ones(len(draw["c"])), True)
    expected = NeighborMixture(program.hood, alpha + counts, logits).marginals()[:, 1]
    torch.testing.assert_close(probs, expected)
    assert labels.shape == (1, 144)


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(maps.importlib.util, "find_spec", lambda name: None)
    assert maps.available(maps.OURS)
    assert not maps.available(maps.MAP)
    assert "pip install numpyro" in capsys.readouterr().out


@pytest.mark.slow
def test_spatial_effects_by_numpyro(data, monkeypatch):
    pytest.importorskip("numpyro")
    monkeypatch.setattr("benchmarks.maps.data.BLOCK", 4)
    monkeypatch.setattr(rivals, "WARMUP", 100)
    monkeypatch.setattr(rivals, "SAMPLES", 20)
    problem = Problem.of(data, "spatial", 0)
    found = rivals.car(problem, {"around": False, "prior": 2.0, "seed": 0})
    right = ((found.probs > 0.5) == data.y.bool())[problem.scored]
    assert right.double().mean() > 0.7
    assert found.draws.shape == (20, 144)
