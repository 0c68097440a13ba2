# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: handlers."""

import pyro
import pyro.distributions as dist
import torch
from bounds import PATH, check_against, gradients, near
from pyro import infer, poutine
from pyro.contrib.autoname import scope
from pyro.infer.reparam import AutoReparam, LocScaleReparam
from pyro_rows import Pair, Parent, Y, losses, row, vectorized

from pyro_nmm import NeighborMixture

FIELDS = torch.tensor([[0, 0, 1], [1, 0, 1], [1, 1, 1]])


def traced(program, *args, **options):
    return poutine.trace(program).get_trace(*args, **options)


def seeded(model, guide, kind=infer.TraceGraph_ELBO):
    pyro.set_rng_seed(3)
    return vectorized(kind, 4).loss(model, guide)


def in_plate(program, handler=None):
    def run():
        with pyro.plate("fields", 3):
            (program if handler is None else handler(program))(FIELDS)

    return run


def plated_is(wanted, handler=None):
    pair = Pair()
    found = losses(in_plate(pair.model, handler), in_plate(pair.guide, handler), nesting=1)
    near(-found, wanted(pair.bound(FIELDS).detach()))


@row("plate")
def fields():
    plated_is(torch.sum)


@row("plate, subsampled")
def subsampled():
    pair, every = Pair(), FIELDS[[0, 0, 1]]

    def some(program):
        def run():
            with pyro.plate("fields", 3, subsample_size=2) as fields:
                program(every[fields])

        return run

    elbo = vectorized(size=5, nesting=1)
    sampled = gradients(elbo, some(pair.model), some(pair.guide), [pair.log_alpha], 100)
    check_against(-pair.bound(every).sum(), [pair.log_alpha], *sampled)


@row("plate, around NeighborMixture")
def counted_often():
    pair = Pair()
    mix = NeighborMixture(PATH, pair.alpha, pair.logits)

    def model():
        with pyro.plate("nodes", 3):
            pyro.sample("y", mix, obs=Y)

    torch.testing.assert_close(traced(model).log_prob_sum(), 3 * mix.log_prob(Y))


@row("broadcast")
def broadcast():
    plated_is(torch.sum, poutine.broadcast)


@row("plate, over nodes", "plate, of some nodes", "mask, over nodes", "scale, over nodes")
def over_nodes(name):
    pair = Pair()
    around = {
        "plate, over nodes": lambda: pyro.plate("nodes", 3),
        "plate, of some nodes": lambda: pyro.plate("nodes", 3, subsample_size=2),
        "mask, over nodes": lambda: poutine.mask(mask=torch.tensor([True, False, True])),
        "scale, over nodes": lambda: poutine.scale(scale=torch.ones(3)),
    }[name]
    with around():
        pair.model()


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
    torch.testing.assert_close(model.log_prob_sum() - drawn.log_prob_sum(), q.log_labels(c).sum(-1))


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
    marginals = NeighborMixture(PATH, pair.alpha, pair.logits).marginals()
    near(torch.stack(drawn).double(), marginals[0, 1])


@row("do")
def intervened():
    pair, c = Pair(), torch.tensor([1, 1, 1])
    site = traced(poutine.do(pair.model, data={"c": c}), None).nodes["y"]
    assert torch.equal(site["fn"].choices, c)


@row("block")
def blocked():
    pair = Pair()
    assert set(traced(poutine.block(pair.model, hide=["c"])).nodes) & {"c", "y"} == {"y"}


@row("mask")
def masked():
    pair = Pair()
    nothing = [poutine.mask(p, mask=torch.tensor(False)) for p in (pair.model, pair.guide)]
    assert seeded(*nothing) == 0
    keep = torch.tensor([True, False, True])
    plated_is(lambda bounds: bounds[keep].sum(), lambda p: poutine.mask(p, mask=keep))


@row("scale")
def scaled():
    pair = Pair()
    double = [poutine.scale(p, scale=2.0) for p in (pair.model, pair.guide)]
    assert abs(seeded(*double) - 2 * seeded(pair.model, pair.guide)) < 1e-9
    weight = torch.tensor([0.5, 1.0, 3.0])
    plated_is(weight.dot, lambda p: poutine.scale(p, scale=weight))


@row("scope")
def scopes():
    pair = Pair()

    def both(program):
        def run():
            for name, y in (("left", FIELDS[1]), ("right", FIELDS[2])):
                with scope(prefix=name):
                    program(y)

        return run

    near(-losses(both(pair.model), both(pair.guide)), pair.bound(FIELDS[1:]).sum().detach())


@row("markov")
def series():
    pair = Pair()

    def program(field):
        for time in pyro.markov(range(3)):
            with scope(prefix=f"time {time}"):
                field(FIELDS[time])

    found = losses(lambda: program(pair.model), lambda: program(pair.guide))
    near(-found, pair.bound(FIELDS).sum().detach())


@row("seed")
def seeds():
    pair = Pair()
    one, two = (poutine.seed(pair.model, rng_seed=4)(None) for _ in range(2))
    assert torch.equal(one, two)


@row("lift")
def lifted():
    pair = Pair()
    prior = dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2)
    trace = traced(poutine.lift(pair.model, prior={"log_alpha": prior}))
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
    assert abs(seeded(*changed, kind) - seeded(*programs, infer.Trace_ELBO)) < 1e-9
