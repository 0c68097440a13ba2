# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Errors for bad values, and arrays and lists in the place of tensors."""

import pytest
import torch

from pyro_nmm import InnerProductGraph, MembershipMixture, Neighborhood, NeighborMixture
from pyro_nmm.distributions import ChosenLabels
from pyro_nmm.models import (
    MarginalField,
    NormalEmission,
    PairwiseMRF,
    PoissonEmission,
    annealed_log_normalizer,
    coarse_to_fine,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)  # of 7 edges
EDGES, NAN = grid_edges(1, 3), torch.nan
FIELD = ising(EDGES, 0.3, torch.zeros(3))
GRAPH = InnerProductGraph(torch.ones(3, 2))
LAW = ChosenLabels(torch.ones(1, 2), torch.tensor([0, 0]))
NORMAL = {"mean": torch.zeros(2, 1), "variance": torch.ones(2, 1)}
FEATURES = torch.tensor([[0.0], [1.0], [NAN]])
EYE, RATE, COUNTS = torch.eye(2), {"rate": torch.ones(2, 1)}, torch.tensor([[0], [1], [2]])


def pair(*values):
    return torch.tensor(values).view(2, -1)


BAD = [
    (lambda: HOOD.take(torch.tensor([3])), r"rows must lie in 0\.\.2, got 3"),
    (lambda: HOOD.take(torch.tensor([0, -1])), r"rows must lie in 0\.\.2, got -1"),
    (lambda: HOOD.take(torch.tensor([0.5])), "rows must hold integers"),
    (lambda: HOOD.take(torch.zeros(1, 1).long()), r"rows must have shape \(R,\)"),
    (lambda: HOOD.find(torch.zeros(1, 3, 1).long()), r"choices must have shape \(B, 3\)"),
    (lambda: HOOD.find(torch.zeros(1, 3)), "choices must hold integers"),
    (lambda: HOOD.subgraph(torch.tensor([0, 1, 0])), "nodes must be distinct"),
    (lambda: HOOD.common_neighbors(pair(0, -1)), r"pairs must hold row numbers in 0\.\.2, got -1"),
    (lambda: HOOD.common_neighbors(pair(0, 3)), r"pairs must hold row numbers in 0\.\.2, got 3"),
    (lambda: HOOD.common_neighbors(pair(0.5, 1)), "pairs must hold integers"),
    (lambda: HOOD.common_neighbors(torch.zeros(3, 1).long()), r"pairs must have shape \(2, P\)"),
    (lambda: HOOD.softmax("word"), "logits must be a tensor, an array or a nested list"),
    (lambda: LAW.log_prob([0, 0]), "value must be a tensor, got .*list"),
    (lambda: ChosenLabels(torch.ones(2, 1), torch.tensor([0])), "alpha must have C >= 2 labels"),
    (lambda: MIX.log_prob([0, 0, 0]), "value must be a tensor, got .*list"),
    (lambda: InnerProductGraph(torch.full((3, 2), NAN)), r"factors must be finite, got nan at"),
    (lambda: InnerProductGraph(torch.ones(0, 2)), r"factors must have shape \(..., N, D\)"),
    (lambda: InnerProductGraph(EYE, weight=torch.inf), "weight must be positive"),
    (lambda: GRAPH.log_prob(pair(0.5, 1.5)), "edge_index must hold integers"),
    (lambda: GRAPH.pair_logits(pair(0.5, 1.5)), "pairs must hold integers"),
    (lambda: GRAPH.swaps(pair(0, 1, 1, 0), [[1.0]]), "others must be a floating-point tensor"),
    (lambda: GRAPH.swaps(pair(0, 1, 1, 0), torch.ones(3, 2), 0), "num_columns must be an integer"),
    (lambda: GRAPH.balance(pair(0, 1, 1, 0), 2.5), "num_nodes must be an integer"),
    (lambda: memberships(torch.inf), "log_odds must be finite, got inf"),
    (lambda: MembershipMixture(EDGES, EYE, EYE), "hood must be a Neighborhood"),
    (lambda: FIELD.log_potential(torch.tensor([0, -7, 0])), r"hold labels in 0\.\.1, got -7"),
    (lambda: FIELD.log_prob(torch.tensor([0, 2, 0])), r"value must hold labels in 0\.\.1, got 2"),
    (lambda: FIELD.local_logits(EYE), r"probs must have shape \(..., 3, 2\)"),
    (lambda: FIELD.sample((0.5,)), "sample_shape must hold integers"),
    (lambda: MarginalField(FIELD).sample("a"), "sample_shape must hold integers"),
    (lambda: MarginalField(FIELD).conditional([2]), r"value must hold labels in 0\.\.1, got 2"),
    (lambda: ising(EDGES, "word", torch.zeros(3)), "coupling must be a tensor, an array"),
    (lambda: ising(EDGES, 0.3, torch.tensor(0.0)), r"field must have shape \(..., N\)"),
    (lambda: potts(EDGES, 0.3, torch.tensor(0.0)), r"unary must have shape \(..., N, C\)"),
    (lambda: PairwiseMRF(EDGES, torch.zeros(3, 2), torch.ones(1), EYE / 0), "interaction must be"),
    (lambda: ising(EDGES, NAN, torch.zeros(3)), "strength must be finite, got nan"),
    (lambda: potts(EDGES, [0.3, torch.inf], torch.zeros(3, 2)), "strength must be finite, got inf"),
    (lambda: ising_posterior(torch.zeros(0, 3)), r"image must have shape \(height, width\)"),
    (lambda: ising_posterior(torch.zeros(2, 3).long()), "image must be a floating-point tensor"),
    (lambda: ising_posterior(torch.zeros(2, 3), sigma=NAN), "sigma must be positive"),
    (lambda: grid_edges(2, NAN), "width must be an integer of at least 1, got nan"),
    (lambda: coarse_to_fine("3", 3), "height must be an integer of at least 1, got 3"),
    (lambda: annealed(num_steps=1.5), "num_steps must be an integer of at least 1, got 1.5"),
    (lambda: annealed(torch.full((3, 2), NAN)), "start must be finite and not negative, got nan"),
    (lambda: NormalEmission(2).start(FEATURES, Neighborhood.grid(1, 4)), r"data must have shape"),
    (lambda: NormalEmission(2).start(FEATURES, None), "hood must be a Neighborhood"),
    (lambda: NormalEmission(2).start(FEATURES / 0, HOOD), "data must be finite or NaN"),
    (lambda: NormalEmission(2).log_prob(NORMAL, FEATURES.T), r"data must have shape \(N, 1\)"),
    (lambda: NormalEmission(2).log_prob(NORMAL, [[0.5]]), "data must be a floating-point tensor"),
    (lambda: NormalEmission(2).log_prob(NORMAL, FEATURES / 0), "data must be finite or NaN"),
    (lambda: PoissonEmission(2).log_prob(RATE, COUNTS - 3), "data must be integer counts.*got -3"),
    (lambda: PoissonEmission(2).start(FEATURES, HOOD), "data must be integer counts"),
    (lambda: PoissonEmission(2).log_prob({"rate": EYE}, EYE), "data must hold integers"),
]
MIX = NeighborMixture(HOOD, torch.ones(3, 2), torch.zeros(7))


