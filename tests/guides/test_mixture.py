# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family: the upper bound on the KL divergence, in both its forms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from graphs import labellings
from oracle import edge_lists, entropy_bound, of_hood
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGuide, MixtureGuide, density, fit_mixture, mean_field
from pyro_nmm.models import (
    ConvolutionalNMM,
    FreeNMM,
    coarse_to_fine,
    grid_edges,
    ising,
    potts,
)


def rows_of(height, width):
    """A grid whose pixels attend within their row alone: small enough to enumerate."""
    pixel = torch.arange(height * width).view(height, width)
    edges = torch.stack([pixel[:, :-1].flatten(), pixel[:, 1:].flatten()])
    return Neighborhood(torch.cat([edges, edges.flip(0)], 1), height * width)


def free(hood, num_classes=2, scale=1.0):
    network = FreeNMM(hood, num_classes)
    with torch.no_grad():
        network.log_alpha.copy_(scale * torch.randn_like(network.log_alpha))
        network.logits.copy_(scale * torch.randn_like(network.logits))
    return network


def exact_bound(mix, field, order):
    neighbors, attention = edge_lists(mix.hood, mix.logits)
    entropy = entropy_bound(mix.alpha.detach().numpy(), neighbors, attention, order)
    return -entropy - field.expected_potential(mix).item()


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 2), (3, 3), (3, 4)])
def test_bound_is_above_the_divergence(height, width):
    size = height * width
    small = size <= 4
    hood = Neighborhood.grid(height, width) if small else rows_of(height, width)
    everything = labellings(size)
    for draw in range(10):
        torch.manual_seed(draw)
        field = ising(grid_edges(height, width), torch.randn(()), torch.randn(size))
        with torch.no_grad():
            mix = NeighborMixture(hood, *free(hood, scale=1.5)(hood))
        if small:
            log_q = torch.tensor(of_hood(hood, mix.alpha, mix.logits).log_prob)
            bound = exact_bound(mix, field, torch.randperm(size).tolist())
        else:  # rows are independent of each other
            rows = torch.arange(size).view(height, width)
            log_q = sum(mix.log_marginal(row, everything[:, row]) for row in rows)
            bound = -field.expected_potential(mix).item()
            for row in rows:
                bound -= row_entropy(mix, row)
        divergence = (log_q.exp() * (log_q - field.log_potential(everything))).sum().item()
        assert divergence + field.log_normalizer() >= -1e-9
        assert bound >= divergence - 1e-9
        # The estimate has the bound for its mean; orders within small rows are all bounds.
        if small:
            samples = mix.entropy_bound(4000, "reward_to_go", torch.randperm(size))
            noisy = -samples.mean() - field.expected_potential(mix)
            assert noisy > divergence - 4 * samples.std() / 4000**0.5


def row_entropy(mix, row):
    neighbors, attention = edge_lists(mix.hood, mix.logits)
    first = int(row[0])
    part = [neighbors[i] - first for i in row.tolist()]
    alpha = mix.alpha[row].numpy()
    order = torch.randperm(len(row)).tolist()
    return entropy_bound(alpha, part, [attention[i] for i in row.tolist()], order)


def test_identity_attention_is_mean_field():
    field = ising(grid_edges(3, 3), 0.4, torch.randn(9))
    alone = Neighborhood(torch.empty(2, 0, dtype=torch.long), 9)
    marginals, losses = mean_field(field)
    network = FreeNMM(alone, 2, marginals, epsilon=1e-9)
    family = FieldGuide(alone, network, field)
    elbo = TraceGraph_ELBO()
    assert abs(elbo.loss(family.model, family.guide) - losses[0].item()) < 1e-5
    # And it has nothing left to gain.
    elbo.loss_and_grads(family.model, family.guide)
    assert network.log_alpha.grad.abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["black box", "reward_to_go", "one_step_credit"])
