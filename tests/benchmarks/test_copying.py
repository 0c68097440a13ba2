# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators who copy: their answers' distribution, its fit, and what is left out of it."""

import itertools

import pytest
import torch
from crowds import answers_to

from benchmarks.latent.copying import CopyingAnnotators
from pyro_nmm import sources
from pyro_nmm.models import Annotators, fit_field, leave_one_out


def values_of(emission, num_annotators):
    size = num_annotators, emission.num_labels, emission.num_labels
    copies = torch.rand(num_annotators, num_annotators).double().tril()
    confusion = torch.rand(size).double()
    return {"confusion": confusion / confusion.sum(-1, keepdim=True),
            "copies": copies / copies.sum(-1, keepdim=True)}  # fmt: skip


def answered(truth, num_annotators, accuracy=0.6):
    """The last one copies the one before in four of five answers."""
    answers = answers_to(truth, [accuracy] * num_annotators, missing=0.0)
    again = torch.rand(len(truth)) < 0.8
    answers[:, -1] = torch.where(again, answers[:, -2], answers[:, -1])
    return answers.masked_fill(torch.rand(answers.shape) < 0.2, -1)


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1)])
def test_probabilities_of_all_answers_sum_to_one(missing):
    emission = CopyingAnnotators(3)
    every = torch.tensor([
        [-1 if m in missing else a for m, a in enumerate(answers)]
        for answers in itertools.product(range(3), repeat=3)
    ]).unique(dim=0)  # fmt: skip
    total = emission.log_prob(values_of(emission, 3), every).exp().sum(0)
    assert torch.allclose(total, torch.ones(3).double())


def test_without_copies_they_are_annotators():
    emission, plain = CopyingAnnotators(3), Annotators(3)
    values = values_of(emission, 4) | {"copies": torch.eye(4).double()}
    answers = answered(torch.randint(3, (50,)), 4)
    assert torch.allclose(emission.log_prob(values, answers), plain.log_prob(values, answers))
    probs = torch.rand(50, 3).double().softmax(-1)
    found = emission.maximise(answers, probs, values)["confusion"]
    assert torch.allclose(found, plain.maximise(answers, probs, values)["confusion"])


def test_expectation_maximisation_raises_the_posterior():
    torch.manual_seed(0)
    emission, answers = CopyingAnnotators(3), answered(torch.randint(3, (300,)), 4)
    values, old = emission.start(answers, None), -torch.inf
    for _ in range(30):
        joint = emission.log_prob(values, answers).double()
        # Dirichlet counts of a mode in logarithms are those of the prior, undiminished.
        new = (joint.logsumexp(-1).sum() + emission.log_prior(values, answers)).item()
        assert new > old - 1e-3
        old, values = new, emission.maximise(answers, joint.softmax(-1).float(), values)


def posterior_moments(emission, answers, labels, m):
    """
    Means of an annotator's shares and matrix and of their squares, given labels: a sum over all
    that the annotator may have meant.
    """
    size, there = emission.num_labels, (answers[:, m] >= 0).nonzero()[:, 0].tolist()
    like = torch.zeros(size, size).double()
    rows, prior = emission._pseudo_counts(like), emission._copy_counts(m + 1, like)[m]
    total, copies, confusion = 0.0, torch.zeros(2, m + 1).double(), torch.zeros(2, size, size)
    for meant in itertools.product(range(m + 1), repeat=len(there)):
        shares, counts, possible = prior.clone(), rows.clone(), True
        for node, whom in zip(there, meant, strict=True):
            shares[whom] += 1
            if whom == m or answers[node, whom] < 0:
                counts[labels[node], answers[node, m]] += 1
            else:
                possible = possible and answers[node, whom] == answers[node, m]
        if possible:
            weight = (shares.lgamma().sum() + counts.lgamma().sum()
                      - counts.sum(-1).lgamma().sum()).exp()  # fmt: skip
            total = total + weight
            copies += weight * dirichlet_moments(shares)
            confusion += weight * dirichlet_moments(counts)
    return copies / total, confusion / total


def dirichlet_moments(counts):
    """``(2, ...)``: means of the shares, and of their squares."""
    whole = counts.sum(-1, keepdim=True)
    mean = counts / whole
    return torch.stack([mean, mean * (counts + 1) / (whole + 1)])


def test_draws_are_those_of_the_posterior():
    """Of 900 draws in a chain, which know a share of copies to about .015."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1, 1, 0])
    answers = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 1, 1], [-1, 1, 0], [1, 0, 0], [0, -1, 0]])
    emission = CopyingAnnotators(2)
    drawn, draws = emission.start(answers, None), []
    for _ in range(900):
        drawn = emission.draw(answers, labels, drawn)
        draws.append(drawn)
    for m in range(3):
        moments = posterior_moments(emission, answers, labels, m)
        for expected, name, width in zip(moments, ("copies", "confusion"), (m + 1, 2), strict=True):
            values = torch.stack([each[name][m].narrow(-1, 0, width) for each in draws]).double()
            both = torch.stack([values, values.square()], 1)
            parts = both.unflatten(0, (30, 30)).mean(1)
            error = parts.std(0) / len(parts) ** 0.5
            assert ((parts.mean(0) - expected).abs() <= 4.5 * error + 1e-6).all()


def test_copies_are_found_and_are_worth_little():
    torch.manual_seed(0)
    hood, truth = sources.grid(24, 24, stride=4), torch.arange(576) // 192
    answers = answered(truth, 5)
    options = {"num_starts": 1, "num_steps": 60}
    field = fit_field(CopyingAnnotators(3), hood, answers, **options)
    plain = fit_field(Annotators(3), hood, answers, **options)
    assert 0.6 < field.values["copies"][4, 3] < 0.95
    assert leave_one_out(field, answers).mean() > leave_one_out(plain, answers).mean()
    right = [(each.predict() == truth).double().mean() for each in (field, plain)]
    assert right[0] > right[1] - 0.01
