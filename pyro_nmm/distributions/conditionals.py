# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices, and latent labels, given what is observed: drawn node after node in an order."""

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.arguments import as_expected, check_integers, check_plain
from pyro_nmm.blocks import NUMBERS
from pyro_nmm.caching import LastCall
from pyro_nmm.distributions.components import Components, all_latents
from pyro_nmm.distributions.factors import Neighbors
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.graph_arguments import check_evidence, check_label_range, check_labels, check_possible
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import Draw, Entries, Wide, predictive
from pyro_nmm.ops.gibbs import run_chains
from pyro_nmm.provenance import posterior_values, untracked
from pyro_nmm.relabel import Channel

#: States that all chains keep by default: standard errors of .016 at most if independent.
_MOST_STATES = 1024


class OrderedConditional(InOrder):
    r"""The choices of the observed nodes given their labels, node after node in a random order:
    :math:`q(c \mid y)`, the paper's equation (6). It has no parameter of its own.

    .. math::

        q(c \mid y) = \prod_i p(c_i \mid y_i, c_{<i}, y_{<i}), \quad
        p(c_i = j \mid \cdot) \propto L_{ij} \frac{\alpha_{j y_i} + s_{ij}}{A_j + S_{ij}}

    where :math:`S_{ij}` counts the earlier nodes that chose :math:`j`, :math:`s_{ij}` how many of
    these have label :math:`y_i`, and :math:`A_j = \sum_k \alpha_{jk}`. A sample holds node ids,
    shape ``batch_shape + (n,)``, for ``n`` observed nodes **in ascending node id**.

    The bound :math:`E_q[\sum_i f_i] \le \log p(y)`, :math:`f_i = \log p(y_i \mid y_{<i},
    c_{<i})`, is loose by the divergence of :math:`q` from :math:`p(c \mid y)`, because a choice
    depends on the labels of earlier nodes alone; :math:`E_q[\prod_i e^{f_i}] = p(y)` is exact.

    **The gradient of the bound.** :meth:`score_parts` gives Pyro's losses a control variate that
    removes from a choice's score the costs that it cannot have caused. Those of other sites stay.

    =====================  ================================================  =========
    ``estimator``          the choice :math:`c_i` is charged with            bias
    =====================  ================================================  =========
    ``"reward_to_go"``     :math:`f_{i'}` of later nodes connected to it,    none
                           minus the mean of the other draws
    ``"one_step_credit"``  the change that its own count makes in later      small
                           :math:`f_{i'}`, minus the mean of the others
    ``"no_score"``         nothing: the gradient of EM                       moderate
    ``"reinforce"``        the whole bound: textbook REINFORCE               none
    =====================  ================================================  =========

    "The other draws" are the rest of the batch; a batch of one makes one more draw for the
    baseline. :class:`~pyro.infer.TraceGraph_ELBO` takes any program. ``Trace_ELBO`` gives the same
    gradient to programs with no other sites or factors, and has a ``differentiable_loss``.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> q = OrderedConditional(hood, alpha, logits, y=torch.tensor([0, 0]))
    >>> q.log_prob(torch.tensor([0, 0])).exp()
    tensor(0.8108)

    Cost: :math:`O(E)` a draw and :math:`O(E \log E)` a ``log_prob``, ``E`` the edges into observed
    nodes. ``hood``, ``alpha`` and ``logits`` are as for :class:`~pyro_nmm.NeighborMixture`.

    :param Tensor y: ``(..., N)`` integer labels; unobserved entries are never read.
    :param Tensor observed: ``(N,)`` boolean mask of observed nodes, default all.
    :param Tensor order: ``(n,)`` order of the observed node ids for the batch, default random.
    :param str estimator: see the table.
    :param Tensor relabel: ``(num_edges, C)`` permutations, see :mod:`pyro_nmm.relabel`. In the
        equation :math:`y_i` is then the label that was borrowed, if over this edge.
    """

    def __init__(
        self, hood: Neighborhood, alpha: Tensor, logits: Tensor, y: Tensor,
        observed: Tensor | None = None, order: Tensor | None = None,
        estimator: str = "reward_to_go", relabel: Tensor | Channel | None = None, *,
        validate_args=None,
    ) -> None:  # fmt: skip
        parameters = Parameters.of(hood, alpha, logits, relabel, kinds="permutations")
        y, arrangement = check_labels(hood, y, hood.num_nodes), (observed, order, estimator)
        self.channel = parameters.channel
        super().__init__(parameters, y.shape[:-1], arrangement, validate_args=validate_args)
        self._y = y
        if self._validate_args:
            rows = self.observed_rows
            check_label_range(rows, y.index_select(-1, rows.nodes), self.num_classes)

    @property
    def labels(self) -> Tensor:
        """The labels that choices count for: ``(..., n)``, of edges if these relabel."""
        return self._data

    def _data_of(self, rows: Neighborhood) -> Tensor:
        y = self._y
        labels = rows.last_labels.get((y,), lambda: y.index_select(-1, rows.nodes))
        return self.channel.of(rows.edge).borrowed(rows, labels)

    log_labels = InOrder.log_terms

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return Neighbors(self.observed_rows)

    def _columns(self, draw: Draw) -> Tensor:
        return self.rows.source[draw.edges]

    def _located(self, value: Tensor, shape: Size) -> tuple[Draw, Tensor]:
        wide = Wide(self.rows, Entries(*untracked(*self._flat(shape))[0]))
        found = self.rows.find(self._in_order(value, shape))
        edges = found.clamp(min=0)
        counts = wide.groups.earlier(wide.chosen(edges))
        return wide.split(edges)._replace(counts=counts), found < 0

    def borrowed(self, value: Tensor) -> Tensor:
        """``(..., n)``: labels that choices take from their sources, in ascending node id."""
        shape = self._shape_of(value)
        if self.channel.keeps:
            return self.labels.index_select(-1, self._row_of).expand(*shape, -1)
        (value, _), provenance = untracked(value, self.labels)
        labels = self._recall(value, shape)[0].labels
        return track_provenance(labels.index_select(1, self._row_of).view(*shape, -1), provenance)


