# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How a posterior takes labels: by sums over all choices, or by draws that go on."""

import torch
from torch import Tensor

from pyro_nmm.blocks import blocks
from pyro_nmm.distributions.components import Components, of_components
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.evidence import edge_evidence
from pyro_nmm.ops.stages import stages_of
from pyro_nmm.relabel import Channel


def extended(
    hood: Neighborhood,
    logits: Tensor,
    channel: Channel,
    old: Components,
    nodes: Tensor,
    labels: Tensor,
) -> Components:
    """
    All joint choices of the nodes of ``old``, itself exact, and of more nodes.

    :param Tensor nodes: ``(m,)`` new node ids, and ``labels`` theirs.
    """
    if old.latent:
        return _with_choices(hood, logits, old, nodes, labels)
    nodes, order = torch.cat([old.nodes, nodes]).sort()
    labels, rows = torch.cat([old.shown, labels])[order], hood.take(nodes)
    if not channel.keeps:
        evidence = channel.of(rows.edge).evidence(rows, labels, old.alpha)
        found = all_latents(old.alpha, logits, rows, evidence)
        found.shown = labels
        return found
    rows, sources = compact(rows)
    enumeration.check_size(rows, rows.num_rows)
    own = logits.index_select(0, rows.edge)
    choices, log_weights = enumeration.log_posterior(rows, old.alpha[sources], own, labels)
    return Components(old.alpha, nodes, labels, sources[choices], log_weights)


def all_latents(alpha: Tensor, logits: Tensor, rows: Neighborhood, evidence: Tensor) -> Components:
    """
    All joint choices of rows with all labels.

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


def _with_choices(
    hood: Neighborhood, logits: Tensor, old: Components, nodes: Tensor, labels: Tensor
) -> Components:
    """Every component with all joint choices of more nodes; needs no evidence of ``old`` again."""
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
    channel: Channel,
    old: Components,
    nodes: Tensor,
    labels: Tensor,
    weighted: bool,
) -> Components:
    """
    Choices of more nodes, drawn given the choices of every component.

    :param bool weighted: whether weights take the probability of the new labels.
    """
    choices, known, shown, log_weights = old.choices, old.labels, old.shown, old.log_weights
    # Borrowed labels differ between components if they are latent, or if edges relabel.
    own = known.dim() == 2 or not channel.keeps
    known = known.expand(len(choices), -1) if own else known
    order = torch.randperm(len(nodes), device=nodes.device)
    stages = stages_of(hood.take(nodes[order]), old.alpha, logits, labels[order], channel)
    drawn, borrowed, gains = [], [], []
    for part in blocks(len(choices), stages.numbers + len(old.nodes)):
        earlier = choices[part], of_components(known, part)
        counts = stages.counts(*earlier) if len(old.nodes) else None
        stage = stages.draw(counts, 0, len(nodes), len(choices[part]))
        edges = stage.edges[:, order.argsort()]
        drawn.append(stages.choices(edges))
        borrowed += [stages.borrowed(edges)] if own else []
        gains += [stage.log_labels().sum(-1)] if weighted else []
    shown = torch.cat([shown, labels.expand(*shown.shape[:-1], -1)], -1)
    labels = torch.cat([known, torch.cat(borrowed) if own else labels], -1)
    log_weights = log_weights + torch.cat(gains) if weighted else log_weights
    choices, nodes = torch.cat([choices, torch.cat(drawn)], 1), torch.cat([old.nodes, nodes])
    return Components(old.alpha, nodes, labels, choices, log_weights, shown)
