# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What the benchmark of denoising measures: noise levels, tiles, spectra, and their tables."""

import math
from importlib import import_module

import pytest
import torch

from pyro_nmm import LogisticConcentrations, Neighborhood, NeighborMixture


@pytest.fixture(scope="module")
def joint():
    return import_module("benchmarks.images.joint")


def mixture(height, width, scale=2.0, spread=4.0, level=None):
    """Pixels with means and widths of their own, or all alike."""
    torch.manual_seed(0)
    hood, shape = Neighborhood.grid(height, width), (1, 3, height * width)
    mean = 60 + 20 * torch.rand(shape) if level is None else torch.full(shape, level)
    alpha = LogisticConcentrations(mean.double(), spread, scale)
    return NeighborMixture(hood, alpha, torch.randn(1, 1, hood.num_edges).double())


def test_noise_of_other_levels_is_the_same_but_for_its_size():
    images = import_module("benchmarks.images.run")
    image = torch.randint(256, (3, 5, 4))
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(7))
    assert torch.equal(images.noisy(image, 7), image + 25.0 * noise)
    assert torch.equal(images.noisy(image, 7, 50.0), image + 50.0 * noise)


@pytest.mark.parametrize("side", [1, 2, 3])
def test_tiles_are_marginals_of_the_mixture(joint, side):
    """Exactly, also where an image does not split into whole tiles."""
    mix = mixture(3, 4)
    y = torch.randint(50, 90, (1, 3, 12))
    parts, pixels, inside = joint.cut(mix, 3, 4, side)
    assert int(inside.sum()) == 12
    for top in range(0, 3, side):
        for left in range(0, 4, side):
            tile = [4 * i + j for i in range(top, min(top + side, 3))
                    for j in range(left, min(left + side, 4))][:3]  # fmt: skip
            copies = [(inside & (pixels == i)).nonzero().item() for i in tile]
            nodes, copies = torch.tensor(tile), torch.tensor(copies)
            expected = mix.log_marginal(nodes, y[..., nodes])
            found = parts.log_marginal(copies, y[..., nodes])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_tiles_share_no_source(joint):
    mix = mixture(4, 4)
    parts, pixels, inside = joint.cut(mix, 4, 4, 2)
    near = [(inside & (pixels == i)).nonzero().item() for i in (1, 2)]  # of two tiles
    y, pair = torch.full((1, 3, 2), 70), torch.tensor(near)
    alone = sum(parts.log_marginal(pair[i : i + 1], y[..., i : i + 1]) for i in (0, 1))
    torch.testing.assert_close(parts.log_marginal(pair, y), alone)
    assert (mix.log_marginal(torch.tensor([1, 2]), y) > alone).all()


def test_bounds_of_tiles(joint):
    mix = mixture(12, 10, scale=1.0)
    clean = mix.sample().view(3, 12, 10)
    row = joint.tiles(mix, clean)
    bounds = [row["log p"], *(row[f"joint {side}"] for side in joint.SIDES), row["joint"]]
    assert bounds[0] < bounds[1] < bounds[-1]
    assert row["joint 16"] == pytest.approx(row["joint"], abs=0.1)  # another order, same image
    with pytest.raises(ValueError, match="side must be positive, got 0"):
        joint.cut(mix, 12, 10, 0)
    with pytest.raises(ValueError, match="7 x 7 pixels are not the 120"):
        joint.cut(mix, 7, 7, 2)


def test_power_spectra(joint):
    """White noise has its variance everywhere, a wave its power in its own bin."""
    torch.manual_seed(0)
    found = joint.power(3 * torch.randn(400, 3, 32, 48))
    assert found.shape == (joint.BINS,)
    torch.testing.assert_close(found, torch.full_like(found, 9.0), rtol=0.1, atol=0)
    wave = torch.sin(2 * math.pi * 0.27 * torch.arange(64))
    found = joint.power(wave.expand(1, 64, 64))
    assert found.argmax() == int(0.27 / joint.NYQUIST * joint.BINS)
    assert joint.power(wave.expand(1, 64, 64).mT).argmax() == found.argmax()


