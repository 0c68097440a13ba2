# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of hidden fields: by EM, by SVI, and without a graph."""

import itertools
import math

import pyro
import pytest
import torch
from emissions import EMISSIONS
from graphs import labellings, parameters, shared_sources, star
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from torch_geometric.utils import add_self_loops

from pyro_nmm import Neighborhood, NeighborMixture, sources
from pyro_nmm.guides import AutoNMM
from pyro_nmm.models import Annotators, FieldPrior, NormalEmission, fit_field, hidden_field
from pyro_nmm.models.hidden import mixture_em
from pyro_nmm.models.hidden.em import FieldChains
from pyro_nmm.ops.entries import Draw, evidence_entries
from pyro_nmm.ops.sweeps import left_out, sweeps


@pytest.mark.parametrize("by_edge", [False, True])
@pytest.mark.parametrize("hood", [shared_sources(), star(3)])
def test_left_out_rows(hood, by_edge):
    """Row by row, in plain Python."""
    alpha, logits = parameters(hood, 3)
    evidence = torch.randn(2, hood.num_edges if by_edge else hood.num_nodes, 3)
    places = [range(*ends) for ends in itertools.pairwise(hood.ptr.tolist())]
    edges = torch.tensor([[place[torch.randint(len(place), ())] for place in places]] * 2)
    labels = torch.randint(3, edges.shape)
    attention = hood.softmax(logits)
    terms = evidence_entries(hood.log_softmax(logits)[None], alpha[None], evidence)
    found = left_out(hood, terms, Draw(edges, labels))
    for b, i in itertools.product(range(2), range(hood.num_nodes)):
        counts = alpha.clone()
        for other in set(range(hood.num_nodes)) - {i}:
            counts[hood.source[edges[b, other]], labels[b, other]] += 1
        total = 0.0
        for e in places[i]:
            row, likelihood = counts[hood.source[e]], evidence[b, e if by_edge else i].exp()
            total = total + attention[e] * (row / row.sum() * likelihood).sum()
        assert found[b, i].item() == pytest.approx(total.log().item())


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
def test_left_out_rows_in_single_precision(dtype):
    """Rows alone at their sources: the prior is left, however small beside the count of one."""
    values = torch.zeros(1, 1), torch.tensor([[[3e-8, 1e-8]]]), torch.tensor([[[0.0, -1.0]]])
    terms, one = evidence_entries(*(x.to(dtype) for x in values)), torch.zeros(1, 1).long()
    found = left_out(Neighborhood(torch.zeros(2, 1).long(), 1), terms, Draw(one, one)).exp()
    assert found.item() == pytest.approx(0.75 + 0.25 * math.exp(-1), rel=1e-6)


