# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Results on a device: as on the CPU, and with few calls and waits."""

from functools import partial

import device_queries as calls
import networkx as nx
import pyro
import pytest
import torch
from cases import There, matrices, random_case
from cost import Capture
from graphs import house, parameters, random_sources, shared_sources, star, to_hood, two_triangles
from pyro.distributions import Normal
from pyro.infer import TraceGraph_ELBO

from benchmarks.scale.speed import captured
from pyro_nmm import (
    EvidenceConditional,
    MembershipMixture,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
    sources,
)
from pyro_nmm.guides import evidence_guide, ordered_guide
from pyro_nmm.models import (
    MarginalField,
    PairwiseMRF,
    grid_edges,
    ising,
    nmm,
)
from pyro_nmm.models.dglfrm import InnerProductGraph
from pyro_nmm.ops import sampling
from pyro_nmm.ops.entries import evidence_entries, met
from pyro_nmm.ops.sampling import draw_entries
from pyro_nmm.ops.sweeps import sweep

ESTIMATORS = "reward_to_go", "no_score", "reinforce"
ELBO = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)


def test_the_device_itself(device):
    """Results stay on it, and tensors of two devices do not meet; else the tests show nothing."""
    x = torch.randn(3, device=device, requires_grad=True)
    y = (x * 2 + torch.tensor(1.0)).exp().sum()  # a number may come from the CPU
    y.backward()
    assert y.device.type == x.grad.device.type == device
    torch.testing.assert_close(x.grad.cpu(), 2 * (x * 2 + 1).exp().detach().cpu())
    assert torch.tensor([1, 2], device=device)[[1]].tolist() == [2]
    for other in (x, torch.zeros(3, dtype=torch.bool, device=device)):
        with pytest.raises(RuntimeError, match="cpu"):
            other + torch.zeros(3, dtype=other.dtype)


def queries(graph, there, relabel=None):
    """Densities, marginals and posteriors of a mixture, and of what was observed."""
    hood = graph()
    num_nodes = hood.num_nodes
    parts = [*parameters(hood, 3), *([] if relabel is None else [relabel(hood, 3)])]
    y, observed = torch.randint(3, (num_nodes,)), torch.arange(num_nodes) < 2
    pairs = torch.combinations(torch.arange(num_nodes), with_replacement=True).T
    y, observed, pairs = there(y, observed, pairs)
    mix = NeighborMixture(*there(hood, *parts))
    posterior = mix.condition(y, observed)
    return [mix.log_prob(y), mix.marginals(), mix.pairwise(pairs), posterior.marginals(),
            posterior.pairwise(pairs), mix.log_marginal(pairs[:, 1], y[pairs[:, 1]])]  # fmt: skip


def draws(kind, there):
    """Choices of given uniforms."""
    for seed in range(200 if torch.cuda.is_available() else 8):
        hood, *parts, shape, uniforms = random_case(seed, kind)
        q = OrderedConditional(*there(hood, *parts))
        entries, whole = q._flat(shape), slice(0, q.rows.num_rows)
        draw = draw_entries(q.rows, entries, there(uniforms))
        yield from (*draw[:2], *met(q.rows, entries, draw, whole))


def latent_case(seed):
    """Nodes that share sources, or windows of a grid; evidence of nodes or of edges."""
    torch.manual_seed(seed)
    hood = random_sources(40, 9) if seed % 2 else sources.grid(6, 7, stride=2)
    evidence = torch.randn(hood.num_edges if seed % 4 < 2 else hood.num_nodes, 3)
    evidence[0] = torch.tensor([0.0, -torch.inf, 0.0])
    return hood, *parameters(hood, 3), evidence


def latent_draws(there):
    """Sequential draws and Gibbs sweeps of given uniforms."""
    for seed in range(40 if torch.cuda.is_available() else 4):
        hood, alpha, logits, evidence = there(*latent_case(seed))
        start, numbers = there(torch.rand(5, hood.num_rows), torch.rand(3, 5, hood.num_rows))
        terms = evidence_entries(hood.log_softmax(logits)[None], alpha[None], evidence[None])
        draw = draw_entries(hood, terms, start)
        yield from draw[:2]
        for want in ("visits", "shares"):
            swept, *sums = sweep(hood, terms, draw, numbers, want)
            yield from (*swept[:2], *sums)


def score_of(conditional, there, **options):
    """Gradients of given choices."""
    choices = conditional(There("cpu"), **options).sample((4,))
    parts = conditional(there, **options).score_parts(there(choices))
    return there.gradients((parts.entropy_term + parts.log_prob).sum())


