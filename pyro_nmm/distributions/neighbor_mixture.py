# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Neighbor Mixture Model as a distribution of labels."""

from collections.abc import Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.arguments import as_shape, check_integers, check_mask, check_plain
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.conditional_kinds import EvidenceConditional, OrderedConditional
from pyro_nmm.distributions.factors import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.distributions.path import PathEstimate
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.model_arguments import (
    as_nodes,
    check_label_range,
    check_labels,
    check_pairs,
    order_to_rows,
)
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration, marginals
from pyro_nmm.ops.entropy import entropy_bound
from pyro_nmm.provenance import posterior_values, untracked
from pyro_nmm.relabel import Channel


class NeighborMixture(GraphDistribution):
    r"""The Neighbor Mixture Model [1], a joint distribution of labels, the paper's equation (1).

    .. math::

        z_j &\sim \mathrm{Dirichlet}(\alpha_j) \\
        c_i &\sim \mathrm{Categorical}(L_i), \quad
            L_i = \mathrm{softmax}_{j \in n(i)}(\text{logits}_{ij}) \\
        y_i &\sim \mathrm{Categorical}(z_{c_i})

    A sample holds one label in ``0..C - 1`` per node, shape ``batch_shape + (N,)``. Nodes that
    choose the same :math:`j` share :math:`z_j` and correlate, the more the smaller :math:`A_j`.

    Samples, :meth:`marginals` and :meth:`pairwise` are exact and linear in the graph.
    :meth:`log_prob` and :meth:`log_marginal` are exact sums over joint choices, for small graphs
    and sets. :meth:`elbo` is a lower bound for all others.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
    >>> mix.marginals()
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    >>> mix.pairwise(torch.tensor([[0], [1]]))
    tensor([[[0.2917, 0.2083],
             [0.2083, 0.2917]]])
    >>> mix.log_prob(torch.tensor([0, 0])).exp()
    tensor(0.2917)

    [1] Linfeng Liu, Michael C. Hughes, Li-Ping Liu (2021) "Modeling Graph Node Correlations
    with Neighbor Mixture Models", AISTATS, https://arxiv.org/abs/2103.15966.

    :param Neighborhood hood: the neighbourhoods of all nodes.
    :param Tensor alpha: ``(..., N, C)`` positive concentrations.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``, not of an
        ``edge_index``: :func:`~pyro_nmm.edge_values` puts values of PyG's edges into it.
    :param Tensor relabel: stochastic matrices ``(..., num_edges, C, C)`` that edges apply to
        labels; see :mod:`pyro_nmm.relabel`.
    :raises ValueError: for wrong shapes, types and devices, and values that are not positive
        (``alpha``), not numbers (``logits``) or not stochastic (``relabel``).
    """

    shown = "hood", "num_classes"

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Tensor,
        logits: Tensor,
        relabel: Tensor | Channel | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.parameters = parameters = Parameters.of(hood, alpha, logits, relabel)
        self.hood, self.alpha, self.logits = hood, parameters.alpha, parameters.logits
        self.channel, self.relabel = parameters.channel, parameters.channel.relabel
        self.num_classes = parameters.num_classes
        shapes = parameters.batch_shape, Size([hood.num_nodes])
        super().__init__(*shapes, validate_args=validate_args)
        if self._validate_args:
            parameters.check_values()

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_classes - 1), 1)

    @property
    def attention(self) -> Tensor:
        r"""``(..., num_edges)``: :math:`L_{ij}`."""
        return self.parameters.attention

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """``(*sample_shape, ..., N)``: joint draws of the labels of all nodes."""
        shape = self._extended_shape(as_shape(sample_shape))
        c = NeighborChoice(self.hood, self.logits).expand(shape[:-1]).sample()
        return self.channel.draw(self.hood, c, ChosenLabels(self.alpha, c).sample())

    def given(self, c: Tensor) -> ChosenLabels:
        """:math:`p(y \\mid c)`, given choices ``(..., N)``; for edges that keep labels."""
        self._of_kept_labels("given")
        return ChosenLabels(self.alpha, c)

    def choices(
        self, y: Tensor, observed: Tensor | None = None, order: Tensor | None = None
    ) -> OrderedConditional:
        """:math:`q(c \\mid y)`, which the bound is made of; for edges that keep labels."""
        self._of_kept_labels("choices")
        arguments = self.hood, self.alpha, self.logits, y, observed, order
        return OrderedConditional(*arguments, validate_args=self._validate_args)

    def in_order(
        self, y: Tensor, observed: Tensor | None = None, order: Tensor | None = None
    ) -> OrderedConditional | EvidenceConditional:
        """:meth:`choices`; or :meth:`latents`, if edges relabel."""
        if self.channel.keeps:
            return self.choices(y, observed, order)
        return self.latents(self.parameters.evidence(y, observed), observed, order)

    def latents(
        self, evidence: Tensor, observed: Tensor | None = None, order: Tensor | None = None
    ) -> EvidenceConditional:
        """:math:`q(c, u \\mid w)` of latent labels. If edges relabel, evidence is of borrowed
        labels, ``(..., num_edges, C)``, and there is no posterior.

        :raises ValueError: for evidence of nodes if edges relabel; also as ``EvidenceConditional``.
        """
        arguments = self.hood, self.alpha, self.logits, evidence, observed, order
        relabels = not self.channel.keeps
        q = EvidenceConditional(*arguments, relabels=relabels, validate_args=self._validate_args)
        shape, num_edges = tuple(q.data.shape), self.hood.num_edges
        if relabels and shape[-2] == self.hood.num_nodes != num_edges:
            raise ValueError(
                f"evidence of shape {shape} is of nodes' own labels, but edges relabel: give "
                f"logsumexp(log(relabel[e, u]) + evidence[i]) for each of the {num_edges} edges e "
                f"into i; or use condition for observed labels"
            )
        return q

    def log_prob(self, value: Tensor) -> Tensor:
        r"""Exact :math:`\log p(y)` of labels ``(..., N)``: :meth:`log_marginal` of all nodes."""
        return self._log_marginal(self.parameters, self._labels(value))

    def log_marginal(self, nodes: Tensor, labels: Tensor) -> Tensor:
        r"""``(...)``: exact :math:`\log p(y_\tau)` of labels ``(..., K)`` of a few distinct nodes
        ``(K,)``, the paper's equation (3). Cost: :math:`O(K^2 \prod_{i \in \tau} |n(i)|)`.

        :raises ValueError: for nodes that repeat, and more than 2²⁰ joint choices.
        """
        nodes = as_nodes(self.hood, nodes)
        part = self.parameters.of_rows(self.hood.take(nodes))
        labels = check_labels(self.hood, labels, len(nodes))
        if self._validate_args:
            check_label_range(part.hood, labels, self.num_classes)
        return self._log_marginal(part, labels)

    def _log_marginal(self, part: Parameters, labels: Tensor) -> Tensor:
        arguments = part.hood, part.alpha, part.logits, labels, self.batch_shape, part.channel
        return enumeration.log_marginals(*arguments)

    def _of_kept_labels(self, query: str) -> None:
        if not self.channel.keeps:
            raise ValueError(f"{query} is for edges that keep labels: leave out relabel")

    def marginals(self) -> Tensor:
        """``(..., N, C)``: the exact distribution of every node's label. Cost: :math:`O(E C)`."""
        arguments = self.hood, self.alpha, self.attention, self.channel
        return marginals.node_marginals(*arguments).expand(*self.batch_shape, -1, -1)

    def pairwise(self, pairs: Tensor) -> Tensor:
        """``(..., P, C, C)``: exact joint distributions of labels of pairs of node ids ``(2, P)``.
        Cost: :math:`O(E C)` for edges into the nodes, :math:`O(C^2)` for each common neighbour.

        :raises ValueError: for node ids out of range.
        """
        check_pairs(self.hood, pairs)
        tables = marginals.pair_marginals(self.hood, self.alpha, self.logits, pairs, self.channel)
        return tables.expand(*self.batch_shape, -1, -1, -1)

    def elbo(self, y: Tensor, observed: Tensor | None = None, num_samples: int = 1) -> Tensor:
        r"""Samples of the lower bound on :math:`\log p(y_\tau)`, the paper's equation (5):
        :math:`\log p(y_\tau, c) - \log q(c \mid y_\tau)` with :math:`c \sim q` in one random order.
        Derivatives lack the score of the choices: fit :func:`~pyro_nmm.models.nmm` instead. The
        bound is loose if few sources with small ``alpha`` correlate many labels: see
        :meth:`log_likelihood`.

        :param Tensor y: ``(..., N)`` labels, read where ``observed`` only.
        :param Tensor observed: ``(N,)`` boolean mask :math:`\tau`, default all nodes.
        :return: ``(num_samples, ...)``. Terms of nodes are :meth:`OrderedConditional.log_terms`.
        :raises ValueError: for labels out of range where ``observed``.
        """
        check_integers(1, num_samples=num_samples)
        q = self.in_order(y, observed)
        q = q.expand(torch.broadcast_shapes(self.batch_shape, q.batch_shape))
        return q.log_terms(q.sample(Size([num_samples]))).sum(-1)

    def entropy_bound(self, num_samples: int = 1, order: Tensor | None = None) -> Tensor:
        r"""Samples of a lower bound on the entropy of all labels, each with its label summed out,
        the paper's equation (10) without its sampling of :math:`y_i`:

        .. math::

            H(y) \ge E_{p(y, c)} \sum_i H\big(p(y_i \mid y_{<i}, c_{<i})\big) .

        The gradient counts only the direct effect of a choice on later terms, averaged over all
        choices and labels of a node. It has little noise, and a bias of some per cent of its
        length; that of :class:`~pyro_nmm.guides.MixtureGuide` has none and far more noise.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> mix.entropy_bound(num_samples=2)  # of 2 log 2 = 1.3863 at most
        tensor([1.3723, 1.3723])

        :param Tensor order: ``(N,)`` node ids; every order gives a bound. Default ascending.
        :return: ``(num_samples,)``, in nats. Cost: :math:`O(E C)` a sample, with gradients
            :math:`O(E C^2)`.
        :raises ValueError: for a batch, edges that relabel, and an ``order`` without all nodes.
        """
        check_plain("entropy_bound", self.batch_shape)
        self._of_kept_labels("entropy_bound")
        check_integers(1, num_samples=num_samples)
        (alpha, logits), provenance = untracked(self.alpha, self.logits)
        samples = entropy_bound(self.hood, alpha, logits, num_samples, order)
        return track_provenance(samples, provenance)

    def log_likelihood(
        self,
        y: Tensor,
        observed: Tensor | None = None,
        given: Tensor | None = None,
        num_particles: int = 64,
        order: Tensor | None = None,
    ) -> Tensor:
        r"""Estimate of :math:`\log p(y_\tau)`, or of :math:`\log p(y_\tau \mid y_\rho)`, in nats,
        by importance weights of draws of :math:`q`, see :meth:`OrderedConditional.log_likelihood`.
        It is tighter than :meth:`elbo`, and with ``given`` a ratio of two means. On large graphs
        whose labels correlate it is too low and may favour independent labels:
        docs/results/posteriors.md compares it with :meth:`path_likelihood`.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> y, first = torch.tensor([0, 0]), torch.tensor([True, False])
        >>> mix.log_likelihood(y, observed=~first, given=first, num_particles=8).exp()
        tensor(0.5833)

        :param Tensor y: ``(..., N)`` labels, read where ``observed`` or ``given`` only.
        :param Tensor observed: ``(N,)`` boolean mask :math:`\tau`, default all others.
        :param Tensor given: ``(N,)`` boolean mask :math:`\rho`, default none.
        :param int num_particles: ``P``. Cost: :math:`O(P E)`, ``E`` the edges into both sets.
        :param Tensor order: ``(N,)`` node ids in an order that both sets follow, default random. A
            mixture that was fitted in one order is estimated best in it.
        :return: ``(...)``, an estimate for each element of the batch.
        :raises ValueError: for labels out of range, sets that overlap, or an incomplete ``order``.
        """
        hood = self.hood
        every = torch.ones(hood.num_nodes, dtype=torch.bool, device=hood.device)
        if given is None:
            given, observed = ~every, every if observed is None else observed
        else:
            check_mask(given, hood.num_nodes, hood.device, "given")
            observed = ~given if observed is None else observed
        check_mask(observed, hood.num_nodes, hood.device)
        if (both := observed & given).any():
            node = int(both.nonzero()[0])
            raise ValueError(f"observed and given must be disjoint, but both hold node {node}")
        if order is None:
            order = torch.randperm(hood.num_nodes, device=hood.device)
        order_to_rows(hood, order)
        first, last = (order[mask[order]] for mask in (given, observed))
        q = self.in_order(y, observed | given, torch.cat([first, last]))
        return q.log_likelihood(num_particles, len(first))

    def path_likelihood(
        self,
        y: Tensor,
        observed: Tensor | None = None,
        given: Tensor | None = None,
        num_chains: int = 4,
        num_points: int = 41,
        num_sweeps: int = 3,
    ) -> PathEstimate:
        r"""Estimate of :math:`\log p(y_\tau)`, or of :math:`\log p(y_\tau \mid y_\rho)`, in nats,
        by path sampling over the concentration, with a standard error.

        .. math::

            \log p(y) = \sum_i \log p(y_i) - \int_0^\infty E_{p(c \mid y, e^s \alpha)}
                \Big[\frac{d}{ds} \log p(y, c \mid e^s \alpha)\Big] ds

        It serves large graphs, where :meth:`elbo` and :meth:`log_likelihood` are far too low if
        labels correlate. For few nodes :meth:`log_prob` is exact.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
        >>> y = torch.tensor([0, 0])
        >>> value, error = mix.path_likelihood(y, num_chains=200, num_points=81)
        >>> bool((value - mix.log_prob(y)).abs() < 5 * error)
        True

        :param y, observed: as for :meth:`log_likelihood`.
        :param Tensor given: ``(N,)`` mask :math:`\rho`, default none; else a difference of two.
        :param int num_chains: of Gibbs sweeps, which carry their states from independence to
            ``alpha`` and back. With one, the standard error has one degree of freedom.
        :param int num_points: of the grid of concentrations: 5, 9, 13, ...
        :param int num_sweeps: at each point, both ways. Raise it if the error is too large.
        :return: ``log_likelihood`` and ``standard_error``, ``(...)`` each. Cost:
            :math:`O(E)` times chains, points, and twice the sweeps.
        :raises ValueError: for labels out of range, and another ``num_points``.
        """
        options = num_chains, num_points, num_sweeps
        if given is None:
            return self.in_order(y, observed).path_likelihood(*options)
        check_mask(given, self.hood.num_nodes, self.hood.device, "given")
        both = torch.ones_like(given) if observed is None else given | observed
        joint, part = (self.in_order(y, mask).path_likelihood(*options) for mask in (both, given))
        error = joint.standard_error.hypot(part.standard_error)
        return PathEstimate(joint.log_likelihood - part.log_likelihood, error)

    @torch.no_grad()
    def condition(
        self,
        y: Tensor,
        observed: Tensor | None = None,
        num_samples: int | None = None,
        weighted: bool = False,
        num_sweeps: int = 0,
    ) -> Posterior:
        r"""The posterior :math:`p(\cdot \mid y_\tau)` as a mixture over choices :math:`c_\tau`,
        section 3.6 of the paper. ``y`` is ``(N,)``, and ``observed`` as for :meth:`elbo`.

        :param int num_samples: Number ``T`` of samples of :math:`q(c_\tau \mid y_\tau)`;
            ``None`` sums over all :math:`c_\tau`, exactly, for small sets.
        :param bool weighted: Weigh samples by :math:`p(c_\tau, y_\tau) / q(c_\tau \mid y_\tau)`:
            exact as ``T`` grows; equal weights, the paper's choice, vary less at small ``T``.
        :param int num_sweeps: ``S`` Gibbs sweeps of equal samples: exact as ``S`` grows, with
            ``choices(y, observed).meetings().num_sweeps()`` to within .01 in total variation.
        :return: the posterior. Cost: :math:`O(T (S + 1) E_\tau)`, edges into the observed nodes.
        :raises ValueError: for a batch, a large sum, and values of sites in ``TraceGraph_ELBO``.
        """
        check_plain("condition", self.batch_shape)
        check_integers(0, num_sweeps=num_sweeps)
        if num_sweeps and (weighted or num_samples is None):
            raise ValueError("num_sweeps needs num_samples samples, which have equal weights")
        prior = self.prior()
        prior.weighted = weighted or num_samples is None
        posterior = prior.condition(y, observed, num_samples)
        if not num_sweeps:
            return posterior
        old = posterior.components
        q, value = self.in_order(y, observed, old.nodes), old.choices
        if not self.channel.keeps:
            value = torch.stack([value, old.labels], 1)
        parts = q.sweep(value, num_sweeps)
        choices, labels = (parts, old.labels) if self.channel.keeps else parts.unbind(1)
        parameters = old.parameters, old.nodes, labels, choices, old.log_weights, old.shown
        return Posterior(Components(*parameters), weighted=False)

    def prior(self, num_samples: int | None = None) -> Posterior:
        """This distribution as a posterior without observed labels: exact, or ``num_samples`` equal
        components, each of which draws its own choices under :meth:`Posterior.condition`.
        """
        check_plain("prior", self.batch_shape)
        plain = self.alpha.detach(), self.logits.detach(), self.channel.detach()
        alpha, logits, channel = posterior_values(*plain)
        parameters, exact = Parameters(self.hood, alpha, logits, channel), num_samples is None
        components = Components.prior(parameters)
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
            components = components.resampled(num_samples)
        return Posterior(components, is_exact=exact, weighted=exact)
