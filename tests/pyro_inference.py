# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: losses, inference and automatic guides."""

import itertools
import math
from functools import partial

import pyro
import pyro.contrib.gp.kernels as kernels
import pyro.distributions as dist
import pytest
import torch
from bounds import PATH, all_choices, check_against, gradients, near
from graphs import parameters
from pyro import infer, poutine
from pyro.contrib.autoname import scope
from pyro.infer import autoguide, inspect
from pyro.infer.mcmc import RandomWalkKernel
from pyro_rows import FIELDS, LOCS, Measured, Pair, Parent, X, Y, losses, row, vectorized
from torch.nn.functional import one_hot

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture
from pyro_nmm.guides import AutoNMM, Chains, FieldGibbs, ordered_guide
from pyro_nmm.models import nmm, nmm_counts, node_plate


@row("TraceGraph_ELBO", "Trace_ELBO")
def unbiased(name):
    for collapsed in (True, False):
        pair, elbo = Pair(collapsed=collapsed), vectorized(getattr(infer, name), 200)
        sampled = gradients(elbo, pair.model, pair.guide, [pair.log_alpha], 40)
        check_against(-pair.bound(), [pair.log_alpha], *sampled)


@row("TraceGraph_ELBO, Chains", "Trace_ELBO, Chains", "AutoNMM")
def gradient_of_the_likelihood(name):
    pair, c = Pair(), all_choices(PATH)
    model, guide = pair.at(lambda: 0.1 * pyro.param("log_alpha", pair.log_alpha).exp())
    by_hand = partial(guide, estimator=Chains(num_sweeps=5))
    guide = AutoNMM(model) if name == "AutoNMM" else by_hand
    kind = infer.TraceGraph_ELBO if name.startswith("TraceGraph") else infer.Trace_ELBO
    sampled, grads = gradients(vectorized(kind, 1000), model, guide, [pair.log_alpha], 40)
    alpha, error = 0.1 * pair.log_alpha.exp(), grads.std(0) / len(grads) ** 0.5
    mix = pair.mixture(alpha)
    exact, bound = pair.gradient(-mix.log_prob(Y)), pair.gradient(-pair.bound(alpha=alpha))
    assert ((grads.mean(0) - exact.flatten()).abs() < 4.5 * error).all()
    assert (bound - exact).norm() > 5 * error.norm()
    joint = NeighborChoice(PATH, pair.logits).log_prob(c) + mix.given(c).log_prob(Y)
    near(-sampled, (joint.softmax(0) * joint).sum().detach())


@row("TraceEnum_ELBO")
def enumerated_parent():
    pair, prior, q = Pair(), torch.tensor(0.3), torch.tensor(0.6)

    def alpha(probs):
        k = pyro.sample("k", dist.Bernoulli(probs), infer={"enumerate": "parallel"})
        return pair.alpha * (1 + 3 * k[..., None, None])

    model, guide = pair.at(partial(alpha, prior))[0], pair.at(partial(alpha, q))[1]
    sampled = losses(model, guide, kind=infer.TraceEnum_ELBO)
    bounds = torch.stack([pair.bound(alpha=pair.alpha * (1 + 3 * k)) for k in (0, 1)])
    prior, q = (torch.stack([1 - p, p]) for p in (prior, q))
    near(-sampled, (q * (bounds + (prior / q).log())).sum())


@row("TraceMeanField_ELBO, no validation")
def no_score():
    pyro.enable_validation(False)
    pair = Pair()
    elbo = vectorized(infer.TraceMeanField_ELBO, 500)
    sampled, grads = gradients(elbo, pair.model, pair.guide, [pair.log_alpha], 160)
    near(-sampled, pair.bound().detach())
    bias = grads.mean(0) - pair.gradient(-pair.bound()).flatten()
    assert bias.norm() > 3 * (grads.std(0) / 160**0.5).norm()


def self_normalised(pair, elbo):
    elbo.loss_and_grads(pair.model, pair.guide)
    exact = pair.gradient(-pair.log_prob())
    torch.testing.assert_close(pair.log_alpha.grad, exact, atol=0.03, rtol=0.1)