def of_labels(there, **options):
    torch.manual_seed(0)
    hood = to_hood(nx.barabasi_albert_graph(200, 3, seed=0))
    leaves = there.leaf(*parameters(hood, 3))
    y, order = there(torch.randint(3, (200,)), torch.randperm(200))
    return OrderedConditional(there(hood), *leaves, y, order=order, **options)


def of_evidence(there, seed, **options):
    hood, *parts = latent_case(seed)
    order = there(torch.randperm(hood.num_nodes))
    return EvidenceConditional(there(hood), *there.leaf(*parts), order=order, **options)


def constructors(there):
    points, members = torch.rand(50, 2), torch.randint(6, (50,))
    path = to_hood(nx.path_graph(50))
    edge_index = torch.stack([path.source, path.target])
    yield sources.grid(9, 7, stride=2, radius=3, device=there.place)
    yield sources.points(there(points), radius=0.4, spacing=0.3)[0]
    yield sources.walks(there(edge_index), 50, there(members))[0]
    yield sources.hops(there(edge_index), 50)[0]


def links(there):
    graph = nx.barabasi_albert_graph(200, 3, seed=0)
    hood, edges = to_hood(graph), there(torch.tensor(list(nx.DiGraph(graph).edges)).T)
    factors, log_odds, logits = there.leaf(
        torch.randn(200, 4), torch.randn(200, 5), torch.randn(hood.num_edges)
    )
    links = InnerProductGraph(factors, 3.0, edges[:, :2])
    value = MembershipMixture(there(hood), log_odds, logits).log_prob(there(torch.randn(200, 5)))
    value = value + links.log_prob(edges)
    return value, links.swaps(edges, 2 * factors.detach(), 200).detach(), *there.gradients(value)


def half_field(there):
    field = ising(grid_edges(3, 4), 0.4, torch.linspace(-0.3, 0.4, 12))
    half = MarginalField(
        PairwiseMRF(*there(field.edges, field.unary, field.strength, field.interaction))
    )
    y = there(torch.tensor([0, 1, 1, 0, 1, 1]))
    return [half.nodes, half.log_potential(y), *half.colors()]


def levels(there):
    hood = Neighborhood.grid(12, 12, device=there.place)
    alpha, logits = torch.rand(2, 144, 40), torch.randn(1, hood.num_edges)
    mix = NeighborMixture(hood, there(alpha), there(logits))
    return (mix.marginals(),)


