# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor

from pyro_nmm.arguments import as_member
from pyro_nmm.caching import LastCall
from pyro_nmm.concentrations import Concentrations
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.graph_arguments import check_all_rows, check_values, order_to_rows
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.score_costs import ScoreEstimator, costs_to_go, less_baseline, score_parts
from pyro_nmm.provenance import untracked


class InOrder(GraphDistribution):
    """
    The observed rows in their order, the last draw, and the gradient of the bound.

    :param Size given_shape: the batch shape of the labels or the evidence.
    :param arrangement: ``observed``, ``order`` and ``estimator``.
    :param columns: ``()``, or ``(2,)`` for samples of choices and labels.
    """

    shown = "observed_rows", "num_classes", "estimator"

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Concentrations,
        logits: Tensor,
        given_shape: Size,
        arrangement: tuple[Tensor | None, Tensor | None, str],
        columns: tuple[int, ...] = (),
        *,
        validate_args=None,
    ) -> None:
        check_all_rows(hood)
        observed, order, estimator = arrangement
        self.hood, self.observed_rows = hood, hood.restrict(observed)
        size = self.observed_rows.num_rows
        if order is None:
            self._position = torch.randperm(size, device=hood.device)
        else:
            self._position = order_to_rows(self.observed_rows, order)
        places = torch.arange(size, device=hood.device)
        self._row_of = torch.empty_like(places).scatter_(0, self._position, places)
        #: The observed rows in the order of the draw, which everything else is in.
        self.rows = self.observed_rows.take(self._position, self.observed_rows.num_edges)
        self.order = self.rows.nodes  #: ``(n,)`` observed node ids in the order of the draw
        self.estimator = as_member(ScoreEstimator, estimator=estimator)
        self.alpha, self.logits, self.num_classes = alpha, logits, alpha.shape[-1]
        self._last_draw = LastCall()
        batches = alpha.shape[:-2], logits.shape[:-1], given_shape
        self._parameter_shape = torch.broadcast_shapes(*batches)
        event_shape = Size([*columns, size])
        super().__init__(self._parameter_shape, event_shape, validate_args=validate_args)
        if self._validate_args:
            check_values(alpha, logits, hood)

    # Of the subclasses. ``shape`` is a batch shape, and a draw has it as one dimension.

    alpha: Any  #: a table where labels are latent
    _given: Tensor  #: labels or evidence
    _drawn: Callable[[Size, Tensor], Any]  #: a draw from uniforms ``(B, n)``
    _columns: Callable[[Any], Tensor]  #: a draw as a sample
    #: The draw that gives a value ``(B, ..., n)``, and a mask of values that no row can draw.
    _found: Callable[[Tensor, Size], tuple[Any, Tensor]]
    #: ``(B, n)`` each: :math:`f_i`, and the log-probability of every row's draw.
    _values: Callable[[Any, Size], tuple[Tensor, Tensor]]
    #: ``(B, n)``: the direct effect of each draw on later :math:`f_i`, ``(B, n)``.
    _credits: Callable[[Any, Tensor, Size], Tensor]

    def _draw(self, shape: Size, uniforms: Tensor | None = None) -> Any:
        if uniforms is None:
            size = shape.numel(), self.rows.num_rows
            uniforms = torch.rand(size, dtype=torch.double, device=self.rows.device)
        return self._drawn(shape, uniforms)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        batch = shape[: len(shape) - len(self.event_shape)]
        draw = self._draw(batch)
        value = self._columns(draw).index_select(-1, self._row_of).view(shape)
        self._last_draw.put((value, batch), (draw, None))  # asked for next
        _, provenance = untracked(self.alpha, self.logits, self._given)
        return track_provenance(value, provenance)

    def _located(self, value: Tensor, shape: Size) -> tuple[Any, Tensor]:
        value = flatten(value, shape, len(self.event_shape))
        value = value.expand(shape.numel(), *self.event_shape).index_select(-1, self._position)
        return self._found(value, shape)

    def _recall(self, value: Tensor, shape: Size) -> tuple[Any, Tensor | None]:
        """The draw that yields ``value``, and a mask of what is impossible in it."""
        return self._last_draw.get((value, shape), lambda: self._located(value, shape))

    def _evaluate(self, value: Tensor) -> tuple[Any, Tensor, Tensor]:
        batch = value.shape[: value.dim() - len(self.event_shape)]
        shape = torch.broadcast_shapes(batch, self.batch_shape)
        draw, wrong = self._recall(value, shape)
        terms, log_choice = self._values(draw, shape)
        if wrong is not None:
            log_choice = log_choice.masked_fill(wrong, -torch.inf)
        full = *shape, self.rows.num_rows
        return draw, terms.view(full), log_choice.view(full)

    def _plain(self, value: Tensor) -> tuple[Tensor, frozenset]:
        if self._validate_args:
            self._validate_sample(value)
        (value,), provenance = untracked(value)
        return value, provenance

    def log_prob(self, value: Tensor) -> Tensor:
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[2].sum(-1), provenance)

    def log_terms(self, value: Tensor) -> Tensor:
        r"""
        ``(..., n)``: :math:`f_i` in the order of :attr:`order`. Their sum is
        :math:`\log p(y, c) - \log q(c \mid y)`, with :math:`w` for :math:`y` if labels are latent.
        """
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[1], provenance)

    def score_parts(self, value: Tensor) -> ScoreParts:
        value, provenance = self._plain(value)
        draw, terms, log_choice = self._evaluate(value)
        (costs,), _ = untracked(terms.detach())
        parts = score_parts(self.estimator, log_choice, costs, lambda: self._charge(draw, costs))
        return ScoreParts(*(track_provenance(part, provenance) for part in parts))

    @torch.no_grad()
    def _charge(self, draw: Any, costs: Tensor) -> Tensor:
        """``(..., n)``: the costs that each draw is charged with, less their baseline."""
        shape = costs.shape[:-1]

        def of_another_draw() -> Tensor:
            other = self._draw(shape)
            (found,), _ = untracked(self._values(other, shape)[0])
            return self._costs(other, found.view_as(costs))

        own = torch.broadcast_shapes(self._parameter_shape, (1,) * len(shape))
        return less_baseline(self._costs(draw, costs), own, of_another_draw).to(costs.dtype)

    def _costs(self, draw: Any, terms: Tensor) -> Tensor:
        flat = terms.reshape(-1, self.rows.num_rows)
        if self.estimator is ScoreEstimator.REWARD_TO_GO:
            component = self.observed_rows.components().index_select(0, self._position)
            return costs_to_go(component, flat).view(terms.shape)
        return self._credits(draw, flat, terms.shape[:-1]).view(terms.shape)
