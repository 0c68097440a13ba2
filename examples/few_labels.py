# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Few labels and any scikit-learn classifier: 400 of scikit-learn's 1,797 images of digits have a
label. The classifier alone, calibrated, label spreading, and an NMM on top of the classifier.

    python examples/few_labels.py --output output/few_labels.png
"""

from __future__ import annotations

from argparse import ArgumentParser

import numpy as np
import torch
from common import options, progress_bar, scores
from drawing.few_labels import draw
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
        draw(args.output, rows, digits, known, model, probs)
    return means


def parser() -> ArgumentParser:
    return options(
        __doc__, "few_labels.png", num_labels=400, num_seeds=(2, "draws of the labelled images"),
        max_iter=(60, "of boosting"), num_threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
