# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Latent labels and mini-batches on a device."""

import pyro
import pytest
import torch
from pyro.infer import TraceGraph_ELBO
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import grid

from pyro_nmm import sources
from pyro_nmm.datasets import seed_batch, with_in_degree
from pyro_nmm.guides import HiddenFieldGuide, SeedLoss
from pyro_nmm.metrics import brier, mean_log_prob
from pyro_nmm.models import (
    Annotators,
    CopyingAnnotators,
    NMMNetwork,
    NormalEmission,
    accuracy,
    fit_field,
    information,
    leave_one_out,
)
from pyro_nmm.models.annotators import out_of_fold

EDGES, PLACES = grid(8, 8)
QUICK = {"num_starts": 1, "num_steps": 6, "num_draws": 3}


def crowd():
    truth = (PLACES[:, 0] >= 4).long()
    answers = truth[:, None] ^ (torch.rand(64, 4) < 0.25).long()
    answers[torch.rand(64, 4) < 0.2] = -1
    return truth, answers


@pytest.mark.parametrize("features", [False, True])
def test_consensus(device, features, monkeypatch):
    """Every answer about annotators, from neighbours and from a network."""
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 6)
    truth, answers = crowd()
    x = truth[:, None] + torch.randn(64, 3)
    graph = Data(x, EDGES).to(device) if features else EDGES.to(device)
    known, seen = truth.where(PLACES[:, 1] < 2, -1).to(device), PLACES[:, 1] < 2
    consensus = Annotators(2).fit(graph, answers.to(device), known=known, **QUICK)
    assert consensus.probs.device.type == device
    assert torch.equal(consensus.predict().cpu()[seen], truth[seen])
    found = consensus.information_gain(), consensus.pairs().excess, accuracy(consensus).mean
    assert all(each.isfinite().all() for each in (*found, consensus.entropy()))
    assert consensus.summary()


@pytest.mark.parametrize("emission", [Annotators(2, num_types=3), CopyingAnnotators(2)])
def test_shared_errors(device, emission):
    hood, hops = sources.hops(EDGES.to(device), 64)
    field = fit_field(emission, hood, crowd()[1].to(device), hops, **QUICK)
    assert field.probs.device.type == field.samples.device.type == device
    assert information(field).mean.isfinite().all()


def test_a_field_of_features(device):
    """A fit, its predictions, its posterior, and the same model as a pair of Pyro programs."""
    x = crowd()[0][:, None] + torch.randn(64, 2)
    hood, hops = (each.to(device) for each in sources.hops(EDGES, 64))
    given = NormalEmission(2), hood, x.to(device)
    field = fit_field(*given, hops, **QUICK)
    assert leave_one_out(field, given[2], num_sweeps=3).isfinite().all()
    assert field.latents(given[2]).posterior(4).marginals().device.type == device
    pair = HiddenFieldGuide(*given, hops)
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    assert torch.tensor(elbo.loss_and_grads(pair.model, pair.guide)).isfinite()
    parameters = dict(pyro.get_param_store().named_parameters()).values()
    assert all(each.grad.isfinite().all() for each in parameters)
    assert pair.field(num_draws=2, num_sweeps=2).probs.device.type == device


def test_mini_batches(device):
    data = with_in_degree(Data(torch.randn(64, 3), EDGES, y=crowd()[0]).to(device))
    backbones = GraphSAGE(3, 4, 2, out_channels=2), GraphSAGE(3, 4, 2)
    loss = SeedLoss(NMMNetwork(*backbones, num_classes=2)).to(device)
    seeds = torch.tensor([3, 9, 40], device=device)
    loss(seed_batch(data, seeds, num_hops=3, num_neighbors=2)).backward()
    assert all(each.grad.isfinite().all() for each in loss.parameters() if each.grad is not None)


def test_scores(device):
    probs, y = torch.rand(64, 3).softmax(-1), torch.randint(3, (64,))
    for score in (mean_log_prob, brier):
        torch.testing.assert_close(score(probs.to(device), y.to(device)).cpu(), score(probs, y))
