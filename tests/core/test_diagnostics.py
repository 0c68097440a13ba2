# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Effective sample sizes against Pyro's, with a known correlation, and of long chains."""

import pytest
import torch
from cost import Work
from pyro.ops.stats import effective_sample_size

from pyro_nmm.ops.diagnostics import effective_size


def chains(num_chains, size, correlation):
    """Autoregressive chains of three numbers, ``(B, S, 3)``."""
    noise = torch.randn(num_chains, size, 3).unbind(1)
    draws = [noise[0]]
    for each in noise[1:]:
        draws.append(correlation * draws[-1] + (1 - correlation**2) ** 0.5 * each)
    return torch.stack(draws, 1)


@pytest.mark.parametrize("num_chains", [1, 4])
@pytest.mark.parametrize("size", [2, 11, 100])
@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.95])
def test_same_as_pyro(num_chains, size, correlation):
    """But for chains of opposite draws, of which Pyro's is large or negative."""
    draws = chains(num_chains, size, correlation)
    expected = effective_sample_size(draws, chain_dim=0, sample_dim=1)
    number = torch.tensor(num_chains * size)
    bound = number * number.clamp(min=10).log10()
    expected = torch.where((expected < 0) | (expected > bound), bound, expected)
    torch.testing.assert_close(effective_size(draws), expected)


def test_known_correlation():
    found = effective_size(chains(4, 5000, 0.8)) / 20_000
    assert (found - 1 / 9).abs().max() < 0.03


def test_chains_that_differ():
    """Draws of chains that never meet are worth about one a chain."""
    draws = chains(3, 1000, 0.0) + 100 * torch.arange(3)[:, None, None]
    assert effective_size(draws).max() < 5


def test_draws_that_never_change():
    assert effective_size(torch.ones(2, 10, 3)).isnan().all()


def test_long_chains():
    """A table of pairs of 30,000 sums would hold 300 times as many numbers for each label."""
    draws = torch.randn(1, 60_000, 3)
    with Work() as work:
        found = effective_size(draws)
    assert (found / 60_000 - 1).abs().max() < 0.1
    assert work.largest < 10 * draws.numel()
    assert work.total < 100 * draws.numel()
