# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of hidden fields: by EM, by SVI, and without a graph."""

import itertools
import math
from functools import partial

import pyro
import pytest
import torch
from emissions import EMISSIONS
from graphs import parameters, shared_sources, star
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam

from pyro_nmm import Neighborhood, sources
from pyro_nmm.guides import HiddenFieldGuide
from pyro_nmm.models import Annotators, FieldPrior, NormalEmission, fit_field, leave_one_out
from pyro_nmm.models.hidden import mixture_em
from pyro_nmm.ops.entries import Draw, evidence_entries
from pyro_nmm.ops.gibbs import left_out


def test_left_out_rows():
    """Row by row, in plain Python."""
    for hood in (shared_sources(), star(3)):
        size = 3
        alpha, logits = parameters(hood, size)
        for each in (hood.num_nodes, hood.num_edges):
            evidence = torch.randn(2, each, size)
            edges = torch.stack([
                torch.stack([torch.randint(a, b, ()) for a, b in itertools.pairwise(hood.ptr)])
                for _ in range(2)
            ])  # fmt: skip
            labels = torch.randint(size, edges.shape)
            terms = evidence_entries(hood.log_softmax(logits)[None], alpha[None], evidence)
            found = left_out(hood, terms, Draw(edges, labels))
            attention = hood.softmax(logits)
            for b, i in itertools.product(range(2), range(hood.num_nodes)):
                counts = alpha.clone()
                for other in range(hood.num_nodes):
                    if other != i:
                        counts[hood.source[edges[b, other]], labels[b, other]] += 1
                total = 0.0
                for e in range(hood.ptr[i], hood.ptr[i + 1]):
                    row = counts[hood.source[e]]
                    likelihood = evidence[b, i if each == hood.num_nodes else e].exp()
                    total = total + attention[e] * (row / row.sum() * likelihood).sum()
                assert found[b, i].item() == pytest.approx(total.log().item())


