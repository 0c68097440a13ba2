# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The kernel of MCMC on graphs of three nodes, beside posteriors on a grid, and what it refuses."""

import copy
import math
from contextlib import nullcontext
from functools import cache, partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import label_probs, of_hood
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc import RandomWalkKernel

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import FieldGibbs
from pyro_nmm.guides.proposals import Proposals
from pyro_nmm.models import nmm, node_plate
from pyro_nmm.ops.diagnostics import effective_size

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
ALPHA = torch.tensor([[0.4, 0.8], [0.9, 0.3], [0.3, 0.3]]).double()
OWN = (HOOD.source == HOOD.target).double()
Y = torch.tensor([[0, 0, 1], [1, 1, 1]])
X = torch.tensor([[0.2, 2.6, -0.4], [1.4, -0.9, 1.2]]).double()
INDEX, LONG = torch.tensor([2, 0, 2, 2, 0]), torch.tensor([0.9, -0.2, 1.4, 0.3, 0.8]).double()
KEPT = (torch.eye(2) * 0.8 + 0.1).double().expand(HOOD.num_edges, 2, 2)
CHANCES, OWNS = torch.tensor([0.3, 0.6]).double(), torch.tensor([0.5, 0.2, 0.3]).double()
#: The grid of log kappa, a priori normal.
GRID = torch.linspace(-5.0, 5.0, 41).double()


@cache
def oracle(log_kappa, own=0.0):
    return of_hood(HOOD, ALPHA * math.exp(log_kappa), own * OWN)


def log_prob(y, log_kappa, own=0.0):
    found = oracle(float(log_kappa), float(own))
    return float(found.log_prob[found.index(y)])


def table(log_kappa, own=0.0):
    """All labellings, and their log-probabilities."""
    found = oracle(float(log_kappa), own)
    return torch.tensor(found.labels), torch.tensor(found.log_prob).flatten()


def log_sum(evidence, log_kappa):
    """log p(x) of latent labels with evidence ``(3, 2)``."""
    labels, log_probs = table(log_kappa)
    return float((log_probs + evidence[torch.arange(3), labels].sum(-1)).logsumexp(0))


def emission(y, sd=1.0):
    return dist.Normal(1.5 * y, sd)


def of_x(x, log_kappa):
    return log_sum(emission(torch.arange(2)).log_prob(x[:, None]), log_kappa)


def kappa_of():
    return pyro.sample("kappa", dist.LogNormal(torch.zeros(()).double(), 1.0))


def field(y=None, own=0.0, scale=1.0, kappa=None, **options):
    kappa = kappa_of() if kappa is None else kappa
    return nmm(HOOD, kappa * scale * ALPHA, own * OWN, y, **{"collapsed": True} | options)


def in_plate(**options):
    kappa = kappa_of()
    with pyro.plate("labellings", 2):
        return field(Y, kappa=kappa, **options)


def latent(plate=False):
    kappa = kappa_of()
    with pyro.plate("images", 2) if plate else nullcontext():
        pyro.sample("x", emission(field(kappa=kappa)).to_event(1), obs=X if plate else X[0])


def local_latents():
    h = pyro.sample("h", emission(field(), 0.6).to_event(1))
    pyro.sample("x", dist.Normal(h, 0.8).to_event(1), obs=X[0])


def long_format():
    with node_plate(HOOD, field(), index=INDEX) as (rows, y):
        pyro.sample("x", emission(y), obs=LONG[rows])


def of_long(log_kappa):
    terms = emission(torch.arange(2)).log_prob(LONG[:, None])
    return log_sum(torch.zeros(3, 2).double().index_add(0, INDEX, terms), log_kappa)


def two_fields(y=None):
    """With one concentration, and observed, or with observations of both."""
    kappa, found = kappa_of(), []
    for name in "ab":
        with scope(prefix=name):
            found.append(field(y, kappa=kappa))
    if y is None:
        pyro.sample("x", dist.Normal(1.0 * sum(found), 0.5).to_event(1), obs=X[0])


def of_two_fields(log_kappa):
    labels, log_probs = table(log_kappa)
    seen = dist.Normal(labels[:, None] + 1.0 * labels, 0.5).log_prob(X[0]).sum(-1)
    return float((log_probs[:, None] + log_probs + seen).flatten().logsumexp(0))


def of_matrices(log_kappa):
    alpha = ALPHA * math.exp(log_kappa)
    labels, probs = label_probs(HOOD, alpha, 0.0 * OWN, KEPT.numpy())
    return math.log(probs[(labels == Y[0].numpy()).all(1)].item())


