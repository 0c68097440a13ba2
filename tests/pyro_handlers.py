# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: handlers."""

import pyro
import pyro.distributions as dist
import torch
from bounds import PATH, check_against, gradients, mean_over_orders, near
from pyro import infer, poutine
from pyro.contrib.autoname import scope
from pyro.infer.reparam import AutoReparam, LocScaleReparam
from pyro_rows import FIELDS, Pair, Parent, Y, in_plate, losses, row, vectorized


def traced(program, *args, **options):
    return poutine.trace(program).get_trace(*args, **options)


def seeded(model, guide, kind=infer.TraceGraph_ELBO):
    """The loss with one random seed."""
    pyro.set_rng_seed(3)
    return vectorized(kind, 4).loss_and_grads(model, guide)


def plated_is(total, handler=lambda program: program):
    """The loss of three fields in a plate is a total of their bounds."""
    for collapsed in (True, False):
        pair = Pair(collapsed=collapsed)
        programs = [
            in_plate(lambda program=program: handler(program)(FIELDS))
            for program in (pair.model, pair.guide)
        ]
        near(-losses(*programs, nesting=1), total(pair.bound(FIELDS).detach()))


@row("plate")
def fields():
    plated_is(torch.sum)
    trace = traced(in_plate(Pair(collapsed=False).model), FIELDS)
    trace.compute_log_prob()
    shapes = [tuple(trace.nodes[name]["value"].shape) for name in ("z", "c", "y")]
    assert shapes == [(3, 3, 2), (3, 3), (3, 3)]
    assert trace.nodes["y"]["log_prob"].shape == (3,)


@row("plate, subsampled")
def subsampled():
    pair, labels = Pair(), FIELDS[[0, 0, 1]]

    def some(program):
        def run():
            with pyro.plate("fields", 3, subsample_size=2) as places:
                program(labels[places])

        return run

    elbo = vectorized(size=5, nesting=1)
    sampled = gradients(elbo, some(pair.model), some(pair.guide), [pair.log_alpha], 100)
    check_against(-pair.bound(labels).sum(), [pair.log_alpha], *sampled)


@row("broadcast")
def broadcast():
    plated_is(torch.sum, poutine.broadcast)


@row("vectorized particles")
def particles():
    pair = Pair()
    with pyro.plate("num_particles_vectorized", 50, dim=-1):
        site = traced(pair.guide).nodes["c"]
    assert site["value"].shape == (50, 3)
    assert site["fn"].order.shape == (3,)
    assert len(site["value"].unique(dim=0)) > 1


@row("trace, replay")
def replayed():
    pair = Pair()
    drawn = traced(pair.guide)
    model = traced(poutine.replay(pair.model, trace=drawn))
    q, c = drawn.nodes["c"]["fn"], drawn.nodes["c"]["value"]
    torch.testing.assert_close(model.log_prob_sum() - drawn.log_prob_sum(), q.log_terms(c).sum(-1))


@row("replay, labels drawn")
def replayed_choices():
    pair = Pair()
    poutine.replay(pair.model, trace=traced(pair.guide))(None)


@row("condition")
def conditioned():
    pair = Pair()
    model = poutine.condition(lambda: pair.model(None), data={"y": Y})
    assert seeded(model, pair.guide) == seeded(pair.model, pair.guide)


@row("uncondition")
def unconditioned():
    pair, drawn = Pair(), []
    for _ in range(300):
        site = traced(poutine.uncondition(pair.model)).nodes["y"]
        assert not site["is_observed"]
        drawn.append(site["value"][0])
    near(torch.stack(drawn).double(), pair.mixture().marginals()[0, 1])


@row("do")
def intervened():
    c = torch.tensor([1, 1, 1])
    site = traced(poutine.do(Pair().model, data={"c": c}), None).nodes["y"]
    assert torch.equal(site["fn"].choices, c)


@row("do, one choice")
def one_choice():
    """An intervention on the choice of node 0, in its logits."""
    pair = Pair()
    other = (PATH.target == 0) & (PATH.source != 1)
    exact = pair.mixture().marginals()
    exact[0] = pair.alpha[1] / pair.alpha[1].sum()
    pair.logits = pair.logits.masked_fill(other, -torch.inf)
    torch.testing.assert_close(pair.mixture().marginals(), exact)


