# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM on top of a trained classifier's scores alone: five numbers from held-out nodes."""

import itertools
import math
import re

import networkx as nx
import numpy as np
import pyro
import pytest
import torch
from graphs import house, to_hood
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from runs import fit_on_all_edges, log_prior, prior_of

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.fit import bounded_temperature, surrogate
from pyro_nmm.models.stacked.formula import Formula, Priors

PRIOR = StackedNMM(pool=False).prior
NAMES = list(PRIOR)


def test_parameters_are_those_of_the_formula():
    hood, stacked = house(), StackedNMM(pool=False)
    scores = torch.randn(5, 3)
    values = {
        "log_scale": 0.3,
        "log_kappa": 1.2,
        "log_floor": -2.0,
        "gamma": 0.7,
        "similarity": -1.4,
    }
    for name, value in values.items():
        getattr(stacked, name).data.fill_(value)
    alpha, logits = stacked(hood, scores)
    probs = (torch.tensor(0.3).exp() * scores).softmax(-1)
    torch.testing.assert_close(alpha, torch.tensor(1.2).exp() * probs + torch.tensor(-2.0).exp())
    for e, (i, j) in enumerate(zip(hood.target, hood.source, strict=True)):
        cosine = probs[i] @ probs[j] / (probs[i].norm() * probs[j].norm())
        expected = -1.4 * cosine + 0.7 * (i == j)
        torch.testing.assert_close(logits[e], expected)


def test_gradient_of_the_conditional_bound():
    """The surrogate's mean gradient is that of the enumerated bound, in all five numbers."""
    torch.manual_seed(1)
    hood = house()
    stacked, scores = StackedNMM(pool=False), torch.randn(5, 2)
    stacked.log_kappa.data.fill_(-0.5)  # strong sharing: the score term matters
    y, order = torch.tensor([0, 1, 0, 0, 1]), torch.tensor([1, 3, 4, 0, 2])

    def conditional():
        alpha, logits = stacked(hood, scores)
        return OrderedConditional(hood, alpha, logits, y, order=order)

    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(5)]
    every = torch.tensor(list(itertools.product(*rows)))
    q = conditional()
    bound = (q.log_prob(every).exp() * q.log_labels(every)[:, 2:].sum(-1)).sum()
    exact = torch.stack(torch.autograd.grad(bound, [getattr(stacked, n) for n in NAMES]))
    direct = (
        q.log_prob(every).detach().exp() * conditional().log_labels(every)[:, 2:].sum(-1)
    ).sum()
    partial = torch.stack(torch.autograd.grad(direct, [getattr(stacked, n) for n in NAMES]))
    draws = []
    for _ in range(1500):
        value = surrogate(conditional(), 2, 4)
        draws.append(torch.stack(torch.autograd.grad(value, [getattr(stacked, n) for n in NAMES])))
    draws = torch.stack(draws)
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()
    assert ((partial - exact).abs() > 4 * error).any()  # without the score it would not pass


