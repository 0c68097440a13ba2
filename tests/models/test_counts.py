# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``nmm_counts`` against brute force over the choices of all units."""

import pickle
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import star
from oracle import CountOracle, edge_lists
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import MCMC, NUTS, SVI, Importance, Predictive, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from scipy.stats import chi2

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions.count_conditional import CountConditional
from pyro_nmm.distributions.label_counts import LabelCounts
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.guides import AutoNMM, FieldGibbs
from pyro_nmm.models import nmm, nmm_counts
from pyro_nmm.ops.splits import levels, split

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), 4)
COUNTS = torch.tensor([[3, 1, 0], [0, 2, 0], [1, 0, 1], [2, 2, 0]])
ALPHA = torch.tensor([[0.5, 0.3, 0.2], [1.5, 0.1, 0.4], [0.2, 0.2, 0.6], [2.0, 1.0, 0.5]]).double()
LOGITS = torch.linspace(-1, 1, HOOD.num_edges).double()


def oracle(logits=LOGITS, counts=COUNTS):
    return CountOracle(*edge_lists(HOOD, logits), counts.numpy(), 4)


def conditional(alpha=ALPHA, logits=LOGITS, shape=()):
    return CountConditional(Parameters(HOOD, alpha, logits), COUNTS, torch.Size(shape))


def program(y=COUNTS, observed=None, total_count=None):
    kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    stay = pyro.sample("stay", dist.Normal(0.0, 1.0))
    here = (HOOD.source == HOOD.target).to(stay)
    alpha, logits = kappa[..., None, None] * ALPHA.to(kappa), stay[..., None] * here
    return nmm_counts(HOOD, alpha, logits, y, observed, total_count=total_count)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5, 2), (8, 3, 13, 1)])
def test_split(sizes):
    """Totals are kept, and counts are multinomial at every edge, also where others have none."""
    rows = Neighborhood(
        torch.stack([torch.cat([torch.arange(n) for n in sizes]),
                     torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))]),
        len(sizes), num_sources=max(sizes),
    )  # fmt: skip
    torch.manual_seed(1)
    weights = torch.rand(1, rows.num_edges, 2, dtype=torch.double)
    weights[0, rows.ptr[1], 0] = 0 if sizes[1] > 1 else 1
    counts = torch.tensor([7.0, 0.0]).double().repeat(2000, len(sizes), 1)
    counts[..., 1] = torch.arange(len(sizes))
    found = split(levels(rows), counts, weights.expand(2000, -1, -1))
    totals = torch.zeros_like(counts).index_add_(1, rows.row, found)
    assert torch.equal(totals, counts)
    assert (found >= 0).all()
    share = (
        weights
        / torch.zeros(1, len(sizes), 2).double().index_add_(1, rows.row, weights)[:, rows.row]
    )
    mean = share * counts[:1, rows.row]
    error = (mean * (1 - share) / 2000).sqrt()
    assert ((found.mean(0) - mean[0]).abs() <= 4.5 * error[0] + 1e-9).all()
    spread = found.var(0) / (mean[0] * (1 - share[0])).clamp(min=1e-9)
    assert ((spread - 1).abs()[error[0] > 1e-4] < 0.25).all()


@pytest.mark.parametrize("scale", [0.3, 1.0, 30.0])
def test_chain_has_the_posterior_of_label_distributions(scale):
    torch.manual_seed(0)
    q, size = conditional(scale * ALPHA, shape=(400,)), 400
    states, means = q.sweep(q.sample(), 30), []
    for _ in range(40):
        states = q.sweep(states, 5)
        above = q.alpha + q._totals(q.choices(states))
        means.append(above / above.sum(-1, keepdim=True))
    chains = torch.stack(means).mean(0)
    errors = chains.std(0) / size**0.5
    truth = torch.as_tensor(oracle().mean(scale * ALPHA.numpy()))
    assert ((chains.mean(0) - truth).abs() < 4.5 * errors + 1e-9).all()
    assert errors.max() < 0.02