@row("RenyiELBO")
def importance_weighted():
    pair = Pair("reinforce")
    near(losses(pair.model, pair.guide, kind=infer.RenyiELBO, size=4000), -pair.log_prob().item())
    self_normalised(pair, vectorized(infer.RenyiELBO, 20_000, alpha=0.0))


@row("RenyiELBO, evidence_guide")
def importance_weighted_evidence():
    program = Measured()
    guide = partial(program.guide, estimator="reinforce")
    leaves = [program.loc, program.log_alpha]
    elbo = vectorized(infer.RenyiELBO, 4000, alpha=0.0)
    sampled, grads = gradients(elbo, program.model, guide, leaves, 40)
    near(sampled, -program.log_prob().item())
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(-program.log_prob(), leaves)])
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) - exact).abs() < 4.5 * error + 1e-3).all()  # biased by 1 / 4000


@row("RenyiELBO, two particles")
def few_particles():
    """Pyro has the weighted gradient of log p(y, c), and not the gradient of the bound."""
    pair, c, weighted = Pair("reinforce"), all_choices(PATH), 0.0
    mix = pair.mixture(0.1 * pair.log_alpha.exp())
    log_joint = NeighborChoice(PATH, pair.logits).log_prob(c) + mix.given(c).log_prob(Y)
    for order in itertools.permutations(range(3)):
        log_q = mix.choices(Y, order=torch.tensor(order)).log_prob(c)
        weights = (log_joint - log_q).detach()
        share = torch.sigmoid(weights[:, None] - weights)  # of the first of two
        both = (log_q[:, None] + log_q).exp().detach()
        weighted = weighted + pair.gradient((both * 2 * share * log_joint[:, None]).sum()) / 6
    exact = pair.gradient(mix.log_prob(Y))
    assert (weighted - exact).abs().max() > 0.02 * exact.abs().max()

    model, guide = pair.at(lambda: 0.1 * pyro.param("log_alpha", pair.log_alpha).exp())
    guide = partial(guide, estimator="reinforce")
    elbo = vectorized(infer.RenyiELBO, 2, alpha=0.0)
    _, grads = gradients(elbo, model, guide, [pair.log_alpha], 200)
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) + weighted.flatten()).abs() < 4.5 * error + 1e-9).all()


@row("ReweightedWakeSleep")
def wake_theta():
    pair = Pair("reinforce", torch.Tensor.detach)
    pyro.param("unused", torch.zeros(()))
    self_normalised(pair, vectorized(infer.ReweightedWakeSleep, 20_000, insomnia=1.0))


@row("TraceTMC_ELBO")
def one_draw():
    pair, elbo = Pair(), infer.TraceTMC_ELBO(max_plate_nesting=0)
    sampled = [elbo.loss(pair.model, pair.guide) for _ in range(200)]
    near(-torch.tensor(sampled), pair.bound().detach())


@row("TraceMeanField_ELBO", "TraceTailAdaptive_ELBO", "Trace_MMD", "JitTraceGraph_ELBO",
     "JitTrace_ELBO", "RenyiELBO, other estimators")  # fmt: skip
def refused(name):
    pair, options = Pair(), {"kernel": kernels.RBF(3)} if name == "Trace_MMD" else {}
    elbo = vectorized(getattr(infer, name.partition(",")[0]), 2, **options)
    elbo.loss_and_grads(pair.model, pair.guide)


@row("Importance")
def importance():
    pair = Pair()
    weights = infer.Importance(pair.model, pair.guide, 500).run().log_weights
    near(torch.stack(weights).exp(), pair.log_prob().exp().item())


