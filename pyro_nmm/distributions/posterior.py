# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor
from torch.nn.functional import one_hot

from pyro_nmm.blocks import blocks
from pyro_nmm.channel import KEEP, Channel
from pyro_nmm.distributions import conditioning, queries
from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.sequential import predict_in_turn
from pyro_nmm.edges import check_mask
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.gibbs import Chains
from pyro_nmm.ops.marginals import PairRows, spread
from pyro_nmm.validation import check_label_range, check_labels, check_nodes, check_pairs


class Posterior:
    r"""
    :math:`p(y \mid y_\tau)`, section 3.6 of the paper: a weighted mixture over choices
    :math:`c_\tau`, made by :meth:`NeighborMixture.condition`.

    .. math::

        p(y \mid y_\tau) \approx \sum_t w_t \, p(y \mid c_\tau^{(t)}, y_\tau), \qquad
        z_j \mid c_\tau^{(t)}, y_\tau \sim \mathrm{Dirichlet}(\alpha_j + s_j^{(t)})

    Given choices, an NMM stays one, so every query is a weighted mean of closed forms. Only
    nodes that somebody chose differ from the prior: what is kept are the choices, and
    concentrations are made where a query needs them, some components at a time. Observed nodes
    keep their label with probability one. A posterior is not differentiable.

    >>> from pyro_nmm import NeighborMixture
    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
    >>> posterior = mix.condition(torch.tensor([1, -1]), torch.tensor([True, False]))
    >>> posterior.marginals()
    tensor([[0.0000, 1.0000],
            [0.4167, 0.5833]])

    :param Neighborhood hood: the neighbourhoods of all nodes.
    :param Tensor logits: ``(num_edges,)`` attention scores.
    :param Components components: the choices and labels of the observed nodes.
    :param Channel channel: of the edges. If they relabel, the labels of ``components`` are
        borrowed, and ``shown``, ``(n,)``, has the labels of the nodes.
    :param bool is_exact: whether the components are all choices there are.
    :param bool weighted: whether weights are probabilities of labels, or all equal.
    :ivar Chains chains: diagnostics of Gibbs sweeps, if the components are states of these.
    """

    chains: Chains | None

    def __init__(
        self,
        hood: Neighborhood,
        logits: Tensor,
        components: Components,
        *,
        channel: Channel = KEEP,
        shown: Tensor | None = None,
        is_exact: bool = False,
        weighted: bool = True,
    ) -> None:
        self.hood, self.logits, self.components = hood, logits, components
        self.channel, self.shown = channel, components.labels if shown is None else shown
        self.num_classes, self.nodes = components.alpha.shape[-1], components.nodes
        self.is_exact, self.weighted = is_exact, weighted
        # The place of every node among the observed ones, or -1.
        self.place = torch.full((hood.num_nodes,), -1, device=hood.device)
        self.place[self.nodes] = torch.arange(len(self.nodes), device=hood.device)
        self.observed, self.chains = self.place >= 0, None
        self.latent = self.shown.dim() == 2
        if self.latent:
            self._probs = components.probs()
        else:
            self._probs = one_hot(self.shown, self.num_classes).to(components.alpha)
        # Zero stands for "not known".
        self.labels = torch.zeros_like(self.place)
        self.labels[self.nodes] = self._probs.argmax(-1)

    def __repr__(self) -> str:
        sizes = f"num_observed={len(self.nodes)}, num_components={len(self.components)}"
        return f"{type(self).__name__}(hood={self.hood}, {sizes}, is_exact={self.is_exact})"

    @property
    def log_weights(self) -> Tensor:
        """``(T,)``: :math:`\\log w_t`, normalised."""
        return self.components.log_weights

    @torch.no_grad()
    def condition(
        self,
        y: Tensor,
        observed: Tensor | None = None,
        num_samples: int | None = None,
        weighted: bool | None = None,
    ) -> Posterior:
        r"""
        The posterior given labels :math:`y_\rho` too: every component draws the new choices,

        .. math::

            c_\rho^{(t)} \sim q(c_\rho \mid y_\rho, c_\tau^{(t)}, y_\tau), \qquad
            w_t \leftarrow w_t \prod_{i \in \rho} p(y_i \mid y_{<i}, c_{<i}^{(t)}) ,

        so that the result becomes exact as ``T`` grows. Equal weights, the paper's choice, stay
        equal. An exact posterior stays exact, given evidence too, by a sum over all choices of both
        sets.

        :param Tensor y: ``(N,)`` labels, read where ``observed`` only.
        :param Tensor observed: ``(N,)`` boolean mask, default all nodes. Nodes that are known
            already must keep their label.
        :param int num_samples: Go on with so many components, drawn by their weight: the way to
            add many labels to an exact posterior. Default: with every component once.
        :param bool weighted: Whether weights change as above. Default: unless they are equal.
        :return: a new posterior. Cost: :math:`O(T E_\rho)`, :math:`E_\rho` the edges into the
            new nodes.
        :raises ValueError: for a label that contradicts a known one, or too large an exact sum.
        """
        y = check_labels(self.hood, y, self.hood.num_nodes)
        if y.dim() != 1:
            raise ValueError(f"condition needs one labelling y of shape (N,), got {tuple(y.shape)}")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        observed = torch.ones_like(self.observed) if observed is None else observed
        check_mask(observed, self.hood.num_nodes, self.hood.device)
        conditioning.check_agreement(self, y, observed)
        nodes = (observed & ~self.observed).nonzero()[:, 0]
        labels = y[nodes]
        check_label_range(self.hood.take(nodes), labels, self.num_classes)
        if len(nodes) == 0 and num_samples is None:
            return self
        old, hood, logits, channel = self.components, self.hood, self.logits, self.channel
        if self.is_exact and self.latent and num_samples is None:
            new = conditioning.extended(hood, logits, old, nodes, labels)
            return self._with(new, None, is_exact=True)
        if self.is_exact and num_samples is None:
            both, order = torch.cat([old.nodes, nodes]).sort()
            every = torch.cat([self.shown, labels])[order]
            new = conditioning.all_components(hood, old.alpha, logits, both, every, channel)
            return self._with(new, every, is_exact=True)
        weighted = self.weighted if weighted is None else weighted
        more = nodes, labels, num_samples, weighted, channel
        new = conditioning.continued(hood, logits, old, *more)
        shown = None if channel.keeps else torch.cat([self.shown, labels])
        return self._with(new, shown, weighted=weighted)

    def _with(self, components: Components, shown: Tensor | None, **options) -> Posterior:
        options |= {"channel": self.channel, "shown": shown}
        return Posterior(self.hood, self.logits, components, **options)

    def shown_by(self, part: slice | Tensor) -> Tensor:
        """``(n,)`` or ``(T, n)``: what the observed nodes show in some components."""
        return self.shown[part] if self.latent else self.shown

    def _marginals(self, rows: Neighborhood) -> Tensor:
        attention = rows.softmax(self.logits.index_select(0, rows.edge))
        # Linear in the components' means, so the mixture is merged before it is spread.
        channel = self.channel.of(rows.edge)
        return self._fix(rows.nodes, spread(rows, self.components.mean(), attention, channel))

    def _fix(self, nodes: Tensor, marginals: Tensor) -> Tensor:
        """Marginals ``(K, C)`` of nodes, with those of observed ones replaced."""
        known = self.observed[nodes]
        marginals[known] = self._probs[self.place[nodes[known]]]
        return marginals

    def marginals(self) -> Tensor:
        r"""
        ``(N, C)``: the distribution of every node's label. Cost:
        :math:`O(T n \log(T n) + E C)` for ``n`` observed nodes.
        """
        return self._marginals(self.hood)

    def pairwise(self, pairs: Tensor) -> Tensor:
        """
        Joint distributions of pairs of labels.

        :param Tensor pairs: ``(2, P)`` node ids.
        :return: ``(P, C, C)``. Cost, of each component: linear in the edges into the pairs'
            nodes and in ``n``, and :math:`O(C^2)` for each pair and each common neighbour.
        """
        check_pairs(self.hood, pairs)
        size, weights, tables = self.num_classes, self.components.weights, []
        for some in blocks(pairs.shape[1], size**2):
            near, table = PairRows(self.hood, pairs[:, some]), self.logits.new_zeros(())
            known = self.observed[near.nodes]
            # In a component a label that is known depends on no other.
            near.separate(known[near.pairs].any(0))
            attention = near.rows.softmax(self.logits.index_select(0, near.rows.edge))
            channel = self.channel.of(near.rows.edge)
            for part in blocks(len(weights), near.numbers(size) + len(self.nodes)):
                alpha = self.components.concentrations(near.sources, part)
                own = near.marginals(alpha, attention, channel)
                labels = self.shown_by(part)[..., self.place[near.nodes[known]]]
                own[:, known] = one_hot(labels, size).to(own)
                parts = near.tables(alpha, attention, own, channel)
                table = table + torch.tensordot(weights[part], parts, 1)
            tables.append(table)
        return torch.cat(tables)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        r"""
        Joint draws of labels; observed nodes keep theirs. A component is drawn by its weight, then
        every other node's choice, then labels from the urns that observed choices have filled.

        :param Tensor nodes: ``(K,)`` distinct node ids, default all ``N``.
        :return: ``(*sample_shape, K)``. Cost: :math:`O(E + K (C + \log K))` a draw, of the edges
            into these nodes, and :math:`O(n \log n)` for ``n`` observed ones.
        """
        if nodes is None:
            nodes = torch.arange(self.hood.num_nodes, device=self.hood.device)
        check_nodes(self.hood, nodes)
        shape = Size(sample_shape)
        return queries.draws(self, shape.numel(), nodes).view(*shape, len(nodes))

    @torch.no_grad()
    def counts(self, sets: Sequence[Tensor], label: int, num_samples: int = 1000) -> Tensor:
        """
        How many nodes of a set have a label: joint draws, of which quantiles make intervals.

        :param sets: ``S`` sets of nodes, by node ids ``(K,)`` or by boolean masks ``(N,)``.
        :return: ``(num_samples, S)``. Cost: that of as many draws of the sets' nodes.
        """
        return queries.counts(self, sets, label, num_samples)

    @torch.no_grad()
    def information_gain(self, nodes: Tensor) -> Tensor:
        r"""
        What asking for a node's label is expected to tell of all labels, for active learning:

        .. math::

            H(y_i) + \sum_{j \ne i} I(y_i ; y_j)

        in nats, over the nodes `j` that share a source with `i`; zero for nodes whose label is
        known, not for those with evidence. The sum counts twice what several nodes are told alike.

        :param Tensor nodes: ``(K,)`` distinct node ids.
        :return: ``(K,)``. Cost: :meth:`marginals`, and :meth:`pairwise` of all such pairs.
        """
        return queries.information_gain(self, nodes)

    def log_marginal(self, nodes: Tensor, labels: Tensor) -> Tensor:
        r"""
        :math:`\log p(y_\kappa \mid y_\tau)` of a small set of nodes.

        :param Tensor nodes: ``(K,)`` distinct node ids :math:`\kappa`.
        :param Tensor labels: ``(..., K)`` their labels.
        :return: ``(...)``, ``-inf`` where an observed node is given another label.
        """
        check_nodes(self.hood, nodes)
        labels = check_labels(self.hood, labels, len(nodes))
        check_label_range(self.hood.take(nodes), labels, self.num_classes)
        flat, known, parts = labels.reshape(-1, len(nodes)), self.observed[nodes], []
        place, given = self.place[nodes[known]], flat[:, known]
        rows, sources = compact(self.hood.take(nodes[~known]))
        own = self.logits.index_select(0, rows.edge), flat[:, ~known]
        channel = self.channel.of(rows.edge)
        numbers = max(enumeration.check_size(rows), flat.numel(), len(sources) * self.num_classes)
        for part in blocks(len(self.components), numbers + len(self.nodes)):
            log_prob = self.log_weights[part, None]
            agrees = (self.shown_by(part)[..., None, place] == given).all(-1)
            agrees = agrees.expand(len(log_prob), -1)
            if rows.num_rows:
                alpha = self.components.concentrations(sources, part)
                log_prob = log_prob + enumeration.log_marginal(rows, alpha, *own, channel)
            log_prob = log_prob.expand_as(agrees).masked_fill(~agrees, -torch.inf)
            parts.append(log_prob.logsumexp(0))
        return torch.stack(parts).logsumexp(0).view(labels.shape[:-1])

    def predict(
        self, nodes: Tensor | None = None, method: str = "marginal", generator=None
    ) -> Tensor:
        r"""
        Predicted labels.

        * ``"marginal"``: the mode of each node's own marginal.
        * ``"joint"``: the joint mode of a small set of nodes, over all :math:`C^K` labellings.
        * ``"sequential"``: node after node, the most certain first; each prediction is merged into
          the known labels before the next. Linear in the edges. Each of the ``T`` components
          follows one continuation, so give :meth:`NeighborMixture.condition` some dozens of
          ``num_samples`` rather than an exact or weighted sum.

        :param Tensor nodes: ``(K,)`` distinct node ids; default all nodes, which returns
            ``(N,)`` with the observed labels in place.
        :param torch.Generator generator: the source of randomness of ``"sequential"``.
        :return: ``(K,)`` labels.
        """
        wanted = torch.arange(self.hood.num_nodes, device=self.hood.device)
        if nodes is not None:
            check_nodes(self.hood, nodes)
            wanted = nodes
        # Labels that differ between components have a mode too, jointly with others.
        latent = self.latent and method == "joint"
        free = wanted if latent else wanted[~self.observed[wanted]]
        labels = self.labels.clone()
        if method == "marginal":
            labels[free] = self._marginals(self.hood.take(free)).argmax(-1)
        elif method == "joint" and len(free):
            labels[free] = self._joint_mode(free)
        elif method == "sequential" and not self.channel.keeps:
            raise ValueError("method='sequential' is for edges that keep labels: use 'marginal'")
        elif method == "sequential" and len(free):
            certainty = self._marginals(self.hood.take(free)).max(-1).values
            order = free[certainty.argsort(descending=True, stable=True)]
            given = self.hood, self.logits, self.components
            labels[order] = predict_in_turn(*given, order, generator)
        elif method not in ("joint", "sequential"):
            raise ValueError(f"method must be 'marginal', 'joint' or 'sequential', got {method!r}")
        return labels[wanted]

    def _joint_mode(self, nodes: Tensor) -> Tensor:
        if self.num_classes ** len(nodes) > enumeration.MAX_CHOICES:
            raise ValueError(
                f"method='joint' would compare {self.num_classes}^{len(nodes)} labellings of "
                f"nodes: use method='sequential', or fewer nodes"
            )
        labels = enumeration.enumerate_labels(len(nodes), self.num_classes, nodes.device)
        return labels[self.log_marginal(nodes, labels).argmax()]
