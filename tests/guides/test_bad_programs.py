# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What networks, guides and their fits refuse: errors that name the argument, before PyTorch's."""

import math
from functools import partial

import pytest
import torch
from graphs import house
from pyro import poutine
from torch import nn
from torch_geometric.nn import GCN, MLP

from pyro_nmm import Neighborhood
from pyro_nmm.guides import (
    AmortizedNMM,
    DGLFRMGuide,
    MarginalGuide,
    MixtureGuide,
    density,
    fit_mixture,
)
from pyro_nmm.models import (
    DGLFRM,
    ConvolutionalNMM,
    FreeNMM,
    NMMNetwork,
    NormalEmission,
    fit_field,
    grid_edges,
    ising,
    leave_one_out,
)
from pyro_nmm.models.hidden import FieldPrior, hidden_field

HOOD, EDGES, X = house(), torch.tensor([[0, 1], [1, 0]]), torch.randn(5, 3).double()
DATA = torch.tensor([[0.0], [0.1], [2.0], [2.1], [1.9]]).double()
VALUES = {"mean": 2 * torch.eye(2)[:, 1:].double(), "variance": torch.ones(2, 1).double()}
EMISSION, TARGET = NormalEmission(2), DGLFRM(5, 4).double()


def error(match):
    return pytest.raises(ValueError, match=match)


@pytest.mark.parametrize("wrong", [1.5, 0])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("num_classes", lambda n: FreeNMM(HOOD, n)),
        ("num_classes", lambda n: NMMNetwork(MLP([3, 2]), MLP([3, 2]), num_classes=n)),
        ("num_classes", lambda n: density(torch.sum, 4, n)),
        ("num_nodes", lambda n: density(torch.sum, n, 2)),
        ("num_classes", lambda n: ConvolutionalNMM(1, n)),
        ("channels", lambda n: ConvolutionalNMM(1, channels=n)),
        ("num_labels", FieldPrior),
        ("num_nodes", DGLFRM),
        ("num_communities", lambda n: DGLFRM(5, n)),
        ("num_features", lambda n: DGLFRMGuide(TARGET, n)),
        ("num_samples", lambda n: DGLFRMGuide(TARGET, 3).link_logits(EDGES, EDGES, X, n)),
    ],
)
def test_sizes(name, make, wrong):
    with error(f"{name}(,| must be) .*got"):
        make(wrong)


@pytest.mark.parametrize("wrong", [math.nan, "3"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gamma", lambda x: FreeNMM(HOOD, 2, gamma=x)),
        ("concentration", lambda x: DGLFRM(5, 4, concentration=x)),
        ("lr", lambda x: fit_mixture(ising(EDGES[:, :1], 0.1, torch.zeros(2)), HOOD, None, lr=x)),
    ],
)
def test_numbers(name, make, wrong):
    with error(f"{name} must be .*(number|finite)"):
        make(wrong)


@pytest.mark.parametrize(
    ("x", "edge_index", "match"),
    [
        (X[:0], EDGES, r"x must have shape \(5, 3\), got \(0, 3\)"),
        (X.numpy(), EDGES, "x must be a floating-point tensor, got .*ndarray"),
        (X, EDGES - 7, "edge_index holds node id -7, but ids lie in 0..4"),
        (X, EDGES + 0.5, "edge_index must hold integers"),
    ],
)
def test_inputs_of_networks(x, edge_index, match):
    network = NMMNetwork(GCN(3, 4, 1, 2), GCN(3, 4, 1), num_classes=2)
    program = AmortizedNMM(HOOD, network)
    for run in (program, program.model, partial(program.guide, y=None)):
        with error(match):
            run(x, edge_index)
    pair = DGLFRMGuide(TARGET, 3, HOOD)
    for run in (pair.guide, pair.model):
        with error(match):
            run(edge_index, x)


@pytest.mark.filterwarnings("ignore:.*parse")
def test_networks_of_others_take_what_they_like():
    class Embedded(GCN):
        def forward(self, ids, edge_index):
            return super().forward(X[ids], edge_index)

    network = NMMNetwork(Embedded(3, 4, 1, 2), Embedded(3, 4, 1), num_classes=2)
    alpha, _ = network(HOOD, [0, 1, 2, 3, 4], EDGES)
    assert alpha.shape == (5, 2)
    sparse = torch.sparse_coo_tensor(EDGES, torch.ones(2), (5, 5), check_invariants=True)
    network = NMMNetwork(GCN(-1, 4, 1, 2), GCN(-1, 4, 1), num_classes=2)
    assert network(HOOD, X, sparse)[0].shape == (5, 2)


OTHER, GRID = Neighborhood(EDGES, 8), ising(grid_edges(2, 3), 0.4, torch.zeros(6))
DISTANCE = torch.arange(HOOD.num_edges) / 10


def link_logits(*inputs):
    return DGLFRMGuide(TARGET, 3, HOOD).link_logits(*inputs)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        *((partial(make, EDGES), "hood must be a Neighborhood, got") for make in (
            lambda hood: AmortizedNMM(hood, nn.Identity()),
            lambda hood: MarginalGuide(hood, nn.Identity(), print, print),
            lambda hood: MixtureGuide(hood, nn.Identity(), print),
            lambda hood: fit_mixture(GRID, hood, None),
        )),
        (lambda: link_logits(EDGES - 7, EDGES, X), "pairs holds node id -7, but ids lie in 0..4"),
        (lambda: FreeNMM(HOOD, 2)(OTHER),
         "hood must have the 5 sources and 17 edges of these parameters, got 8 and 10"),
        (lambda: FreeNMM(HOOD, 2, torch.full((5, 2), torch.nan)), "must be probabilities, got nan"),
        (lambda: ConvolutionalNMM(1)(OTHER, GRID), "hood must have the 6 nodes of field, got"),
        (lambda: ConvolutionalNMM(1)(OTHER, "field"), "field must be a PairwiseMRF"),
        (lambda: MixtureGuide(HOOD, FreeNMM(HOOD, 2), print, order=[4, 3, 2, 1, 1]),
         "order must be a permutation"),
        (lambda: hidden_field(OTHER, FieldPrior(2), EMISSION, VALUES, DATA),
         r"evidence of shape \(N, C\) = \(8, 2\), got \(5, 2\)"),
        (lambda: poutine.trace(hidden_field).get_trace(
            HOOD, FieldPrior(2), EMISSION, VALUES, DATA[:3]), "data and values must give evidence"),
        (lambda: fit_field(EMISSION, HOOD, DATA, "far"),
         "edge_attr must be a tensor, an array or a nested list"),
        (lambda: FieldPrior(2, DISTANCE), r"edge_attr must have shape \(num_edges, F\), got"),
        (lambda: FieldPrior(2, DISTANCE[:, None])(HOOD, DISTANCE),
         r"must have shape \(17, 1\), got \(17,\)"),
        (lambda: leave_one_out(FieldPrior(2), DATA), "field must be a HiddenField"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with error(match):
        run()