class EvidenceConditional(InOrder):
    r"""Choices and latent labels of nodes given observations, node after node in a random order:
    :math:`q(c, u \mid w)`. It has no parameter of its own.

    .. math::

        q(c, u \mid w) = \prod_i p(c_i, u_i \mid w_i, c_{<i}, u_{<i}), \quad
        p(c_i = j, u_i = k \mid \cdot) \propto
            L_{ij} \frac{\alpha_{jk} + s_{ijk}}{A_j + S_{ij}} \, e^{e_{ijk}}

    Here :math:`u_i \sim z_{c_i}` is the label that a node takes from its source, and the evidence
    :math:`e_{ijk} = \log p(w_i \mid u_i = k)` is the log-likelihood of an observation given this
    label: a Normal emission, the votes of annotators, a partial label (0 and :math:`-\infty`), or
    nothing (zeros). Counts are as for :class:`OrderedConditional`, which observed labels need. With
    :math:`f_i` the logarithm of the sum of these terms, :math:`E_q[\sum_i f_i] \le \log p(w)` and
    :math:`E_q[\prod_i e^{f_i}] = p(w)` for every order.

    A sample ``batch_shape + (2, n)`` has choices, then labels, in ascending node id.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> evidence = torch.tensor([[0.0, -torch.inf], [-0.5, -0.1]])  # a label, and a hint
    >>> q = EvidenceConditional(hood, alpha, logits, evidence, order=torch.arange(2))
    >>> c, u = q.sample((5,)).unbind(-2)
    >>> bool((u[:, 0] == 0).all())
    True
    >>> q.log_prob(torch.tensor([[0, 0], [0, 0]])).exp()
    tensor(0.3289)

    Cost: :math:`O(E C)` a draw and a ``log_prob``, ``E`` the edges into the observed nodes. Other
    parameters and the gradient of the bound are as for :class:`OrderedConditional`.

    :param Tensor alpha: ``(..., M, C)``.
    :param Tensor evidence: log-likelihoods in nats, ``(..., N, C)``, or ``(..., num_edges, C)``
        if they depend on the edge that a label comes over; unobserved entries are never read.
    :param bool relabels: whether edges change borrowed labels, so that :meth:`posterior` refuses.
    """

    def __init__(
        self, hood: Neighborhood, alpha: Tensor, logits: Tensor, evidence: Tensor,
        observed: Tensor | None = None, order: Tensor | None = None,
        estimator: str = "reward_to_go", *, relabels: bool = False, validate_args=None,
    ) -> None:  # fmt: skip
        parameters = Parameters.of(hood, alpha, logits)
        evidence = check_evidence(hood, parameters.alpha, evidence)
        self.evidence, self.relabels, self._last_values = evidence, relabels, LastCall()
        arrangement, shape = (observed, order, estimator), evidence.shape[:-2]
        super().__init__(parameters, shape, arrangement, (2,), validate_args=validate_args)
        if self._validate_args:
            check_possible(self.observed_rows, self._data_of(self.observed_rows))

    def _data_of(self, rows: Neighborhood) -> Tensor:
        return self._of_rows(rows, self.evidence)

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self):
        return _ChoicesAndLabels(self.observed_rows, self.num_classes)

    def _of_rows(self, rows: Neighborhood, evidence: Tensor) -> Tensor:
        of_nodes = evidence.shape[-2] == self.hood.num_nodes
        return evidence.index_select(-2, rows.nodes if of_nodes else rows.edge)

    def _columns(self, draw: Draw) -> Tensor:
        return torch.stack([self.rows.source[draw.edges], draw.labels], 1)

    def _located(self, value: Tensor, shape: Size) -> tuple[Draw, Tensor]:
        choices, labels = self._in_order(value, shape).unbind(1)
        edges = self.rows.find(choices)
        wrong = (edges < 0) | (labels < 0) | (labels >= self.num_classes)
        return Draw(edges.clamp(min=0), labels.clamp(0, self.num_classes - 1)), wrong

    def _evaluate(self, value: Tensor) -> tuple[Draw, Tensor, Tensor]:
        # A guide asks for density and score of the same draw, with and without a plate's batch.
        question = value, self._shape_of(value), torch.is_grad_enabled()
        evaluate = super()._evaluate
        return self._last_values.get(question, lambda: evaluate(value))

    log_evidence = InOrder.log_terms

    @torch.no_grad()
    def posterior(
        self, num_samples: int | None = None, weighted: bool = False, num_sweeps: int = 0,
        num_states: int | None = None, start: Tensor | None = None,
    ) -> Posterior:  # fmt: skip
        r"""The posterior :math:`p(\cdot \mid w)` as a mixture over choices and labels.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> evidence = torch.tensor([[0.0, -1.0], [0.0, 0.0]])
        >>> q = EvidenceConditional(hood, torch.ones(2, 2), torch.zeros(4), evidence)
        >>> q.posterior().marginals()
        tensor([[0.7311, 0.2689],
                [0.5385, 0.4615]])

        :param int num_samples: ``T`` draws, or chains; ``None`` is an exact sum, for small sets.
        :param bool weighted: Weigh draws by :math:`\prod_i e^{f_i}`, exact as ``T`` grows.
        :param int num_sweeps: ``S`` Gibbs sweeps, see :meth:`sweep`, in chains that start from
            draws, exact as ``S`` grows. ``chains`` of the posterior has diagnostics.
        :param int num_states: Number of states, of all chains together, that the posterior keeps
            from the second half of the sweeps. Default: at most 1,024, and 2²⁴ choices.
        :param Tensor start: ``(T, 2, n)`` choices and labels that the chains start from, such as
            :attr:`Posterior.states` of the last ``T`` states, default draws.
        :return: the posterior. Cost: :math:`O(T (S + 1) E C)`.
        :raises ValueError: for a batch, too large an exact sum, and edges that relabel.
        """
        check_plain("posterior", self.batch_shape)
        if self.relabels:
            raise ValueError(
                "posterior would be of borrowed labels, before relabel changes them: use "
                "NeighborMixture.condition for observed labels, or leave out relabel"
            )
        check_integers(0, num_sweeps=num_sweeps)
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
        if num_sweeps and (weighted or num_samples is None):
            raise ValueError("num_sweeps needs num_samples chains, which have equal weights")
        if num_states is not None:
            if not num_sweeps:
                raise ValueError("num_states is a number of states after sweeps: give num_sweeps")
            check_integers(num_samples or 1, num_states=num_states)
        if start is not None and not num_sweeps:
            raise ValueError("start is a state before sweeps: give num_sweeps")
        values = self.alpha.detach(), self.logits.detach(), self.evidence.detach()
        alpha, logits, evidence, _ = posterior_values(*values, self.order)
        if num_samples is None:
            rows = self.observed_rows
            components = all_latents(alpha, logits, rows, self._of_rows(rows, evidence))
            return Posterior(self.hood, logits, components, is_exact=True)
        rows, chains, shape = self.rows, None, Size([num_samples])
        if start is None:
            draw = self._draw(shape)
        else:
            size, kind = (num_samples, *self.event_shape), "integers"
            start = as_expected("start", start, size, kind=kind, like=self.hood)
            _, draw, _ = self._chains(start)
        entries = self._flat(Size([1])).map(Tensor.detach)
        if num_sweeps:
            if num_states is None:
                num_states = min(_MOST_STATES, NUMBERS // max(1, rows.num_rows))
            num_kept = min(num_sweeps - num_sweeps // 2, max(1, num_states // num_samples))
            chains, draw = run_chains(rows, entries, draw, num_sweeps, num_kept)
        choices, log_weights = rows.source[draw.edges], alpha.new_zeros(len(draw.edges))
        if weighted:
            log_weights = predictive(rows, entries, draw)[0].sum(-1)
        components = Components(entries.alpha[0], rows.nodes, draw.labels, choices, log_weights)
        return Posterior(self.hood, logits, components, weighted=weighted, chains=chains)


class _ChoicesAndLabels(Neighbors):
    """Choices and labels ``(..., 2, num_rows)``."""

    event_dim = 2

    def __init__(self, rows: Neighborhood, num_classes: int) -> None:
        super().__init__(rows)
        self.num_classes = num_classes

    def check(self, value: Tensor) -> Tensor:
        choices, labels = value.unbind(-2)
        inside = (labels >= 0) & (labels < self.num_classes)
        return super().check(choices) & inside.all(-1)
