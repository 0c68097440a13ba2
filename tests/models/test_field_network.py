# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A hidden field whose prior is a network of node features."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import MLP
from torch_geometric.utils import add_self_loops, grid

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import (
    Annotators,
    FreeNMM,
    NMMNetwork,
    NormalEmission,
    fit_field,
    hidden_field,
)
from pyro_nmm.models.hidden.em import FieldChains
from pyro_nmm.ops.enumeration import enumerate_labels
from pyro_nmm.ops.gibbs import sweeps

EDGES, _ = grid(12, 12)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


class Linear(nn.Module):
    """Concentrations of two labels and one weight of the attention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, hood, x):
        return self.layer(x).exp(), self.weight * x[hood.source, 0]


@pytest.mark.parametrize("known", [None, torch.tensor([0, 1, -1, 1])])
def test_gradient_is_that_of_the_evidence(known):
    """Fisher's identity: the mean gradient over labels drawn by sweeps is the enumerated one. With
    known labels alone it is the gradient of log p(y), whose bound fit_nmm maximises."""
    edges = add_self_loops(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]))[0]
    hood, x = Neighborhood(edges, 4), torch.randn(4, 2)
    network, answers = Linear(), torch.tensor([[0, 1], [0, 0], [1, 1], [1, -1]])
    emission = Annotators(2)
    values = {"confusion": torch.tensor([[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.1, 0.9]]])}
    if known is not None:
        answers[2] = -1  # nothing is known of one node
    chains = FieldChains(emission, hood, answers, known, (x,), num_chains=400)
    evidence = chains.evidence(values)

    labels = enumerate_labels(4, 2)
    log_prior = NeighborMixture(hood, *network(hood, x)).log_prob(labels)
    log_data = evidence[torch.arange(4), labels].sum(1)
    exact = torch.autograd.grad((log_prior + log_data).logsumexp(0), list(network.parameters()))

    terms, found = chains.terms(network, values), []
    draw = chains.first(terms)
    for step in range(60):
        draw = sweeps(hood, terms, draw, 3).draw
        if step >= 10:
            loss = -4 * chains.loss(network, draw)
            found.append(torch.autograd.grad(loss, list(network.parameters())))
    for place, expected in enumerate(exact):
        draws = torch.stack([each[place] for each in found])
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - expected).abs() < 4 * error + 1e-3).all()


def test_a_network_finds_labels_from_features():
    """Annotators who are right in half of the cases, and features that separate the labels."""
    truth = torch.randint(3, (144,))
    x = torch.randn(144, 3) + 2 * nn.functional.one_hot(truth, 3)
    wrong = (truth[:, None] + torch.randint(1, 3, (144, 3))) % 3
    answers = torch.where(torch.rand(144, 3) < 0.5, truth[:, None], wrong)
    hood = Neighborhood(EDGES, 144)

    class Backbone(MLP):
        def forward(self, x, edge_index):
            return super().forward(x)

    network = NMMNetwork(Backbone([3, 3], norm=None), Backbone([3, 4], norm=None), num_classes=3)
    before = [each.clone() for each in network.parameters()]
    options = {"num_starts": 1, "num_draws": 10}
    plain = fit_field(Annotators(3), hood, answers, **options)
    field = fit_field(
        Annotators(3), hood, answers, prior=network, inputs=(x, EDGES), lr=0.05, **options
    )
    right = [(each.predict() == truth).float().mean() for each in (plain, field)]
    assert right[1] > right[0] + 0.1
    pairs = zip(network.parameters(), before, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)  # a copy was trained
    alpha = field.mixture().alpha
    assert (alpha.argmax(1) == truth).float().mean() > 0.6
    marginals = field.latents(answers).posterior(8, num_sweeps=10).marginals()
    assert (marginals.argmax(1) == field.predict()).float().mean() > 0.8


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prior": FreeNMM(Neighborhood(EDGES, 144), 2)}, r"alpha of prior must have shape"),
        ({"prior": Linear(), "edge_attr": torch.ones(1)}, "give edge_attr or prior, not both"),
        ({"inputs": (torch.ones(2),)}, "inputs belong to prior"),
    ],
)
def test_errors(options, error):
    hood, answers = Neighborhood(EDGES, 144), torch.randint(3, (144, 2))
    with pytest.raises(ValueError, match=error):
        fit_field(Annotators(3), hood, answers, num_starts=1, num_steps=2, **options)


class Network(nn.Module):
    def __init__(self, relabel=None):
        super().__init__()
        self.alpha, self.relabel = nn.Parameter(torch.ones(144, 2)), relabel

    def forward(self, hood):
        return self.alpha.exp(), torch.zeros(hood.num_edges), self.relabel


def test_edges_of_a_field_do_not_relabel():
    hood, x = Neighborhood.grid(12, 12), torch.randn(144, 1)
    bad, emission = Network(torch.arange(2).expand(hood.num_edges, 2)), NormalEmission(2)
    values = {"mean": torch.tensor([[0.0], [1.0]]), "variance": torch.ones(2, 1)}
    for run in (
        lambda: fit_field(emission, hood, x, prior=bad, num_steps=2, num_draws=2),
        lambda: hidden_field(hood, bad, emission, values, x),
    ):
        with pytest.raises(ValueError, match="prior must return alpha and logits alone"):
            run()


def test_a_network_on_a_graph_of_edges():
    """Its own inputs, beside the sources that the graph gives."""
    answers = torch.randint(2, (144, 3))

    class Alone(Network):
        def forward(self, hood):
            alpha = torch.ones(hood.num_sources, 2) * self.alpha[:1].exp()
            return alpha, torch.zeros(hood.num_edges)

    found = Annotators(2).fit(EDGES, answers, prior=Alone(), num_steps=2, num_draws=2)
    assert found.probs.shape == (144, 2)
