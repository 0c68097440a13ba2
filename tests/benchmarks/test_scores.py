# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Scores that are computed here, against SciPy, enumeration and samples of known laws."""

import math

import pytest
import scipy.stats
import torch
from torch.nn.functional import one_hot

import benchmarks.images.run as scores
from benchmarks.latent import annotators
from benchmarks.nodes import fits
from benchmarks.on_top.run import summary
from benchmarks.random_fields.fields import kac_ward
from benchmarks.scale.speed import score_share
from examples.denoising.model import Levels, PixelMixture, windows
from pyro_nmm.models import grid_edges, ising


def gains_of(num_nodes, num_pairs, hub):
    """Nodes of a mask, pairs of them, and gains of the pairs that are larger at the first node."""
    mask = torch.rand(2 * num_nodes) < 0.5
    ids = mask.nonzero().flatten()
    pairs = torch.combinations(ids)
    pairs = pairs[torch.randperm(len(pairs))[:num_pairs]].T
    gain = torch.randn(num_pairs, dtype=torch.double)
    gain[(pairs == pairs[0, 0]).any(0)] += hub
    return mask, ids, pairs, gain


def test_contribution_of_two_nodes():
    mask, ids, pairs, gain = gains_of(20, 60, hub=3.0)
    found = fits.summary(gain, pairs, mask, num_resamples=9)
    together = [gain[(pairs == a).any(0) | (pairs == b).any(0)].sum().item() / 60
                for a, b in torch.combinations(ids)]  # fmt: skip
    assert found["two nodes"] == pytest.approx(max(together))
    assert found["median"] == gain.sort().values[29].item()
    assert found["share"] == pytest.approx((gain > 0).sum().item() / 60)


def test_interval_is_a_bootstrap_over_nodes():
    """It equals a bootstrap node by node, and is wider than over pairs if a hub has the gains."""
    mask, ids, pairs, gain = gains_of(40, 300, hub=8.0)
    before = torch.get_rng_state()
    found = fits.summary(gain, pairs, mask, num_resamples=2000)
    assert torch.equal(torch.get_rng_state(), before)
    means = []
    for _ in range(2000):
        drawn = ids[torch.randint(len(ids), (len(ids),))]
        times = torch.bincount(drawn, minlength=len(mask)).double()
        weight = times[pairs[0]] * times[pairs[1]]
        means.append((weight * gain).sum() / weight.sum())
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    width = high - low
    assert found["low"] == pytest.approx(low, abs=0.1 * width)
    assert found["high"] == pytest.approx(high, abs=0.1 * width)
    assert width > 2 * 1.96 * gain.std().item() / 300**0.5


def test_summary_of_counts():
    draws = torch.arange(101)[:, None].expand(-1, 2)
    found = summary(draws, torch.tensor([50, 99]))
    assert found["coverage"] == 0.5
    assert found["width"] == 90
    apart = (draws[:, None] - draws).abs().double().mean((0, 1)) / 2
    expected = (draws - torch.tensor([50, 99])).abs().double().mean(0) - apart
    assert found["CRPS"] == pytest.approx(expected.mean().item())


def test_share_of_the_score_term():
    """The estimate is a half for gradients that have half of the term, within its own error."""
    term = torch.randn(30)
    direct, half, whole = (share * term + 0.5 * torch.randn(800, 30) for share in (0.0, 0.5, 1.0))
    found = score_share(whole, half, direct)
    assert abs(found["score"] - 0.5) < 4 * found["score error"] < 0.1


def test_names_of_labels_that_have_none():
    """A label for each layer; one left over is that of the layer that it overlaps with most."""
    y = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    labels = torch.tensor([2, 2, 0, 1, 1, 0, 0])
    found = annotators.clustering_scores(torch.eye(3)[labels], y)
    assert found["accuracy"] == pytest.approx(5 / 6)
    layers = torch.tensor([0, 0, 2, 1, 1, 1, -1])
    fewer = annotators.clustering_scores(torch.eye(2)[(y == 1).long()], layers)
    assert fewer["accuracy"] == pytest.approx(5 / 6)
    # Clusterings that differ by their names alone agree. The last node has no answer.
    answers = torch.stack([labels, (labels + 1) % 3], 1)
    answers[-1] = -1
    found = annotators.without_fit(answers)
    assert torch.equal(found["majority"][:-1], one_hot(labels, 3).double()[:-1])
    assert torch.equal(found["majority"][-1], torch.ones(3).double() / 3)
    assert torch.equal(found["2"][:-1].argmax(1), (labels[:-1] + 1) % 3)


def test_log_z_of_kac_and_ward(double):
    for height, width, coupling in ((5, 4, 0.3), (1, 6, 0.5), (6, 1, 0.4), (7, 7, 0.9)):
        field = ising(grid_edges(height, width), coupling, torch.zeros(height * width))
        assert abs(kac_ward(height, width, coupling) - field.log_normalizer().item()) < 1e-9


