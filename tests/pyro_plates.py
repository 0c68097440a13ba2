# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: plates over nodes, what stands below labels, and networks."""

import warnings
from functools import partial
from tempfile import TemporaryDirectory

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import PATH, check_against, expected_evidence_bound, gradients, near
from pyro import infer, poutine
from pyro.contrib.easyguide import easy_guide
from pyro.infer import TraceGraph_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.optim import Adam
from pyro_rows import LOCS, Located, Measured, Pair, X, Y, in_plate, inside, losses, row, vectorized
from torch_geometric.nn import GATConv

from pyro_nmm import NeighborMixture, edge_values
from pyro_nmm.guides import AmortizedNMM, AutoNMM, MixtureGuide, check_program, evidence_guide
from pyro_nmm.models import FreeNMM, node_plate


@row("plate, around NeighborMixture")
def counted_often():
    """Once for each element of the plate."""
    mix = Pair().mixture()
    trace = poutine.trace(in_plate(lambda: pyro.sample("y", mix, obs=Y))).get_trace()
    torch.testing.assert_close(trace.log_prob_sum(), 3 * mix.log_prob(Y))


@row("plate, over nodes", "plate, of some nodes", "mask, over nodes", "scale, over nodes",
     "plate, over nodes, labels latent", "plate, of some nodes, labels latent")  # fmt: skip
def over_nodes(name):
    program = Measured() if "latent" in name else Pair()
    context = {
        "plate, over": lambda: pyro.plate("nodes", 3),
        "plate, of": lambda: pyro.plate("nodes", 3, subsample_size=2),
        "mask, over": lambda: poutine.mask(mask=torch.tensor([True, False, True])),
        "scale, over": lambda: poutine.scale(scale=torch.ones(3)),
    }[name.partition(" nodes")[0].replace(" some", "")]
    losses(inside(context, program.model), inside(context, program.guide), nesting=1)


@row("plate, around evidence_guide")
def guide_over_nodes():
    in_plate(Measured().guide, name="nodes")()


@row("plate, labels latent", "plate, evidence of all fields")
def latent_fields(name):
    """One prior of all fields; evidence of each, or of two fields and of three as many as nodes."""
    if name == "plate, labels latent":
        cases = [(2, torch.stack([X, -X]))]
    else:
        cases = [(2, X), (3, X.expand(3, 3))]
    for size, x in cases:
        program = Measured(x=x)
        programs = in_plate(program.model, size), in_plate(program.guide, size)
        exact = sum(program.bound(each).detach() for each in x.expand(size, 3))
        near(-losses(*programs, nesting=1), exact)


def plate_of(program, **options):
    def below(y):
        with pyro.plate("nodes", 3, **options) as nodes:
            pyro.sample("x", program.sample(y[..., nodes]), obs=X[nodes])

    return below


@row("plate, over nodes below nmm")
def one_particle():
    program, elbo = Measured(), TraceGraph_ELBO()
    program.below = plate_of(program)
    sampled = [elbo.loss(program.model, program.guide) for _ in range(60)]
    near(-torch.tensor(sampled), program.bound().detach())


@row("plate, over nodes below nmm, vectorized", "plate, of some nodes below nmm, vectorized")
def counted_by_particle(name):
    program = Measured()
    program.below = plate_of(program, subsample_size=2 if "some" in name else None)
    losses(program.model, program.guide, nesting=1)


@row("node_plate")
def nodes_in_a_plate():
    program = Measured()

    def below(y, **options):
        with node_plate(PATH, y, **options) as (nodes, y):
            pyro.sample("x", program.sample(y), obs=X[nodes])

    program.below = below
    sampled = gradients(vectorized(nesting=1), program.model, program.guide, [program.loc], 30)
    check_against(-program.bound(), [program.loc], *sampled)
    program.below = partial(below, subsample_size=2)
    near(-losses(program.model, program.guide, 40, nesting=1), program.bound().detach())


@row("node_plate, long format")
def measurements_in_a_plate():
    """Of the middle node there are two, and of the last one none."""
    program, index = Measured(), torch.tensor([1, 0, 1])

    def below(y, **options):
        with node_plate(PATH, y, index=index, **options) as (rows, y):
            pyro.sample("x", program.sample(y), obs=X[rows])

    terms = program.sample(torch.arange(2)).log_prob(X[:, None])
    evidence = torch.zeros(3, 2).double().index_add(0, index, terms.detach())
    mix, program.below = NeighborMixture(*program.prior), below
    guide = AutoNMM(program.model)
    guide()
    found = guide.posterior(num_samples=None, num_sweeps=0)["c"].marginals()
    torch.testing.assert_close(found, mix.latents(evidence).posterior().marginals())


