# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The posterior of a mixture whose labels are latent, given evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Size

from pyro_nmm.distributions.components import Components
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.ops import enumeration
from pyro_nmm.ops.compact import compact
from pyro_nmm.ops.evidence import LatentTerms, edge_evidence, latent_predictive
from pyro_nmm.ops.gibbs import run_chains
from pyro_nmm.provenance import untracked

if TYPE_CHECKING:
    from pyro_nmm.distributions.evidence_conditional import EvidenceConditional


@torch.no_grad()
def latent_posterior(
    q: EvidenceConditional, num_samples: int | None, weighted: bool, num_sweeps: int
) -> Posterior:
    """See :meth:`EvidenceConditional.posterior`."""
    if num_samples is None:
        return _enumerated(q)
    terms, draw = q._flat(Size([1])), q._draw(Size([num_samples]))
    log_weights, chains = terms.alpha.new_zeros(num_samples), None
    if num_sweeps:
        chains = run_chains(q.rows, LatentTerms(*untracked(*terms)[0]), draw, num_sweeps)
        draw = chains.draw
    elif weighted:
        log_weights = untracked(latent_predictive(q.rows, terms, draw)[0].sum(-1))[0][0]
    (alpha, logits), _ = untracked(q.alpha.detach(), q.logits.detach())
    choices = q.rows.source[draw.edges]
    components = Components(alpha, q.rows.nodes, draw.labels, choices, log_weights)
    return Posterior(q.hood, logits, components, weighted=weighted, chains=chains)


def _enumerated(q: EvidenceConditional) -> Posterior:
    """All choices with all labels."""
    rows, sources = compact(q.observed_rows)
    enumeration.check_size(rows, q.num_classes**rows.num_rows * rows.num_rows)
    edges = enumeration.enumerate_choices(rows)
    labels = enumeration.enumerate_labels(rows.num_rows, q.num_classes, rows.device)
    plain, _ = untracked(q.alpha.detach(), q.logits.detach(), q.evidence.detach())
    alpha, logits, evidence = plain
    own = logits.index_select(0, rows.edge)
    log_joint = enumeration.log_joint(rows, alpha[sources], own, labels, edges)
    evidence = evidence[rows.nodes if len(evidence) == q.hood.num_nodes else rows.edge]
    found = edge_evidence(rows, evidence[None])[0][edges[None], labels[:, None]].sum(-1)
    shape = *log_joint.shape, rows.num_rows
    choices = sources[rows.source[edges]].expand(shape).flatten(0, 1)
    labels = labels[:, None].expand(shape).flatten(0, 1)
    log_weights = (log_joint + found).flatten()
    components = Components(alpha, rows.nodes, labels, choices, log_weights)
    return Posterior(q.hood, logits, components, is_exact=True)
