# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The example that denoises: a U-Net, ordered labels, the bound of an NMM over pixels."""

import math

import pytest
import torch
from graphs import house
from scipy.stats import logistic
from torch.nn import functional as F

from examples.denoising import model, training
from examples.denoising.intervals import label_intervals
from examples.denoising.model import Denoiser, GaussianLevels, Levels, PixelMixture, UNet
from pyro_nmm import NeighborMixture
from pyro_nmm.fitting import Steps

FEW = Steps(num_steps=3, lr=1e-3)


def pixels(kind=Levels, height=2, width=3, radius=1, batch=1):
    """Pixels with means, widths and attention of their own."""
    hood, turns = model.windows(height, width, radius, torch.device("cpu"))
    mean = (60 + 2 * torch.rand(1, 2, hood.num_nodes)).requires_grad_()
    alpha = kind(mean.expand(batch, -1, -1), 1 + torch.rand(mean.shape), torch.tensor(3.0))
    return PixelMixture(hood, alpha, torch.randn(1, 1, hood.num_edges), turns)


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (9, 14)])
def test_unet_takes_any_size(size):
    network, image = UNet(channels=2, width=6, depth=3), torch.rand(2, 2, *size)
    assert torch.equal(network(image)[0], image)  # before any training nothing is added
    torch.nn.init.normal_(network.last.weight)
    extended = F.pad(image, (0, -size[1] % 8, 0, -size[0] % 8), mode="replicate")
    for found, whole in zip(network(image), network(extended), strict=True):
        assert torch.equal(found, whole[..., : size[0], : size[1]])


def test_larger_images_in_tiles():
    """Every inner quarter is what its tile alone gives; at the border the tile's border."""
    network = UNet(channels=1, width=6, depth=2, tile=8)
    torch.nn.init.normal_(network.last.weight)
    image = torch.rand(2, 1, 13, 21)
    found = network(image)
    for (top, left), inner, within in (
        ((2, 6), (slice(4, 8), slice(8, 12)), (slice(2, 6), slice(2, 6))),
        ((0, 0), (slice(0, 4), slice(0, 4)), (slice(0, 4), slice(0, 4))),
        ((5, 13), (slice(12, 13), slice(20, 21)), (slice(7, 8), slice(7, 8))),
    ):
        alone = network(image[..., top : top + 8, left : left + 8])
        for part, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(part[..., *inner], expected[..., *within])
    assert network(image[..., :5, :])[0].shape == (2, 1, 5, 21)


def test_unet_is_one_of_lehtinen():
    """Filters and inputs of every layer, as in the paper's appendix."""
    layers = [m for m in UNet().modules() if isinstance(m, torch.nn.Conv2d)]
    assert [m.out_channels for m in layers] == [48] * 7 + [96] * 8 + [64, 32, 3]
    inputs = [3] + [48] * 6 + [96, 96] + [144, 96] * 3 + [99, 64, 32]
    assert [m.in_channels for m in layers] == inputs


def test_logistic_is_that_of_scipy():
    """Masses of units, tails at the ends, digits far from the mean too."""
    table = Levels(torch.tensor([3.2]), torch.tensor(0.7), torch.tensor(1.0), 1e-300).table()
    edges, law = torch.arange(255).numpy() + 0.5, logistic(3.2, 0.7)
    below, above = law.cdf(edges[:3]), law.sf(edges[3:])
    expected = [below[0], *(below[1:] - below[:-1]), 1 - below[-1] - above[0]]
    expected += [*(above[:-1] - above[1:]), above[-1]]
    torch.testing.assert_close(table[0], torch.tensor(expected), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", [Levels, GaussianLevels])
def test_pixels_are_those_of_the_table(kind):
    """Values, sums, marginals; and the bound, whose exponential has the mean p(y)."""
    mix = pixels(kind, batch=4000)
    mix.turns = [mix.turns[i] for i in torch.randperm(len(mix.turns))]
    y = torch.tensor([60, 61, 60, 60, 61, 61]).expand(4000, 2, -1)
    parts = [mix.written_out(0, channel) for channel in range(2)]
    for channel, part in enumerate(parts):
        at = mix.alpha.at(torch.arange(6), y)[0, channel]
        torch.testing.assert_close(at, part.alpha[range(6), y[0, 0]])
        torch.testing.assert_close(mix.alpha.totals()[0, channel], part.alpha.sum(-1))
        alone = mix.log_marginals(y)[0, channel]
        torch.testing.assert_close(alone, part.marginals()[range(6), y[0, 0]].log())
    expected = torch.stack([part.log_prob(y[0, 0]) for part in parts]).exp()
    found = mix.bound_terms(y).sum(-1).exp()
    z = (found.mean(0) - expected) / (found.std(0) / len(found) ** 0.5)
    assert z.abs().max() < 4
    assert (found.std(0) / expected < 1).all()
    one = pixels(kind).intervals(level=0.8)
    assert all(value.shape == (1, 2, 6) for value in one)
    assert pixels(kind).sample(3).shape == (3, 1, 2, 6)


def test_intervals_of_labels():
    """Half of what is left out lies beyond each end; a batch has intervals of its own."""
    hood = house()
    mix = NeighborMixture(hood, torch.rand(2, 5, 7) + 0.1, torch.randn(hood.num_edges))
    found, probs, labels = label_intervals(mix, 0.8), mix.marginals(), torch.arange(7.0)
    torch.testing.assert_close(found.mean, probs @ labels)
    for end, share in ((found.low, 0.1), (found.high, 0.9)):
        below = (probs * (end[..., None] + 0.5 - labels).clamp(0, 1)).sum(-1)
        torch.testing.assert_close(below, torch.full_like(below, share))


def test_gradient_of_independent_pixels():
    """Windows of one pixel: the bound is exact, and so is its gradient."""
    mix, y = pixels(radius=0), torch.randint(58, 64, (1, 2, 6))
    found, expected = mix.bound_terms(y), mix.log_marginals(y)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(value.sum(), mix.alpha.mean)[0] for value in (found, expected))
    torch.testing.assert_close(*grads)


