# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A classifier without a true label: five simulated annotators, of whose answers half are right, are
asked about some of scikit-learn's 1,797 digits. How many answers does it take, and whom should one
ask next? Everything is printed for one seed.

    python examples/crowds.py --seed 0
"""

from __future__ import annotations

from argparse import ArgumentParser

import pyro
import torch
from common import options, progress_bar, scores
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import one_hot

from pyro_nmm.datasets import digits
from pyro_nmm.models import Annotators
from pyro_nmm.models.hidden import mixture_em

MAJORITY, DAWID_SKENE = "regression on majority", "regression on Dawid-Skene"
GRAPH, BOTH = "Annotators: graph", "Annotators: graph, regression"
NAMES = MAJORITY, DAWID_SKENE, GRAPH, BOTH
#: Of each annotator's answers.
RIGHT = torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7])
SHARES = 0.03, 0.1, 0.3, 1.0
#: Answers at the start, and in each of the rounds that follow.
FIRST, MORE, ROUNDS = 500, 250, 4


def simulate(y):
    """Answers ``(N, M)``; errors are uniform over the other nine digits."""
    size = len(y), len(RIGHT)
    wrong = (y[:, None] + torch.randint(1, 10, size)) % 10
    return torch.where(torch.rand(size) < RIGHT, y[:, None], wrong)


def regression():
    return LogisticRegression(max_iter=300)


def learned(x, probs, rows):
    """Probabilities ``(N, 10)`` of a regression on the most probable labels of some rows."""
    model = regression().fit(x[rows], probs.argmax(1)[rows])
    table = torch.zeros(len(x), 10)
    table[:, model.classes_] = torch.as_tensor(model.predict_proba(x)).float()
    return table


def out_of_fold(x, probs, rows, num_folds: int = 5):
    """Probabilities ``(N, 10)``, each by a regression that has not learned the digit's label. One
    more row of each label is counted, because a fold may lack some."""
    found, fold = torch.empty(len(x), 10), torch.randperm(len(x)) % num_folds
    for number in range(num_folds):
        here = fold == number
        learn = rows & ~here
        found[here] = (learn.sum() * learned(x, probs, learn)[here] + 1) / (learn.sum() + 10)
    return found


def all_ways(data, answers) -> dict:
    """Probabilities of all digits by each of the names."""
    emission, rows = Annotators(num_labels=10), (answers >= 0).any(1)
    votes = one_hot(answers + 1, 11)[..., 1:].sum(1)
    experts = mixture_em(emission, answers, emission.start(answers, None))[1]
    consensus = emission.fit(data.edge_index, answers)
    learn = out_of_fold(data.x, consensus.probs, rows)
    both = emission.fit(data.edge_index, answers, pred_probs=learn)
    return {
        MAJORITY: learned(data.x, votes, rows),
        DAWID_SKENE: learned(data.x, experts, rows),
        GRAPH: consensus.probs,
        BOTH: both.probs,
    }


def asking(data, everything, best: bool) -> list[float]:
    """Accuracy after each round of questions, of the largest information gain or at random."""
    answers, accuracies = torch.full_like(everything, -1), []
    order = torch.randperm(everything.numel())
    score = -order.argsort().double().view_as(answers)
    for number in range(ROUNDS + 1):
        size = MORE if number else FIRST
        score = score.masked_fill(answers >= 0, -torch.inf)
        chosen = score.flatten().topk(size).indices
        answers.view(-1)[chosen] = everything.flatten()[chosen]
        consensus = Annotators(num_labels=10).fit(data.edge_index, answers)
        accuracies.append((consensus.predict() == data.y).double().mean().item())
        score = consensus.information_gain().double() if best else score
    return accuracies


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    data, results, asked = digits(), {}, {}
    for share in progress_bar(args.shares, desc="crowds", unit="share"):
        pyro.set_rng_seed(args.seed)
        everything = simulate(data.y)
        rows = torch.rand(len(data.y)) < share
        ways = all_ways(data, everything.masked_fill(~rows[:, None], -1))
        results[share] = {name: scores(probs, data.y) for name, probs in ways.items()}
    print(f"{'share of nodes asked':32}", *(f"{share:26.0%}" for share in results))
    print(f"{'':32}", *(f"{'accuracy':>10}{'NLL':>8}{'ECE':>8}" for _ in results))
    for name in NAMES:
        rows = (results[share][name].values() for share in results)
        print(f"{name:32}", *(f"{a:10.3f}{n:8.3f}{e:8.3f}" for a, n, e in rows))
    for name, best in {"at random": False, "by information gain": True}.items():
        pyro.set_rng_seed(args.seed)
        everything = simulate(data.y)
        asked[name] = asking(data, everything, best)
        print(f"{name:20}", *(f"{value:7.3f}" for value in asked[name]))
    return {"shares": results, "asked": asked}


def parser() -> ArgumentParser:
    shares = list(SHARES), "of nodes asked"
    return options(__doc__, shares=shares, seed=0, num_threads=1)


if __name__ == "__main__":
    main(parser().parse_args())
