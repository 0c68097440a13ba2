# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What examples share: options, a progress bar, scores, and graphs with a split."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torchmetrics.functional.classification import multiclass_calibration_error
from tqdm import tqdm

from pyro_nmm.datasets import digits, random_split

#: Graphs of node_classification.py and distributed.py.
PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
GRAPHS = ("digits", *PLANETOID)
#: A bar on a terminal, and nothing in a log.
progress_bar = partial(tqdm, unit="step", disable=None, dynamic_ncols=True)


def options(
    text: str | None, picture: str | None = None, choices: dict | None = None, /, **named
) -> argparse.ArgumentParser:
    """A parser with a description. Options have a default or a type, perhaps with a help text."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=formatter)
    first = {"output": Path("output") / picture} if picture else {}
    for name, option in (first | named).items():
        value, meaning = option if isinstance(option, tuple) else (option, None)
        default, kind = (None, value) if isinstance(value, type) else (value, type(value))
        more: dict = {"default": default, "help": meaning}
        if kind is bool:
            more["action"] = "store_true"
        else:
            more |= {"nargs": "+", "type": type(value[0])} if kind is list else {"type": kind}
            more["choices"] = (choices or {}).get(name)
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser


def scores(probs: Tensor, y: Tensor, least: float = 1e-6) -> dict[str, float]:
    """Of probabilities ``(n, C)``, of which each counts as ``least`` at least."""
    positive = probs.clamp(min=least)
    return {
        "accuracy": (probs.argmax(1) == y).double().mean().item(),
        "NLL": F.nll_loss((positive / positive.sum(1, keepdim=True)).log(), y).item(),
        "ECE": multiclass_calibration_error(probs, y, probs.shape[1], n_bins=15).item(),
    }


def load_graph(name: str, root: Path | None, split: int = 0) -> Data:
    """A graph with a split: of the digits a random one, of other graphs the public one."""
    if name == "digits":
        return random_split(digits(), train=0.05, val=0.1, test=0.5, seed=split)
    folder = str(root or Path.home() / ".cache" / "pyro-nmm")
    return Planetoid(folder, PLANETOID[name], transform=NormalizeFeatures())[0]