def on_grid(likelihood):
    """Mean of log kappa and its variance."""
    log = torch.tensor([likelihood(float(k)) for k in GRID]).double()
    probs = (log - GRID**2 / 2).softmax(0)
    mean = (probs * GRID).sum()
    return {"kappa": mean, "square": (probs * (GRID - mean) ** 2).sum()}


def parents():
    """A discrete parent of the logits, and one of the concentration."""
    own = pyro.sample("own", dist.Categorical(OWNS))
    more = pyro.sample("more", dist.Bernoulli(torch.tensor(0.4).double()))
    in_plate(own=(own - 1.0) * 2.0, scale=0.5 + 2 * more)


def exact_parents():
    found = torch.zeros(3, 2, len(GRID)).double()
    for own, more, at in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        where = GRID[at] + math.log(0.5 + 2 * more), (own - 1.0) * 2.0
        found[own, more, at] = sum(log_prob(y, *where) for y in Y)
    found += OWNS.log()[:, None, None] - GRID**2 / 2
    found += torch.tensor([0.6, 0.4]).double().log()[:, None]
    probs = found.flatten().softmax(0).view_as(found)
    mean = (probs.sum((0, 1)) * GRID).sum()
    return {"own is 2": probs[2].sum(), "more": probs[:, 1].sum(), "kappa": mean}


def parent_of_each():
    """Each labelling of a plate has a parent of its own."""
    with pyro.plate("labellings", 2):
        d = pyro.sample("d", dist.Bernoulli(CHANCES))
        field(Y, scale=(0.1 + 8 * d)[:, None, None], kappa=1.0)


def exact_parent_of_each():
    logs = [[log_prob(y, math.log(size)) for size in (0.1, 8.1)] for y in Y]
    prior = torch.stack([1 - CHANCES, CHANCES], -1).log()
    first, second = (torch.tensor(logs) + prior).softmax(-1)[:, 1]
    return {"d 0": first, "d 1": second}


def outliers():
    """A node's measurement may be an outlier, which nothing sums out."""
    with node_plate(HOOD, field()) as (_, y):
        m = pyro.sample("m", dist.Bernoulli(torch.tensor(0.3).double()))
        pyro.sample("x", dist.Normal(1.5 * y + 2.0 * m, 1.0), obs=X[0])


def exact_outliers():
    of_labels = dist.Normal(1.5 * torch.arange(2)[:, None] + 2.0 * torch.arange(2), 1.0)
    terms = of_labels.log_prob(X[0][:, None, None]) + torch.tensor([0.7, 0.3]).double().log()
    every, logs = terms.logsumexp(-1), []
    for evidence in (every, torch.cat([terms[:1, :, 1], every[1:]])):  # node 0 has one
        logs.append(torch.tensor([log_sum(evidence, k) for k in GRID]) - GRID**2 / 2)
    return {"kappa": (logs[0].softmax(0) * GRID).sum(),
            "m 0": (logs[1].logsumexp(0) - logs[0].logsumexp(0)).exp()}  # fmt: skip


def attended():
    in_plate(own=pyro.sample("beta", dist.Normal(torch.zeros(()).double(), 1.0)))


def exact_attended():
    betas = torch.linspace(-4.0, 4.0, 17).double()
    logs = [[sum(log_prob(y, k, b) for y in Y) for b in betas] for k in GRID]
    weights = torch.tensor(logs).double() - (GRID**2)[:, None] / 2 - betas**2 / 2
    probs = weights.flatten().softmax(0).view_as(weights)
    return {"kappa": (probs.sum(1) * GRID).sum(), "beta": (probs.sum(0) * betas).sum()}


def posterior_of(likelihood):
    return partial(on_grid, likelihood)


