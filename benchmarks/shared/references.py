# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What tables set beside our own: numbers that were published, and values computed otherwise."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_matrix, identity
from scipy.sparse.linalg import splu
from torch import Tensor
from torch_geometric.utils import to_scipy_sparse_matrix

from pyro_nmm.models import grid_edges

#: Accuracy in percent of NMM-GCN on Cora in the paper's table 2.
PAPER_CORA = 84.3
#: Links of DGLFRM and NMM-DGLFRM: average precision in the main text, AUC in the appendix.
PAPER_LINKS = {
    ("nips12", "AP"): ("88.66 ± 0.56", "89.82 ± 0.64"),
    ("yeast", "AP"): ("84.03 ± 0.69", "84.92 ± 0.51"),
    ("cora", "AP"): ("93.44 ± 0.40", "94.16 ± 0.47"),
    ("citeseer", "AP"): ("94.31 ± 0.36", "94.75 ± 0.38"),
    ("pubmed", "AP"): ("96.47 ± 0.18", "96.45 ± 0.14"),
    ("nips12", "AUC"): ("86.47 ± 0.83", "86.88 ± 0.67"),
    ("yeast", "AUC"): ("77.97 ± 0.79", "79.06 ± 0.72"),
    ("cora", "AUC"): ("93.00 ± 0.34", "93.48 ± 0.41"),
    ("citeseer", "AUC"): ("93.79 ± 0.42", "93.81 ± 0.50"),
    ("pubmed", "AUC"): ("96.11 ± 0.19", "96.05 ± 1.16"),
}
#: Links for training, validation and testing in the paper's table 1.
PAPER_SPLITS = {
    "nips12": "2665 / 156 / 313", "yeast": "5650 / 332 / 664", "cora": "4616 / 271 / –",
    "citeseer": "4023 / 236 / 473", "pubmed": "37689 / 2216 / 4433",
}  # fmt: skip
#: AUC and AP on two splits of Cora, in the README of nikhil-dce/SBM-meet-GNN.
AUTHORS_LINKS = {0: (92.79, 93.14), 1: (92.63, 93.48)}
#: Of VGAE with features in table 1 of Kipf and Welling (2016, "Variational graph auto-encoders"),
#: and of DGL's example with DGL's copies of the graphs (dmlc/dgl, examples/pytorch/vgae/README.md).
VGAE_LINKS = {
    ("cora", "AUC"): (91.4, 91.8), ("cora", "AP"): (92.6, 92.5),
    ("citeseer", "AUC"): (90.8, 89.2), ("citeseer", "AP"): (92.0, 90.8),
    ("pubmed", "AUC"): (94.4, 94.5), ("pubmed", "AP"): (94.7, 94.6),
}  # fmt: skip
#: Decibels in the paper's table of image denoising.
PAPER_IMAGES = {
    ("bsds300", "U-Net"): "30.28", ("kodak24", "U-Net"): "31.07",
    ("bsds300", "NMM"): "30.33", ("kodak24", "NMM"): "31.55",
}  # fmt: skip


def kac_ward(height: int, width: int, coupling: float) -> float:
    r"""
    Exact :math:`\log Z` of the Ising model on a grid with open boundary and without field
    (Kac and Ward 1952): :math:`2^N \prod_e \cosh J_e \sqrt{\det(1 - W)}`, where :math:`W` leads
    from each directed edge to those that follow it, turning by an angle :math:`\varphi`, with
    :math:`\tanh J \, e^{i \varphi / 2}`.
    """
    edges = grid_edges(height, width).numpy()
    tail, head = np.concatenate([edges, edges[::-1]], 1)
    count = len(tail)
    angle = np.arctan2(head // width - tail // width, head % width - tail % width)
    # Which edges end, and which start, at every node; an edge does not turn back.
    nodes = height * width
    ends, starts = (
        coo_matrix((np.ones(count), (np.arange(count), each)), shape=(count, nodes))
        for each in (head, tail)
    )
    row, column = (ends @ starts.T).nonzero()
    onward = tail[row] != head[column]
    row, column = row[onward], column[onward]
    turn = (angle[column] - angle[row] + np.pi) % (2 * np.pi) - np.pi
    weight = np.tanh(coupling) * np.exp(0.5j * turn)
    weight = coo_matrix((weight, (row, column)), shape=(count, count))
    factors = splu((identity(count, dtype=complex) - weight).tocsc())
    log_det = np.log(np.abs(factors.U.diagonal())).sum()
    size = nodes * np.log(2) + edges.shape[1] * np.log(np.cosh(coupling))
    return float(size + log_det / 2)


def walks(edge_index: Tensor, num_nodes: int, pairs: Tensor, longest: int = 6) -> Tensor:
    """
    ``(longest, P)``: how many walks of each length lead from one node of a pair to the other in an
    undirected graph, for the index of Katz (1953, "A new status index derived from sociometric
    analysis", Psychometrika), which predicts links without a model.
    """
    graph = to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes).tocsr().astype(float)
    start, end = pairs.cpu().numpy()
    # A walk of each length is two of half of it, which meet.
    powers = [identity(num_nodes, format="csr")]
    for _ in range((longest + 1) // 2):
        powers.append(powers[-1] @ graph)
    halves = [(powers[n // 2], powers[n - n // 2]) for n in range(1, longest + 1)]
    counts = [a[start].multiply(b[end]).sum(1) for a, b in halves]
    return torch.from_numpy(np.hstack(counts).T.copy())


def katz_index(counts: Tensor, discount: float) -> Tensor:
    """``(P,)``, from the numbers of walks, each step at a discount."""
    powers = discount ** torch.arange(1, len(counts) + 1, dtype=counts.dtype, device=counts.device)
    return powers @ counts
