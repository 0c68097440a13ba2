# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_nmm.blocks import blocks
from pyro_nmm.edges import as_mask
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.validation import check_integers, check_nodes


class JointQueries:
    """Queries of a joint distribution of labels that follow from its draws and tables of pairs."""

    hood: Neighborhood
    num_classes: int

    def marginals(self) -> Tensor:
        raise NotImplementedError

    def pairwise(self, pairs: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def is_known(self, nodes: Tensor) -> Tensor:
        """Whether the labels of nodes are certain."""
        raise NotImplementedError

    @torch.no_grad()
    def counts(self, sets: Sequence[Tensor], label: int, num_samples: int = 1000) -> Tensor:
        """
        How many nodes of a set have a label: joint draws, of which quantiles make intervals.

        :param sets: ``S`` sets of nodes, by node ids ``(K,)`` or by boolean masks ``(N,)``.
        :return: ``(num_samples, S)``. Cost: as many draws of the nodes in the sets.
        """
        check_integers(0, label=label)
        check_integers(1, num_samples=num_samples)
        if label >= self.num_classes:
            raise ValueError(f"label must lie in 0..{self.num_classes - 1}, got {label}")
        if isinstance(sets, Tensor) and sets.dim() == 1:
            raise ValueError(
                "sets must be a sequence of sets of nodes: give [nodes] for a single one"
            )
        hood = self.hood
        members = torch.stack([as_mask(nodes, hood.num_nodes, hood.device) for nodes in sets])
        union = members.any(0).nonzero()[:, 0]
        # Products of zeros and ones are exact in single precision, and linear in all members.
        inside = members[:, union].T.float().to_sparse()
        found = []
        for part in blocks(num_samples, 4 * len(union)):
            hits = (self.sample((part.stop - part.start,), union) == label).float()
            found.append(torch.sparse.mm(inside.T, hits.T).T.round().long())
        return torch.cat(found)

    @torch.no_grad()
    def information_gain(self, nodes: Tensor) -> Tensor:
        r"""
        The expected information, in nats, about all labels in one more label, for active learning:

        .. math::

            H(y_i) + \sum_{j \ne i} I(y_i ; y_j)

        over the nodes `j` that share a source with `i`; zero for nodes whose label is known. The
        sum counts information twice that two of these nodes share.

        :param Tensor nodes: ``(K,)`` distinct node ids.
        :return: ``(K,)``. Cost: :meth:`marginals`, and :meth:`pairwise` of all such pairs.
        """
        check_nodes(self.hood, nodes)
        own = torch.special.entr(self.marginals()).sum(-1)
        pairs = sharing(self.hood, nodes)
        pairs = pairs[:, ~self.is_known(pairs).any(0)]
        mutual = own.new_zeros(pairs.shape[1])
        for part in blocks(pairs.shape[1], self.num_classes**2):
            table = self.pairwise(pairs[:, part])
            joint = torch.special.entr(table).sum((-1, -2))
            alone = torch.special.entr(table.sum(-1)) + torch.special.entr(table.sum(-2))
            mutual[part] = (alone.sum(-1) - joint).clamp(min=0)
        return own.scatter_add(0, pairs[0], mutual)[nodes]


def sharing(hood: Neighborhood, nodes: Tensor) -> Tensor:
    """``(2, P)``: each of some nodes with every other node that shares a source with it."""
    order = hood.source.argsort(stable=True)
    degree = hood.source.bincount(minlength=hood.num_sources)
    first = degree.cumsum(0) - degree
    rows = hood.take(nodes)
    number = degree[rows.source]
    start = (first[rows.source] - number.cumsum(0) + number).repeat_interleave(number)
    place = start + torch.arange(len(start), device=start.device)
    pairs = torch.stack([rows.target.repeat_interleave(number), hood.target[order[place]]])
    return pairs[:, pairs[0] != pairs[1]].unique(dim=1)
