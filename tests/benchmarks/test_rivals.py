# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rivals that are written here, against their equations, enumeration and planted answers."""

import itertools
import math
from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from graphs import house, to_hood
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import CorrectAndSmooth
from torch_geometric.utils import index_to_mask, to_dense_adj

import benchmarks.links.run as links
from benchmarks.latent import hidden
from benchmarks.latent.annotators import AnnotatedPotts, around
from benchmarks.links.data import link_split
from benchmarks.links.run import Problem
from benchmarks.nodes import spn
from benchmarks.on_top import rivals, stages
from benchmarks.shared.graphs import correct_and_smooth
from pyro_nmm import NeighborMixture
from pyro_nmm.models import Annotators, grid_edges, temperature_scaling
from pyro_nmm.sparse import identity


def test_gats_follows_its_equations():
    hood, logits = house(), torch.randn(5, 3)
    known = torch.tensor([1, 0, 0, 0, 0]).bool()
    data = Data(hood=hood, logits=logits, train_mask=known, graph="cora", backbone="gcn")
    layer = rivals.GATS(data, heads=2)
    layer.coefficient.data.fill_(0.4)
    layer.of_near.data.copy_(torch.tensor([1.3, 0.8]))
    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(5)]
    near = [1.3 if i == 0 else 0.8 if 0 in rows[i] else 1.0 for i in range(5)]
    sure = logits.softmax(-1).amax(-1)
    for i in range(5):
        weights, temperatures, gap = [], [], 0.0
        for j in rows[i]:
            x = logits[j]
            ranked = ((x - x.min()) / (x.max() - x.min())).sort().values
            temperatures.append(layer.ranks.weight @ ranked * near[j])
            weights.append(F.leaky_relu(logits[i] @ logits[j] / near[i] / near[j], 0.2))
            gap = gap + sure[i] - sure[j]
        mean = torch.stack(weights).softmax(0) @ torch.stack(temperatures)
        scale = F.softplus(mean + 0.4 * gap / len(rows[i])).mean() + 1
        torch.testing.assert_close(layer(logits)[i], logits[i] / scale)


def test_calibrations_of_few_parameters():
    logits, held = 2 * torch.randn(200, 3), torch.rand(200) < 0.8
    y = torch.distributions.Categorical(logits=logits / 3 + torch.tensor([1.0, 0, 0])).sample()
    data = Data(y=y, logits=logits, val_mask=held, hood=to_hood(nx.cycle_graph(200)))
    expected = (logits / temperature_scaling(logits, y, held)).softmax(-1)
    torch.testing.assert_close(rivals.temperature(data), expected, rtol=0, atol=1e-3)
    fits = rivals.vector, rivals.shrunk_vector, rivals.temperature, rivals.three_numbers
    losses = [F.nll_loss(fit(data)[held].log(), y[held]) for fit in fits]
    assert losses[0] <= losses[1] <= losses[2]  # the fewer the limits, the better the fit
    assert losses[3] < losses[2] + 1e-4


def test_joint_likelihood_of_a_mixture():
    """One member has the product of its marginals; of two, the mean of their likelihoods."""
    logits, held = 2 * torch.randn(60, 3), torch.rand(60) < 0.5
    y = torch.distributions.Categorical(logits=logits / 3).sample()
    data = Data(y=y, logits=logits, val_mask=held, test_mask=~held)
    alone = stages.product(rivals.temperature(data), data)["joint"]
    assert stages.mixture(logits.expand(3, -1, -1), data)["joint"] == pytest.approx(alone, abs=1e-3)
    sure = F.one_hot(y, 3) * 1e3
    two = stages.mixture(torch.stack([sure, sure.roll(1, 1)]).float(), data)["joint"]
    assert two == pytest.approx(-math.log(2) / int((~held).sum()))


def test_correct_and_smooth_on_a_matrix():
    """Is that of PyG on an edge index, which need not have both directions."""
    edges, known = torch.randint(60, (2, 300)).unique(dim=1), torch.rand(60) < 0.3
    probs, y = torch.randn(60, 4).softmax(-1), torch.randint(4, (60,))
    smoother = CorrectAndSmooth(20, 0.8, 20, 0.7)
    seen = y[known], known, edges
    by_index = smoother.smooth(smoother.correct(probs, *seen).clamp(min=0), *seen)
    torch.testing.assert_close(correct_and_smooth(smoother, probs, y, known, edges), by_index)


