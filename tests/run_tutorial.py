# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A tutorial as its notebook runs, with hidden cells and shorter loops, in a folder of your choice:

    python run_tutorial.py docs/tutorials/few-labels.md FOLDER

Packages are hidden that the first cell of the notebook does not install.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from documents import errors_of_warnings, load
from packages import Hidden
from packaging.requirements import Requirement

NOTEBOOKS = load("docs/notebooks.py")


def cells(path: Path) -> list[tuple[str, str]]:
    """Options and code of every cell, hidden ones too."""
    return [(options or "", code) for options, code in NOTEBOOKS.CELL.findall(path.read_text())]


def shortened(code: str, options: str = "") -> str:
    """With the numbers that comments have for tests: ``num_steps = 400  # tests: 20``."""
    if "full-size" in options:  # what the page says of its output, asserted by make docs alone
        code = re.sub(r"^( *)assert ", r"\1_ = ", code, flags=re.MULTILINE)
    return re.sub(r"= [\d_.e-]+(,?)  # tests: ([\d_.e-]+)$", r"= \2\1", code, flags=re.MULTILINE)


def main(path: Path, folder: Path) -> None:
    import torch
    import torch_geometric  # noqa: F401

    torch.set_num_threads(1)
    errors_of_warnings()  # after these imports, which warn
    namespace = {"__name__": "__main__"}
    os.chdir(folder)
    with Hidden(packages=map(Requirement, NOTEBOOKS.packages(path))):
        for number, (options, code) in enumerate(cells(path)):
            code = NOTEBOOKS.with_settings(shortened(code, options), path.parent)
            exec(compile(code, f"{path.name}, cell {number + 1}", "exec"), namespace)


if __name__ == "__main__":
    main(*(Path(name).resolve() for name in sys.argv[1:]))
