# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The rivals of the benchmark of random fields, against sums over all labellings."""

import itertools
from importlib import import_module

import pytest
import torch

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import mean_field
from pyro_nmm.models import MarginalField, grid_edges, ising, potts


@pytest.fixture(scope="module")
def rivals():
    return import_module("benchmarks.random_fields.rivals")


@pytest.fixture(scope="module")
def ordered():
    return import_module("benchmarks.random_fields.ordered")


def spins(shape, coupling, seed=0):
    noise = torch.randn(shape[0] * shape[1], generator=torch.Generator().manual_seed(seed))
    return ising(grid_edges(*shape), coupling, 0.5 * noise.to(torch.get_default_dtype()))


def colours(shape, coupling, classes=3):
    generator = torch.Generator().manual_seed(1)
    unary = torch.randn(shape[0] * shape[1], classes, generator=generator)
    return potts(grid_edges(*shape), coupling, 0.5 * unary.to(torch.get_default_dtype()))


def every(field):
    """All labellings ``(C^N, N)``."""
    return torch.tensor(list(itertools.product(range(field.num_classes), repeat=field.num_nodes)))


def log_z(field):
    return field.log_potential(every(field)).double().logsumexp(0).item()


CASES = {"ising": (spins, (3, 3), 0.6), "potts": (colours, (2, 4), 0.9)}


@pytest.fixture(params=CASES)
def case(request):
    make, shape, coupling = CASES[request.param]
    return make(shape, coupling), shape


@pytest.mark.parametrize("down", [False, True])
def test_chains_of_a_mean_field(rivals, case, down):
    """Its loss is that of the product of its rows, by enumeration; no worse than single pixels'."""
    field, shape = case
    torch.manual_seed(0)
    found = rivals.chain_mean_field(field, shape, down=down)
    assert found.losses.equal(found.losses.sort().values)
    single = mean_field(field).losses[0].item()
    assert -log_z(field) < found.losses[0].item() < single
    # At the optimum every row is the chain in the others' mean fields: all of q, written out.
    unary, across, below = rivals.grid_tables(field, *shape)
    q, y = found.marginals.view(*shape, -1), every(field).view(-1, *shape)
    phi = field.interaction.double()
    if down:
        unary, across, below, q = unary.transpose(0, 1), below.T, across.T, q.transpose(0, 1)
        y = y.transpose(1, 2)
    log_q = torch.zeros(len(y)).double()
    for row in range(len(unary)):
        local = unary[row].clone()
        for near, strength in ((row - 1, below[row - 1] if row else None), (row + 1, None)):
            if 0 <= near < len(unary):
                strength = below[row] if strength is None else strength
                local += strength.unsqueeze(-1) * (q[near] @ phi)
        labels = y[:, row]
        score = local[torch.arange(len(local)), labels].sum(-1)
        score += (across[row] * phi[labels[:, :-1], labels[:, 1:]]).sum(-1)
        states = labels.unique(dim=0, return_inverse=True)[1]
        one_each = torch.stack([score[states == s][0] for s in range(int(states.max()) + 1)])
        log_q += score - one_each.logsumexp(0)
    y = every(field)
    expected = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item()
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-6)
    assert found.losses[0].item() == pytest.approx(expected, abs=1e-5)


def test_a_single_chain_is_exact(rivals):
    for shape, down in (((1, 7), False), ((7, 1), True)):
        field = spins(shape, 0.8)
        found = rivals.chain_mean_field(field, shape, down=down, num_random=1)
        assert found.losses[0].item() == pytest.approx(-log_z(field), abs=1e-5)
        expected = field.marginals().double()
        torch.testing.assert_close(found.marginals, expected, rtol=0, atol=1e-5)


def test_another_grid_is_refused(rivals):
    with pytest.raises(ValueError, match="edges of a grid of 2 x 4"):
        rivals.chain_mean_field(spins((4, 2), 0.1), (2, 4))


def test_messages_on_a_tree(rivals):
    """Bethe and tree-reweighted log Z are exact there, and so are the marginals."""
    edges = torch.tensor([[0, 1, 1, 3, 3], [1, 2, 3, 4, 5]])
    unary = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    field = potts(edges, 0.9, unary.to(torch.get_default_dtype()))
    torch.testing.assert_close(rivals.resistances(edges, 6), torch.ones(5).double())
    for found in (rivals.bethe(field), rivals.tree_reweighted(field, 2)):
        assert found.log_z == pytest.approx(log_z(field), abs=1e-5)
        expected = field.marginals().double()
        torch.testing.assert_close(found.marginals, expected, rtol=0, atol=1e-5)