@row("Predictive")
def predictive():
    pair = Pair()
    mix, c = pair.mixture(), torch.tensor([1, 1, 1])
    for collapsed, parallel, size in ((True, True, 4000), (False, True, 4000), (True, False, 300)):
        model = partial(pair.model, collapsed=collapsed)
        drawn = infer.Predictive(model, num_samples=size, parallel=parallel)(None)["y"]
        near((drawn == Y).all(-1).double(), mix.log_prob(Y).exp())
    sites = infer.Predictive(pair.model, guide=pair.guide, num_samples=4000, parallel=True)()
    assert (sites["y"] == Y).all()
    assert sites["c"].shape == (4000, 3)
    # One order is drawn, which all draws share.
    orders = map(torch.tensor, itertools.permutations(range(3)))
    exact = [mix.choices(Y, order=order).log_prob(c).exp() for order in orders]
    share = (sites["c"] == c).all(-1).double().mean()
    assert min((share - value).abs() for value in exact) < 4 * 0.5 / 4000**0.5


@row("Predictive, other nodes", "Predictive, replicates", "Predictive, uncondition")
def anew(name):
    """The numbers are in ``test_predictive.py`` and ``test_replicates.py``."""
    pair, options = Pair(), {"num_samples": 99, "parallel": True}
    model, guide = {
        "Predictive, other nodes": (
            partial(pair.model, observed=Y == 0, predict=True), partial(pair.guide, observed=Y == 0)
        ),
        "Predictive, replicates": (lambda: pair.model(None), pair.guide),
        "Predictive, uncondition": (poutine.uncondition(pair.model), pair.guide),
    }[name]  # fmt: skip
    drawn = infer.Predictive(model, guide=guide, **options)()
    labels = drawn["y_rest" if name == "Predictive, other nodes" else "y"]
    assert len(labels.unique(dim=0)) > 1


@row("Predictive, draws of MCMC", "Predictive, draws without choices")
def other_nodes_after_mcmc(name):
    """Draws of the choices are exact."""
    hood, y, observed = Neighborhood.grid(1, 5), torch.tensor([0, 1, 0, 0, 0]), torch.ones(5) > 0
    observed[2] = False
    given = hood, torch.full((5, 2), 0.05), torch.zeros(hood.num_edges)
    mix, size = NeighborMixture(*given), 20_000
    exact, q = mix.condition(y, observed).marginals()[2, 0], mix.choices(y, observed)
    drawn = q.sample((size,))
    drawn = drawn[q.log_terms(drawn).sum(-1).softmax(0).multinomial(size, replacement=True)]
    model = partial(nmm, *given, y, observed, collapsed=True, predict=True)
    if name == "Predictive, draws without choices":
        infer.Predictive(model, {"kappa": torch.ones(size)}, parallel=True)()
    found = infer.Predictive(model, {"c": drawn}, parallel=True)()["y_rest"]
    assert abs((found == 0).double().mean() - exact) < 4 * 0.5 / size**0.5


@row("Predictive, choices alone")
def forgotten():
    pair = Pair()

    def guide():
        pyro.sample("c", pair.mixture().choices(Y))

    infer.Predictive(lambda: pair.model(None), guide=guide, num_samples=9)()


@row("render_model")
def relations():
    pair = Pair()

    def model():
        alpha = pyro.param("log_alpha", pair.log_alpha).exp()
        logits = pyro.param("logits", pair.logits) * pyro.sample("sure", dist.Gamma(2.0, 1.0))
        nmm(PATH, alpha, logits, Y)

    found = inspect.get_model_relations(model)
    kinds = found["sample_sample"], found["sample_param"]
    edges = {(above, site) for kind in kinds for site, parents in kind.items() for above in parents}
    assert edges == {("log_alpha", "z"), ("logits", "c"), ("sure", "c"), ("z", "y"), ("c", "y")}
    assert found["observed"] == ["y"]


@row("render_model, mix.condition")
def relations_of_a_posterior():
    """Parameters are tracked as sites are, and the picture would lack their edges."""
    pair = Pair()

    def model():
        alpha = pyro.param("alpha", pair.alpha)
        pair.mixture(alpha).condition(Y, Y > 0)

    inspect.get_model_relations(model)


class Scalar(Pair):
    """A parent that makes labels surer."""

    def shift(self):
        return pyro.sample("shift", dist.Normal(0.0, 1.0))

    def exact(self):
        mix = self.mixture(self.alpha * self.shift().exp())
        pyro.sample("y", mix, obs=Y)

    def program(self, **options):
        alpha = self.alpha * self.shift().exp()[..., None, None]
        nmm(PATH, alpha, self.logits, Y, **options)

    def counts(self):
        """The same, as one unit of each node."""
        alpha = self.alpha * self.shift().exp()[..., None, None]
        nmm_counts(PATH, alpha, self.logits, one_hot(Y, 2))


