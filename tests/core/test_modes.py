# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Threads, inference mode, small integers, half precision, and Pyro's other losses."""

import copy
import pickle
import sys
import threading
from functools import partial

import pyro
import pytest
import torch
from graphs import house, parameters, star
from pyro import poutine
from pyro.infer import (
    JitTraceGraph_ELBO,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample

import pyro_nmm
from pyro_nmm import (
    ChosenLabels,
    InnerProductGraph,
    MembershipMixture,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.guides import AmortizedNMM, MixtureGuide, density, ordered_guide
from pyro_nmm.models import FreeNMM, PairwiseMRF, grid_edges, ising, nmm
from pyro_nmm.ops.enumeration import enumerate_choices

Y = torch.tensor([0, 1, 1, 0, 1])


def problem(num_classes=2):
    hood = house()
    return hood, *parameters(hood, num_classes, scale=1.0)


def test_two_threads_share_a_graph(kernels):
    """Each draws, and asks for what it has drawn: it gets what it gets alone."""
    hood, alpha, logits = problem()
    wrong, start = [], threading.Barrier(2)

    def work(number):
        start.wait()
        for _ in range(200):
            q = OrderedConditional(hood, alpha, logits, Y, validate_args=False)
            c = q.sample((8 + number,))
            found = NeighborChoice(hood, logits, validate_args=False).log_prob(c)
            alone = NeighborChoice(copy.copy(hood), logits, validate_args=False).log_prob(c)
            if not torch.equal(found, alone):
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not wrong


def test_a_graph_keeps_no_draw():
    hood, alpha, logits = problem()
    assert len(hood.row) == len(hood.edge)  # lists of its edges that a graph does keep
    size = len(pickle.dumps(hood))
    q = OrderedConditional(hood, alpha, logits, Y)
    c = q.sample((1000,))
    q.log_prob(c)
    NeighborChoice(hood, logits).log_prob(c)
    assert len(pickle.dumps(hood)) == size


def test_queries_in_inference_mode_leave_training_alone(kernels):
    hood, alpha, logits = problem()
    mask = torch.tensor([True, True, False, True, True])
    alpha.requires_grad_()
    mix = NeighborMixture(hood, alpha, logits.requires_grad_())
    q = mix.choices(Y, mask)
    pairs, order = hood.source[None, :4].repeat(2, 1), torch.tensor([4, 2, 0, 1, 3])
    field = ising(grid_edges(1, 5), 0.3, torch.zeros(5))
    with torch.inference_mode():
        mix.marginals(), mix.pairwise(pairs), mix.elbo(Y, mask, 2)
        mix.entropy_bound(2, "reward_to_go", order), mix.entropy_bound(2, "one_step_credit", order)
        mix.condition(Y, mask, 3).marginals()
        field.expected_potential(mix)
        c = q.sample((3,))
        q.log_prob(c), q.score_parts(c)
        other = Neighborhood.grid(1, 5)
    losses = [
        mix.marginals().square().sum(),
        mix.elbo(Y, mask, 2).sum(),
        mix.entropy_bound(2, "reward_to_go", order).sum(),
        mix.entropy_bound(2, "one_step_credit", order).sum(),
        field.expected_potential(mix),
        q.log_prob(c).sum(),
        sum(part.sum() for part in q.score_parts(c)),
        NeighborMixture(other, alpha, torch.zeros(13)).elbo(Y).sum(),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, alpha, retain_graph=True)
        assert gradient.abs().sum() > 0
    assert torch.autograd.grad(losses[0], logits)[0].abs().sum() > 0


def test_the_score_cancels_before_it_meets_the_bound():
    """In single precision the score of many nodes swallows the digits of their entropy."""
    torch.manual_seed(1)
    hood = Neighborhood(torch.randint(4000, (2, 8000)), 4000)
    alpha, logits = parameters(hood, 2)
    mix = NeighborMixture(hood, alpha.float(), logits.float())
    found = {}
    for estimator in ("reward_to_go", "one_step_credit"):
        torch.manual_seed(2)
        found[estimator] = mix.entropy_bound(2, estimator)
    torch.testing.assert_close(found["reward_to_go"], found["one_step_credit"], rtol=2e-6, atol=0)
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 2, got 1"):
        mix.entropy_bound(estimator="reward_to_go")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("num_classes", [2, 256, 300])
def test_labels_of_small_integer_types(dtype, num_classes, kernels):
    hood, alpha, logits = problem(num_classes)
    y, order, mask = Y.to(dtype), torch.arange(5), torch.tensor([True, True, False, True, True])
    mix = NeighborMixture(hood, alpha, logits)
    wanted, found = [], []
    for labels, results in ((Y, wanted), (y, found)):
        torch.manual_seed(3)
        q = mix.choices(labels, order=order)
        c = q.sample((2,))
        results += [c, q.log_prob(c), mix.elbo(labels), mix.given(c).log_prob(labels)]
        results += [mix.log_marginal(torch.tensor([0, 3]), labels[[0, 3]])]
        results += [mix.condition(labels, mask, 4).marginals()]
        results += [mix.condition(labels, mask, 4).log_marginal(torch.tensor([2]), labels[2:3])]
        results += [mix.log_likelihood(labels, mask, num_particles=2)]
        results += [poutine.trace(nmm).get_trace(hood, alpha, logits, labels).nodes["y"]["value"]]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


def test_float_labels():
    hood, alpha, logits = problem()
    with pytest.raises(ValueError, match=r"y must hold integer labels .* got torch.float64"):
        OrderedConditional(hood, alpha, logits, Y.double())
    law = ChosenLabels(alpha, torch.tensor([0, 1, 1]))
    value = torch.tensor([1, 0, 1])
    assert torch.equal(law.log_prob(value.double()), law.log_prob(value))  # as Categorical
    with pytest.raises(ValueError, match="support"):
        law.log_prob(value + 0.5)
    field = ising(grid_edges(1, 3), 0.3, torch.zeros(3))
    with pytest.raises(ValueError, match=r"value must hold integer labels .* got torch.float64"):
        field.log_potential(value.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_in_single(dtype):
    hood, alpha, logits = problem()
    half = alpha.to(dtype).requires_grad_(), logits.to(dtype)
    single = half[0].float(), half[1].float()
    c = torch.arange(5)
    for make in (
        lambda a, s: NeighborMixture(hood, a, s).log_prob(Y),
        lambda a, s: OrderedConditional(hood, a, s, Y, order=torch.arange(5)).log_prob(c),
        lambda a, s: NeighborChoice(hood, s).log_prob(c),
        lambda a, s: ChosenLabels(a, c).log_prob(Y),
        lambda a, s: poutine.trace(nmm).get_trace(hood, a, s, Y).nodes["y"]["value"].float(),
    ):
        found = make(*half)
        assert found.dtype == torch.float32
        assert torch.equal(found, make(*single))
    NeighborMixture(hood, *half).elbo(Y).sum().backward()
    assert half[0].grad.dtype == dtype
    levels = pyro_nmm.LogisticConcentrations(torch.ones(5).to(dtype), width=2.0)
    assert levels.totals().dtype == torch.float32


def pair_of(estimator="reward_to_go", collapsed=True):
    hood, alpha, logits = problem()
    log_alpha = alpha.log().requires_grad_()

    def program(fn):
        leaf = pyro.param("log_alpha", log_alpha)
        fn(hood, leaf.exp(), logits, Y)

    guide = partial(ordered_guide, collapsed=collapsed, estimator=estimator)
    model = partial(nmm, collapsed=collapsed)
    return partial(program, model), partial(program, guide), log_alpha, (hood, logits)


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
def test_trace_elbo_has_the_same_gradient_draw_by_draw(estimator):
    model, guide, leaf, _ = pair_of(estimator)
    grads = []
    for kind in (TraceGraph_ELBO, Trace_ELBO):
        pyro.set_rng_seed(4)
        leaf.grad = None
        kind(6, vectorize_particles=True, max_plate_nesting=0).loss_and_grads(model, guide)
        grads.append(leaf.grad.clone())
    assert grads[0].abs().max() > 0.01
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score"])
def test_losses_that_take_the_entropy_term_for_its_value(estimator):
    """Its control variate has no value."""
    model, guide, *_ = pair_of(estimator)
    pyro.enable_validation(False)
    losses = []
    for kind in (TraceGraph_ELBO, TraceMeanField_ELBO):
        pyro.set_rng_seed(5)
        losses.append(kind(8, vectorize_particles=True, max_plate_nesting=0).loss(model, guide))
    assert losses[0] == pytest.approx(losses[1])


def test_renyi_elbo_takes_the_joint_score():
    """The loss is the importance-weighted bound, the gradient its self-normalised one."""
    model, guide, leaf, (hood, logits) = pair_of("reinforce")
    exact = NeighborMixture(hood, leaf.exp(), logits).log_prob(Y)
    (wanted,) = torch.autograd.grad(exact, leaf)
    elbo = RenyiELBO(0.0, 4000, vectorize_particles=True, max_plate_nesting=0)
    loss = elbo.loss_and_grads(model, guide)
    assert loss == pytest.approx(-exact.item(), abs=0.02)
    torch.testing.assert_close(-leaf.grad, wanted, atol=0.05, rtol=0.1)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_losses_that_enumerate_or_trace_say_what_to_use():
    model, guide, *_ = pair_of()
    for law in (NeighborChoice, OrderedConditional, ChosenLabels, NeighborMixture):
        with pytest.raises(NotImplementedError, match=f"{law.__name__} has too many values"):
            law.enumerate_support(object.__new__(law))
    with pytest.raises(NotImplementedError, match=r"cannot be traced by torch.jit"):
        JitTraceGraph_ELBO(max_plate_nesting=0).loss_and_grads(model, guide)
    hood, _, logits = problem()
    with pytest.raises(NotImplementedError, match="NeighborChoice cannot be traced"):
        torch.jit.trace(lambda s: NeighborChoice(hood, s).sample(), (logits,))


def both(handler, **options):
    hood, alpha, logits = problem()
    options = {"alpha": alpha, "logits": logits, "y": Y} | options
    for collapsed in (False, True):
        elbo = TraceGraph_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
        programs = (partial(f, hood, collapsed=collapsed, **options) for f in (nmm, ordered_guide))
        yield partial(elbo.loss, *map(handler, programs))


def in_plate(size, subsample_size=None):
    def handler(fn):
        def program():
            with pyro.plate("nodes", size, subsample_size=subsample_size):
                fn()

        return program

    return handler


@pytest.mark.parametrize("plate", [(5,), (3,), (6, 2)])
def test_plates_in_which_nothing_differs(plate):
    for loss in both(in_plate(*plate)):
        with pytest.raises(ValueError, match=r"plate 'nodes' of size \d surrounds one labelling"):
            loss()
    for name in ("alpha", "logits", "y"):
        given = dict(zip(("alpha", "logits"), problem()[1:], strict=True)) | {"y": Y}
        size = plate[-1]
        more = {name: given[name].expand(size, *given[name].shape)}
        for loss in both(in_plate(*plate), **more):
            assert torch.tensor(loss()).isfinite()
    assert all(torch.tensor(loss()).isfinite() for loss in both(in_plate(1)))


@pytest.mark.parametrize("kind", ["mask", "scale"])
def test_handlers_with_an_entry_for_every_node(kind):
    entry = torch.ones(5, dtype=torch.bool if kind == "mask" else torch.double)
    for value in (entry, entry[:, None]):
        for loss in both(partial(getattr(poutine, kind), **{kind: value})):
            with pytest.raises(ValueError, match=rf"poutine.{kind} of shape .* observed="):
                loss()
    with_number = partial(getattr(poutine, kind), **{kind: entry[0]})
    assert all(torch.tensor(loss()).isfinite() for loss in both(with_number))

    def per_field(fn):
        def program():
            with pyro.plate("fields", 5), getattr(poutine, kind)(**{kind: entry}):
                fn()

        return program

    assert all(torch.tensor(loss()).isfinite() for loss in both(per_field, y=Y.expand(5, 5)))


@pytest.mark.parametrize("parallel", [False, True])
def test_guide_of_other_nodes(parallel):
    hood, alpha, logits = problem()
    some = torch.tensor([True, False, True, False, False])
    for collapsed in (False, True):
        model = partial(nmm, hood, alpha, logits, collapsed=collapsed)
        guide = partial(ordered_guide, hood, alpha, logits, Y, some, collapsed=collapsed)
        with pytest.raises(ValueError, match=r"site 'c' has 2 nodes .* observed selects 5 here"):
            Predictive(model, guide=guide, num_samples=3, parallel=parallel)()


def test_networks_that_sample():
    hood = star(2)

    class Bayesian(PyroModule):
        def __init__(self):
            super().__init__()
            self.scores = PyroSample(pyro.distributions.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

        def forward(self, hood):
            return self.scores.exp(), torch.zeros(hood.num_edges)

    program = AmortizedNMM(hood, Bayesian())
    with pytest.raises(ValueError, match=r"network has a sample site 'scores'.*ordered_guide"):
        TraceGraph_ELBO().loss(program.model, program.guide, y=Y[:3])

    # What the message says.
    network = Bayesian()

    def model():
        nmm(hood, *network(hood), Y[:3])

    weights = AutoNormal(poutine.block(model, hide=["z", "c", "y"]))

    def guide():
        found = poutine.block(poutine.condition(network, data=weights()))
        ordered_guide(hood, *found(hood), Y[:3])

    assert torch.tensor(TraceGraph_ELBO().loss(model, guide)).isfinite()


def test_network_of_more_labels_than_the_target():
    hood = star(2)
    target = density(lambda y: y.sum(-1).double(), num_nodes=3, num_classes=2)
    family = MixtureGuide(hood, FreeNMM(hood, 3), target)
    elbo = TraceGraph_ELBO(20, vectorize_particles=True, max_plate_nesting=0)
    with pytest.raises(ValueError, match="network gives 3 or more labels, but target's site 'y'"):
        elbo.loss(family.model, family.guide)


def test_more_bad_input():
    hood, alpha, logits = problem()
    mix = NeighborMixture(hood, alpha, logits)
    with pytest.raises(ValueError, match=r"num_samples must be .*at least 1, got 0"):
        mix.elbo(Y, num_samples=0)
    with pytest.raises(ValueError, match=r"logits must be a floating-point tensor, got .*NoneType"):
        NeighborMixture(hood, alpha, None)
    with pytest.raises(ValueError, match=r"alpha must be a floating-point tensor, got .*ndarray"):
        NeighborMixture(hood, alpha.numpy(), logits)
    numbers = alpha.numpy()
    with pytest.raises(ValueError, match=r"factors must be a floating-point tensor, got .*ndarray"):
        InnerProductGraph(numbers)
    with pytest.raises(ValueError, match=r"log_odds must be a floating-point tensor, got .*ndarr"):
        MembershipMixture(hood, numbers, logits)
    field = ising(grid_edges(1, 5), 0.3, torch.zeros(5))
    for name in ("edges", "unary", "strength", "interaction"):
        given = {n: getattr(field, n) for n in ("edges", "unary", "strength", "interaction")}
        with pytest.raises(ValueError, match=rf"{name} must be a tensor, got .*ndarray"):
            PairwiseMRF(**given | {name: numbers})
    for sizes in ((3.0, 3), (3, 3.5), (3, 3, 1.0)):
        with pytest.raises(ValueError, match=r"grid needs .* integers"):
            Neighborhood.grid(*sizes)
    adjacency = torch.eye(2).to_sparse()
    for sparse in (adjacency, torch.eye(2).to_sparse_coo().coalesce()):
        with pytest.raises(ValueError, match=r"edge_index .* sparse matrix: .* to_edge_index"):
            Neighborhood(sparse, 2)
    with pytest.raises(ValueError, match="edge_index is on the meta device"):
        Neighborhood(torch.zeros(2, 3, dtype=torch.long, device="meta"), 4)


def test_choices_are_those_of_the_paper_after_all_this():
    """Every draw is a neighbour, and every value has the probability that it had."""
    hood, alpha, logits = problem()
    rows = hood.source[enumerate_choices(hood)]
    q = OrderedConditional(hood, alpha, logits, Y)
    assert q.log_prob(rows).exp().sum().item() == pytest.approx(1)