def test_gradients(way):
    hood, order = Neighborhood.grid(2, 2), torch.tensor([2, 0, 3, 1])
    field = ising(grid_edges(2, 2), 0.5, torch.randn(4))
    network = free(hood, scale=0.7)
    leaves = [network.log_alpha, network.logits]

    def bound():
        with torch.no_grad():
            return exact_bound(NeighborMixture(hood, *network(hood)), field, order.tolist())

    truth = []
    for leaf in leaves:
        for place in range(leaf.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    leaf.view(-1)[place] += step
                    values.append(bound())
                    leaf.view(-1)[place] -= step
            truth.append((values[0] - values[1]) / 2e-5)
    truth = torch.tensor(truth)

    if way == "black box":
        family = MixtureGuide(hood, network, density(field.log_potential, 4, 2), order=order)
        elbo = TraceGraph_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=0)
    else:
        family = FieldGuide(hood, network, field, order=order, estimator=way, num_samples=100)
        elbo = TraceGraph_ELBO()
    losses, draws = [], []
    for _ in range(200):
        network.zero_grad()
        losses.append(elbo.loss_and_grads(family.model, family.guide))
        draws.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    losses, draws = torch.tensor(losses), torch.stack(draws)
    assert abs(losses.mean() - bound()) < 4 * losses.std() / 200**0.5
    error = draws.std(0) / 200**0.5
    if way == "one_step_credit":
        assert (draws.mean(0) - truth).norm() < 0.05 * truth.norm()
    else:
        assert ((draws.mean(0) - truth).abs() < 4 * error + 1e-8).all()


def test_particles_are_baselines():
    hood = Neighborhood.grid(2, 3)
    field = ising(grid_edges(2, 3), 0.5, torch.full((6,), 1.0))
    spread = {}
    for name, offset in (("none", 0.0), ("far", 1e3)):
        # A constant in log p* changes no gradient, but without a baseline all of its noise.
        target = density(lambda y, offset=offset: field.log_potential(y) + offset, 6, 2)
        torch.manual_seed(0)
        network = free(hood)
        family = MixtureGuide(hood, network, target, name=name)
        elbo = TraceGraph_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=0)
        draws = []
        for _ in range(50):
            network.zero_grad()
            elbo.loss_and_grads(family.model, family.guide)
            draws.append(network.logits.grad.clone())
        spread[name] = torch.stack(draws).std(0).norm()
    assert 0.5 < spread["far"] / spread["none"] < 2


@pytest.mark.slow
@pytest.mark.parametrize("around", ["plate", "subsample", "large scale", "small scale"])
def test_baselines_inside_plates_and_scales(around):
    """A baseline of the wrong size would have no bias, but noise a hundredfold."""
    hood = Neighborhood.grid(2, 3)
    field = ising(grid_edges(2, 3), 0.5, torch.full((6,), 1.0))
    target = density(lambda y: field.log_potential(y) + 10, 6, 2)
    torch.manual_seed(0)
    network = free(hood)
    family = MixtureGuide(hood, network, target)
    context = {
        "plate": lambda: pyro.plate("images", 20, dim=-1),
        "subsample": lambda: pyro.plate("images", 1000, subsample_size=10, dim=-1),
        "large scale": lambda: poutine.scale(scale=100.0),
        "small scale": lambda: poutine.scale(scale=0.01),
    }[around]

    def inside(program):
        def run():
            with context():
                program()

        return run

    spread = {}
    for name in ("with", "without"):
        if name == "without":
            family._baseline = lambda *args: torch.zeros(())
        elbo = TraceGraph_ELBO(
            num_particles=8,
            vectorize_particles=True,
            max_plate_nesting=int("scale" not in around),
        )
        draws = []
        for _ in range(40):
            network.zero_grad()
            elbo.loss_and_grads(inside(family.model), inside(family.guide))
            draws.append(network.logits.grad.clone())
        spread[name] = torch.stack(draws).std(0).norm()
    assert spread["with"] < spread["without"]