ONE = partial(field, Y[0]), posterior_of(partial(log_prob, Y[0]))
BOTH = posterior_of(lambda k: sum(log_prob(y, k) for y in Y))
#: Programs, exact expectations, options of the kernel and the number of draws.
QUICK = {
    "joint moves": (*ONE, {"num_moves": 4}, 350),
    "random walk": (*ONE, {"num_moves": 4, "kernel": RandomWalkKernel}, 350),
    "steps alone": (*ONE, {"num_moves": 0, "num_sweeps": 1}, 700),
    "hmc": (*ONE, {"num_moves": 0, "kernel": HMC, "num_steps": 4}, 500),
    "discrete parents": (parents, exact_parents, {"num_moves": 3}, 250),
    "discrete parents, no joint moves": (parents, exact_parents, {"num_moves": 0}, 700),
    "in a plate": (parent_of_each, exact_parent_of_each, {"num_moves": 2}, 150),
    "outliers": (outliers, exact_outliers, {"num_moves": 2}, 150),
    "long format": (long_format, posterior_of(of_long), {"num_moves": 2}, 200),
}
SLOW = {
    "attended": (attended, exact_attended, {}, 250),
    "uncollapsed": (partial(in_plate, collapsed=False), BOTH, {}, 250),
    "matrices": (partial(field, Y[0], relabel=KEPT), posterior_of(of_matrices), {}, 250),
    "latent": (latent, posterior_of(partial(of_x, X[0])), {}, 250),
    "latent plate": (
        partial(latent, plate=True), posterior_of(lambda k: sum(of_x(x, k) for x in X)), {}, 250
    ),
    "latent, steps alone": (
        latent, posterior_of(partial(of_x, X[0])), {"num_moves": 0, "num_sweeps": 1}, 1000
    ),
    "two fields, steps alone": (
        two_fields, posterior_of(of_two_fields), {"num_moves": 0, "num_sweeps": 1}, 1000
    ),
    "local latents, default": (local_latents, posterior_of(partial(of_x, X[0])), {}, 250),
    "local latents": (local_latents, posterior_of(partial(of_x, X[0])), {"kernel": NUTS}, 120),
    "two fields": (two_fields, posterior_of(of_two_fields), {}, 250),
    "two observed fields": (
        partial(two_fields, Y[0]), posterior_of(lambda k: 2 * log_prob(Y[0], k)), {}, 250
    ),
}  # fmt: skip
CASES, KEEP = QUICK | SLOW, ("kappa", "own", "more", "m", "d", "beta")


def draws_of(model, number, warmup=100, **options):
    # Few sweeps: weights are noisy, so a wrong use of them would show.
    kernel = FieldGibbs(model, **{"num_sweeps": 2} | options)
    kernel.save_params = [n for n in poutine.trace(model).get_trace().stochastic_nodes if n in KEEP]
    mcmc = MCMC(kernel, number, warmup, disable_progbar=True)
    mcmc.run()
    return mcmc


def check(draws, exact, most=math.inf):
    error = draws.std() / effective_size(draws[None]) ** 0.5
    assert (draws.mean() - exact).abs() < 4.5 * error
    assert error < most


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_posterior(name):
    model, exact, options, number = CASES[name]
    pyro.set_rng_seed(1)
    draws, exact = draws_of(model, number, **options).get_samples(), exact()
    found = {"beta": draws.get("beta")}
    if "kappa" in draws:
        found["kappa"] = log_kappa = draws["kappa"].log()
        found["square"] = (log_kappa - exact["kappa"]) ** 2
    if "own" in draws:
        assert draws["own"].dtype == draws["more"].long().dtype == torch.long
        found |= {"own is 2": (draws["own"] == 2).double(), "more": draws["more"].double()}
    for site in {"m", "d"} & draws.keys():
        found |= {f"{site} {k}": column for k, column in enumerate(draws[site].double().T)}
    for key, value in exact.items():
        check(found[key], value, 0.4 if name in SLOW else 0.3)


@cache
def labellings():
    """Of a field with ``kappa = 1``: labellings and how often each of them is there."""
    y = NeighborMixture(HOOD, ALPHA, 0.0 * OWN).sample((200,))
    return y, *y.unique(dim=0, return_counts=True)


def many():
    kappa = kappa_of()
    with pyro.plate("labellings", 200):
        field(labellings()[0], kappa=kappa)


def test_joint_moves_of_many_labellings():
    """
    Many labellings make the posterior narrower than a proposal. Without the gain of annealing few
    proposals are accepted; without its rise too many after the first of a step.
    """
    _, rows, counts = labellings()
    log = torch.tensor([[log_prob(y, k) for y in rows] for k in GRID]).double() @ counts.double()
    probs = (log - GRID**2 / 2).softmax(0)
    mean = (probs * GRID).sum()
    log_kappa = draws_of(many, 100, 40, num_sweeps=10, num_moves=4).get_samples()["kappa"].log()
    assert effective_size(log_kappa[None]) > 40
    # By exact deviations: those of the draws would be larger, too.
    for power in (1, 2):
        found, values = ((each - mean) ** power for each in (log_kappa, GRID))
        middle = (probs * values).sum()
        error = ((probs * (values - middle) ** 2).sum() / effective_size(found[None])).sqrt()
        assert (found.mean() - middle).abs() < 4.5 * error, power


