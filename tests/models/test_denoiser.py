# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM over pixels on a U-Net."""

import math
from functools import partial

import pytest
import torch
from oracle import surrogate

from pyro_nmm import (
    GaussianConcentrations,
    LogisticConcentrations,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.datasets.images import image_folder, random_patches
from pyro_nmm.guides import fit_images, fit_unet
from pyro_nmm.guides.images import mean_errors
from pyro_nmm.models import Denoiser, UNet
from pyro_nmm.models.networks import attention_scores


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (9, 14)])
def test_unet_takes_any_size(size):
    network = UNet(channels=2, width=6, depth=3)
    image = torch.rand(2, 2, *size)
    assert torch.equal(network(image)[0], image)  # before any training nothing is added
    torch.nn.init.normal_(network.last.weight)
    extended = torch.nn.functional.pad(image, (0, -size[1] % 8, 0, -size[0] % 8), mode="replicate")
    for found, whole in zip(network(image), network(extended), strict=True):
        assert torch.equal(found, whole[..., : size[0], : size[1]])


def test_larger_images_in_tiles():
    """Every inner quarter is what its tile alone gives; at the border the tile's border."""
    network = UNet(channels=1, width=6, depth=2, tile=8)
    torch.nn.init.normal_(network.last.weight)
    image = torch.rand(2, 1, 13, 21)
    found = network(image)
    small = network(image[..., :8, :8])
    narrow = network(image[..., :5, :])
    network.tile = None
    for tile, inner, within in (
        ((2, 6), (slice(4, 8), slice(8, 12)), (slice(2, 6), slice(2, 6))),
        ((0, 0), (slice(0, 4), slice(0, 4)), (slice(0, 4), slice(0, 4))),
        ((5, 13), (slice(12, 13), slice(20, 21)), (slice(7, 8), slice(7, 8))),
    ):
        alone = network(image[..., tile[0] : tile[0] + 8, tile[1] : tile[1] + 8])
        for part, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(part[..., *inner], expected[..., *within])
    assert torch.equal(small[0], network(image[..., :8, :8])[0])
    assert [part.shape[-2:] for part in found] == [(13, 21)] * 2
    assert [part.shape[-2:] for part in narrow] == [(5, 21)] * 2


def test_unet_is_one_of_lehtinen():
    """Filters and inputs of every layer, as in the paper's appendix."""
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


@pytest.mark.parametrize("concentrations", [LogisticConcentrations, GaussianConcentrations])
@pytest.mark.parametrize("spread", [True, False])
def test_attention_to_oneself_is_a_network_with_widths(spread, concentrations):
    """Bound, joint, marginals and gradients are those of independent pixels."""
    torch.manual_seed(0)
    unet = UNet(channels=2, width=6, depth=1)
    network = Denoiser(unet, spread=spread, concentrations=concentrations)
    if spread:
        torch.nn.init.normal_(network.spread[-1].weight)
    hood, y = Neighborhood.grid(4, 5, radius=0), torch.randint(256, (3, 2, 20))
    noisy = y.view(3, 2, 4, 5) + 20 * torch.randn(3, 2, 4, 5)
    parameters = list(network.parameters())

    def gradients(value):
        return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)

    alpha, logits = network(hood, noisy)
    table = alpha.table()
    expected = (table.gather(-1, y[..., None])[..., 0] / table.sum(-1)).log()
    wanted = gradients(expected.sum())
    torch.testing.assert_close(NeighborMixture(hood, alpha, logits).node_log_probs(y), expected)
    for estimator in ("no_score", "one_step_credit", "reward_to_go"):
        q = OrderedConditional(hood, *network(hood, noisy), y, estimator=estimator)
        c = q.sample()
        assert (c == torch.arange(20)).all()
        torch.testing.assert_close(q.log_labels(c), expected[..., q.order])
        for found, want in zip(gradients(surrogate(q, c).sum()), wanted, strict=True):
            torch.testing.assert_close(found, want)
    assert alpha.width.unique().numel() == (120 if spread else 1)


