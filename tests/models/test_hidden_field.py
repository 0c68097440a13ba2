# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Latent labels with emissions that are learned, against sums over all labellings."""

import itertools
import math
from functools import partial

import pyro
import pytest
import torch
from graphs import house, labellings, parameters, shared_sources, star
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam
from torch.autograd import grad

from pyro_nmm import NeighborMixture, sources
from pyro_nmm.guides import HiddenFieldGuide
from pyro_nmm.models import (
    Annotators,
    FieldPrior,
    NormalEmission,
    PoissonEmission,
    fit_field,
    leave_one_out,
    sample_field,
)
from pyro_nmm.models.latent.mixture_em import mixture_em, source_counts
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms
from pyro_nmm.ops.gibbs import left_out

ANSWERS = torch.tensor([[0, 0, 1], [1, 0, -1], [-1, -1, -1], [1, 1, 1], [0, 1, 1]])
COUNTS = torch.tensor([[0, 3], [4, -1], [-1, -1], [7, 0], [1, 1]])
FEATURES = torch.tensor(
    [[0.0, 1.0], [2.0, math.nan], [math.nan, math.nan], [3.0, -1.0], [0.5, 0.0]],
    dtype=torch.double,
)
EMISSIONS = {
    "answers": (Annotators(2), ANSWERS),
    "clusterings": (Annotators(2, aligned=False, strength=2.0), ANSWERS),
    "more answers": (Annotators(2, num_answers=3), ANSWERS),
    "types": (Annotators(2, num_types=3), ANSWERS),
    "features": (NormalEmission(2), FEATURES),
    "counts": (PoissonEmission(2, strength=2.0), COUNTS),
}


def problem(name, graph=shared_sources):
    """Emission, graph, data, and parameters that are no optimum."""
    emission, data = EMISSIONS[name]
    hood = graph()
    data = emission.check(hood, data)
    pyro.set_rng_seed(1)
    probs = torch.rand(hood.num_nodes, 2).softmax(-1)
    values = emission.maximise(data, probs, emission.start(data, hood))
    return emission, hood, data, values


def log_joint(emission, mix, data, values):
    """``(2^N,)``: log p(u, w | theta), plus the prior of theta."""
    every = labellings(mix.hood.num_nodes)
    evidence = emission.log_prob(values, data)
    found = evidence[torch.arange(len(evidence)), every].sum(-1)
    return every, mix.log_prob(every) + found + emission.log_prior(values, data)


@pytest.mark.parametrize("name", EMISSIONS)
def test_em_raises_the_likelihood(name):
    """With the exact E-step, until it stands still at a zero of the gradient."""
    emission, hood, data, values = problem(name)
    mix = NeighborMixture(hood, *parameters(hood, 2))
    bounds = []
    for _ in range(400):
        every, joint = log_joint(emission, mix, data, values)
        bounds.append(joint.logsumexp(0).item())
        weights = joint.softmax(0)
        probs = torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)
        values = emission.maximise(data, probs, values)
    steps = torch.tensor(bounds).diff()
    assert (steps > -1e-9).all()
    assert bounds[-1] > bounds[0] + 0.01
    assert steps[-1] < 1e-6
    # Towards log-odds, logarithms and means: the optimum does not depend on what is a label's name.
    free = {
        key: (value.log() if (value > 0).all() and key != "mean" else value).requires_grad_()
        for key, value in values.items()
    }

    def bound():
        again = {
            key: value if key == "mean" else value.softmax(-1) if "simplex" in
            str(emission.support[key]).lower() else value.exp()
            for key, value in free.items()
        }  # fmt: skip
        return log_joint(emission, mix, data, again)[1].logsumexp(0)

    for found in grad(bound(), list(free.values())):
        assert found.abs().max() < 2e-3


def posterior_by_enumeration(emission, mix, data):
    """
    ``(N, 2)``: every label's probability with the emission's parameters integrated out, by Bayes'
    rule at any of their values: p(w | u) = p(w | u, theta) p(theta) / p(theta | u, w).
    """
    every = labellings(mix.hood.num_nodes)
    log_prob = mix.log_prob(every) + torch.stack([marginal(emission, data, u) for u in every])
    weights = log_prob.softmax(0)
    return torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)


