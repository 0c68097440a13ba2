# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Programs of several fields under scopes, against sums over all that they can draw."""

import itertools

import pyro.distributions as dist
import pytest
import torch
from graphs import labellings, parameters
from pyro import poutine, sample
from pyro.contrib.autoname import scope
from pyro.infer import TraceGraph_ELBO

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import MixtureGuide, ordered_guide
from pyro_nmm.models import FreeNMM, nmm
from pyro_nmm.ops.enumeration import enumerate_choices

PATH = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)


def all_choices(hood):
    return hood.source[enumerate_choices(hood)]


def expected_bound(hood, alpha, logits, y):
    """The bound of :func:`ordered_guide` for labels ``(..., N)``, over all orders and choices."""
    c, bounds = all_choices(hood), []
    c = c.view(len(c), *(1,) * (y.dim() - 1), hood.num_nodes)
    for order in itertools.permutations(range(hood.num_nodes)):
        q = OrderedConditional(hood, alpha, logits, y, order=torch.tensor(order))
        bounds.append((q.log_prob(c).exp() * q.log_labels(c).sum(-1)).sum(0))
    return torch.stack(bounds).mean(0)


def gradients(elbo, model, guide, leaves, steps):
    """``(steps,)`` losses and ``(steps, n)`` gradients."""
    losses, grads = [], []
    for _ in range(steps):
        for leaf in leaves:
            leaf.grad = None
        losses.append(elbo.loss_and_grads(model, guide))
        grads.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    return torch.tensor(losses), torch.stack(grads)


def check_against(truth, leaves, losses, grads):
    """In standard errors, each of which must tell the gradient from zero."""
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(truth, leaves)])
    steps = len(losses)
    assert abs(losses.mean() - truth) < 4 * losses.std() / steps**0.5 + 1e-9
    error = grads.std(0) / steps**0.5
    assert ((grads.mean(0) - wanted).abs() < 4.5 * error + 1e-9).all()
    assert wanted.norm() > 5 * error.norm()


class FieldAsTarget:
    """A field of labels that noise hides, and another field as the family of its posterior."""

    def __init__(self, outer=None):
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.means = alpha.log().requires_grad_(), torch.tensor([-0.5, 0.4])
        self.w, self.outer = torch.tensor([-1.0, 0.3, 0.6]), outer
        self.network = FreeNMM(PATH, 2)
        with torch.no_grad():
            for leaf in self.network.parameters():
                leaf.add_(0.5 * torch.randn_like(leaf))
        order = torch.tensor([1, 0, 2])
        self.family = MixtureGuide(PATH, self.network, self.target, site="prior/y", order=order)
        self.leaves = [self.network.log_alpha, self.network.logits, self.log_alpha]

    def emission(self, y):
        return dist.Normal(self.means[y], 0.7)

    def target(self):
        with scope(prefix="prior"):
            y = nmm(PATH, self.log_alpha.exp(), self.logits, collapsed=True)
        sample("w", self.emission(y).to_event(1), obs=self.w)

    def guide(self):
        y = self.family.guide()
        with scope(prefix="prior"):
            ordered_guide(PATH, self.log_alpha.exp(), self.logits, y, collapsed=True)

    def pair(self):
        if self.outer is None:
            return self.family.model, self.guide
        return (scope(prefix=self.outer)(program) for program in (self.family.model, self.guide))

    def exact_loss(self):
        """Of equation (10), and in it the bound of the target's own choices."""
        y, c = labellings(3), all_choices(PATH)[:, None]
        mix = NeighborMixture(PATH, *self.network(PATH))
        log_joint = NeighborChoice(PATH, mix.logits).log_prob(c) + mix.given(c).log_prob(y)
        log_q = mix.choices(y, order=self.family.order).log_prob(c)
        target = expected_bound(PATH, self.log_alpha.exp(), self.logits, y)
        target = target + self.emission(y).log_prob(self.w).sum(-1)
        return (log_joint.exp() * (log_joint - log_q - target)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("outer", [None, "outer"])
def test_target_with_a_field_of_its_own(outer):
    program = FieldAsTarget(outer)
    model, guide = program.pair()
    elbo = TraceGraph_ELBO(200, vectorize_particles=True, max_plate_nesting=0)
    losses, grads = gradients(elbo, model, guide, program.leaves, 50)
    check_against(program.exact_loss(), program.leaves, losses, grads)


def test_sites_of_a_target_with_a_field():
    model, guide = FieldAsTarget("outer").pair()
    guide_trace = poutine.trace(guide).get_trace()
    trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace()
    names = {"outer/c", "outer/prior/c", "outer/prior/y"}
    assert set(guide_trace.stochastic_nodes) == set(trace.stochastic_nodes) == names


@pytest.mark.parametrize("site", ["y", "prior/y"])
@pytest.mark.parametrize("prefix", [None, "prior"])
def test_target_whose_sites_collide(site, prefix):
    def target():
        arguments = PATH, torch.ones(3, 2), torch.zeros(PATH.num_edges)
        return nmm(*arguments) if prefix is None else scope(prefix=prefix)(nmm)(*arguments)

    def guide():
        y = family.guide()
        scope(prefix="prior")(ordered_guide)(PATH, torch.ones(3, 2), torch.zeros(7), y)

    family = MixtureGuide(PATH, FreeNMM(PATH, 2), target, site=site)
    elbo = TraceGraph_ELBO(2, vectorize_particles=True, max_plate_nesting=0)
    if (site, prefix) == ("prior/y", "prior"):
        assert torch.tensor(elbo.loss(family.model, guide)).isfinite()
    else:
        message = "must have one site 'prior/y'" if site != "y" else "run that nmm under a scope"
        with pytest.raises(ValueError, match=message):
            elbo.loss(family.model, guide)


def test_labels_in_a_scope_are_named_in_full():
    def target():
        with scope(prefix="prior"):
            sample("y", dist.Categorical(torch.ones(2)).expand([3]).to_event(1))

    family = MixtureGuide(PATH, FreeNMM(PATH, 2), target)
    with pytest.raises(ValueError, match=r"labels at 'prior/y', but the guide draws 'y'"):
        TraceGraph_ELBO().loss(family.model, family.guide)