def test_factors_of_annealing_that_are_far_from_one():
    """Products of them are below the least number, and labels of before impossible."""
    hood = Neighborhood(torch.empty(2, 0).long(), num_nodes=2)
    mix = NeighborMixture(hood, torch.ones(2, 2), torch.zeros(2))
    for low in (-300.0, -440.0, -700.0, -2000.0, -torch.inf):
        start, end = mix.latents(torch.zeros(2, 2)), mix.latents(torch.tensor([[0.0, low]] * 2))
        moved, gain = start.anneal(torch.tensor([[0, 1], [1, 1]]), end, 50)
        rise = low * moved[1].sum() if moved[1].any() else 0.0
        assert gain + rise == pytest.approx(2 * math.log(0.5), rel=1e-5)  # without noise
    assert not Proposals(0).decide({}, torch.tensor(torch.inf), learns=False)


RARE = 13.0  # the prior log-odds of a large error


@pytest.mark.slow
def test_what_a_parameter_makes_impossible():
    """A flag that switches edges off, or makes all labels but one impossible, moves both ways."""
    others, y, x = HOOD.source != HOOD.target, Y[0], torch.tensor([0.0, 1.5, 0.0])

    def switched():
        flag = pyro.sample("flag", dist.Bernoulli(torch.tensor(0.5)))
        logits = torch.where(others & (flag > 0), -torch.inf, 0.0)
        nmm(HOOD, 0.3 * ALPHA, logits, y, collapsed=True)

    def narrow():
        flag = pyro.sample("flag", dist.Bernoulli(logits=torch.tensor(RARE)))
        labels, sd = nmm(HOOD, ALPHA, OWN, collapsed=True), torch.where(flag > 0, 1.0, 0.01)
        pyro.sample("x", dist.Normal(1.5 * labels, sd).to_event(1), obs=x)

    def enumerated(program):
        logs = []
        for flag in (0.0, 1.0):
            given = pyro.poutine.condition(program, {"flag": torch.tensor(flag)})
            trace = pyro.poutine.trace(given).get_trace()
            prior = trace.nodes["c"]["infer"]["nmm"][0]
            if program is switched and flag:  # each of its own
                own = (prior.alpha / prior.alpha.sum(-1, keepdim=True))[torch.arange(3), y]
                logs.append(own.log().sum().double())
                continue
            found = of_hood(HOOD, prior.alpha, prior.logits)
            log = torch.tensor(found.log_prob)
            labels = torch.tensor(found.labels)
            if program is narrow:
                of_x = dist.Normal(1.5 * labels, (0.01, 1.0)[int(flag)])
                seen = of_x.log_prob(x).sum(-1) + flag * RARE
                logs.append((log.flatten() + seen).logsumexp(0))
            else:
                logs.append(log.flatten()[(labels == y).all(-1)].logsumexp(0))
        return torch.stack(logs).softmax(0)[1]

    for program in (switched, narrow):
        pyro.set_rng_seed(0)
        kernel = FieldGibbs(program, num_sweeps=4)
        kernel.save_params = ["flag"]
        mcmc = MCMC(kernel, 800, 20, disable_progbar=True)
        mcmc.run()
        flags, exact = mcmc.get_samples()["flag"].double(), enumerated(program)
        error = (exact * (1 - exact) / effective_size(flags[None])).sqrt()
        assert 0.02 < exact < 0.98
        assert (flags.mean() - exact).abs() < 4.5 * error, program.__name__


def test_label_distributions_are_of_the_kept_parameters():
    def uncollapsed():
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 2.0))
        nmm(HOOD, kappa * torch.ones(3, 2), torch.zeros(HOOD.num_edges), Y[0])

    pyro.set_rng_seed(0)
    kernel = FieldGibbs(uncollapsed)
    kernel.save_params = ["kappa", "c", "z"]
    mcmc = MCMC(kernel, 600, 100, disable_progbar=True)
    mcmc.run()
    kappa, c, z = (mcmc.get_samples()[name] for name in ("kappa", "c", "z"))
    counts = torch.zeros_like(z)
    for n in range(3):
        counts[torch.arange(len(c)), c[:, n], Y[0][n]] += 1
    alpha = kappa[:, None, None] + counts
    mean = alpha / alpha.sum(-1, keepdim=True)
    sd = (mean * (1 - mean) / (alpha.sum(-1, keepdim=True) + 1)).sqrt()
    scores = ((z - mean) / sd)[..., 0]  # independent given the rest
    assert abs(scores.square().mean() - 1) < 0.2
    assert abs((scores.square().mean(1) * kappa.log()).mean() - kappa.log().mean()) < 0.3


