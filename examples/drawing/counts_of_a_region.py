# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The map with its known cells, intervals of counts in districts, and nodes to label next."""

from __future__ import annotations

import numpy as np

from drawing import BLUE, GREEN, ORANGE, canvas, save


def draw(output, y, known, draws, truth, chosen) -> None:
    figure, (left, middle, right) = canvas(1, 3, (13, 4.4), 12, width_ratios=[1, 1.3, 1])
    size = len(y)
    for axis in (left, right):
        axis.imshow(y, cmap="Pastel1", vmin=0, vmax=8)
        axis.set(xticks=[], yticks=[])
    row, column = np.divmod(known.nonzero()[:, 0].numpy(), size)
    left.plot(column, row, ".", color="black", ms=4)
    left.set_title(f"The map, and {len(row)} known labels")
    shown = ("product of marginals", ORANGE, -0.25), ("chain rule", GREEN, 0.0)
    shown += (("joint, ten stages", BLUE, 0.25),)
    for name, color, shift in shown:
        low, mid, high = np.quantile(draws[name][:, :, 0], [0.05, 0.5, 0.95], axis=0)
        place = np.arange(len(mid)) + shift
        middle.errorbar(place, mid, [mid - low, high - mid], fmt="none", capsize=3, color=color,
                        label=f"{name}, 90 %")  # fmt: skip
    middle.plot(np.arange(len(truth)), truth[:, 0], "o", ms=4, color="black", label="truth")
    middle.set(
        xticks=range(0, 16, 3),
        xlabel="district",
        ylabel="cells",
        title="How many cells are forest (rose)?",
    )
    middle.legend(frameon=False)
    marks = {"the ten largest gains": (ORANGE, "x"), "ten nodes together": (BLUE, "o")}
    for name, (color, mark) in marks.items():
        row, column = np.divmod(chosen[name].numpy(), size)
        right.plot(column, row, mark, color=color, ms=7, label=name)
    right.set_title("Which ten to label next?")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, ncols=2)
    save(figure, output)
