# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: plates around and below a field, and what else programs get wrong."""

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import (
    PATH,
    check_against,
    expected_evidence_bound,
    gradients,
    mean_over_orders,
    near,
)
from graphs import labellings, parameters
from pyro import infer, poutine
from pyro.contrib.autoname import scope
from pyro.contrib.easyguide import easy_guide
from pyro.infer import TraceGraph_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.ops.indexing import Vindex
from pyro_rows import Pair, Y, losses, row

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import check_program, evidence_guide, ordered_guide
from pyro_nmm.models import FreeNMM, nmm, node_plate

X = torch.tensor([-1.2, 0.3, 1.0])


class Measured:
    """Latent labels of three nodes, and a measurement of each, as ``below`` writes it."""

    def __init__(self, below=None, x=X):
        pyro.clear_param_store()
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.x = alpha.log().requires_grad_(), x
        self.loc = torch.tensor([-0.5, 0.7]).requires_grad_()
        self.below = below or (lambda y: self.sample(y).to_event(1))

    @property
    def prior(self):
        return PATH, pyro.param("log_alpha", self.log_alpha).exp(), self.logits

    def sample(self, y):
        return dist.Normal(pyro.param("loc", self.loc)[y], 0.5)

    def evidence(self):
        return self.sample(torch.arange(2)).log_prob(self.x.unsqueeze(-1))

    def model(self):
        y = nmm(*self.prior, collapsed=True)
        found = self.below(y)
        if found is not None:
            pyro.sample("x", found, obs=self.x)

    def guide(self, **options):
        evidence_guide(*self.prior, self.evidence(), collapsed=True, **options)

    def bound(self):
        return expected_evidence_bound(*self.prior, self.evidence())

    def log_prob(self):
        """The exact ``log p(x)``."""
        y = labellings(3)
        log_prior = NeighborMixture(*self.prior).log_prob(y)
        return (log_prior + self.sample(y).log_prob(self.x).sum(-1)).logsumexp(0)


def particles(program, **options):
    elbo = TraceGraph_ELBO(num_particles=8, vectorize_particles=True, **options)
    return torch.tensor([elbo.loss(program.model, program.guide) for _ in range(60)])


@row("RenyiELBO, evidence_guide")
def importance_weighted_evidence():
    program = Measured()
    guide = partial(program.guide, estimator="reinforce")
    elbo = infer.RenyiELBO(0.0, 4000, vectorize_particles=True, max_plate_nesting=0)
    leaves = [program.loc, program.log_alpha]
    found, grads = gradients(elbo, program.model, guide, leaves, 40)
    near(found, -program.log_prob().item())
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(-program.log_prob(), leaves)])
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) - wanted).abs() < 4.5 * error + 1e-3).all()  # biased by 1 / 4000


def plate_of(program, name="nodes", **options):
    def below(y):
        with pyro.plate(name, 3, **options) as nodes:
            pyro.sample("x", program.sample(y[..., nodes]), obs=X[nodes])

    return below


@row("plate, over nodes below nmm")
def one_particle():
    program = Measured()
    program.below = plate_of(program)
    elbo = TraceGraph_ELBO()
    found = [elbo.loss(program.model, program.guide) for _ in range(60)]
    near(-torch.tensor(found), program.bound().detach())


@row("plate, over nodes below nmm, vectorized", "plate, of some nodes below nmm, vectorized")
def counted_by_particle(name):
    program = Measured()
    program.below = plate_of(program, subsample_size=2 if "some" in name else None)
    particles(program)


@row("node_plate")
def nodes_in_a_plate():
    program = Measured()

    def below(y, **options):
        with node_plate(PATH, y, **options) as (nodes, y):
            pyro.sample("x", program.sample(y), obs=X[nodes])

    program.below = below
    elbo = TraceGraph_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
    sampled = gradients(elbo, program.model, program.guide, [program.loc], 30)
    check_against(-program.bound(), [program.loc], *sampled)
    program.below = partial(below, subsample_size=2)
    near(-losses(program.model, program.guide, nesting=1, steps=60), program.bound().detach())


@row("plate, over nodes, labels latent", "plate, of some nodes, labels latent")
def latent_over_nodes(name):
    program = Measured()

    def in_plate(part):
        def run():
            with pyro.plate("nodes", 3, subsample_size=1 if "some" in name else None):
                part()

        return run

    losses(in_plate(program.model), in_plate(program.guide), nesting=1)