def test_gradient_of_the_bound():
    """The gradient of EM: of log p(y, c) at choices of q, the mean over all of them."""
    mix = pixels(height=1, width=2, batch=4000)
    y = torch.tensor([61, 61]).expand(4000, 2, -1)
    [one] = torch.autograd.grad(mix.bound_terms(y).sum() / 4000, mix.alpha.mean)
    part = mix.written_out(0, 0)
    q = part.choices(y[0, 0], order=torch.arange(2))
    c = q.sample((20_000,))
    [exact] = torch.autograd.grad(q.log_terms(c).sum(-1).mean(), mix.alpha.mean)
    torch.testing.assert_close(one.sum(0)[0], exact.sum(0)[0], rtol=0.03, atol=1e-3)


def test_turns_share_no_neighbour():
    hood, turns = model.windows(7, 8, 1, torch.device("cpu"))
    assert torch.cat([nodes for nodes, _ in turns]).sort().values.equal(torch.arange(56))
    assert len(turns) == 9
    assert all(rows.source.unique().numel() == rows.num_edges for _, rows in turns)
    assert sum(rows.num_edges for _, rows in turns) == hood.num_edges


def test_learns_an_image():
    torch.manual_seed(0)
    network, clean = Denoiser(UNet(1, width=8, depth=1), sigma=20.0), torch.full((4, 1, 8, 8), 60)
    clean[..., 4:] = 180
    losses = training.fit_images(network, lambda: clean, Steps(num_steps=60, lr=0.01))
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.3  # nats a pixel
    assert not network.training
    mix = network(255 * torch.rand(1, 1, 8, 8))
    assert isinstance(mix.written_out(0, 0), NeighborMixture)


def first_steps(frozen=False, steps=FEW, **options):
    """A small network after a fit, and its parameters before."""
    torch.manual_seed(0)
    images = [torch.arange(144).view(1, 12, 12)]
    network = Denoiser(UNet(channels=1, width=6, depth=1))
    network.unet.requires_grad_(not frozen)
    before = {name: value.clone() for name, value in network.named_parameters()}
    training.fit_images(network, lambda: training.random_patches(images, 2, 8), steps, **options)
    return dict(network.named_parameters()), before


def test_parameters_that_a_fit_changes():
    """With a radius of zero none that mixes neighbours; above a frozen network none of it."""
    cases = {
        lambda name: name.startswith("attention") or name in ("omega", "gamma"): {"radius": 0},
        lambda name: name.startswith("unet"): {"frozen": True},
    }
    for stays, options in cases.items():
        after, before = first_steps(**options)
        for name, value in after.items():
            assert torch.equal(value, before[name]) == stays(name), name
    after, before = first_steps(steps=Steps(num_steps=1, lr=0.01), unet_rate=0.1)
    for name, rate in (("unet.last.bias", 0.001), ("log_sigma", 0.1), ("gamma", 0.1)):
        step = (after[name] - before[name]).abs().item()
        assert step == pytest.approx(rate, rel=1e-3), name


def test_losses_of_a_unet():
    """Before any training the estimate is the noisy patch."""
    patch, draws = torch.zeros(1, 1, 4, 4, dtype=torch.long), {}
    for loss in ("squared", "log"):
        torch.manual_seed(0)
        steps = Steps(num_steps=1, lr=1e-3)
        draws[loss] = training.fit_unet(UNet(1, 6, 1), lambda: patch, steps, loss=loss)[0]
    assert draws["log"] == pytest.approx(math.log(draws["squared"] + 4))
    with pytest.raises(ValueError, match="loss must be 'squared' or 'log'"):
        training.fit_unet(UNet(1, 6, 1), lambda: patch, FEW, loss="absolute")


def test_patches():
    image = torch.arange(30 * 40).view(1, 30, 40)
    patches = training.random_patches([image, image], 200, 5)
    assert patches.shape == (200, 1, 5, 5)
    corners = [p[0, :2, :2].tolist() for p in patches]
    steps = {(a[1] - a[0], b[0] - a[0]) for a, b in corners}
    turned = {(x * s, y * t) for x, y in ((1, 40), (40, 1)) for s in (1, -1) for t in (1, -1)}
    assert steps == turned  # by all quarters, and mirrored
    assert len({p.min().item() for p in patches}) > 100