@pytest.mark.parametrize("density", ["log_joint", "log_density"])
def test_gradients_are_those_of_the_likelihood(density):
    """By Fisher's identity, against finite differences of the enumerated likelihood."""
    torch.manual_seed(0)
    alpha, logits = ALPHA.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    q, found = conditional(alpha, logits), []
    states = conditional().sweep(conditional().sample(), 20)
    for _ in range(3000):
        states = q.sweep(states, 3)
        value = q.log_joint(q.choices(states)) if "j" in density else q.log_density(states)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, [alpha, logits])]))
        q = conditional(alpha, logits)
    found, step, truth = torch.stack(found), 1e-5, []
    for place in range(12):
        shift = step * np.eye(12)[place].reshape(4, 3)
        pair = (oracle().log_prob(ALPHA.numpy() + sign * shift) for sign in (1, -1))
        truth.append((next(pair) - next(pair)) / (2 * step))
    for place in range(HOOD.num_edges):
        shift = step * torch.eye(HOOD.num_edges).double()[place]
        pair = (oracle(LOGITS + sign * shift).log_prob(ALPHA.numpy()) for sign in (1, -1))
        truth.append((next(pair) - next(pair)) / (2 * step))
    errors = found.unflatten(0, (60, 50)).mean(1).std(0) / 60**0.5
    assert ((found.mean(0) - torch.tensor(truth)).abs() < 4.5 * errors + 1e-5).all()


def test_mean_density_over_z_is_the_probability():
    q = conditional(shape=(200_000,))
    z = dist.Dirichlet(ALPHA).sample((200_000,))
    trace = poutine.trace(poutine.condition(nmm_counts, data={"z": z})).get_trace(
        HOOD, ALPHA, LOGITS, COUNTS
    )
    found = trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"]).exp()
    error = found.std() / len(found) ** 0.5
    truth = np.exp(oracle().log_prob(ALPHA.numpy()))
    assert abs(found.mean() - truth) < 4.5 * error
    assert error < 0.1 * truth
    assert q.batch_shape == (200_000,)


@pytest.mark.parametrize(
    "options", [{}, {"num_sweeps": 3}, pytest.param({"kernel": NUTS}, marks=pytest.mark.slow)]
)
def test_kernel_has_the_posterior_of_parameters(options):
    """On a grid of the two parameters, with the likelihood enumerated."""
    points, weights = np.polynomial.hermite_e.hermegauss(16)
    logs = np.log(weights / weights.sum())
    table = np.array([
        [oracle(stay * (HOOD.source == HOOD.target)).log_prob(np.exp(k) * ALPHA.numpy())
         for k in points] for stay in torch.as_tensor(points)
    ]) + logs + logs[:, None]  # fmt: skip
    shares = np.exp(table - table.max())
    shares /= shares.sum()
    pyro.set_rng_seed(0)
    number = 1500
    kernel = FieldGibbs(program, **options)
    mcmc = MCMC(kernel, number, 300, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()
    for values, axis in ((draws["kappa"].log(), 0), (draws["stay"], 1)):
        marginal = shares.sum(axis)
        mean = (marginal * points).sum()
        parts = values.view(20, -1).mean(1)
        assert abs(values.mean() - mean) < 4.5 * parts.std() / 20**0.5
        sd = ((marginal * points**2).sum() - mean**2) ** 0.5
        assert abs(values.std() / sd - 1) < 0.2


def test_kernel_keeps_label_distributions():
    pyro.set_rng_seed(0)

    def fixed():
        pyro.sample("other", dist.Normal(0.0, 1.0))
        nmm_counts(HOOD, ALPHA, LOGITS, COUNTS)

    mcmc = MCMC(FieldGibbs(fixed), 1600, 50, disable_progbar=True, save_params=["z", "other"])
    mcmc.run()
    z = mcmc.get_samples()["z"]
    parts = z.unflatten(0, (40, 40)).mean(1)
    truth = torch.as_tensor(oracle().mean(ALPHA.numpy()))
    assert ((z.mean(0) - truth).abs() < 4.5 * parts.std(0) / 40**0.5).all()


def test_a_self_loop_alone_is_the_dirichlet_multinomial():
    hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), 4)
    q = CountConditional(Parameters(hood, ALPHA, torch.zeros(4).double()), COUNTS, torch.Size())
    ways = LabelCounts(COUNTS.sum(-1), torch.full((4, 3), 1 / 3).double()).log_prob(COUNTS)
    ways = (ways + COUNTS.sum(-1) * np.log(3)).sum()
    each = [dist.DirichletMultinomial(a, int(n.sum())).log_prob(n)
            for a, n in zip(ALPHA, COUNTS.double(), strict=True)]  # fmt: skip
    choices = q.choices(q.sample())
    torch.testing.assert_close(choices[0], COUNTS.double())
    torch.testing.assert_close(q.log_joint(choices) + ways, sum(each))