@pytest.mark.parametrize("name", ["log p", "log p, logistic"])
def test_densities_of_grey_levels(name, double):
    """Masses that sum to one, as SciPy's, far out too."""
    density = scores.DENSITIES[name]
    law = {"log p": scipy.stats.norm, "log p, logistic": scipy.stats.logistic}[name]
    floor = 0.0 if name == "log p" else 1e-5
    for mean in (-3.0, 100.2, 254.9):
        found = [density(torch.tensor([mean]), torch.tensor([k]), 8.0) for k in range(256)]
        assert sum(map(math.exp, found)) == pytest.approx(1)
        for k in (0, 1, 41, 100, 160, 254, 255):
            gap = abs(k - mean)
            mass = law.sf((gap - 0.5) / 8) - law.sf((gap + 0.5) / 8)
            mass = law.cdf((0.5 - mean) / 8) if k == 0 else mass
            mass = law.sf((254.5 - mean) / 8) if k == 255 else mass
            mass = (20 * mass + floor) / (20 + 256 * floor)
            assert found[k] == pytest.approx(math.log(mass), rel=1e-6)


def test_the_highest_of_a_peak():
    """As a search of all values finds it, at the ends too, and in fewer steps."""
    for place in range(-3, 45, 4):
        asked = []

        def score(value, place=place, asked=asked):
            asked.append(value)
            return -abs(scores.FACTORS.index(value) - place)

        assert scores.highest(scores.FACTORS, score) == scores.FACTORS[min(max(place, 0), 40)]
        assert len(asked) <= 12


def mixture(height, width, scale=2.0, level=None):
    """Pixels with means of their own, or all the same."""
    hood, turns = windows(height, width, 1, torch.device("cpu"))
    shape = 1, 3, height * width
    mean = 60 + 20 * torch.rand(shape) if level is None else torch.full(shape, level)
    logits = torch.zeros(1, 1, hood.num_edges)
    logits = torch.randn_like(logits) if level is None else logits
    alpha = Levels(mean, torch.tensor(4.0), torch.tensor(scale))
    return PixelMixture(hood, alpha, logits, turns)


@pytest.mark.parametrize("side", [1, 2, 3])
def test_tiles_are_marginals_of_the_mixture(side, double):
    """Exactly, also where an image does not split into whole tiles, and tiles share no source."""
    whole, y = mixture(3, 4), torch.randint(50, 90, (12,))
    cut, pixels = scores.cut(whole, 3, 4, side)
    assert sorted(pixels.tolist()) == list(range(12))
    assert cut.bound_terms(y[pixels].expand(1, 3, -1)).isfinite().all()
    mix, parts = whole.written_out(0, 1), cut.written_out(0, 1)
    place, tiles = pixels.argsort(), {}
    for pixel in range(12):
        tiles.setdefault((pixel // 4 // side, pixel % 4 // side), []).append(pixel)
    for tile in tiles.values():
        nodes = torch.tensor(tile[:3])
        expected = mix.log_marginal(nodes, y[nodes])
        found = parts.log_marginal(place[nodes], y[nodes])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if side < 3:  # adjacent pixels of two tiles with the same label
        near, same = torch.tensor([side - 1, side]), torch.full((2,), 70)
        alone = sum(parts.log_marginal(place[near[i : i + 1]], same[:1]) for i in (0, 1))
        torch.testing.assert_close(parts.log_marginal(place[near], same), alone)
        assert mix.log_marginal(near, same) > alone


def test_power_spectra():
    """White noise has its variance everywhere, a wave its power in its own bin."""
    found = scores.power(3 * torch.randn(200, 3, 32, 48))
    assert found == pytest.approx([9.0] * scores.BINS, rel=0.1)
    wave = torch.sin(2 * math.pi * 0.27 * torch.arange(64)).expand(1, 64, 64)
    for field in (wave, wave.mT):
        found = scores.power(field)
        assert found.index(max(found)) == int(0.27 / scores.NYQUIST * scores.BINS)


def test_spectra_of_samples(double):
    """Shared neighbours make samples smoother than independent draws from their marginals."""
    mix = mixture(48, 48, scale=0.2, level=100.0)
    row = scores.spectra(mix, mix.sample()[0].view(3, 48, 48))
    low, high = (sum(row["sample"][part]) / 4 for part in (slice(4), slice(12, 16)))
    assert low > 1.3 * high
    # Of 81 pairs of choices 6 are the same, and then the second repeats the first.
    repeats = 6 / 81 / (1 + 0.2 + 256e-5)
    assert row["lags"]["sample"][0] == pytest.approx(repeats, abs=0.03)
    assert row["lags"]["apart"][0] == pytest.approx(0, abs=0.03)
    gap = row["ties"]["sample"] - row["ties"]["apart"]
    assert gap == pytest.approx(repeats * (1 - row["ties"]["apart"]), abs=0.02)
    assert row["total"] == pytest.approx(0.2 + 256e-5)