@row("sum over nodes")
def summed():
    program = Measured(lambda y: dist.Normal(y.sum(-1).double(), 1.0), x=torch.tensor(1.2))
    evidence = torch.zeros(3, 2)
    program.evidence = lambda: evidence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_program(program.model, program.guide)
        program.below = lambda y: dist.Normal(y.sum().double(), 1.0)
        with pytest.raises(ValueError, match=r"'x' .* reads values of another particle.*sum\(-1\)"):
            check_program(program.model, program.guide)


@row("batch dimension, no plate", "batch dimension, other plate")
def alone(name):
    """A value for each element of no plate, or of a plate that is not the field's."""
    pair = Pair()

    def moved():
        with pyro.plate("groups", 2):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        return pair.alpha * shift[..., torch.tensor([0, 0, 1]), None].exp()

    other = name == "batch dimension, other plate"
    programs = pair.at(moved if other else lambda: pair.alpha.expand(5, -1, -1))
    losses(*programs, size=100 if other else 1, nesting=int(other))


@row("Vindex")
def parameter_of_each_label():
    """Of particles that have one each."""
    program = Located()
    check_program(program.model, program.guide)


@row("AutoGuideList", "easy_guide")
def composed(name):
    """A guide of several parts, with the loss of :class:`Measured`."""
    program = Located()
    model, evidence = program.model, Measured.evidence(program)

    def labels():
        evidence_guide(*program.prior, evidence.detach(), collapsed=True)

    if name == "AutoGuideList":
        guide = AutoGuideList(model)
        start = {"init_loc_fn": infer.autoguide.init_to_value(values={"means": LOCS})}
        guide.append(AutoDelta(poutine.block(model, expose=["means"]), **start))
        guide.append(labels)  # returns nothing
    else:

        @easy_guide(model)
        def guide(self):
            pyro.sample("means", dist.Delta(LOCS, event_dim=1))
            labels()

    prior = dist.Normal(LOCS, 0.3).log_prob(LOCS).sum()
    bound = expected_evidence_bound(*program.prior, evidence)
    near(-losses(model, guide, steps=40), bound.detach() + prior)


@row("MixtureGuide, y in a plate")
def labels_in_a_plate():
    target = in_plate(lambda: pyro.sample("y", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.6]))))
    pair = MixtureGuide(PATH, FreeNMM(PATH, 2), target)
    losses(pair.model, pair.guide, nesting=1)


@row("param_store.load")
def resumed():
    def fresh():
        pyro.clear_param_store()
        network, optimizer = FreeNMM(PATH, 2, kappa=1.0), Adam({"lr": 0.05})
        pair = AmortizedNMM(PATH, network)
        svi = infer.SVI(pair.model, pair.guide, optimizer, vectorized(size=4))
        return network, optimizer, lambda steps: [svi.step(y=Y) for _ in range(steps)]

    store = pyro.get_param_store()
    with TemporaryDirectory() as folder:
        network, optimizer, step = fresh()
        step(3)
        store.save(f"{folder}/parameters")
        optimizer.save(f"{folder}/optimizer")
        random = torch.get_rng_state()
        uninterrupted = step(3)
        network, optimizer, step = fresh()
        store.load(f"{folder}/parameters")
        optimizer.load(f"{folder}/optimizer")
    with pytest.raises(ValueError, match="update_module_params=True"):
        step(1)
    pyro.module("nmm", network, update_module_params=True)
    torch.set_rng_state(random)
    assert step(3) == uninterrupted


@row("edge_values")
def edges_of_pyg():
    edge_index = torch.tensor([[1, 2, 0, 1], [2, 1, 1, 0]])
    _, (edges, heads) = GATConv(3, 4)(torch.eye(3), edge_index, return_attention_weights=True)
    attention = edge_values(PATH, edges, heads[:, 0])
    torch.testing.assert_close(PATH.sum(attention), torch.ones(3))
    for (source, target), value in zip(edges.T, heads[:, 0], strict=True):
        place = (PATH.source == source) & (PATH.target == target)
        assert torch.equal(attention[place], value[None])
