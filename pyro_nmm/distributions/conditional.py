# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What both conditionals are: draws in an order, Gibbs sweeps, and the bound with its gradient."""

from collections.abc import Sequence
from functools import partial

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.infer import RenyiELBO
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm import compiled
from pyro_nmm.arguments import as_expected, as_member, check_integers, check_plain
from pyro_nmm.blocks import blocks
from pyro_nmm.caching import LastCall, derived
from pyro_nmm.consumers import consumer
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.distributions.factors import ChosenLabels, Neighbors
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.distributions.path import PathEstimate, path_likelihood
from pyro_nmm.model_arguments import order_to_rows
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import sweeps
from pyro_nmm.ops.annealing import Annealed, anneal
from pyro_nmm.ops.coupling import Meetings, meeting_time
from pyro_nmm.ops.entries import (
    Draw,
    Entries,
    draw_of,
    entries_of,
    evidence_entries,
    numbers_of,
    predictive,
    shift_evidence,
    terms_of,
)
from pyro_nmm.ops.sampling import draw_entries, uniforms_of
from pyro_nmm.ops.score_costs import Estimator, ScoreEstimator, costs_to_go, others_mean
from pyro_nmm.ops.two_blocks import TwoBlocks
from pyro_nmm.provenance import untracked


class Conditional(GraphDistribution):
    """Choices of the observed nodes given labels ``(..., N)``, or choices and labels given evidence
    ``(..., N, C)`` or ``(..., num_edges, C)``: :class:`OrderedConditional` and
    :class:`EvidenceConditional`."""

    shown = "observed_rows", "num_classes", "estimator"

    def __init__(
        self,
        parameters: Parameters,
        data: Tensor,
        observed: Tensor | None,
        order: Tensor | None,
        estimator: Estimator,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.hood, self.data, self.latent = parameters.hood, data, data.is_floating_point()
        self.alpha, self.logits = parameters.alpha, parameters.logits
        self.num_classes = parameters.num_classes
        self.observed_rows = self.hood.restrict(observed)
        if order is not None:
            self._position = order_to_rows(self.observed_rows, order)
        elif compiled.runs_on(self.hood.device):
            _ = self._position
        self.estimator = as_member(ScoreEstimator, estimator=estimator)
        self._last_draw, self._last_values = LastCall(), LastCall()
        batch, size = data.shape[: -2 if self.latent else -1], self.observed_rows.num_rows
        # Pyro expands copies of this object to plates and particles. Dimensions that have size one
        # here are of draws that share their parameters.
        self._parameter_shape = torch.broadcast_shapes(parameters.batch_shape, batch)
        event_shape = Size([2, size] if self.latent else [size])
        super().__init__(self._parameter_shape, event_shape, validate_args=validate_args)
        if self._validate_args:
            parameters.check_values()

    @constraints.dependent_property(is_discrete=True)
    def support(self):
        return Neighbors(self.observed_rows, self.num_classes if self.latent else None)

    @derived
    def _position(self) -> Tensor:
        # Of a random order; on a device not before it is asked for: two blocks need none.
        return torch.randperm(self.observed_rows.num_rows, device=self.hood.device)

    @derived
    def _row_of(self) -> Tensor:
        places = torch.arange(self.observed_rows.num_rows, device=self.hood.device)
        return torch.empty_like(places).scatter_(0, self._position, places)

    @derived
    def rows(self) -> Neighborhood:
        """The observed rows in the order of the draw."""
        rows, position = self.observed_rows, self._position
        if rows.device.type == "cpu" and bool((position.diff() == 1).all()):
            return rows
        return rows.take(position, rows.num_edges)

    @property
    def order(self) -> Tensor:
        """``(n,)`` observed node ids in the order of the draw."""
        return self.rows.nodes

    def expand(self, batch_shape, _instance=None):
        _ = self.rows  # in the same order
        return super().expand(batch_shape, _instance)

    def __getstate__(self) -> dict:
        _ = self._position  # of the copy, too
        return dict(vars(self))

    def data_of(self, rows: Neighborhood) -> Tensor:
        """Labels ``(..., n)`` or evidence ``(..., n or e, C)`` of some rows."""
        if not self.latent:
            y = self.data
            return rows.last_labels.get((y,), lambda: y.index_select(-1, rows.nodes))
        of_nodes = self.data.shape[-2] == self.hood.num_nodes
        return self.data.index_select(-2, rows.nodes if of_nodes else rows.edge)

    @derived
    def _entries(self) -> Entries:
        # With gradients, although ``sample`` asks first, without: the density asks for it again.
        whole = self.rows is self.hood
        logits = self.logits if whole else self.logits.index_select(-1, self.rows.edge)
        log_attention = self.rows.log_softmax(logits)
        return entries_of(self.rows, self.alpha, log_attention, self.data_of(self.rows))

    def _flat(self, shape: Size) -> Entries:
        """Entries with one batch dimension."""
        event_dims = iter((1, 2, 1, 2) if self.latent else (1, 1, 1, 1))
        return self._entries.map(lambda part: flatten(part, shape, next(event_dims)))

    def _constants(self, shape: Size) -> Entries:
        return self._flat(shape).map(lambda part: untracked(part.detach())[0][0])

    def _shape_of(self, value: Tensor) -> Size:
        """The batch shape of samples and parameters together."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        return torch.broadcast_shapes(batch, self.batch_shape)

    def _found(self, value: Tensor, shape: Size, rows: Neighborhood) -> tuple[Draw, Tensor]:
        """The draw of ``rows``, in the order or not, that yields samples, and a mask of samples
        that no row can make."""
        flat = flatten(value, shape, len(self.event_shape))
        flat = flat.expand(shape.numel(), *self.event_shape)
        if rows is not self.observed_rows:
            flat = flat.index_select(-1, self._position)
        edges = rows.find(flat[:, 0] if self.latent else flat)
        wrong = edges < 0
        if self.latent:
            labels, last = flat[:, 1], self.num_classes - 1
            wrong, labels = wrong | (labels < 0) | (labels > last), labels.clamp(0, last)
        else:
            (labels,), _ = untracked(flatten(self.data_of(rows), shape))
        return Draw(edges.clamp(min=0), labels.expand_as(edges)), wrong

    def _states(self, value: Tensor, shape: Size, rows: Neighborhood) -> Draw:
        def find() -> tuple[Tensor, Tensor]:
            draw, wrong = self._found(value, shape, rows)
            return draw.edges, wrong

        if self.latent or rows is not self.observed_rows:
            draw, wrong = self._found(value, shape, rows)
        else:
            edges, wrong = rows.last_edges.get((value, shape), find)
            draw = self.draw_of(edges, shape)
        if wrong is not None and wrong.any():
            raise ValueError("value must hold choices of neighbours, and labels of the field")
        return draw

    def _columns(self, draw: Draw, shape: Size) -> Tensor:
        """A draw as samples, columns in ascending node id."""
        value = self.rows.source[draw.edges]
        value = torch.stack([value, draw.labels], 1) if self.latent else value
        if self.rows is not self.observed_rows:
            value = value.index_select(-1, self._row_of)
        return value.view(*shape, *self.event_shape)

    def _draw(self, shape: Size) -> Draw:
        return draw_entries(self.rows, self._flat(shape), uniforms_of(self.rows, shape.numel()))

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws in the order :attr:`order`; columns in ascending node id."""
        shape = self._extended_shape(Size(sample_shape))
        batch = shape[: len(shape) - len(self.event_shape)]
        draw = self._draw(batch)
        value = self._columns(draw, batch)
        self._last_draw.put((value, batch), (draw, None))  # whose density is asked for next
        _, provenance = untracked(self.alpha, self.logits, self.data)
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
        shape = self._shape_of(value)
        swept, _ = self._advanced(value, shape, num_sweeps)
        return track_provenance(swept, provenance)

    @torch.no_grad()
    def swept_with_shares(
        self, value: Tensor, num_sweeps: int, num_before: int = 0
    ) -> tuple[Tensor, tuple[Size, Neighborhood, list[Draw], Tensor]]:
        """As :meth:`sweep`, and what :meth:`control` is of, after ``num_before`` sweeps more."""
        shape, on_processor = self._shape_of(value), compiled.runs_on(self.hood.device)
        rows = self.rows if on_processor else self.observed_rows
        dtype = torch.double if on_processor else self.logits.dtype
        shares = torch.zeros(shape.numel(), rows.num_edges, dtype=dtype, device=rows.device)
        if num_before:
            value, _ = self._advanced(value, shape, num_before)
        value, drawn = self._advanced(value, shape, num_sweeps, shares)
        return value, (shape, rows, drawn, shares.div_(num_sweeps).to(self.logits.dtype))

    def _advanced(
        self, value: Tensor, shape: Size, num_sweeps: int, shares: Tensor | None = None
    ) -> tuple[Tensor, list[Draw]]:
        """Samples after sweeps; with ``shares`` to add to also the states after each."""
        if not compiled.runs_on(self.hood.device):
            states = self.continued(self.numbers(value, shape), shape, num_sweeps, shares)
            value = self.values_of(states[-1]).view(*shape, *self.event_shape)
            return value, [self.draw_of(s, shape) for s in states] if shares is not None else []
        draw, want = self._states(value, shape, self.rows), "" if shares is None else "shares"
        entries, drawn = self._constants(shape), list[Draw]()
        for part in blocks(num_sweeps, draw.edges.numel()):
            uniforms = uniforms_of(self.rows, part.stop - part.start, len(draw.edges))
            draw, *found = sweeps.sweep(self.rows, entries, draw, uniforms, want)
            if shares is not None:
                shares += found[0]
                drawn += map(Draw, *found[1:])
        value = self._columns(draw, shape)
        if not self.latent and self.rows is self.observed_rows:
            # Its edges are known when they are asked for next.
            self.rows.last_edges.put((value, shape), (draw.edges, None))
        return value, drawn

    def draw_of(self, numbers: Tensor, shape: Size) -> Draw:
        """Edges and labels of entries of observed rows."""
        if self.latent:
            return draw_of(numbers, self.num_classes)
        (labels,), _ = untracked(flatten(self.data_of(self.observed_rows), shape))
        return Draw(numbers, labels.expand_as(numbers))

    def control(self, shape: Size, rows: Neighborhood, drawn: list[Draw], shares: Tensor) -> Tensor:
        r"""``(*shape)``: the control variate of the last of ``S`` states :math:`c^{(s)}`,

        .. math::

            \sum_i \log L_{i c_i} - \sum_{ij} p_{ij} \log L_{ij}
                + \log p(y \mid c) - \frac1S \sum_s \log p(y \mid c^{(s)}) ,

        with ``shares`` ``(B, e)``, means over sweeps of the probabilities :math:`p_{ij}` of a row's
        edges when it was drawn given all others. Its gradient has mean zero: after one sweep at any
        state, after more if the chain has forgotten its start. :math:`\log p(y, c)` less it has
        less noise: for attention that of probabilities, and for ``alpha`` a mean's of S states.
        """
        logits = flatten(self.logits, shape)
        if rows is not self.hood:
            logits = logits.index_select(-1, rows.edge)
        logits = logits.clamp(min=torch.finfo(logits.dtype).min)  # of edges that are switched off
        surplus = shares.neg().scatter_(1, drawn[-1].edges, 1.0, reduce="add")
        found = (surplus * logits).sum(-1)
        if len(drawn) > 1:
            edges = torch.stack([draw.edges for draw in drawn])
            urns = ChosenLabels(flatten(self.alpha, shape, 2), rows.source[edges])
            terms = urns.log_prob(torch.stack([draw.labels for draw in drawn]))
            found = found + terms[-1] - terms.mean(0)
        return found.view(shape)

    @torch.no_grad()
    def numbers(self, value: Tensor, shape: Size) -> Tensor:
        """``(B, n)``: entries of observed rows that samples chose, edge after edge."""
        draw = self._states(value, shape, self.observed_rows)
        return numbers_of(draw, self.num_classes if self.latent else 1)

    @torch.no_grad()
    def continued(
        self, numbers: Tensor, shape: Size, num_sweeps: int, shares: Tensor | None = None
    ) -> list[Tensor]:
        """The entries ``(B, n)`` after sweeps in two blocks; after each of them if probabilities
        of edges are to be added to ``shares``."""
        rows, data = self.observed_rows, self.data_of(self.observed_rows)
        (alpha, logits, data), _ = untracked(self.alpha, self.logits, data)
        if rows is not self.hood:
            logits = logits.index_select(-1, rows.edge)
        logits, alpha = flatten(logits, shape), flatten(alpha, shape, 2)
        if self.latent:
            entries = evidence_entries(logits, alpha, flatten(data, shape, 2))
            data = shift_evidence(rows, entries)[0].data
        elif data.dim() > 1:
            data = flatten(data, shape)
        both = TwoBlocks.of(rows, logits, alpha, data)
        size, states = (len(both.place), len(numbers)), [numbers]
        of_entries = None if shares is None else alpha.new_zeros(size)
        for part in blocks(num_sweeps, numbers.numel()):
            found = both.sweep(states[-1], part.stop - part.start, of_entries)
            states = [*states, *found] if shares is not None else found[-1:]
        if shares is None or of_entries is None:
            return states
        shares += of_entries.T.view(len(numbers), rows.num_edges, both.size).sum(-1)
        return states[1:]

    def values_of(self, numbers: Tensor) -> Tensor:
        """Samples ``(B, ..., n)`` of entries of observed rows."""
        source = self.observed_rows.source
        if not self.latent:
            return source[numbers]
        edges, labels, *_ = draw_of(numbers, self.num_classes)
        return torch.stack([source[edges], labels], 1)

    @torch.no_grad()
    def anneal(self, value: Tensor, end: "Conditional", num_sweeps: int = 2) -> Annealed:
        """Samples carried to the parameters of ``end``, which has the same ``order``, see
        :mod:`pyro_nmm.ops.annealing`: samples, and weights of the batch shape."""
        shape = self._shape_of(value)
        start, stop = self._constants(shape), end._constants(shape)
        found = anneal(self.rows, start, stop, self._states(value, shape, self.rows), num_sweeps)
        return Annealed(self._columns(found.states, shape), found.gain.view(shape))

    @torch.no_grad()
    def log_likelihood(self, num_particles: int = 64, num_given: int = 0) -> Tensor:
        r"""Estimate of :math:`\log p(y)`, or of :math:`\log p(w)`, in nats, by importance weights
        of ``P`` draws of :math:`q`, the particles, in the order of :attr:`order`:

        .. math::

            \log \hat p(y) = \log \frac{1}{P} \sum_{p=1}^P \prod_i e^{f_i^{(p)}}, \qquad
            E[\hat p(y)] = p(y) .

        It is a lower bound on average, tighter than the mean of :meth:`log_terms`, and far too low
        if many labels correlate: see :meth:`path_likelihood`.

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
        batch, sums = self._parameter_shape, []
        size = self.rows.num_edges * batch.numel() * (self.num_classes if self.latent else 1)
        for part in blocks(num_particles, size):
            shape = Size([part.stop - part.start, *batch])
            terms = terms_of(self.rows, self._flat(shape), self._draw(shape))
            terms = terms.view(*shape, -1)
            sums.append(torch.stack([terms.sum(-1), terms[..., :num_given].sum(-1)]))
        every, given = torch.cat(sums, 1).logsumexp(1)
        return (every - given).to(self.logits)

    def path_likelihood(
        self, num_chains: int = 4, num_points: int = 41, num_sweeps: int = 3
    ) -> PathEstimate:
        """:meth:`NeighborMixture.path_likelihood`, for each element of the batch."""
        entries, shape = self._constants(self.batch_shape), self.batch_shape
        found = path_likelihood(self.rows, entries, num_chains, num_points, num_sweeps)
        flat = (part.to(self.logits.dtype).expand(shape.numel()) for part in found)
        return PathEstimate(*(part.view(shape) for part in flat))

    @torch.no_grad()
    def meetings(self, num_pairs: int = 20, lag: int = 10, max_sweeps: int = 1000) -> Meetings:
        r"""After how many sweeps two coupled chains agree, which bounds how far :meth:`sweep` is
        from its limit, see :mod:`pyro_nmm.ops.coupling`.

        >>> from pyro_nmm import NeighborMixture
        >>> hood = Neighborhood.grid(8, 8)
        >>> mix = NeighborMixture(hood, torch.ones(64, 2), torch.zeros(hood.num_edges))
        >>> meetings = mix.choices(torch.arange(64) // 32).meetings()
        >>> meetings.num_sweeps(distance=0.01) < 20
        True

        :param int num_pairs: of chains, from draws of this distribution.
        :param int lag: by how many sweeps one is ahead. With more the bound is closer.
        :param int max_sweeps: after which a pair is given up. Cost: of two chains of each pair,
            :math:`O(E)` a sweep, latent :math:`O(E C)`.
        :return: times, and bounds by them.
        """
        check_integers(1, num_pairs=num_pairs, lag=lag, max_sweeps=max_sweeps)
        check_plain("meetings", self.batch_shape)
        draws, entries = self._draw(Size([2 * num_pairs])), self._constants(Size([1]))
        times = [
            meeting_time(self.rows, entries, Draw(*pair), lag, max_sweeps)
            for pair in zip(draws.edges.split(2), draws.labels.split(2), strict=True)
        ]
        return Meetings(torch.tensor(times), lag)

    @torch.no_grad()
    def leave_one_out(self, value: Tensor) -> Tensor:
        r"""``(..., n)``: the log-likelihood of each row's label, or of its evidence, given all
        other rows, in ascending node id,

        .. math::

            \log p(y_i \mid y_{-i}, c_{-i}) = \log \sum_j L_{ij}
                \frac{\alpha_{j y_i} + s_{j y_i}^{-i}}{A_j + S_j^{-i}} , \qquad
            \frac{1}{p(y_i \mid y_{-i})} = E\Big[\frac{1}{p(y_i \mid y_{-i}, c_{-i})} \,\Big|\,
                y\Big] ,

        with the row's own choice summed out, so that its weights vary little. They are what
        ``arviz.loo`` takes for a log-likelihood, :func:`~pyro_nmm.guides.to_datatree` has them.

        >>> from pyro_nmm import NeighborMixture
        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> q = mix.choices(torch.tensor([0, 0]))
        >>> q.leave_one_out(torch.tensor([1, 1])).exp()
        tensor([0.5833, 0.5833])

        :param Tensor value: samples, of any batch shape that fits, of :math:`p(c \mid y)`, such as
            those of many sweeps.
        :raises ValueError: for choices of no neighbour. Cost: :math:`O(E)` a sample, latent
            :math:`O(E C)`.
        """
        kind, shape = "integers", ("...", *self.event_shape)
        value = as_expected("value", value, shape, kind=kind, like=self.hood).long()
        (value,), _ = untracked(value)
        batch = self._shape_of(value)
        draw = self._states(value, batch, self.rows)
        found = sweeps.left_out(self.rows, self._constants(batch), draw).to(self.logits)
        return found.index_select(-1, self._row_of).view(*batch, self.rows.num_rows)

    def _evaluate(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., n)`` twice: terms and log-probabilities of choices. A guide asks for density and
        score of the same draw, with and without a plate's batch."""
        shape = self._shape_of(value)

        def terms() -> tuple[Tensor, Tensor]:
            find = partial(self._found, value, shape, self.rows)
            draw, wrong = self._last_draw.get((value, shape), find)
            found, log_choice = predictive(self.rows, self._flat(shape), draw)
            if wrong is not None:
                log_choice = log_choice.masked_fill(wrong, -torch.inf)
            full = *shape, self.rows.num_rows
            return found.view(full), log_choice.view(full)

        return self._last_values.get((value, shape, torch.is_grad_enabled()), terms)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log q` of samples, columns in ascending node id."""
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[1].sum(-1), provenance)

    def log_terms(self, value: Tensor) -> Tensor:
        r"""``(..., n)``: :math:`f_i` in the order of :attr:`order`. Their sum is
        :math:`\log p(y, c) - \log q(c \mid y)`, with :math:`w` for :math:`y` if labels are latent.
        """
        value, provenance = self._plain(value)
        return track_provenance(self._evaluate(value)[0], provenance)

    def score_parts(self, value: Tensor) -> ScoreParts:
        """For Pyro's losses: the density, and the control variate of ``estimator``. "Inside Pyro"
        of docs/design.md says why it is the entropy term."""
        reinforce = self.estimator is ScoreEstimator.REINFORCE
        if not reinforce and torch.is_grad_enabled() and consumer(RenyiELBO):
            raise ValueError(
                f'RenyiELBO needs estimator="reinforce", because the control variate of '
                f'"{self.estimator}" would bias its gradient: or use TraceGraph_ELBO'
            )
        value, provenance = self._plain(value)
        terms, log_choice = self._evaluate(value)
        log_prob = entropy = log_choice.sum(-1)
        if not reinforce:
            # Losses add score times the whole bound. The score of a row has mean zero given the
            # past, so the entropy term may subtract costs that its choice does not change.
            (costs,), _ = untracked(terms.detach())
            excess = costs.sum(-1, keepdim=True)
            if self.estimator is ScoreEstimator.REWARD_TO_GO:
                excess = excess - self._charge(costs)
            variate = (log_choice * excess).sum(-1)
            # Zero with a derivative, because some losses add the entropy term to the bound's value.
            entropy = log_prob + (variate - variate.detach())
        parts = log_prob, log_prob, 0 if reinforce else entropy
        return ScoreParts(*(track_provenance(part, provenance) for part in parts))

    @torch.no_grad()
    def _charge(self, costs: Tensor) -> Tensor:
        """``(..., n)``: the costs that each draw is charged with, less their baseline."""
        charge, shape = self._costs_to_go(costs), costs.shape[:-1]
        sizes = torch.broadcast_shapes(self._parameter_shape, (1,) * len(shape))
        baseline = others_mean(charge, [d for d, size in enumerate(sizes) if size == 1])
        if baseline is None:  # of one more draw
            terms = terms_of(self.rows, self._flat(shape), self._draw(shape))
            baseline = self._costs_to_go(terms.view_as(costs))
        return (charge - baseline).to(costs.dtype)

    def _costs_to_go(self, terms: Tensor) -> Tensor:
        component = self.observed_rows.components().index_select(0, self._position)
        flat = terms.reshape(-1, self.rows.num_rows)
        return costs_to_go(component, flat).view(terms.shape)
