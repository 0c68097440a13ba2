# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a distribution prints: its sizes and settings."""

import pytest
import torch
from graphs import shared_sources

import pyro_nmm
from pyro_nmm import (
    AveragedPosterior,
    ChosenLabels,
    EvidenceConditional,
    MembershipMixture,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.models import PairwiseMRF, grid_edges, ising

ROWS = "Neighborhood(num_nodes=4, num_rows={}, num_edges={})"
ALL = ROWS.format(4, 10)
MASK = torch.tensor([True, False, False, True])


def things(batch=()):
    """Each with what it prints but for the batch."""
    hood = Neighborhood.grid(1, 4)
    alpha, logits, odds = torch.ones(*batch, 4, 3), torch.zeros(10), torch.zeros(*batch, 4, 2)
    y = torch.zeros(4, dtype=torch.long)
    two = ROWS.format(2, 4)
    yield NeighborMixture(hood, alpha, logits), f"hood={ALL}, num_classes=3"
    yield NeighborChoice(hood, logits.expand(*batch, 10)), f"hood={ALL}"
    yield ChosenLabels(alpha, y), "num_labels=4, num_sources=4, num_classes=3"
    rest = f"observed_rows={two}, num_classes=3, estimator"
    yield OrderedConditional(hood, alpha, logits, y, MASK), f"{rest}=reward_to_go"
    evidence = hood, alpha, logits, torch.zeros(4, 3), MASK, None, "no_score"
    yield EvidenceConditional(*evidence), f"{rest}=no_score"
    settings = "num_memberships=2, temperature=0.5, estimator=linear"
    yield MembershipMixture(hood, odds, logits, 0.5), f"hood={ALL}, {settings}"
    field = ising(grid_edges(2, 2), 0.1, torch.zeros(*batch, 4))
    yield field, "num_nodes=4, num_edges=4, num_classes=2"


@pytest.mark.parametrize("batch", [(), (5,)])
def test_distributions(batch):
    for thing, stated in things(batch):
        more = f", batch_shape={batch}" if batch else ""
        assert repr(thing) == f"{type(thing).__name__}({stated}{more})"
        assert f"batch_shape={(7, *batch)}" in repr(thing.expand((7, *batch)))


def test_every_distribution_is_here():
    public = {getattr(pyro_nmm, name) for name in pyro_nmm.__all__} | {PairwiseMRF}
    known = {t for t in public if isinstance(t, type) and issubclass(t, GraphDistribution)}
    assert {type(thing) for thing, _ in things()} == known
    assert all(kind.shown for kind in known)


def test_what_distributions_are_made_of():
    hood = shared_sources()
    assert "num_sources=3" in repr(NeighborMixture(hood, torch.ones(3, 2), torch.zeros(8)))
    mix = NeighborMixture(Neighborhood.grid(1, 4), torch.ones(4, 3), torch.zeros(10))
    sampled = mix.condition(torch.zeros(4, dtype=torch.long), MASK, num_samples=6)
    stated = f"hood={ALL}, num_observed=2, num_components=6, is_exact=False"
    assert repr(sampled) == f"Posterior({stated})"
    averaged = AveragedPosterior([sampled] * 2)
    assert repr(averaged) == f"AveragedPosterior(num_members=2, Posterior({stated}))"
