# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Few labels and any scikit-learn classifier: 400 of scikit-learn's 1,797 images of digits have a
label. The classifier alone, calibrated, label spreading, and an NMM on top of the classifier.

    python examples/few_labels.py --output output/few_labels.png
"""

from __future__ import annotations

from argparse import ArgumentParser

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from common import options, progress_bar, scores
from plotting import COLORS, diagonal, reliability, save
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.neighbors import KNeighborsTransformer
from sklearn.semi_supervised import LabelSpreading

from pyro_nmm.models.tabular import NeighborMixtureClassifier

BOOSTING, TEMPERATURE, SPREADING = "boosting", "boosting + temperature", "label spreading"
NMM = "boosting + NMM"


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    rows, digits = load_digits(return_X_y=True)
    boosting = HistGradientBoostingClassifier(max_iter=args.max_iter, random_state=0)
    calibrated = CalibratedClassifierCV(boosting, method="temperature", cv=5)
    spreading = LabelSpreading(kernel="knn", n_neighbors=10)
    near = KNeighborsTransformer(n_neighbors=10)  # of the pixels as they are, in the same unit
    runs: dict[str, list[dict]] = {name: [] for name in (BOOSTING, TEMPERATURE, SPREADING, NMM)}
    for seed in progress_bar(range(args.num_seeds), desc="few labels", unit="draw"):
        known = np.random.default_rng(seed).permutation(len(rows)) < args.num_labels
        y = np.where(known, digits, -1)
        model = NeighborMixtureClassifier(boosting, neighbors=near, random_state=0).fit(rows, y)
        labelled = rows[known], digits[known]
        probs = {
            BOOSTING: model.estimator_.predict_proba(rows),
            TEMPERATURE: calibrated.fit(*labelled).predict_proba(rows),
            SPREADING: np.nan_to_num(spreading.fit(rows, y).label_distributions_),
            NMM: model.label_distributions_,
        }
        for name, table in probs.items():
            truth = torch.as_tensor(digits[~known])
            runs[name].append(scores(torch.as_tensor(table[~known]).double(), truth))
    print(model.summary())
    print(f"{len(rows) - args.num_labels} images without a label, mean of {args.num_seeds} draws")
    print(f"{'':24}", *(f"{name:>9}" for name in ("accuracy", "NLL", "ECE")))
    means = {name: {score: np.mean([row[score] for row in draws]) for score in draws[0]}
             for name, draws in runs.items()}  # fmt: skip
    for name, row in means.items():
        print(f"{name:24}", *(f"{value:9.4f}" for value in row.values()))
    if args.output:
        draw(args, rows, digits, known, model, probs)
    return means


def draw(args, rows, digits, known, model, probs) -> None:
    """Images that only the NMM gets right; reliability; counts of each digit."""
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(14, 4.6), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[1.1, 1, 1])
    alone, ours = (probs[name].argmax(1) for name in (BOOSTING, NMM))
    mended = np.flatnonzero(~known & (alone != digits) & (ours == digits))
    spoiled = (~known & (alone == digits) & (ours != digits)).sum()
    left.suptitle(f"The NMM mends {len(mended)} labels and spoils {spoiled}")
    for axis, row in zip(left.subplots(3, 5).flat, mended, strict=False):
        axis.imshow(rows[row].reshape(8, 8), cmap="gray_r")
        axis.set_title(f"{alone[row]} → {ours[row]}", fontsize=10)
    for axis in left.axes:
        axis.axis("off")
    axis = middle.subplots()
    for name, color in zip((TEMPERATURE, NMM), COLORS, strict=True):
        p, y = torch.as_tensor(probs[name][~known]), torch.as_tensor(digits[~known])
        reliability(axis, p.double(), y, color, name)
    diagonal(axis)
    axis.set(xlabel="confidence", ylabel="accuracy", title="Reliability, ± one standard error")
    axis.legend(frameon=False, loc="lower right")
    axis, nodes = right.subplots(), torch.from_numpy(np.flatnonzero(~known))
    torch.manual_seed(0)
    draws = model.posterior_.sample((500,), nodes)
    counts = torch.nn.functional.one_hot(draws, 10).sum(1).numpy()
    low, middle_, high = np.quantile(counts, [0.05, 0.5, 0.95], axis=0)
    axis.errorbar(range(10), middle_, [middle_ - low, high - middle_], fmt="none", capsize=4,
                  color=COLORS[1], label="90 % interval of joint samples")  # fmt: skip
    axis.plot(range(10), np.bincount(digits[~known]), "o", ms=4, color="black", label="truth")
    axis.set(xlabel="digit", ylabel="images", xticks=range(10), title="How many are there?")
    axis.legend(frameon=False)
    save(figure, args.output)


def parser() -> ArgumentParser:
    return options(
        __doc__, "few_labels.png", num_labels=400, num_seeds=(2, "draws of the labelled images"),
        max_iter=(60, "of boosting"), num_threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