@pytest.mark.slow
def test_discrete_latent_beside_the_closed_form(kernels):
    """The entropy's factor is charged to a sample that the network reads."""
    if kernels == "blocks":
        pytest.skip("the entropy has no blocks")
    hood, field = Neighborhood.grid(1, 2), ising(grid_edges(1, 2), 0.5, torch.zeros(2))
    logit = torch.tensor(0.3, requires_grad=True)

    class Switch(torch.nn.Module):
        def forward(self, hood, k):
            return (1 + 9 * k) * torch.ones(2, 2), torch.zeros(hood.num_edges)

    def program(k):
        return field

    family = FieldGuide(hood, Switch(), program, num_samples=1)

    def guide():
        k = pyro.sample("k", dist.Bernoulli(logits=logit))
        family.guide(k)

    def model():
        k = pyro.sample("k", dist.Bernoulli(0.5))
        return family.model(k)

    values = []
    for k in (0.0, 1.0):
        mix = NeighborMixture(hood, *Switch()(hood, torch.tensor(k)))
        values.append(exact_bound(mix, field, family.order.tolist()))
    p = logit.detach().sigmoid()
    prior = (p / (1 - p)).log()
    truth = p * (1 - p) * (values[1] - values[0] + prior)
    draws = []
    for _ in range(500):
        logit.grad = None
        TraceGraph_ELBO().loss_and_grads(model, guide)
        draws.append(logit.grad.clone())
    draws = torch.stack(draws)
    assert abs(draws.mean() - truth) < 4 * draws.std() / len(draws) ** 0.5


def test_scoped_and_frozen():
    hood = Neighborhood.grid(2, 2)
    field = ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    network = FreeNMM(hood, 2)
    network.logits.requires_grad_(False)
    family = MixtureGuide(hood, network, density(field.log_potential, 4, 2))
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    one, other = scope(prefix="a"), scope(prefix="b")
    for program in (family.model, one(family.model)):
        guide = family.guide if program == family.model else one(family.guide)
        assert elbo.loss_and_grads(program, guide) < 10
    assert network.log_alpha.grad.abs().sum() > 0
    second = FieldGuide(hood, FreeNMM(hood, 2), field, name="second")

    def model():
        one(family.model)()
        other(second.model)()

    def guide():
        one(family.guide)()
        other(second.guide)()

    assert elbo.loss_and_grads(model, guide) < 20


def test_fitted_in_evaluation_mode():
    hood, field = Neighborhood.grid(2, 2), ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    network = FreeNMM(hood, 2)
    network.dropout = torch.nn.Dropout(0.5)
    plain = network.forward
    network.forward = lambda hood, *inputs: (network.dropout(plain(hood)[0]) + 0.1, plain(hood)[1])
    network.dropout.eval()
    network.dropout.train()
    mix, _ = fit_mixture(field, hood, network, num_steps=2)
    torch.testing.assert_close(mix.alpha, network.log_alpha.exp().detach() + 0.1)
    assert network.dropout.training


def larger_program(edges, noisy, closed_form):
    """A Potts image with unknown coupling, seen through noise."""

    def program():
        coupling = pyro.sample("coupling", dist.LogNormal(-0.5, 0.5))
        levels = torch.tensor([-1.0, 0.0, 1.0])
        prior = potts(edges, coupling[..., None], torch.zeros(9, 3))
        if closed_form:
            evidence = dist.Normal(levels, 0.7).log_prob(noisy[:, None])
            pyro.factor("normalizer", -prior.log_normalizer())
            return potts(edges, coupling[..., None], evidence)
        y = pyro.sample("y", prior)
        return pyro.sample("x", dist.Normal(levels[y], 0.7).to_event(1), obs=noisy)

    return program