@pytest.mark.parametrize("estimator", ["no_score", "one_step_credit"])
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
        (-surrogate(q, c).mean()).backward()
        optimizer.step()
        bounds.append(q.log_labels(c).mean().item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert sum(bounds[-10:]) / 10 > sum(bounds[:10]) / 10 + 0.3  # nats a pixel


def test_predictions_are_those_of_the_table():
    hood = Neighborhood.grid(4, 5)
    mean, logits = 16 * torch.rand(2, 3, 20), torch.randn(2, 1, hood.num_edges)
    alpha = LogisticConcentrations(mean, 2.0 + torch.rand(20), 1.5, num_classes=16)
    marginals = NeighborMixture(hood, alpha.table(), logits).marginals()
    assert torch.allclose(NeighborMixture(hood, alpha, logits).marginals(), marginals)
    mix = NeighborMixture(hood, alpha, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyro_nmm.ops.marginals.STRIP", 7)
        found = mix.intervals(level=0.8)
    y = torch.randint(16, (2, 3, 20))
    own = marginals.gather(-1, y[..., None])[..., 0].log()
    torch.testing.assert_close(mix.node_log_probs(y), own)
    expected = (marginals * torch.arange(16)).sum(-1)
    assert torch.allclose(found.mean, expected)
    low, high = (end[..., None] for end in found[1:])
    labels = torch.arange(16)
    below = (marginals * (low - labels + 0.5).clamp(0, 1)).sum(-1)
    above = (marginals * (labels + 0.5 - high).clamp(0, 1)).sum(-1)
    for mass in (below, above):
        torch.testing.assert_close(mass, torch.full_like(mass, 0.1))
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        mix.intervals(level=90)
    table = NeighborMixture(hood, alpha.table(), logits)
    torch.testing.assert_close(table.intervals(level=0.8), found)
    torch.testing.assert_close(table.node_log_probs(y), own)
    with pytest.raises(ValueError, match=r"y holds label 16 at node 0, but alpha has"):
        mix.node_log_probs(torch.full_like(y, 16))


@pytest.mark.parametrize("mean", [5.0, 14.8, 17.0])
@pytest.mark.parametrize("width", [0.2, 2.0])
def test_coverage_of_what_follows_the_model(mean, width):
    """Also where an interval ends within a label, and beyond the last one."""
    hood = Neighborhood.grid(4, 5)
    logits = torch.zeros(1, 1, hood.num_edges)
    alpha = LogisticConcentrations(torch.full((1, 1, 20), mean), width, num_classes=16)
    found = NeighborMixture(hood, alpha, logits).intervals(level=0.8)
    probs = NeighborMixture(hood, alpha, logits).marginals()[0, 0, 0]
    covered = [found.coverage(torch.full((1, 1, 20), k)) for k in range(16)]
    torch.testing.assert_close(probs @ torch.stack(covered), torch.tensor(0.8))


def test_patches_may_change_their_shape(monkeypatch):
    """Even to another one of as many pixels, which is another grid."""
    made, grid = [], Neighborhood.grid
    monkeypatch.setattr(
        Neighborhood, "grid", lambda *size, **options: made.append(size) or grid(*size, **options)
    )
    shapes = iter([(8, 8), (8, 8), (4, 16)])
    network = Denoiser(UNet(channels=1, width=6, depth=1))
    fit_images(network, lambda: torch.zeros(2, 1, *next(shapes)).long(), num_steps=3)
    assert made == [(8, 8), (4, 16)]


def first_steps(frozen=False, **options):
    """A small network after a fit, and its parameters before."""
    torch.manual_seed(0)
    images = [torch.arange(144).view(1, 12, 12)]
    network = Denoiser(UNet(channels=1, width=6, depth=1))
    network.unet.requires_grad_(not frozen)
    before = {name: value.clone() for name, value in network.named_parameters()}
    fit_images(network, lambda: random_patches(images, 2, 8), **options)
    return dict(network.named_parameters()), before


def test_parameters_that_a_fit_changes():
    """With a radius of zero none that mixes neighbours; above a frozen network none of it."""
    cases = {
        lambda name: name.startswith("attention") or name in ("omega", "gamma"): {"radius": 0},
        lambda name: name.startswith("unet"): {"frozen": True},
    }
    for stays, options in cases.items():
        after, before = first_steps(num_steps=3, **options)
        for name, value in after.items():
            assert torch.equal(value, before[name]) == stays(name), name


def test_rates_of_a_fit():
    """The first step of Adam is the rate: a tenth for the U-Net, ten times for single numbers."""
    after, before = first_steps(num_steps=1, lr=0.01, unet_rate=0.1)
    for name, rate in (("unet.last.bias", 0.001), ("log_sigma", 0.1), ("gamma", 0.1)):
        step = (after[name] - before[name]).abs().item()
        assert step == pytest.approx(rate, rel=1e-3), name


REFUSED = [
    (lambda: UNet(depth=0), "depth must be an integer of at least 1, got 0"),
    (lambda: UNet(tile=30), "tile must be a multiple of 4, got 30"),
    (lambda: UNet(1, 6, 1)(torch.rand(1, 8, 8)), r"shape \(B, 1, H, W\), UNet.*, got"),
    (lambda: UNet(1, 6, 1)(torch.rand(1, 3, 8, 8)), r"shape \(B, 1, H, W\), UNet.*, got"),
    *((lambda name=name: Denoiser(UNet(1, 6, 1), **{name: -1}), f"{name} must be positive")
      for name in ("sigma", "scale", "floor")),
    (lambda: Denoiser(UNet(1, 6, 1), num_classes=1), "num_classes must be an integer of"),
    (lambda: Denoiser(UNet(1, 6, 1), width=0), "width must be an integer of at least 1"),
    (lambda: Denoiser(UNet(3, 6, 1))(Neighborhood.grid(3, 4), torch.zeros(1, 3, 4, 4)),
     r"H W = 12 pixels, as hood has, got \(1, 3, 4, 4\)"),
    (lambda: random_patches([], 1), "number and size must be positive and images not"),
    (lambda: random_patches([torch.zeros(1, 30, 40)], 1, 31), "at least 31 pixels"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_error_of_the_mean():
    hood = Neighborhood.grid(3, 4)
    mean, logits = torch.rand(2, 3, 12), torch.randn(2, 1, hood.num_edges)
    y, attention = torch.randint(3, (2, 3, 12)), torch.zeros(2, 12, 12)
    attention[:, hood.target, hood.source] = hood.softmax(logits)[:, 0]
    expected = (torch.einsum("bij,bcj->bci", attention, mean) - y).square().mean((1, 2))
    torch.testing.assert_close(mean_errors(hood, mean, logits, y), expected)


def test_weight_of_the_mean():
    """On a flat image, averages are closer: where only attention moves, it spreads faster."""
    patch, gamma = torch.full((4, 1, 8, 8), 128), {}
    for weight in (0.0, 20.0):
        torch.manual_seed(0)
        network = Denoiser(UNet(channels=1, width=6, depth=1), gamma=5.0)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name == "gamma")
        fit_images(network, lambda: patch, num_steps=20, lr=0.01, mean_weight=weight)
        gamma[weight] = network.gamma.item()
    assert gamma[20.0] < gamma[0.0] - 0.02


def test_losses_of_a_unet():
    """Before any training the estimate is the noisy patch."""
    patch = torch.zeros(1, 1, 4, 4, dtype=torch.long)
    draws = {}
    for loss in ("squared", "log"):
        torch.manual_seed(0)
        draws[loss] = fit_unet(UNet(1, 6, 1), lambda: patch, num_steps=1, loss=loss)[0]
    assert draws["log"] == pytest.approx(math.log(draws["squared"] + 4))
    torch.manual_seed(0)
    UNet(1, 6, 1)
    noise = 50 * torch.rand(1) * torch.randn(1, 1, 4, 4)
    assert draws["squared"] == pytest.approx(noise.square().mean().item())


def test_patches():
    image = torch.arange(30 * 40).view(1, 30, 40)
    patches = random_patches([image, image], 200, 5)
    assert patches.shape == (200, 1, 5, 5)
    corners = [p[0, :2, :2].tolist() for p in patches]
    steps = {(a[1] - a[0], b[0] - a[0]) for a, b in corners}
    turned = {(x * s, y * t) for x, y in ((1, 40), (40, 1)) for s in (1, -1) for t in (1, -1)}
    assert steps == turned  # by all quarters, and mirrored
    assert len({p.min().item() for p in patches}) > 100


def test_image_folder(tmp_path):
    from PIL import Image

    with pytest.raises(FileNotFoundError, match=r"has no \.png or \.jpg files"):
        image_folder(tmp_path)
    Image.new("RGB", (7, 5), (1, 2, 3)).save(tmp_path / "b.png")
    Image.new("L", (4, 3), 9).save(tmp_path / "a.PNG")
    images = image_folder(tmp_path)
    assert list(images) == ["a.PNG", "b.png"]
    assert images["b.png"].shape == (3, 5, 7)
    assert images["b.png"][:, 0, 0].tolist() == [1, 2, 3]
    assert (images["a.PNG"] == 9).all()


@pytest.mark.parametrize("top", [1, 255])
def test_images_in_units_of_one(top):
    """Refused where there are more levels than two, unless they are levels 0 and 1."""
    network = Denoiser(UNet(1, width=6, depth=1), num_classes=top + 1)
    hood, image = Neighborhood.grid(4, 4), torch.rand(2, 1, 4, 4)
    network(hood, image.round())
    network(hood, image - 0.5)
    if top > 1:
        with pytest.raises(
            ValueError, match=r"grey levels 0..255, 255 \* noisy of an image in 0..1"
        ):
            network(hood, image)
    network(hood, top * image)


def test_channels_of_another_network():
    for call in (
        UNet(width=6, depth=1),
        partial(Denoiser(UNet(width=6, depth=1)), Neighborhood.grid(4, 4)),
    ):
        with pytest.raises(ValueError, match=r"UNet\(channels=...\) of the image's channels, got"):
            call(9 * torch.rand(1, 1, 4, 4))
    UNet(channels=1, width=6, depth=1)(torch.rand(1, 1, 4, 4))
