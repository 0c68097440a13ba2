# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The joint distribution of labels that are revealed in blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask

from pyro_nmm import blocks
from pyro_nmm.arguments import as_expected, as_shape, check_integers, expect, expect_all
from pyro_nmm.distributions.path import PathEstimate
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.graph_arguments import as_nodes, check_pairs
from pyro_nmm.models.stacked.formula import Formula, propagated
from pyro_nmm.models.stacked.table import GraphScores, side_by_side
from pyro_nmm.neighborhood import Neighborhood


class StagedPosterior(Posterior):
    r"""Posterior of labels that are revealed in blocks :math:`\rho_1, \dots, \rho_B`, each with
    the joint distribution of a ``StackedNMM`` given all earlier blocks.

    .. math::

        p(y \mid y_\tau) = \prod_{b=1}^B p(y_{\rho_b} \mid y_\tau, y_{\rho_1}, \dots,
            y_{\rho_{b-1}})

    Earlier labels are known in the pool :math:`P`, and their expected counts are added to
    ``alpha``. One block is the posterior itself, and one node a block is the chain rule.
    :meth:`~pyro_nmm.models.StackedNMM.posterior` makes it. Its queries are those of a
    :class:`~pyro_nmm.Posterior`, but :meth:`condition`, :meth:`log_marginal` and
    :meth:`information_gain`, which would sum over labels of earlier blocks.

    >>> from pyro_nmm.models import StackedNMM
    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, train = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, False])
    >>> stacked = StackedNMM(num_classes=2).fit(hood, scores, y, train, [1, 2], num_steps=20)
    >>> posterior = stacked.posterior(hood, scores, y, train, stages=3)
    >>> posterior.sample((5,)).shape
    torch.Size([5, 4])

    Cost: for each block a pool, :math:`O(E C)` 20 times; :meth:`sample` for each draw and block, of
    all draws at once. With labels that are ``new``, draws come one by one: each has a posterior of
    the choices of the new labels, given its own earlier blocks.

    :param Posterior first: the posterior of the first block. :meth:`marginals` and :meth:`pairwise`
        average over as many draws of earlier blocks as it has components.
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

    def _at(self, number: int, labels: Tensor) -> Posterior:
        """The posterior of a block given labels ``(N,)`` of all earlier ones."""
        known = self.block < number
        return self.first if known.equal(self.observed) else self.given(labels[None], known)

    def _stages(self, query: str, y: Tensor, observed: Tensor | None) -> Iterator[tuple]:
        """For each block its posterior, all labels, and a mask of its nodes."""
        nodes, labels = self._new(query, y, observed)
        every, new = self.labels.index_copy(0, nodes, labels), index_to_mask(nodes, len(self.block))
        number = self.block[nodes].unique().tolist()
        missing = ~self.observed & (self.block < max(number, default=0)) & ~new
        if missing.any():
            node = int(missing.nonzero()[0])
            raise ValueError(
                f"observed leaves out node {node}, of an earlier block: give stages="
                "random_blocks(observed, number), where such nodes are in the last block"
            )
        for k in number:
            yield self._at(k, every), every, new & (self.block == k)

    def log_likelihood(
        self, y: Tensor, observed: Tensor | None = None, num_particles: int = 64
    ) -> Tensor:
        """The sum over blocks of :meth:`Posterior.log_likelihood`. ``observed`` holds all nodes of
        the blocks before its last one.
        """
        parts = self._stages("log_likelihood", y, observed)
        terms = [post.log_likelihood(every, part, num_particles) for post, every, part in parts]
        return sum(terms, self.logits.new_zeros(()))

    def path_likelihood(self, y: Tensor, observed: Tensor | None = None, *how: Any, **options: Any):
        """The sum over blocks of :meth:`Posterior.path_likelihood`, likewise."""
        parts = self._stages("path_likelihood", y, observed)
        terms = [post.path_likelihood(every, part, *how, **options) for post, every, part in parts]
        values, errors = torch.stack([self.logits.new_zeros(2), *map(torch.stack, terms)]).T
        return PathEstimate(values.sum(), errors.norm())

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

    @cached_property
    def paths(self) -> Tensor:
        """``(S, N)``: draws, as many as the first block has components."""
        return self.sample((len(self.components),))

    def _average(self, number: Tensor, table: Tensor, query: Callable) -> Tensor:
        """Fill rows of a table by a query of each row's block, averaged over the paths."""
        for k in number.unique().tolist():
            some = (number == k).nonzero()[:, 0]
            every = [self.first] if k <= 0 else [self._at(k, path) for path in self.paths]
            table[some] = torch.stack([query(posterior, some) for posterior in every]).mean(0)
        return table

    def _marginals(self, rows: Neighborhood) -> Tensor:
        table, nodes = self.logits.new_empty(rows.num_rows, self.num_classes), rows.nodes
        return self._average(self.block[nodes], table, lambda p, some: p.marginals()[nodes[some]])

    def pairwise(self, pairs: Tensor) -> Tensor:
        """``(P, C, C)``: :meth:`Posterior.pairwise` of the later node's block, over the paths."""
        check_pairs(self.hood, pairs)
        number, size = self.block[pairs].amax(0), self.num_classes
        table = self.logits.new_empty(len(number), size, size)
        return self._average(number, table, lambda p, some: p.pairwise(pairs[:, some]))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a query that would sum over labels of earlier blocks."""
        raise ValueError("with stages=1 a posterior has this query, with more it has none")

    condition = log_marginal = information_gain = _refuse

    def predict(self, nodes: Tensor | None = None, method="marginal", generator=None) -> Tensor:
        """Modes of the marginals: :meth:`Posterior.predict` with ``method="marginal"``."""
        return super().predict(nodes) if method == "marginal" else self._refuse()


def posteriors(
    data: GraphScores, inputs: Tensor, formulas: Sequence[Formula], share: int | None,
    observed: Tensor, revealed: Tensor | None = None,
) -> list[Posterior]:  # fmt: skip
    """Posteriors given ``observed`` labels, where sources have counts of ``revealed`` labels."""
    every = (formula(data.hood, inputs, data.edge_weight) for formula in formulas)
    if revealed is not None:
        every = (formulas[0].counted(data, revealed, *each) for each in every)
    some, mixtures = bool(observed.any()), formulas[0].mixtures(data, every)
    return [m.condition(data.y, observed, share) if some else m.prior(share) for m in mixtures]


def staged(
    data: GraphScores, inputs: Tensor, formulas: Sequence[Formula], share: int | None,
    observed: Tensor, block: Tensor,
) -> list[Posterior]:  # fmt: skip
    """:func:`posteriors` of labels that are revealed in blocks."""
    new = torch.zeros_like(data.known) if data.new is None else data.new
    numbers_each = 4 * data.hood.num_edges * inputs.shape[-1]
    most = 1 if new.any() else max(1, blocks.NUMBERS // numbers_each)

    firsts = posteriors(data, inputs, formulas, share, observed)
    how = [partial(_given, data, inputs, share, formula, new) for formula in formulas]
    pairs = zip(firsts, how, strict=True)
    return [StagedPosterior(first, given, block, most) for first, given in pairs]


def _given(
    data: GraphScores, inputs: Tensor, share: int | None, formula: Formula, new: Tensor,
    y: Tensor, known: Tensor,
) -> Posterior:  # fmt: skip
    """The posterior given labels ``(S, N)`` where known, on copies of the graph side by side."""
    known = known & (data.known | ~new)  # new labels are in the pool or not, as before
    terms = inputs.repeat(1, len(y), 1)
    terms[2] = propagated(replace(data, y=y, known=known)).flatten(0, 1)
    every = [replace(data, y=row, known=known) for row in y]
    copies = every[0] if len(y) == 1 else GraphScores(**side_by_side(every))
    # A known node has a source of its own, so only new labels are conditioned on.
    observed, revealed = (mask.repeat(len(y)) for mask in (new, known & ~data.known))
    return posteriors(copies, terms, [formula], share, observed, revealed)[0]


@torch.no_grad()
def joint_nll(copies: Sequence[tuple[GraphScores, Tensor]], formula: Formula, number: int) -> float:
    """Negative log-likelihood of all held-out labels, revealed in so many blocks, in nats."""
    total = 0.0
    for data, out in copies:
        data = replace(data, known=data.known & ~out)
        inputs, block = formula.inputs(data)[0], random_blocks(out, number)
        [posterior] = staged(data, inputs, [formula], 1, data.known, block)
        total -= float(posterior.log_likelihood(data.y, out))
    return total


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