@row(
    "NUTS, exact log_prob", "NUTS, choices summed", "NUTS, counts",
    "FieldGibbs", "FieldGibbs, RandomWalkKernel", "FieldGibbs, counts",
)  # fmt: skip
def posterior_of_a_parent(name):
    pair = Scalar()
    kernel, size = {
        "NUTS, exact log_prob": (infer.NUTS(pair.exact), 400),
        "NUTS, choices summed": (infer.NUTS(partial(pair.program, choices="summed")), 200),
        "NUTS, counts": (infer.NUTS(pair.counts), 200),
        "FieldGibbs, counts": (FieldGibbs(pair.counts), 600),
        "FieldGibbs": (FieldGibbs(partial(pair.program, collapsed=True)), 300),
        "FieldGibbs, RandomWalkKernel": (
            FieldGibbs(partial(pair.program, collapsed=True), RandomWalkKernel), 1000
        ),
    }[name]  # fmt: skip
    mcmc = infer.MCMC(kernel, size, 100, disable_progbar=True)
    mcmc.run()
    grid = torch.linspace(-6, 6, 400)
    alpha = pair.alpha * grid.exp()[:, None, None]
    log_weight = dist.Normal(0.0, 1.0).log_prob(grid)
    log_weight = log_weight + pair.mixture(alpha).log_prob(Y)
    truth = (log_weight.softmax(0) * grid).sum()
    samples = mcmc.get_samples()["shift"]
    size = mcmc.diagnostics()["shift"]["n_eff"]
    assert abs(samples.mean() - truth) < 4 * samples.std() / math.sqrt(size)


class Series:
    """A switch that stays or turns, and a field of labels at each of three times."""

    def __init__(self, pair, labels, fields):
        self.pair, self.labels, self.fields = pair, labels, fields

    def alpha(self, switch):
        return self.pair.alpha + switch[..., None, None] * torch.tensor([4.0, 0.0])

    def prior(self, state):
        last = state.get("switch")
        return dist.Bernoulli(0.5 if last is None else 0.2 + 0.6 * last)

    def step(self, state, time):
        switch = pyro.sample(f"switch {time}", self.prior(state).expand([400]))
        if not state._locked:
            state["switch"] = switch
        with scope(prefix=f"time {time}"):
            self.fields(
                PATH, self.alpha(switch), self.pair.logits, self.labels[time], collapsed=True
            )

    def init(self, state):
        self.step(state, 0)


@row("SMCFilter")
def filtering():
    pair = Pair()
    labels = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 0, 0]])
    means = []
    for _ in range(20):
        series = [Series(pair, labels, fields) for fields in (nmm, ordered_guide)]
        smc = infer.SMCFilter(*series, num_particles=400, max_plate_nesting=0)
        smc.init()
        for time in (1, 2):
            smc.step(time)
        means.append(smc.get_empirical()["switch"].mean)
    switch, turn = torch.tensor([0.0, 1.0]), torch.tensor([[0.8, 0.2], [0.2, 0.8]])
    filtered = torch.tensor([0.5, 0.5])
    alpha = series[0].alpha(switch)
    for time, y in enumerate(labels):
        filtered = filtered if time == 0 else filtered @ turn
        filtered = filtered * pair.mixture(alpha).log_prob(y).exp()
        filtered = filtered / filtered.sum()
    assert abs(torch.stack(means).mean() - filtered[1]) < 0.02
    assert abs(filtered[1] - 0.5) > 0.1


@row("infer_discrete")
def not_inferred():
    pair = Pair()
    model = infer.infer_discrete(infer.config_enumerate(pair.model), first_available_dim=-2)
    drawn = [poutine.trace(model).get_trace().nodes["c"]["value"][0] for _ in range(150)]
    attention = PATH.softmax(pair.logits)[PATH.ptr[0] : PATH.ptr[1]]
    near((torch.stack(drawn) == PATH.source[0]).double(), attention[0])


