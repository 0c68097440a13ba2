# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Letters as a binary image, from the font that ships with matplotlib."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from torch import Tensor


def letters(text: str, height: int, width: int, margin: float = 0.12) -> Tensor:
    """``(height, width)`` with -1 for the ground and 1 for the text, as large as fits."""
    path = TextPath((0, 0), text, 1, FontProperties(family="DejaVu Sans", weight="bold"))
    box = path.get_extents()
    scale = (1 - 2 * margin) * min(width / box.width, height / box.height)
    x = (np.arange(width) + 0.5 - width / 2) / scale + (box.x0 + box.x1) / 2
    y = -(np.arange(height) + 0.5 - height / 2) / scale + (box.y0 + box.y1) / 2
    points = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
    inside = path.contains_points(points).reshape(height, width)
    return torch.tensor(2.0 * inside - 1, dtype=torch.get_default_dtype())
