# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Inputs that users have, and that say the same as tidier ones."""

import networkx as nx
import numpy as np
import pyro
import pytest
import torch
from graphs import to_hood
from torch_geometric.utils import to_undirected

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import DGLFRMGuide, FieldGuide, fit_links
from pyro_nmm.models import DGLFRM, FreeNMM, MarginalField, PairwiseMRF, grid_edges, ising


def test_many_nodes_in_small_integers():
    """Pairs of node ids have products beyond 32 bits."""
    nodes = torch.arange(70_000, dtype=torch.int32)
    edges = torch.stack([nodes[:-1], nodes[1:]])
    far = torch.stack([nodes[:-2:2], nodes[2::2]])
    both = torch.cat([edges, far], 1)
    field = PairwiseMRF(both, torch.zeros(70_000, 2), torch.zeros(1), torch.eye(2))
    assert field.num_edges == both.shape[1]


@pytest.mark.parametrize("kind", ["whole", "half"])
def test_fields_in_a_plate(kind):
    field = ising(grid_edges(2, 3), 0.4, torch.linspace(-0.3, 0.4, 6))
    field = field if kind == "whole" else MarginalField(field)
    y = torch.arange(field.num_nodes) % 2
    assert field.expand([3]).log_prob(y).shape == (3,)

    def model():
        with pyro.plate("copies", 3):
            pyro.sample("y", field, obs=y)

    total = pyro.poutine.trace(model).get_trace().log_prob_sum()
    torch.testing.assert_close(total, 3 * field.log_prob(y))


def test_an_order_may_be_a_list():
    target, hood = ising(grid_edges(1, 3), 0.4, torch.zeros(3)), to_hood(nx.path_graph(3))
    guide = FieldGuide(hood, FreeNMM(hood, 2), target, order=[2, 0, 1])
    assert guide.order.tolist() == [2, 0, 1]


def test_two_fits_of_links():
    edges = torch.tensor(list(nx.cycle_graph(12).edges)).T
    edges, x = to_undirected(edges), torch.eye(12)
    for _ in range(2):
        fit_links(DGLFRMGuide(DGLFRM(12, 3), 12), edges, x, num_steps=2)
    assert not pyro.get_param_store().keys()


@pytest.mark.parametrize("dtype", [torch.half, torch.double])
def test_features_of_links_in_any_precision(dtype):
    torch.set_default_dtype(torch.float)
    edges = torch.tensor(list(nx.cycle_graph(12).edges)).T
    edges, found = to_undirected(edges), []
    for x in (torch.eye(12), torch.eye(12).to(dtype)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = DGLFRMGuide(DGLFRM(12, 3, num_features=12), 12)
        losses = fit_links(pair, edges, x, num_steps=2)
        found.append([*losses, *pair.link_logits(edges, edges, x, num_samples=1).tolist()])
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_a_share_of_one_label():
    hood = to_hood(nx.path_graph(3))
    with pytest.raises(ValueError, match=r"epsilon must lie in \[0, 1\], got 3"):
        FreeNMM(hood, 2, torch.eye(2)[[0, 1, 0]], epsilon=3.0)
    start = NeighborMixture(hood, *FreeNMM(hood, 2, torch.full((3, 2), 0.5), epsilon=0.0)(hood))
    torch.testing.assert_close(start.marginals(), torch.full((3, 2), 0.5))