def test_moments_of_the_docstring():
    """Mean and covariance in closed form, and as pairs of units of a mixture of labels."""
    torch.manual_seed(0)
    number = torch.tensor([4, 2, 7, 1])
    draws = nmm_counts(HOOD, ALPHA.expand(200_000, 4, 3), LOGITS, total_count=number)
    attention = torch.zeros(4, 4).double()
    attention[HOOD.target, HOOD.source] = HOOD.softmax(LOGITS)
    mu, total = ALPHA / ALPHA.sum(-1, keepdim=True), ALPHA.sum(-1)
    of_sources = (torch.diag_embed(mu) - mu[:, :, None] * mu[:, None]) / (total + 1)[:, None, None]
    shared = torch.einsum("ij,lj,jab->ilab", attention, attention, of_sources)
    u = attention @ mu
    truth = number[:, None, None, None] * number[:, None, None] * shared
    for i in range(4):
        own = torch.diag(u[i]) - u[i].outer(u[i]) - shared[i, i]
        truth[i, i] += number[i] * own
    centred = draws - number[:, None] * u
    assert (centred.mean(0).abs() < 4.5 * centred.std(0) / 200_000**0.5).all()
    products = torch.einsum("sia,sjb->ijab", centred, centred) / len(draws)
    squares = torch.einsum("sia,sjb->ijab", centred**2, centred**2) / len(draws)
    assert ((products - truth).abs() < 4.5 * (squares / len(draws)).sqrt()).all()
    pair = NeighborMixture(HOOD, ALPHA, LOGITS).pairwise(torch.tensor([[0], [1]]))[0]
    torch.testing.assert_close(pair - u[0][:, None] * u[1], shared[0, 1])


def test_label_counts():
    torch.manual_seed(0)
    probs, number = torch.tensor([[0.2, 0.0, 0.8], [0.5, 0.25, 0.25]]), torch.tensor([6, 0])
    fn = LabelCounts(number, probs).expand((1000, 2))
    draws = fn.sample()
    assert draws.shape == (1000, 2, 3)
    assert (draws.sum(-1) == number).all()
    assert (draws[:, 0, 1] == 0).all()
    seen, expected = draws[:, 0, 0].long().bincount(minlength=7), fn.mean[0, 0]
    exact = dist.Binomial(6, 0.2).log_prob(torch.arange(7.0)).exp() * 1000
    kept = exact > 1
    assert ((seen - exact) ** 2 / exact)[kept].sum() < chi2.ppf(1 - 1e-5, kept.sum() - 1)
    torch.testing.assert_close(expected, torch.tensor([1.2, 0.0, 4.8]))
    torch.testing.assert_close(fn.variance[0, 0], torch.tensor([0.96, 0.0, 0.96]))
    y = torch.tensor([[2.0, 0.0, 4.0]])
    pyros = dist.Multinomial(6, probs[:1]).log_prob(y)
    torch.testing.assert_close(LabelCounts(number[:1], probs[:1]).log_prob(y), pyros)
    large = (
        torch.tensor([[2e6, 1.0, 8e6]]).double(),
        torch.tensor([[0.2, 1e-7, 0.7999999]]).double(),
    )
    whole = dist.Multinomial(int(large[0].sum()), large[1]).log_prob(large[0])
    single = LabelCounts(large[0].sum(-1), large[1].float()).log_prob(large[0].float())
    torch.testing.assert_close(single.double(), whole, rtol=0.01, atol=0.1)


