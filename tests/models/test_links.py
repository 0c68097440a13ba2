# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Splits of edges, and that training never sees what was held out."""

import numpy as np
import pyro
import pytest
import torch
from documents import load
from torch_geometric.datasets import KarateClub
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import is_undirected

from benchmarks.links.data import link_graph, published_split
from pyro_nmm.datasets import LinkSplit, link_split
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.models import DGLFRM


def pairs_of(edges):
    return {tuple(sorted(pair)) for pair in edges.T.tolist()}


def test_random_split():
    data = KarateClub()[0]
    loops = torch.tensor([[0, 5], [0, 5]])
    edge_index = torch.cat([data.edge_index, loops, data.edge_index[:, :3]], 1)
    state = torch.get_rng_state()
    split = link_split(edge_index, 34, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert is_undirected(split.train)
    true = [pairs_of(part) for part in (split.train, split.val, split.test)]
    assert sum(map(len, true)) == len(set.union(*true)) == 78
    assert set.union(*true) == pairs_of(data.edge_index)
    assert (len(true[1]), len(true[2])) == (3, 7)
    for part, false in ((split.val, split.val_false), (split.test, split.test_false)):
        assert part.shape == false.shape
        assert not pairs_of(false) & pairs_of(data.edge_index)
    assert len(pairs_of(split.val_false) | pairs_of(split.test_false)) == 10
    again, other = link_split(edge_index, 34, seed=1), link_split(edge_index, 34, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(split, again, strict=True))
    assert pairs_of(other.test) != pairs_of(split.test)


def test_splits_that_cannot_be():
    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    with pytest.raises(ValueError, match="val and test must hold out an edge at least"):
        link_split(ring, 4, seed=0)
    whole = torch.combinations(torch.arange(5)).T
    with pytest.raises(ValueError, match="need 3 pairs without an edge, but the graph has 0"):
        link_split(whole, 5, seed=0, val=0.1, test=0.2)


def test_published_split(tmp_path):
    edges = np.array([[0, 1], [1, 2], [2, 3], [3, 4], [0, 4]])
    names = ("train_edges", "val_edges", "val_edges_false", "test_edges", "test_edges_false")
    arrays = dict(
        zip(names, (edges[:3], edges[3:4], edges[:1], edges[4:], edges[1:2]), strict=True)
    )
    np.savez(tmp_path / "split.npz", **arrays)
    split = published_split(tmp_path / "split.npz", 5)
    assert split.train.shape == (2, 6)
    assert pairs_of(split.train) == {(0, 1), (1, 2), (2, 3)}
    assert split.held_out.tolist() == [[3, 0, 0, 1], [4, 1, 4, 2]]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features"),
    [("nips12", 2037, 3134, 2037), ("yeast", 2361, 6646, 2361), ("cora", 2708, 5278, 1433)],
)
def test_graphs(name, nodes, edges, features, request):
    data = link_graph(name, request.config.getoption("--data-root"))
    assert (data.num_nodes, data.num_edges) == (nodes, 2 * edges)
    assert data.x.shape == (nodes, features)
    assert (data.x.values() == 1).all()


@pytest.mark.parametrize("guide", ["original", "nmm"])
def test_training_does_not_see_held_out_labels(guide):
    """
    Exchanging true and false held-out pairs marks every one of them, and training ends with the
    same parameters, bit for bit; hiding fewer pairs changes them.
    """
    torch.set_default_dtype(torch.float)
    example = load("examples/link_prediction.py")
    args = example.parser().parse_args(["--num-communities", "5", "--hidden", "8"])
    data, _ = example.load(args)
    split = link_split(data.edge_index, data.num_nodes, seed=0)
    marked = split._replace(val=split.val_false, val_false=split.val, test=split.test_false,
                            test_false=split.test)  # fmt: skip
    fewer = split._replace(test=split.test[:, :0])
    results = []
    for part in (split, marked, fewer):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = example.build(args, data, part, guide)
        losses = fit_links(pair, part, data.x, num_steps=5)
        results.append((losses, list(pair.state_dict().values())))
    scores = example.evaluate(pair, split, data.x)
    assert 0 <= scores["AP"] <= 100
    assert results[0][0] == results[1][0] != results[2][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


DATA = KarateClub()[0]


@pytest.mark.parametrize(
    "options", [{}, {"disjoint_train_ratio": 0.4}, {"neg_sampling_ratio": 0.0}, {"num_val": 0.0}]
)
def test_splits_of_pyg(options):
    """Each pair of the graph is trained on or held out, and pairs without an edge are held out."""
    pyro.set_rng_seed(0)
    parts = RandomLinkSplit(is_undirected=True, **options)(DATA)
    split = LinkSplit.of(parts)
    assert LinkSplit.of(split) is split
    edges, held = pairs_of(split.train), pairs_of(torch.cat([split.val, split.test], 1))
    assert edges | held == pairs_of(DATA.edge_index)
    assert not edges & held
    assert is_undirected(split.train)
    others = pairs_of(torch.cat([split.val_false, split.test_false], 1))
    assert not others & (edges | held)
    assert bool(others) == ("neg_sampling_ratio" not in options)
    assert pairs_of(split.held_out) == held | others
    losses = []
    for each in (parts, split):
        pyro.set_rng_seed(1)
        pyro.clear_param_store()
        pair = DGLFRMGuide(DGLFRM(34, 4, concentration=4.0), DATA.num_features)
        losses.append(fit_links(pair, each, DATA.x, num_steps=3))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (RandomLinkSplit()(DATA), "both directions of every edge: use RandomLinkSplit.is_und"),
        (RandomLinkSplit(is_undirected=True, split_labels=True)(DATA), "split_labels=False"),
        (DATA, "split must be a LinkSplit or RandomLinkSplit.*, got .*Data"),
        (RandomLinkSplit(is_undirected=True)(DATA)[:2], "split must be a LinkSplit"),
        (None, "split must be a LinkSplit or RandomLinkSplit.*, got .*None"),
    ],
)
def test_splits_of_pyg_that_cannot_be(parts, match):
    pair = DGLFRMGuide(DGLFRM(34, 4, concentration=4.0), DATA.num_features)
    with pytest.raises(ValueError, match=match):
        fit_links(pair, parts, DATA.x, num_steps=1)