def test_a_second_run_has_constraints_of_its_own():
    def bounded(high):
        r = pyro.sample("r", dist.Uniform(0.0, high))
        pyro.sample("before r", dist.Uniform(20.0, 21.0))
        nmm(HOOD, ALPHA + 0 * r, torch.zeros(HOOD.num_edges), Y[0], collapsed=True)

    pyro.set_rng_seed(0)
    kernel = FieldGibbs(bounded)
    for high in (1.0, 10.0):
        mcmc = MCMC(kernel, 90, 50, disable_progbar=True)
        mcmc.run(high)
        assert 0.8 * high < mcmc.get_samples()["r"].max() < high
        assert mcmc.get_samples()["before r"].min() > 20


def test_draws_say_what_they_are_worth():
    with pytest.warns(
        UserWarning, match="kappa has .* effective draws of 200: raise num_samples to"
    ):
        mcmc = draws_of(many, 200, 20, num_sweeps=1, num_moves=0)
    found, log_kappa = mcmc.diagnostics(), mcmc.get_samples()["kappa"].log()
    sizes = found["effective draws"]["chain 0"]
    assert sizes["kappa"] == pytest.approx(effective_size(log_kappa[None]).item(), rel=1e-3)
    assert sizes["log density"] > sizes["kappa"]
    assert found["log density"]["chain 0"].shape == (200,)
    mcmc.kernel.setup(5)  # a second run counts its own draws
    assert not {"log density", "effective draws"} & set(mcmc.kernel.diagnostics())


def test_energies_are_of_the_new_choices():
    """At the energy of the choices before, one step in forty is accepted."""
    options = {"step_size": 0.1, "num_steps": 3, "adapt_step_size": False}
    mcmc = draws_of(many, 40, 5, kernel=HMC, num_sweeps=1, num_moves=0, **options)
    assert mcmc.diagnostics()["acceptance rate"]["chain 0"] > 0.9


@pytest.mark.parametrize("kernel", [NUTS, HMC, None])
def test_kernels_of_pyro_in_inference_mode(kernel):
    with torch.inference_mode():
        mcmc = draws_of(attended, 20, 10, kernel=kernel)
    mcmc.summary()
    assert {"acceptance rate", "divergences"} < set(mcmc.diagnostics())
    assert {"step size", "acc. prob"} == set(mcmc.kernel.logging())
    assert mcmc.get_samples()["beta"].shape == (20,)


@pytest.mark.parametrize("latent", [False, True])
def test_weights_of_annealing(latent):
    """Their mean is a ratio of likelihoods; and the way back is the same from the other end."""
    kind, shown = (EvidenceConditional, torch.stack([-X[0], X[0]], -1)) if latent else (
        OrderedConditional, Y[0])  # fmt: skip
    ends, logs, flows = [], [], []
    for size in (3.0, 0.2):
        given, data = (HOOD, size * ALPHA, size * OWN), size * shown if latent else shown
        ends.append(kind(*given, data, order=torch.tensor([2, 0, 1])))
        found = of_hood(*given)
        each, labels = torch.tensor(found.log_prob).flatten(), torch.tensor(found.labels)
        seen = (each + data[torch.arange(3), labels].sum(1)).logsumexp(0) if latent else None
        logs.append(seen if latent else each[found.index(Y[0])])
    for (here, there), ratio in ((ends, logs[1] - logs[0]), (ends[::-1], logs[0] - logs[1])):
        draws = here.sweep(here.sample((60_000,)), 10)
        first = here.log_terms(draws).sum(-1) + here.log_prob(draws)
        moved, gain = here.anneal(draws, there, 2)
        last = there.log_terms(moved).sum(-1) + there.log_prob(moved)
        log_weight = gain + last - first - ratio
        error = log_weight.exp().std() / len(draws) ** 0.5
        assert abs(log_weight.exp().mean() - 1) < 4.5 * error < 0.2
        # How often a node that chooses itself has another that does after an accepted move.
        choices = [states[:, 0] if latent else states for states in (draws, moved)]
        own = [(c == torch.arange(3)).double() for c in choices]
        flows.append(torch.einsum("bi, bj, b -> bij", *own, log_weight.clamp(max=0).exp()))
    there, back = flows[0], flows[1].mT
    error = (there.var(0) / len(there) + back.var(0) / len(back)).sqrt()
    assert ((there.mean(0) - back.mean(0)) / error).square().sum() < 40