@row("AutoNormal", "AutoLowRankMultivariateNormal", "AutoIAFNormal", "AutoDelta",
     "AutoNMM, the bound")  # fmt: skip
def above_the_field(name):
    pair = Parent()
    if name == "AutoNMM, the bound":
        guide = AutoNMM(pair.model, estimator="reward_to_go")
        guide()
        auto = guide.parents
    else:
        auto = getattr(autoguide, name)(poutine.block(pair.model, hide=["c", "y"]))

        def guide():
            pair.guide_given(auto()["shift"])

    found = losses(pair.model, guide, size=200)
    with pyro.plate("num_particles_vectorized", 2000, dim=-1):
        trace = poutine.trace(auto).get_trace()
    trace.compute_log_prob()
    sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
    log_q = sum(site["log_prob"] for site in sites if site["name"] != "num_particles_vectorized")
    shift = trace.nodes["shift"]["value"]
    bound = pair.bound(Y.expand(*log_q.shape, 3), pair.alpha * shift.exp())
    exact = (pair.prior().log_prob(shift) + bound - log_q).detach()
    error = (found.var() / len(found) + exact.var() / len(exact)).sqrt()
    assert abs(found.mean() + exact.mean()) < 4 * error + 1e-9


@row("AutoNormal, choices summed", "AutoMultivariateNormal, choices summed")
def autoguide_of_all_sites(name):
    """The loss, against the paper's equation (2) at draws of the guide."""
    pair = Scalar()
    model = partial(pair.program, choices="summed")
    guide = getattr(autoguide, name.partition(",")[0])(model, init_scale=0.3)
    found = losses(model, guide, kind=infer.Trace_ELBO, size=500)
    with pyro.plate("num_particles_vectorized", 10_000, dim=-1):
        trace = poutine.trace(guide).get_trace()
        trace.compute_log_prob()
    shift, z = (trace.nodes[site]["value"] for site in ("shift", "z"))
    sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
    log_q = sum(site["log_prob"] for site in sites if site["name"] != "num_particles_vectorized")
    attention = torch.zeros(3, 3).index_put((PATH.target, PATH.source), PATH.softmax(pair.logits))
    probs = (attention @ z).gather(-1, Y.expand(len(z), 3)[..., None])[..., 0]
    prior = dist.Dirichlet(pair.alpha * shift.exp()[:, None, None]).to_event(1).log_prob(z)
    exact = dist.Normal(0.0, 1.0).log_prob(shift) + prior + probs.log().sum(-1) - log_q
    error = (found.var() / len(found) + exact.var() / len(exact)).sqrt()
    assert abs(found.mean() + exact.mean()) < 4 * error


@row("AutoNMM, latent labels")
def automatic_evidence():
    program = Measured()
    guide = AutoNMM(program.model, estimator="reward_to_go")
    near(-losses(program.model, guide, size=200), program.bound().detach())


