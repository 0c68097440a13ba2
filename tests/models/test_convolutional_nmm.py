# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The convolutional network that reads a field on a grid."""

import pytest
import torch

from pyro_nmm import Neighborhood
from pyro_nmm.models import ConvolutionalNMM, grid_edges, ising


def trained(**options):
    """A network whose last layers are no longer zero, as after a step."""
    network = ConvolutionalNMM(radius=1, channels=8, **options)
    for last in (network.labels[-1], network.attention[-1]):
        torch.nn.init.normal_(last.weight)
    return network


def test_convolutional_network_knows_the_groups():
    """Where potentials are alike, pixels differ by their groups alone."""
    network = trained(kernel=3)
    field = ising(grid_edges(8, 10), 0.4, torch.zeros(80))
    alpha, _ = network(Neighborhood.grid(8, 10), field)
    inside = alpha.view(8, 10, 2)[2:6, 2:8].flatten(0, 1).T
    assert inside.std(-1).max() > 1e-4


@pytest.mark.parametrize("edge", [0, 8 * 9])  # the first across, the first down
def test_strength_of_an_edge_is_read_at_its_first_pixel(edge):
    network, hood = trained(kernel=1), Neighborhood.grid(8, 10)
    edges, outputs = grid_edges(8, 10), []
    for value in (0.4, 2.0):
        strength = torch.full((edges.shape[1],), 0.4).index_fill(0, torch.tensor(edge), value)
        outputs.append(network(hood, ising(edges, strength, torch.zeros(80)))[0])
    assert (outputs[0] != outputs[1]).any(-1).nonzero().flatten().tolist() == [0]


def test_convolutional_network():
    """Shifting a field by two pixels, which keeps the groups of the order, shifts the NMM."""
    network = trained(kernel=3)
    fields = torch.randn(8, 10)
    hood = Neighborhood.grid(8, 10)
    outputs = []
    for image in (fields, fields.roll(2, 1)):
        alpha, logits = network(hood, ising(grid_edges(8, 10), 0.4, image.flatten()))
        dense = torch.full((80, 80), torch.nan)
        dense[hood.target, hood.source] = logits
        outputs.append((alpha.view(8, 10, 2), dense.view(8, 10, 8, 10)))
    inside = slice(2, 6), slice(2, 6)
    (alpha, logits), (moved_alpha, moved) = outputs
    torch.testing.assert_close(moved_alpha[2:6, 4:8], alpha[inside])
    for row, column in ((0, 1), (1, 0), (-1, -1), (0, 0)):
        one = logits[3, 4, 3 + row, 4 + column]
        torch.testing.assert_close(moved[3, 6, 3 + row, 6 + column], one)
    with pytest.raises(ValueError, match="radius 1 at most"):
        network(Neighborhood.grid(8, 10, 2), ising(grid_edges(8, 10), 0.4, fields.flatten()))
    other = ising(grid_edges(8, 10)[:, 1:], 0.4, fields.flatten())
    with pytest.raises(ValueError, match="grid_edges"):
        network(hood, other)
    with pytest.raises(ValueError, match="kernel must be odd"):
        ConvolutionalNMM(1, kernel=4)