def dirichlet_multinomial(counts, prior):
    """Of counts of categories in rows, in any order."""
    prior = prior.expand_as(counts)
    totals = torch.lgamma(prior.sum(-1)) - torch.lgamma((prior + counts).sum(-1))
    return (totals + (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum(-1)).sum()


def marginal(emission, data, labels):
    """log p(w | u), up to a constant."""
    if isinstance(emission, Annotators):
        if emission.num_types is None:
            return of_answers(emission, data, labels, 2)
        total = []
        for types in itertools.product(range(emission.num_types), repeat=len(labels)):
            types = torch.tensor(types)
            pairs = torch.zeros(2, emission.num_types)
            pairs.index_put_((labels, types), torch.ones(len(labels)), accumulate=True)
            log_types = dirichlet_multinomial(pairs, torch.tensor(1 / emission.num_types))
            total.append(log_types + of_answers(emission, data, types, emission.num_types))
        return torch.stack(total).logsumexp(0)
    found, a, table = 0.0, emission.strength, data.double()
    if isinstance(emission, PoissonEmission):
        table = table.masked_fill(data < 0, math.nan)
    for d, k in itertools.product(range(2), range(2)):
        seen = ~table[:, d].isnan()
        x, whole = table[seen & (labels == k), d], table[seen, d]
        size, centre = len(x), whole.mean()
        if isinstance(emission, PoissonEmission):
            above, below = a + x.sum(), a / centre + size
            found = found + torch.lgamma(above) - above * below.log() + a * (a / centre).log()
            continue
        # A Normal with the prior of mean and variance: the density of a multivariate t.
        spread = (whole - centre).square().mean()
        off = x - centre
        squares = off.square().sum() - off.sum() ** 2 / (size + a)
        found = found + torch.lgamma(torch.tensor(a + size / 2)) - 0.5 * math.log(1 + size / a)
        found = found - (a + size / 2) * (a * spread + squares / 2).log()
        found = found + a * (a * spread).log()
    return found


def of_answers(emission, data, labels, size):
    columns = emission.num_answers or 2
    strength = emission.strength or (1 if emission.named else columns / 2)
    prior = torch.full((size, columns), strength / columns)
    if emission.named:
        prior = torch.full((size, columns), strength / 2 / (columns - 1))
        prior.fill_diagonal_(strength / 2)
    found = 0.0
    for answers in data.unbind(1):
        counts = torch.zeros(size, columns)
        there = answers >= 0
        ones = torch.ones(int(there.sum()))
        counts.index_put_((labels[there], answers[there]), ones, accumulate=True)
        found = found + dirichlet_multinomial(counts, prior)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", EMISSIONS)
def test_samples_are_the_joint_posterior(name):
    """Chains of labels and parameters against labels with the parameters integrated out."""
    emission, hood, data, values = problem(name)
    prior = FieldPrior(2, kappa=0.7)
    torch.nn.init.normal_(prior.share_scores)
    field = sample_field(
        emission, hood, data, prior, values, num_chains=16, num_draws=500, num_sweeps=50
    )
    exact = posterior_by_enumeration(emission, field.mixture(), data)
    size = field.chains.effective_size()
    assert size.min() > 150
    error = (exact * (1 - exact) / size.min()).sqrt()
    assert ((field.probs - exact).abs() < 4 * error + 5e-3).all(), (field.probs, exact)
    drawn = torch.stack([(field.samples == k).to(exact).mean(0) for k in range(2)], -1)
    assert ((drawn - exact).abs() < 5 * error + 5e-3).all()
    assert field.samples.shape == (8000, 5)
    for key, value in field.draws.items():
        assert value.shape == (8000, *values[key].shape)
        assert emission.support[key].check(value).all()


@pytest.mark.parametrize("name", ["answers", "types", "features", "counts"])
def test_queries_of_a_field(name):
    emission, hood, _, _ = problem(name, house)
    field = fit_field(emission, hood, EMISSIONS[name][1], num_starts=1, num_steps=5, num_draws=8)
    assert field.probs.shape == (5, 2)
    torch.testing.assert_close(field.probs.sum(-1), torch.ones(5))
    assert (field.probs > 0).all()
    assert field.predict().equal(field.probs.argmax(-1))
    assert field.entropy().shape == (5,)
    assert field.samples.shape == (32, 5)
    posterior = field.latents(EMISSIONS[name][1]).posterior()
    assert posterior.pairwise(torch.tensor([[0], [1]])).sum().item() == pytest.approx(1)
    assert "score=" in repr(field)
    assert "kappa=" in repr(field)


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
            terms = LatentTerms(hood.log_softmax(logits)[None], alpha[None], evidence)
            found = left_out(hood, terms, LatentDraw(edges, labels))
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


def halves(size=16, labels=2):
    """A square that is cut into stripes."""
    return (torch.arange(size**2) % size) * labels // size


def simulated(name, truth):
    size = len(truth)
    if name == "features":
        return 2.0 * truth[:, None] + torch.randn(size, 2)
    if name == "counts":
        return torch.poisson(1.0 + 2.0 * truth[:, None].double().expand(-1, 2)).long()
    wrong = torch.rand(size, 4) < torch.tensor([0.1, 0.2, 0.3, 0.4])
    return torch.where(wrong, 1 - truth[:, None], truth[:, None])


@pytest.mark.parametrize("name", ["answers", "features", "counts"])
def test_em_and_svi_agree(name):
    """On parameters and labels, the same program being fitted."""
    truth, hood = halves(), sources.grid(16, 16, stride=4)
    emission, data = EMISSIONS[name][0], simulated(name, truth)
    field = fit_field(emission, hood, data, num_starts=1)
    pair = HiddenFieldGuide(emission, hood, data, estimator="one_step_credit")
    elbo = TraceGraph_ELBO(8, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(pair.model, pair.guide, Adam({"lr": 0.05}), elbo)
    for _ in range(250):
        svi.step()
    other = pair.field()
    probs = other.probs
    if (probs.argmax(-1) == field.predict()).double().mean() < 0.5:  # labels have no names
        probs = probs.flip(-1)
    # The bound is looser where sources are shared more, so that SVI finds a larger kappa.
    assert (probs - field.probs).abs().mean() < 0.05
    key = next(iter(field.values))
    ours, theirs = field.values[key], pair.values()[key]
    order = partial(torch.sort, dim=0 if name != "answers" else 1)
    torch.testing.assert_close(order(ours)[0], order(theirs)[0].detach(), atol=0.08, rtol=0.05)
    for result in (field, other):
        right = (result.predict() == truth).double().mean().item()
        assert max(right, 1 - right) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("loss", [TraceGraph_ELBO, Trace_ELBO])
def test_bound_of_the_program(loss):
    """Its loss is minus the mean of the bound, over all that the guide draws."""
    emission, hood, data, _ = problem("answers")
    pair = HiddenFieldGuide(emission, hood, ANSWERS)
    elbo = loss(4000, vectorize_particles=True, max_plate_nesting=0)
    found = -elbo.loss(pair.model, pair.guide)
    mix = NeighborMixture(hood, *pair.prior(hood))
    exact = log_joint(emission, mix, data, pair.values())[1].logsumexp(0) + pair.prior.log_prior()
    q = [mix.latents(emission.log_prob(pair.start, data)) for _ in range(40)]
    bound = torch.stack([each.log_evidence(each.sample((100,))).sum(-1).mean() for each in q])
    fixed = emission.log_prior(pair.start, data) + pair.prior.log_prior()
    assert found == pytest.approx((bound.mean() + fixed).item(), abs=0.03)
    assert found < exact


def test_learned_range_and_kappa():
    """
    Sources far away count for less where labels vary over short distances. From flat attention most
    fits turn to those at the opposite corner of a square, which has the same label.
    """
    xy = torch.cartesian_prod(torch.arange(24.0), torch.arange(24.0))
    hood, places = sources.points(xy, radius=6.0, spacing=3.0)
    squares = -0.5 * (places[hood.source] - xy[hood.row]).square().sum(-1)
    truth = ((xy[:, 0] // 6 + xy[:, 1] // 6) % 2).long()
    data = 3.0 * truth[:, None] + torch.randn(576, 1)
    fields = [
        fit_field(NormalEmission(2), hood, data, x, num_starts=3) for x in (squares, -squares)
    ]
    assert fields[0].prior.weight.item() > 0.05 > -0.05 > fields[1].prior.weight.item()
    field = fields[0]
    assert field.prior.log_kappa.exp() < 0.2
    flat = fit_field(NormalEmission(2), hood, data, num_starts=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers", "types"])
def test_leave_one_out(name):
    """p(w) / p(w without what is observed of a node), parameters integrated out."""
    emission, hood, data, values = problem(name)
    prior = FieldPrior(2, kappa=0.7)
    field = sample_field(emission, hood, data, prior, values, num_chains=64, num_draws=20)
    mix, every = field.mixture(), labellings(5)

    def evidence(table):
        parts = [mix.log_prob(u) + marginal(emission, table, u) for u in every]
        return torch.stack(parts).logsumexp(0)

    found = leave_one_out(field, data, num_sweeps=200)
    for node in (0, 1, 3):
        missing = data.clone()
        missing[node] = -1
        assert found[node].item() == pytest.approx(
            (evidence(data) - evidence(missing)).item(), abs=0.06
        )


def test_left_out_answers_do_not_reward_parameters():
    """Independent annotators: the more types, the better they fit what they have seen."""
    truth, hood = halves(), sources.grid(16, 16, stride=4)
    wrong = torch.rand(256, 8) < 0.3
    answers = torch.where(wrong, 1 - truth[:, None], truth[:, None])
    plain = Annotators(2, aligned=False).fit(hood, answers, num_starts=2)
    many = Annotators(2, num_types=24).fit(hood, answers, num_starts=2)
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
    assert bounds[-1] > bounds[0] + 1
    long = mixture_em(emission, answers, start, 500, tolerance=0.0)[1]
    assert (long - probs).abs().max() < 0.01
    assert (probs.argmax(-1) == truth).double().mean() > 0.95
    assert values["confusion"].shape == (5, 3, 3)
    counts = source_counts(hood, probs)
    assert counts.shape == (hood.num_sources, 3)
    assert counts.sum().item() == pytest.approx(300)


BAD = {
    "data must be a tensor of shape": (NormalEmission(2), FEATURES.numpy()),
    r"\(5, D\), a row for every node of hood, got \(4, 2\)": (NormalEmission(2), FEATURES[:4]),
    "data must be floats": (NormalEmission(2), COUNTS),
    "missing everywhere in column 1": (NormalEmission(2), FEATURES * torch.tensor([1, math.nan])),
    "data is the same everywhere in column 0": (NormalEmission(2), FEATURES * torch.tensor([0, 1])),
    "integer counts, with -1": (PoissonEmission(2), COUNTS - 3),
    "answers must be integers": (Annotators(2), FEATURES),
    r"answers holds 2, but must lie in 0\.\.1": (Annotators(2), ANSWERS + 1),
    "answers holds -3": (Annotators(2), 3 * ANSWERS.clamp(max=0)),
    "answers has none of annotator 1": (Annotators(2), ANSWERS * 0 - torch.tensor([0, 1, 0])),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_data(message):
    emission, data = BAD[message]
    with pytest.raises(ValueError, match=message):
        fit_field(emission, shared_sources(), data)


def test_other_types_of_numbers():
    """Half precision is raised to single, small integers are labels."""
    options = {"num_starts": 1, "num_steps": 2, "num_draws": 2}
    hood = shared_sources()
    field = fit_field(NormalEmission(2), hood, FEATURES.half(), **options)
    assert field.values["mean"].dtype == torch.float
    field = fit_field(Annotators(2), hood, ANSWERS.clamp(min=0).to(torch.uint8), **options)
    assert field.probs.shape == (5, 2)
    with pytest.raises(ValueError, match="answers must be integers"):
        fit_field(Annotators(2), hood, ANSWERS.numpy())


def test_bad_arguments():
    hood = shared_sources()
    for make in (Annotators, NormalEmission, PoissonEmission):
        with pytest.raises(ValueError, match="num_labels"):
            make(1)
        with pytest.raises(ValueError, match="strength"):
            make(2, strength=0.0)
    for name in ("num_types", "num_answers"):
        with pytest.raises(ValueError, match=name):
            Annotators(2, **{name: 1})
    for name in ("num_starts", "num_steps", "num_draws", "num_chains"):
        with pytest.raises(ValueError, match=name):
            fit_field(Annotators(2), hood, ANSWERS, **{name: 0})
    with pytest.raises(ValueError, match="lr"):
        fit_field(Annotators(2), hood, ANSWERS, lr=-1.0)
    with pytest.raises(ValueError, match=r"edge_attr must hold numbers of shape \(8,\)"):
        fit_field(Annotators(2), hood, ANSWERS, torch.zeros(7))
    with pytest.raises(ValueError, match="edge_attr must be finite"):
        fit_field(Annotators(2), hood, ANSWERS, torch.full((8,), torch.inf))
    with pytest.raises(ValueError, match="prior has 3 labels and 1 features of edges, but emiss"):
        sample_field(Annotators(2), hood, ANSWERS, FieldPrior(3, 1), {})
    field = fit_field(Annotators(2), hood, ANSWERS, num_starts=1, num_steps=2, num_draws=2)
    with pytest.raises(ValueError, match="gelman_rubin needs two chains of four draws or more"):
        field.chains.gelman_rubin()
