# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The joint distribution of labels that are revealed in blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.utils import index_to_mask

from pyro_nmm import blocks
from pyro_nmm.arguments import as_expected, as_shape, check_integers, expect, expect_all
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.graph_arguments import as_nodes
from pyro_nmm.models.stacked.formula import Formula, Tensors, propagated
from pyro_nmm.models.stacked.table import GraphScores, side_by_side
from pyro_nmm.relabel import Channel, entries_at


class StagedPosterior(Posterior):
    r"""Posterior of labels that are revealed in blocks :math:`\rho_1, \dots, \rho_B`, each with
    the joint distribution of a ``StackedNMM`` given all earlier blocks.

    .. math::

        p(y \mid y_\tau) = \prod_{b=1}^B p(y_{\rho_b} \mid y_\tau, y_{\rho_1}, \dots,
            y_{\rho_{b-1}})

    Earlier labels are known in the pool :math:`P`, and their expected counts are added to
    ``alpha``. One block is the posterior itself, and one node a block is the chain rule. It has
    :meth:`log_likelihood`, :meth:`sample` and :meth:`counts`. Other queries would sum over labels
    of earlier blocks.

    Cost: for each block a pool, :math:`O(E C)` 20 times; :meth:`sample` for each draw and block, of
    all draws at once. With labels that are ``new``, draws come one by one: each has a posterior of
    the choices of the new labels, given its own earlier blocks.

    :param Posterior first: the posterior of the first block.
    :param given: the posterior given labels ``(S, N)`` where a mask ``(N,)`` is true, on ``S``
        copies of the graph side by side.
    :param Tensor block: ``(N,)`` block ``0..B - 1`` of each unobserved node.
    :param int most: the largest ``S``.
    """

    def __init__(self, first: Posterior, given: Callable, block: Tensor, most: int = 1) -> None:
        parts = first.hood, first.logits, first.components, first.channel
        super().__init__(*parts, is_exact=first.is_exact, weighted=first.weighted)
        self.first, self.given, self.most = first, given, most
        self.block = block.masked_fill(self.observed, -1)

    def log_likelihood(
        self, y: Tensor, observed: Tensor | None = None, num_particles: int = 64
    ) -> Tensor:
        """The sum over blocks of :meth:`Posterior.log_likelihood`. ``observed`` holds all nodes of
        the blocks before its last one.
        """
        nodes, labels = self._new("log_likelihood", y, observed)
        every, new = self.labels.index_copy(0, nodes, labels), index_to_mask(nodes, len(self.block))
        numbers, total = self.block[nodes].unique().tolist(), self.logits.new_zeros(())
        missing = ~self.observed & (self.block < max(numbers, default=0)) & ~new
        if missing.any():
            node = int(missing.nonzero()[0])
            raise ValueError(
                f"observed leaves out node {node}, of an earlier block: give stages="
                "random_blocks(observed, number), where such nodes are in the last block"
            )
        for k in numbers:
            known = self.block < k
            at_start = known.equal(self.observed)
            posterior = self.first if at_start else self.given(every[None], known)
            total += posterior.log_likelihood(every, new & (self.block == k), num_particles)
        return total

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        """``(*sample_shape, K)``: joint draws, block by block: :meth:`Posterior.sample`."""
        nodes, shape = as_nodes(self.hood, nodes), as_shape(sample_shape)
        labels = self.labels.repeat(shape.numel(), 1)
        last = max(self.block[nodes].tolist(), default=-1)
        drawn = (self.block < last).index_fill(0, nodes, True)
        for k in range(last + 1):
            part, known = (drawn & (self.block == k)).nonzero()[:, 0], self.block < k
            if known.equal(self.observed):
                labels[:, part] = self.first.sample((len(labels),), part)
                continue
            for some in labels.split(self.most) if len(part) * len(labels) else ():
                copies = torch.arange(0, some.numel(), len(known), device=part.device)[:, None]
                draw = self.given(some, known).sample((), (copies + part).flatten())
                some[:, part] = draw.view(len(some), -1)
        return labels[:, nodes].view(*shape, len(nodes))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a query that would sum over labels of earlier blocks."""
        raise ValueError("with stages=1 a posterior has this query, with more it has none")

    condition = log_marginal = _refuse
    marginals = pairwise = predict = _refuse


@dataclass(frozen=True)
class Pooled:
    """What the posteriors of one graph have in common."""

    data: GraphScores
    inputs: Tensor  #: of the formulas
    observed: Tensor  #: mask of the labels that the mixtures are conditioned on
    num_samples: int | None  #: of each posterior

    def posteriors(
        self, formulas: Sequence[Formula], revealed: Tensor | None = None
    ) -> list[Posterior]:
        """One for each formula. Its sources have counts of ``revealed`` labels."""
        data, observed, share = self.data, self.observed, self.num_samples
        every = (formula(data.hood, self.inputs, data.edge_weight) for formula in formulas)
        if revealed is not None:
            every = (counted(formulas[0], data, revealed, *each) for each in every)
        some, mixtures = bool(observed.any()), formulas[0].mixtures(data, every)
        return [m.condition(data.y, observed, share) if some else m.prior(share) for m in mixtures]

    def staged(self, formulas: Sequence[Formula], block: Tensor) -> list[Posterior]:
        """:meth:`posteriors` of labels that are revealed in blocks."""
        new = torch.zeros_like(self.data.known) if self.data.new is None else self.data.new
        numbers_each = 4 * self.data.hood.num_edges * self.inputs.shape[-1]
        most = 1 if new.any() else max(1, blocks.NUMBERS // numbers_each)
        pairs = zip(self.posteriors(formulas), formulas, strict=True)
        return [StagedPosterior(p, partial(self.given, f, new), block, most) for p, f in pairs]

    def given(self, formula: Formula, new: Tensor, y: Tensor, known: Tensor) -> Posterior:
        """The posterior given labels ``(S, N)`` where known, on copies of the graph."""
        data = self.data
        known = known & (data.known | ~new)  # new labels are in the pool or not, as before
        terms = self.inputs.repeat(1, len(y), 1)
        terms[2] = propagated(replace(data, y=y, known=known)).flatten(0, 1)
        copies = side_by_side([replace(data, y=row, known=known) for row in y])
        # A known node has a source of its own, so only new labels are conditioned on.
        observed, revealed = (mask.repeat(len(y)) for mask in (new, known & ~data.known))
        return Pooled(copies, terms, observed, self.num_samples).posteriors([formula], revealed)[0]


def counted(
    formula: Formula,
    data: GraphScores,
    revealed: Tensor,
    alpha: Tensor,
    logits: Tensor,
    *relabel: Tensor,
) -> Tensors:
    r"""Parameters whose sources have counts of revealed labels:

    .. math::

        \alpha_{jk} + \sum_{i \text{ revealed}} p(c_i = j, u_i = k \mid y_i)

    where :math:`u_i` is the label that node `i` takes from its source. They are the expected
    counts of the first step of EM, so more labels around a source have more weight.
    """
    rows, found = data.hood.restrict(revealed), alpha.clone()
    mean = alpha / alpha.sum(-1, keepdim=True)
    for block in blocks.row_blocks(rows.ptr, 4 * alpha.shape[1]):
        part = rows.take(torch.arange(block.start, block.stop, device=rows.device))
        labels = data.y[part.nodes]
        shown = one_hot(labels, alpha.shape[1]).index_select(0, part.row)
        if relabel:
            channel = Channel(relabel[0]).of(part.edge)
            shown = channel.evidence(part, labels).exp()
        weight = part.softmax(logits[part.edge])[:, None] * mean[part.source] * shown
        total = part.sum(weight.sum(-1))
        if formula.share < 1:
            beside = entries_at(formula.beside(data)[part.nodes], labels)
            total = total + beside * (1 - formula.share) / formula.share
        found.index_add_(0, part.source, weight / total[part.row, None])
    return found, logits, *relabel


def as_blocks(stages: int | Tensor, known: Tensor) -> Tensor:
    """``(N,)``: the block of each node."""
    if isinstance(stages, int):
        return random_blocks(~known, stages)
    block = as_expected("stages", stages, tuple(known.shape), kind="labels", like=known).long()
    expect_all("stages", block, block >= 0, "hold blocks 0, 1, ...")
    return block


def random_blocks(nodes: Tensor, number: int, seed: int = 0) -> Tensor:
    """Blocks :math:`0, \\dots, B - 1` in random order, of equal size, for ``stages`` of
    :meth:`StackedNMM.posterior`. Labels are not read. Nodes outside of the mask are in the last
    block. Cost: :math:`O(N)`.

    >>> random_blocks(torch.tensor([True, True, True, False]), number=3)
    tensor([2, 0, 1, 2])

    :param Tensor nodes: ``(N,)`` boolean mask.
    :return: ``(N,)`` the block ``0..number - 1`` of each node.
    """
    check_integers(1, number=number)
    some = expect("nodes", nodes, ("N",), kind="mask").nonzero()[:, 0]
    order = torch.randperm(len(some), generator=torch.Generator().manual_seed(seed))
    block = torch.full_like(nodes, number - 1, dtype=torch.long)
    block[some] = order.to(block) * number // max(1, len(some))
    return block