def test_consumers_of_pyro():
    """Autoguides, importance weights, subsampled plates, predictions and copies."""
    pyro.set_rng_seed(0)
    for loss in (TraceGraph_ELBO(), Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)):
        pyro.clear_param_store()
        guide = AutoNormal(program, init_scale=0.3)
        svi = SVI(program, guide, Adam({"lr": 0.05}), loss)
        losses = [svi.step() for _ in range(120)]
        assert np.mean(losses[-30:]) < np.mean(losses[:30]) - 0.5
    for parallel in (False, True):
        draws = Predictive(program, guide=guide, num_samples=7, parallel=parallel)(
            None, total_count=COUNTS.sum(-1)
        )
        assert draws["y"].shape[-2:] == (4, 3)
        assert (draws["y"].reshape(7, 4, 3).sum(-1) == COUNTS.sum(-1)).all()
    logs = Importance(program, guide, 50).run()
    assert torch.isfinite(logs.get_log_normalizer())
    assert pickle.loads(pickle.dumps(LabelCounts(COUNTS.sum(-1), ALPHA))).event_shape == (3,)
    batch = torch.stack([COUNTS, COUNTS.flip(0), COUNTS])

    def several():
        with pyro.plate("maps", 3, subsample_size=2) as part:
            kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
            alpha = kappa[..., None, None] * ALPHA.to(kappa)
            nmm_counts(HOOD, alpha, LOGITS.to(kappa), batch[part])

    trace = poutine.trace(several).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["y"]["log_prob"].shape == (2,)
    assert trace.nodes["y"]["value"].shape == (2, 4, 3)


def test_an_automatic_guide_warns():
    """Normal guides of ``z`` and ``kappa`` overestimate ``kappa``."""
    with pytest.warns(UserWarning, match="'z' of nmm_counts is left to the autoguide"):
        AutoNMM(program)()


def test_other_rows_are_marginalised():
    observed = torch.tensor([True, True, False, True])
    trace = poutine.trace(program).get_trace(COUNTS, observed)
    assert trace.nodes["y"]["value"].shape == (3, 3)
    lost = COUNTS.index_fill(0, torch.tensor([2]), -5)
    other = poutine.trace(poutine.replay(program, trace)).get_trace(lost, observed)
    assert other.log_prob_sum() == trace.log_prob_sum()
    full = Predictive(program, {k: trace.nodes[k]["value"][None] for k in ("z", "kappa", "stay")})
    assert full(None, total_count=COUNTS.sum(-1))["y"].shape == (1, 4, 3)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"y": COUNTS - 1}, "y must hold counts: whole numbers from 0 on, got -1"),
        ({"y": COUNTS / 2}, "y must hold counts"),
        ({"y": COUNTS[:, 0]}, "y must have shape"),
        ({"y": None}, "total_count must be given without y"),
        ({"total_count": COUNTS.sum(-1) + 1}, "total_count must be the sums of y"),
        ({"y": None, "total_count": torch.tensor([1.5] * 4)}, "total_count must hold counts"),
        ({"y": COUNTS.double() * torch.nan}, "y must hold counts"),
        ({"total_count": COUNTS.sum(-1)[:2]}, "total_count must have shape"),
    ],
)
def test_refused(more, error):
    with pytest.raises(ValueError, match=error):
        nmm_counts(HOOD, ALPHA, LOGITS, **{"y": COUNTS, **more})


def test_kernel_refuses_latent_counts():
    with pytest.raises(ValueError, match="latent counts: give nmm_counts its y"):
        MCMC(FieldGibbs(partial(program, None, None, COUNTS.sum(-1))), 1, 1).run()


