# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sparse matrices."""

import warnings

import torch
from torch import Tensor


def identity(size: int) -> Tensor:
    """
    Identity matrix ``(N, N)`` in ``torch.sparse_csr``: features of nodes that have none.

    >>> identity(3).values()
    tensor([1., 1., 1.])
    """
    return sparse_csr(torch.arange(size + 1), torch.arange(size), torch.ones(size), (size, size))


def to_csr(dense: Tensor) -> Tensor:
    """A dense matrix in ``torch.sparse_csr``, without the warning that its layout is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return dense.to_sparse_csr()


def sparse_csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix in ``torch.sparse_csr``, without the warning that its layout is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)
