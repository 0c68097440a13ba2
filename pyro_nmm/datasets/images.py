# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Images: integer grey levels ``(channels, H, W)`` in 0..255, and letters of two."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import as_expected, check_finite, check_integers
from pyro_nmm.datasets.entries import extra, reading


def photographs() -> dict[str, Tensor]:
    """The two sample photographs of scikit-learn.

    >>> {name: tuple(image.shape) for name, image in photographs().items()}
    {'china': (3, 427, 640), 'flower': (3, 427, 640)}
    """
    data = extra("sklearn.datasets", "photographs").load_sample_images()
    return {
        Path(name).stem: torch.from_numpy(np.array(image)).permute(2, 0, 1).long()
        for name, image in zip(data.filenames, data.images, strict=True)
    }


def image_folder(path: str | Path) -> dict[str, Tensor]:
    """All ``.png`` and ``.jpg`` images of a folder, by their names, sorted.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (6, 4)).save(f"{folder}/sky.png")
    ...     {name: tuple(image.shape) for name, image in image_folder(folder).items()}
    {'sky.png': (3, 4, 6)}
    """
    image_module = extra("PIL.Image", "image folders")
    files = sorted(f for f in Path(path).glob("*") if f.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if not files:
        raise FileNotFoundError(f"path: {path} has no .png or .jpg files")
    images = {}
    for file in files:
        with reading(file), image_module.open(file) as image:
            if image.mode[0] in "IF":  # convert would cut off all above 255
                raise ValueError(f"an image must have 256 grey levels a channel, not {image.mode}")
            pixels = torch.from_numpy(np.array(image.convert("RGB")))
        images[file.name] = pixels.permute(2, 0, 1).long()
    return images


def random_patches(images: Sequence[Tensor], number: int, size: int = 32) -> Tensor:
    """``(number, channels, size, size)``: patches of random images ``(channels, H, W)`` at random
    places, randomly turned by quarters and mirrored.

    >>> random_patches([torch.zeros(3, 40, 50, dtype=torch.long)], number=4).shape
    torch.Size([4, 3, 32, 32])
    """
    integers = all(isinstance(value, Integral) for value in (number, size))
    if not integers or min(number, size) < 1 or not len(images):
        got = f"{number!r}, {size!r} and {len(images)} images"
        raise ValueError(f"number and size must be positive and images not empty, got {got}")
    if min(min(image.shape[-2:]) for image in images) < size:
        raise ValueError(f"images must be at least {size} pixels high and wide")
    patches = []
    for _ in range(number):
        image = images[int(torch.randint(len(images), ()))]
        image = as_expected("images", image, ("channels", "H", "W"), note="each")
        top, left = (int(torch.randint(side - size + 1, ())) for side in image.shape[-2:])
        patch = image[:, top : top + size, left : left + size]
        patch = patch.rot90(int(torch.randint(4, ())), (1, 2))
        patches.append(patch.flip(2) if int(torch.randint(2, ())) else patch)
    return torch.stack(patches)


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
