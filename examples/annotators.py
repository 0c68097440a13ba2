# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Combine noisy labels from several annotators: by a majority vote, by Dawid and Skene's model, by
label spreading from it along a graph, and by an NMM on the same graph.

    python examples/annotators.py --output output/annotators.png
    python examples/annotators.py --data-root FOLDER --output output/cortex.png

The digits come with scikit-learn; seven annotators are simulated. FOLDER/dlpfc holds sections
of human cortex: ten clusterings of the spots are the annotators, and no label is observed.
"""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from pathlib import Path

import pyro
import torch
from common import options, scores
from drawing.annotators import draw_digits, draw_section
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, confusion_matrix, mutual_info_score
from torch_geometric.nn import SimpleConv

from pyro_nmm import sources
from pyro_nmm.datasets import digits
from pyro_nmm.models import Annotators, accuracy, information
from pyro_nmm.models.hidden import mixture_em

#: Accuracies; the third annotator exchanges the digits of a pair.
ANNOTATORS = {"careful": 0.85, "good": 0.7, "confuses 1-7, 3-8, 4-9": 0.9, "fair": 0.5,
              "poor": 0.4, "copies the poor one": 0.4, "bad": 0.25}  # fmt: skip
ALIKE = {1: 7, 3: 8, 4: 9, 7: 1, 8: 3, 9: 4}
COPIED, COPIER = 4, 5


def simulate(y):
    """Answers ``(N, M)``, a third of them missing, and the accuracy of every annotator."""
    rates = torch.tensor(list(ANNOTATORS.values()))
    confusion = ((1 - rates) / 9)[:, None, None].repeat(1, 10, 10)
    confusion.diagonal(dim1=1, dim2=2).copy_(rates[:, None].expand(-1, 10))
    for digit, other in ALIKE.items():
        confusion[2, digit], confusion[2, digit, [digit, other]] = 0.0, torch.tensor([0.3, 0.7])
    answers = torch.distributions.Categorical(confusion[:, y]).sample().T
    copies = torch.rand(len(y)) < 0.9
    answers[:, COPIER] = torch.where(copies, answers[:, COPIED], answers[:, COPIER])
    answers = answers.masked_fill(torch.rand(answers.shape) < 1 / 3, -1)
    return answers, confusion[:, y, y].mean(1)


def majority(answers, num_labels: int):
    """Shares of the votes, with a tenth of a vote added for every label."""
    votes = torch.stack([(answers == k).sum(1) for k in range(num_labels)], 1) + 0.1
    return votes / votes.sum(1, keepdim=True)


def dawid_skene(emission, hood, answers, num_starts: int = 1):
    """Probabilities ``(N, C)`` by Dawid and Skene's model: the best of several starts."""

    def fit():
        values, probs = mixture_em(emission, answers, emission.start(answers, hood))
        joint = emission.log_prob(values, answers) + probs.mean(0).log()
        return joint.logsumexp(1).mean().item(), probs

    return max((fit() for _ in range(num_starts)), key=lambda result: result[0])[1]


def spread(probs, edge_index, share: float = 0.8, num_steps: int = 50):
    """Label spreading: each node takes a share of its neighbours' mean, and keeps the rest."""
    mean, spread = SimpleConv("mean"), probs
    for _ in range(num_steps):
        spread = share * mean(spread, edge_index) + (1 - share) * probs
    return spread


def digits_by_annotators(args) -> dict:
    data = digits()
    y = data.y
    answers, rates = simulate(y)
    emission = Annotators(num_labels=10)

    consensus = emission.fit(data.edge_index, answers)
    print(consensus.summary())
    experts = dawid_skene(emission, consensus.field.hood, answers)
    probs = {
        "Majority vote": majority(answers, 10),
        "Dawid-Skene": experts,
        "Label spreading": spread(experts, data.edge_index),
        "NMM": consensus.probs,
    }
    results = {name: scores(p, y, least=1e-12) for name, p in probs.items()}
    print(f"\n{'':24}{'accuracy':>9}{'NLL':>9}{'ECE':>9}")
    for name, row in results.items():
        print(f"{name:24}", *(f"{value:8.4f}" for value in row.values()))
    quality = accuracy(consensus, level=0.9)
    print(f"\n{'annotator':24}{'accuracy':>9}{'estimate':>9}   90 % interval")
    for name, rate, mean, low, high in zip(ANNOTATORS, rates, *quality, strict=True):
        print(f"{name:24}{rate:9.3f}{mean:9.3f}   {low:.3f} to {high:.3f}")
    if args.output:
        rates_of = dict(zip(ANNOTATORS, rates.tolist(), strict=True))
        draw_digits(args.output, data.x, y, probs, rates_of, quality)
    return results | {"rates": rates, "quality": quality}


