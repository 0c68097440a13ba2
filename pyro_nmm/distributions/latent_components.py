# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The components of a posterior given evidence: all of them, draws, or states of Gibbs chains."""

from torch import Tensor

from pyro_nmm.blocks import NUMBERS
from pyro_nmm.distributions.components import Components
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, edge_evidence, latent_predictive
from pyro_nmm.ops.gibbs import Chains, run_chains

#: States of all chains that are kept by default. Means over them have standard errors of .016 at
#: most if they are independent.
MOST_STATES = 1024


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


def drawn_latents(
    rows: Neighborhood, terms: LatentTerms, draw: LatentDraw, weighted: bool
) -> Components:
    """
    Sequential draws, or states of chains.

    :param Neighborhood rows: the nodes with evidence, in the order of the draw.
    :param LatentTerms terms: of these rows, without batch.
    """
    log_weights = terms.alpha.new_zeros(len(draw.edges))
    if weighted:
        log_weights = latent_predictive(rows, terms, draw)[0].sum(-1)
    choices = rows.source[draw.edges]
    return Components(terms.alpha[0], rows.nodes, draw.labels, choices, log_weights)


def swept_latents(
    rows: Neighborhood,
    terms: LatentTerms,
    draw: LatentDraw,
    num_sweeps: int,
    num_states: int | None,
) -> tuple[Components, Chains]:
    """States of chains that start from sequential draws, at even distances in the second half."""
    num_chains, later = len(draw.edges), num_sweeps - num_sweeps // 2
    if num_states is None:
        num_states = min(MOST_STATES, NUMBERS // max(1, rows.num_rows))
    num_kept = min(later, max(1, num_states // num_chains))
    chains, states = run_chains(rows, terms, draw, num_sweeps, num_kept)
    return drawn_latents(rows, terms, states, weighted=False), chains
