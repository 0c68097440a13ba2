# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors of a graph's labels, at once or in blocks that are revealed one after the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture, blocks
from pyro_nmm.arguments import as_shape, check_integers, expect
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.model_arguments import as_nodes
from pyro_nmm.models.stacked.formula import Formula, Tensors, propagated
from pyro_nmm.models.stacked.table import GraphScores, side_by_side
from pyro_nmm.relabel import entries_at

#: Draws of the choices of labels that are evidence.
NUM_SAMPLES = 64


def posteriors(formulas: Sequence[Formula], data: GraphScores, num_samples: int) -> list[Posterior]:
    """One for each formula, given the known labels."""
    inputs, observed = formulas[0].inputs(data), data.known | data.evidence
    every = (formula(data.hood, inputs) for formula in formulas)
    mixtures = formulas[0].mixtures(data, inputs, every)
    return [given(mixture, data, observed, num_samples) for mixture in mixtures]


def given(
    mixture: NeighborMixture, data: GraphScores, observed: Tensor, num_samples: int
) -> Posterior:
    """With as many components where no label is observed, too."""
    if not observed.any():
        return mixture.prior(num_samples)
    return mixture.condition(data.y, observed, num_samples)


class StagedPosterior(Posterior):
    r"""Posterior of labels that are revealed in blocks :math:`\rho_1, \dots, \rho_B`, each with
    the joint distribution of a ``StackedNMM`` given all earlier blocks.

    .. math::

        p(y \mid y_\tau) = \prod_{b=1}^B p(y_{\rho_b} \mid y_\tau, y_{\rho_1}, \dots,
            y_{\rho_{b-1}})

    Earlier labels are known in the pool :math:`P`, and their expected counts are added to
    ``alpha``. One block is the posterior itself, and one node a block is the chain rule. Queries
    other than :meth:`log_likelihood`, :meth:`sample` and :meth:`counts` would sum over labels of
    earlier blocks. Cost: a pool for each block, in :meth:`sample` also for each draw.
    """

    def __init__(self, formula: Formula, data: GraphScores, block: Tensor) -> None:
        [first] = posteriors([formula], data, NUM_SAMPLES)
        super().__init__(first.components, is_exact=first.is_exact, weighted=first.weighted)
        self.formula, self.data, self.first = formula, data, first
        self.inputs, self.block = formula.inputs(data), block.masked_fill(self.observed, -1)

    def given(self, y: Tensor, before: Tensor, num_samples: int) -> Posterior:
        """Given labels ``(S, N)`` of the blocks before one, on ``S`` copies of the graph."""
        data, formula = self.data, self.formula
        known = before & (data.known | ~data.evidence)  # new labels are in the pool or not
        inputs = self.inputs.repeat(1, len(y), 1)
        inputs[2] = propagated(replace(data, y=y, known=known)).flatten(0, 1)
        copies = side_by_side([replace(data, y=labels, known=known) for labels in y])
        parameters = formula(copies.hood, inputs)
        revealed = copies.known & ~data.known.repeat(len(y))
        parameters = counted(copies, inputs, formula.share, revealed, *parameters)
        # A known node has a source of its own, so only new labels are conditioned on.
        mixture = next(formula.mixtures(copies, inputs, [parameters]))
        return given(mixture, copies, copies.evidence, num_samples)

    def log_likelihood(
        self, y: Tensor, observed: Tensor | None = None, num_particles: int = 64
    ) -> Tensor:
        """The sum over blocks of :meth:`Posterior.log_likelihood`. ``observed`` holds all nodes of
        the blocks before its last one.
        """
        nodes, labels = self._new("log_likelihood", y, observed)
        every = self.labels.index_copy(0, nodes, labels)
        new = torch.zeros_like(self.observed).index_fill(0, nodes, True)
        numbers, total = self.block[nodes].unique().tolist(), self.logits.new_zeros(())
        missing = ~self.observed & (self.block < max(numbers, default=0)) & ~new
        if missing.any():
            raise ValueError(
                f"observed leaves out node {int(missing.nonzero()[0])}, of an earlier block: give "
                "stages=random_blocks(observed, number), where such nodes are in the last block"
            )
        for k in numbers:
            before, posterior = self.block < k, self.first
            if not before.equal(self.observed):
                posterior = self.given(every[None], before, NUM_SAMPLES)
            total += posterior.log_likelihood(every, new & (self.block == k), num_particles)
        return total

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        """``(*sample_shape, K)``: joint draws, block by block: :meth:`Posterior.sample`."""
        nodes, shape = as_nodes(self.hood, nodes), as_shape(sample_shape)
        labels = self.labels.repeat(shape.numel(), 1)
        last = max(self.block[nodes].tolist(), default=-1)
        drawn = (self.block < last).index_fill(0, nodes, True)
        most = max(1, blocks.NUMBERS // (4 * self.hood.num_edges * self.num_classes))
        for k in range(last + 1):
            part, before = (drawn & (self.block == k)).nonzero()[:, 0], self.block < k
            if before.equal(self.observed):
                labels[:, part] = self.first.sample((len(labels),), part)
                continue
            for some in labels.split(most) if len(labels) * len(part) else ():
                copies = torch.arange(0, some.numel(), len(drawn), device=part.device)[:, None]
                draw = self.given(some, before, 1).sample((), (copies + part).flatten())
                some[:, part] = draw.view(len(some), -1)
        return labels[:, nodes].view(*shape, len(nodes))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a query that would sum over labels of earlier blocks."""
        raise ValueError("without stages a posterior has this query, with stages it has none")

    condition = log_marginal = _refuse
    marginals = pairwise = predict = _refuse


def counted(
    data: GraphScores, inputs: Tensor, share: float, revealed: Tensor, alpha: Tensor,
    logits: Tensor, *relabel: Tensor,
) -> Tensors:  # fmt: skip
    r"""Parameters whose sources have counts of revealed labels:

    .. math::

        \alpha_{jk} + \sum_{i \text{ revealed}} p(c_i = j, u_i = k \mid y_i)

    where :math:`u_i` is the label that node `i` takes from its source. They are the expected
    counts of the first step of EM, so more labels around a source have more weight.
    """
    rows, found = data.hood.restrict(revealed), alpha.clone()
    mean, beside = alpha / alpha.sum(-1, keepdim=True), inputs[0].softmax(-1) * (1 / share - 1)
    for block in blocks.row_blocks(rows.ptr, 4 * alpha.shape[1]):
        part = rows.take(torch.arange(block.start, block.stop, device=rows.device))
        labels = data.y[part.nodes]
        at = labels[part.row]
        shown = relabel[0][part.edge, :, at] if relabel else one_hot(at, alpha.shape[1])
        weight = part.softmax(logits[part.edge])[:, None] * mean[part.source] * shown
        total = part.sum(weight.sum(-1)) + entries_at(beside[part.nodes], labels)
        found.index_add_(0, part.source, weight / total[part.row, None])
    return found, logits, *relabel


def random_blocks(nodes: Tensor, number: int, seed: int = 0) -> Tensor:
    """Blocks :math:`0, \\dots, B - 1` in random order, of equal size, for ``stages`` of
    :meth:`StackedNMM.posterior`. Labels are not read. Nodes outside of the mask are in the last
    block. Cost: :math:`O(N)`.

    >>> random_blocks(torch.tensor([True, True, True, False]), number=3)
    tensor([2, 0, 1, 2])

    :param Tensor nodes: ``(N,)`` boolean mask.
    :return: ``(N,)`` the block ``0..number - 1`` of each node.
    :raises ValueError: for a ``number`` below one, and ``nodes`` that are no mask.
    """
    check_integers(1, number=number)
    some = expect("nodes", nodes, ("N",), kind="mask").nonzero()[:, 0]
    order = torch.randperm(len(some), generator=torch.Generator().manual_seed(seed))
    block = torch.full_like(nodes, number - 1, dtype=torch.long)
    block[some] = order.to(block) * number // max(1, len(some))
    return block
