# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.caching import LastCall, derived
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.distributions.latent_posterior import exact_posterior, sampled_posterior
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, draw_latent, latent_predictive
from pyro_nmm.ops.evidence import one_step_credits as latent_credits
from pyro_nmm.ops.score_costs import ScoreEstimator, costs_to_go, less_baseline, score_parts
from pyro_nmm.provenance import untracked
from pyro_nmm.validation import (
    as_member,
    check_all_rows,
    check_evidence,
    check_evidence_values,
    check_integers,
    check_plain,
    check_shapes,
    check_values,
    order_to_rows,
)


class EvidenceConditional(GraphDistribution):
    r"""
    Choices and labels of nodes whose labels are latent, given what is observed of them, node after
    node in a random order: :math:`q(c, u \mid w)`. It has no parameter of its own.

    .. math::

        q(c, u \mid w) = \prod_i p(c_i, u_i \mid w_i, c_{<i}, u_{<i}), \quad
        p(c_i = j, u_i = k \mid \cdot) \propto
            L_{ij} \frac{\alpha_{jk} + s_{ijk}}{A_j + S_{ij}} \, e^{e_{ijk}}

    Here :math:`u_i \sim z_{c_i}` is the label that a node takes from its source, and the evidence
    :math:`e_{ijk} = \log p(w_i \mid u_i = k)` is the log-likelihood of whatever hangs on it: a
    Normal emission, the votes of annotators, a partial label (0 and :math:`-\infty`), or nothing
    (zeros). :math:`S_{ij}` counts the earlier nodes that chose :math:`j`, and :math:`s_{ijk}` those
    among them with label :math:`k`. One-hot evidence is an observed label, and the draw of the
    choices that of :class:`OrderedConditional`.

    With :math:`f_i` the logarithm of the sum of these terms,
    :math:`\log p(w, c, u) - \log q(c, u \mid w) = \sum_i f_i`, so that
    :math:`E_q[\sum_i f_i] \le \log p(w)` and :math:`E_q[\prod_i e^{f_i}] = p(w)` hold for every
    order, the latter exactly.

    A sample has shape ``batch_shape + (2, n)`` for ``n`` observed nodes in ascending node id:
    their choices, then their labels.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> evidence = torch.tensor([[0.0, -torch.inf], [-0.5, -0.1]])  # a label, and a hint
    >>> q = EvidenceConditional(hood, alpha, logits, evidence, order=torch.arange(2))
    >>> c, u = q.sample((5,)).unbind(-2)
    >>> bool((u[:, 0] == 0).all())
    True
    >>> q.log_prob(torch.tensor([[0, 0], [0, 0]])).exp()
    tensor(0.3289)

    The gradient of the bound through Pyro's losses, and ``estimator``, are those of
    :class:`OrderedConditional`.

    Cost: :math:`O(E C)` a draw and a ``log_prob``, where ``E`` counts the edges into the observed
    nodes; both without a loop over nodes where there are no compiled loops.

    :param Neighborhood hood: The neighbourhoods.
    :param Tensor alpha: ``(..., M, C)`` positive concentrations of the sources.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``.
    :param Tensor evidence: log-likelihoods in nats, ``(..., N, C)``, or ``(..., num_edges, C)``
        where what is observed depends on the edge that a label comes over. Entries of unobserved
        nodes are never read.
    :param Tensor observed: ``(N,)`` boolean mask of the nodes with evidence, default all. Leaving
        out the others is exact marginalisation.
    :param Tensor order: ``(n,)`` permutation of the observed node ids, default a uniformly random
        one, which the whole batch shares.
    :param str estimator: what the gradient charges a draw with.
    :raises ValueError: for bad shapes, devices, masks, orders, and for a node whose evidence rules
        out all labels.
    """

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Tensor,
        logits: Tensor,
        evidence: Tensor,
        observed: Tensor | None = None,
        order: Tensor | None = None,
        estimator: str = "reward_to_go",
        *,
        validate_args=None,
    ) -> None:
        checked, logits = check_shapes(hood, alpha, logits)
        check_all_rows(hood)
        alpha, evidence = check_evidence(hood, checked, evidence)
        self.observed_rows = hood.restrict(observed)
        size = self.observed_rows.num_rows
        if order is None:
            self._position = torch.randperm(size, device=hood.device)
        else:
            self._position = order_to_rows(self.observed_rows, order)
        self._row_of = self._position.argsort()
        self.hood, self.alpha, self.logits, self.evidence = hood, alpha, logits, evidence
        self.estimator = as_member(ScoreEstimator, estimator=estimator)
        self.num_classes = alpha.shape[-1]
        #: The observed rows in the order of the draw, which everything below is in.
        self.rows = self.observed_rows.take(self._position)
        shapes = alpha.shape[:-2], logits.shape[:-1], evidence.shape[:-2]
        batch_shape = torch.broadcast_shapes(*shapes)
        super().__init__(batch_shape, Size([2, size]), validate_args=validate_args)
        if self._validate_args:
            check_values(alpha, logits, hood)
            check_evidence_values(self.rows, self._terms.evidence)
        self._last_draw, self._last_values = LastCall(), LastCall()

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self):
        return _ChoicesAndLabels(self.observed_rows, self.num_classes)

    @property
    def order(self) -> Tensor:
        """``(n,)`` observed node ids in the order of the draw."""
        return self.rows.nodes

    @derived
    def _terms(self) -> LatentTerms:
        rows = self.rows
        log_attention = rows.log_softmax(self.logits.index_select(-1, rows.edge))
        return LatentTerms(log_attention, self.alpha, self._of_rows(rows, self.evidence))

    def _of_rows(self, rows: Neighborhood, evidence: Tensor) -> Tensor:
        each_node = evidence.shape[-2] == self.hood.num_nodes
        return evidence.index_select(-2, rows.nodes if each_node else rows.edge)

    def _flat(self, shape: Size) -> LatentTerms:
        log_attention, *tables = self._terms
        return LatentTerms(flatten(log_attention, shape), *(flatten(t, shape, 2) for t in tables))

    def _draw(self, shape: Size, uniforms: Tensor | None = None) -> LatentDraw:
        if uniforms is None:
            size = (shape.numel(), self.rows.num_rows)
            uniforms = torch.rand(size, dtype=torch.double, device=self.rows.device)
        return draw_latent(self.rows, self._flat(shape), uniforms)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        draw = self._draw(shape[:-2])
        choices, labels = self.rows.source[draw.edges], draw.labels
        value = torch.stack([choices, labels], 1).index_select(2, self._row_of).view(shape)
        self._last_draw.put((value, shape[:-2]), (draw, None))  # asked for next
        _, provenance = untracked(self.alpha, self.logits, self.evidence)
        return track_provenance(value, provenance)

    def _recall(self, value: Tensor, shape: Size) -> tuple[LatentDraw, Tensor | None]:
        """The draw that yields ``value``, and a mask of the choices that are no neighbours."""
        return self._last_draw.get((value, shape), lambda: self._located(value, shape))

    def _located(self, value: Tensor, shape: Size) -> tuple[LatentDraw, Tensor]:
        value = flatten(value, shape, 2).expand(shape.numel(), -1, -1)
        choices, labels = value.index_select(2, self._position).unbind(1)
        edges = self.rows.find(choices)
        wrong = (edges < 0) | (labels < 0) | (labels >= self.num_classes)
        return LatentDraw(edges.clamp(min=0), labels.clamp(0, self.num_classes - 1)), wrong

    def _evaluate(self, value: Tensor) -> tuple[LatentDraw, Tensor, Tensor]:
        # A guide asks for density and score of the same draw, with and without a plate's batch.
        shape = torch.broadcast_shapes(value.shape[:-2], self.batch_shape)
        question = value, shape, torch.is_grad_enabled()
        return self._last_values.get(question, lambda: self._evaluated(value))

    def _evaluated(self, value: Tensor) -> tuple[LatentDraw, Tensor, Tensor]:
        shape = torch.broadcast_shapes(value.shape[:-2], self.batch_shape)
        draw, wrong = self._recall(value, shape)
        predicted, log_choice = latent_predictive(self.rows, self._flat(shape), draw)
        if wrong is not None:
            log_choice = log_choice.masked_fill(wrong, -torch.inf)
        full = shape + self.event_shape[1:]
        return draw, predicted.view(full), log_choice.view(full)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        (plain,), provenance = untracked(value)
        return track_provenance(self._evaluate(plain)[2].sum(-1), provenance)

    def log_evidence(self, value: Tensor) -> Tensor:
        r"""
        ``(..., n)``: :math:`f_i = \log p(w_i \mid w_{<i}, u_{<i}, c_{<i})` in the order of
        :attr:`order`. Their sum is :math:`\log p(w, c, u) - \log q(c, u \mid w)`.
        """
        if self._validate_args:
            self._validate_sample(value)
        (plain,), provenance = untracked(value)
        return track_provenance(self._evaluate(plain)[1], provenance)

    def score_parts(self, value: Tensor) -> ScoreParts:
        if self._validate_args:
            self._validate_sample(value)
        (plain,), provenance = untracked(value)
        draw, predicted, log_choice = self._evaluate(plain)
        (costs,), _ = untracked(predicted.detach())
        parts = score_parts(self.estimator, log_choice, costs, lambda: self._charge(draw, costs))
        return ScoreParts(*(track_provenance(part, provenance) for part in parts))

    @torch.no_grad()
    def posterior(
        self, num_samples: int | None = None, weighted: bool = False, num_sweeps: int = 0
    ) -> Posterior:
        r"""
        The posterior :math:`p(\cdot \mid w)` as a mixture over choices and labels: marginals,
        pairs, joint draws and predictions of all nodes.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> evidence = torch.tensor([[0.0, -1.0], [0.0, 0.0]])
        >>> q = EvidenceConditional(hood, torch.ones(2, 2), torch.zeros(4), evidence)
        >>> q.posterior().marginals()
        tensor([[0.7311, 0.2689],
                [0.5385, 0.4615]])

        :param int num_samples: number ``T`` of draws, or of chains; ``None`` sums over all choices
            and labels, exactly, for small sets.
        :param bool weighted: Weigh draws by :math:`\prod_i e^{f_i}`, exact as ``T`` grows.
        :param int num_sweeps: ``S`` sweeps of collapsed Gibbs sampling in chains that start from
            draws, which see the past only; a sweep sees all others, and is exact as ``S`` grows.
            Marginals of nodes with evidence are means over the second half of the sweeps, and
            ``chains`` of the posterior has diagnostics.
        :return: the posterior. Cost: :math:`O(T (S + 1) E C)`.
        :raises ValueError: for a batch, and for a set that is too large for an exact sum.
        """
        check_plain("posterior", self.batch_shape)
        check_integers(0, num_sweeps=num_sweeps)
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
        if num_sweeps and (weighted or num_samples is None):
            raise ValueError("num_sweeps needs num_samples chains, which have equal weights")
        plain, _ = untracked(self.alpha.detach(), self.logits.detach(), self.evidence.detach())
        alpha, logits, evidence = plain
        if num_samples is None:
            rows = self.observed_rows
            own = self._of_rows(rows, evidence)
            return exact_posterior(self.hood, alpha, logits, rows, own)
        terms = LatentTerms(*(t.detach() for t in untracked(*self._flat(Size([1])))[0]))
        draw = self._draw(Size([num_samples]))
        arguments = self.hood, logits, self.rows, terms, draw
        return sampled_posterior(*arguments, weighted, num_sweeps)

    @torch.no_grad()
    def _charge(self, draw: LatentDraw, costs: Tensor) -> Tensor:
        """``(..., n)``: the costs that each draw is charged with, less their baseline."""
        shape = costs.shape[:-1]

        def of_another_draw() -> Tensor:
            other = self._draw(shape)
            found, _ = untracked(latent_predictive(self.rows, self._flat(shape), other)[0])
            return self._costs(other, found[0].view_as(costs))

        shapes = self.alpha.shape[:-2], self.logits.shape[:-1], self.evidence.shape[:-2]
        own = torch.broadcast_shapes(*shapes, (1,) * len(shape))
        return less_baseline(self._costs(draw, costs), own, of_another_draw).to(costs.dtype)

    def _costs(self, draw: LatentDraw, predicted: Tensor) -> Tensor:
        flat = predicted.reshape(-1, self.rows.num_rows)
        if self.estimator is ScoreEstimator.REWARD_TO_GO:
            component = self.observed_rows.components().index_select(0, self._position)
            return costs_to_go(component, flat).view(predicted.shape)
        terms = LatentTerms(*untracked(*self._flat(predicted.shape[:-1]))[0])
        return latent_credits(self.rows, terms, draw, flat).view(predicted.shape)


class _ChoicesAndLabels(constraints.Constraint):
    is_discrete, event_dim = True, 2

    def __init__(self, rows: Neighborhood, num_classes: int) -> None:
        self.rows, self.num_classes = rows, num_classes

    def check(self, value: Tensor) -> Tensor:
        choices, labels = value.reshape(-1, 2, self.rows.num_rows).unbind(1)
        inside = (labels >= 0) & (labels < self.num_classes)
        return ((self.rows.find(choices) >= 0) & inside).all(-1).view(value.shape[:-2])
