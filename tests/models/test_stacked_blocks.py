# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Marginals of a StackedNMM in blocks of nodes, of tables that may lie in files."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.utils import erdos_renyi_graph

from pyro_nmm import Neighborhood, blocks
from pyro_nmm.models import StackedNMM, marginals_in_blocks
from pyro_nmm.models.stacked.formula import walked
from pyro_nmm.models.stacked.table import GraphScores
from pyro_nmm.sources import communities


def problem(seed, num_nodes=30):
    torch.manual_seed(seed)
    edges = erdos_renyi_graph(num_nodes, 0.15)
    scores, y = 2 * torch.randn(num_nodes, 3), torch.randint(3, (num_nodes,))
    return edges, scores, y, torch.rand(num_nodes) < 0.3


def random_numbers(stacked):
    for number in stacked.parameters():
        number.data.normal_()
    return stacked


def in_small_blocks(*arguments, **options):
    """All marginals, and how many blocks there were."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "NUMBERS", 40)
        found = list(
            marginals_in_blocks(*arguments, **options, progress=lambda b: seen.append(b) or b)
        )
    (listed,) = seen
    assert [nodes for nodes, _ in found] == listed
    ends = [0, *(part.stop for part in listed)]
    assert [part.start for part in listed] == ends[:-1]
    assert ends[-1] == arguments[1].num_nodes
    return torch.cat([probs for _, probs in found]), len(found)


@given(seed=st.integers(0, 2**16), kind=st.sampled_from(["plain", "communities", "relabelled"]))
def test_blocks_have_the_posterior(seed, kind):
    edges, scores, y, known = problem(seed)
    hood, options, weight = Neighborhood(edges, 30), {}, None
    if kind == "communities":
        hood, options = communities(edges, 30, torch.randint(4, (30,))), {"communities": True}
    elif kind == "relabelled":
        options = {"compatibility": torch.rand(3, 3).softmax(-1)}
    else:
        weight = torch.rand(hood.num_edges) + 0.1
    stacked = random_numbers(StackedNMM(3, **options))
    mixture = stacked.mixture(hood, scores, y, known, weight)
    found, number = in_small_blocks(stacked, hood, scores, y, known, edge_weight=weight)
    assert number > 3
    torch.testing.assert_close(found, mixture.marginals(), atol=1e-5, rtol=1e-5)
    if known.any():
        posterior = stacked.posterior(hood, scores, y, known, edge_weight=weight)
        torch.testing.assert_close(found, posterior.marginals(), atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 2**16), weighted=st.booleans())
def test_walk_in_blocks(seed, weighted):
    edges, scores, y, known = problem(seed)
    hood = Neighborhood(edges, 30)
    weight = torch.rand(hood.num_edges) if weighted else torch.ones(hood.num_edges)
    dense = torch.zeros(30, 30).index_put((hood.target, hood.source), weight)
    expected = dense / dense.sum(1, keepdim=True) @ scores
    data = GraphScores(hood, scores, y, known, weight if weighted else None)
    torch.testing.assert_close(walked(data, scores), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "NUMBERS", 7)
        torch.testing.assert_close(walked(data, scores), expected)


def test_files(tmp_path):
    """The graph, the scores and the result lie in files."""
    edges, scores, y, known = problem(0)
    hood, stacked = Neighborhood(edges, 30), random_numbers(StackedNMM(3))
    scores = scores.float()
    for name, array in {"ptr": hood.ptr, "source": hood.source, "scores": scores}.items():
        np.save(tmp_path / name, array.numpy())
    ptr, source, rows = (
        np.load(tmp_path / f"{name}.npy", mmap_mode="c") for name in ("ptr", "source", "scores")
    )
    ptr, source = torch.from_numpy(ptr), torch.from_numpy(source)
    stored = Neighborhood.of_rows(30, torch.arange(30), ptr, source)
    options = {"mode": "w+", "dtype": np.float32, "shape": (30, 3)}
    out = np.lib.format.open_memmap(tmp_path / "marginals.npy", **options)
    for nodes, probs in marginals_in_blocks(stacked, stored, rows, y, known):
        out[nodes] = probs.numpy()
    out.flush()
    expected = stacked.posterior(hood, scores, y, known).marginals()
    found = torch.from_numpy(np.load(tmp_path / "marginals.npy"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_no_known_label_and_bad_input():
    edges, scores, y, known = problem(1)
    hood, stacked = Neighborhood(edges, 30), random_numbers(StackedNMM(3))
    found, _ = in_small_blocks(stacked, hood, scores, y, torch.zeros_like(known))
    expected = stacked.mixture(hood, scores, y, torch.zeros_like(known)).marginals()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"pool=False.*posterior"):
        marginals_in_blocks(StackedNMM(pool=False), hood, scores, y, known)
    with pytest.raises(ValueError, match="scores must have shape"):
        marginals_in_blocks(stacked, hood, scores[1:], y, known)
    with pytest.raises(ValueError, match="pass the whole neighborhood"):
        marginals_in_blocks(stacked, hood.restrict(known), scores, y, known)
