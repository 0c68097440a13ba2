# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Weighted choices and labels of observed nodes, which a posterior is a mixture of."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm.blocks import blocks
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.neighborhood import Neighborhood, compact
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.counts import Places
from pyro_nmm.ops.entries import edge_evidence, entries_of, terms_of
from pyro_nmm.ops.sampling import draw_entries, uniforms_of


class Components:
    """``T`` weighted choices ``(T, n)`` of the observed nodes ``(n,)``, and the labels that they
    borrowed, ``(n,)``, or ``(T, n)`` if components differ. ``shown`` are the nodes' own labels."""

    def __init__(
        self,
        parameters: Parameters,
        nodes: Tensor,
        labels: Tensor,
        choices: Tensor,
        log_weights: Tensor,
        shown: Tensor | None = None,
    ) -> None:
        self.parameters, self.alpha = parameters, parameters.alpha
        self.nodes, self.labels, self.choices = nodes, labels, choices
        self.shown = labels if shown is None else shown
        self.log_weights = log_weights.log_softmax(0)

    @classmethod
    def prior(cls, parameters: Parameters) -> "Components":
        none = torch.empty(0, dtype=torch.long, device=parameters.alpha.device)
        return cls(parameters, none, none, none[None], parameters.alpha.new_zeros(1))

    def __len__(self) -> int:
        return len(self.log_weights)

    @property
    def weights(self) -> Tensor:
        """``(T,)``, of sum one."""
        return self.log_weights.exp()

    @property
    def latent(self) -> bool:
        """Whether components differ in the labels of the nodes."""
        return self.shown.dim() == 2

    def drawn(self, size: int) -> Tensor:
        """``(size,)`` components, drawn by their weight."""
        if len(self) == 1:
            return torch.zeros(size, dtype=torch.long, device=self.nodes.device)
        sums = self.log_weights.double().exp().cumsum(0)
        places = torch.rand(size, dtype=torch.double, device=self.nodes.device) * sums[-1]
        # To the right: a component of weight zero ends where it begins.
        return torch.searchsorted(sums, places, right=True).clamp(max=len(sums) - 1)

    def resampled(self, size: int) -> "Components":
        """So many components of equal weight, drawn by their weight."""
        some, equal = self.drawn(size), self.log_weights.new_zeros(size)
        labels, shown = (of_components(table, some) for table in (self.labels, self.shown))
        return Components(self.parameters, self.nodes, labels, self.choices[some], equal, shown)

    def probs(self) -> Tensor:
        """``(n, C)``: the weight of every label of the observed nodes."""
        if not self.latent:
            return one_hot(self.shown, self.alpha.shape[-1]).to(self.alpha)
        probs = self.alpha.new_zeros(self.alpha.shape[-1], len(self.nodes))
        return probs.scatter_add_(0, self.shown, self.weights[:, None].expand_as(self.shown)).T

    def concentrations(self, nodes: Tensor, part: slice = slice(None)) -> Tensor:
        r"""``(T, K, C)``: :math:`\alpha_j + s_j` of nodes. Cost: :math:`O(T (n \log K + K C))`."""
        places, num_classes = Places(nodes), self.alpha.shape[-1]
        place, known = places.find(self.choices[part])
        counts = self.alpha.new_zeros(len(place), len(places.keys) * num_classes)
        index = place * num_classes + of_components(self.labels, part)
        counts.scatter_add_(1, index, known.to(counts.dtype))
        return self.alpha[nodes] + counts.unflatten(1, (-1, num_classes))[:, places.place]

    def mean(self) -> Tensor:
        r"""``(N, C)``: the weighted mean of :math:`(\alpha_j + s_j) / (A_j + S_j)`."""
        size, num_classes = self.alpha.shape
        # In double precision: the weight of components that did not choose a node is a difference.
        weights, total = self.log_weights.double().exp(), self.alpha.sum(-1).double()
        chosen, changed = torch.zeros_like(total), torch.zeros_like(total)
        added = torch.zeros_like(self.alpha, dtype=torch.double).flatten()
        for part in blocks(len(weights), 4 * len(self.nodes)):
            choices, weight = self.choices[part], weights[part]
            keys = torch.arange(len(weight), device=choices.device)[:, None] * size + choices
            key, place, count = keys.unique(return_inverse=True, return_counts=True)
            node, part_weight = key % size, weight[key.div(size, rounding_mode="floor")]
            share = part_weight / (total[node] + count)
            chosen.index_add_(0, node, part_weight)
            changed.index_add_(0, node, share)
            index = choices * num_classes + of_components(self.labels, part)
            added.index_add_(0, index.flatten(), share[place].flatten())
        scale = (weights.sum() - chosen).clamp(min=0) / total + changed
        return added.view_as(self.alpha).addcmul_(self.alpha, scale[:, None]).to(self.alpha.dtype)

    def extended(self, nodes: Tensor, labels: Tensor) -> "Components":
        """All joint choices of these nodes and of more ``(m,)``, if components are all choices."""
        every, parameters = torch.cat([self.nodes, nodes]), self.parameters
        if not self.latent and not parameters.channel.keeps:
            every, order = every.sort()
            labels = torch.cat([self.shown, labels])[order]
            whole = parameters.of_rows(parameters.hood.take(every))
            evidence = whole.channel.evidence(whole.hood, labels)
            components = all_latents(parameters, whole.hood, evidence)
            components.shown = labels
            return components
        rows, sources = compact(parameters.hood.take(nodes))
        number = enumeration.check_size(rows, len(self) * len(every))
        numbers = number + len(every) + len(sources) * self.alpha.shape[-1]
        edges, logits = enumeration.enumerate_choices(rows), parameters.of_rows(rows).logits
        gains = []
        for part in blocks(len(self), numbers):
            alpha = self.concentrations(sources, part)
            gains.append(enumeration.log_joint(rows, alpha, logits, labels[None], edges)[:, 0])
        log_weights = self.log_weights[:, None] + torch.cat(gains)
        again = torch.arange(len(self), device=nodes.device).repeat_interleave(number)
        new = sources[rows.source[edges]].repeat(len(self), 1)
        choices, known = torch.cat([self.choices[again], new], 1), of_components(self.labels, again)
        labels = torch.cat([known, labels.expand(*known.shape[:-1], -1)], -1)
        return Components(parameters, every, labels, choices, log_weights.flatten())

    def continued(self, nodes: Tensor, labels: Tensor, weighted: bool) -> "Components":
        """Choices of more nodes, drawn given each component; ``weighted`` by the new labels."""
        # Borrowed labels differ between components if they are latent, or if edges relabel.
        differ = self.labels.dim() == 2 or not self.parameters.channel.keeps
        known = self.labels.expand(len(self), -1) if differ else self.labels
        choices, borrowed, gains = self.choices_of(nodes, labels, weighted)
        shown = torch.cat([self.shown, labels.expand(*self.shown.shape[:-1], -1)], -1)
        labels = torch.cat([known, borrowed if differ else labels], -1)
        log_weights = self.log_weights if gains is None else self.log_weights + gains
        choices = torch.cat([self.choices, choices], 1)
        nodes = torch.cat([self.nodes, nodes])
        return Components(self.parameters, nodes, labels, choices, log_weights, shown)

    def choices_of(
        self, nodes: Tensor, labels: Tensor, weighted: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(T, m)`` twice: choices of more nodes drawn given each component, and the labels that
        they borrow; ``(T,)`` sums of their terms ``f`` if ``weighted``."""
        order = torch.randperm(len(nodes), device=nodes.device)
        part = self.parameters.of_rows(self.parameters.hood.take(nodes[order]))
        y = labels[order]
        data = y if part.channel.keeps else part.channel.evidence(part.hood, y)
        log_attention = part.hood.log_softmax(part.logits)[None]
        rows, sources = compact(part.hood)
        chosen, borrowed, gains = [], [], []
        numbers = len(sources) * self.alpha.shape[-1] + rows.num_edges + len(self.nodes)
        for block in blocks(len(self), numbers):
            none = not len(self.nodes)  # then all components have the prior's
            alpha = self.alpha[sources][None] if none else self.concentrations(sources, block)
            some = entries_of(rows, alpha, log_attention, data[None])
            uniforms = uniforms_of(rows, block.stop - block.start)
            draw = draw_entries(rows, some, uniforms)
            chosen.append(sources[rows.source[draw.edges]])
            borrowed.append(draw.labels)
            if weighted:
                gains.append(terms_of(rows, some, draw).sum(-1))
        place, sums = order.argsort(), torch.cat(gains) if weighted else None
        return torch.cat(chosen)[:, place], torch.cat(borrowed)[:, place], sums

    @torch.no_grad()
    def predict_in_turn(self, order: Tensor) -> Tensor:
        r"""``(n,)``: labels of unobserved nodes in an order, by the rule at the end of the paper's
        section 3.6: each is the mode of :math:`p(y_i \mid y_\tau, \hat y_{<i})`, and every
        component draws a choice for it. Cost: :math:`O(T E C)`, and memory :math:`O(T M C)`."""
        from pyro_nmm.compiled.loops import predict

        part = self.parameters.of_rows(self.parameters.hood.take(order))
        rows, sources = compact(part.hood)
        size = len(sources), len(self), part.num_classes + 1
        counts = torch.zeros(size, dtype=torch.int32, device=order.device)
        place, occurs = Places(sources).find(self.choices)
        labels = self.labels.expand_as(place)[occurs]
        first = (place[occurs] * size[1] + occurs.nonzero()[:, 0]) * size[2]
        index = torch.cat([first + labels, first + size[2] - 1])
        counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
        given = part.attention, self.alpha[sources], self.weights
        return predict(rows, *given, uniforms_of(rows, len(self)), counts)


def of_components(labels: Tensor, part: slice | Tensor) -> Tensor:
    """Labels of some components; labels ``(n,)`` that all components share as they are."""
    return labels[part] if labels.dim() == 2 else labels


def all_latents(parameters: Parameters, rows: Neighborhood, evidence: Tensor) -> Components:
    """All joint choices and labels of rows with evidence of their nodes or of their edges."""
    num_classes, (small, sources) = parameters.num_classes, compact(rows)
    enumeration.check_size(small, num_classes**small.num_rows * small.num_rows)
    edges = enumeration.enumerate_choices(small)
    labels = enumeration.enumerate_labels(small.num_rows, num_classes, small.device)
    given = parameters.alpha[sources], parameters.logits.index_select(0, small.edge)
    log_joint = enumeration.log_joint(small, *given, labels, edges)
    terms = edge_evidence(small, evidence[None])[0][edges[None], labels[:, None]].sum(-1)
    shape = *log_joint.shape, small.num_rows
    choices = sources[small.source[edges]].expand(shape).flatten(0, 1)
    labels = labels[:, None].expand(shape).flatten(0, 1)
    return Components(parameters, small.nodes, labels, choices, (log_joint + terms).flatten())
