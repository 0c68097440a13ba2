# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data for the tutorials, and splits of nodes."""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import check_finite, check_integers

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["digits", "letters", "random_split"]

#: Held by the thread whose seed is in torch's global generator.
_SEEDED = threading.RLock()


def extra(module: str, what: str) -> ModuleType:
    """A module of the ``examples`` extra; if it is missing, an error says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed, cure = module.partition(".")[0], "pip install '.[examples]' in a checkout"
        raise ImportError(f"{what} need {needed} ({error}): {cure}") from error


@contextmanager
def seeded(seed: Any) -> Iterator[None]:
    """torch's global CPU generator under a seed, for one thread at a time; then as it was."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_as_seed(seed))
        yield


def _as_seed(seed: Any) -> int:
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return int(seed)


def digits() -> "Data":
    """scikit-learn's images of digits, ``(N, 64)`` in [0, 1], each with its 8 nearest neighbours.

    >>> digits()
    Data(x=[1797, 64], edge_index=[2, 19854], y=[1797])

    :raises ImportError: without scikit-learn.
    """
    from torch_geometric.data import Data
    from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

    images = extra("sklearn.datasets", "digits").load_digits()
    graph = extra("sklearn.neighbors", "digits").kneighbors_graph(images.data, 8)
    edge_index = to_undirected(from_scipy_sparse_matrix(graph)[0])
    x = torch.tensor(images.data, dtype=torch.float) / 16
    return Data(x=x, edge_index=edge_index, y=torch.tensor(images.target))


def letters(
    text: str, height: int, width: int, margin: float = 0.12, font: str = "DejaVu Sans"
) -> Tensor:
    """``(height, width)``: 1 on a bold text, as large as fits, in a font that matplotlib finds by
    its name, and -1 around it.

    >>> letters("NMM", 10, 30).shape
    torch.Size([10, 30])

    :raises ValueError: for an empty text, a side below one, and a ``margin`` of 0.5 or more.
    :raises ImportError: without matplotlib.
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


def random_split(data: "Data", train: float, val: float, test: float, seed: int) -> "Data":
    """A copy of ``data`` with random masks of these shares. For one seed, ``train`` does not change
    the test and the validation nodes, and smaller training sets are parts of larger ones.

    >>> from torch_geometric.data import Data
    >>> data = Data(y=torch.zeros(10), num_nodes=10)
    >>> data = random_split(data, train=0.3, val=0.2, test=0.5, seed=0)
    >>> [int(data[f"{name}_mask"].sum()) for name in ("train", "val", "test")]
    [3, 2, 5]

    :raises ValueError: for shares that select no node or sum to more than one, and a ``seed`` that
        is no integer.
    """
    from torch_geometric.utils import index_to_mask

    data, size = data.clone(), data.num_nodes
    shares = {"test": test, "val": val, "train": train}
    good = all(isinstance(share, Real) and 0 < share <= 1 for share in shares.values())
    parts = {name: round(share * size) if good else 0 for name, share in shares.items()}
    if min(parts.values()) < 1 or sum(parts.values()) > size:
        got = f"{train}, {val}, {test} of {size} nodes"
        raise ValueError(f"train, val and test must select nodes and sum to at most 1, got {got}")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_as_seed(seed)))
    split = order.split([*parts.values(), size - sum(parts.values())])
    for name, nodes in zip(parts, split, strict=False):
        mask = index_to_mask(nodes, size)
        data[name + "_mask"] = mask if data.y is None else mask.to(data.y.device)
    return data
