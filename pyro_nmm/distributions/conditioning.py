# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How a posterior takes labels: by sums over all choices, or by draws that go on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_nmm.blocks import blocks
from pyro_nmm.channel import Channel
from pyro_nmm.distributions.components import Components
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.evidence import edge_evidence
from pyro_nmm.ops.latent_stages import stages_of


def all_components(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    nodes: Tensor,
    labels: Tensor,
    channel: Channel,
) -> Components:
    """
    All joint choices of nodes with known labels.

    :param Tensor alpha: ``(N, C)``.
    :param Tensor nodes: ``(n,)`` ascending node ids.
    :param Tensor labels: ``(n,)``, what they show.
    """
    rows = hood.take(nodes)
    if not channel.keeps:
        evidence = channel.of(rows.edge).evidence(rows, labels, alpha)
        return all_latents(alpha, logits, rows, evidence)
    rows, sources = compact(rows)
    enumeration.check_size(rows, rows.num_rows)
    own = logits.index_select(0, rows.edge)
    choices, log_weights = enumeration.log_posterior(rows, alpha[sources], own, labels)
    return Components(alpha, nodes, labels, sources[choices], log_weights)


def all_latents(alpha: Tensor, logits: Tensor, rows: Neighborhood, evidence: Tensor) -> Components:
    """
    All joint choices with all labels.

    :param Neighborhood rows: the nodes with evidence.
    :param Tensor evidence: ``(num_rows, C)`` or ``(num_edges, C)`` of these rows.
    """
    num_classes, (small, sources) = alpha.shape[-1], compact(rows)
    enumeration.check_size(small, num_classes**small.num_rows * small.num_rows)
    edges = enumeration.enumerate_choices(small)
    labels = enumeration.enumerate_labels(small.num_rows, num_classes, small.device)
    own = logits.index_select(0, small.edge)
    log_joint = enumeration.log_joint(small, alpha[sources], own, labels, edges)
    found = edge_evidence(small, evidence[None])[0][edges[None], labels[:, None]].sum(-1)
    shape = *log_joint.shape, small.num_rows
    choices = sources[small.source[edges]].expand(shape).flatten(0, 1)
    labels = labels[:, None].expand(shape).flatten(0, 1)
    return Components(alpha, small.nodes, labels, choices, (log_joint + found).flatten())


def extended(
    hood: Neighborhood, logits: Tensor, old: Components, nodes: Tensor, labels: Tensor
) -> Components:
    """
    Every component with all joint choices of more nodes: exact where ``old`` are all there are, and
    without another look at the evidence that they come from.

    :param Components old: with latent labels.
    :param Tensor nodes: ``(m,)`` new node ids, and ``labels`` theirs.
    """
    rows, sources = compact(hood.take(nodes))
    numbers = len(old.nodes) + len(nodes) + len(sources) * old.alpha.shape[-1]
    number = enumeration.check_size(rows, len(old) * (len(old.nodes) + len(nodes)))
    edges, own = enumeration.enumerate_choices(rows), logits.index_select(0, rows.edge)
    gains = []
    for part in blocks(len(old), number + numbers):
        alpha = old.concentrations(sources, part)
        gains.append(enumeration.log_joint(rows, alpha, own, labels[None], edges)[:, 0])
    log_weights = old.log_weights[:, None] + torch.cat(gains)
    again = torch.arange(len(old), device=nodes.device).repeat_interleave(number)
    new = sources[rows.source[edges]].repeat(len(old), 1)
    choices = torch.cat([old.choices[again], new], 1)
    labels = torch.cat([old.labels[again], labels.expand(len(again), -1)], 1)
    nodes = torch.cat([old.nodes, nodes])
    return Components(old.alpha, nodes, labels, choices, log_weights.flatten())


def continued(
    hood: Neighborhood,
    logits: Tensor,
    old: Components,
    nodes: Tensor,
    labels: Tensor,
    num_samples: int | None,
    weighted: bool,
    channel: Channel,
) -> Components:
    """
    Choices of more nodes, drawn given those of every component.

    :param Tensor nodes: ``(m,)`` new node ids, and ``labels`` what they show.
    :param int num_samples: draw so many components first, by their weight.
    :param bool weighted: whether weights take the probability of the new labels.
    """
    choices, known, log_weights = old.choices, old.labels, old.log_weights
    if num_samples is not None:
        some = old.drawn(num_samples)
        choices, log_weights = choices[some], log_weights.new_zeros(num_samples)
        known = known[some] if old.latent else known
    # Components differ in what nodes borrowed if that is latent, or if edges relabel.
    own = old.latent or not channel.keeps
    known = known.expand(len(choices), -1) if own else known
    order = torch.randperm(len(nodes), device=nodes.device)
    stages = stages_of(hood.take(nodes[order]), old.alpha, logits, labels[order], channel)
    drawn, borrowed, gains = [], [], []
    for part in blocks(len(choices), stages.numbers + len(old.nodes)):
        counts: Any = None
        if len(old.nodes):
            counts = stages.counts(choices[part], known[part] if own else known)
        stage = stages.draw(counts, 0, len(nodes), len(choices[part]))
        edges = stage.edges[:, order.argsort()]
        drawn.append(stages.choices(edges))
        borrowed += [stages.borrowed(edges)] if own else []
        gains += [stage.log_labels().sum(-1)] if weighted else []
    labels = torch.cat([known, torch.cat(borrowed) if own else labels], -1)
    log_weights = log_weights + torch.cat(gains) if weighted else log_weights
    choices, nodes = torch.cat([choices, torch.cat(drawn)], 1), torch.cat([old.nodes, nodes])
    return Components(old.alpha, nodes, labels, choices, log_weights)


def check_agreement(posterior, y: Tensor, observed: Tensor) -> None:
    """Nodes whose labels are known already must keep them."""
    both = observed & posterior.observed
    if posterior.latent and both.any():
        raise ValueError(
            f"observed selects node {int(both.nonzero()[0])}, which has evidence already: give "
            f"the mixture all evidence at once, 0 and -inf for a known label"
        )
    wrong = both & (y != posterior.labels)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        raise ValueError(
            f"y holds label {y[node].item()} at node {node}, which is known to have label "
            f"{posterior.labels[node].item()}: mask that node out with observed"
        )
