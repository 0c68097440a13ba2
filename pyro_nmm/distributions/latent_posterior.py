# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The posterior of a mixture whose labels are latent, given evidence."""

from __future__ import annotations

from torch import Tensor

from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, edge_evidence, latent_predictive
from pyro_nmm.ops.gibbs import run_chains


def sampled_posterior(
    hood: Neighborhood,
    logits: Tensor,
    rows: Neighborhood,
    terms: LatentTerms,
    draw: LatentDraw,
    weighted: bool,
    num_sweeps: int,
) -> Posterior:
    """
    From sequential draws: of equal weight, weighted, or where sweeps start.

    :param Neighborhood rows: the nodes with evidence, in the order of the draw.
    :param LatentTerms terms: of these rows, without batch.
    """
    alpha, log_weights, chains = terms.alpha[0], terms.alpha.new_zeros(len(draw.edges)), None
    if num_sweeps:
        chains = run_chains(rows, terms, draw, num_sweeps)
        draw = chains.draw
    elif weighted:
        log_weights = latent_predictive(rows, terms, draw)[0].sum(-1)
    choices = rows.source[draw.edges]
    components = Components(alpha, rows.nodes, draw.labels, choices, log_weights)
    return Posterior(hood, logits, components, weighted=weighted, chains=chains)


def exact_posterior(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, rows: Neighborhood, evidence: Tensor
) -> Posterior:
    """
    All choices with all labels.

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
    components = Components(alpha, small.nodes, labels, choices, (log_joint + found).flatten())
    return Posterior(hood, logits, components, is_exact=True)