@row("FieldGibbs, discrete sites")
def discrete_parent():
    """Of two concentrations: the posterior of the larger one."""

    def model():
        more = pyro.sample("more", dist.Bernoulli(0.3))
        alpha, logits = parameters(PATH, 2)
        with pyro.plate("labellings", 3):
            nmm(PATH, alpha * (0.2 + 3 * more), logits, FIELDS, collapsed=True)

    alpha, logits = parameters(PATH, 2)
    fields = (NeighborMixture(PATH, alpha * (0.2 + 3 * more), logits) for more in range(2))
    logs = torch.stack([field.log_prob(FIELDS).sum() for field in fields])
    exact = (logs + torch.tensor([0.7, 0.3]).double().log()).softmax(0)[1]
    kernel = FieldGibbs(model, num_sweeps=2, num_moves=1)
    kernel.save_params = ["more"]
    mcmc = infer.MCMC(kernel, 150, 5, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()["more"].double()
    assert abs(draws.mean() - exact) < 4 * (exact * (1 - exact) / 40) ** 0.5  # of four draws one


@row("Chains, weighed draws")
def weighed_states():
    pair = Pair()
    guide = partial(pair.guide, estimator=Chains())
    infer.Importance(pair.model, guide, 2).run()


@row("Chains, other data")
def other_labels():
    """One chain for all data would lag behind; it is warned of, and a plate has no need to."""
    given, chains = (PATH, *parameters(PATH, 2)), Chains()
    sides = (nmm, partial(ordered_guide, estimator=chains))
    model, guide = (partial(side, *given, collapsed=True) for side in sides)
    infer.Trace_ELBO().loss(model, guide, FIELDS[0])
    with pytest.warns(UserWarning, match="the labels changed since the step before"):
        infer.Trace_ELBO().loss(model, guide, FIELDS[1])


def with_outliers(wrap, **options):
    """A guide of latent labels whose measurements have a component, and the exact posterior."""
    program = Measured()

    def model():
        y = nmm(*program.prior, collapsed=True)
        with node_plate(PATH, y) as (nodes, y):
            m = pyro.sample("m", dist.Bernoulli(0.3), infer=options)
            pyro.sample("x", dist.Normal(LOCS[y] + 2.0 * m, 0.5), obs=X[nodes])

    terms = (dist.Normal(LOCS + 2.0 * m, 0.5).log_prob(X[:, None]) for m in range(2))
    weights = torch.tensor([0.7, 0.3]).double().log()
    evidence = torch.stack([w + t for w, t in zip(weights, terms, strict=True)]).logsumexp(0)
    guide = AutoNMM(wrap(model))
    return model, guide, NeighborMixture(*program.prior).latents(evidence).posterior()


@row("AutoNMM, enumerated sites")
def enumerated_sites():
    for wrap in (lambda model: model, partial(pyro.poutine.block, hide=["m"])):
        model, guide, exact = with_outliers(wrap, enumerate="parallel")
        infer.TraceEnum_ELBO(max_plate_nesting=1).loss_and_grads(model, guide)
        found = guide.posterior(num_samples=None, num_sweeps=0)["c"]
        torch.testing.assert_close(found.marginals(), exact.marginals())


@row("AutoNMM, hidden sites")
def hidden_sites():
    with_outliers(partial(pyro.poutine.block, hide=["m"]))[1]()


@row("AutoNMM, subsample of the model")
def subsample_of_the_model():
    def model(rows):
        with pyro.plate("rows", 9, subsample=rows):
            pyro.sample("mean", dist.Normal(0.0, 1.0))
        nmm(PATH, *parameters(PATH, 2), Y, collapsed=True)

    AutoNMM(model)(torch.tensor([7, 1]))


@row("AutoNMM, lost labels")
def lost_labels():
    def model():
        cuts = torch.tensor([-0.5, 0.8]).double()
        y = nmm(*Measured().prior, collapsed=True)
        levels = dist.OrderedLogistic(1.5 * y, cuts).to_event(1)
        pyro.sample("x", levels, obs=torch.tensor([0, 2, 1]))

    infer.TraceGraph_ELBO().loss_and_grads(model, AutoNMM(model))  # which needs no score
    guide = AutoNMM(model, estimator="reward_to_go")
    infer.Trace_ELBO().loss_and_grads(model, guide)
    infer.TraceGraph_ELBO().loss_and_grads(model, guide)


@row("AutoNMM, a sum of labels")
def no_sum_over_nodes():
    def model():
        y = nmm(*Measured().prior, collapsed=True)
        pyro.sample("x", dist.Normal(1.0 * y.sum(-1), 1.0), obs=torch.tensor(1.0))

    AutoNMM(model)()


@row("NUTS, nmm", "AutoNormal, nothing hidden", "AutoDiscreteParallel")
def choices_in_other_methods(name):
    if name == "NUTS, nmm":
        infer.MCMC(infer.NUTS(Scalar().program), 2, 2, disable_progbar=True).run()
    elif name == "AutoDiscreteParallel":
        autoguide.AutoDiscreteParallel(Pair().model)()
    else:
        autoguide.AutoNormal(Parent().model)()
