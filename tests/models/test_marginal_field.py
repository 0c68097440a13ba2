# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Random fields with nodes summed out, against sums over all labellings."""

import pytest
import torch
from pyro.infer import TraceGraph_ELBO
from pyro.ops.provenance import extract_provenance, get_provenance, track_provenance
from scipy.stats import chisquare

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGuide, fit_mixture
from pyro_nmm.models import FreeNMM, MarginalField, PairwiseMRF, grid_edges, ising, potts
from pyro_nmm.models.random_fields.marginal_field import MAX_LABELLINGS
from pyro_nmm.ops.enumeration import enumerate_labels as labellings


def king(num_classes=3):
    """Edges of its own inside the nodes that stay, strengths of both signs, a node alone."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 0, 1, 1, 2, 3], [1, 2, 2, 3, 3, 4]])
    interaction = torch.randn(num_classes, num_classes)
    unary, strength = torch.randn(6, num_classes), torch.randn(6)
    return PairwiseMRF(edges, unary, strength, interaction + interaction.T)


def grid():
    return ising(grid_edges(2, 3), 0.5, torch.linspace(-0.4, 0.5, 6))


CASES = {
    "grid": lambda: MarginalField(grid()),
    "other half": lambda: MarginalField(grid(), torch.tensor([True, False] * 3)),
    "one node": lambda: MarginalField(grid(), torch.tensor([True] * 5 + [False])),
    "king": lambda: MarginalField(king()),
}


@pytest.fixture(params=CASES)
def half(request):
    return CASES[request.param]()


def mixture(half, seed=1):
    """Sources shared by many, so that neighbours' labels depend on each other."""
    torch.manual_seed(seed)
    size = half.num_nodes
    full = torch.ones(size, size).nonzero().T
    hood = Neighborhood(full[:, full[0] != full[1]], size)
    alpha = torch.rand(size, half.num_classes) + 0.2
    return NeighborMixture(hood, alpha.requires_grad_(), torch.randn(size**2).requires_grad_())


def every(half):
    return labellings(half.num_nodes, half.num_classes)


def test_potential_is_the_sum_over_the_others(half):
    field = half.field
    full = labellings(field.num_nodes, field.num_classes)
    potential = field.log_potential(full).double()
    for value in every(half)[::3]:
        same = (full[:, half.nodes] == value).all(1)
        assert torch.isclose(half.log_potential(value).double(), potential[same].logsumexp(0))
    fewer = half.scaled(0.3).log_potential(every(half)[0])
    same = (full[:, half.nodes] == every(half)[0]).all(1)
    assert torch.isclose(fewer, field.scaled(0.3).log_potential(full)[same].logsumexp(0))
    total = half.log_potential(every(half)).double().logsumexp(0)
    assert torch.isclose(total, half.log_normalizer().double(), atol=1e-5)
    assert torch.isclose(half.log_prob(every(half)).exp().sum(), torch.tensor(1.0), atol=1e-5)


def test_completions(half):
    field, value = half.field, every(half)[1]
    full = labellings(field.num_nodes, field.num_classes)
    full = full[(full[:, half.nodes] == value).all(1)]
    probs = field.log_potential(full).softmax(0)
    torch.manual_seed(0)
    draws = half.complete(value.expand(4000, -1))
    assert (draws[:, half.nodes] == value).all()
    counts = (draws == full[:, None]).all(-1).sum(1)
    assert counts.sum() == 4000
    assert chisquare(counts, 4000 * probs / probs.sum()).pvalue > 1e-4


def test_expected_potential_and_its_gradient(half):
    """Both without bias: within a few standard errors of those by enumeration."""
    mix, labels = mixture(half), every(half)

    def with_gradient(value):
        grads = torch.autograd.grad(value, (mix.alpha, mix.logits))
        return torch.cat([value.detach()[None], *(grad.flatten() for grad in grads)])

    exact = with_gradient((mix.log_prob(labels).exp() * half.log_potential(labels)).sum())
    draws = [with_gradient(half.expected_potential(mix, num_samples=8)) for _ in range(200)]
    samples = torch.stack(draws)
    error = samples.std(0) / 200**0.5
    assert ((samples.mean(0) - exact).abs() < 4.5 * error + 1e-5).all()


def test_colors_have_no_interaction_inside(half):
    """Log-potentials of two labels of one colour have no mixed difference."""
    colors, value = half.colors(), torch.zeros(half.num_nodes, dtype=torch.long)
    assert sorted(torch.cat(colors).tolist()) == list(range(half.num_nodes))
    for pair in (pair for color in colors for pair in torch.combinations(color)):
        one = [value.index_fill(0, place, 1) for place in (pair[:0], pair[:1], pair[1:], pair)]
        neither, first, second, both = half.log_potential(torch.stack(one))
        torch.testing.assert_close(both + neither, first + second)


