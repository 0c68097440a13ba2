# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noisy words, and their marginals by three approximations."""

from __future__ import annotations

from drawing import canvas, save
from drawing.ising import show


def draw(output, pictures: list[tuple], results: list[dict]) -> None:
    figure, axes = canvas(len(pictures), 5, (12.6, 4.6), font=11, box=True)
    grey = {"cmap": "gray_r", "vmin": 0, "vmax": 1}
    for line, (test, noisy, marginals), row in zip(axes, pictures, results, strict=True):
        _, font, sigma = test
        show(line[0], noisy, f"{font.removeprefix('DejaVu ')}, noise {sigma}", cmap="gray_r")
        free, *ours = (f"{name}: KL ≤ {cell['KL']:.1f}" for name, cell in row.items())
        titles = ["exact p(black)", free.replace("≤", "="), *ours]
        for axis, table, title in zip(line[1:], marginals, titles, strict=True):
            show(axis, table[:, 1].view(noisy.shape), title, **grey)
    save(figure, output)
