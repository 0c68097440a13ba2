# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel, against sums over choices and label distributions' moments in NumPy."""

import itertools
from functools import partial

import networkx as nx
import numpy as np
import pyro
import pytest
import torch
from cases import KINDS, everything, matrices, permutations, random_case
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import edge_lists
from pyro.distributions import Categorical
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, WeighedPredictive
from pyro.optim import Adam
from scipy.special import gammaln
from scipy.stats import chi2
from torch.nn.functional import one_hot

from pyro_nmm import EvidenceConditional, NeighborMixture, OrderedConditional, models
from pyro_nmm.guides import AmortizedNMM, FieldGuide, MixtureGuide, density, ordered_guide
from pyro_nmm.models import FreeNMM, nmm
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.ops.sampling import draw_by_sweeps
from pyro_nmm.relabel import evidence_of

GRAPHS = {"star": partial(star, 3), "house": house, "shared": shared_sources}
GRAPHS |= {"path": lambda: to_hood(nx.path_graph(4))}


class Truth:
    """
    p(y) over all labellings of some nodes, as the model reads: a sum over choices and borrowed
    labels of attention, moments of the label distributions, and what edges make of a label.
    """

    def __init__(self, hood, alpha, logits, relabel):
        alpha, size = alpha.numpy(), alpha.shape[1]
        table = relabel if relabel.is_floating_point() else one_hot(relabel, size).double()
        neighbors, attention = edge_lists(hood, logits)
        first, table = hood.ptr.numpy(), table.numpy()
        num_nodes = len(neighbors)
        self.labels = np.array(list(itertools.product(range(size), repeat=num_nodes)))
        self.probs = np.zeros(len(self.labels))
        for places in itertools.product(*(range(len(row)) for row in neighbors)):
            weight = np.prod([attention[i][place] for i, place in enumerate(places)])
            chosen = [neighbors[i][place] for i, place in enumerate(places)]
            edges = [first[i] + place for i, place in enumerate(places)]
            for borrowed in itertools.product(range(size), repeat=num_nodes):
                counts = np.zeros_like(alpha)
                np.add.at(counts, (chosen, borrowed), 1)
                moment = gammaln(alpha + counts).sum(1) - gammaln((alpha + counts).sum(1))
                moment -= gammaln(alpha).sum(1) - gammaln(alpha.sum(1))
                shown = np.ones(len(self.labels))
                for i in range(num_nodes):
                    shown *= table[edges[i], borrowed[i], self.labels[:, i]]
                self.probs += weight * np.exp(moment.sum()) * shown

    def table(self, *nodes):
        size = self.labels.max() + 1
        found = np.zeros((size,) * len(nodes))
        np.add.at(found, tuple(self.labels[:, n] for n in nodes), self.probs)
        return torch.tensor(found)


def case(name, kind, size=2):
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, size, scale=1.0)
    relabel = KINDS[kind](hood, size)
    return NeighborMixture(hood, alpha, logits, relabel), Truth(hood, alpha, logits, relabel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "size"), [("star", 2), ("shared", 2), ("path", 2), ("path", 3)])
def test_distribution(name, size, kind):
    """Likelihood, marginals, pairs and small sets."""
    mix, truth = case(name, kind, size)
    num_nodes, labels = mix.hood.num_nodes, torch.tensor(truth.labels)
    torch.testing.assert_close(mix.log_prob(labels).exp(), torch.tensor(truth.probs))
    marginals = torch.stack([truth.table(i) for i in range(num_nodes)])
    torch.testing.assert_close(mix.marginals(), marginals)
    torch.testing.assert_close(
        mix.node_log_probs(labels[1]), marginals[torch.arange(num_nodes), labels[1]].log()
    )
    pairs = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]])
    tables = torch.stack([truth.table(i, j) for i, j in pairs.T[:4].tolist()])
    torch.testing.assert_close(mix.pairwise(pairs)[:4], tables)
    torch.testing.assert_close(mix.pairwise(pairs)[4], marginals[3].diag())
    some = labellings(2, size)
    found = mix.log_marginal(torch.tensor([2, 0]), some).exp()
    torch.testing.assert_close(found, truth.table(2, 0).flatten())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [None, True, False], ids=["exact", "weighted", "equal"])