@row("block")
def blocked():
    trace = traced(poutine.block(Pair().model, hide=["c"]))
    assert set(trace.nodes) & {"c", "y"} == {"y"}


@row("mask", "scale")
def of_numbers(name):
    """One number, of which loss and gradient are a multiple, or one for each field of a plate."""
    handler = getattr(poutine, name)
    factor = torch.tensor(False) if name == "mask" else torch.tensor(2.5)
    factors = torch.tensor([True, False, True]) if name == "mask" else torch.tensor([0.5, 1, 3])
    for collapsed in (True, False):
        pair, results = Pair(collapsed=collapsed), []
        for change in (lambda p: p, lambda p: handler(p, **{name: factor})):
            pair.log_alpha.grad = None
            loss = seeded(change(pair.model), change(pair.guide))
            results.append(torch.cat([torch.tensor([loss]), pair.log_alpha.grad.flatten()]))
        torch.testing.assert_close(results[1], factor * results[0])
    plated_is(factors.double().dot, lambda p: handler(p, **{name: factors}))


def under_scopes(program, arguments, around=list):
    def run():
        for number in around(range(len(arguments))):
            with scope(prefix=f"field {number}"):
                program(**arguments[number])

    return run


@row("scope", "markov")
def several_fields(name):
    pair, around = Pair(), pyro.markov if name == "markov" else list
    labels = [{"y": y} for y in FIELDS]
    programs = (under_scopes(program, labels, around) for program in (pair.model, pair.guide))
    near(-losses(*programs), pair.bound(FIELDS).sum().detach())


@row("observed, a mask for each labelling")
def masks():
    pair, masks = Pair(), torch.tensor([[True, True, False], [True, False, True]])
    arguments = [{"y": y, "observed": mask} for y, mask in zip(FIELDS, masks, strict=False)]

    def bound(y, observed):
        rows = PATH.restrict(observed)
        c = torch.cartesian_prod(*(rows.source[a:b] for a, b in rows.ptr.unfold(0, 2, 1)))

        def of_order(order):
            q = pair.mixture().choices(y, observed, order)
            return (q.log_prob(c).exp() * q.log_terms(c).sum(-1)).sum()

        return mean_over_orders(rows.nodes, of_order)

    programs = (under_scopes(program, arguments) for program in (pair.model, pair.guide))
    near(-losses(*programs), sum(bound(**argument) for argument in arguments))


@row("seed")
def seeds():
    pair = Pair()
    one, two = (poutine.seed(pair.model, rng_seed=4)(None) for _ in range(2))
    assert torch.equal(one, two)


@row("lift")
def lifted():
    prior = dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2)
    trace = traced(poutine.lift(Pair().model, prior={"log_alpha": prior}))
    assert trace.nodes["log_alpha"]["type"] == "sample"
    alpha = trace.nodes["log_alpha"]["value"].exp()
    assert torch.equal(trace.nodes["y"]["fn"].alpha, alpha)


@row("reparam")
def reparameterised():
    pair = Parent()
    for config in ({"shift": LocScaleReparam(0.0)}, AutoReparam()):
        trace = traced(poutine.reparam(pair.model, config=config))
        assert "shift_decentered" in trace.nodes
        alpha = pair.alpha * trace.nodes["shift"]["value"].exp()
        torch.testing.assert_close(trace.nodes["y"]["fn"].alpha, alpha)
        assert trace.nodes["c"]["type"] == trace.nodes["y"]["type"] == "sample"


@row("infer_config", "enum")
def configured(name):
    pair, kind = Pair(), infer.Trace_ELBO
    programs = [pair.model, pair.guide]
    if name == "enum":
        kind = infer.TraceEnum_ELBO
        changed = [infer.config_enumerate(program, "parallel") for program in programs]
    else:
        changed = [poutine.infer_config(p, config_fn=lambda site: {"x": 1}) for p in programs]
    assert abs(seeded(*changed, kind) - seeded(*programs)) < 1e-9