@pytest.mark.slow
@pytest.mark.parametrize("closed_form", [True, False])
def test_inside_a_larger_program(closed_form):
    edges, hood = grid_edges(3, 3), Neighborhood.grid(3, 3)
    noisy = torch.tensor([-1.2, -0.4, 0.3, -0.9, -0.8, 0.6, -1.6, 0.1, 1.4])
    network = FreeNMM(hood, 3, kappa=3.0, gamma=1.0)
    program = larger_program(edges, noisy, closed_form)
    kind = FieldGuide if closed_form else MixtureGuide
    family = kind(hood, network, program, order=coarse_to_fine(3, 3))

    def guide():
        loc = pyro.param("loc", torch.tensor(-0.5))
        scale = pyro.param("scale", torch.tensor(0.3), dist.constraints.positive)
        pyro.sample("coupling", dist.LogNormal(loc, scale))
        family.guide()

    elbo = TraceGraph_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(family.model, guide, Adam({"lr": 0.05}), elbo)
    losses, found = torch.empty(400), torch.zeros(9, 3)
    for step in range(400):
        losses[step] = svi.step()
        if step >= 300:  # a mean over steps, because the rate stays what it is
            found += family.mixture().marginals() / 100
    assert losses[-100:].mean() < losses[:20].mean()

    # The truth by quadrature over the coupling and elimination of the labels.
    grid = torch.linspace(-4, 3, 400)
    levels = torch.tensor([-1.0, 0.0, 1.0])
    evidence = dist.Normal(levels, 0.7).log_prob(noisy[:, None])
    coupling = grid.exp()[:, None]
    posterior = potts(edges, coupling, evidence)
    log_weight = dist.Normal(-0.5, 0.5).log_prob(grid) + posterior.log_normalizer()
    log_weight = log_weight - potts(edges, coupling, torch.zeros(9, 3)).log_normalizer()
    log_weight = log_weight + math.log(7 / 399)
    log_evidence = log_weight.logsumexp(0)
    weight = (log_weight - log_evidence).exp()
    gap = losses[-100:].mean() + log_evidence
    error = losses[-100:].std() / 10
    assert -4 * error < gap < (0.5 if closed_form else 0.8)
    assert abs(pyro.param("loc") - (weight * grid).sum()) < 0.25
    marginals = torch.einsum("g,gnc->nc", weight, posterior.marginals())
    assert (found - marginals).abs().mean() < 0.05


def test_closed_form_in_trace_elbo():
    field = ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    hood = Neighborhood.grid(2, 2)
    family = FieldGuide(hood, FreeNMM(hood, 2), field)
    losses = torch.tensor([Trace_ELBO().loss(family.model, family.guide) for _ in range(200)])
    bound = exact_bound(family.mixture(), field, family.order.tolist())
    assert abs(losses.mean() - bound) < 4 * losses.std() / 200**0.5


def test_fit_beats_mean_field():
    torch.manual_seed(0)
    field = ising(grid_edges(8, 5), 0.4, 0.5 * torch.randn(40))
    hood = Neighborhood.grid(8, 5)
    order = coarse_to_fine(8, 5)
    network = FreeNMM(hood, 2, field.unary.softmax(-1), kappa=1.0, gamma=0.0)
    mix, losses = fit_mixture(field, hood, network, order=order, num_steps=200, lr=0.1)
    with torch.no_grad():
        samples = mix.entropy_bound(500, "reward_to_go", order)
    log_z = field.log_normalizer()
    bound = log_z - samples.mean() - field.expected_potential(mix)
    independent = mean_field(field)
    assert 0 < bound < 0.6 * (independent.losses[0] + log_z)
    truth = field.marginals()
    assert (mix.marginals() - truth).abs().mean() < 0.7 * (
        independent.marginals - truth
    ).abs().mean()
    assert len(losses) == 200


def test_one_network_for_many_fields():
    hood = Neighborhood.grid(3, 3)

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self, hood, field):
            alpha = (self.weight[0] * field.unary + self.weight[1]).exp()
            return alpha, self.weight[2] * (hood.source == hood.target).to(alpha)

    network, fields = Linear(), {}

    def stream(step):
        return fields.setdefault(step, ising(grid_edges(3, 3), 0.3, torch.randn(9)))

    mix, _ = fit_mixture(stream, hood, network, num_steps=60, lr=0.1, warmup=0.0)
    assert len(fields) == 60
    assert network.weight[0] > 0.3
    torch.testing.assert_close(mix.alpha, network(hood, fields[59])[0].detach())