@pytest.mark.parametrize("kind", ["gcn", "gat", "mlp"])
def test_masked_labels_read_known_labels(kind):
    """Without features, and with a label for each clique."""
    y, order = torch.arange(12).repeat_interleave(10) % 3, torch.randperm(120)
    train, held = (index_to_mask(order[part], 120) for part in (slice(36), slice(36, 60)))
    hood = to_hood(nx.connected_caveman_graph(12, 10))
    edges = torch.stack([hood.source, hood.target])
    data = Data(x=torch.zeros(120, 4), edge_index=edges, y=y, train_mask=train, val_mask=held)
    data.logits, data.backbone, rest = torch.zeros(120, 3), kind, ~(train | held)
    make = rivals.masked_labels(data, num_epochs=100)
    right = (make(train | held).argmax(-1) == y)[rest].double().mean()
    none = (make(torch.zeros_like(train)).argmax(-1) == y)[rest].double().mean()
    assert right > max(0.8, none + 0.2)


NUM_NODES, NUM_CLASSES = 7, 3
LABELLINGS = torch.tensor(list(itertools.product(range(NUM_CLASSES), repeat=NUM_NODES)))


@pytest.fixture
def field(double):
    """Of a tree and a node without edges."""
    edges = torch.tensor(list(nx.random_labeled_tree(NUM_NODES - 1, seed=2).edges)).T
    nodes = torch.randn(NUM_NODES, NUM_CLASSES)
    pairs = torch.randn(NUM_NODES - 2, NUM_CLASSES, NUM_CLASSES)
    return spn.field_of(edges.sort(0).values, nodes, pairs, 2.0, 1.0)


def energies(field):
    """Equation 2 of SPN, without its normaliser, of all labellings."""
    total = field.nodes.gather(1, LABELLINGS.T).sum(0)
    for (i, j), table in zip(field.edges.T.tolist(), field.pairs, strict=True):
        total = total + table[LABELLINGS[:, i], LABELLINGS[:, j]]
    return total


def test_beliefs_are_exact_on_trees(field):
    weight, every = energies(field).softmax(0), F.one_hot(LABELLINGS, NUM_CLASSES).double()
    state = spn.Messages(field, steps=80)
    exact = torch.einsum("s,snk->nk", weight, every)
    torch.testing.assert_close(state.marginals(), exact, rtol=0, atol=1e-6)
    i, j = field.edges
    exact = torch.einsum("s,spk,spl->pkl", weight, every[:, i], every[:, j])
    torch.testing.assert_close(state.tables(), exact, rtol=0, atol=1e-6)
    likely = spn.Messages(field, maximum=True, steps=80).logits().argmax(-1)
    assert torch.equal(likely, LABELLINGS[energies(field).argmax()])


def test_chain_and_refinement_are_exact_on_trees(field):
    """The chain rule gives log p; the maximin game has the gradient of the log-likelihood."""
    y, known = torch.tensor([0, 2, 1, 0, 1, 2, 0]), torch.tensor([0, 0, 1, 0, 0, 1, 0]).bool()
    log_weight, order = energies(field).log_softmax(0), torch.tensor([6, 0, 4, 3])
    seen = known.clone()
    seen[order] = True  # but node 1
    above, below = (log_weight[(LABELLINGS[:, mask] == y[mask]).all(1)].logsumexp(0)
                    for mask in (seen, known))  # fmt: skip
    found = spn.chained(field.clamped(y, known), y, order, rings=NUM_NODES)
    assert found == pytest.approx((above - below).item(), abs=1e-6)
    parts = [part.clone().requires_grad_() for part in field[1:]]
    free = spn.Field(field.edges, *parts)
    observed = energies(free).log_softmax(0)[(y == LABELLINGS).all(1)]
    exact = torch.autograd.grad(-observed.sum() / NUM_NODES, parts)
    found = torch.autograd.grad(spn.likelihood_loss(free, y), parts)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_coupling_of_annotated_potts_maximises_the_pseudo_likelihood():
    edges, labels = grid_edges(8, 8), F.one_hot(torch.randint(2, (64,)), 2).float()
    both = torch.cat([edges, edges.flip(0)], 1)
    field = AnnotatedPotts(Annotators(2), torch.zeros(64, 1).long(), both)
    weights = torch.zeros(3)
    for _ in range(20):
        weights = field.raise_pseudo_likelihood(weights, labels)
    near = around(field.matrix, labels)

    def value(coupling):
        logits = coupling * near + weights[1:]
        return (labels * logits.log_softmax(-1)).sum(-1).mean() - 1e-4 * coupling**2

    best = max(torch.linspace(-1, 1, 401).tolist(), key=value)
    assert weights[0].item() == pytest.approx(best, abs=0.01)


