# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM over pixels on a U-Net."""

import pytest
import torch

from pyro_nmm import Neighborhood, OrderedConditional
from pyro_nmm.models import Denoiser, UNet
from pyro_nmm.models.networks import attention_scores


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (9, 14)])
def test_unet_takes_any_size(size):
    network = UNet(channels=2, width=6, depth=3)
    image = torch.rand(2, 2, *size)
    result, features = network(image)
    assert torch.equal(result, image)  # before any training nothing is added
    assert features.shape == (2, 4, *size)


def test_unet_is_one_of_lehtinen():
    """Filters of every layer, and the number of parameters, of the paper's appendix."""
    network = UNet()
    filters = [m.out_channels for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert filters == [48] * 7 + [96] * 8 + [64, 32, 3]
    inputs = [m.in_channels for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert inputs == [3] + [48] * 6 + [96, 96] + [144, 96] * 3 + [99, 64, 32]


def test_each_pixel_sees_its_surroundings():
    network = UNet(channels=1, width=6, depth=2)
    torch.nn.init.normal_(network.last.weight)
    image = torch.rand(1, 1, 16, 16, requires_grad=True)
    network(image)[0][0, 0, 8, 8].backward()
    assert (image.grad != 0).sum() > 100


def test_attention_of_a_batch():
    hood, vectors = Neighborhood.grid(3, 4), torch.randn(5, 12, 6)
    scale, gamma = torch.tensor(2.0), torch.tensor(5.0)
    together = attention_scores(hood, vectors, scale, gamma)
    alone = torch.stack([attention_scores(hood, v, scale, gamma) for v in vectors])
    assert torch.allclose(together, alone)


@pytest.mark.parametrize("estimator", ["em", "horizon"])
def test_learns_an_image(estimator):
    torch.manual_seed(0)
    network, hood = (
        Denoiser(UNet(channels=1, width=8, depth=1), sigma=20.0),
        Neighborhood.grid(8, 8),
    )
    clean = torch.full((4, 1, 8, 8), 60)
    clean[..., 4:] = 180
    y, optimizer, bounds = clean.flatten(2), torch.optim.Adam(network.parameters(), 0.01), []
    for _ in range(60):
        noisy = clean + 25 * torch.randn(clean.shape)
        q = OrderedConditional(hood, *network(hood, noisy), y, estimator=estimator)
        assert q.batch_shape == (4, 1)
        c = q.sample()
        optimizer.zero_grad()
        (-q.surrogate(c).mean()).backward()
        optimizer.step()
        bounds.append(q.log_labels(c).mean().item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert sum(bounds[-10:]) / 10 > sum(bounds[:10]) / 10 + 0.3  # nats a pixel


def test_bad_input():
    with pytest.raises(ValueError, match="channels, width and depth must be positive"):
        UNet(depth=0)
    network = Denoiser(UNet(width=6, depth=1))
    with pytest.raises(ValueError, match=r"H W = 12 pixels, as hood has, got \(1, 3, 4, 4\)"):
        network(Neighborhood.grid(3, 4), torch.zeros(1, 3, 4, 4))
