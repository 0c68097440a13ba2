# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The paper's backbones and an MLP behind one input layer; GCN and APPNP cache one graph."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import APPNP, GAT, GCN, MLP, Sequential


class RandomInput(nn.Module):
    r"""A network with dropout of single input features, and of all features of a node (DropNode,
    Feng et al. 2020, "Graph Random Neural Networks", NeurIPS). Sparse features stay sparse.

    .. math::

        \tilde x_{id} = \frac{m_i}{1 - p_{\text{nodes}}} \frac{m_{id}}{1 - p} \, x_{id}, \qquad
        m_i \sim \mathrm{Bernoulli}(1 - p_{\text{nodes}}), \quad
        m_{id} \sim \mathrm{Bernoulli}(1 - p)

    :param nn.Module network: called as ``network(x, *inputs)`` with ``x`` of shape ``(N, D)``.
    :param float dropout: :math:`p`; ``drop_nodes`` is :math:`p_{\text{nodes}}`.
    """

    def __init__(self, network: nn.Module, dropout: float = 0.0, drop_nodes: float = 0.0) -> None:
        super().__init__()
        self.network, self.dropout, self.drop_nodes = network, dropout, drop_nodes

    def forward(self, x: Tensor, *inputs) -> Tensor:
        if self.training and (self.dropout or self.drop_nodes):
            x = self._thin(x)
        return self.network(x, *inputs)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, drop_nodes={self.drop_nodes}"

    def _thin(self, x: Tensor) -> Tensor:
        x = x.to_sparse_csr() if x.layout == torch.sparse_coo else x
        kept = F.dropout(torch.ones(len(x), dtype=x.dtype, device=x.device), self.drop_nodes)
        if x.layout != torch.sparse_csr:
            return F.dropout(x, self.dropout) * kept[:, None]
        values = F.dropout(x.values(), self.dropout)
        ptr, columns = x.crow_indices(), x.col_indices()
        values = values * kept.repeat_interleave(ptr.diff(), output_size=len(values))
        return torch.sparse_csr_tensor(ptr, columns, values, x.shape, check_invariants=False)


def gcn(
    num_features: int, width: int, *, attention: bool = False, dropout=0.5, drop_nodes=0.0
) -> RandomInput:
    """Graph convolutions: 2 layers of 16 hidden units; for ``attention`` vectors one layer. All
    four backbones have ``width`` columns, dropout of features and units, and ``drop_nodes``.
    """
    hidden, layers = (width, 1) if attention else (16, 2)
    network = GCN(num_features, hidden, layers, out_channels=width, dropout=dropout, cached=True)
    return RandomInput(network, dropout, drop_nodes)


def gat(
    num_features: int, width: int, *, attention: bool = False, dropout=0.5, drop_nodes=0.0
) -> RandomInput:
    """Graph attention: 2 layers of 8 heads of 16 units; for ``attention`` vectors one layer."""
    hidden, layers = (width, 1) if attention else (8 * 16, 2)
    network = GAT(num_features, hidden, layers, width, dropout, act="elu", heads=8)
    return RandomInput(network, dropout, drop_nodes)


def appnp(
    num_features: int, width: int, *, attention: bool = False, dropout=0.5, drop_nodes=0.0
) -> RandomInput:
    """64 hidden units, then 10 steps of personalised PageRank with teleport probability 0.1."""
    layers = [
        (MLP([num_features, 64, width], dropout=dropout, norm=None), "x -> x"),
        (APPNP(K=10, alpha=0.1, cached=True), "x, edge_index -> x"),
    ]
    return RandomInput(Sequential("x, edge_index", layers), dropout, drop_nodes)


class _NodewiseMLP(MLP):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x)


def mlp(
    num_features: int, width: int, *, attention: bool = False, dropout=0.5, drop_nodes=0.0
) -> RandomInput:
    """64 hidden units and no graph: the edges are ignored."""
    network = _NodewiseMLP([num_features, 64, width], dropout=dropout, norm=None)
    return RandomInput(network, dropout, drop_nodes)
