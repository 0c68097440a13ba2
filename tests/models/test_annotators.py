# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators of labels that are drawn from the model, so that what they are worth is known."""

import itertools
from dataclasses import replace

import pyro
import pytest
import torch
from crowds import answers_to
from emissions import sampled

from pyro_nmm import Neighborhood, NeighborMixture, sources
from pyro_nmm.models import (
    Annotators,
    FieldPrior,
    NormalEmission,
    accuracy,
    fit_field,
    information,
)

#: Of three labels.
ORDERS = [torch.tensor(names) for names in itertools.permutations(range(3))]
RIGHT = torch.tensor([0.9, 0.75, 0.6, 0.45])


def drawn(size=24, labels=3):
    """A field of the model's own on a square of pixels."""
    hood = sources.grid(size, size, stride=4)
    return hood, NeighborMixture(hood, *FieldPrior(labels)(hood)).sample()


def log_score(probs, truth):
    return probs[torch.arange(len(truth)), truth].clamp(min=1e-12).log().mean()


def test_intervals_cover():
    """
    Intervals of 90 % hold 90 % of the accuracies where the model draws everything, accuracies too.
    The share among 320 varies by .02 from seed to seed. Intervals too narrow by a third would hold
    three quarters.
    """
    emission, prior, hood = Annotators(3), FieldPrior(3), sources.grid(12, 12, stride=4)
    rows = torch.full((16, 3, 3), 0.25)
    rows.diagonal(dim1=1, dim2=2).fill_(0.5)  # counts of the prior
    hits = []
    for _ in range(20):
        truth = NeighborMixture(hood, *prior(hood)).sample()
        confusion = torch.distributions.Dirichlet(rows).sample()
        answers = torch.distributions.Categorical(confusion[:, truth]).sample().T
        answers = answers.masked_fill(torch.rand(144, 16) < 0.6, -1)
        field = sampled(emission, hood, answers, prior, {"confusion": confusion})
        quality = accuracy(field, level=0.9)
        shares = torch.bincount(truth, minlength=3) / 144
        right = confusion.diagonal(dim1=1, dim2=2) @ shares
        hits.append((quality.low < right) & (quality.high > right))
    assert 0.83 < torch.stack(hits).double().mean().item() < 0.97


def test_information_of_certain_answers():
    """log 2 of an annotator who is always right or always wrong, and nothing of one label alone."""
    truth = torch.arange(60) % 2
    answers = torch.stack([truth, truth, 1 - truth, torch.randint(2, (60,))], 1)
    field = fit_field(Annotators(2), Neighborhood.grid(6, 10), answers, num_starts=1, num_steps=20)
    certain = {"confusion": field.draws["confusion"].round()}
    certain["confusion"][:, 3] = torch.tensor([1.0, 0.0])
    found = information(replace(field, draws=certain), level=0.8).mean
    share = (field.samples == 0).double().mean(1)
    whole = (torch.special.entr(share) + torch.special.entr(1 - share)).mean()
    torch.testing.assert_close(found, torch.stack([whole, whole, whole, 0 * whole]))


def test_answers_need_no_names():
    """Clusterings: any renumbering of an annotator's answers is the same."""
    hood, truth = drawn(size=32)
    answers = answers_to(truth, RIGHT, missing=0.0)
    for annotator in range(4):
        answers[:, annotator] = torch.randperm(3)[answers[:, annotator]]
    field = Annotators(3, aligned=False).fit(hood, answers, num_starts=3)
    best = max((names[field.predict()] == truth).double().mean().item() for names in ORDERS)
    assert best > 0.85
    found = information(field)
    assert found.mean.argsort().tolist() == [3, 2, 1, 0]
    assert ((found.low < found.mean) & (found.mean < found.high)).all()
    with pytest.raises(ValueError, match="accuracy needs annotators whose answers name labels"):
        accuracy(field)


def test_annotators_that_err_together():
    """What all of them mistake at a node is one error: a type, of which the label is a part."""
    hood, truth = sources.grid(24, 24, stride=4), torch.arange(576) % 24 * 3 // 24
    mistaken = answers_to(truth, torch.tensor([0.6]), missing=0.0)
    answers = answers_to(mistaken[:, 0], torch.full((8,), 0.9), missing=0.0)
    scores = {}
    for name, emission in {
        "independent": Annotators(3, aligned=False),
        "types": Annotators(3, num_types=3),
    }.items():
        pyro.set_rng_seed(0)
        probs = fit_field(emission, hood, answers, num_starts=2, num_steps=60).probs
        scores[name] = max(log_score(probs[:, names], truth).item() for names in ORDERS)
    assert scores["types"] > scores["independent"] + 0.5


def test_quality_refuses():
    hood = Neighborhood.grid(3, 3)
    options = {"num_starts": 1, "num_steps": 2, "num_draws": 2}
    field = fit_field(NormalEmission(2), hood, torch.randn(9, 1), **options)
    people = Annotators(2).fit(hood, torch.randint(2, (9, 2)), **options)
    for query in (accuracy, information):
        with pytest.raises(ValueError, match=query.__name__):
            query(field)
        with pytest.raises(ValueError, match="level must lie between 0 and 1, got 90"):
            query(people, level=90)
