# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The posterior of a mixture whose labels are latent, given evidence."""

from __future__ import annotations

from torch import Tensor

from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.conditioning import all_latents
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, latent_predictive
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
    From all choices with all labels.

    :param Neighborhood rows: the nodes with evidence.
    :param Tensor evidence: ``(num_rows, C)`` or ``(num_edges, C)`` of these rows.
    """
    return Posterior(hood, logits, all_latents(alpha, logits, rows, evidence), is_exact=True)
