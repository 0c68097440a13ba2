# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sparse matrices, and label spreading."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

with warnings.catch_warnings():  # PyTorch warns of its beta state at the first one of a process
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    torch.eye(1).to_sparse_csr()


def identity(size: int) -> Tensor:
    """Identity matrix ``(N, N)`` in ``torch.sparse_csr``: features of nodes that have none.

    >>> identity(3).values()
    tensor([1., 1., 1.])
    """
    return sparse_csr(torch.arange(size + 1), torch.arange(size), torch.ones(size), (size, size))


def sparse_csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix in ``torch.sparse_csr``, of the first entry of each row, columns and values."""
    return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)


def sparse_coo(places: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix in ``torch.sparse_coo``, of rows and columns ``(2, K)`` and values ``(K,)``."""
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=False)


def label_spreading(step: Callable, labels: Tensor, damping: float, num_steps: int) -> Tensor:
    r"""Label spreading, :math:`R \leftarrow g W R + (1 - g) Y` from :math:`Y` (Zhou et al. 2003,
    "Learning with Local and Global Consistency", NeurIPS). ``step`` multiplies by :math:`W`, the
    means of neighbours. ``labels`` are :math:`Y`, zeros at nodes without a label.
    """
    reached = labels
    for _ in range(num_steps):
        reached = step(reached).mul_(damping).add_(labels, alpha=1 - damping)
    return reached
