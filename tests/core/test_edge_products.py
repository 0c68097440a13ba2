# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Inner products of the ends of edges, in blocks."""

import pytest
import torch

from pyro_nmm import blocks
from pyro_nmm.ops.edge_products import edge_products


@pytest.mark.parametrize("in_cache", [2**20, 7])
def test_values_and_derivatives(monkeypatch, in_cache):
    monkeypatch.setattr(blocks, "IN_CACHE", in_cache)
    v, (target, source) = torch.randn(5, 3, requires_grad=True), torch.randint(5, (2, 40))
    found, expected = edge_products(v, target, source), (v[target] * v[source]).sum(-1)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(40)
    (mine,), (theirs,) = (torch.autograd.grad(x @ weight, v) for x in (found, expected))
    torch.testing.assert_close(mine, theirs)


def test_no_second_derivative():
    v, ends = torch.randn(4, 2, requires_grad=True), torch.randint(4, (2, 6))
    found = edge_products(v, *ends).sin().sum()
    (first,) = torch.autograd.grad(found, v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("width", [1, 4, 64])
def test_a_table_with_gaps(monkeypatch, width):
    """Short rows of whole blocks of 16 bytes get a gap where a device wants it, and stay equal."""
    table, index = torch.randn(2, 5, width, requires_grad=True), torch.randint(5, (9,))
    assert blocks.for_rows(table) is table
    monkeypatch.setattr(blocks, "BLOCK_EACH", {"cpu"})
    gap = width % 2 == 0 and width < 64
    assert blocks.for_rows(table).stride() == (5 * (width + gap), width + gap, 1)
    found = blocks.rows_at(table, index)
    assert torch.equal(found, table[:, index])
    (gradient,) = torch.autograd.grad(found.sum(), table)
    counts = index.bincount(minlength=5).to(table)
    assert torch.equal(gradient, counts[:, None].expand_as(table))
