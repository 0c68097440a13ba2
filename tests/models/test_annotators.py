# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators of labels that are drawn from the model, so that what they are worth is known."""

import itertools

import pyro
import pytest
import torch
from crowds import answers_to
from emissions import sampled
from torchmetrics.functional.classification import multiclass_calibration_error

from pyro_nmm import Neighborhood, NeighborMixture, sources
from pyro_nmm.models import (
    Annotators,
    FieldPrior,
    NormalEmission,
    accuracy,
    fit_field,
    information,
)
from pyro_nmm.models.hidden import mixture_em

#: Of three labels.
ORDERS = [torch.tensor(names) for names in itertools.permutations(range(3))]
RIGHT = torch.tensor([0.9, 0.75, 0.6, 0.45])


def drawn(size=24, labels=3, kappa=0.3):
    """A field of the model's own on a square of pixels."""
    hood = sources.grid(size, size, stride=4)
    return hood, NeighborMixture(hood, *FieldPrior(labels, kappa=kappa)(hood)).sample()


def log_score(probs, truth):
    return probs[torch.arange(len(truth)), truth].clamp(min=1e-12).log().mean()


@pytest.mark.slow
def test_neighbours_help():
    """
    Against the same annotators without a graph; and probabilities are right. Means over four
    fields: of one, the gain varies by a third, and an accuracy by a fortieth.
    """
    emission, found = Annotators(3), []
    for _ in range(4):
        hood, truth = drawn()
        answers = answers_to(truth, RIGHT)
        alone = mixture_em(emission, answers, emission.start(answers, hood))[1]
        field = fit_field(emission, hood, answers, num_starts=1)
        quality = accuracy(field)
        assert (quality.low < quality.mean).all()
        assert (quality.mean < quality.high).all()
        rights = [(p.argmax(-1) == truth).float().mean() for p in (field.probs, alone)]
        found.append([
            log_score(field.probs, truth) - log_score(alone, truth),
            rights[0] - rights[1],
            multiclass_calibration_error(field.probs, truth, 3, n_bins=15),
            *quality.mean,
        ])  # fmt: skip
    gain, more, error, *right = torch.tensor(found).mean(0)
    assert gain > 0.03
    assert more > 0.01
    assert error < 0.05
    assert (torch.stack(right) - RIGHT).abs().max() < 0.05
    assert torch.stack(right).argsort().tolist() == [3, 2, 1, 0]


def test_intervals_cover():
    """
    Intervals of 90 % hold 90 % of the accuracies where the model draws everything, accuracies too.
    The share among 320 varies by .02 from seed to seed. Intervals too narrow by a third would hold
    three quarters.
    """
    emission, prior, hood = Annotators(3), FieldPrior(3, kappa=0.3), sources.grid(12, 12, stride=4)
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


def test_quality_is_that_of_the_draws():
    """By loops over the draws of a field whose labels are not equally frequent."""
    truth = (torch.arange(60) >= 45).long()
    answers = answers_to(truth, torch.tensor([0.9, 0.6]), labels=2)
    options = {"num_starts": 1, "num_steps": 5, "num_draws": 3}
    field = fit_field(Annotators(2), Neighborhood.grid(6, 10), answers, **options)
    right, told = [], []
    for labels, confusion in zip(field.samples, field.draws["confusion"], strict=True):
        share = torch.bincount(labels.long(), minlength=2) / 60
        right.append(torch.stack([share @ matrix.diagonal() for matrix in confusion]))
        joint = share[:, None] * confusion
        both = share[:, None] * joint.sum(1, keepdim=True)
        told.append((joint * (joint / both).log()).sum((1, 2)))
    for query, draws in ((accuracy, right), (information, told)):
        draws, found = torch.stack(draws), query(field, level=0.8)
        torch.testing.assert_close(found.mean, draws.mean(0))
        torch.testing.assert_close(found.low, draws.quantile(0.1, 0))
        torch.testing.assert_close(found.high, draws.quantile(0.9, 0))


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
    for query in (accuracy, information):
        with pytest.raises(ValueError, match=query.__name__):
            query(field)
    field = Annotators(2).fit(hood, torch.randint(2, (9, 2)), **options)
    for query, level in itertools.product((accuracy, information), (1.0, 90)):
        with pytest.raises(ValueError, match=f"level must lie between 0 and 1, got {level}"):
            query(field, level=level)


def test_shares_of_types_maximise_the_expected_posterior():
    """
    The expected log-posterior of one row of shares has the same derivative in each of them. Counts
    are added up node by node.
    """
    emission, probs = Annotators(2, num_types=3), torch.rand(40, 2).softmax(-1)
    answers = torch.randint(-1, 3, (40, 4))
    values = emission.start(answers, Neighborhood.grid(5, 8))
    counts = torch.zeros(2, 3)
    for node, label in itertools.product(range(40), range(2)):
        seen = answers[node] >= 0
        of_type = values["confusion"][seen, :, answers[node, seen]].prod(0) * values["types"][label]
        counts[label] += probs[node, label] * of_type / of_type.sum()
    types = emission.maximise(answers, probs, values)["types"].requires_grad_()
    prior = emission.log_prior(values | {"types": types}, answers)
    (slope,) = torch.autograd.grad((counts * types.log()).sum() + prior, types)
    torch.testing.assert_close(slope, slope[:, :1].expand(2, 3))


def test_shares_of_types_are_drawn_from_their_prior_where_a_label_has_no_node():
    """
    Variances of Dirichlet(1/3, 1/3, 1/3), which are a ninth. 1,500 draws notice an error of a
    seventh; variances of Dirichlet(1, 1, 1) are half as large.
    """
    emission, answers = Annotators(2, num_types=3), torch.zeros(2, 1, dtype=torch.long)
    values = {"confusion": torch.full((1, 3, 2), 0.5), "types": torch.full((2, 3), 1 / 3)}
    labels = torch.zeros(2, dtype=torch.long)
    rows = [emission.draw(answers, labels, values)["types"][1] for _ in range(1500)]
    torch.testing.assert_close(
        torch.stack(rows).var(0), torch.full((3,), 1 / 9), atol=0.015, rtol=0
    )