def memberships(value):
    return MembershipMixture(HOOD, torch.full((3, 2), value), torch.zeros(7))


def annealed(start=None, **options):
    return annealed_log_normalizer(FIELD, torch.ones(3, 2) if start is None else start, **options)


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "sum"])
def test_values_of_edges(name):
    method, values = getattr(HOOD, name), torch.arange(7.0)
    for bad in (torch.zeros(6), torch.zeros(7, 1)):
        with pytest.raises(ValueError, match=r"must have shape \(..., 7\)"):
            method(bad)
    for given in (values.numpy(), values.tolist()):
        assert torch.equal(method(given), method(values))
    assert method(values * NAN).isnan().all()  # no step waits for a check


@pytest.mark.parametrize("of", [torch.Tensor.numpy, torch.Tensor.tolist])
def test_arrays_and_lists(of):
    rows, choices, pairs = torch.tensor([2, 0]), torch.tensor([[0, 2, 2]]), pair(0, 2)
    assert torch.equal(HOOD.take(of(rows)).source, HOOD.take(rows).source)
    assert torch.equal(HOOD.find(of(choices)), HOOD.find(choices))
    for found, right in zip(
        HOOD.common_neighbors(of(pairs)), HOOD.common_neighbors(pairs), strict=True
    ):
        assert torch.equal(found, right)
    field, unary, y = torch.randn(3), torch.randn(3, 2), torch.tensor([0, 1, 0])
    right = ising(EDGES, torch.full((2,), 0.3), field).log_potential(y)
    assert torch.equal(ising(of(EDGES), [0.3, 0.3], of(field)).log_potential(of(y)), right)
    right = potts(EDGES, 0.3, unary).log_potential(y)
    assert torch.equal(potts(of(EDGES), 0.3, of(unary)).log_potential(of(y)), right)
    image = torch.randn(2, 3)
    assert torch.equal(ising_posterior(of(image)).unary, ising_posterior(image).unary)
    assert torch.equal(FIELD.local_logits(of(unary)), FIELD.local_logits(unary))
    assert torch.equal(GRAPH.pair_logits(of(pairs)), GRAPH.pair_logits(pairs))
    assert annealed(of(torch.ones(3, 2)), num_steps=2)[0].isfinite()
