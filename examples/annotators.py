# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Combine noisy labels from several annotators: by a majority vote, by Dawid and Skene's model, and
by an NMM, which also uses a graph of the nodes.

    python examples/annotators.py --output output/annotators.png
    python examples/annotators.py --data-root FOLDER --output output/cortex.png

The digits come with scikit-learn; seven annotators are simulated. FOLDER/dlpfc holds sections
of human cortex: ten clusterings of the spots are the annotators, and no label is observed.
"""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pyro
import torch
from common import options, scores
from plotting import PALETTE, canvas, save
from scipy.optimize import linear_sum_assignment
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score, confusion_matrix, mutual_info_score

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


def digits_by_annotators(args) -> dict:
    data = digits()
    y = data.y
    answers, rates = simulate(y)
    emission = Annotators(num_labels=10)

    consensus = emission.fit(data.edge_index, answers)
    print(consensus.summary())
    probs = {
        "Majority vote": majority(answers, 10),
        "Dawid-Skene": dawid_skene(emission, consensus.field.hood, answers),
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
        places = torch.from_numpy(TSNE(init="pca", random_state=0).fit_transform(data.x))
        labels = {f"Truth: {len(y)} digits, placed by t-SNE": y}
        for name, p in probs.items():
            wrong = p.argmax(1) != y
            labels[f"{name}: {int(wrong.sum())} wrong (ringed)"] = p.argmax(1)
        figure, axes = panels(places, labels, [str(k) for k in range(10)], y, size=7)
        uncertainty(figure, axes[4], places, consensus.entropy(), size=7, wrong=wrong)
        intervals(axes[5], list(ANNOTATORS), quality, "estimate, 90 % interval")
        truths(axes[5], rates, "simulated")
        axes[5].set(xlabel="accuracy", title="How good annotators are")
        save(figure, args.output)
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
        seen = {f"Section {args.section}: layers by hand": truth}
        for name, value in results.items():
            seen[f"{name}: adjusted Rand index {value:.2f}"] = colored_as(labels[name], truth)
        flipped = places * torch.tensor([1.0, -1.0])
        figure, axes = panels(flipped, seen, layers, size=9)
        uncertainty(figure, axes[4], flipped, consensus.entropy(), size=9)
        intervals(axes[5], names, quality, "on the NMM's labels, 90 % interval")
        about = [mutual_info_score(truth[known], column[known]) for column in answers.T]
        truths(axes[5], about, "on the layers by hand")
        axes[5].set(xlabel="information of an answer, nats", title="What clusterings tell")
        save(figure, args.output)
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


def panels(places, labels: dict, names, truth=None, size: float = 8):
    """Four of six panels: labels as colors. Given the truth, wrong labels are ringed."""
    figure, axes = canvas(2, 3, (14, 8.6))
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = axes.flatten()
    style = {"cmap": matplotlib.colors.ListedColormap(PALETTE), "vmin": 0, "vmax": len(PALETTE)}
    for axis, (title, column) in zip(axes, labels.items(), strict=False):
        there = column >= 0
        right = there if truth is None else column == truth
        wrong = there & ~right
        axis.scatter(*places[right].T, s=size, c=column[right], lw=0, **style)
        axis.scatter(*places[wrong].T, s=2 * size, c=column[wrong], ec="black", lw=0.7, **style)
        axis.set(title=title, aspect="equal")
        axis.axis("off")
    handles = [plt.Line2D([], [], marker="o", ls="", color=PALETTE[k]) for k in range(len(names))]
    meaning = "" if truth is not None else "color: the layer that a label overlaps most"
    figure.legend(handles, names, frameon=False, ncols=len(names), loc="outside lower center",
                  handletextpad=0.1, title=meaning)  # fmt: skip
    return figure, axes


def uncertainty(figure, axis, places, entropy, size: float, wrong=None) -> None:
    greys = matplotlib.colormaps["Greys"](torch.linspace(0.2, 1, 256))
    order = entropy.argsort()
    shown = axis.scatter(*places[order].T, s=size, c=entropy[order], lw=0, vmin=0,
                         cmap=matplotlib.colors.ListedColormap(greys))  # fmt: skip
    if wrong is not None:
        axis.scatter(*places[wrong].T, s=5 * size, fc="none", ec="#D55E00", lw=1)
    ringed = " (wrong: ringed)" * (wrong is not None)
    axis.set(title=f"Entropy of the NMM's labels{ringed}", aspect="equal")
    axis.axis("off")
    bar = axis.inset_axes((1.02, 0.2, 0.025, 0.5))
    bar.set_in_layout(False)
    figure.colorbar(shown, cax=bar, label="nats")


def intervals(axis, names, quality, label: str) -> None:
    mean, low, high = quality
    axis.errorbar(mean, range(len(names)), xerr=torch.stack([mean - low, high - mean]), fmt="o",
                  ms=4, capsize=4, color="#0072B2", label=label)  # fmt: skip
    for place, name in enumerate(names):
        axis.text(0.0, place - 0.25, name, transform=axis.get_yaxis_transform(), fontsize=9)
    axis.spines["left"].set_visible(False)
    axis.set_yticks([])
    axis.set_ylim(len(names) - 0.5, -0.6 - 0.2 * len(names))


def truths(axis, values, label: str) -> None:
    axis.plot(values, range(len(values)), "D", ms=7, mfc="none", color="#D55E00", label=label)
    axis.legend(frameon=False, loc="upper left")
    axis.set_xlim(left=0)


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
