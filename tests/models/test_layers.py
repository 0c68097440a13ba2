# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Programs of several fields under scopes, against sums over all that they can draw."""

import pyro.distributions as dist
import pytest
import torch
from bounds import (
    PATH,
    check_against,
    expected_bound,
    expected_evidence_bound,
    expected_family_loss,
    gradients,
)
from graphs import labellings, parameters
from pyro import poutine, sample
from pyro.contrib.autoname import scope
from pyro.infer import TraceGraph_ELBO
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import MixtureGuide, evidence_guide, ordered_guide
from pyro_nmm.models import FreeNMM, nmm


class LabelsOfAField:
    """
    Labels of a field, hidden by noise or behind the labels of a second field, and another field as
    the family of their posterior.
    """

    def __init__(self, layers=1, outer=None):
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.strength = alpha.log().requires_grad_(), torch.tensor(2.0)
        self.means, self.w = torch.tensor([-0.5, 0.4]), torch.tensor([-1.0, 0.3, 0.6])
        self.y, self.layers, self.outer = torch.tensor([1, 1, 0]), layers, outer
        self.network = FreeNMM(PATH, 2)
        with torch.no_grad():
            for leaf in self.network.parameters():
                leaf.add_(0.5 * torch.randn_like(leaf))
        order = torch.tensor([1, 0, 2])
        self.family = MixtureGuide(PATH, self.network, self.target, site="prior/y", order=order)
        self.leaves = [self.network.log_alpha, self.network.logits, self.log_alpha]
        if layers == 2:
            self.leaves.append(self.strength.requires_grad_())

    def prior(self):
        return PATH, self.log_alpha.exp(), self.logits

    def second(self, labels):
        return PATH, 0.3 + self.strength * one_hot(labels, 2), self.logits

    def emission(self, labels):
        return dist.Normal(self.means[labels], 0.7)

    def target(self):
        with scope(prefix="prior"):
            labels = nmm(*self.prior(), collapsed=True)
        if self.layers == 1:
            sample("w", self.emission(labels).to_event(1), obs=self.w)
        else:
            scope(prefix="second")(nmm)(*self.second(labels), self.y, collapsed=True)

    def guide(self):
        labels = self.family.guide()
        scope(prefix="prior")(ordered_guide)(*self.prior(), labels, collapsed=True)
        if self.layers == 2:
            scope(prefix="second")(ordered_guide)(*self.second(labels), self.y, collapsed=True)

    def pair(self):
        if self.outer is None:
            return self.family.model, self.guide
        return (scope(prefix=self.outer)(program) for program in (self.family.model, self.guide))

    def exact_loss(self):
        """Of equation (10), and in it the bound of each field's own choices."""

        def log_target(labels):
            if self.layers == 1:
                rest = self.emission(labels).log_prob(self.w).sum(-1)
            else:
                rest = expected_bound(*self.second(labels), self.y.expand(8, 3))
            return expected_bound(*self.prior(), labels) + rest

        mix = NeighborMixture(PATH, *self.network(PATH))
        return expected_family_loss(mix, self.family.order, log_target)


def check(model, guide, truth, leaves):
    elbo = TraceGraph_ELBO(500, vectorize_particles=True, max_plate_nesting=0)
    check_against(truth, leaves, *gradients(elbo, model, guide, leaves, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "outer"), [(1, None), (1, "outer"), (2, None)])
def test_posterior_of_a_field(layers, outer):
    program = LabelsOfAField(layers, outer)
    check(*program.pair(), program.exact_loss(), program.leaves)


def test_sites_of_a_target_with_a_field():
    model, guide = LabelsOfAField(outer="outer").pair()
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


class Hidden:
    """A field at each of two times, where the first one's labels pull at the second's."""

    def __init__(self):
        alpha, self.logits = parameters(PATH, 2, scale=1.0)
        self.log_alpha, self.means = alpha.log(), torch.tensor([-0.5, 0.4])
        self.strength = torch.tensor(2.0)
        self.leaves = [self.log_alpha, self.means, self.strength]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.w = torch.tensor([[-1.0, 0.3, 0.6], [0.2, -0.8, 0.5]])

    def field(self, last):
        alpha = self.log_alpha.exp()
        alpha = alpha if last is None else alpha + self.strength * one_hot(last, 2)
        return PATH, alpha, self.logits

    def evidence(self, time):
        return dist.Normal(self.means, 0.7).log_prob(self.w[time][:, None])

    def model(self):
        y = None
        for time in poutine.markov(range(2)):
            with scope(prefix=f"time {time}"):
                y = nmm(*self.field(y), collapsed=True)
                sample("w", dist.Normal(self.means[y], 0.7).to_event(1), obs=self.w[time])

    def guide(self):
        y = None
        for time in poutine.markov(range(2)):
            with scope(prefix=f"time {time}"):
                y = evidence_guide(*self.field(y), self.evidence(time), collapsed=True)

    def exact_loss(self):
        second = {
            tuple(y.tolist()): expected_evidence_bound(*self.field(y), self.evidence(1))
            for y in labellings(3)
        }

        def after(labels):
            return torch.stack([second[tuple(y)] for y in labels.tolist()])

        return -expected_evidence_bound(*self.field(None), self.evidence(0), after=after)


@pytest.mark.slow
def test_hidden_series():
    program = Hidden()
    check(program.model, program.guide, program.exact_loss(), program.leaves)


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [False, True])
def test_labels_and_hints_in_one_trace(collapsed):
    """Of four nodes one has a label, two have hints, and one is left out."""
    hood, w = Neighborhood.grid(1, 4), torch.tensor([0.0, -0.6, 0.0, 0.9])
    alpha, logits = parameters(hood, 2, scale=1.0)
    log_alpha, means = alpha.log().requires_grad_(), torch.tensor([-0.5, 0.4]).requires_grad_()
    known = torch.tensor([True, True, False, True])
    label, rows = torch.tensor([1]), torch.tensor([1, 2])

    def evidence():
        hints = dist.Normal(means, 0.7).log_prob(w[:, None])
        return torch.cat([one_hot(label, 2).double().log(), hints[1:]])

    def model():
        y = nmm(hood, log_alpha.exp(), logits, observed=known, collapsed=collapsed)
        sample("labels", dist.Delta(y[..., :1], event_dim=1), obs=label)
        sample("w", dist.Normal(means[y[..., rows]], 0.7).to_event(1), obs=w[known][rows])

    def guide():
        evidence_guide(hood, log_alpha.exp(), logits, evidence(), known, collapsed=collapsed)

    truth = -expected_evidence_bound(hood, log_alpha.exp(), logits, evidence(), known)
    check(model, guide, truth, [log_alpha, means])
    # The bound is one on the probability of label and hints together.
    mix, both = NeighborMixture(hood, log_alpha.exp(), logits), []
    for y in labellings(2):
        likelihood = dist.Normal(means[y], 0.7).log_prob(w[known][rows]).sum()
        both.append(mix.log_marginal(torch.tensor([0, 1, 3]), torch.cat([label, y])) + likelihood)
    exact = torch.stack(both).logsumexp(0)
    assert -0.2 < -truth - exact < 0