def test_correlations_at_a_distance(joint):
    torch.manual_seed(0)
    x = torch.randn(200, 1, 60, 60).double()
    smooth = x[..., 1:, 1:] + x[..., :-1, 1:] + x[..., 1:, :-1] + x[..., :-1, :-1]
    assert joint.correlation(x, 1) == pytest.approx(0, abs=0.01)
    assert joint.correlation(smooth, 1) == pytest.approx(0.5, abs=0.01)
    assert joint.correlation(smooth, 2) == pytest.approx(0, abs=0.01)


def test_spectra_of_samples(joint):
    """Shared neighbours make samples smoother than their marginals drawn apart."""
    mix = mixture(48, 48, scale=0.2, level=100.0)
    mix = NeighborMixture(mix.hood, mix.alpha, torch.zeros_like(mix.logits))
    row = joint.spectra(mix, mix.sample().view(3, 48, 48))
    low, high = (sum(row["sample"][part]) / 4 for part in (slice(4), slice(12, 16)))
    assert low > 1.3 * high
    # Of 81 pairs of choices 6 are the same, and then the second repeats the first.
    repeats = 6 / 81 / (1 + 0.2 + 256e-5)
    assert row["lags"]["sample"][0] == pytest.approx(repeats, abs=0.03)
    assert row["lags"]["apart"][0] == pytest.approx(0, abs=0.03)
    gap = row["ties"]["sample"] - row["ties"]["apart"]
    assert gap == pytest.approx(repeats * (1 - row["ties"]["apart"]), abs=0.02)
    assert row["total"] == pytest.approx(0.2 + 256e-5)
    values = joint.apart(mix).flatten()
    assert values.double().mean() == pytest.approx(100, abs=1)
    # Deviations of the same law everywhere: those apart are white.
    assert sum(row["apart"][:8]) == pytest.approx(sum(row["apart"][8:]), rel=0.3)


def test_the_highest_of_a_peak():
    """As a search of all values finds it, at the ends too, and in fewer steps."""
    highest = import_module("benchmarks.images.scores").highest
    values = torch.logspace(-0.5, 0.5, 41).tolist()
    for place in range(-3, 45):
        asked = []

        def score(value, place=place, asked=asked):
            asked.append(value)
            return -abs(values.index(value) - place)

        assert highest(values, score) == values[min(max(place, 0), 40)]
        assert len(asked) <= 19
    y = torch.distributions.Normal(100.0, 9.0).sample((3, 20, 20)).round().clamp(0, 255)
    density = import_module("benchmarks.images.scores").log_logistic
    mean = torch.full(y.shape, 100.0)
    widths = torch.logspace(0, 1.5, 61).tolist()
    found = highest(widths, lambda width: density(mean, y.long(), width))
    assert found == max(widths, key=lambda width: density(mean, y.long(), width))


SETTINGS = {"num_steps": 9, "width": 2, "depth": 1, "batch_size": 1, "lr": 1e-3}


def rows_of(noise, gain):
    """Two seeds and three images, on which one method has ``gain`` more than the control."""
    row = {"task": "test", "dataset": "kodak24", "settings": SETTINGS, "coverage": 0.9}
    return [
        row | ({} if noise is None else {"noise": noise})
        | {"method": method, "seed": seed, "image": image, "length": 9.0, "PSNR": 30 + more,
           "log p": -3.5 + more, "joint": -3.4, "log p, scaled": -3.4 + more}
        for method, more in (("U-Net-log", 0.0), ("NMM", gain), ("U-Net-widths", 0.1))
        for seed in (0, 1) for image in "abc"
    ]  # fmt: skip


def test_rows_without_noise_are_those_of_25():
    tables = import_module("benchmarks.images.tables")
    rows = rows_of(None, 0.3) + rows_of(50.0, -0.2)
    lines = list(tables.denoising_levels(rows))
    assert [line["noise"] for line in lines] == ["25"] * 3 + ["50"] * 3
    gains = {(line["noise"], line["method"]): line["best", "minus the control's"] for line in lines}
    assert gains["25", "NMM"].startswith("+0.300 ± 0.000")
    assert gains["50", "NMM"].startswith("-0.200 ± 0.000")
    # Tables of a single noise leave the others out.
    assert list(tables.denoised(rows)) == list(tables.denoised(rows_of(None, 0.3)))
    # What is missing is asked for by the same keys.
    found = import_module("benchmarks.shared.common").Records(None)
    found.rows = rows
    key = {"task": "test", "method": "NMM", "seed": [0, 1], "noise": [None, 15.0, 50.0]}
    assert [row["noise"] for row in found.missing(**key)] == [15.0, 15.0]


