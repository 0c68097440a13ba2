# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Images that only the NMM gets right, reliability, and counts of each digit."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch

from drawing import BLUE, ORANGE, diagonal, reliability, save


def draw(output, rows, digits, known, model, probs) -> None:
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(12, 4.4), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[1.1, 1, 1])
    alone, ours = (probs[name].argmax(1) for name in ("boosting", "boosting + NMM"))
    mended = np.flatnonzero(~known & (alone != digits) & (ours == digits))
    spoiled = (~known & (alone == digits) & (ours != digits)).sum()
    left.suptitle(f"The NMM mends {len(mended)} labels and spoils {spoiled}")
    for axis, row in zip(left.subplots(3, 5).flat, mended, strict=False):
        axis.imshow(rows[row].reshape(8, 8), cmap="gray_r")
        axis.set_title(f"{alone[row]} → {ours[row]}", fontsize=12)
    for axis in left.axes:
        axis.axis("off")
    axis = middle.subplots()
    for name, color in {"boosting + temperature": ORANGE, "boosting + NMM": BLUE}.items():
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
    truth = np.bincount(digits[~known])
    inside = ((low <= truth) & (truth <= high)).sum()
    axis.errorbar(range(10), middle_, [middle_ - low, high - middle_], fmt="none", capsize=4,
                  color=BLUE, label="90 % interval")  # fmt: skip
    axis.plot(range(10), truth, "o", ms=4, color="black", label="truth")
    axis.set(xlabel="digit", ylabel="images", xticks=range(10),
             title=f"{inside} of 10 counts inside")  # fmt: skip
    axis.legend(frameon=False)
    save(figure, output)
