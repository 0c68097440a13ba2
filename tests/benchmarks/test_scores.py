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
from benchmarks.on_top.run import summary
from benchmarks.random_fields.fields import kac_ward
from pyro_nmm.models import grid_edges, ising


def test_summary_of_counts():
    draws = torch.arange(101)[:, None].expand(-1, 2)
    found = summary(draws, torch.tensor([50, 99]))
    assert found["coverage"] == 0.5
    assert found["width"] == 90
    apart = (draws[:, None] - draws).abs().double().mean((0, 1)) / 2
    expected = (draws - torch.tensor([50, 99])).abs().double().mean(0) - apart
    assert found["CRPS"] == pytest.approx(expected.mean().item())


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
