# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The same call in another mode gives the same result: dtypes, threads, inference mode."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import networkx as nx
import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from graphs import parameters, to_hood
from pyro import poutine
from pyro.infer import TraceGraph_ELBO

from pyro_nmm import (
    ChosenLabels,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
    compiled,
)
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import grid_edges, ising, nmm
from pyro_nmm.ops.entropy import entropy_samples

OBSERVED = torch.tensor([True, True, False, True, True])
PAIRS, ORDER = torch.tensor([[0, 1], [3, 4]]), torch.tensor([4, 2, 0, 1, 3])
TWO_KERNELS = pytest.mark.parametrize("kernels", ["loops", "tensors"], indirect=True)


def chosen(mix):
    """A choice of every node."""
    return mix.hood.source[mix.hood.ptr[:-1]]


#: Queries of a mixture and of labels. The same random seed gives the same draws.
QUERIES = {
    "row": lambda mix, y: mix.hood.row,
    "components": lambda mix, y: mix.hood.components(),
    "restrict": lambda mix, y: mix.hood.restrict(OBSERVED).edge,
    "marginals": lambda mix, y: mix.marginals(),
    "pairwise": lambda mix, y: mix.pairwise(PAIRS),
    "log_prob": lambda mix, y: mix.log_prob(y),
    "log_marginal": lambda mix, y: mix.log_marginal(PAIRS[0], y[PAIRS[0]]),
    "elbo": lambda mix, y: mix.elbo(y),
    "log_likelihood": lambda mix, y: mix.log_likelihood(y, OBSERVED, num_particles=2),
    "condition": lambda mix, y: mix.condition(y, OBSERVED, None).marginals(),
    "samples": lambda mix, y: mix.condition(y, OBSERVED, 4).pairwise(PAIRS),
    "posterior": lambda mix, y: mix.condition(y, OBSERVED, 4).log_marginal(PAIRS[0, :1], y[:1]),
    "prior of choices": lambda mix, y: NeighborChoice(mix.hood, mix.logits).log_prob(chosen(mix)),
    "choices": lambda mix, y: mix.choices(y, order=ORDER).sample((2,)),
    "conditional": lambda mix, y: mix.choices(y, order=ORDER).log_prob(chosen(mix)),
    "labels": lambda mix, y: mix.choices(y, order=ORDER).log_terms(chosen(mix)),
    "urn": lambda mix, y: mix.given(chosen(mix)).log_prob(y),
    "program": lambda mix, y: poutine.trace(nmm).get_trace(
        mix.hood, mix.alpha, mix.logits, y).nodes["y"]["value"],
}  # fmt: skip


def answers(mix, y, names=QUERIES):
    found = {}
    for name in names:
        torch.manual_seed(3)
        found[name] = QUERIES[name](mix, y)
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("num_classes", [2, 300])
@TWO_KERNELS
def test_labels_of_small_integer_types(dtype, num_classes, kernels):
    mix = NeighborMixture(*house_and_parameters(num_classes))
    found, expected = answers(mix, LABELS.to(dtype)), answers(mix, LABELS)
    assert all(torch.equal(found[name], expected[name]) for name in QUERIES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_in_single(dtype):
    hood, *parts = house_and_parameters()
    half = [part.to(dtype).requires_grad_() for part in parts]
    mixes = [NeighborMixture(hood, *values) for values in (half, [h.float() for h in half])]
    found, expected = (answers(mix, LABELS) for mix in mixes)
    for name, value in found.items():
        assert value.dtype in (torch.float32, torch.long)
        assert torch.equal(value, expected[name]), name
    mixes[0].elbo(LABELS).sum().backward()
    assert half[0].grad.dtype == dtype


def extreme(num_nodes=60, num_classes=4):
    """Alpha from 1e-3 to 1e6 and logits of -50 to 50, side by side, in single precision."""
    hood = to_hood(nx.barabasi_albert_graph(num_nodes, 3, seed=0))
    alpha = 10 ** torch.randint(-3, 7, (num_nodes, num_classes), dtype=torch.float)
    logits = torch.randint(-50, 51, (hood.num_edges,), dtype=torch.float)
    return hood, alpha, logits, torch.randint(num_classes, (num_nodes,))


def gradients(hood, alpha, logits, y, num_particles=4, **options):
    """The loss of a step of the programs, and the gradients of log alpha and of the logits."""
    log_alpha = alpha.log().requires_grad_()
    logits = logits.clone().requires_grad_()
    elbo = TraceGraph_ELBO(num_particles, vectorize_particles=True, max_plate_nesting=0)
    collapsed = {"collapsed": options.get("collapsed", True)}
    programs = partial(nmm, **collapsed), partial(ordered_guide, **collapsed | options)
    loss = elbo.loss_and_grads(*programs, hood, log_alpha.exp().clamp(1e-3, 1e6), logits, y)
    return loss, log_alpha.grad, logits.grad


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("estimator", ["reward_to_go", "no_score", "reinforce"])
def test_extreme_parameters_have_finite_gradients(kernels, estimator, collapsed):
    loss, *found = gradients(*extreme(), estimator=estimator, collapsed=collapsed)
    assert torch.tensor(loss).isfinite()
    for gradient in found:
        assert gradient.dtype == torch.float
        assert gradient.isfinite().all()


def test_single_precision_is_close_to_double(kernels):
    hood, alpha, logits, y = extreme()
    mix = NeighborMixture(hood, alpha, logits)
    wide = NeighborMixture(hood, alpha.double(), logits.double())
    for name in ("marginals", "pairwise", "conditional", "labels", "urn"):
        if name in ("conditional", "labels"):
            order, c = torch.arange(60), mix.choices(y, order=torch.arange(60)).sample((5,))
            method = "log_prob" if name == "conditional" else "log_terms"
            values = [getattr(m.choices(y, order=order), method)(c) for m in (mix, wide)]
        else:
            values = [QUERIES[name](m, y) for m in (mix, wide)]
        assert values[0].dtype == torch.float
        torch.testing.assert_close(values[0].double(), values[1], rtol=1e-4, atol=1e-4)


def test_the_score_cancels_before_it_meets_the_bound(monkeypatch):
    """In single precision the score of many nodes would swallow the digits of their entropy."""
    hood = Neighborhood(torch.randint(4000, (2, 8000)), 4000)
    alpha, logits = (t.float() for t in parameters(hood, 2))
    c = NeighborChoice(hood, logits).sample((16,))
    given = hood.softmax(logits), hood.find(c), ChosenLabels(alpha, c).sample()
    loops = entropy_samples(hood, alpha, *given)
    monkeypatch.setattr(compiled, "DEVICES", set())
    alone = entropy_samples(hood, alpha, *given)
    assert torch.equal(entropy_samples(hood, alpha.requires_grad_(), *given), alone)
    torch.testing.assert_close(loops, alone, rtol=2e-6, atol=0)


@TWO_KERNELS
def test_a_hub_of_degree_ten_thousand(kernels):
    leaves, hub = torch.arange(1, 10_001), torch.zeros(10_000, dtype=torch.long)
    edges = torch.cat([torch.stack([leaves, hub]), torch.stack([hub, leaves])], 1)
    hood = Neighborhood(edges, 10_001)
    assert int(hood.ptr.diff().max()) == 10_001
    alpha, logits = torch.ones(10_001, 3).float(), torch.zeros(hood.num_edges).float()
    y = torch.randint(3, (10_001,))
    loss, *found = gradients(hood, alpha, logits, y, num_particles=2)
    assert all(gradient.isfinite().all() for gradient in found)
    double = OrderedConditional(hood, alpha.double(), logits.double(), y)
    bound = -double.log_terms(double.sample((2,))).sum(-1).mean()
    assert abs(loss / bound - 1) < 0.02


def in_threads(work, number=8):
    """What a function of a thread's number returns in threads that start together."""
    start, interval = threading.Barrier(number), sys.getswitchinterval()

    def run(thread):
        start.wait()
        return work(thread)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(run, range(number)))
    finally:
        sys.setswitchinterval(interval)


