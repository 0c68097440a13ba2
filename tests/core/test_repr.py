# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a distribution prints: its sizes and settings."""

import pytest
import torch

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
from pyro_nmm.models import grid_edges, ising

MASK, Y = torch.tensor([True, False, False, True]), torch.zeros(4, dtype=torch.long)
HOOD = Neighborhood.grid(1, 4)
ALPHA, LOGITS = torch.ones(4, 3), torch.zeros(10)
REST = "observed_rows=Neighborhood(num_nodes=4, num_rows=2, num_edges=4), num_classes=3, estimator"
THINGS = {
    "num_classes=3": lambda *b: NeighborMixture(HOOD, ALPHA.expand(*b, 4, 3), LOGITS),
    "num_edges=10": lambda *b: NeighborChoice(HOOD, LOGITS.expand(*b, 10)),
    "num_labels=4, num_sources=4": lambda *b: ChosenLabels(ALPHA.expand(*b, 4, 3), Y),
    f"{REST}=reward_to_go": lambda *b: OrderedConditional(
        HOOD, ALPHA.expand(*b, 4, 3), LOGITS, Y, MASK
    ),
    f"{REST}=no_score": lambda *b: EvidenceConditional(
        HOOD, ALPHA.expand(*b, 4, 3), LOGITS, ALPHA, MASK, None, "no_score"
    ),
    "num_memberships=2, temperature=0.5, estimator=linear": lambda *b: MembershipMixture(
        HOOD, torch.zeros(*b, 4, 2), LOGITS, 0.5
    ),
    "num_nodes=4, num_edges=4, num_classes=2": lambda *b: ising(
        grid_edges(2, 2), 0.1, torch.zeros(*b, 4)
    ),
}


@pytest.mark.parametrize("stated", THINGS)
def test_distributions(stated):
    thing = THINGS[stated]()
    assert repr(thing).startswith(f"{type(thing).__name__}(")
    assert stated in repr(thing)
    assert "batch_shape" not in repr(thing)
    assert "batch_shape=(5,)" in repr(THINGS[stated](5))
    assert "batch_shape=(7,)" in repr(thing.expand((7,)))


def test_posteriors():
    posterior = NeighborMixture(HOOD, ALPHA, LOGITS).condition(Y, MASK, num_samples=6)
    assert repr(posterior).endswith("num_observed=2, num_components=6, is_exact=False)")
    averaged = repr(AveragedPosterior([posterior] * 2))
    assert averaged == f"AveragedPosterior(num_members=2, {posterior})"
