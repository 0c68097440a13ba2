# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Calls to a device, and waits for it: today's numbers are the most that there may be."""

import networkx as nx
import pyro
import pytest
import torch
from cost import Launches
from graphs import parameters, to_hood
from pyro.infer import TraceGraph_ELBO
from torch_geometric.nn import GCN

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork
from pyro_nmm.ops.entries import evidence_entries
from pyro_nmm.ops.gibbs import sweep
from pyro_nmm.ops.sampling import draw_entries

SIZE, CLASSES = 2000, 7
#: The most calls and waits. A step, a draw and a sweep wait once more for every fourth sweep of a
#: fixed point. docs/results/speed.md has this table.
MOST = {
    "step": (650, 4),
    "sample": (45, 1),
    "marginals": (6, 0),
    "condition, 64 samples": (280, 10),
    "marginals of the posterior": (48, 3),
    "draw given evidence": (290, 2),
    "sweep given evidence": (350, 2),
}


def counted(query):
    with Launches() as found:
        query()
    return found.calls, found.waits


@pytest.fixture
def mixture(device):
    hood = to_hood(nx.barabasi_albert_graph(SIZE, 3, seed=0))
    alpha, logits = parameters(hood, CLASSES)
    pyro.enable_validation(False)
    there = NeighborMixture(hood.to(device), alpha.to(device), logits.to(device))
    there.marginals()  # keeps the attention
    return there


def check(name, query):
    calls, waits = counted(query)
    print(f"| {name} | {calls} | {waits} |")
    assert calls <= MOST[name][0]
    assert waits <= MOST[name][1]


def test_a_step(device, mixture):
    torch.set_default_dtype(torch.float)
    hood, y = mixture.hood, torch.randint(CLASSES, (SIZE,)).to(device)
    x, edges = torch.randn(SIZE, 20).to(device), torch.stack([hood.source, hood.target])
    backbones = (GCN(20, 16, 2, width, cached=True) for width in (CLASSES, 16))
    network = NMMNetwork(*backbones, num_classes=CLASSES).to(device)
    pair = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)

    def step():
        elbo.loss_and_grads(pair.model, pair.guide, x, edges, y=y)

    step()
    check("step", step)


def test_queries(device, mixture):
    y, observed = mixture.sample(), torch.arange(SIZE).to(device) < SIZE // 10
    check("sample", mixture.sample)
    check("marginals", mixture.marginals)
    check("condition, 64 samples", lambda: mixture.condition(y, observed, num_samples=64))
    posterior = mixture.condition(y, observed, num_samples=64)
    check("marginals of the posterior", posterior.marginals)


def test_latent_labels(device, mixture):
    hood, evidence = mixture.hood, torch.randn(SIZE, CLASSES).to(device)
    log_attention = hood.log_softmax(mixture.logits)[None]
    terms = evidence_entries(log_attention, mixture.alpha[None], evidence[None])
    uniforms = torch.rand(2, 4, SIZE, dtype=torch.double, device=device)
    check("draw given evidence", lambda: draw_entries(hood, terms, uniforms[0]))
    draw = draw_entries(hood, terms, uniforms[0])
    check("sweep given evidence", lambda: sweep(hood, terms, draw, uniforms[1:]))