def test_provenance_of_a_sampled_coupling_and_of_labels():
    """What Pyro needs to charge a discrete parent with the costs below it."""
    names, value = frozenset({"coupling"}), torch.tensor([0, 1, 1])
    coupling = track_provenance(torch.tensor(0.5), names)
    half = MarginalField(ising(grid_edges(2, 3), coupling, torch.zeros(6)))
    plain = MarginalField(ising(grid_edges(2, 3), 0.5, torch.zeros(6)))
    for query in ("log_potential", "complete"):
        answers = []
        for field in (half, plain):
            torch.manual_seed(0)
            answers.append(getattr(field, query)(value))
        assert get_provenance(answers[0]) == names, query
        torch.testing.assert_close(extract_provenance(answers[0])[0], answers[1])
    assert get_provenance(half.expected_potential(mixture(plain))) == names
    labels = track_provenance(value, frozenset({"y"}))
    assert get_provenance(plain.complete(labels)) == frozenset({"y"})


def divergence(mix, target):
    labels = labellings(target.num_nodes, target.num_classes)
    log_q = mix.log_prob(labels)
    return (log_q.exp() * (log_q - target.log_prob(labels))).sum().item()


def test_half_of_a_field_is_easier_than_all_of_it():
    """Both KL divergences are of the approximation of all six pixels: about .28 and .04 nats."""
    field, divergences = ising(grid_edges(2, 3), 0.5, torch.full((6,), 0.1)), []
    half = MarginalField(field)
    wide = Neighborhood(torch.ones(3, 3).nonzero().T, half.num_nodes)
    for target, hood in ((field, Neighborhood.grid(2, 3)), (half, wide)):
        mix, _ = fit_mixture(target, hood, FreeNMM(hood, 2), num_steps=150)
        divergences.append(divergence(mix, target))
    assert divergences[1] < 0.6 * divergences[0]
    family = FieldGuide(wide, FreeNMM(wide, 2), half, num_samples=16)
    losses = [TraceGraph_ELBO().loss(family.model, family.guide) for _ in range(50)]
    bound = torch.tensor(losses) + half.log_normalizer()
    assert bound.mean() > divergence(family.mixture(), half) - 4 * bound.std() / 50**0.5


def test_default_keeps_hubs():
    """A star's centre has too many neighbours to be summed out; its leaves have one each."""
    leaves = torch.arange(1, 20)
    edges = torch.stack([torch.zeros_like(leaves), leaves])
    half = MarginalField(ising(edges, 0.1, torch.zeros(20)))
    assert half.nodes.tolist() == [0]
    with pytest.raises(ValueError, match=f"node 0 has more than {MAX_LABELLINGS}"):
        MarginalField(half.field, torch.arange(20) > 0)


def potential_of(field, num_nodes=3, batch=(), relabel=None, **options):
    """The expected potential under a mixture over all pairs."""
    hood = Neighborhood(torch.ones(num_nodes, num_nodes).nonzero().T, num_nodes)
    alpha, logits = torch.ones(*batch, num_nodes, 2), torch.zeros(hood.num_edges)
    field.expected_potential(NeighborMixture(hood, alpha, logits, relabel), **options)


HALF, TURNED = MarginalField(grid()), torch.eye(2).expand(9, 2, 2)
BATCH = potts(grid_edges(1, 2), 0.3, torch.zeros(4, 2, 3))


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: MarginalField(grid(), torch.arange(6) > 1), "neither 0 nor 1"),
        (lambda: MarginalField(BATCH), "field must be a PairwiseMRF without batch"),
        (lambda: potential_of(HALF, 6), "mixture must have 3 nodes"),
        (lambda: potential_of(HALF, batch=(2,)), "mixture without batch"),
        (lambda: potential_of(HALF, num_samples=1), "num_samples"),
        (lambda: potential_of(HALF, relabel=TURNED), "edges that keep labels"),
        (lambda: potential_of(HALF.rest, relabel=TURNED), "edges that keep labels"),
        (lambda: HALF.complete(torch.ones(6).long()), r"value must have shape \(\.\.\., 3\)"),
        (lambda: HALF.complete(torch.tensor([0, -1, 1])), r"must hold labels in 0\.\.1"),
    ],
)
def test_refusals(run, match):
    torch.set_default_dtype(torch.float)
    with pytest.raises(ValueError, match=match):
        run()