def test_annealed_evidence_of_hidden_labels():
    """Against the exact sum, of a few pixels."""
    field = hidden.HiddenField(torch.tensor([-1.2, -0.4, 0.1, 1.3]), 2, 1)
    with torch.no_grad():
        alpha, logits, evidence = field.parts()
        labels = torch.cartesian_prod(*[torch.arange(3)] * 4)
        log_prob = NeighborMixture(field.hood, alpha, logits).log_prob(labels)
        truth = (log_prob + evidence[torch.arange(4), labels].sum(1)).logsumexp(0)
    value, error, _ = hidden.annealed_log_evidence(field, 20, 300)
    assert error < 0.08
    assert abs(value - truth.item()) < 4 * error


def test_katz_counts_walks():
    """Against powers of the adjacency matrix."""
    edge_index = KarateClub()[0].edge_index
    graph = to_dense_adj(edge_index)[0].double()
    powers = torch.stack([graph.matrix_power(n) for n in range(1, 5)])
    pairs = torch.cartesian_prod(torch.arange(34), torch.arange(34)).T
    counts = links.walks(edge_index, 34, pairs, longest=4)
    assert torch.equal(counts, powers.flatten(1))
    whole = torch.linalg.inv(torch.eye(34).double() - 0.001 * graph) - torch.eye(34)
    index = links.katz_index(counts, 0.001)
    torch.testing.assert_close(index, whole.flatten(), rtol=1e-4, atol=1e-9)


def planted():
    """Four groups of 20, whose nodes are linked only with one another."""
    group, (low, high) = torch.arange(80) // 20, torch.triu_indices(80, 80, 1)
    kept = (group[low] == group[high]) & (torch.rand(len(low)) < 0.4)
    edge_index = torch.stack([low[kept], high[kept]])
    return Problem(Data(x=identity(80), num_nodes=80), link_split(edge_index, 80, seed=0))


@pytest.mark.parametrize("rival", links.RIVALS)
def test_planted_links_are_found(rival):
    """Links have no direction. Kept is the best step on validation links."""
    problem, settings = planted(), {"hidden": 16, "dropout": 0.1}
    args, parts = SimpleNamespace(num_steps=100), ["val", "test"]
    row = links.measure_rival(args, problem, rival, settings, 1, parts)
    # Of the false pairs one in four is within a group, where a link cannot be told from none.
    assert row["test"]["AUC"] > 80
    assert row["val"]["AP"] > 80
    last = links.measure_rival(args, problem, rival, settings, 1, ["val"], every=100)
    assert (row["step"] % 10, last["step"]) == (0, 100)
    assert last["val"]["AP"] <= row["val"]["AP"]
    network, split = links.RIVALS[rival](80, hidden=16).eval(), problem.split
    pairs = split.test, split.test.flip(0)
    forth, back = (network.logits(ends, problem.data.x, split.train) for ends in pairs)
    torch.testing.assert_close(forth, back)


def test_vgae_has_its_authors_loss():
    """In expectation over the pairs that are drawn, against all pairs of a small graph."""
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5], [1, 0, 2, 1, 3, 2, 5, 4]])
    network, x = links.LinksVGAE(6, hidden=8, width=3).eval(), identity(6)
    with torch.no_grad():
        drawn = torch.stack([network.loss(x, edge_index) for _ in range(600)])
        z, graph = network.encode(x, edge_index), to_dense_adj(edge_index)[0]
        free = 36 - graph.sum()
        cost = F.binary_cross_entropy_with_logits(
            z @ z.T, graph + torch.eye(6), pos_weight=free / graph.sum()
        )
        mean, log_scale = network.encoder(x, edge_index)
        normal = torch.distributions.Normal(mean, log_scale.exp())
        unit = torch.distributions.Normal(0.0, 1.0)
        divergence = torch.distributions.kl_divergence(normal, unit).sum() / 36
    exact = cost * 36 / (2 * free) + divergence
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / len(drawn) ** 0.5