def simulate(seed):
    """Labels of an NMM on 150 cliques of 4, and the scores of an overconfident classifier."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.double)
    hood = to_hood(nx.caveman_graph(150, 4))
    truth = torch.randn(600, 4).softmax(-1)
    y = NeighborMixture(hood, 0.5 * truth, torch.zeros(hood.num_edges)).sample()
    order = torch.randperm(600)
    train, held_out, test = (torch.zeros(600, dtype=torch.bool) for _ in range(3))
    for mask, part in zip((train, held_out, test), order.split([200, 200, 200]), strict=True):
        mask[part] = True
    return hood, 4 * truth.log(), y, train, held_out, test


@pytest.fixture(scope="module")
def simulated():
    return simulate(0)


def test_fit_finds_temperature_on_average():
    """The temperature is 4; 200 held-out labels tell it to a factor of two, six such sets more."""
    scales = []
    for seed in range(6):
        hood, scores, y, train, held_out, _ = simulate(seed)
        scales.append(StackedNMM(pool=False).fit(hood, scores, y, train, held_out).log_scale.item())
    assert np.mean(scales) == pytest.approx(math.log(0.25), abs=0.5)


def test_fit_finds_sharing(simulated):
    hood, scores, y, train, held_out, test = simulated
    torch.manual_seed(0)
    stacked = StackedNMM(pool=False).fit(hood, scores, y, train, held_out)
    # 0.5 was true; the prior's mean, 2.7, and the gap of the bound draw it upwards.
    assert 0.2 < stacked.log_kappa.exp().item() < 2.0
    # Better than temperature scaling on nodes that neither has seen, alone and in pairs.
    temperature = temperature_scaling(scores, y, held_out)
    probs = (scores / temperature).softmax(-1)
    post = stacked.mixture(hood, scores).condition(y, train, num_samples=64)
    gain = (post.marginals() / probs)[test, y[test]].log().mean()
    assert gain > 0.02
    mix = stacked.mixture(hood, scores)
    joint = mix.log_likelihood(y, observed=test, given=train, num_particles=64) / 200
    assert joint > post.marginals()[test, y[test]].log().mean()


def test_fit_maximises_its_objective(simulated):
    """Around the fit, the held-out bound plus prior falls in every direction."""
    hood, scores, y, train, held_out, _ = simulated
    torch.manual_seed(0)
    stacked = StackedNMM(pool=False).fit(hood, scores, y, train, held_out)
    order = torch.cat([train.nonzero()[:, 0], held_out.nonzero()[:, 0]])
    prior = prior_of(stacked, scores, y, held_out)

    @torch.no_grad()
    def objective():
        q = OrderedConditional(hood, *stacked(hood, scores), y, train | held_out, order=order)
        torch.manual_seed(1)
        bound = q.log_labels(q.sample((400,)))[:, 200:].sum(-1).mean()
        return (bound + log_prior(stacked, prior)).item()

    best = objective()
    for name in NAMES:
        parameter = getattr(stacked, name)
        for step in (-1.0, 1.0):
            parameter.data += step
            assert objective() < best, (name, step)
            parameter.data -= step


def test_scale_of_the_scores_does_not_matter(simulated):
    """Even where a softmax at unit scale would be saturated in single precision."""
    hood, scores, y, train, held_out, _ = simulated
    marginals = []
    for factor in (0.01, 1.0, 1000.0):
        torch.manual_seed(0)
        stacked = StackedNMM(pool=False).fit(
            hood, factor * scores.float(), y, train, held_out, num_steps=60
        )
        marginals.append(stacked.mixture(hood, factor * scores.float()).marginals())
    torch.testing.assert_close(marginals[0], marginals[1], rtol=0, atol=0.02)
    torch.testing.assert_close(marginals[2], marginals[1], rtol=0, atol=0.02)


def test_perfect_scores_keep_a_finite_temperature():
    hood, y = house(), torch.tensor([0, 1, 0, 1, 0])
    scores = 10.0 * torch.nn.functional.one_hot(y).double()
    train, held_out = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 1, 0]).bool()
    stacked = StackedNMM(pool=False).fit(hood, scores, y, train, held_out, num_steps=30)
    assert 0.05 < stacked.log_scale.exp() < 10
    assert stacked.mixture(hood, scores).marginals().isfinite().all()


def test_little_data_stays_with_the_prior():
    hood = house()
    scores, y = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 0])
    train, held_out = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 0, 0]).bool()
    stacked = StackedNMM(pool=False).fit(hood, scores, y, train, held_out, num_steps=60)
    for name, (mean, sd) in prior_of(stacked, scores, y, held_out).items():
        assert abs(getattr(stacked, name).item() - mean) < 1.5 * sd


def test_labels_outside_the_masks_are_never_read(simulated):
    hood, scores, y, train, held_out, test = simulated
    results = []
    for other in (0, 99):
        torch.manual_seed(0)
        labels = torch.where(test, other, y)
        stacked = StackedNMM(pool=False).fit(hood, scores, labels, train, held_out, num_steps=5)
        results.append(torch.stack(list(stacked.parameters())))
    assert torch.equal(*results)


@pytest.mark.parametrize("pool", [False, True])
def test_is_a_network_for_svi(pool):
    """Its numbers as the parameters of a Pyro program."""
    hood, observed = house(), torch.tensor([False, True, True, False, True])
    network = StackedNMM(2 if pool else None, pool=pool).double()
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    scores, y = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 0])
    before = program.network.log_kappa.item()
    inputs = (scores, y, ~observed) if pool else (scores,)
    svi.step(*inputs, y=y, observed=observed)
    assert program.network.log_kappa.item() != before
    names = " ".join(pyro.get_param_store().keys())
    assert "log_kappa" in names
    assert ("pool.labels" in names) == pool


def few_labels(seed=0):
    """A graph of 60 nodes of which 14 are labelled, and the scores of a classifier."""
    torch.manual_seed(seed)
    hood = to_hood(nx.watts_strogatz_graph(60, 6, 0.3, seed=seed))
    scores, y, order = torch.randn(60, 3), torch.randint(3, (60,)), torch.randperm(60)
    train, held_out = torch.zeros(2, 60, dtype=torch.bool)
    train[order[:5]], held_out[order[5:14]] = True, True
    return hood, scores, y, train, held_out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fit_leaves_out_what_it_does_not_need(seed, kernels):
    """Nodes that no labelled node may choose: the same draws, the same numbers."""
    problem = few_labels(seed)
    for weight in (None, torch.rand(problem[0].num_edges) + 0.1):
        torch.manual_seed(7)
        how = {"num_steps": 40, "edge_weight": weight}
        expected = fit_on_all_edges(StackedNMM(pool=False), *problem, **how)
        torch.manual_seed(7)
        found = StackedNMM(pool=False).fit(*problem, **how)
        for name in NAMES:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_cost_of_a_step_does_not_depend_on_other_edges(monkeypatch):
    """Attention is computed for edges into labelled nodes, and one of each of their sources."""
    seen = []
    call = Formula.__call__
    monkeypatch.setattr(
        Formula,
        "__call__",
        lambda self, hood, scores, *more: (
            seen.append((hood.num_edges, len(scores))) or call(self, hood, scores, *more)
        ),
    )
    hood, scores, y, train, held_out = few_labels()
    rows = hood.restrict(train | held_out)
    sources = len(rows.source.unique())
    StackedNMM(pool=False).fit(hood, scores, y, train, held_out, num_steps=3)
    assert max(seen) == min(seen) == (rows.num_edges + sources - 14, sources)
    unlabelled = (~(train | held_out)).nonzero()[:, 0]
    more = torch.cartesian_prod(torch.arange(60), unlabelled).T
    dense = Neighborhood(torch.cat([torch.stack([hood.source, hood.target]), more], 1), 60)
    assert dense.num_edges > 5 * hood.num_edges
    StackedNMM(pool=False).fit(dense, scores, y, train, held_out, num_steps=3)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_fit_that_diverges_leaves_the_module_alone(lr):
    problem, stacked = few_labels(), StackedNMM(pool=False).double()
    stacked.fit(*problem, num_steps=3)
    before = [p.clone() for p in stacked.parameters()]
    with pytest.raises(
        ValueError, match=rf"lr={re.escape(str(lr))} is too large.* no longer finite"
    ):
        stacked.fit(*problem, lr=lr)
    assert all(map(torch.equal, stacked.parameters(), before))
    assert stacked.mixture(*problem[:2]).marginals().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores(dtype):
    """They are computed with in single precision."""
    hood, scores, *labels = few_labels()
    fits = []
    for value in (scores.to(dtype), scores.to(dtype).float()):
        torch.manual_seed(0)
        fits.append(StackedNMM(pool=False).fit(hood, value, *labels, num_steps=5))
    assert repr(fits[0]) == repr(fits[1])
    mixture = fits[0].mixture(hood, scores.to(dtype))
    assert mixture.alpha.dtype == mixture.logits.dtype == torch.float


def test_repr_states_the_fit():
    assert "temperature=1, kappa=2.718, floor=0.006738" in repr(StackedNMM(pool=False))


def test_bad_input():
    hood, scores, y = house(), torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 0])
    train, held_out = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 0, 0]).bool()

    def fit(**changes):
        arguments = {"scores": scores, "y": y, "train": train, "held_out": held_out} | changes
        StackedNMM(pool=False).fit(hood, **arguments)

    with pytest.raises(ValueError, match="both hold node 0"):
        fit(held_out=train)
    with pytest.raises(ValueError, match="held_out must be a boolean mask"):
        fit(held_out=2 * held_out.long())
    with pytest.raises(ValueError, match="held_out selects no node"):
        fit(held_out=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 2"):
        fit(num_samples=1)
    with pytest.raises(ValueError, match="finite floating-point logits, got 10 entries"):
        fit(scores=torch.full((5, 2), torch.nan))
    with pytest.raises(ValueError, match=r"scores must have shape \(5, C\)"):
        fit(scores=scores[:4])
    with pytest.raises(ValueError, match="y holds label 5 at node 0"):
        fit(y=torch.tensor([5, 1, 0, 1, 0]))


@pytest.mark.parametrize(("pool", "name"), [(True, "pool.labels"), (False, "log_scale")])
def test_prior_is_an_argument(pool, name):
    """A tight one holds the fit where its mean is, and the others are as they were."""
    hood, scores, y, train, held_out = few_labels()
    plain, told = StackedNMM(3, pool=pool), StackedNMM(3, pool=pool, prior={name: (1.7, 1e-3)})
    assert {n: v for n, v in told.prior.items() if n != name}.items() <= plain.prior.items()
    assert told.get_parameter(name).item() == pytest.approx(1.7)  # where a fit begins
    told.fit(hood, scores, y, train, held_out, num_steps=40)
    mean = 1.7 if pool else 1.7 - math.log(bounded_temperature(scores, y, held_out))
    assert told.get_parameter(name).item() == pytest.approx(mean, abs=0.01)
    assert told.gamma.item() != plain.gamma.item()


@pytest.mark.parametrize(
    ("prior", "wrong"),
    [({"kappa": (0.0, 1.0)}, "'kappa'"), ({"gamma": (0.0, 0.0)}, "gamma"),
     ({"gamma": (math.nan, 1.0)}, "gamma"), ({"pool.labels": (0.0, 1.0)}, "'pool.labels'")],
)  # fmt: skip
def test_bad_priors(prior, wrong):
    with pytest.raises(ValueError, match=f"prior must .*{wrong}"):
        StackedNMM(pool=False, prior=prior)


def test_scores_are_finite_in_every_call():
    hood, scores, y, train, _ = few_labels()
    scores[3, 1] = -torch.inf
    for stacked in (StackedNMM(3), StackedNMM(pool=False)):
        for call in (stacked, stacked.mixture, stacked.posterior):
            with pytest.raises(ValueError, match="finite floating-point logits, got 1 entries"):
                call(hood, scores, y, train)


def test_priors_follow_agreement_and_temperature():
    """The less neighbours agree, the more a node keeps to itself; a prior that is given stays."""

    def means(prior, **options):
        stacked = StackedNMM(2, **options, prior=prior)
        priors = Priors.of(stacked.declared, stacked.prior, 4.0, agreement=0.25)
        return {each.name: each.mean for each in priors.declared}

    assert means({})["gamma"] == 0.5 + 4 * 0.75**2
    assert means({"gamma": (0.5, 0.6)})["gamma"] == 0.5
    assert means({}, pool=False)["gamma"] == 2.0
    assert means({}, pool=False)["log_scale"] == -math.log(4)
    assert means({})["pool.log_scale"] == -0.9  # the pool has a temperature of its own


def test_options_of_the_optimisation():
    hood, *given = few_labels()
    with pytest.raises(TypeError, match="num_step"):
        StackedNMM(3).fit(hood, *given, num_step=3)
    with pytest.raises(ValueError, match="num_folds must be an integer of at least 1"):
        StackedNMM(3).fit(hood, *given, num_folds=0)
    StackedNMM(3).fit(hood, *given, num_folds=3, num_steps=3)
    with pytest.raises(ValueError, match="max_held_out must be an integer of at least 1"):
        StackedNMM(3).fit(hood, *given, max_held_out=0)


def test_a_fit_needs_some_of_many_held_out_nodes():
    """Some of them are the fit of a mask of them, and the rest of their labels is not read."""
    torch.manual_seed(0)
    hood, y = Neighborhood.grid(12, 12), torch.randint(3, (144,))
    scores, train = torch.randn(144, 3), torch.arange(144) < 30
    held_out, found = torch.arange(144) >= 50, []
    torch.manual_seed(1)
    nodes = held_out.nonzero()[:, 0]
    few = torch.zeros(144, dtype=torch.bool)
    few[nodes[torch.randperm(len(nodes))[:40]]] = True
    found.append(StackedNMM(3).fit(hood, scores, y, train, few, num_steps=5))
    torch.manual_seed(1)
    unread = y.masked_fill(held_out & ~few, 0)
    options = {"num_steps": 5, "max_held_out": 40}
    found.append(StackedNMM(3).fit(hood, scores, unread, train, held_out, **options))
    for value, other in zip(*(each.parameters() for each in found), strict=True):
        assert torch.equal(value, other)
