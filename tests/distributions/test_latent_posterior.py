# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sweeps of Gibbs sampling against their invariant law, and their diagnostics."""

import pytest
import torch
from graphs import parameters

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions import conditional_kinds
from pyro_nmm.ops.diagnostics import effective_size
from pyro_nmm.ops.entries import evidence_entries
from pyro_nmm.ops.sampling import draw_entries
from pyro_nmm.ops.sweeps import run_chains


@pytest.mark.parametrize(("most", "expected"), [(1024, 16), (5, 4), (16, 16)])
def test_states_are_kept_by_chain(monkeypatch, most, expected):
    """Four chains of eight sweeps have 16 states in their second halves."""
    monkeypatch.setattr(conditional_kinds, "_MOST_STATES", most)
    hood = Neighborhood.grid(2, 3)
    q = NeighborMixture(hood, *parameters(hood, 2)).latents(torch.randn(6, 2))
    assert len(q.posterior(4, num_sweeps=8).components) == expected


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
    with pytest.raises(
        ValueError, match=r"effective_size needs at least 1 chains of 2 .* got 4 of 1"
    ):
        run_chains(hood, terms, start, 2)[0].effective_size()
