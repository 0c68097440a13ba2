# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields on grids of pixels, and the windows of their pixels."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import block_array, eye_array, kron
from scipy.sparse.linalg import splu
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import letters
from pyro_nmm.models import PairwiseMRF, coarse_to_fine, grid_edges, ising, ising_posterior, potts

Shape = tuple[int, int]
#: Width of the narrow grids of two labels, whose log Z is exact.
WIDTH = 12


class Grid(NamedTuple):
    """Windows of a grid's pixels, or of some of them."""

    hood: Neighborhood
    order: Tensor  #: ``(N,)``, from coarse to fine
    pixels: Tensor  #: ``(N,)`` ids of the nodes in the whole grid
    distance: Tensor  #: ``(num_edges,)``, squared, between the ends of an edge


def grid(shape: Shape, radius: int = 1, stay: Tensor | None = None) -> Grid:
    """Windows of side ``2 radius + 1`` of all pixels, or of a mask of pixels that ``stay``."""
    hood, order = Neighborhood.grid(*shape, radius), coarse_to_fine(*shape)
    pixels = torch.arange(len(order))
    if stay is not None:
        pixels, place = stay.nonzero()[:, 0], stay.cumsum(0) - 1
        hood, order = hood.subgraph(pixels), place[order[stay[order]]]
    source, target = pixels[hood.source], pixels[hood.target]
    down, across = source // shape[1] - target // shape[1], source % shape[1] - target % shape[1]
    return Grid(hood, order, pixels, down.square() + across.square())


def random_ising(shape: Shape, coupling: float | None, seed: int) -> PairwiseMRF:
    """Ising model with fields of sd 0.5; its coupling is drawn from 0.1 to 0.6 if not given."""
    generator = torch.Generator().manual_seed(seed)
    if coupling is None:
        coupling = 0.1 + 0.5 * torch.rand((), generator=generator).item()
    noise = torch.randn(shape[0] * shape[1], generator=generator)
    return ising(grid_edges(*shape), coupling, 0.5 * noise)


def random_potts(shape: Shape, labels: int, coupling: float, seed: int) -> PairwiseMRF:
    """Potts model with unary terms of sd 0.5."""
    generator = torch.Generator().manual_seed(seed)
    unary = 0.5 * torch.randn(shape[0] * shape[1], labels, generator=generator)
    return potts(grid_edges(*shape), coupling, unary)


def noisy_letter(size: int, seed: int) -> tuple[PairwiseMRF, Tensor]:
    """The posterior of a noisy letter's pixels, and the clean pixels, -1 or 1."""
    clean = letters("A", size, size)
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return ising_posterior(clean + 2 * noise, coupling=1.0, sigma=2.0), clean


def plain_ising(size: int, coupling: float) -> PairwiseMRF:
    """Ising model without fields; :func:`kac_ward` has its log Z."""
    return ising(grid_edges(size, size), coupling, torch.zeros(size * size))


def kac_ward(height: int, width: int, coupling: float) -> float:
    r"""
    Exact :math:`\log Z` of the Ising model on a grid with open boundary and without fields
    (Kac and Ward 1952): :math:`2^N \prod_e \cosh J_e \sqrt{\det(1 - W)}`. :math:`W` has the entry
    :math:`\tanh J \, e^{i \varphi / 2}` for two steps in a row with a turn by :math:`\varphi`.
    """
    across, down = (partial(eye_array, size) for size in (width, height))
    steps = {1: kron(down(), across(k=1)), -1: kron(down(), across(k=-1))}
    steps |= {1j: kron(down(k=1), across()), -1j: kron(down(k=-1), across())}

    def turned(last: complex, now: complex):
        """Steps that follow another one; none goes straight back."""
        return (now != -last) * np.sqrt(now / last + 0j) * steps[now]

    weight = block_array([[turned(last, now) for now in steps] for last in steps])
    walks = eye_array(4 * height * width) - np.tanh(coupling) * weight
    log_det = np.log(np.abs(splu(walks.tocsc()).U.diagonal())).sum()
    cosh = grid_edges(height, width).shape[1] * np.log(np.cosh(coupling))
    return float(height * width * np.log(2) + cosh + log_det / 2)
