# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel, and labels that are latent: what is answered, and what is refused."""

import networkx as nx
import pytest
import torch
from graphs import labellings, parameters, to_hood
from torch.nn.functional import one_hot

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture

#: Two nodes that see each other; the edge between them flips labels.
PAIR = Neighborhood(torch.tensor([[0, 1], [1, 0]]), 2)
ALPHA = torch.tensor([[3.0, 1.0], [1.0, 5.0]], dtype=torch.double)
FLIP = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 1]])
KINDS = {"permutations": FLIP, "matrices": one_hot(FLIP, 2).double()}


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_of_nodes_is_refused(kind):
    """It was read as that of the borrowed label: .0556 for label 1 of node 0, in truth .0129."""
    mix = NeighborMixture(PAIR, ALPHA, torch.zeros(4), KINDS[kind])
    evidence = torch.tensor([[0.0, -3.0], [0.0, 0.0]])
    truth = (mix.log_prob(labellings(2)) + evidence[0, labellings(2)[:, 0]]).softmax(0)
    plain = NeighborMixture(PAIR, ALPHA, torch.zeros(4)).latents(evidence).posterior()
    assert (plain.marginals()[0, 1] - truth[2:].sum()).abs() > 0.04
    for wrong in (evidence, evidence.expand(3, 2, 2)):
        with pytest.raises(ValueError, match=r"evidence .* nodes' own labels, .* use condition"):
            mix.latents(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_posterior_of_borrowed_labels_is_refused(kind):
    """It gave .4639 for label 0 of the other node, in truth .1902: that of condition."""
    mix = NeighborMixture(PAIR, ALPHA, torch.zeros(4), KINDS[kind])
    y, observed = torch.tensor([0, -1]), torch.tensor([True, False])
    found = [mix.latents(torch.zeros(4, 2), observed)]
    if kind == "matrices":
        found.append(mix.in_order(y, observed).expand(()))
    for q in found:
        for options in ({}, {"num_samples": 3}, {"num_samples": 3, "num_sweeps": 2}):
            with pytest.raises(ValueError, match=r"borrowed labels.*NeighborMixture\.condition"):
                q.posterior(**options)
    probs = mix.log_prob(labellings(2)).exp()[:2]
    torch.testing.assert_close(mix.condition(y, observed).marginals()[1], probs / probs.sum())


def test_evidence_of_edges_stays():
    """
    With the evidence that the refusal names for hints at nodes' own labels, the estimate is the
    probability of the hints, a sum over all labels; evidence of edges alone keeps its posterior.
    """
    hood = to_hood(nx.path_graph(3))
    torch.manual_seed(0)
    relabel = torch.rand(hood.num_edges, 2, 2).softmax(-1)
    mix = NeighborMixture(hood, *parameters(hood, 2), relabel)
    hints = torch.randn(3, 2)
    evidence = (relabel.log() + hints[hood.target][:, None]).logsumexp(-1)
    y = labellings(3)
    truth = (mix.log_prob(y) + hints[torch.arange(3), y].sum(-1)).logsumexp(0)
    found = mix.latents(evidence).log_likelihood(num_particles=20_000)
    assert (found - truth).abs() < 0.03
    q = EvidenceConditional(hood, mix.alpha, mix.logits, evidence)

    assert q.posterior().marginals().isfinite().all()
