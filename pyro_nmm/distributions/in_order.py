# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What both conditionals share: draws in an order, Gibbs sweeps, and the bound's gradient."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.infer import RenyiELBO
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor

from pyro_nmm.arguments import as_expected, as_member, check_integers
from pyro_nmm.blocks import blocks
from pyro_nmm.caching import LastCall, derived
from pyro_nmm.consumers import consumer
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.distributions.path import PathEstimate, path_likelihood
from pyro_nmm.graph_arguments import order_to_rows
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import gibbs, score_costs, two_blocks
from pyro_nmm.ops.annealing import Annealed, anneal
from pyro_nmm.ops.counts import on_edges
from pyro_nmm.ops.entries import (
    Draw,
    Entries,
    draw_of,
    entries_of,
    evidence_entries,
    predictive,
    shift_evidence,
)
from pyro_nmm.ops.sampling import draw_entries, uniforms_of
from pyro_nmm.provenance import untracked


class InOrder(GraphDistribution):
    """The observed rows in their order, the last draw, and the gradient of the bound."""

    shown = "observed_rows", "num_classes", "estimator"
    alpha: Any  #: a table if labels are latent

    def __init__(
        self,
        parameters: Parameters,
        data_shape: Size,  # the batch shape of the labels or the evidence
        arrangement: tuple[Tensor | None, Tensor | None, str],  # observed, order, estimator
        columns: tuple[int, ...] = (),  # (2,) for samples of choices and labels
        *,
        validate_args=None,
    ) -> None:
        self.hood, (observed, order, estimator) = parameters.hood, arrangement
        self.observed_rows = self.hood.restrict(observed)
        size = self.observed_rows.num_rows
        if order is not None:
            self._position = order_to_rows(self.observed_rows, order)
        elif not two_blocks.runs_on(self.hood.device):
            self._position = torch.randperm(size, device=self.hood.device)
        self.estimator = as_member(score_costs.ScoreEstimator, estimator=estimator)
        self.alpha, self.logits = parameters.alpha, parameters.logits
        self.num_classes = parameters.num_classes
        self._last_draw = LastCall()
        self._parameter_shape = torch.broadcast_shapes(parameters.batch_shape, data_shape)
        shapes = self._parameter_shape, Size([*columns, size])
        super().__init__(*shapes, validate_args=validate_args)
        if self._validate_args:
            parameters.check_values()

    @derived
    def _position(self) -> Tensor:
        # Of a random order on a device, where sweeps in two blocks need none.
        return torch.randperm(self.observed_rows.num_rows, device=self.hood.device)

    @derived
    def _row_of(self) -> Tensor:
        places = torch.arange(self.observed_rows.num_rows, device=self.hood.device)
        return torch.empty_like(places).scatter_(0, self._position, places)

    @derived
    def rows(self) -> Neighborhood:
        """The observed rows in the order of the draw."""
        return self.observed_rows.take(self._position, self.observed_rows.num_edges)

    @property
    def order(self) -> Tensor:
        """``(n,)`` observed node ids in the order of the draw."""
        return self.rows.nodes

    @derived
    def _data(self) -> Tensor:
        """Observed labels or evidence of :attr:`rows`."""
        return self._data_of(self.rows)

    def expand(self, batch_shape, _instance=None):
        _ = self.rows  # in the same order
        return super().expand(batch_shape, _instance)

    def __getstate__(self) -> dict:
        _ = self._position  # of the copy, too
        return dict(vars(self))

    @abstractmethod
    def _data_of(self, rows: Neighborhood) -> Tensor:
        """Observed labels or evidence of rows or of their edges."""

    @abstractmethod
    def _columns(self, draw: Draw) -> Tensor:
        """A draw as samples ``(B, ..., n)`` in the order of the draw."""

    @abstractmethod
    def _located(self, value: Tensor, shape: Size) -> tuple[Draw, Tensor]:
        """The draw that yields samples, and a mask of draws that no row can make."""

    @derived
    def _entries(self) -> Entries:
        log_attention = self.rows.log_softmax(self.logits.index_select(-1, self.rows.edge))
        return entries_of(self.rows, self.alpha, log_attention, self._data)

    def _flat(self, shape: Size) -> Entries:
        """Entries with one batch dimension."""
        event_dims = iter((1, 1, 1, 1) if self._entries.observed else (1, 2, 1, 2))
        return self._entries.map(lambda part: flatten(part, shape, next(event_dims)))

    def _constants(self, shape: Size) -> Entries:
        return self._flat(shape).map(lambda part: untracked(part.detach())[0][0])

    def _draw(self, shape: Size) -> Draw:
        return draw_entries(self.rows, self._flat(shape), uniforms_of(self.rows, shape.numel()))

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws in the order :attr:`order`; columns in ascending node id."""
        shape = self._extended_shape(Size(sample_shape))
        batch = shape[: len(shape) - len(self.event_shape)]
        draw = self._draw(batch)
        value = self._columns(draw).index_select(-1, self._row_of).view(shape)
        self._last_draw.put((value, batch), (draw, None))  # asked for next
        _, provenance = untracked(self.alpha, self.logits, self._data)
        return track_provenance(value, provenance)

    @torch.no_grad()
    def sweep(self, value: Tensor, num_sweeps: int = 1) -> Tensor:
        r"""Samples continued by Gibbs sweeps, which leave :math:`p(c \mid y)`, or :math:`p(c, u
        \mid w)`, as it is: draws of :math:`q` become draws of it as ``num_sweeps`` grows.

        On the processor a sweep is collapsed: each row is drawn anew given all others. On other
        devices label distributions are drawn given choices, then all choices at once given these,
        which takes fewer calls and more sweeps.

        >>> from pyro_nmm import NeighborMixture
        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> q = mix.choices(torch.tensor([0, 1]))
        >>> q.sweep(q.sample((8,)), num_sweeps=10).shape
        torch.Size([8, 2])

        :param Tensor value: samples, of any batch shape that fits.
        :return: samples of the same shape. Cost of a sweep: :math:`O(E)`, latent :math:`O(E C)`.
        """
        check_integers(1, num_sweeps=num_sweeps)
        shape, kind = ("...", *self.event_shape), "integers"
        value = as_expected("value", value, shape, kind=kind, like=self.hood).long()
        (value,), provenance = untracked(value)
        if two_blocks.runs_on(self.hood.device):
            shape = self._shape_of(value)
            swept = self.values_of(self.continued(self.numbers(value, shape), shape, num_sweeps))
            return track_provenance(swept.view(*shape, *self.event_shape), provenance)
        entries, draw, shape = self._chains(value)
        for part in blocks(num_sweeps, draw.edges.numel()):
            uniforms = uniforms_of(self.rows, part.stop - part.start, len(draw.edges))
            draw = gibbs.sweep(self.rows, entries, draw, uniforms).draw
        swept = self._columns(draw).index_select(-1, self._row_of)
        return track_provenance(swept.view(*shape, *self.event_shape), provenance)

    @torch.no_grad()
    def numbers(self, value: Tensor, shape: Size) -> Tensor:
        """``(B, n)``: entries of observed rows that samples chose, edge after edge."""
        flat = flatten(value, shape, len(self.event_shape)).expand(shape.numel(), *self.event_shape)
        choices, *labels = flat.unbind(1) if flat.dim() > 2 else (flat,)
        numbers = self.observed_rows.find(choices)
        wrong = numbers < 0
        for part in labels:
            wrong = wrong | (part < 0) | (part >= self.num_classes)
            numbers = numbers * self.num_classes + part
        if wrong.any():
            raise ValueError("value must hold choices of neighbours, and labels of the field")
        return numbers

    @torch.no_grad()
    def continued(self, numbers: Tensor, shape: Size, num_sweeps: int) -> Tensor:
        """The entries ``(B, n)`` after sweeps in two blocks."""
        rows, data = self.observed_rows, self._data_of(self.observed_rows)
        (alpha, logits, data), _ = untracked(self.alpha, self.logits, data)
        if rows is not self.hood:
            logits = logits.index_select(-1, rows.edge)
        logits, alpha = flatten(logits, shape), flatten(alpha, shape, 2)
        if data.is_floating_point():
            entries = evidence_entries(logits, alpha, flatten(data, shape, 2))
            both = two_blocks.TwoBlocks.of(rows, shift_evidence(rows, entries)[0])
        else:
            if data.dim() > 1:
                data = flatten(data, shape)
            both = two_blocks.TwoBlocks.of_labels(rows, logits, alpha, data)
        for part in blocks(num_sweeps, numbers.numel()):
            numbers = both.sweep(numbers, part.stop - part.start)[-1]
        return numbers

    def values_of(self, numbers: Tensor) -> Tensor:
        """Samples ``(B, ..., n)`` of entries of observed rows."""
        source = self.observed_rows.source
        if len(self.event_shape) == 1:
            return source[numbers]
        edges, labels, _ = draw_of(numbers, self.num_classes)
        return torch.stack([source[edges], labels], 1)

    def _chains(self, value: Tensor) -> tuple[Entries, Draw, Size]:
        """Entries, and samples as draws, of one batch dimension; their batch shape."""
        shape = self._shape_of(value)
        entries = self._constants(shape)
        if entries.observed:  # without the counts of a draw
            edges = self.rows.find(self._in_order(value, shape))
            labels = on_edges(self.rows, entries.data).expand(len(edges), -1)
            draw, impossible = Draw(edges, labels.gather(1, edges.clamp(min=0))), edges < 0
        else:
            draw, impossible = self._located(value, shape)
        if impossible.any():
            raise ValueError("value must hold choices of neighbours, and labels of the field")
        return entries, draw, shape

    @torch.no_grad()
    def anneal(self, value: Tensor, end: "InOrder", num_sweeps: int = 2) -> Annealed:
        """Samples carried to the parameters of ``end``, which has the same ``order``, see
        :mod:`pyro_nmm.ops.annealing`: samples, and weights of the batch shape."""
        entries, draw, shape = self._chains(value)
        found = anneal(self.rows, entries, end._constants(shape), draw, num_sweeps)
        value = self._columns(found.states).index_select(-1, self._row_of)
        value = value.view(*shape, *self.event_shape)
        return Annealed(value, found.gain.view(shape), found.rise.view(shape))

    @torch.no_grad()
    def log_likelihood(self, num_particles: int = 64, num_given: int = 0) -> Tensor:
        r"""Estimate of :math:`\log p(y)`, or of :math:`\log p(w)`, in nats, by importance weights
        of ``P`` draws of :math:`q`, the particles, in the order of :attr:`order`:

        .. math::

            \log \hat p(y) = \log \frac{1}{P} \sum_{p=1}^P \prod_i e^{f_i^{(p)}}, \qquad
            E[\hat p(y)] = p(y) .

        So the estimate is a lower bound on average, and tighter than the mean of
        :meth:`log_terms`. It is far too low if many labels correlate: see :meth:`path_likelihood`.

        >>> from pyro_nmm import NeighborMixture
        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> q = mix.latents(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))  # one label of two
        >>> bool(q.log_likelihood(num_particles=8) < 0)
        True

        :param int num_particles: ``P``. Cost: :math:`O(P E)`, latent :math:`O(P E C)`.
        :param int num_given: so many first rows of the order are given: the estimate is of the
            conditional probability of all later rows, a ratio of two means of the same draws.
        :return: ``(...)``, an estimate for each element of the batch.
        """
        check_integers(1, num_particles=num_particles)
        check_integers(0, num_given=num_given)
        size = self.rows.num_edges * self._parameter_shape.numel()
        sums = []
        for part in blocks(
            num_particles, size * (1 if self._entries.observed else self.num_classes)
        ):
            terms = self.log_terms(self.sample(Size([part.stop - part.start]))).double()
            sums.append(torch.stack([terms.sum(-1), terms[..., :num_given].sum(-1)]))
        every, given = torch.cat(sums, 1).logsumexp(1)
        return (every - given).to(self.logits)

    def path_likelihood(
        self, num_chains: int = 4, num_points: int = 41, num_sweeps: int = 3
    ) -> PathEstimate:
        """:meth:`NeighborMixture.path_likelihood`, for each element of the batch."""
        shape = self.batch_shape
        entries = self._constants(shape)
        estimate = path_likelihood(self.rows, entries, num_chains, num_points, num_sweeps)
        value, error = (part.to(self.logits.dtype).expand(shape.numel()) for part in estimate)
        return PathEstimate(value.view(shape), error.view(shape))

    def _shape_of(self, value: Tensor) -> Size:
        """The batch shape of samples and parameters together."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        return torch.broadcast_shapes(batch, self.batch_shape)

    def _in_order(self, value: Tensor, shape: Size) -> Tensor:
        """Samples ``(B, ..., n)`` in the order of the draw."""
        flat = flatten(value, shape, len(self.event_shape)).index_select(-1, self._position)
        return flat.expand(shape.numel(), *self.event_shape)

    def _recall(self, value: Tensor, shape: Size) -> tuple[Draw, Tensor | None]:
        """:meth:`_located`, without a mask if ``value`` was drawn just before."""
        return self._last_draw.get((value, shape), lambda: self._located(value, shape))

    def _evaluate(self, value: Tensor) -> tuple[Draw, Tensor, Tensor]:
        shape = self._shape_of(value)
        draw, wrong = self._recall(value, shape)
        terms, log_choice = predictive(self.rows, self._flat(shape), draw)
        if wrong is not None:
            log_choice = log_choice.masked_fill(wrong, -torch.inf)
        full = *shape, self.rows.num_rows
        return draw, terms.view(full), log_choice.view(full)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log q` of samples, columns in ascending node id."""
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[2].sum(-1), provenance)

    def log_terms(self, value: Tensor) -> Tensor:
        r"""``(..., n)``: :math:`f_i` in the order of :attr:`order`. Their sum is
        :math:`\log p(y, c) - \log q(c \mid y)`, with :math:`w` for :math:`y` if labels are latent.
        """
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[1], provenance)

    def score_parts(self, value: Tensor) -> ScoreParts:
        """For Pyro's losses: the density, and the control variate of ``estimator``."""
        reinforces = self.estimator is score_costs.ScoreEstimator.REINFORCE
        if not reinforces and torch.is_grad_enabled() and consumer(RenyiELBO):
            raise ValueError(
                f'RenyiELBO needs estimator="reinforce", because the control variate of '
                f'"{self.estimator}" would bias its gradient: or use TraceGraph_ELBO'
            )
        value, provenance = self._plain(value)
        draw, terms, log_choice = self._evaluate(value)
        (costs,), _ = untracked(terms.detach())
        arguments = self.estimator, log_choice, costs, lambda: self._charge(draw, costs)
        parts = score_costs.score_parts(*arguments)
        return ScoreParts(*(track_provenance(part, provenance) for part in parts))

    @torch.no_grad()
    def _charge(self, draw: Draw, costs: Tensor) -> Tensor:
        """``(..., n)``: the costs that each draw is charged with, less their baseline."""
        charge, shape = self._costs(draw, costs), costs.shape[:-1]
        sizes = torch.broadcast_shapes(self._parameter_shape, (1,) * len(shape))
        baseline = score_costs.others_mean(charge, [d for d, size in enumerate(sizes) if size == 1])
        if baseline is None:  # of one more draw
            other = self._draw(shape)
            (terms,), _ = untracked(predictive(self.rows, self._flat(shape), other)[0])
            baseline = self._costs(other, terms.view_as(costs))
        return (charge - baseline).to(costs.dtype)

    def _costs(self, draw: Draw, terms: Tensor) -> Tensor:
        flat = terms.reshape(-1, self.rows.num_rows)
        if self.estimator is score_costs.ScoreEstimator.REWARD_TO_GO:
            component = self.observed_rows.components().index_select(0, self._position)
            return score_costs.costs_to_go(component, flat).view(terms.shape)
        entries = self._flat(terms.shape[:-1])
        return score_costs.one_step_credits(self.rows, entries, draw, flat).view(terms.shape)