#: Queries without draws.
CERTAIN = [name for name in QUERIES if name not in (
    "elbo", "log_likelihood", "samples", "posterior", "choices", "program")]  # fmt: skip


def test_threads_share_first_answers(kernels):
    """Half of them ask in inference mode, and the others take gradients."""
    hood, alpha, logits = house_and_parameters()
    alpha.requires_grad_()

    def gradient(mix):
        loss = mix.marginals().square().sum() + mix.pairwise(PAIRS).square().sum()
        return torch.autograd.grad(loss, alpha, retain_graph=True)[0]

    alone = NeighborMixture(hood, alpha, logits)
    expected, slope = answers(alone, LABELS, CERTAIN), gradient(alone)
    for _ in range(3):
        mix = NeighborMixture(copy.copy(hood), alpha, logits)

        def work(thread, mix=mix):
            with torch.inference_mode(thread % 2 == 0):
                found = {n: QUERIES[n](mix, LABELS) for n in CERTAIN[thread:] + CERTAIN[:thread]}
                found = {name: value.clone() for name, value in found.items()}
                mix.sample((3,)), mix.condition(LABELS, OBSERVED, 3).sample((3,))
                return found, slope if thread % 2 == 0 else gradient(mix)

        for found, of_thread in in_threads(work):
            torch.testing.assert_close({name: found[name] for name in CERTAIN}, expected)
            torch.testing.assert_close(of_thread, slope)


def test_a_graph_keeps_no_draw():
    hood, alpha, logits = house_and_parameters()
    assert len(hood.row) == len(hood.edge)  # lists of its edges that a graph does keep
    size = len(pickle.dumps(hood))
    q = OrderedConditional(hood, alpha, logits, LABELS)
    c = q.sample((1000,))
    q.log_prob(c)
    NeighborChoice(hood, logits).log_prob(c)
    assert len(pickle.dumps(hood)) == size


def test_queries_in_inference_mode_leave_training_alone(kernels):
    hood, alpha, logits = house_and_parameters()
    alpha.requires_grad_()
    mix = NeighborMixture(hood, alpha, logits.requires_grad_())
    q = mix.choices(LABELS, OBSERVED)
    field = ising(grid_edges(1, 5), 0.3, torch.zeros(5))
    losses = {
        "marginals": lambda: mix.marginals().square(),
        "elbo": lambda: mix.elbo(LABELS, OBSERVED, 2),
        "entropy": lambda: mix.entropy_bound(2, ORDER),
        "potential": lambda: field.expected_potential(mix),
        "conditional": lambda: q.log_prob(c),
        "score": lambda: torch.stack([part.sum() for part in q.score_parts(c)]),
    }
    with torch.inference_mode():
        c = q.sample((3,))
        answers(mix, LABELS)
        for loss in losses.values():
            loss()
        other = Neighborhood.grid(1, 5)
    losses["graph"] = lambda: NeighborMixture(other, alpha, torch.zeros(13)).elbo(LABELS)
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss().sum(), alpha, retain_graph=True)
        assert gradient.abs().sum() > 0, name
    assert torch.autograd.grad(losses["marginals"]().sum(), logits)[0].abs().sum() > 0