def test_sentences_of_noise_levels():
    claims = import_module("benchmarks.images.claims")
    text = " ".join(claims.levels_claim(rows_of(None, 0.3) + rows_of(50.0, -0.2)).split())
    assert "*Noise 25*: the NMM minus the control +0.300 ± 0.000 nats and +0.30 ± 0.00 dB" in text
    assert "*Noise 50*: the NMM minus the control -0.200 ± 0.000 nats" in text
    assert "the NMM minus widths -0.300 ± 0.000 nats" in text
    assert claims.levels_claim([]) == "Nothing has been measured yet."
    assert "above its in 1 of 1 cases" in claims.instead(claims.at_levels(rows_of(None, 0.3)))
    assert "above its in 0 of 1 cases" in claims.instead(claims.at_levels(rows_of(None, 0.0)))


def test_distances_of_spectra():
    """Ten times the power in one of two halves is 10 dB there, and 10 / sqrt(2) over all."""
    tables = import_module("benchmarks.images.joint_tables")
    error, more = [1.0] * 16, [1.0] * 8 + [10.0] * 8
    row = {"task": "spectra", "dataset": "kodak24", "settings": SETTINGS, "seed": 0}
    row |= {"error": error, "sample": more, "another": more, "apart": error}
    rows = [row | {"method": "NMM", "image": image} for image in "ab"]
    lines = list(tables.denoising_spectra(rows))
    assert [line["all"] for line in lines] == ["7.1 ± 0.0", "0.0 ± 0.0", "0.0 ± 0.0"]
    assert lines[0]["1/4 to 1/2"] == "10.0 ± 0.0 (+10.0)"
    assert lines[0]["1/8 to 1/4"] == "0.0 ± 0.0 (+0.0)"
    gap = tables.closer(rows, ("NMM", "sample"), ("NMM", "apart"))
    assert gap.mean == pytest.approx(10 / 2**0.5)


def test_gains_of_tiles():
    tables = import_module("benchmarks.images.joint_tables")
    row = {"task": "tiles", "dataset": "kodak24", "settings": SETTINGS, "method": "NMM", "seed": 0}
    row |= {"log p": -3.5, "joint": -3.4, "joint 2": -3.45, "joint 10": -3.42}
    line = next(tables.denoising_tiles([row | {"image": image} for image in "ab"]))
    assert list(line)[-3:] == ["2 x 2", "10 x 10", "whole"]
    assert line["2 x 2"].startswith("+0.0500")
    text = " ".join(
        import_module("benchmarks.images.claims").tiles_claim([row | {"image": "a"}]).split()
    )
    assert "whole images +0.1000 nats a value, of which tiles have 50 % in 2 x 2, 80 %" in text


def test_new_names_are_in_the_tables():
    """Nothing is looked up in a list of what is known, and every row counts."""
    tables = import_module("benchmarks.images.joint_tables")
    spectrum = [1.0 + n for n in range(16)]
    row = {"settings": SETTINGS, "seed": 0, "dataset": "kodak24", "method": "NMM", "image": "a"}
    tiles = row | {"task": "tiles", "log p": -3.5, "joint": -3.4, "joint 2": -3.45}
    drawn = dict.fromkeys(("error", "sample", "another", "apart"), spectrum)
    for known, name in ((tiles, "tiles"), (row | drawn | {"task": "spectra"}, "spectra")):
        for change in ({"method": "another one"}, {"dataset": "another one"}):
            text = tables.tables([known, known | change])[f"denoising {name}"]
            assert "another one" in text
        for change in ({"seed": 1}, {"image": "b"}, {"noise": 15.0}):
            once, twice = (tables.tables(rows) for rows in ([known], [known, known | change]))
            assert once != twice
