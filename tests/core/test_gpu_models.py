# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Models and fits on a device, against the CPU."""

import copy
import math

import networkx as nx
import pytest
import torch
from graphs import to_hood

from pyro_nmm import (
    InnerProductGraph,
    MembershipMixture,
    Neighborhood,
    NeighborMixture,
)
from pyro_nmm.datasets.images import random_patches
from pyro_nmm.datasets.links import link_split
from pyro_nmm.datasets.nodes import digits, random_split
from pyro_nmm.guides import (
    Consistency,
    DGLFRMGuide,
    fit_images,
    fit_links,
    fit_mixture,
    fit_nmm,
)
from pyro_nmm.models import (
    DGLFRM,
    Denoiser,
    FreeNMM,
    MarginalField,
    NMMNetwork,
    PairwiseMRF,
    StackedNMM,
    UNet,
    grid_edges,
    ising,
)
from pyro_nmm.models.backbones import gcn


def test_fields_with_nodes_summed_out(device):
    """Values as on the CPU, and a fit on the device."""
    field, found = ising(grid_edges(3, 4), 0.4, torch.linspace(-0.3, 0.4, 12)), []
    value = torch.tensor([0, 1, 1, 0, 1, 1])
    for place in ("cpu", device):
        there = (t.to(place) for t in (field.edges, field.unary, field.strength))
        half = MarginalField(PairwiseMRF(*there, field.interaction.to(place)))
        y = value.to(place)
        found.append([half.nodes, half.log_potential(y), half.conditional(y), *half.colors()])
        assert half.complete(y).device.type == place
        hood = Neighborhood.grid(3, 4, radius=2, device=place).subgraph(half.nodes)
        mix, losses = fit_mixture(half, hood, FreeNMM(hood, 2), num_steps=3)
        assert mix.logits.device.type == place
        assert torch.tensor(losses).isfinite().all()
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here)


def test_stacked_and_monte_carlo(device):
    """On top of a classifier: the same fit, within its noise, and estimates on the device."""
    torch.manual_seed(0)
    hood = to_hood(nx.caveman_graph(60, 4))
    truth = torch.randn(240, 3).softmax(-1)
    y = NeighborMixture(hood, 0.5 * truth, torch.zeros(hood.num_edges)).sample()
    train, held_out = torch.rand(2, 240) < 0.4
    held_out &= ~train
    for stacked in (StackedNMM(3), StackedNMM(pool=False)):
        fits = []
        for place in ("cpu", device):
            arguments = (t.to(place) for t in (4 * truth.log(), y, train, held_out))
            # Operations on the simulated device cost a hundred times as much.
            steps = {} if device == "cuda" else {"num_steps": 12}
            torch.manual_seed(0)
            fits.append(copy.deepcopy(stacked).fit(hood.to(place), *arguments, **steps))
        for here, there in zip(*(f.parameters() for f in fits), strict=True):
            assert (here - there.cpu()).abs().max() < 0.3
    mix = fits[1].mixture(hood.to(device), 4 * truth.log().to(device))
    estimate = mix.log_likelihood(y.to(device), given=train.to(device), num_particles=256)
    cpu = NeighborMixture(hood, mix.alpha.cpu(), mix.logits.cpu())
    other = cpu.log_likelihood(y, given=train, num_particles=256)
    assert abs(estimate.item() - other.item()) < 0.5


def test_node_classification_trains(device, tmp_path):
    data = random_split(digits(), 0.1, 0.1, 0.5, seed=0).to(device)
    data.x = data.x.double().to_sparse_csr()
    hood = Neighborhood(data.edge_index, data.num_nodes)
    network = NMMNetwork(gcn(64, 10), gcn(64, 64, attention=True), num_classes=10, floor=0.1)
    consistency = Consistency(data.num_nodes, 10).to(device)
    epochs, least = (60, 0.9) if device == "cuda" else (12, 0.6)
    options = {"lr": 0.03, "num_epochs": epochs, "checkpoint": tmp_path / "nmm.pt"}
    mix, _ = fit_nmm(network.to(device), data, hood, consistency=consistency, **options)
    hit = mix.condition(data.y, data.train_mask, 32).predict() == data.y
    assert hit[data.test_mask].double().mean() > least


def test_links_and_memberships(device):
    graph = nx.barabasi_albert_graph(200, 3, seed=0)
    hood, edge_index = to_hood(graph), torch.tensor(list(nx.DiGraph(graph).edges)).T
    factors, s = torch.randn(200, 4), torch.randn(200, 5)
    log_odds, logits = torch.randn(200, 5), torch.randn(hood.num_edges)
    results = []
    for place in ("cpu", device):
        move = [t.detach().to(place).requires_grad_() for t in (factors, log_odds, logits)]
        links = InnerProductGraph(move[0], 3.0, edge_index[:, :2].to(place), loops=True)
        mixture = MembershipMixture(hood.to(place), *move[1:])
        edges = edge_index.to(place)
        value = links.log_prob(edges) + mixture.log_prob(s.to(place))
        swaps = links.swaps(edges, 2 * move[0].detach())
        results.append([value, swaps, *torch.autograd.grad(value, move)])
        assert mixture.rsample().device.type == links.sample().device.type == place
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("guide", ["original", "nmm"])
def test_dglfrm(device, guide):
    edge_index = torch.tensor(list(nx.barabasi_albert_graph(60, 3, seed=0).edges)).T
    split = link_split(edge_index, 60, seed=0).to(device)
    x = torch.eye(60).to(device)
    hood = None if guide == "original" else Neighborhood(split.train, 60)
    pair = DGLFRMGuide(DGLFRM(60, 8, 60), 60, hood, name=guide).to(device)
    losses = fit_links(pair, split, x, num_steps=30 if device == "cuda" else 10)
    assert losses[-1] < losses[0]
    assert pair.link_logits(split.test, split.train, x).device.type == device


def test_denoiser(device):
    image = torch.arange(144).view(1, 12, 12)
    network = Denoiser(UNet(channels=1, width=6, depth=1)).to(device)
    losses = fit_images(network, lambda: random_patches([image.to(device)], 2, 8), num_steps=3)
    assert all(map(math.isfinite, losses))
    found = {}
    for place in (device, "cpu"):
        hood, noisy = Neighborhood.grid(12, 12, device=place), 1.0 * image[None].to(place)
        alpha, logits = network.to(place)(hood, noisy)
        mix = NeighborMixture(hood, alpha, logits)
        own = mix.node_log_probs(image.flatten(1)[None].to(place))
        found[place] = [t.cpu() for t in (*mix.intervals(), own)]
        assert mix.sample().device.type == place
    for there, here in zip(*found.values(), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-2)