@row("plate, evidence of all fields")
def shared_evidence():
    """Of two latent fields, and of three that have a dimension for their plate."""
    program = Measured()
    for number, shape in ((2, ()), (3, (3,))):

        def in_plate(part, number=number):
            def run():
                with pyro.plate("fields", number):
                    part()

            return run

        def guide(shape=shape):
            evidence = program.evidence().expand(*shape, -1, -1)
            evidence_guide(*program.prior, evidence, collapsed=True)

        found = losses(in_plate(program.model), in_plate(guide), nesting=1)
        near(-found, number * program.bound().detach())


@row("sum over nodes")
def summed():
    program = Measured(lambda y: dist.Normal(y.sum(-1).double(), 1.0), x=torch.tensor(1.2))
    evidence = torch.zeros(3, 2)
    program.evidence = lambda: evidence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_program(program.model, program.guide, num_runs=8)
        program.below = lambda y: dist.Normal(y.sum().double(), 1.0)
        with pytest.raises(ValueError, match=r"'x' .* reads values of another particle.*sum\(-1\)"):
            check_program(program.model, program.guide, num_runs=8)


@row("replay, labels drawn")
def replayed_choices():
    pair = Pair()
    drawn = poutine.trace(pair.guide).get_trace()
    poutine.replay(pair.model, trace=drawn)(None)


@row("plate, around evidence_guide")
def guide_over_nodes():
    with pyro.plate("nodes", 3):
        Measured().guide()


@row("plate, labels latent")
def latent_fields():
    """One prior of all fields."""
    program = Measured(x=torch.stack([X, -X]))

    def in_plate(part):
        def run():
            with pyro.plate("fields", 2):
                part()

        return run

    found = losses(in_plate(program.model), in_plate(program.guide), nesting=1)
    bounds = []
    for x in program.x:
        evidence = program.sample(torch.arange(2)).log_prob(x[:, None])
        bounds.append(expected_evidence_bound(*program.prior, evidence).detach())
    near(-found, sum(bounds))


@row("batch dimension, no plate")
def alone():
    pair = Pair()

    def program(field):
        return lambda: field(PATH, pair.alpha.expand(5, -1, -1), pair.logits, Y, collapsed=True)

    TraceGraph_ELBO(max_plate_nesting=0).loss(program(nmm), program(ordered_guide))


@row("batch dimension, other plate")
def moved():
    """A value for each element of a plate, which is no plate of the field's."""
    pair, group = Pair(), torch.tensor([0, 0, 1])

    def program(field):
        def run():
            with pyro.plate("groups", 2):
                shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
            alpha = pair.alpha * shift[..., group, None].exp()
            field(PATH, alpha, pair.logits, Y, collapsed=True)

        return run

    losses(program(nmm), program(ordered_guide), nesting=1)


@row("Vindex")
def parameter_of_each_label():
    """Of particles that have one each."""
    program = Measured()
    locs = torch.tensor([-0.5, 0.7])

    def model():
        loc = pyro.sample("loc", dist.Normal(locs, 0.1).to_event(1))  # (..., 2)
        y = nmm(*program.prior, collapsed=True)
        at_labels = Vindex(loc[..., None, :])[..., y]
        pyro.sample("x", dist.Normal(at_labels, 0.5).to_event(1), obs=X)

    def guide():
        loc = pyro.sample("loc", dist.Normal(locs, 0.1).to_event(1))
        evidence = dist.Normal(loc[..., None, :], 0.5).log_prob(X[:, None])
        evidence_guide(*program.prior, evidence, collapsed=True)

    check_program(model, guide, num_runs=8)  # each particle has its own value


@row("do, one choice")
def one_choice():
    """An intervention on the choice of node 0, in its logits."""
    pair = Pair()
    other = (PATH.target == 0) & (PATH.source != 1)
    mix = NeighborMixture(PATH, pair.alpha, pair.logits.masked_fill(other, -torch.inf))
    mean = pair.alpha / pair.alpha.sum(-1, keepdim=True)
    torch.testing.assert_close(mix.marginals()[0], mean[1])
    free = NeighborMixture(PATH, pair.alpha, pair.logits).marginals()
    torch.testing.assert_close(mix.marginals()[1:], free[1:])