def test_bad_input():
    hood = Neighborhood.grid(2, 2)
    network, elbo = FreeNMM(hood, 2), TraceGraph_ELBO()
    family = MixtureGuide(hood, network, lambda: pyro.sample("x", dist.Normal(0.0, 1.0)))
    with pytest.raises(ValueError, match=r"target must have one site 'y'.*\['x'\]"):
        elbo.loss(family.model, lambda: None)
    family = FieldGuide(hood, network, lambda: 3)
    with pytest.raises(TypeError, match="must return a PairwiseMRF"):
        elbo.loss(family.model, family.guide)
    with pytest.raises(ValueError, match="estimator must be one of"):
        FieldGuide(hood, network, lambda: 3, estimator="no_score")
    with pytest.raises(ValueError, match="target must have the 4 nodes of hood"):
        FieldGuide(hood, network, ising(grid_edges(3, 3), 0.3, torch.zeros(9)))
    with pytest.raises(ValueError, match=r"target is a PairwiseMRF.*FieldGuide"):
        MixtureGuide(hood, network, ising(grid_edges(2, 2), 0.3, torch.zeros(4)))
    total = density(lambda y: y.sum().double(), 4, 2)
    with pytest.raises(ValueError, match="log_density must return shape"):
        TraceGraph_ELBO(3, vectorize_particles=True, max_plate_nesting=0).loss(
            MixtureGuide(hood, network, total, name="total").model,
            MixtureGuide(hood, network, total, name="total").guide,
        )
    with pytest.raises(ValueError, match="field must have no batch"):
        fit_mixture(ising(grid_edges(2, 2), 0.3, torch.zeros(3, 4)), hood, network)
    with pytest.raises(ValueError, match="kernel must be odd"):
        ConvolutionalNMM(1, kernel=4)
    with pytest.raises(ValueError, match="marginals must have shape"):
        FreeNMM(hood, 2, torch.ones(4, 3))
    field = ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    with pytest.raises(ValueError, match="warmup must be in"):
        fit_mixture(field, hood, network, warmup=2.0)


@pytest.mark.parametrize("groups", [True, False])
def test_convolutional_network_knows_the_groups(groups):
    """Where potentials are alike, pixels differ by their groups alone."""
    network = ConvolutionalNMM(radius=1, channels=8, kernel=3, groups=groups)
    field = ising(grid_edges(8, 10), 0.4, torch.zeros(80))
    alpha, _ = network(Neighborhood.grid(8, 10), field)
    inside = alpha.view(8, 10, 2)[2:6, 2:8].flatten(0, 1).T
    assert inside.std(-1).max() > 1e-4 if groups else torch.allclose(inside, inside[:, :1])


def test_convolutional_network():
    """Shifting a field by two pixels, which keeps the groups of the order, shifts the NMM."""
    torch.manual_seed(0)
    network = ConvolutionalNMM(radius=1, channels=8, kernel=3)
    fields = torch.randn(8, 10)
    hood = Neighborhood.grid(8, 10)
    outputs = []
    for image in (fields, fields.roll(2, 1)):
        alpha, logits = network(hood, ising(grid_edges(8, 10), 0.4, image.flatten()))
        dense = torch.full((80, 80), torch.nan)
        dense[hood.target, hood.source] = logits
        outputs.append((alpha.view(8, 10, 2), dense.view(8, 10, 8, 10)))
    inside = slice(2, 6), slice(2, 6)
    (alpha, logits), (moved_alpha, moved) = outputs
    torch.testing.assert_close(moved_alpha[2:6, 4:8], alpha[inside])
    for row, column in ((0, 1), (1, 0), (-1, -1), (0, 0)):
        one = logits[3, 4, 3 + row, 4 + column]
        torch.testing.assert_close(moved[3, 6, 3 + row, 6 + column], one)
    # Strengths of single edges are read where they are.
    strength = torch.full((grid_edges(8, 10).shape[1],), 0.4)
    strength[0] = 2.0
    changed, _ = network(hood, ising(grid_edges(8, 10), strength, fields.flatten()))
    differs = (changed.view(8, 10, 2) - alpha).abs().amax(-1) > 1e-9
    assert differs[:2, :2].any()
    assert not differs[3:].any()
    assert not differs[:, 4:].any()
    with pytest.raises(ValueError, match="radius 1 at most"):
        network(Neighborhood.grid(8, 10, 2), ising(grid_edges(8, 10), 0.4, fields.flatten()))
    other = ising(grid_edges(8, 10)[:, 1:], 0.4, fields.flatten())
    with pytest.raises(ValueError, match="grid_edges"):
        network(hood, other)