def test_posterior(kernels, kind, weighted):
    """Marginals, pairs and draws of the others, given two labels; then a third."""
    mix, truth = case("shared", kind)
    y, mask = torch.tensor([1, -1, 0, -1, 1]), torch.tensor([True, False, True, False, False])
    options = {} if weighted is None else {"num_samples": 40_000, "weighted": weighted}
    posterior = mix.condition(y, mask, **options)
    match = (truth.labels[:, [0, 2]] == [1, 0]).all(1)
    error = {None: 1e-9, True: 0.02, False: 0.1}[weighted]
    for step in range(2):
        probs = torch.tensor(truth.probs * match / truth.probs[match].sum())
        labels = torch.tensor(truth.labels)
        marginals = torch.stack(
            [torch.stack([probs[labels[:, i] == k].sum() for k in range(2)]) for i in range(5)]
        )
        torch.testing.assert_close(posterior.marginals(), marginals, rtol=0, atol=error)
        pairs = torch.tensor([[1, 0, 3], [3, 4, 1]])
        tables = torch.zeros(3, 2, 2)
        for place, (i, j) in enumerate(pairs.T.tolist()):
            tables[place].index_put_((labels[:, i], labels[:, j]), probs, accumulate=True)
        torch.testing.assert_close(posterior.pairwise(pairs), tables, rtol=0, atol=error)
        free = torch.tensor([1, 3])
        log_probs = posterior.log_marginal(free, labellings(2))
        torch.testing.assert_close(log_probs.exp(), tables[0].flatten(), rtol=0, atol=error)
        draws = posterior.sample((20_000,))
        assert (draws[:, [0, 2]] == torch.tensor([1, 0])).all()
        counts = torch.stack([(draws == row).all(1).sum() for row in labels[probs > 0]])
        if weighted is None:
            expected = 20_000 * probs[probs > 0]
            statistic = ((counts - expected) ** 2 / expected).sum()
            assert chi2.sf(statistic, len(counts) - 1) > 1e-4
        assert posterior.predict()[[0, 2]].tolist() == [1, 0]
        if step == 0:
            posterior = posterior.condition(y, torch.tensor([False] * 4 + [True]))
            match &= truth.labels[:, 4] == 1
    assert posterior.predict(torch.tensor([1, 3]), method="joint").tolist() == list(
        labellings(2)[posterior.log_marginal(free, labellings(2)).argmax()]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_samples(kind):
    """With a batch of matrices too, and per draw."""
    mix, truth = case("path", kind)
    draws = mix.sample((40_000,))
    counts = torch.stack([(draws == torch.tensor(row)).all(1).sum() for row in truth.labels])
    expected = 40_000 * torch.tensor(truth.probs)
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) > 1e-4
    if kind == "permutations":
        c = torch.tensor([[1, 0, 2, 2], [0, 1, 1, 3]])
        q = mix.given(c)
        total = q.log_prob(labellings(4)[:, None]).exp().sum(0)
        torch.testing.assert_close(total, torch.ones(2))
        draws = q.sample((30_000,))
        for b in range(2):
            probs = q.log_prob(labellings(4)[:, None]).exp()[:, b]
            counts = torch.stack([(draws[:, b] == row).all(1).sum() for row in labellings(4)])
            statistic = ((counts - 30_000 * probs) ** 2 / (30_000 * probs)).sum()
            assert chi2.sf(statistic, 15) > 1e-4


