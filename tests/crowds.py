# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators of three labels, in stripes on a square, and of two labels that few of them see."""

import torch
from torch_geometric.utils import grid

EDGES, PLACES = grid(16, 16)
TRUTH = (PLACES[:, 0] * 3 // 16).long()
#: A fit that is short, and one for tests of its arguments.
QUICK, SHORT = {"num_steps": 20, "num_draws": 5}, {"num_steps": 1, "num_draws": 1}


def answers_to(truth, right, missing=0.3, labels=3):
    """``(N, M)`` with an accuracy for each annotator, and all errors equally frequent."""
    size = len(truth), len(right)
    wrong = (truth[:, None] + torch.randint(1, labels, size)) % labels
    answers = torch.where(torch.rand(size) < torch.as_tensor(right), truth[:, None], wrong)
    return answers.masked_fill(torch.rand(size) < missing, -1)


def by_visitors(truth, per_task, each, right=0.8):
    """Answers ``(N, M)`` of people who give ``each`` answers, ``per_task`` about each node."""
    task = torch.arange(len(truth)).repeat(per_task)
    worker = torch.empty_like(task)
    worker[torch.randperm(len(task))] = torch.arange(len(task)) // each
    answers = torch.full((len(truth), int(worker.max()) + 1), -1)
    answers[task, worker] = truth[task] ^ (torch.rand(len(task)) > right).long()
    return answers[:, (answers >= 0).any(0)]
