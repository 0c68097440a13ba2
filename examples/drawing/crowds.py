# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Accuracy over the share of nodes asked, reliability, and accuracy over questions."""

from __future__ import annotations

from drawing import BLUE, GREEN, ORANGE, canvas, diagonal, reliability, save


def draw(output, y, results, shown, numbers, asked) -> None:
    figure, axes = canvas(1, 3, (12, 4.4), font=12)
    share, probs = shown
    colors = dict(zip(probs, ("0.6", ORANGE, GREEN, BLUE), strict=True))
    for name, color in colors.items():
        accuracy = [row[name]["accuracy"] for row in results.values()]
        axes[0].plot(list(results), accuracy, "o-", color=color, label=short(name))
    axes[0].set(ylim=(0.55, 1.01), ylabel="accuracy", xscale="log",
                xlabel="share of the digits with answers", xticks=list(results),
                title="No true label is used")  # fmt: skip
    axes[0].set_xticklabels([f"{part:.0%}" for part in results])
    axes[0].minorticks_off()
    axes[0].legend(frameon=False, loc="lower right")
    for name in ("regression on Dawid-Skene", "Annotators: graph, regression"):
        reliability(axes[1], probs[name].double(), y, colors[name], short(name))
    diagonal(axes[1])
    axes[1].set(xlabel="confidence", ylabel="accuracy",
                title=f"Reliability, {share:.0%} asked")  # fmt: skip
    axes[1].legend(frameon=False, loc="lower right")
    for (name, accuracy), color in zip(asked.items(), (ORANGE, BLUE), strict=True):
        axes[2].plot(numbers, accuracy, "o-", color=color, label=name)
    axes[2].set(xlabel="answers", ylabel="accuracy", title="The next questions")
    axes[2].legend(frameon=False)
    save(figure, output)


def short(name: str) -> str:
    return name.removeprefix("Annotators: ").replace("regression on", "regr. on")