def test_batch_of_matrices():
    hood = GRAPHS["path"]()
    alpha, logits = parameters(hood, 2, (3,))
    relabel = matrices(hood, 2, (3,))
    mix = NeighborMixture(hood, alpha, logits, relabel)
    pairs, y = torch.tensor([[0, 1], [2, 2]]), labellings(4)
    single = [NeighborMixture(hood, *part) for part in zip(alpha, logits, relabel, strict=True)]
    for b, one in enumerate(single):
        torch.testing.assert_close(mix.marginals()[b], one.marginals())
        torch.testing.assert_close(mix.pairwise(pairs)[b], one.pairwise(pairs))
        torch.testing.assert_close(mix.log_prob(y[:, None])[:, b], one.log_prob(y))
    assert mix.sample((4,)).shape == (4, 3, 4)
    means = mix.sample((20_000,)).double().mean(0)
    assert (means - mix.marginals()[..., 1]).abs().max() < 0.02
    assert mix.elbo(y[5], num_samples=7).shape == (7, 3)


@pytest.mark.parametrize("name", GRAPHS)
def test_permutations_in_order(kernels, name):
    """q(c | y) sums to one, and its weights to p(y), for every order."""
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, 3)
    relabel, y = permutations(hood, 3), torch.randint(3, (hood.num_nodes,))
    mix, choices = NeighborMixture(hood, alpha, logits, relabel), enumerate_choices(hood)
    c = hood.source[choices]
    for _ in range(3):
        q = mix.choices(y, order=torch.randperm(hood.num_nodes))
        log_q, bound = q.log_prob(c), q.log_labels(c).sum(-1)
        torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0))
        torch.testing.assert_close((log_q + bound).logsumexp(0), mix.log_prob(y))


@pytest.mark.slow
@settings(
    max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**31), st.sampled_from(["random", "hubs", "grid", "sources"]))
def test_permutations_are_evidence(kernels, seed, kind):
    """Bit for bit the choices, their probabilities and what they are charged with."""
    hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, kind)
    size, generator = alpha.shape[-1], torch.Generator().manual_seed(seed)
    ranks = torch.rand(hood.num_edges, size, generator=generator)
    relabel = ranks.argsort(-1)
    evidence = evidence_of(hood, one_hot(relabel, size).double(), y, observed)
    way = ("reward_to_go", "one_step_credit")[seed % 2]
    one = OrderedConditional(hood, alpha, logits, y, observed, order, way, relabel)
    two = EvidenceConditional(hood, alpha, logits, evidence, observed, order, way)
    draws = [q._draw(shape, uniforms) for q in (one, two)]
    assert torch.equal(draws[0].edges, draws[1].edges)
    one._draw, two._draw = (lambda *_, d=d: d for d in draws)
    one, two = one.expand(shape), two.expand(shape)
    c, both = one.sample(), two.sample()
    assert torch.equal(torch.stack([c, one.borrowed(c)], -2), both)
    assert torch.equal(one.borrowed(c.clone()), both[..., 1, :])
    torch.testing.assert_close(one.log_prob(c), two.log_prob(both))
    torch.testing.assert_close(one.log_prob(c.clone()), two.log_prob(both))
    torch.testing.assert_close(one.log_labels(c), two.log_evidence(both))
    costs = one.log_labels(c).detach()
    torch.testing.assert_close(one._costs(draws[0], costs), two._costs(draws[1], costs))


def test_compiled_draw_is_the_fixed_point():
    hood = house()
    alpha, logits = parameters(hood, 3)
    q = OrderedConditional(
        hood, alpha, logits, torch.randint(3, (5,)), relabel=permutations(hood, 3)
    )
    uniforms = torch.rand(50, 5, dtype=torch.double)
    terms, labels = q._flat(torch.Size([50]))
    sweeps = draw_by_sweeps(q.rows, terms, labels, 3, uniforms)
    for one, two in zip(q._draw(torch.Size([50]), uniforms), sweeps, strict=True):
        assert torch.equal(one, two)


