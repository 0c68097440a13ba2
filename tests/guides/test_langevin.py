# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Steps along the gradient keep the densities that they are given."""

from typing import NamedTuple

import pytest
import torch

from pyro_nmm.guides.langevin import LONGEST, Langevin
from pyro_nmm.ops.diagnostics import effective_size


class Point(NamedTuple):
    position: torch.Tensor
    log_prob: float
    gradient: torch.Tensor


def at_of(log_density):
    def at(position):
        leaf = position.clone().requires_grad_()
        value = log_density(leaf)
        return Point(position, value.item(), torch.autograd.grad(value, leaf)[0])

    return at


def draws_of(log_density, size, number, warmup=300):
    steps, at = Langevin(warmup), at_of(log_density)
    here, draws = at(3 * torch.ones(size).double()), []
    for _ in range(warmup + number):
        here = steps.step(here, at)
        draws.append(here.position)
    return torch.stack(draws[warmup:]), steps


ROOT = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.05, 0.0], [0.3, -0.2, 1.0]]).double()
MEAN = torch.tensor([1.0, -2.0, 0.5]).double()


def normal(x):
    return torch.distributions.MultivariateNormal(MEAN, scale_tril=ROOT).log_prob(x)


def skewed(x):
    """Logarithms of gamma variates, and one whose scale is another's."""
    gamma = torch.tensor([0.7, 3.0]).double() * x[:2] - x[:2].exp()
    return gamma.sum() - x[2].square() / 2 / (1 + x[0].sigmoid()) - (1 + x[0].sigmoid()).log() / 2


@pytest.mark.parametrize("seed", range(2))
def test_normal_density(seed):
    torch.manual_seed(seed)
    draws, steps = draws_of(normal, 3, 4000)
    assert steps.acceptance > 0.99
    assert abs(steps.step_size - LONGEST) < 1e-9
    for k, square in enumerate((ROOT @ ROOT.T).diag()):
        size = effective_size(draws[None, :, k])
        assert (draws[:, k].mean() - MEAN[k]).abs() < 4.5 * (square / size) ** 0.5
        assert abs(draws[:, k].var() / square - 1) < 0.25
        # Over-relaxed: each step goes to the other side of the mean.
        assert torch.corrcoef(torch.stack([draws[:-1, k], draws[1:, k]]))[0, 1] < -0.7


def test_skewed_density():
    """Moments beside those of a grid."""
    torch.manual_seed(0)
    draws, steps = draws_of(skewed, 3, 20_000)
    assert 0.7 < steps.acceptance < 0.95
    axes = torch.linspace(-14, 4, 91), torch.linspace(-4, 4, 41), torch.linspace(-8, 8, 41)
    grid = torch.cartesian_prod(*axes).double()
    weights = torch.vmap(skewed)(grid).softmax(0)
    for number, most in enumerate((0.4, 0.2, 0.2, 1.5)):
        found, exact = (
            torch.stack([x[:, 0], x[:, 1], x[:, 2].abs(), x[:, 0] ** 2])[number]
            for x in (draws, grid)
        )
        error = found.std() / effective_size(found[None]) ** 0.5
        assert (found.mean() - weights @ exact).abs() < 4.5 * error < most


def test_a_density_without_curvature_and_one_without_values():
    torch.manual_seed(0)
    draws, _ = draws_of(lambda x: -x.abs().sum(), 2, 500)
    assert draws.isfinite().all()
    assert draws.std() > 0.5
    draws, _ = draws_of(lambda x: -(x.square().sum()).exp().square().log1p(), 1, 50)
    assert draws.isfinite().all()
