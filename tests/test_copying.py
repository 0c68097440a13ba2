# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators who copy: their answers' distribution, its fit, and what is left out of it."""

import itertools

import pytest
import torch

from pyro_nmm import sources
from pyro_nmm.models import Annotators, CopyingAnnotators, leave_one_out


def values_of(emission, num_annotators):
    size = num_annotators, emission.num_labels, emission.num_labels
    copies = torch.rand(num_annotators, num_annotators).double().tril()
    confusion = torch.rand(size).double()
    return {"confusion": confusion / confusion.sum(-1, keepdim=True),
            "copies": copies / copies.sum(-1, keepdim=True)}  # fmt: skip


def answered(truth, num_annotators, accuracy=0.6):
    wrong = torch.rand(len(truth), num_annotators) >= accuracy
    shift = torch.randint(1, 3, wrong.shape)
    answers = torch.where(wrong, (truth[:, None] + shift) % 3, truth[:, None])
    again = torch.rand(len(truth)) < 0.8
    answers[:, -1] = torch.where(again, answers[:, -2], answers[:, -1])
    return answers.masked_fill(torch.rand(wrong.shape) < 0.2, -1)


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


def test_draws_are_those_of_the_posterior():
    """Their mean, over many Gibbs steps given labels, is near the mode of so many answers."""
    torch.manual_seed(0)
    labels = torch.randint(3, (2000,))
    emission, answers = CopyingAnnotators(3), answered(labels, 4)
    probs = torch.nn.functional.one_hot(labels, 3).float()
    best = drawn = emission.start(answers, None)
    for _ in range(100):
        best = emission.maximise(answers, probs, best)
    draws = []
    for _ in range(120):
        drawn = emission.draw(answers, labels, drawn)
        draws.append(drawn)
    for name in ("confusion", "copies"):
        mean = torch.stack([each[name] for each in draws[20:]]).mean(0)
        assert torch.allclose(mean, best[name], atol=0.03)


def test_copies_are_found_and_are_worth_little():
    torch.manual_seed(0)
    hood, truth = sources.grid(24, 24, stride=4), torch.arange(576) // 192
    answers = answered(truth, 5)
    field = CopyingAnnotators(3).fit(hood, answers, num_starts=1)
    plain = Annotators(3).fit(hood, answers, num_starts=1)
    assert 0.6 < field.values["copies"][4, 3] < 0.95
    assert leave_one_out(field, answers).mean() > leave_one_out(plain, answers).mean()
    right = [(each.predict() == truth).double().mean() for each in (field, plain)]
    assert right[0] > right[1] - 0.01


def test_who_has_no_names_cannot_be_copied():
    with pytest.raises(ValueError, match="answers that name labels"):
        CopyingAnnotators(3, aligned=False)
