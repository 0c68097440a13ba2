# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How every example ends."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"picture: {path}")
