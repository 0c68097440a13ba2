# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields on grids of pixels, and the windows of their pixels."""

from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import block_array, eye_array, kron
from scipy.sparse.linalg import splu
from torch import Tensor
from torch_geometric.utils import subgraph

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import letters
from pyro_nmm.models import PairwiseMRF, coarse_to_fine, grid_edges, ising, ising_posterior, potts

Shape = tuple[int, int]
#: By the number of labels: narrow grids, whose log Z is exact, and couplings as near to critical.
STRIPS = {2: (40, 12), 4: (40, 8), 8: (40, 5)}
COUPLINGS = {2: [0.2, 0.4, 0.6], 4: [0.5, 1.0, 1.5], 8: [0.61, 1.22, 1.83]}
#: Fields for one network: those of its training, larger ones, and stronger interactions.
MANY: dict[str, tuple[Shape, tuple[float, float], range]] = {
    "as in training": ((40, 12), (0.1, 0.6), range(20)),
    "14 x 80 pixels": ((80, 14), (0.1, 0.6), range(10)),
    "couplings 0.6 to 0.9": ((40, 12), (0.6, 0.9), range(10)),
}
#: Random fields of a kind, and the side of the letter and of the plain field.
SEEDS, SIZE = range(3), 128


class Grid(NamedTuple):
    """Windows of a grid's pixels, or of some of them."""

    hood: Neighborhood
    order: Tensor  #: ``(N,)``, from coarse to fine
    distance: Tensor  #: ``(num_edges,)``, squared, between the ends of an edge


def grid(shape: Shape, radius: int = 1, stay: Tensor | None = None) -> Grid:
    """Windows of side ``2 radius + 1`` of all pixels, or of a mask of pixels that ``stay``."""
    hood, order = Neighborhood.grid(*shape, radius), coarse_to_fine(*shape)
    pixels = torch.cartesian_prod(*map(torch.arange, shape))
    distance = (pixels[hood.source] - pixels[hood.target]).square().sum(-1)
    if stay is not None:
        edges, order = (
            torch.stack([hood.source, hood.target]),
            (stay.cumsum(0) - 1)[order[stay[order]]],
        )
        edges, distance = subgraph(stay, edges, distance, relabel_nodes=True)
        hood = Neighborhood(edges, int(stay.sum()))
    return Grid(hood, order, distance)


def random_field(
    labels: int, coupling: float | tuple[float, float], seed: int, shape: Shape | None = None
) -> PairwiseMRF:
    """Ising or Potts model on a narrow grid, with a coupling that is given or drawn between two."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(coupling, tuple):
        low, high = coupling
        coupling = low + (high - low) * torch.rand((), generator=generator).item()
    height, width = shape or STRIPS[labels]
    make, terms = (ising, []) if labels == 2 else (potts, [labels])
    noise = torch.randn(height * width, *terms, generator=generator)
    return make(grid_edges(height, width), coupling, 0.5 * noise)


def strip(labels: int, coupling, seed: int, shape: Shape | None = None):
    """A random field, and its exact log Z."""
    field = random_field(labels, coupling, seed, shape)
    return field, field.log_normalizer().item()


def noisy_letter(seed: int) -> tuple[PairwiseMRF, Tensor]:
    """The posterior of a noisy letter's pixels, and the clean pixels, -1 or 1."""
    clean = letters("A", SIZE, SIZE)
    noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return ising_posterior(clean + 2 * noise, coupling=1.0, sigma=2.0), clean


def plain(coupling: float) -> tuple[PairwiseMRF, float]:
    """Ising model without fields, and its log Z."""
    field = ising(grid_edges(SIZE, SIZE), coupling, torch.zeros(SIZE**2))
    return field, kac_ward(SIZE, SIZE, coupling)


def kac_ward(height: int, width: int, coupling: float) -> float:
    r"""
    Exact :math:`\log Z` of the Ising model on a grid with open boundary and without fields
    (Kac and Ward 1952): :math:`2^N \prod_e \cosh J_e \sqrt{\det(1 - W)}`. :math:`W` has the entry
    :math:`\tanh J \, e^{i \varphi / 2}` for two steps in a row with a turn by :math:`\varphi`.
    """
    steps = {
        step: kron(eye_array(height, k=int(step.imag)), eye_array(width, k=int(step.real)))
        for step in (1, -1, 1j, -1j)
    }
    # A step b that follows a step a does not go straight back.
    pairs = [[(b != -a) * np.sqrt(b / a + 0j) * steps[b] for b in steps] for a in steps]
    walks = eye_array(4 * height * width) - np.tanh(coupling) * block_array(pairs)
    log_det = np.log(np.abs(splu(walks.tocsc()).U.diagonal())).sum()
    cosh = grid_edges(height, width).shape[1] * np.log(np.cosh(coupling))
    return float(height * width * np.log(2) + cosh + log_det / 2)
