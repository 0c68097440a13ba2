# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Small pictures of tutorials for the front page, from the pages that ``make docs`` has made:

    python docs/thumbnails.py
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
SITE, SIZE = DOCS / "_build" / "html", (480, 300)
#: Which of a page's pictures.
PICTURES = {
    "tutorials/borrowed-label": 0,
    "tutorials/exact-and-bound": 0,
    "tutorials/the-paper-in-pyro": 0,
    "tutorials/your-graph": 0,
    "tutorials/few-labels": 0,
    "tutorials/noisy-labels": 1,
    "tutorials/variational-family": 0,
    "tutorials/larger-program": 0,
    "gallery/cortex": 1,
}


def thumbnail(page: str, number: int) -> Image.Image:
    """The picture in a white frame of one size for all."""
    text = (SITE / f"{page}.html").read_text()
    names = re.findall(r'src="\.\./_images/([0-9a-f]{64}\.png)"', text)
    picture = Image.open(SITE / "_images" / names[number]).convert("RGB")
    picture.thumbnail(SIZE, Image.Resampling.LANCZOS)
    framed = Image.new("RGB", SIZE, "white")
    framed.paste(picture, tuple((a - b) // 2 for a, b in zip(SIZE, picture.size, strict=True)))
    return framed.quantize(256)


if __name__ == "__main__":
    (DOCS / "thumbnails").mkdir(exist_ok=True)
    for page, number in PICTURES.items():
        name = f"{page.rpartition('/')[2]}.png"
        thumbnail(page, number).save(DOCS / "thumbnails" / name, optimize=True)
