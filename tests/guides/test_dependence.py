# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Predictive checks of dependence: statistics by hand, p-values, and what they find."""

import networkx as nx
import pyro.distributions as dist
import pytest
import torch
from cases import random_case
from scipy.stats import kstest

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import check_dependence

GRID = Neighborhood.grid(4, 5)
LABELS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 0, 2], [2, 1, 0, 0, 2], [2, 2, 0, 1, 1]])


@pytest.mark.parametrize("observed", [None, torch.arange(20) % 7 != 3])
def test_statistics(observed):
    """Against networkx on the graph of observed nodes."""
    draws = torch.randint(3, (100, 20 if observed is None else int(observed.sum())))
    y = LABELS.flatten() if observed is None else LABELS.flatten().where(observed, -9)
    found = check_dependence(GRID, y, draws, observed).data
    graph = nx.Graph(zip(GRID.source.tolist(), GRID.target.tolist(), strict=True))
    graph.remove_edges_from([*nx.selfloop_edges(graph)])
    nodes = range(20) if observed is None else observed.nonzero()[:, 0].tolist()
    graph, labels = graph.subgraph(nodes), dict(enumerate(y.tolist()))
    same = [(a, b) for a, b in graph.edges if labels[a] == labels[b]]
    patches = nx.Graph(same)
    patches.add_nodes_from(nodes)
    sizes = [len(patch) for patch in nx.connected_components(patches)]
    joins = [tuple(sorted((labels[a], labels[b]))) for a, b in graph.edges]
    truth = {
        "neighbours that agree": len(same) / len(joins),
        "the largest patch": max(sizes) / len(nodes),
        "patches": len(sizes) / len(nodes),
    }
    shares = [sum(labels[node] == k for node in nodes) / len(nodes) for k in range(3)]
    truth |= {"the commonest label": max(shares)} | {f"label {k}": shares[k] for k in range(3)}
    truth |= {f"edges {a}-{b}": joins.count((a, b)) / len(joins)
              for a in range(3) for b in range(a, 3)}  # fmt: skip
    assert found == pytest.approx(truth, abs=1e-6)


def test_p_values_are_uniform_at_the_truth():
    hood = Neighborhood.grid(6, 6)
    mix = NeighborMixture(hood, torch.full((36, 3), 0.3), torch.zeros(hood.num_edges))
    torch.manual_seed(0)
    draws = mix.sample((100, 100))
    found = [check_dependence(hood, labels[0], labels[1:]).p_value
             for labels in torch.cat([draws[:, :1], draws], 1)]  # fmt: skip
    assert kstest(found, "uniform").pvalue > 1e-3
    assert min(found) >= 1 / 101


@pytest.mark.parametrize("seed", range(20))
def test_finds_independence_and_passes_the_truth(seed):
    """Of 20 data sets of a field, all are none of independent labels, and all are of the field."""
    torch.manual_seed(seed)
    hood = Neighborhood.grid(15, 15)
    fame = 4 * torch.randn(225)  # some nodes are chosen by many
    mix = NeighborMixture(hood, torch.full((225, 2), 0.1), fame[hood.source])
    y = mix.sample()
    independent = dist.Categorical(y.bincount(minlength=2).float()).sample((400, 225))
    wrong, right = (check_dependence(hood, y, draws) for draws in (independent, mix.sample((400,))))
    assert not wrong.fits
    assert wrong.p_values["neighbours that agree"] < 0.01
    assert right.fits
    assert "the model does not make such labels" in str(wrong)
    assert "the model makes such labels" in str(right)


def test_batches_and_pictures():
    plt = pytest.importorskip("matplotlib.pyplot")
    hood, alpha, logits = random_case(0, "random")[:3]
    mix = NeighborMixture(hood, alpha, logits)
    y, draws = mix.sample((3,)), mix.sample((120, 3))
    batch = check_dependence(hood, y, draws)
    each = [check_dependence(hood, y[k], draws[:, k]).data for k in range(3)]
    means = {name: sum(found[name] for found in each) / 3 for name in batch.data}
    assert batch.data == pytest.approx(means, abs=1e-6)
    axes = batch.plot()
    names = [f"{name} in draws" for name in batch.data]
    assert [axis.get_xlabel() for axis in axes] == names[:4]
    plt.close(axes[0].figure)


def test_no_pair_of_observed_neighbours():
    observed = torch.zeros(20, dtype=torch.bool)
    observed[[0, 19]] = True
    found = check_dependence(GRID, LABELS.flatten(), torch.randint(3, (100, 2)), observed)
    assert [*found.data] == ["the commonest label", "label 0", "label 1", "label 2"]


@pytest.mark.parametrize(
    ("draws", "error"),
    [
        (torch.zeros(20).long(), "draws must be at least 100 labellings"),
        (torch.zeros(100, 19).long(), "draws must have shape"),
        (torch.zeros(99, 20).long(), "draws must be at least 100 labellings"),
        (torch.zeros(100, 20), "draws must hold integer labels"),
        (torch.full((100, 20), -1), "labels from 0 on"),
        (torch.zeros(100, 2, 20).long(), "draws must be at least 100 labellings"),
    ],
)
def test_refused(draws, error):
    with pytest.raises(ValueError, match=error):
        check_dependence(GRID, LABELS.flatten(), draws)
