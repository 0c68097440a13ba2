# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sweeps of Gibbs sampling against their invariant law, and their diagnostics."""

import pytest
import torch
from graphs import house, parameters, shared_sources, star

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.ops.diagnostics import effective_size
from pyro_nmm.ops.entries import evidence_entries
from pyro_nmm.ops.gibbs import run_chains
from pyro_nmm.ops.sampling import draw_entries

GRAPHS = {"house": house, "star": star, "shared": shared_sources}


def problem(name, num_classes=2):
    hood = GRAPHS[name]()
    mix = NeighborMixture(hood, *parameters(hood, num_classes))
    evidence = torch.randn(hood.num_nodes, num_classes)
    evidence[0, 0] = -torch.inf
    return mix, evidence


@pytest.mark.parametrize(("num_states", "expected"), [(None, 16), (5, 4), (16, 16), (100, 16)])
def test_states_are_kept_by_chain(num_states, expected):
    """Four chains of eight sweeps have 16 states in their second halves."""
    mix, evidence = problem("house")
    found = mix.latents(evidence).posterior(4, num_sweeps=8, num_states=num_states)
    assert len(found.components) == expected


def test_diagnostics():
    hood = Neighborhood.grid(6, 6)
    alpha, logits = torch.full((36, 2), 0.3), torch.zeros(hood.num_edges)
    terms = evidence_entries(hood.log_softmax(logits)[None], alpha[None], torch.zeros(1, 36, 2))
    start = draw_entries(hood, terms, torch.rand(4, 36))
    found, states = run_chains(hood, terms, start, 200, num_kept=3)
    assert states.labels.shape == (12, 36)
    assert torch.equal(states.labels[-4:], found.draw.labels)
    assert found.totals.shape == (4, 100, 2)
    assert torch.equal(found.effective_size(), effective_size(found.totals))
    assert (found.effective_size() > 20).all()
    assert (found.gelman_rubin() < 1.3).all()
    stuck = found._replace(totals=found.totals + 100 * torch.arange(4)[:, None, None])
    assert (stuck.gelman_rubin() > 2).all()
    with pytest.raises(ValueError, match=r"effective_size needs chains of two .* got 4 of 1"):
        run_chains(hood, terms, start, 2)[0].effective_size()
