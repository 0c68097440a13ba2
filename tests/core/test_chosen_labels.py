# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels of nodes that share label distributions, given choices."""

import itertools

import pytest
import torch
from scipy.stats import chi2
from torch.distributions import Dirichlet

from pyro_nmm import ChosenLabels
from pyro_nmm.ops import sampling
from pyro_nmm.ops.enumeration import enumerate_labels


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("many", [0, 10**9])
def test_integral_over_z(many, scale, monkeypatch):
    """By urns and by z; 20,000 draws notice probabilities that are off by a tenth."""
    monkeypatch.setattr(sampling, "MANY", many)
    alpha = scale * (torch.rand(3, 2) * 2 + 0.2)
    choices = torch.tensor([0, 2, 0, 0])
    labels = enumerate_labels(4, 2)
    law = ChosenLabels(alpha, choices)
    prob = law.log_prob(labels).exp()
    torch.testing.assert_close(prob.sum(), torch.tensor(1.0))
    if scale == 1.0:
        z = Dirichlet(alpha).sample((50_000,))[:, choices]
        explicit = z[:, torch.arange(4), labels].prod(-1)
        mean, error = explicit.mean(0), explicit.std(0) / len(z) ** 0.5
        assert ((mean - prob).abs() < 4 * error).all()
    draws = law.sample((20_000,))
    counts = torch.bincount((draws * torch.tensor([8, 4, 2, 1])).sum(-1), minlength=16)
    expected = prob * len(draws)
    often = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[often].sum()
    assert chi2.sf(statistic, max(1, int(often.sum()) - 1)) > 1e-4
    assert counts[~often].sum() < 100


@pytest.mark.parametrize("shapes", [((), (2, 1), ()), ((3,), (2, 1), (2, 3)), ((3,), (), ())])
def test_batches(kernels, shapes):
    a, c, y = shapes
    alpha = torch.rand(*a, 4, 3) + 0.1
    choices = torch.randint(4, (*c, 5))
    labels = torch.randint(3, (*y, 5))
    law = ChosenLabels(alpha, choices)
    assert law.batch_shape == torch.broadcast_shapes(a, c)
    log_prob = law.log_prob(labels)
    shape = torch.broadcast_shapes(a, c, y)
    assert log_prob.shape == shape
    alpha, choices = alpha.expand(*shape, 4, 3), choices.expand(*shape, 5)
    labels = labels.expand(*shape, 5)
    for index in itertools.product(*map(range, shape)):
        one = ChosenLabels(alpha[index], choices[index]).log_prob(labels[index])
        torch.testing.assert_close(log_prob[index], one)
    assert law.sample((7,)).shape == (7, *law.batch_shape, 5)


def test_known_labels_stay():
    """No known label copies an earlier one; later labels may copy it."""
    known = torch.arange(3).expand(200, 3)
    labels = sampling.draw_from_urns(torch.ones(1, 3), torch.zeros(200, 6).long(), known)
    assert torch.equal(labels[:, :3], known)