def test_proposals():
    """They keep a normal distribution of three parameters, whatever a warm-up has met."""
    root, mean = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.3, -0.2, 1.0]]), torch.ones(3)
    target = dist.MultivariateNormal(mean, scale_tril=root)
    params, proposals, kept = {"a": torch.zeros(2), "b": torch.zeros(())}, Proposals(400), []

    def joined(params):
        return torch.cat([params["a"], params["b"][None]])

    for step in range(4400):
        new, log_ratio = proposals.propose(params)
        gain = target.log_prob(joined(new)) - target.log_prob(joined(params))
        params = new if proposals.decide(params, log_ratio + gain) else params
        kept += [joined(params)] if step >= 400 else []
    for part, exact, square in zip(
        torch.stack(kept).T, mean, (root @ root.T).diagonal(), strict=True
    ):
        check(part, exact, 0.1 * square.sqrt())
        check((part - exact).square(), square)
    assert not proposals.decide(params, torch.tensor(torch.nan))


def thinned():
    kappa = kappa_of()
    with pyro.plate("labellings", 2, subsample_size=1) as index:
        field(Y[index], kappa=kappa)


def copied():
    with pyro.plate("num_particles_vectorized", 4, dim=-1):
        field(Y[0], kappa=kappa_of()[..., None, None])


def below(kind):
    """A field whose concentration has another parent."""
    field(Y[0], scale=0.5 + pyro.sample("m", kind))


def blocked(kind):
    return poutine.block(partial(below, kind), hide=["m"])


def with_nan():
    pyro.sample("x", dist.Normal(kappa_of(), 1.0), obs=torch.tensor(math.nan).double())
    field(Y[0], kappa=1.0)


def started():
    values = {"kappa": torch.tensor(0.1), "c": torch.arange(3)}
    MCMC(FieldGibbs(ONE[0]), 2, 2, initial_params=values, disable_progbar=True).run()


def with_hidden_field():
    ONE[0]()
    hidden = scope(partial(field, Y[0], kappa=1.0), prefix="a")
    poutine.block(hidden, hide=["a/c"])()


HIDES = r"hides random sites \['m'\]"


@pytest.mark.parametrize(
    ("run", "match"),
    [
        *((partial(draws_of, program, 2, 2), match) for program, match in (
            (thinned, "subsamples"),
            (copied, "one copy"),
            (partial(below, dist.Poisson(2.0)), "'m' is discrete and its values cannot be enum"),
            (kappa_of, "has no nmm"),
            (poutine.scale(ONE[0], scale=2.0), "poutine.scale"),
            (poutine.mask(ONE[0], mask=False), "or poutine.mask"),
            (blocked(dist.Bernoulli(0.5)), HIDES),
            (blocked(dist.LogNormal(0.0, 1.0)), HIDES),
            (with_hidden_field, "hides site 'a/c' of a field"),
            (with_nan, "site 'x' has NaN in its data"),
        )),
        (partial(FieldGibbs, ONE[0], NUTS(ONE[0])), r"FieldGibbs\(model, NUTS\)"),
        (partial(FieldGibbs, NUTS(ONE[0])), r"FieldGibbs\(model, NUTS\)"),
        (started, "initial_params must have unconstrained values of all continuous sites and no"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pyro.validation_enabled(False), pytest.raises(ValueError, match=match):
        run()


def test_an_interrupted_run_leaves_no_start():
    class Stop(Exception):
        pass

    def hook(kernel, *_):
        raise Stop

    kernel = FieldGibbs(ONE[0])
    start = {name: torch.tensor(3.0) for name in ("kappa",)}
    with pytest.raises(Stop):
        MCMC(kernel, 2, 2, initial_params=start, hook_fn=hook, disable_progbar=True).run()
    found = []
    for each in (kernel, FieldGibbs(ONE[0])):
        pyro.set_rng_seed(0)
        mcmc = MCMC(each, 2, 2, disable_progbar=True)
        mcmc.run()
        found.append(mcmc.get_samples()["kappa"])
        copy.deepcopy(each)
    assert torch.equal(*found)
