# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An image of letters."""

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import check_finite, check_integers
from pyro_nmm.datasets.entries import extra


def letters(
    text: str, height: int, width: int, margin: float = 0.12, font: str = "DejaVu Sans"
) -> Tensor:
    """``(height, width)``: 1 on a bold text, as large as fits, in a font that matplotlib finds by
    its name, and -1 around it.

    >>> letters("NMM", 10, 30).shape
    torch.Size([10, 30])
    """
    check_integers(1, height=height, width=width)
    check_finite(margin=margin)
    if not isinstance(text, str) or not text.strip() or not margin < 0.5:
        got = f"{text!r} and {margin}"
        raise ValueError(f"text must hold letters and margin be less than 0.5, got {got}")
    fonts, paths = (extra(f"matplotlib.{m}", "letters") for m in ("font_manager", "textpath"))
    bold = fonts.FontProperties(family=font, weight="bold")
    path = paths.TextPath((0, 0), text, 1, bold)
    box = path.get_extents()
    scale = (1 - 2 * margin) * min(width / box.width, height / box.height)
    x = (np.arange(width) + 0.5 - width / 2) / scale + (box.x0 + box.x1) / 2
    y = -(np.arange(height) + 0.5 - height / 2) / scale + (box.y0 + box.y1) / 2
    points = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
    inside = path.contains_points(points).reshape(height, width)
    return torch.tensor(2.0 * inside - 1, dtype=torch.get_default_dtype())