def test_edges_that_keep_labels_change_nothing():
    """The identity, as a permutation bit for bit."""
    hood = house()
    alpha, logits = parameters(hood, 3)
    y, order = torch.randint(3, (5,)), torch.randperm(5)
    keep = torch.arange(3).expand(hood.num_edges, -1)
    values = []
    for relabel in (None, keep):
        torch.manual_seed(1)
        q = OrderedConditional(hood, alpha, logits, y, order=order, relabel=relabel)
        c = q.sample((20,))
        values.append([c, q.log_prob(c), q.log_labels(c), q.borrowed(c)])
    assert all(map(torch.equal, *values))
    plain = NeighborMixture(hood, alpha, logits)
    for relabel in (keep, torch.eye(3).expand(hood.num_edges, -1, -1)):
        mix = NeighborMixture(hood, alpha, logits, relabel)
        torch.testing.assert_close(mix.log_prob(y), plain.log_prob(y))
        torch.testing.assert_close(mix.marginals(), plain.marginals())


@pytest.mark.parametrize("kind", KINDS)
def test_likelihood_estimates(kind):
    """The bound below, and sequential Monte Carlo at, the exact value; conditional too."""
    mix, _ = case("house", kind)
    y = torch.tensor([0, 1, 1, 0, 1])
    exact = mix.log_prob(y)
    bound = mix.elbo(y, num_samples=4000)
    assert bound.mean() < exact + 4 * bound.std() / 4000**0.5
    weights = (bound - exact).exp()
    assert abs(weights.mean() - 1) < 4 * weights.std() / 4000**0.5
    assert abs(mix.log_likelihood(y, num_particles=20_000, num_stages=3) - exact) < 0.03
    given, first = torch.tensor([True, False, True, False, False]), torch.tensor([0, 2])
    rest = mix.log_likelihood(y, given=given, num_particles=20_000, num_stages=2)
    assert abs(rest - (exact - mix.log_marginal(first, y[first]))) < 0.03
    unseen = y.where(given, -1)  # never read
    assert mix.elbo(unseen, given).isfinite().all()