def simulated(name, truth):
    if name == "features":
        return 2.0 * truth[:, None] + torch.randn(len(truth), 2)
    wrong = torch.rand(len(truth), 4) < torch.tensor([0.1, 0.2, 0.3, 0.4])
    return torch.where(wrong, 1 - truth[:, None], truth[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers", "features"])
def test_em_and_svi_agree(name):
    """On parameters and labels, the same program being fitted."""
    truth, hood = torch.arange(256) % 16 // 8, sources.grid(16, 16, stride=4)
    emission, data = EMISSIONS[name][0], simulated(name, truth)
    field = fit_field(emission, hood, data, num_starts=1)
    data = emission.check(hood, data)
    prior, start = FieldPrior(2), emission.start(data, hood)

    def values():
        return {k: pyro.param(k, start[k], emission.support[k]) for k in start}

    def model():
        pyro.module("prior", prior)
        return hidden_field(hood, prior, emission, values(), data)

    guide = AutoNMM(model)
    elbo = TraceGraph_ELBO(8, vectorize_particles=True, max_plate_nesting=0)
    svi, ends = SVI(model, guide, Adam({"lr": 0.1}), elbo), []
    for _ in range(100):
        svi.step()
        ends.append(next(iter(values().values())).detach().clone())
    probs = guide.posterior()["c"].marginals()
    key, ours = next(iter(field.values.items()))
    theirs = torch.stack(ends[-20:]).mean(0)  # because the rate stays what it is
    if (probs.argmax(-1) == field.predict()).double().mean() < 0.5:  # labels have no names
        assert name == "features"
        probs, theirs = probs.flip(-1), theirs.flip(0)
    # The bound is looser where sources are shared more, so that SVI finds a larger kappa.
    assert (probs - field.probs).abs().mean() < 0.05, key
    torch.testing.assert_close(ours, theirs, atol=0.08, rtol=0.05)
    for result in (field.probs, probs):
        right = (result.argmax(-1) == truth).double().mean().item()
        assert max(right, 1 - right) > 0.9


def squares(side, radius, spacing):
    """Places on a square, sources, and squared distances to them."""
    xy = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    hood, places = sources.points(xy, radius=radius, spacing=spacing)
    return xy, hood, (places[hood.source] - xy[hood.row]).square().sum(-1)


@pytest.mark.slow
def test_learned_range_and_kappa():
    """
    Sources far away count for less where labels vary over short distances. From flat attention most
    fits turn to those at the opposite corner of a square, which has the same label.
    """
    xy, hood, far = squares(18.0, 6.0, 3.0)
    truth = ((xy[:, 0] // 6 + xy[:, 1] // 6) % 2).long()
    data = 3.0 * truth[:, None] + torch.randn(324, 1)
    options = {"num_starts": 3, "num_steps": 60}
    near, other = (fit_field(NormalEmission(2), hood, data, x, **options) for x in (-far, far))
    assert near.prior.weight.item() > 0.025 > -0.025 > other.prior.weight.item()
    assert near.prior.log_kappa.exp() < 0.2
    assert near.score > fit_field(NormalEmission(2), hood, data, **options).score


def test_units_of_edge_features():
    """Features in any unit give the same fit, in that unit."""
    xy, hood, far = squares(12.0, 4.0, 2.0)
    data, found = 3.0 * (xy[:, :1] >= 6) + torch.randn(144, 1), []
    for unit in (1.0, 1e-4, 1e4):
        pyro.set_rng_seed(0)
        options = {"num_starts": 1, "num_steps": 20, "num_draws": 4}
        found.append(
            unit * fit_field(NormalEmission(2), hood, data, unit * far, **options).prior.weight
        )
    torch.testing.assert_close(found[1:], found[:1] * 2)


def test_a_mixture_without_a_graph():
    """Its likelihood rises, and labels of nodes are those of the emission alone."""
    truth, emission = torch.arange(300) % 3, Annotators(3)
    wrong = torch.rand(300, 5) < 0.2
    answers = torch.where(wrong, torch.randint(3, (300, 5)), truth[:, None])
    start, bounds = emission.start(answers, sources.grid(10, 30, stride=5)), []
    probs = mixture_em(emission, answers, start)[1]
    for steps in range(1, 8):
        found, joint = mixture_em(emission, answers, start, steps)
        log_joint = emission.log_prob(found, answers) + joint.mean(0).log()
        bounds.append(log_joint.logsumexp(-1).sum() + emission.log_prior(found, answers))
    assert (torch.stack(bounds).diff() > -0.05).all()
    assert bounds[-1] > bounds[0] + 0.2  # the first step has most of it
    assert (probs.argmax(-1) == truth).double().mean() > 0.95


def test_gradient_is_that_of_the_evidence():
    """Fisher's identity: the mean gradient over labels drawn by sweeps is the enumerated one."""
    edges = add_self_loops(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]))[0]
    hood, emission = Neighborhood(edges, 4), Annotators(2)
    x, answers = torch.randn(10, 2), torch.tensor([[0, 1], [0, 0], [1, 1], [1, -1]])
    prior = FieldPrior(2, x)
    with torch.no_grad():
        prior.share_scores.copy_(torch.tensor([0.4, -0.4]))
        prior.scaled_weight.fill_(0.5)
    values = {"confusion": torch.tensor([[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.1, 0.9]]])}
    chains = FieldChains(emission, hood, answers, x, num_chains=400)
    labels = labellings(4)
    log_data = chains.evidence(values)[torch.arange(4), labels].sum(1)
    log_joint = NeighborMixture(hood, *prior(hood, x)).log_prob(labels) + log_data
    bound = log_joint.logsumexp(0) + prior.log_prior()
    exact = torch.autograd.grad(bound, list(prior.parameters()))
    terms, found = chains.terms(prior, values), []
    draw = chains.first(terms)
    for step in range(60):
        draw = sweeps(hood, terms, draw, 3).draw
        if step >= 10:
            loss = -4 * chains.loss(prior, draw)
            found.append(torch.autograd.grad(loss, list(prior.parameters())))
    for place, expected in enumerate(exact):
        draws = torch.stack([each[place] for each in found])
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - expected).abs() < 4 * error + 1e-3).all()


def test_edges_of_a_field_do_not_relabel():
    hood, x = Neighborhood.grid(2, 2), torch.randn(4, 1)
    values = {"mean": torch.tensor([[0.0], [1.0]]), "variance": torch.ones(2, 1)}

    def prior(hood):
        alpha, logits = torch.ones(4, 2), torch.zeros(hood.num_edges)
        return alpha, logits, torch.arange(2).expand(hood.num_edges, 2)

    with pytest.raises(ValueError, match="prior must return alpha and logits alone"):
        hidden_field(hood, prior, NormalEmission(2), values, x)
