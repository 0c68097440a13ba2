# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Joint draws of a posterior against the enumerated distribution of all labellings."""

import numpy as np
import pytest
import torch
from cases import mask, sharing_house, table_of
from oracle import of_hood
from scipy.stats import chi2 as chi2_law

from pyro_nmm import blocks

CLASSES = 2


def p_value(draws, probs):
    """Of the chi-squared test, with rare labellings put together."""
    powers = CLASSES ** torch.arange(4, -1, -1)
    counts = torch.bincount((draws * powers).sum(-1), minlength=CLASSES**5).numpy()
    expected = probs.numpy() * len(draws)
    assert counts[expected == 0].sum() == 0
    keep = expected > 8
    if not keep.all():
        counts = np.append(counts[keep], counts[~keep].sum())
        expected = np.append(expected[keep], expected[~keep].sum())
        counts, expected = counts[expected > 0], expected[expected > 0]
    return chi2_law.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


@pytest.mark.parametrize("known", [(0, 2), (4,), (1, 2, 3)])
def test_samples_are_the_enumerated_posterior(known):
    """p(y | y_tau) of the oracle, which knows nothing of components."""
    mix, y = sharing_house()
    oracle = of_hood(mix.hood, mix.alpha, mix.logits)
    rest, log_prob = oracle.given(list(known), y[list(known)].numpy())
    probs = torch.zeros(CLASSES**5)
    full = y.expand(len(rest), 5).clone()
    full[:, ~mask(*known)] = torch.from_numpy(rest)
    probs[(full * CLASSES ** torch.arange(4, -1, -1)).sum(-1)] = torch.from_numpy(np.exp(log_prob))
    draws = mix.condition(y.where(mask(*known), -7), mask(*known)).sample((20_000,))
    assert draws.shape == (20_000, 5)
    assert draws.dtype == torch.long
    assert (draws[:, mask(*known)] == y[mask(*known)]).all()
    assert p_value(draws, probs) > 1e-4


def test_samples_have_the_weights_of_their_components():
    """Other weights than those of the exact posterior: the chi-squared test tells them apart."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(0, 1, 2))
    before = table_of(post)
    post.components.log_weights = torch.linspace(-4, 4, len(post.components)).log_softmax(0)
    draws = post.sample((20_000,))
    assert p_value(draws, table_of(post)) > 1e-4
    assert p_value(draws, before) < 1e-10


def test_components_are_drawn_by_their_weight():
    """One by one, in no order; those without weight never."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(0, 1), num_samples=3)
    post.components.log_weights = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = post.components.drawn(4000)
    expected = 4000 * post.components.weights
    assert chi2_law.sf(((drawn.bincount() - expected) ** 2 / expected).sum(), 2) > 1e-4
    repeats = (drawn[1:] == drawn[:-1]).double().mean()
    assert abs(repeats - 0.38) < 0.03  # of independent draws
    post.components.log_weights = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert (post.components.drawn(1000) == 1).all()


def test_shapes_and_blocks_of_samples(monkeypatch):
    mix, y = sharing_house()
    post = mix.condition(y, mask(0, 1))
    assert post.sample().shape == (5,)
    assert post.sample((2, 3)).shape == (2, 3, 5)
    assert post.sample((0,)).shape == (0, 5)
    assert (mix.condition(y).sample((3,)) == y).all()
    probs = table_of(post)
    monkeypatch.setattr(blocks, "NUMBERS", 5000)
    assert p_value(post.sample((10_000,)), probs) > 1e-4
    table = post.pairwise(torch.tensor([[2], [4]]))[0]
    draws = post.sample((20_000,))
    agree = (draws[:, 2] == draws[:, 4]).double().mean()
    assert abs(agree - table.diagonal().sum()) < 0.015