class Program:
    """Two observed labels of a path, and leaf parameters."""

    def __init__(self, kind):
        self.hood = to_hood(nx.path_graph(3))
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha, self.kind = alpha.log(), kind
        self.weight = torch.randn(self.hood.num_edges)
        self.flips = permutations(self.hood, 2)
        self.y = torch.tensor([0, 1, 1])
        self.leaves = [self.log_alpha, self.logits] + [self.weight] * (kind == "matrices")
        for leaf in self.leaves:
            leaf.requires_grad_()

    def arguments(self):
        relabel = self.flips
        if self.kind == "matrices":
            keep = self.weight.sigmoid().view(-1, 1, 1)
            relabel = keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)
        return self.hood, self.log_alpha.exp(), self.logits, relabel

    def model(self, **options):
        pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for a parameter before it derives
        *arguments, relabel = self.arguments()
        nmm(*arguments, self.y, relabel=relabel, **options)

    def guide(self, **options):
        *arguments, relabel = self.arguments()
        ordered_guide(*arguments, self.y, relabel=relabel, **options)

    def exact_gradient(self):
        """Mean over all orders of the bound, a sum over all choices and borrowed labels."""
        *arguments, relabel = self.arguments()
        if self.kind == "permutations":
            relabel = one_hot(relabel, 2).double()
        value, bounds = everything(self.hood, 2), []
        for order in itertools.permutations(range(3)):
            evidence = evidence_of(self.hood, relabel, self.y)
            q = EvidenceConditional(*arguments, evidence, order=torch.tensor(order))
            log_q, bound = q.log_prob(value), q.log_evidence(value).sum(-1)
            there = log_q.isfinite()
            bounds.append((log_q[there].exp() * bound[there]).sum())
        return self.flat(torch.autograd.grad(-torch.stack(bounds).mean(), self.leaves))

    def flat(self, grads):
        return torch.cat([g.flatten() for g in grads])

    def sampled_gradient(self, elbo, **options):
        for leaf in self.leaves:
            leaf.grad = None
        collapsed = {"collapsed": options["collapsed"]}
        elbo.loss_and_grads(partial(self.model, **collapsed), partial(self.guide, **options))
        return self.flat([leaf.grad for leaf in self.leaves])


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True], ids=["teaching", "collapsed"])
@pytest.mark.parametrize("estimator", ["reward_to_go", "reinforce"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [TraceGraph_ELBO, Trace_ELBO])
def test_gradient(loss, kind, estimator, collapsed):
    program, steps = Program(kind), 200
    elbo = loss(100, max_plate_nesting=0, vectorize_particles=True)
    options = {"collapsed": collapsed, "estimator": estimator}
    grads = torch.stack([program.sampled_gradient(elbo, **options) for _ in range(steps)])
    error, truth = grads.std(0) / steps**0.5, program.exact_gradient()
    assert ((grads.mean(0) - truth).abs() < 4 * error + 1e-9).all()


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_predictive(kind, collapsed):
    """Labels of the other nodes by Pyro's weighed predictive, against the exact conditional."""
    mix, _ = case("path", kind)
    y, observed = torch.tensor([1, -1, 0, -1]), torch.tensor([True, False, True, False])
    given, options = (mix.hood, mix.alpha, mix.logits, y, observed), {"relabel": mix.relabel}
    options["collapsed"] = collapsed
    guide = partial(ordered_guide, **options)
    model = partial(nmm, predict=True, **options)
    draws = WeighedPredictive(model, guide=guide, num_samples=50_000, parallel=True)(*given)
    weights = draws.log_weights.softmax(0)
    hit = one_hot(draws.samples["y_rest"] @ torch.tensor([2, 1]), 4).double()
    rest = torch.tensor([1, 3])
    exact = mix.condition(y, observed).log_marginal(rest, labellings(2)).exp()
    error = (weights[:, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert ((weights @ hit - exact).abs() < 4 * error).all()
    total = draws.log_weights.exp()
    truth = mix.log_marginal(torch.tensor([0, 2]), y[observed]).exp()
    assert (total.mean() - truth).abs() < 4 * total.std() / len(total) ** 0.5 + 1e-9


def fitted(hood, log_target, kind, seed, steps):
    """The KL divergence from a distribution over all labellings that maximum likelihood leaves."""
    torch.manual_seed(seed)
    own = hood.source == hood.target
    alpha = torch.randn(hood.num_nodes, 2).requires_grad_()
    logits = torch.randn(hood.num_edges).requires_grad_()
    weight = torch.where(own, 0.6, -0.6).requires_grad_()
    optimizer = torch.optim.Adam([alpha, logits, weight], lr=0.1)
    for _ in range(steps):
        relabel, scores = None, logits
        if kind == "independent":
            scores = logits + 100 * own
        if kind == "flips":  # keeping and flipping compete on every edge
            keep = weight.sigmoid().view(-1, 1, 1)
            relabel = keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)
        mix = NeighborMixture(hood, alpha.exp() + 1e-3, scores, relabel, validate_args=False)
        log_prob = mix.log_prob(labellings(hood.num_nodes))
        loss = (log_target.exp() * (log_target - log_prob)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def ising(graph, coupling):
    spins = 2.0 * labellings(len(graph)) - 1
    return sum(coupling * spins[:, a] * spins[:, b] for a, b in graph.edges).log_softmax(0)


@pytest.mark.slow
def test_repelling_labels_need_edges_that_flip():
    """An Ising path and a frustrated triangle: independent labels, plain edges, and flips."""
    path, triangle = nx.path_graph(4), nx.cycle_graph(3)
    found = {}
    for kind, seeds in {"independent": [0], "plain": [0], "flips": range(4)}.items():
        of = partial(fitted, to_hood(path), ising(path, -1.0), kind)
        found[kind] = min(of(seed, 600) for seed in seeds)
    assert found["flips"] < 0.14
    assert 0.62 < found["plain"] < 0.63
    assert found["independent"] > 0.98
    of = partial(fitted, to_hood(triangle), ising(triangle, -0.5))
    assert of("flips", 0, 300) < 1e-4
    assert of("plain", 0, 300) > 0.157 > of("independent", 0, 300) - 1e-3


@pytest.mark.slow
def test_family_with_flips():
    """As a black-box guide of two spins that repel: the bound becomes the partition function."""
    hood = to_hood(nx.path_graph(2))
    own = (hood.source == hood.target)[:, None]
    flips = torch.where(own, torch.tensor([0, 1]), torch.tensor([1, 0]))

    def repel(y):
        return -2.0 * (2.0 * y[..., 0] - 1) * (2.0 * y[..., 1] - 1)

    log_z, gaps = repel(labellings(2)).logsumexp(0).item(), {}
    for name, relabel in {"plain": None, "flips": flips}.items():
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        make = partial(NeighborMixture, relabel=relabel)
        family = MixtureGuide(hood, FreeNMM(hood, 2, kappa=0.5), density(repel, 2, 2), family=make)
        elbo = TraceGraph_ELBO(32, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(family.model, family.guide, Adam({"lr": 0.05}), elbo)
        losses = [svi.step() for _ in range(400)]
        gaps[name] = sum(losses[-50:]) / 50 + log_z
    assert gaps["flips"] < 0.1 < 0.5 < gaps["plain"]


def test_network_that_relabels():
    """A third output of a network goes through model, guide and queries."""
    hood = to_hood(nx.path_graph(3))

    class Network(FreeNMM):
        def forward(self, hood):
            return *super().forward(hood), torch.eye(2).flip(0).expand(hood.num_edges, 2, 2)

    program = AmortizedNMM(hood, Network(hood, 2))
    y = torch.tensor([0, 1, 0])
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    assert elbo.loss_and_grads(program.model, program.guide, y=y) > 0
    assert program.mixture().relabel.shape == (7, 2, 2)


def test_families_with_a_network_that_relabels():
    """Permutations are a third output for a guide of sampled labels; a field's guide refuses."""
    hood = to_hood(nx.path_graph(2))
    flips = torch.tensor([[1, 0]]).expand(hood.num_edges, 2)

    class Network(FreeNMM):
        def forward(self, hood):
            return *super().forward(hood), flips

    def target():
        return pyro.sample("y", Categorical(torch.tensor([0.1, 0.9])).expand([2]).to_event(1))

    family = MixtureGuide(hood, Network(hood, 2), target)
    elbo = TraceGraph_ELBO(16, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(family.model, family.guide, Adam({"lr": 0.1}), elbo)
    for _ in range(60):
        svi.step()
    mixture = family.mixture()
    assert mixture.relabel.equal(flips)
    assert (mixture.marginals()[:, 1] > 0.7).all()
    assert (mixture.alpha.argmax(-1) == 0).all()  # which every edge turns round
    target = models.ising(torch.tensor([[0], [1]]), 0.1, torch.zeros(2))
    family = FieldGuide(hood, Network(hood, 2), target, name="field")
    with pytest.raises(ValueError, match="edges that keep labels"):
        family.guide()


BAD = {
    r"relabel must hold integers of shape \(17, 2\) or probabilities of shape \(17, 2, 2\)": (
        torch.zeros(17, 3, dtype=torch.long)
    ),
    r"got torch.float32 of shape \(17, 2\)": torch.zeros(17, 2),
    r"permutations of 0..1, got \[0, 0\] at \[3\]": torch.tensor([[0, 1]] * 3 + [[0, 0]] * 14),
    r"sum to one over the last dimension, got \[0.5, 0.6\] at \[0, 0\]": (
        torch.tensor([[0.5, 0.6], [1, 0]]).expand(17, 2, 2)
    ),
    "relabel must be a tensor, got": [[0, 1]],
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        NeighborMixture(house(), *parameters(house(), 2), BAD[message])


def test_refusals():
    hood = house()
    mix = NeighborMixture(hood, *parameters(hood, 2), matrices(hood, 2))
    y = torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match="relabel must hold integers"):
        mix.choices(y)
    for query in (mix.intervals, mix.entropy_bound):
        with pytest.raises(ValueError, match="edges that keep labels"):
            query()
    with pytest.raises(ValueError, match="'sequential' is for edges that keep labels"):
        mix.condition(y, torch.arange(5) < 2).predict(method="sequential")
    with pytest.raises(ValueError, match="label 2"):
        mix.elbo(y + 2)
