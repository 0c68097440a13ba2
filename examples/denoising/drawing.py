# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A picture of the photograph, its noisy version, and two reconstructions."""

from __future__ import annotations

from torch import Tensor

from examples.drawing import canvas, save


def draw(output, clean: Tensor, shown: dict, extra: dict, result: dict) -> None:
    figure, axes = canvas(2, 3, (10.5, 7.2), font=12, box=True)
    axes = axes.T.flatten()
    for axis, (name, image) in zip(axes, ({"clean": clean} | shown).items(), strict=False):
        axis.imshow((image / 255).clamp(0, 1).permute(1, 2, 0).cpu().numpy())
        axis.set_title(name)
        if name in result:
            axis.set_xlabel(f"{result[name]['PSNR']:.2f} dB")
    for axis, (name, values), top in zip(axes[4:], extra.items(), (None, 1), strict=True):
        top = top or values.quantile(0.995).item()
        picture = axis.imshow(values.cpu().numpy(), cmap="viridis", vmin=0, vmax=top)
        axis.set_title(name)
        figure.colorbar(picture, ax=axis, shrink=0.8)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    save(figure, output)