#: What gives on a device what it gives on the CPU.
EQUAL = {
    **{graph.__name__: partial(queries, graph) for graph in (house, star, two_triangles)},
    "matrices": partial(queries, house, relabel=matrices),
    **{f"draws, {kind}": partial(draws, kind) for kind in ("random", "hubs", "grid")},
    "latent draws": latent_draws,
    **{f"labels, {name}": partial(score_of, of_labels, estimator=name) for name in ESTIMATORS},
    **{f"evidence {seed}, {name}": partial(score_of, of_evidence, seed=seed, estimator=name)
       for name in ESTIMATORS for seed in (1, 2)},
    "constructors": lambda there: [t for h in constructors(there) for t in (h.ptr, h.source)],
    "links": links,
    "half field": half_field,
    "levels": levels,
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_results_equal_those_of_the_cpu(device, name):
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        values = [*EQUAL[name](There(place))]
        assert values
        assert all(value.device.type == place for value in values)
        results.append([value.detach().cpu() for value in values])
    torch.testing.assert_close(*results)


def posteriors(there):
    hood = shared_sources()
    q = EvidenceConditional(*there(hood, *parameters(hood, 2), torch.randn(5, 2)))
    for options in (
        {},
        {"num_samples": 50, "weighted": True},
        {"num_samples": 50, "num_sweeps": 3},
    ):
        posterior = q.posterior(**options)
        yield from (posterior.sample((3,)), posterior.marginals())


def answers_of_posteriors(there, relabel=None):
    hood = house()
    parts = [*parameters(hood, 3), *([] if relabel is None else [relabel(hood, 3)])]
    mix = NeighborMixture(*there(hood, *parts))
    y, observed = mix.sample(), there(torch.arange(5) < 2)
    posterior = mix.condition(y, observed)
    methods = ("marginal", "joint", "sequential")[: 2 if relabel else 3]
    yield from (posterior.predict(method=method) for method in methods)
    yield from (mix.sample((3,)), posterior.sample((3,)), mix.elbo(y))
    yield mix.log_likelihood(y, given=observed, num_particles=8)


def step(there, collapsed):
    hood = to_hood(nx.barabasi_albert_graph(200, 3, seed=0))
    alpha, logits = there.leaf(*parameters(hood, 3))
    model, guide = (partial(f, collapsed=collapsed) for f in (nmm, ordered_guide))
    ELBO.loss_and_grads(model, guide, there(hood), alpha, logits, there(torch.randint(3, (200,))))
    return [leaf.grad for leaf in there.leaves]


def step_given_evidence(there, collapsed):
    hood = sources.grid(12, 12, stride=3, device=there.place)
    alpha, logits = there.leaf(*parameters(sources.grid(12, 12, stride=3), 3))
    (means,) = there.leaf(torch.tensor([-1.0, 0.0, 1.0]))
    w = there(torch.randn(144))

    def model():
        y = nmm(hood, alpha, logits, collapsed=collapsed)
        pyro.sample("w", Normal(means[y], 0.7).to_event(1), obs=w)

    def guide():
        evidence = Normal(means, 0.7).log_prob(w[:, None])
        evidence_guide(hood, alpha, logits, evidence, collapsed=collapsed)

    ELBO.loss_and_grads(model, guide)
    return [leaf.grad for leaf in there.leaves]


#: What draws on a device, and leaves finite values there.
ALIVE = {
    "posteriors": posteriors,
    "answers": answers_of_posteriors,
    "matrices": partial(answers_of_posteriors, relabel=matrices),
    **{f"{name}, collapsed: {collapsed}": partial(run, collapsed=collapsed)
       for name, run in (("step", step), ("step given evidence", step_given_evidence))
       for collapsed in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize("name", ALIVE)
def test_draws_stay_on_the_device(device, name):
    values = [*ALIVE[name](There(device))]
    assert values
    for value in values:
        assert value.device.type == device
        assert value.isfinite().all()


#: The most calls and waits. A draw, and a step that draws, wait for every fourth sweep of a fixed
#: point, and Pyro's losses for their values. docs/results/speed.md has times.
MOST = {
    "networks and edge scores": (122, 0),
    "step of the bound": (590, 4),
    "step with chains": (225, 3),
    "step with chains, no value of the loss": (122 + 90, 0),
    "draw of q(c given y)": (310, 3),
    "draw of q(c, u given w)": (430, 3),
    "sweep, observed labels": (25, 1),
    "sweep, latent labels": (45, 1),
    "eight sweeps, observed labels": (25 + 7 * 11, 1),
    "`sample`": (45, 1),
    "`marginals`": (16, 0),
    "`condition`, 64 samples": (280, 11),
    "`marginals` of this posterior": (40, 3),
    "step of `StackedNMM.fit`": (0, 0),
    "`StackedNMM.fit`, all else": (1400, 250),
}
#: CUDA draws other numbers, with which the fixed points of a fit take more sweeps.
ON_CUDA = {"`StackedNMM.fit`, all else": (2000, 360)}
CAPTURED = "step with chains, no value of the loss"


def test_calls_and_waits(device):
    torch.set_default_dtype(torch.float)
    found = {name: (number, waits) for name, number, waits in calls.counts(device)}
    most = MOST | (ON_CUDA if device == "cuda" else {})
    assert found.keys() == most.keys()
    for name, numbers in found.items():
        print(f"| {name} | {numbers[0]} | {numbers[1]} |")
        assert all(map(int.__le__, numbers, most[name])), name


def test_more_sweeps_change_no_draw(device, monkeypatch):
    """A fixed point is looked at after every few sweeps."""
    found = []
    for most in (sampling.SWEEPS, 9):
        monkeypatch.setattr(sampling, "SWEEPS", most)
        found.append([*draws("hubs", There(device)), *latent_draws(There(device))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("num_sweeps", [1, 3])
def test_what_a_graph_refuses(device, num_sweeps):
    """A step with chains has no wait, and no shape that depends on values."""
    pyro.enable_validation(False)
    queries = calls.queries(device, num_sweeps)
    queries[CAPTURED]()
    with Capture():
        queries[CAPTURED]()
    with pytest.raises(RuntimeError, match="waits for the device"), Capture():
        queries["draw of q(c given y)"]()


@pytest.mark.gpu
def test_a_captured_step_goes_on():
    pyro.enable_validation(False)
    replay, grads = captured(calls.queries("cuda")[CAPTURED]), []
    for _ in range(2):
        replay()
        parameters = [p.grad for _, p in pyro.get_param_store().named_parameters()]
        grads.append(torch.cat([p.flatten() for p in parameters if p is not None]))
    assert torch.stack(grads).isfinite().all()
    assert not torch.equal(*grads)