@pytest.mark.parametrize("with_labels", [False, True])
def test_a_discrete_parent_of_concentrations(with_labels):
    """Without units the posterior is the prior, given each value of the parent."""
    alone = Neighborhood(torch.empty(2, 0, dtype=torch.long), 1)
    tables = torch.tensor([[[2.0, 0.7]], [[0.7, 2.0]]])

    def model():
        b = pyro.sample("b", dist.Bernoulli(0.5))
        with scope(prefix="a"):
            nmm_counts(alone, tables[b.long()], torch.zeros(1), torch.zeros(1, 2))
        if with_labels:
            with scope(prefix="b"):
                nmm(alone, torch.ones(1, 2), torch.zeros(1), torch.tensor([0]), collapsed=True)

    pyro.set_rng_seed(0)
    kernel = FieldGibbs(model, num_moves=0)
    mcmc = MCMC(kernel, 1500, 20, disable_progbar=True)
    kernel.save_params = ["a/z", "b"]
    mcmc.run()
    draws = mcmc.get_samples()
    for value, truth in enumerate((2 / 2.7, 0.7 / 2.7)):
        z = draws["a/z"][draws["b"] == value][:, 0, 0]
        assert abs(z.mean() - truth) < 0.07
    assert abs(draws["b"].double().mean() - 0.5) < 0.1


def test_concentrations_that_depend_on_latent_labels():
    """Against the sum over all labels, with the likelihood of the counts enumerated."""
    likely = torch.tensor([0.5, -0.4, 0.3, 0.8]).double()

    def model():
        with scope(prefix="a"):
            y = nmm(HOOD, torch.ones(4, 2).double(), LOGITS, collapsed=True)
        pyro.sample("x", dist.Normal(y.double(), 1.0).to_event(1), obs=likely)
        with scope(prefix="b"):
            nmm_counts(HOOD, ALPHA * (1 + 9 * y[..., None]), LOGITS, COUNTS)

    pyro.set_rng_seed(0)
    kernel = FieldGibbs(model)
    mcmc = MCMC(kernel, 4000, 20, disable_progbar=True)
    kernel.save_params = ["a/y"]
    mcmc.run()
    labels = torch.cartesian_prod(*[torch.arange(2)] * 4)
    prior = NeighborMixture(HOOD, torch.ones(4, 2).double(), LOGITS).log_prob(labels)
    prior = prior + dist.Normal(labels.double(), 1.0).log_prob(likely).sum(-1)
    counts = [oracle().log_prob((ALPHA * (1 + 9 * y[:, None])).numpy()) for y in labels]
    shares = (prior + torch.tensor(counts)).softmax(0)
    truth, found = shares @ labels.double(), mcmc.get_samples()["a/y"].double()
    errors = found.unflatten(0, (40, 100)).mean(1).std(0) / 40**0.5
    assert ((found.mean(0) - truth).abs() < 4.5 * errors).all()


def test_kernel_refuses_counts_that_share_label_distributions():
    batch = torch.stack([COUNTS, COUNTS.flip(0)])
    with pytest.raises(ValueError, match="put nmm_counts into a"):
        MCMC(FieldGibbs(partial(program, batch)), 1, 1).run()


def test_single_precision():
    """Shares that underflow, and totals beyond 2^24."""
    hood = Neighborhood.grid(3, 3)
    y = LabelCounts(torch.full((9,), 40), torch.full((9, 3), 1 / 3)).sample()

    def small():
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
        nmm_counts(hood, kappa * torch.full((9, 3), 0.02), torch.zeros(hood.num_edges), y)

    pyro.set_rng_seed(0)
    mcmc = MCMC(FieldGibbs(small, NUTS), 30, 30, disable_progbar=True)
    mcmc.run()
    assert mcmc.get_samples()["kappa"].unique().numel() > 10
    large = torch.tensor([[12345679, 23456791], [16777217, 3]])
    given = Neighborhood(torch.tensor([[0, 1], [1, 0]]), 2), torch.ones(2, 2), torch.zeros(4)
    assert nmm_counts(*given, large, total_count=large.sum(-1)).shape == (2, 2)


def test_counts_of_other_totals_and_impossible_counts():
    fn = LabelCounts(torch.tensor(5), torch.tensor([0.5, 0.5, 0.0]), validate_args=True)
    with pytest.raises(ValueError, match="value must have the sums total_count"):
        fn.log_prob(torch.tensor([1.0, 1.0, 0.0]))
    assert fn.log_prob(torch.tensor([4.0, 0.0, 1.0])) == -torch.inf


def test_linear_in_the_edges():
    """A star's centre has all nodes for neighbours, in a logarithm of calls."""
    assert len(levels(star(1000))) == 10