def test_left_out_rows_in_single_precision():
    """Rows alone at their sources: the prior is left, however small beside the count of one."""
    alpha = torch.tensor([[3e-8, 1e-8]])
    evidence = torch.tensor([[[0.0, -1.0]]])
    hood = Neighborhood(torch.zeros(2, 1, dtype=torch.long), 1)
    for dtype in (torch.double, torch.float):
        terms = evidence_entries(*(x.to(dtype) for x in (torch.zeros(1, 1), alpha[None], evidence)))
        draw = Draw(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
        expected = 0.75 + 0.25 * math.exp(-1)
        assert left_out(hood, terms, draw).exp().item() == pytest.approx(expected, rel=1e-6)


def halves(size=16, labels=2):
    """A square that is cut into stripes."""
    return (torch.arange(size**2) % size) * labels // size


def simulated(name, truth):
    size = len(truth)
    if name == "features":
        return 2.0 * truth[:, None] + torch.randn(size, 2)
    wrong = torch.rand(size, 4) < torch.tensor([0.1, 0.2, 0.3, 0.4])
    return torch.where(wrong, 1 - truth[:, None], truth[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers", "features"])
def test_em_and_svi_agree(name):
    """On parameters and labels, the same program being fitted."""
    truth, hood = halves(), sources.grid(16, 16, stride=4)
    emission, data = EMISSIONS[name][0], simulated(name, truth)
    field = fit_field(emission, hood, data, num_starts=1)
    pair = HiddenFieldGuide(emission, hood, data, estimator="one_step_credit")
    elbo = TraceGraph_ELBO(8, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(pair.model, pair.guide, Adam({"lr": 0.1}), elbo)
    for _ in range(80):
        svi.step()
    end = []
    for _ in range(20):  # a mean over steps, because the rate stays what it is
        svi.step()
        end.append(next(iter(pair.values().values())).detach().clone())
    other = pair.field()
    probs = other.probs
    if (probs.argmax(-1) == field.predict()).double().mean() < 0.5:  # labels have no names
        probs = probs.flip(-1)
    # The bound is looser where sources are shared more, so that SVI finds a larger kappa.
    assert (probs - field.probs).abs().mean() < 0.05
    key = next(iter(field.values))
    ours, theirs = field.values[key], torch.stack(end).mean(0)
    order = partial(torch.sort, dim=0 if name != "answers" else 1)
    torch.testing.assert_close(order(ours)[0], order(theirs)[0], atol=0.08, rtol=0.05)
    for result in (field, other):
        right = (result.predict() == truth).double().mean().item()
        assert max(right, 1 - right) > 0.9


def test_labels_are_averaged_over_the_second_half_of_the_steps(monkeypatch):
    """Means of the shares of visits in steps 4 to 7 of 8: of two sweeps, so multiples of 1/2."""
    means, maximise = [], NormalEmission.maximise

    def recorded(emission, data, probs, values):
        means.append(probs)
        return maximise(emission, data, probs, values)

    monkeypatch.setattr(NormalEmission, "maximise", recorded)
    hood, data = sources.grid(8, 8, stride=2), torch.randn(64, 1)
    options = {"num_starts": 1, "num_steps": 8, "num_chains": 1, "num_draws": 1}
    fit_field(NormalEmission(2), hood, data, **options)
    means = means[-4:]  # the fit without a graph comes first
    for number in range(1, 4):
        visits = 2 * ((number + 1) * means[number] - number * means[number - 1])
        torch.testing.assert_close(visits, visits.round())
        assert 0 <= visits.min().round() < visits.max().round() <= 2


def test_prior_of_the_numbers():
    """Normal for the logarithm of kappa, a Dirichlet of ones for shares, flat for the weights."""
    prior = FieldPrior(3, 2)
    before = prior.log_prior()
    with torch.no_grad():
        prior.log_kappa.fill_(1.3)
        prior.share_scores.copy_(torch.tensor([0.4, -1.0, 0.2]))
        prior.scaled_weight.fill_(7.0)
    law, start = torch.distributions.Normal(-1.0, 2.0), torch.tensor(0.2).log()
    expected = law.log_prob(torch.tensor(1.3)) - law.log_prob(start)
    shares = prior.share_scores.softmax(0)
    expected = expected + (3 * shares).log().sum()
    torch.testing.assert_close(prior.log_prior() - before, expected)


@pytest.mark.slow
def test_learned_range_and_kappa():
    """
    Sources far away count for less where labels vary over short distances. From flat attention most
    fits turn to those at the opposite corner of a square, which has the same label.
    """
    xy = torch.cartesian_prod(torch.arange(18.0), torch.arange(18.0))
    hood, places = sources.points(xy, radius=6.0, spacing=3.0)
    squares = -0.5 * (places[hood.source] - xy[hood.row]).square().sum(-1)
    truth = ((xy[:, 0] // 6 + xy[:, 1] // 6) % 2).long()
    data = 3.0 * truth[:, None] + torch.randn(324, 1)
    fields = [
        fit_field(NormalEmission(2), hood, data, x, num_starts=3, num_steps=60)
        for x in (squares, -squares)
    ]
    assert fields[0].prior.weight.item() > 0.05 > -0.05 > fields[1].prior.weight.item()
    field = fields[0]
    assert field.prior.log_kappa.exp() < 0.2
    flat = fit_field(NormalEmission(2), hood, data, num_starts=2, num_steps=60)
    assert field.score > flat.score


def test_units_of_edge_features():
    """Features in any unit give the same fit, in that unit."""
    xy = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))
    hood, places = sources.points(xy, radius=4.0, spacing=2.0)
    squares = (places[hood.source] - xy[hood.row]).square().sum(-1)
    data = 3.0 * (xy[:, :1] >= 6) + torch.randn(144, 1)
    found = []
    for unit in (1.0, 1e-4, 1e4):
        pyro.set_rng_seed(0)
        options = {"num_starts": 1, "num_steps": 20, "num_draws": 4}
        field = fit_field(NormalEmission(2), hood, data, unit * squares, **options)
        found.append(unit * field.prior.weight)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


def test_left_out_answers_do_not_reward_parameters():
    """Independent annotators: the more types, the better they fit what they have seen."""
    torch.manual_seed(1)  # of eight seeds, the one with the largest difference, .03 nats
    truth, hood = halves(), sources.grid(16, 16, stride=4)
    wrong = torch.rand(256, 8) < 0.3
    answers = torch.where(wrong, 1 - truth[:, None], truth[:, None])
    options = {"num_starts": 2, "num_steps": 60}
    plain = fit_field(Annotators(2, aligned=False), hood, answers, **options)
    many = fit_field(Annotators(2, num_types=24), hood, answers, **options)
    assert leave_one_out(plain, answers).mean() > leave_one_out(many, answers).mean()


def test_a_mixture_without_a_graph():
    """Its likelihood rises, and labels of nodes are those of the emission alone."""
    truth = torch.arange(300) % 3
    wrong = torch.rand(300, 5) < 0.2
    answers = torch.where(wrong, torch.randint(3, (300, 5)), truth[:, None])
    emission = Annotators(3)
    hood = sources.grid(10, 30, stride=5)
    start = emission.start(answers, hood)
    values, probs = mixture_em(emission, answers, start)
    # The likelihood rises with every step, and many of them are needed.
    bounds = []
    for steps in range(1, 12):
        found, joint = mixture_em(emission, answers, start, steps, tolerance=-1.0)
        log_joint = emission.log_prob(found, answers) + joint.mean(0).log()
        bounds.append(log_joint.logsumexp(-1).sum() + emission.log_prior(found, answers))
    assert (torch.stack(bounds).diff() > -0.05).all()
    assert bounds[-1] > bounds[0] + 0.2  # the first step has most of it
    long = mixture_em(emission, answers, start, 500, tolerance=0.0)[1]
    assert (long - probs).abs().max() < 0.01
    assert (probs.argmax(-1) == truth).double().mean() > 0.95
    assert values["confusion"].shape == (5, 3, 3)
