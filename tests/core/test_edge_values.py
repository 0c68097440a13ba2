# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Values of PyG's edges in the order of a neighbourhood."""

import numpy as np
import pytest
import torch
from graphs import shared_sources

from pyro_nmm import Neighborhood, edge_values

EDGES = torch.tensor([[2, 0, 1, 1], [1, 1, 0, 2]])
HOOD = Neighborhood(EDGES, num_nodes=3)
VALUES = torch.tensor([21.0, 1.0, 10.0, 12.0])  # 10 source + target
OWN = 10.0 * HOOD.source + HOOD.target
LOOP = HOOD.source == HOOD.target


def test_every_order_of_the_edges():
    wanted = OWN.masked_fill(LOOP, -torch.inf)
    for order in (torch.randperm(4) for _ in range(5)):
        found = edge_values(HOOD, EDGES[:, order], VALUES[order], fill_value=-torch.inf)
        assert torch.equal(found, wanted)
    with_loops = torch.cat([EDGES, torch.arange(3).expand(2, -1)], 1)
    values = torch.cat([VALUES, 11.0 * torch.arange(3)])
    assert torch.equal(edge_values(HOOD, with_loops, values), OWN)
    assert torch.equal(edge_values(HOOD, with_loops.int().tolist(), values.tolist()), OWN)


def test_batches_and_gradients():
    leaf = torch.stack([VALUES, -VALUES]).requires_grad_()
    found = edge_values(HOOD, EDGES, leaf, fill_value=0.0)
    assert torch.equal(found, torch.stack([OWN, -OWN]).masked_fill(LOOP, 0))
    found.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 4))


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
@pytest.mark.parametrize("fill", [-torch.inf, 0.0, np.float32(0.5)])
def test_integers_and_a_fill_that_is_none(dtype, fill):
    found = edge_values(HOOD, EDGES, VALUES.to(dtype), fill_value=fill)
    wanted = edge_values(HOOD, EDGES, VALUES.to(dtype).float(), fill_value=fill)
    assert found.dtype == torch.get_default_dtype()
    assert torch.equal(found, wanted.to(found))


def test_edges_that_are_listed_twice():
    twice, values = EDGES[:, [0, 1, 2, 3, 0]], torch.tensor([1.0, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=r"lists the edge \[2, 1\] twice: merge"):
        edge_values(HOOD, twice, values, fill_value=0.0)


def test_sources_that_are_no_nodes():
    hood = shared_sources()
    order = torch.randperm(hood.num_edges)
    edges = torch.stack([hood.source, hood.target])[:, order]
    values = torch.randn(hood.num_edges)
    assert torch.equal(edge_values(hood, edges, values[order]), values)
    other = edges[:, (edges[0] != 1) | (edges[1] != 1)]
    with pytest.raises(ValueError, match=r"lacks the edge \[1, 1\], which hood has"):
        edge_values(hood, other, torch.ones(7), fill_value=0.0)  # it is no self-loop


@pytest.mark.parametrize(
    ("edges", "values", "options", "match"),
    [
        (EDGES, VALUES, {}, r"edge_index lacks the self-loop \[0, 0\].*fill_value"),
        (EDGES[:, :3], VALUES[:3], {"fill_value": 0.0}, r"lacks the edge \[1, 2\]"),
        (EDGES - EDGES, VALUES, {"fill_value": 0.0}, r"lacks the edge \[1, 0\]"),
        (EDGES, VALUES[:3], {}, r"values must have shape \(..., 4\), one per edge, got \(3,\)"),
        (EDGES, VALUES, {"fill_value": float("nan")}, "fill_value must be a number"),
    ],
)
def test_refusals(edges, values, options, match):
    with pytest.raises(ValueError, match=match):
        edge_values(HOOD, edges, values, **options)


def test_an_edge_of_another_graph():
    other = torch.cat([EDGES, torch.tensor([[0], [2]])], 1)
    with pytest.raises(ValueError, match=r"the edge \[0, 2\], which hood lacks"):
        edge_values(HOOD, other, torch.ones(5), fill_value=0.0)
