# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sparse matrices, and label spreading."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.index import index2ptr


def identity(size: int) -> Tensor:
    """Identity matrix ``(N, N)`` in ``torch.sparse_csr``: features of nodes that have none.

    >>> identity(3).values()
    tensor([1., 1., 1.])
    """
    return sparse_csr(torch.arange(size + 1), torch.arange(size), torch.ones(size), (size, size))


def to_csr(dense: Tensor) -> Tensor:
    """A dense matrix in ``torch.sparse_csr``, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return dense.to_sparse_csr()


def sparse_csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix in ``torch.sparse_csr``, without the warning that its layout is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)


def csr_of_entries(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix in ``torch.sparse_csr`` of entries in any order."""
    order = rows.argsort(stable=True)
    return sparse_csr(index2ptr(rows[order], shape[0]), columns[order], values[order], shape)


def spread(step: Callable, labels: Tensor, damping: float, num_steps: int) -> Tensor:
    r"""Label spreading, :math:`R \leftarrow g W R + (1 - g) Y` from :math:`Y` (Zhou et al. 2003,
    "Learning with Local and Global Consistency", NeurIPS). ``step`` multiplies by :math:`W`, the
    means of neighbours. ``labels`` are :math:`Y`, zeros at nodes without a label.
    """
    reached = labels
    for _ in range(num_steps):
        reached = step(reached).mul_(damping).add_(labels, alpha=1 - damping)
    return reached
