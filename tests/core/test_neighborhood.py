# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import to_hood
from hypothesis import given
from hypothesis import strategies as st

from pyro_nmm import Neighborhood

edge_lists = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20)


def sets(hood):
    return [set(part.tolist()) for part in hood.source.split(hood.ptr.diff().tolist())]


@given(edge_lists)
def test_rows_are_the_sources_of_incoming_edges_and_the_node_itself(edges):
    index = torch.tensor(edges, dtype=torch.long).view(-1, 2).T
    hood = Neighborhood(index, 7)
    assert sets(hood) == [{j for j, t in edges if t == i} | {i} for i in range(7)]
    assert len(hood.source) == sum(map(len, sets(hood))) == hood.num_edges  # no duplicates
    assert (hood.target == hood.row).all()
    for part in hood.source.split(hood.ptr.diff().tolist()):
        assert (part.diff() > 0).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_grid_is_the_window_clipped_at_the_border(height, width, radius):
    expected = []
    for r in range(height):
        for c in range(width):
            window = {
                (r + dr) * width + c + dc
                for dr in range(-radius, radius + 1)
                for dc in range(-radius, radius + 1)
                if 0 <= r + dr < height and 0 <= c + dc < width
            }
            expected.append(window)
    assert sets(Neighborhood.grid(height, width, radius)) == expected


@given(edge_lists, st.lists(st.booleans(), min_size=7, max_size=7).filter(any))
def test_restriction_keeps_whole_rows(edges, mask):
    hood = Neighborhood(torch.tensor(edges, dtype=torch.long).view(-1, 2).T, 7)
    rows = hood.restrict(torch.tensor(mask))
    keep = [i for i in range(7) if mask[i]]
    assert rows.nodes.tolist() == keep
    assert sets(rows) == [sets(hood)[i] for i in keep]
    assert torch.equal(hood.source[rows.edge], rows.source)
    assert torch.equal(hood.target[rows.edge], rows.target)
    permuted = rows.take(torch.arange(len(keep)).flip(0))
    assert sets(permuted) == sets(rows)[::-1]
    assert torch.equal(rows.source[permuted.within], permuted.source)
    assert torch.equal(hood.source[permuted.edge], permuted.source)


def test_restriction_notices_a_changed_mask():
    hood, mask = to_hood(nx.path_graph(4)), torch.tensor([True, False, False, False])
    first = hood.restrict(mask)
    assert hood.restrict(mask) is first
    mask[1] = True
    assert hood.restrict(mask).nodes.tolist() == [0, 1]
    assert hood.restrict(None) is hood
    array = np.array([True, False, False, False])
    assert hood.restrict(torch.from_numpy(array)).nodes.tolist() == [0]
    array[3] = True
    assert hood.restrict(torch.from_numpy(array)).nodes.tolist() == [0, 3]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_softmax_of_every_row(batch):
    hood = to_hood(nx.star_graph(5))
    logits = 20 * torch.randn(*batch, hood.num_edges)
    soft, log_soft = hood.softmax(logits), hood.log_softmax(logits)
    for r in range(hood.num_rows):
        row = slice(hood.ptr[r], hood.ptr[r + 1])
        torch.testing.assert_close(soft[..., row], logits[..., row].softmax(-1))
        torch.testing.assert_close(log_soft[..., row], logits[..., row].log_softmax(-1))
    torch.testing.assert_close(hood.sum(soft), torch.ones(*batch, hood.num_rows))


def test_find(kernels):
    hood = to_hood(nx.path_graph(4))
    choices = torch.tensor([[0, 1, 3, 3], [1, 3, 2, 0]])
    edges = hood.find(choices)
    assert (edges >= 0).tolist() == [[True] * 4, [True, False, True, False]]
    found = edges[0]
    assert hood.source[found].tolist() == choices[0].tolist()
    assert hood.target[found].tolist() == [0, 1, 2, 3]


@given(edge_lists)
def test_components_join_rows_that_share_neighbors(edges):
    hood = Neighborhood(torch.tensor(edges, dtype=torch.long).view(-1, 2).T, 7)
    graph = nx.Graph()
    for i, part in enumerate(sets(hood)):
        graph.add_edges_from((("row", i), ("node", j)) for j in part)
    label = hood.components()
    for i in range(7):
        for j in range(7):
            assert (label[i] == label[j]) == nx.has_path(graph, ("row", i), ("row", j))


def test_a_part_keeps_its_edges_on_another_device(device):
    part = Neighborhood.grid(3, 3).take(torch.tensor([0, 1, 2]))
    assert torch.equal(part.to(device).within.cpu(), part.within)


def test_a_graph_is_saved_after_a_transform(tmp_path):
    """What it keeps is a tensor of the transform, which has no storage."""
    hood = Neighborhood.grid(2, 2)
    torch.func.grad(lambda logits: hood.logsumexp(logits).sum())(torch.zeros(hood.num_edges))
    torch.save(hood, tmp_path / "hood.pt")
    assert torch.equal(torch.load(tmp_path / "hood.pt", weights_only=False).row, hood.row)
