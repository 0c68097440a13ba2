# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The graphs of node_classification.py and distributed.py, with a split."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data

from pyro_nmm.datasets import digits, planetoid, random_split, select_split

NAMES = "digits", "cora", "citeseer", "pubmed"


def load(name: str, root: Path | None, split: int = 0) -> Data:
    if name == "digits":
        return random_split(digits(), train=0.05, val=0.1, test=0.5, seed=split)
    return select_split(planetoid(name, root), split)
