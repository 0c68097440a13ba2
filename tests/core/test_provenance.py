# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Samplers below a discrete parent: what a sample depends on is charged with what follows from it.
Without its provenance TraceGraph_ELBO leaves those costs out, silently.
"""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import labellings, parameters, star
from pyro.infer import TraceGraph_ELBO
from pyro.ops.provenance import get_provenance, track_provenance
from torch_geometric.utils import to_undirected

from pyro_nmm import (
    ChosenLabels,
    EvidenceConditional,
    MembershipMixture,
    NeighborChoice,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.models import grid_edges, ising
from pyro_nmm.models.dglfrm import InnerProductGraph, StickShares
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.provenance import untracked

HOOD = star(2)
LABELS = torch.tensor([1, 0, 1])
CHOICES = torch.tensor([0, 0, 2])
PAIRS = torch.tensor([[0, 0, 1], [1, 2, 2]])


def tracked(name, value):
    return track_provenance(value, frozenset([name]))


def choices():
    return HOOD.source[enumerate_choices(HOOD)]


def both():
    """Choices with labels."""
    pairs = torch.broadcast_tensors(choices()[:, None], labellings(3)[None])
    return torch.stack(pairs, 2).flatten(0, 1)


def graphs():
    """Every graph of three nodes."""
    for present in itertools.product([False, True], repeat=3):
        yield to_undirected(PAIRS[:, torch.tensor(present)], num_nodes=3)


def shifted(x, *shape):
    """Parameters that depend on ``x``, of any batch shape."""
    base = torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape)
    return base * (1 - 2 * x).reshape(*x.shape, *[1] * len(shape))


def by_chance(x):
    """Matrices that keep labels rarely, or mostly if ``x``."""
    keep = (0.05 + 0.9 * x)[..., None, None, None].expand(*x.shape, HOOD.num_edges, 1, 1)
    return keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)


def relabelling(x):
    alpha = torch.tensor([(1.0, 9.0), (1.0, 90.0), (1.0, 50.0)])
    return NeighborMixture(HOOD, alpha, torch.zeros(HOOD.num_edges), by_chance(x))


#: Distributions of a sampled 0 or 1, and every value that they take.
SAMPLERS = {
    "choices": (lambda x: NeighborChoice(HOOD, shifted(x, HOOD.num_edges)), choices),
    "choices given labels, alpha": (
        lambda x: OrderedConditional(HOOD, (3 * shifted(x, 3, 2)).exp(), torch.zeros(7), LABELS,
                                     order=torch.arange(3)),
        choices,
    ),
    "choices given sampled labels": (
        lambda x: OrderedConditional(HOOD, shifted(torch.zeros(()), 3, 2).exp(), torch.zeros(7),
                                     (LABELS * x[..., None]).long(), order=torch.arange(3)),
        choices,
    ),
    "latent labels, alpha": (
        lambda x: EvidenceConditional(HOOD, (3 * shifted(x, 3, 2)).exp(), torch.zeros(7),
                                      torch.tensor([[0.0, -1.0], [0.5, 0.0], [0.0, 0.0]]),
                                      order=torch.arange(3)),
        both,
    ),
    "latent labels, evidence": (
        lambda x: EvidenceConditional(HOOD, torch.ones(3, 2), torch.zeros(7), shifted(x, 3, 2),
                                      order=torch.arange(3)),
        both,
    ),
    "labels given choices": (
        lambda x: ChosenLabels(shifted(x, 3, 2).exp(), CHOICES), lambda: labellings(3)
    ),
    "mixture": (
        lambda x: NeighborMixture(HOOD, (3 * shifted(x, 3, 2)).exp(), shifted(x, HOOD.num_edges)),
        lambda: labellings(3),
    ),
    "field": (
        lambda x: ising(grid_edges(1, 3), (0.1 + 0.4 * x)[..., None], shifted(x, 3) + 0.4 - x),
        lambda: labellings(3),
    ),
    "graph": (lambda x: InnerProductGraph(shifted(x, 3, 2) * (0.1 + 2 * x), 1.0), graphs),
    "edges with matrices": (relabelling, lambda: labellings(3)),
    "latent labels, matrices": (
        lambda x: relabelling(x).in_order(LABELS, order=torch.arange(3)), both
    ),
}  # fmt: skip
#: One sampler of each kind of kernel; the name of the parent is tested for all.
WITH_GRADIENT = (
    "choices",
    "choices given labels, alpha",
    "choices given sampled labels",
    "latent labels, evidence",
    "labels given choices",
    "latent labels, matrices",
)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_and_densities_name_their_parent(name):
    """Without the name, TraceGraph_ELBO would charge the parent with nothing below the sample."""
    law = SAMPLERS[name][0](tracked("x", torch.tensor(1.0)))
    value = law.sample()
    assert get_provenance(value) == {"x"}
    assert get_provenance(law.log_prob(value)) == {"x"}
    (plain,) = untracked(value)[0]
    assert get_provenance(plain) == frozenset()
    assert get_provenance(law.log_prob(plain)) == {"x"}


class Utility(GraphDistribution):
    """A density of the model that does not know of the parent."""

    def __init__(self, like, cost):
        self.cost = cost
        super().__init__(torch.Size(), like.event_shape, validate_args=False)

    def log_prob(self, value):
        return self.cost(value)


def gradient_of(make, cost, rate, elbo):
    """Gradients of the bound towards the log-odds of the parent, which is all that is learned."""

    def guide():
        x = pyro.sample("x", dist.Bernoulli(logits=rate))
        pyro.sample("v", make(x))

    def model():
        pyro.sample("x", dist.Bernoulli(logits=torch.tensor(0.2)))
        pyro.sample("v", Utility(make(torch.tensor(0.0)), cost))

    grads = []
    for _ in range(20):
        rate.grad = None
        elbo.loss_and_grads(model, guide)
        grads.append(rate.grad.clone())
    return torch.stack(grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradient_of_a_discrete_parent(name):
    """
    The gradient of a parent's log-odds, of 2,000 draws, notices the loss of half of what the
    parent is charged with through the sample.
    """
    make, values = SAMPLERS[name]
    laws = [make(torch.tensor(x)) for x in (0.0, 1.0)]
    rate = torch.tensor(0.4, requires_grad=True)
    prior, own = dist.Bernoulli(logits=torch.tensor(0.2)), dist.Bernoulli(logits=rate)

    def hit(value):
        """What tells one value of the parent from the other, and knows of the sample alone."""
        return 4.0 * (laws[1].log_prob(value) > laws[0].log_prob(value)).double()

    bound = charged = 0.0
    for x, law in enumerate(laws):
        terms = [(law.log_prob(v), hit(v)) for v in values()]
        log_prob, gain = (torch.stack(t) for t in zip(*terms, strict=True))
        assert log_prob.exp().sum().item() == pytest.approx(1)
        gain, entropy = (log_prob.exp() * gain).sum(), -(log_prob.exp() * log_prob).sum()
        log_prior, log_own = (parent.log_prob(torch.tensor(float(x))) for parent in (prior, own))
        bound = bound + log_own.exp() * (log_prior - log_own + entropy + gain)
        charged = charged + log_own.exp() * gain
    # A constant cost has no gradient: this one takes most of the noise away.
    centre = bound.item()
    exact = torch.autograd.grad(-bound, rate, retain_graph=True)[0]
    through_the_sample = torch.autograd.grad(charged, rate)[0]
    elbo = TraceGraph_ELBO(100, max_plate_nesting=0, vectorize_particles=True)
    grads = gradient_of(make, lambda value: hit(value) - centre, rate, elbo)
    error = grads.std() / len(grads) ** 0.5
    assert through_the_sample.abs() > 8 * error  # what would be missing without provenance
    assert (grads.mean() - exact).abs() < 5 * error, (grads.mean(), exact, error)


@pytest.mark.parametrize("estimator", ["reward_to_go", "no_score", "reinforce"])
def test_scores_name_choices_and_parameters(estimator):
    """TraceGraph_ELBO would forget the score of c, silently."""
    alpha, logits = parameters(HOOD, 2)
    q = OrderedConditional(HOOD, tracked("a", alpha), logits, LABELS, estimator=estimator)
    log_prob, score, entropy = q.score_parts(tracked("c", untracked(q.sample((3,)))[0][0]))
    parts = [log_prob, score] if estimator == "reinforce" else [log_prob, score, entropy]
    assert all(get_provenance(part) == {"a", "c"} for part in parts)


def test_every_parameter_leaves_its_trace():
    table, attention = (tracked(*pair) for pair in zip("ab", parameters(HOOD, 2), strict=True))
    odds, y = tracked("o", torch.randn(3, 2)), tracked("y", LABELS)
    coupling, terms = tracked("J", torch.tensor(0.3)), tracked("h", torch.ones(3))
    mixture = MembershipMixture(HOOD, odds, attention)
    for law, names in (
        (OrderedConditional(HOOD, table, attention, y), "aby"),
        (ChosenLabels(table, tracked("c", CHOICES)), "ac"),
        (NeighborMixture(HOOD, table, attention), "ab"),
        (mixture, "bo"),
        (StickShares(tracked("s", torch.ones(2)), tracked("t", torch.ones(2))), "st"),
        (ising(grid_edges(1, 3), coupling, terms), "Jh"),
    ):
        value = law.sample()
        assert get_provenance(value) == {*names}, law
        assert get_provenance(law.log_prob(untracked(value)[0][0])) == {*names}, law
        if law.has_rsample:
            assert get_provenance(law.rsample()) == {*names}, law
    assert get_provenance(mixture.choices(tracked("s", mixture.sample())).sample()) == {*"bos"}
