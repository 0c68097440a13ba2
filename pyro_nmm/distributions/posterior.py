# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posterior distributions of labels as weighted mixtures over choices."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm.arguments import NodeSet, as_set, as_shape, as_tensor, check_integers, check_mask
from pyro_nmm.blocks import blocks
from pyro_nmm.distributions.components import Components, of_components
from pyro_nmm.model_arguments import (
    as_nodes,
    check_label_range,
    check_labels,
    check_pairs,
    check_possible,
)
from pyro_nmm.neighborhood import Neighborhood, compact
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.marginals import PairRows, node_marginals, spread
from pyro_nmm.ops.sampling import draw_from_urns, pick
from pyro_nmm.ops.sweeps import SweepRecord
from pyro_nmm.provenance import posterior_values, untracked

#: Rules of :meth:`Posterior.predict`.
Method = Literal["marginal", "joint", "sequential"]


class Posterior:
    r"""Posterior of all labels given observed labels, :math:`p(y \mid y_\tau)`: a weighted mixture
    over choices :math:`c_\tau`, section 3.6 of the paper, by :meth:`NeighborMixture.condition`.

    .. math::

        p(y \mid y_\tau) \approx \sum_t w_t \, p(y \mid c_\tau^{(t)}, y_\tau), \qquad
        z_j \mid c_\tau^{(t)}, y_\tau \sim \mathrm{Dirichlet}(\alpha_j + s_j^{(t)})

    Queries are weighted means of closed forms, without gradients. Observed nodes keep their labels.

    >>> from pyro_nmm import NeighborMixture
    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(4))
    >>> posterior = mix.condition(torch.tensor([1, -1]), torch.tensor([True, False]))
    >>> posterior.marginals()
    tensor([[0.0000, 1.0000],
            [0.4167, 0.5833]])

    :param components: choices ``(T, n)`` of the observed nodes, their labels, and the parameters.
    :param bool is_exact: whether the components are all choices there are.
    :param bool weighted: whether weights are probabilities of labels, or all equal.
    :param SweepRecord chains: diagnostics of Gibbs sweeps, if the components are states of these.
    """

    def __init__(
        self,
        components: Components,
        *,
        is_exact: bool = False,
        weighted: bool = True,
        chains: SweepRecord | None = None,
    ) -> None:
        self.components, self.parameters = components, (parameters := components.parameters)
        self.hood, self.logits, self.channel = (
            parameters.hood,
            parameters.logits,
            parameters.channel,
        )
        self.num_classes, self.nodes = parameters.num_classes, components.nodes
        self.is_exact, self.weighted, self.chains = is_exact, weighted, chains
        self.log_weights = components.log_weights  #: ``(T,)``: :math:`\log w_t`, normalised
        # The place of every node among the observed ones, or -1.
        self._place = torch.full((self.hood.num_nodes,), -1, device=self.hood.device)
        self._place[self.nodes] = torch.arange(len(self.nodes), device=self.hood.device)
        self.observed = self._place >= 0
        self._probs = components.probs()
        #: ``(N,)``: the most probable labels of the observed nodes, zero elsewhere.
        self.labels = torch.zeros_like(self._place)
        self.labels[self.nodes] = self._probs.argmax(-1)

    def __repr__(self) -> str:
        sizes = f"num_observed={len(self.nodes)}, num_components={len(self.components)}"
        return f"{type(self).__name__}(hood={self.hood}, {sizes}, is_exact={self.is_exact})"

    @torch.no_grad()
    def condition(
        self,
        y: Tensor,
        observed: Tensor | None = None,
        num_samples: int | None = None,
    ) -> "Posterior":
        r"""The posterior given labels :math:`y_\rho` too: every component draws the new choices,

        .. math::

            c_\rho^{(t)} \sim q(c_\rho \mid y_\rho, c_\tau^{(t)}, y_\tau), \qquad
            w_t \leftarrow w_t \prod_{i \in \rho} p(y_i \mid y_{<i}, c_{<i}^{(t)}) .

        An exact posterior stays exact, by a sum over all choices of both sets. Equal weights stay
        equal.

        :param Tensor y: ``(N,)`` labels, read where the mask ``observed`` only, as for
            :meth:`NeighborMixture.condition`.
        :param int num_samples: Draw so many components by their weight, and continue with these:
            the way to add many labels to an exact posterior. Default: every component once.
        :return: a new posterior. Cost: :math:`O(T E_\rho)`, the edges into the new nodes.
        :raises ValueError: for a label that contradicts an observed one, or too large an exact sum.
        """
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
        nodes, labels = posterior_values(*self._new("condition", y, observed))
        if len(nodes) == 0 and num_samples is None:
            return self
        if not self.channel.keeps:
            part = self.parameters.of_rows(self.hood.take(nodes))
            check_possible(part.hood, part.channel.evidence(part.hood, labels))
        exact, components = self.is_exact and num_samples is None, self.components
        if exact:
            components = components.extended(nodes, labels)
        else:
            if num_samples is not None:
                components = components.resampled(num_samples)
            if len(nodes):
                components = components.continued(nodes, labels, self.weighted)
        return Posterior(components, is_exact=exact, weighted=exact or self.weighted)

    def _new(self, query: str, y: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Nodes that become observed, and their labels."""
        y = check_labels(self.hood, y, self.hood.num_nodes)
        if y.dim() != 1:
            raise ValueError(f"{query} needs one labelling y of shape (N,), got {tuple(y.shape)}")
        observed = torch.ones_like(self.observed) if observed is None else observed
        check_mask(observed, self.hood.num_nodes, self.hood.device)
        both = observed & self.observed
        if self.components.latent and both.any():
            raise ValueError(
                f"observed selects node {int(both.nonzero()[0])}, which has evidence already: give "
                f"the mixture all evidence at once, 0 and -inf for an observed label"
            )
        wrong = both & (y != self.labels)
        if wrong.any():
            node = int(wrong.nonzero()[0])
            raise ValueError(
                f"y holds label {y[node].item()} at node {node}, which is known to have label "
                f"{self.labels[node].item()}: mask that node out with observed"
            )
        nodes = (observed & ~self.observed).nonzero()[:, 0]
        check_label_range(self.hood.take(nodes), y[nodes], self.num_classes)
        return nodes, y[nodes]

    @torch.no_grad()
    def log_likelihood(
        self, y: Tensor, observed: Tensor | None = None, num_particles: int = 64
    ) -> Tensor:
        r"""Estimate of :math:`\log p(y_\rho \mid y_\tau)`, in nats, of labels ``(N,)`` where
        ``observed``, default all others, by importance weights of draws that continue components:
        see :meth:`NeighborMixture.log_likelihood`. Cost: :math:`O(P E_\rho)` for ``P`` particles.

        :raises ValueError: for labels out of range, and a label that contradicts an observed one.
        """
        check_integers(1, num_particles=num_particles)
        (new, labels), provenance = untracked(*self._new("log_likelihood", y, observed))
        if not len(new):
            return self.logits.new_zeros(())
        particles = self.components.resampled(num_particles)
        terms = particles.choices_of(new, labels, weighted=True)[2]
        assert terms is not None
        mean = terms.double().logsumexp(0) - math.log(num_particles)
        return track_provenance(mean.to(self.logits), provenance)

    def _marginals(self, rows: Neighborhood) -> Tensor:
        # Linear in the components' means: one visit to the graph serves all of them.
        part = self.parameters.of_rows(rows)
        marginals = spread(rows, self.components.mean(), part.attention, part.channel)
        known = self.observed[rows.nodes]
        marginals[known] = self._probs[self._place[rows.nodes[known]]]
        return marginals

    def marginals(self) -> Tensor:
        r"""``(N, C)``: every node's distribution. Cost: :math:`O(T n \log(T n) + E C)`."""
        return self._marginals(self.hood)

    def pairwise(self, pairs: Tensor) -> Tensor:
        """``(P, C, C)``: :meth:`NeighborMixture.pairwise`, at its cost for each component.

        :raises ValueError: for node ids out of range.
        """
        check_pairs(self.hood, pairs)
        size, weights, tables = self.num_classes, self.components.weights, []
        for block in blocks(pairs.shape[1], size**2):
            near, table = PairRows(self.hood, pairs[:, block]), self.logits.new_zeros(())
            known = self.observed[near.nodes]
            # In a component a label that is known depends on no other.
            near.separate(known[near.pairs].any(0))
            of_rows = self.parameters.of_rows(near.rows)
            attention, channel = of_rows.attention, of_rows.channel
            for part in blocks(len(weights), near.numbers(size) + len(self.nodes)):
                alpha = self.components.concentrations(near.sources, part)
                probs = node_marginals(near.rows, alpha, attention, channel)
                shown = of_components(self.components.shown, part)
                shown = one_hot(shown[..., self._place[near.nodes[known]]], size)
                probs[:, known] = shown.to(probs)
                joint = near.tables(alpha, attention, probs, channel)
                table = table + torch.tensordot(weights[part], joint, 1)
            tables.append(table)
        return torch.cat(tables)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        r"""``(*sample_shape, K)``: joint draws of labels of distinct nodes ``(K,)``, default all:
        components by their weight, then choices, then labels from urns that hold the observed ones.
        Cost: :math:`O(E + K (C + \log K) + n \log n)` a draw, ``E`` the edges into these nodes.

        :raises ValueError: for nodes that repeat or are out of range.
        """
        nodes = as_nodes(self.hood, nodes)
        shape, components, seen = as_shape(sample_shape), self.components, self.observed[nodes]
        number, component = shape.numel(), components.drawn(shape.numel())
        rows = self.hood.take(nodes[~seen])
        parameters = self.parameters.of_rows(rows)
        attention = parameters.attention[None]
        borrowed = of_components(components.labels, component).expand(number, -1)
        value = nodes.new_empty(number, len(nodes))
        value[:, seen] = of_components(components.shown, component)[..., self._place[nodes[seen]]]
        for part in blocks(number if rows.num_rows else 0, 4 * rows.num_edges):
            old = components.choices[component[part]]
            uniforms = attention.new_empty(len(old), rows.num_rows, dtype=torch.double).uniform_()
            new = rows.source[pick(rows, attention, uniforms)]
            labels = draw_from_urns(components.alpha, torch.cat([old, new], 1), borrowed[part])
            value[part, ~seen] = parameters.channel.draw(rows, new, labels[:, len(self.nodes) :])
        return value.view(*shape, len(nodes))

    def log_marginal(self, nodes: Tensor, labels: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log p(y_\kappa \mid y_\tau)` of labels ``(..., K)`` of a few distinct
        nodes ``(K,)``; ``-inf`` if an observed node has another label.

        :raises ValueError: for nodes that repeat, labels out of range, and more than 2²⁰ joint
            choices.
        """
        nodes = as_nodes(self.hood, nodes)
        labels = check_labels(self.hood, labels, len(nodes))
        check_label_range(self.hood.take(nodes), labels, self.num_classes)
        flat, known, parts = labels.reshape(-1, len(nodes)), self.observed[nodes], []
        place = self._place[nodes[known]]
        rows, sources = compact(self.hood.take(nodes[~known]))
        parameters = self.parameters.of_rows(rows)
        query = parameters.logits, flat[:, ~known], parameters.channel
        size, borrowed = enumeration.check_size(rows), self.num_classes**rows.num_rows
        size *= 1 if self.channel.keeps else borrowed * max(1, rows.num_rows)
        numbers = max(size, flat.numel(), len(sources) * self.num_classes)
        for part in blocks(len(self.components), numbers + len(self.nodes)):
            log_prob = self.components.log_weights[part, None]
            shown = of_components(self.components.shown, part)[..., None, place]
            agrees = (shown == flat[:, known]).all(-1).expand(len(log_prob), -1)
            if rows.num_rows:
                alpha = self.components.concentrations(sources, part)
                log_prob = log_prob + enumeration.log_marginal(rows, alpha, *query)
            parts.append(log_prob.expand_as(agrees).masked_fill(~agrees, -torch.inf).logsumexp(0))
        return torch.stack(parts).logsumexp(0).view(labels.shape[:-1])

    def predict(self, nodes: Tensor | None = None, method: Method = "marginal") -> Tensor:
        r"""``(K,)``: predicted labels of distinct nodes ``(K,)``, default all; observed ones stay.

        * ``"marginal"``: the mode of each node's own marginal.
        * ``"joint"``: the joint mode of a small set of nodes, over all :math:`C^K` labellings.
        * ``"sequential"``: node after node, the most certain first, each given all earlier ones.
          Linear in the edges and in the components: condition with some dozens of ``num_samples``.

        :raises ValueError: for another ``method``, ``"joint"`` with more than 2²⁰ labellings, and
            ``"sequential"`` if edges relabel.
        """
        nodes, labels, size = as_nodes(self.hood, nodes), self.labels.clone(), self.num_classes
        # Labels that differ between components have a mode too, jointly with others.
        joint = self.components.latent and method == "joint"
        free = nodes if joint else nodes[~self.observed[nodes]]
        if method not in ("marginal", "joint", "sequential"):
            raise ValueError(f"method must be 'marginal', 'joint' or 'sequential', got {method!r}")
        if method == "sequential" and not self.channel.keeps:
            raise ValueError("method='sequential' is for edges that keep labels: use 'marginal'")
        if method == "joint" and len(free):
            if size ** len(free) > enumeration.MAX_CHOICES:
                number = f"{size}^{len(free)} labellings of nodes"
                raise ValueError(f"method='joint' would compare {number}: use method='sequential'")
            every = enumeration.enumerate_labels(len(free), size, free.device)
            labels[free] = every[self.log_marginal(free, every).argmax()]
        elif len(free):
            certainty, labels[free] = self._marginals(self.hood.take(free)).max(-1)
            if method == "sequential":
                order = free[certainty.argsort(descending=True, stable=True)]
                labels[order] = self.components.predict_in_turn(order)
        return labels[nodes]

    @torch.no_grad()
    def counts(self, sets: Sequence[NodeSet], label: int, num_samples: int = 1000) -> Tensor:
        """``(num_samples, S)``: draws of how many nodes have a label, in sets of ids or masks.

        :raises ValueError: for a label out of range, and ``sets`` that are no sequence of sets.
        """
        check_integers(0, label=label)
        check_integers(1, num_samples=num_samples)
        if label >= self.num_classes:
            raise ValueError(f"label must lie in 0..{self.num_classes - 1}, got {label}")
        if len(sets) == 0 or as_tensor("sets", sets[0]).dim() == 0:
            raise ValueError("sets must be a sequence: give [nodes] for a single set of nodes")
        hood, (plain, provenance) = self.hood, untracked(*sets)
        members = torch.stack([as_set(s, hood.num_nodes, hood.device, "sets") for s in plain])
        union = members.any(0).nonzero()[:, 0]
        # Products of zeros and ones are exact in single precision, and linear in all members.
        inside = members[:, union].T.float().to_sparse()
        counts = []
        for part in blocks(num_samples, 4 * len(union)):
            hits = (self.sample((part.stop - part.start,), union) == label).float()
            counts.append(torch.sparse.mm(inside.T, hits.T).T.round().long())
        return track_provenance(torch.cat(counts), provenance)