def test_messages_on_grids(rivals, case):
    """An upper bound, which other appearances of the edges lower; Bethe's estimate is closer."""
    field, shape = case
    exact, edges = log_z(field), grid_edges(*shape)
    rho = rivals.resistances(edges, field.num_nodes)
    assert rho.sum().item() == pytest.approx(field.num_nodes - 1)
    uniform, updated = (rivals.tree_reweighted(field, steps) for steps in (0, 20))
    assert exact < updated.log_z < uniform.log_z
    assert max(uniform.change, updated.change) < 1e-6
    assert abs(rivals.bethe(field).log_z - exact) < updated.log_z - exact


def test_spanning_trees(rivals):
    """The heaviest of the four spanning trees of a square; Kirchhoff's count of 15 in 2 x 3."""
    tree = rivals.spanning_tree(grid_edges(2, 2), torch.tensor([0.1, 0.4, 0.3, 0.2]).double(), 4)
    assert tree.tolist() == [0, 1, 1, 1]
    trees = [
        subset
        for subset in itertools.combinations(range(7), 5)
        if rivals.spanning_tree(grid_edges(2, 3)[:, list(subset)], torch.ones(5).double(), 6).sum()
        == 5
    ]
    assert len(trees) == 15
    share = torch.zeros(7).double()
    for subset in trees:
        share[list(subset)] += 1 / len(trees)
    torch.testing.assert_close(rivals.resistances(grid_edges(2, 3), 6), share)


def test_autoregressive_network(ordered, case):
    """Its density sums to one, is that of its draws, and its gradient is the enumerated one."""
    field, _ = case
    torch.manual_seed(0)
    network = ordered.Autoregressive(field.unary, 3, hidden=4)
    torch.nn.init.normal_(network.outer)
    torch.nn.init.normal_(network.straight, std=0.3)
    y = every(field)
    log_q = network.log_prob(y)
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-4)
    draws = network.sample(40_000)
    code = field.num_classes ** torch.arange(field.num_nodes).flip(0)
    found = (draws @ code).bincount(minlength=len(y)) / len(draws)
    error = (log_q.exp() / len(draws)).sqrt() + 1e-4
    assert ((found - log_q.exp()).abs() / error).max() < 6
    exact = (log_q.exp() * (log_q - field.log_potential(y))).sum()
    expected = torch.autograd.grad(exact, network.bias)[0]
    each = [
        torch.autograd.grad(ordered.surrogate(network, field, part), network.bias)[0]
        for part in draws.split(400)
    ]
    gradients = torch.stack(each)
    error = gradients.std(0) / len(each) ** 0.5
    assert ((gradients.mean(0) - expected).abs() / (error + 1e-6)).max() < 5


def test_autoregressive_network_reaches_the_target(ordered):
    """The exact small case: 3 x 3 at coupling .4, where the mean field stays further away."""
    field = spins((3, 3), 0.4)
    torch.manual_seed(0)
    network = ordered.fit_autoregressive(field, 4, num_steps=250, lr=0.03)
    y = every(field)
    log_q = network.log_prob(y).detach().double()
    kl = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item() + log_z(field)
    assert 0 <= kl < 0.02 < 0.2 < mean_field(field).losses[0].item() + log_z(field)


def test_windows_that_hold_everything(ordered, case):
    """Then the conditionals are the target's own, in any order."""
    field, shape = case
    order = torch.randperm(field.num_nodes, generator=torch.Generator().manual_seed(2))
    family = ordered.Windowed(field, shape, order, radius=4, neighbors=9)
    y = every(field)
    expected = field.log_potential(y).double() - log_z(field)
    torch.testing.assert_close(family.log_prob(y), expected, rtol=0, atol=1e-4)


