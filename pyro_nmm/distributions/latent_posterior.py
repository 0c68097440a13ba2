# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The posterior of a mixture whose labels are latent, given evidence."""

from __future__ import annotations

from torch import Tensor

from pyro_nmm.blocks import NUMBERS
from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.conditioning import all_latents
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms, latent_predictive
from pyro_nmm.ops.gibbs import run_chains

#: Of all chains, kept by default: means over them have errors of .016 at most if independent.
MOST_STATES = 1024


def sampled_posterior(
    hood: Neighborhood,
    logits: Tensor,
    rows: Neighborhood,
    terms: LatentTerms,
    draw: LatentDraw,
    weighted: bool,
) -> Posterior:
    """
    From sequential draws, of equal weight or weighted.

    :param Neighborhood rows: the nodes with evidence, in the order of the draw.
    :param LatentTerms terms: of these rows, without batch.
    """
    log_weights = terms.alpha.new_zeros(len(draw.edges))
    if weighted:
        log_weights = latent_predictive(rows, terms, draw)[0].sum(-1)
    choices = rows.source[draw.edges]
    components = Components(terms.alpha[0], rows.nodes, draw.labels, choices, log_weights)
    return Posterior(hood, logits, components, weighted=weighted)


def swept_posterior(
    hood: Neighborhood,
    logits: Tensor,
    rows: Neighborhood,
    terms: LatentTerms,
    draw: LatentDraw,
    num_sweeps: int,
    num_states: int | None,
) -> Posterior:
    """From states of chains that start from sequential draws; every state is a component."""
    num_chains, later = len(draw.edges), num_sweeps - num_sweeps // 2
    if num_states is None:
        num_states = min(MOST_STATES, NUMBERS // max(1, rows.num_rows))
    num_kept = min(later, max(1, num_states // num_chains))
    chains, states = run_chains(rows, terms, draw, num_sweeps, num_kept)
    posterior = sampled_posterior(hood, logits, rows, terms, states, weighted=False)
    posterior.chains = chains
    return posterior


def exact_posterior(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, rows: Neighborhood, evidence: Tensor
) -> Posterior:
    """
    From all choices with all labels.

    :param Neighborhood rows: the nodes with evidence.
    :param Tensor evidence: ``(num_rows, C)`` or ``(num_edges, C)`` of these rows.
    """
    return Posterior(hood, logits, all_latents(alpha, logits, rows, evidence), is_exact=True)
