# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Importance-weighted and sequential Monte Carlo estimates against enumeration."""

import pytest
import torch
from graphs import house, parameters, star

from pyro_nmm import NeighborMixture, OrderedConditional
from pyro_nmm.particles import sequential_monte_carlo


def setting(seed=0):
    """Strong sharing, so that weights differ and the choice of parents matters."""
    torch.manual_seed(seed)
    hood = house()
    alpha, logits = parameters(hood, 2, scale=1.0)
    # No stage below has the same labels in the order of the draw and in that of the nodes.
    return NeighborMixture(hood, 0.2 * alpha, 2 * logits), torch.tensor([0, 1, 1, 0, 1])


def z_score(ratios):
    return ((ratios.mean() - 1) / (ratios.std() / len(ratios) ** 0.5)).item()


@pytest.mark.parametrize(
    ("threshold", "stages"),
    [(1.0, 5), (0.9, 5), (1.0, 2), (0.0, 5), (0.0, 1)],
    ids=["every stage", "adaptive", "two stages", "never", "importance"],
)
def test_unbiased(threshold, stages):
    """E[exp(estimate)] = p(y), also with three particles that are resampled throughout."""
    mix, y = setting()
    parts = torch.tensor([4, 0, 3, 2, 1]).tensor_split(stages)
    exact = mix.log_prob(y)
    ratios = torch.stack(
        [
            sequential_monte_carlo(mix.hood, mix.alpha, mix.logits, y, parts, 3, threshold).sum()
            for _ in range(1500)
        ]
    )
    ratios = (ratios - exact).exp()
    assert ratios.std() > 0.05  # a test of something
    assert abs(z_score(ratios)) < 4


def test_resampling_happens_and_only_after_the_first_stage():
    """The same seed with and without it: equal at first, then not."""
    mix, y = setting()
    parts, values = torch.arange(5).split(1), []
    for threshold in (0.0, 1.0):
        torch.manual_seed(3)
        args = (mix.hood, mix.alpha, mix.logits, y, parts, 3, threshold)
        values.append(sequential_monte_carlo(*args))
    assert torch.equal(values[0][0], values[1][0])
    assert not torch.allclose(values[0][-1], values[1][-1])


def test_converges_to_the_exact_likelihood():
    mix, y = setting()
    for stages in (1, 5):
        estimate = mix.log_likelihood(y, num_particles=20_000, num_stages=stages)
        assert abs(estimate - mix.log_prob(y)) < 0.03
    bound = mix.elbo(y, num_samples=4000).mean()
    few = torch.stack([mix.log_likelihood(y, num_particles=4) for _ in range(400)])
    assert bound + 0.02 < few.mean() < mix.log_prob(y)


def test_conditional():
    """log p(y_tau | y_rho) is the difference of two exact likelihoods."""
    mix, y = setting()
    given = torch.tensor([True, False, True, False, False])
    observed = torch.tensor([False, False, False, True, True])
    both, first = (m.nonzero()[:, 0] for m in (given | observed, given))
    exact = mix.log_marginal(both, y[both]) - mix.log_marginal(first, y[first])
    estimate = mix.log_likelihood(y, observed, given, num_particles=20_000, num_stages=2)
    assert abs(estimate - exact) < 0.03
    rest = mix.log_likelihood(y, given=given, num_particles=20_000)
    assert abs(rest - (mix.log_prob(y) - mix.log_marginal(first, y[first]))) < 0.03


def test_order():
    """One order: the ordered bound's own draws, and the exact likelihood for its mean."""
    mix, y = setting()
    order = torch.tensor([4, 1, 0, 3, 2])
    runs = torch.stack(
        [mix.log_likelihood(y, num_particles=1, num_stages=1, order=order) for _ in range(1500)]
    )
    q = OrderedConditional(mix.hood, mix.alpha, mix.logits, y, order=order)
    bound = q.log_labels(q.sample((4000,))).sum(-1)
    error = (bound.var() / 4000 + runs.var() / 1500) ** 0.5
    assert abs(runs.mean() - bound.mean()) < 4 * error
    weights = (runs - mix.log_prob(y)).exp()
    assert abs(weights.mean() - 1) < 4 * weights.std() / 1500**0.5
    with pytest.raises(ValueError, match="order"):
        mix.log_likelihood(y, order=order[:3])


def test_labels_of_other_nodes_are_never_read():
    mix, y = setting()
    observed = torch.tensor([True, True, False, False, True])
    y[~observed] = 99
    assert mix.log_likelihood(y, observed).isfinite()


def test_bad_input():
    mix, y = setting()
    mask = torch.tensor([True, False, False, False, False])
    with pytest.raises(ValueError, match="both hold node 0"):
        mix.log_likelihood(y, observed=mask, given=mask)
    with pytest.raises(ValueError, match="given must be a boolean mask"):
        mix.log_likelihood(y, given=mask.long())
    with pytest.raises(ValueError, match="given selects no node"):
        mix.log_likelihood(y, given=mask & ~mask)
    with pytest.raises(ValueError, match="num_particles and num_stages must be at least 1"):
        mix.log_likelihood(y, num_particles=0)
    with pytest.raises(ValueError, match="num_particles and num_stages must be at least 1"):
        mix.log_likelihood(y, num_stages=0)
    with pytest.raises(ValueError, match="log_likelihood needs one labelling y"):
        mix.log_likelihood(y.expand(2, -1))
    with pytest.raises(ValueError, match="y holds label 7 at node 0"):
        mix.log_likelihood(torch.tensor([7, 0, 0, 0, 0]))
    hood = star()
    alpha, logits = parameters(hood, 2, (3,))
    with pytest.raises(ValueError, match="log_likelihood needs a mixture without batch"):
        NeighborMixture(hood, alpha, logits).log_likelihood(y)