def test_windows(ordered, case):
    """Less than everything: a density of its own draws, and each conditional its window's."""
    field, shape = case
    torch.manual_seed(0)
    order = torch.arange(field.num_nodes)
    family = ordered.Windowed(field, shape, order, radius=1, neighbors=2)
    y = every(field)
    log_q = family.log_prob(y)
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-6)
    exact = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item()
    losses = ordered.drawn_loss(family, field, 4000)
    assert -log_z(field) < exact
    assert abs(losses.mean().item() - exact) < 5 * losses.std().item() / 4000**0.5 + 1e-6
    # The second pixel of the second row: all but the first row's and column's are in its window.
    node = shape[1] + 1
    assert family.given[node] == [1, shape[1]]
    rows, columns = range(min(3, shape[0])), range(3)
    inside = [r * shape[1] + c for r in rows for c in columns]
    both = torch.isin(field.edges, torch.tensor(inside)).all(0)
    number = {n: k for k, n in enumerate(inside)}
    edges = torch.tensor([[number[n] for n in ends] for ends in field.edges[:, both].tolist()])
    make = type(field)(edges, field.unary[inside], field.strength, field.interaction)
    small = every(make)
    kept = small[:, [number[1], number[shape[1]], number[node]]]
    joint = torch.zeros([field.num_classes] * 3).double()
    weight = make.log_potential(small).double().exp()
    joint.index_put_(tuple(kept.T), weight, accumulate=True)
    expected = (joint / joint.sum(-1, keepdim=True)).log().flatten(0, 1)
    torch.testing.assert_close(family.tables[node], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_benchmark_of_rivals(tmp_path):
    """Every method on every field, once; log Z of the tree-reweighted bound is never below."""
    torch.set_default_dtype(torch.float)
    benchmark = import_module("benchmarks.random_fields.compared")
    path = tmp_path / "rows.jsonl"
    tasks = ["strips", "potts_strips", "plain", "letter", "--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    number = [len(benchmark.methods(labels)) for labels in (2, 4, 8)]
    assert len(rows) == len(path.read_text().splitlines()) == 3 * sum(number) + 10
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows:
        if row["method"] == "tree-reweighted":
            assert row["log Z error"] > -1e-3
        if "KL" in row:
            assert row["KL"] > -5 * row.get("error", 0.0) - 1e-3


def test_bound_of_half_of_the_pixels():
    """
    From above on the divergence, which is enumerated; draws of q(c | y) in the place of the
    model's would bound it from below, by ten standard errors here.
    """
    target = MarginalField(spins((3, 4), 0.5))
    size = target.num_nodes
    torch.manual_seed(0)
    hood = Neighborhood(torch.ones(size, size).nonzero().T, size)
    mix = NeighborMixture(hood, 0.02 * torch.rand(size, 2) + 0.01, torch.zeros(size**2))
    labels = torch.tensor(list(itertools.product(range(2), repeat=size)))
    log_q = mix.log_prob(labels)
    divergence = (log_q.exp() * (log_q - target.log_potential(labels))).sum().item()
    halves = import_module("benchmarks.random_fields.half")
    found, error = halves.drawn_bound(mix, target, torch.arange(size), 2**15)
    assert divergence - 4 * error < found < divergence + 0.1


def test_the_closest_has_the_lowest_mean_on_the_fields_of_all():
    tables = import_module("benchmarks.random_fields.compared_tables")
    kl = {"near": (1.0, 4.0), "far": (2.0, 5.0), "once": (0.5,)}
    rows = [
        {"task": "strips", "labels": 2, "coupling": 0.4, "seed": seed, "method": name, "KL": value}
        for name, values in kl.items()
        for seed, value in enumerate(values)
    ]
    assert list(tables.closest(rows)) == [("near", 2, "0.9", 2.5)]
    assert list(tables.closest([row | {"task": "plain"} for row in rows])) == []


def test_large_fields_are_won_against_all():
    tables = import_module("benchmarks.random_fields.compared_tables")
    fields = [
        {"task": "letter", "seed": seed, "log Z": -5.0, "NMM": 8.0, "NMM-CNN": 9.0,
         "mean field": field, "seconds": {}}
        for seed, field in ((0, 7.5), (1, 6.5))
    ]  # fmt: skip
    half = [("NMM of half, 500 steps", 2.0), ("chains", 2.3), ("windows 3 x 3, 8 given", 40.0)]
    rows = [
        {"task": "letter", "seed": seed, "labels": 2, "method": name, "KL": kl}
        for seed in (0, 1)
        for name, kl in half
    ]
    files = {"fields": fields, "fields_compared": rows}
    # The mean field's divergence is 2.5 on the first letter, and 1.5 on the second.
    assert tables.large_won(files) == (1, 2)
    rows[1]["KL"] = 1.9
    assert tables.large_won(files) == (0, 2)