@row("observed, a mask for each labelling")
def masks():
    pair = Pair()
    fields = torch.tensor([[0, 0, 1], [1, 0, 1]])
    known = torch.tensor([[True, True, False], [True, False, True]])

    def both(program):
        def run():
            for number, (y, observed) in enumerate(zip(fields, known, strict=True)):
                with scope(prefix=f"field {number}"):
                    program(y, observed=observed)

        return run

    def bound(y, observed):
        mix = NeighborMixture(PATH, pair.alpha, pair.logits)
        rows = PATH.restrict(observed)

        def of_order(order):
            q = mix.choices(y, observed, order)
            c = torch.cartesian_prod(*(rows.source[a:b] for a, b in rows.ptr.unfold(0, 2, 1)))
            return (q.log_prob(c).exp() * q.log_labels(c).sum(-1)).sum()

        return mean_over_orders(rows.nodes, of_order)

    near(-losses(both(pair.model), both(pair.guide)), sum(map(bound, fields, known)))


def composed(program, make):
    """A guide of several parts, with the loss of :class:`Measured`."""
    locs = torch.tensor([-0.5, 0.7])

    def model():
        loc = pyro.sample("means", dist.Normal(locs, 1.0).to_event(1))
        y = nmm(*program.prior, collapsed=True)
        at_labels = Vindex(loc[..., None, :])[..., y]
        pyro.sample("x", dist.Normal(at_labels, 0.5).to_event(1), obs=X)

    found = losses(model, make(model, locs), steps=40)
    prior = dist.Normal(locs, 1.0).log_prob(locs).sum()
    near(-found, program.bound().detach() + prior)


@row("AutoGuideList")
def guide_list():
    program = Measured()

    def labels():
        program.guide()  # returns nothing

    def make(model, locs):
        guide = AutoGuideList(model)
        start = {"init_loc_fn": infer.autoguide.init_to_value(values={"means": locs})}
        guide.append(AutoDelta(poutine.block(model, expose=["means"]), **start))
        guide.append(labels)
        return guide

    composed(program, make)


@row("easy_guide")
def easy():
    program = Measured()

    def make(model, locs):
        @easy_guide(model)
        def guide(self):
            pyro.sample("means", dist.Delta(locs, event_dim=1))
            program.guide()

        return guide

    composed(program, make)


@row("MixtureGuide, y in a plate")
def labels_in_a_plate():
    from pyro_nmm.guides import MixtureGuide

    def target():
        with pyro.plate("nodes", 3):
            pyro.sample("y", dist.Bernoulli(torch.tensor([0.2, 0.5, 0.6])))

    pair = MixtureGuide(PATH, FreeNMM(PATH, 2), target)
    losses(pair.model, pair.guide, nesting=1)


@row("param_store.load")
def resumed():
    from tempfile import TemporaryDirectory

    from pyro.optim import Adam

    from pyro_nmm.guides import AmortizedNMM

    def fresh():
        pyro.clear_param_store()
        network, optimizer = FreeNMM(PATH, 2, kappa=1.0), Adam({"lr": 0.05})
        pair = AmortizedNMM(PATH, network)
        elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
        svi = infer.SVI(pair.model, pair.guide, optimizer, elbo)
        return network, optimizer, lambda steps: [svi.step(y=Y) for _ in range(steps)]

    network, optimizer, step = fresh()
    with TemporaryDirectory() as folder:
        step(3)
        pyro.get_param_store().save(f"{folder}/parameters")
        optimizer.save(f"{folder}/optimizer")
        random = torch.get_rng_state()
        wanted = step(3)
        network, optimizer, step = fresh()
        pyro.get_param_store().load(f"{folder}/parameters")
        optimizer.load(f"{folder}/optimizer")
    with pytest.raises(ValueError, match="update_module_params=True"):
        step(1)
    pyro.module("nmm", network, update_module_params=True)
    torch.set_rng_state(random)
    assert step(3) == wanted


@row("edge_values")
def edges_of_pyg():
    from torch_geometric.nn import GATConv

    from pyro_nmm import edge_values

    edge_index = torch.tensor([[1, 2, 0, 1], [2, 1, 1, 0]])
    attend = GATConv(3, 4)
    _, (edges, heads) = attend(torch.eye(3), edge_index, return_attention_weights=True)
    attention = edge_values(PATH, edges, heads[:, 0])
    torch.testing.assert_close(PATH.sum(attention), torch.ones(3))
    for (source, target), value in zip(edges.T, heads[:, 0], strict=True):
        place = (PATH.source == source) & (PATH.target == target)
        assert torch.equal(attention[place], value[None])