def section(folder: Path, name: str):
    """Names of clusterings, their answers, layers by hand, and places of unit spacing."""
    with (folder / f"tissue_positions_{name}.txt").open() as file:
        place = {key: (int(column) / 2, int(row) * 3**0.5 / 2)
                 for key, _, row, column, *_ in csv.reader(file)}  # fmt: skip
    with (folder / f"cluster_labels_{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [k for k in list(rows[0])[2:] if not k.endswith("_spatial")]
    layers = sorted({row["ground_truth"] for row in rows} - {"", "NA"})
    truth = [layers.index(t) if (t := row["ground_truth"]) in layers else -1 for row in rows]
    answers = [[int(row[k]) for k in names] for row in rows]
    places = [place[row["key"].partition("_")[2]] for row in rows]
    answers = torch.tensor(answers)
    return names, answers - answers.min(0).values, layers, torch.tensor(truth), torch.tensor(places)


def cortex_by_clusterings(args) -> dict:
    names, answers, layers, truth, places = section(args.data_root / "dlpfc", args.section)
    hood, lattice = sources.points(places, radius=4.2, spacing=3.5)
    distance = (lattice[hood.source] - places[hood.target]).square().sum(1)
    # Clusterings of one measurement have shared errors: they depend on types of spots.
    emission = Annotators(args.num_labels, num_types=16)
    consensus = emission.fit(hood, answers, -0.5 * distance)
    plain = Annotators(args.num_labels, aligned=False)
    labels = {
        names[0]: answers[:, 0],
        "Dawid-Skene": dawid_skene(plain, hood, answers, num_starts=10).argmax(1),
        "NMM": consensus.predict(),
    }
    quality = information(consensus, level=0.9)
    print(f"{consensus.summary()}\n\n{'annotator':24}{'nats':>9}   90 % interval")
    for name, mean, low, high in zip(names, *quality, strict=True):
        print(f"{name:24}{mean:9.3f}   {low:.3f} to {high:.3f}")
    known = truth >= 0
    results = {name: adjusted_rand_score(truth[known], column[known])
               for name, column in labels.items()}  # fmt: skip
    print("\nadjusted Rand index against the layers, by which nothing here was chosen")
    for name, value in results.items():
        print(f"{name:24}{value:9.3f}")
    if args.output:
        columns = {f"Section {args.section}: layers by hand": truth}
        for name, value in results.items():
            columns[f"{name}: Rand index {value:.2f}"] = colored_as(labels[name], truth)
        about = [mutual_info_score(truth[known], column[known]) for column in answers.T]
        entropy = consensus.entropy()
        draw_section(args.output, places, columns, layers, entropy, names, quality, about)
    return results | {"quality": quality}


def colored_as(labels, truth):
    """Number of the layer that each label overlaps most with, one to one; further labels follow."""
    known = truth >= 0
    overlap = confusion_matrix(truth[known], labels[known])
    number = max(int(truth.max()), int(labels.max())) + 1
    rows, columns = linear_sum_assignment(-overlap[:number, :number])
    renamed = torch.empty(number, dtype=torch.long)
    renamed[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return torch.where(labels >= 0, renamed[labels], -1)


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    pyro.set_rng_seed(args.seed)
    return cortex_by_clusterings(args) if args.data_root else digits_by_annotators(args)


def parser() -> ArgumentParser:
    return options(
        __doc__, "annotators.png", data_root=(Path, "folder that holds dlpfc; default: digits"),
        section=("151673", "of cortex"), num_labels=(6, "of cortex"), seed=0,
        num_threads=(1, "results depend on it"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
