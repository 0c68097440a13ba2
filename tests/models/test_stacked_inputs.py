# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Arrays, lists, sets of nodes, swapped arguments and modules without a fit, as users have them."""

import copy
import pickle

import numpy as np
import pytest
import torch
from graphs import house
from torch_geometric.utils import erdos_renyi_graph

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, edge_weights, marginals_in_blocks
from pyro_nmm.sources import communities

EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
KNOWN = torch.tensor([False, True, False, True, True])


def moved(stacked):
    """A module as after a fit."""
    for value in stacked.parameters():
        value.data += 0.1
    return stacked


def problem():
    torch.manual_seed(0)
    return house(), torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])


@pytest.mark.parametrize("form", [torch.Tensor.numpy, torch.Tensor.tolist, tuple])
def test_edges_as_arrays_and_lists(form):
    edges = tuple(EDGES.tolist()) if form is tuple else form(EDGES)
    hood, expected = Neighborhood(edges, 3), Neighborhood(EDGES, 3)
    assert torch.equal(hood.source, expected.source)
    assert torch.equal(hood.ptr, expected.ptr)
    weight = torch.tensor([4.0, 4.0, 2.0, 2.0])
    given = weight.tolist() if form is tuple else form(weight)
    found = edge_weights(hood, edges, given)
    torch.testing.assert_close(found, edge_weights(expected, EDGES, weight))


def test_sizes_of_arrays():
    edges = EDGES.numpy()
    hood = Neighborhood(edges[:, ::-1], edges.max() + 1)
    assert type(hood.num_nodes) is int
    assert torch.equal(hood.source, Neighborhood(EDGES, 3).source)


def test_edges_that_are_none():
    hood = Neighborhood(EDGES, 3)
    for bad in ([[0, 1], [1]], "edges", None):
        with pytest.raises(ValueError, match="edge_index must be a tensor, an array or a nested"):
            Neighborhood(bad, 3)
    for bad in (EDGES[0].numpy(), EDGES.T.tolist()[:3]):
        with pytest.raises(ValueError, match=r"edge_index must have shape \(2, num_edges\), got"):
            Neighborhood(bad, 3)
        with pytest.raises(ValueError, match=r"edge_index must have shape \(2, num_edges\), got"):
            edge_weights(hood, bad, torch.ones(4))
    with pytest.raises(ValueError, match="edge_weight must be a tensor, an array or a nested"):
        edge_weights(hood, EDGES, None)


FORMS = {
    "uint8": lambda mask: mask.to(torch.uint8),
    "integers": lambda mask: mask.long(),
    "zeros and ones": lambda mask: mask.long().tolist(),
    "list of booleans": lambda mask: mask.tolist(),
    "array of uint8": lambda mask: mask.to(torch.uint8).numpy(),
    "array of booleans": lambda mask: mask.numpy(),
    "ids": lambda mask: mask.nonzero()[:, 0],
    "small ids": lambda mask: mask.nonzero()[:, 0].to(torch.uint8),
    "list of ids": lambda mask: mask.nonzero()[:, 0].flip(0).tolist(),
    "array of ids": lambda mask: mask.nonzero()[:, 0].numpy(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_sets_of_nodes(form):
    hood, scores, y = problem()
    stacked, known = moved(StackedNMM(3)), form(KNOWN)
    expected = stacked(hood, scores, y, KNOWN)
    torch.testing.assert_close(stacked(hood, scores, y, known), expected)
    assert torch.equal(stacked.posterior(hood, scores, y, known).observed, KNOWN)
    fits = []
    for held_out, train in ((KNOWN, ~KNOWN), (known, form(~KNOWN))):
        torch.manual_seed(1)
        fits.append(StackedNMM(3).fit(hood, scores, y, train, held_out, num_steps=2))
    assert repr(fits[0]) == repr(fits[1])


@pytest.mark.parametrize("nothing", [[], np.array([]), np.zeros(5, int), [0] * 5, [False] * 5])
def test_empty_sets(nothing):
    hood, scores, y = problem()
    stacked = moved(StackedNMM(3))
    expected = stacked(hood, scores, y, KNOWN & ~KNOWN)
    torch.testing.assert_close(stacked(hood, scores, y, nothing), expected)


def test_zeros_and_ones_that_do_not_repeat_are_ids():
    hood = Neighborhood([[0], [1]], 2)
    posterior = moved(StackedNMM(3)).posterior(
        hood, torch.randn(2, 3), torch.tensor([2, 1]), [1, 0]
    )
    assert posterior.observed.all()


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 1, 2, 1, 0]),  # labels, for example
        [0, 1, 1],
        [2, 2],
        KNOWN[:4],
        KNOWN[:, None],
        KNOWN.double(),
        "train",
        None,
    ],
)
def test_no_sets_of_nodes(bad):
    hood, scores, y = problem()
    both = r"boolean mask \(N,\) or node ids \(K,\), N = 5, got torch|tensor, an array or a nested"
    if bad is not None:
        with pytest.raises(ValueError, match=f"train must be a ({both})"):
            StackedNMM(3).fit(hood, scores, y, bad, KNOWN)
        with pytest.raises(ValueError, match=f"known must be a ({both})"):
            StackedNMM(3)(hood, scores, y, bad)
    with pytest.raises(ValueError, match=r"node ids in 0..4, got 5"):
        StackedNMM(3)(hood, scores, y, [5])


@pytest.mark.parametrize("num_samples", [64, None])
@pytest.mark.parametrize("kind", ["pool", "scores", "communities", "share"])
def test_posterior_without_known_labels(kind, num_samples):
    torch.manual_seed(0)
    hood, scores, y = problem()
    stacked = StackedNMM(3, pool=kind != "scores", communities=kind == "communities")
    stacked = moved(stacked)
    if kind == "communities":
        edges = torch.stack([hood.source, hood.target])
        hood = communities(edges, 5, torch.tensor([0, 0, 1, 1, 1]))
    if kind == "share":
        stacked.share.fill_(0.7)
    given = hood, scores, torch.full((5,), -1), KNOWN & ~KNOWN
    mix, posterior = stacked.mixture(*given), stacked.posterior(*given, num_samples)
    assert not posterior.observed.any()
    torch.testing.assert_close(posterior.marginals(), mix.marginals())
    pairs = torch.tensor([[0, 2, 1], [1, 4, 1]])
    torch.testing.assert_close(posterior.pairwise(pairs), mix.pairwise(pairs))
    torch.testing.assert_close(
        posterior.log_marginal(pairs[0], y[:3]), mix.log_marginal(pairs[0], y[:3])
    )
    draws = posterior.sample((20_000,))
    rates = torch.nn.functional.one_hot(draws, 3).double().mean(0)
    error = (mix.marginals() * (1 - mix.marginals()) / 20_000).sqrt()
    assert ((rates - mix.marginals()).abs() < 5 * error + 1e-6).all()
    counts = posterior.counts([torch.arange(5)], 0, 20_000).double()
    wanted = mix.marginals()[:, 0].sum()
    assert abs(counts.mean() - wanted) < 5 * counts.std() / 20_000**0.5
    assert torch.equal(posterior.predict(), mix.marginals().argmax(-1))
    torch.manual_seed(2)
    found = posterior.condition(y, KNOWN).marginals()
    torch.manual_seed(2)
    expected = mix.condition(y, KNOWN, num_samples).marginals()
    torch.testing.assert_close(found, expected)


def test_prior_takes_a_number_of_samples():
    hood, scores, y = problem()
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1, got 0"):
        moved(StackedNMM(3)).posterior(hood, scores, y, [], 0)


def calls(stacked, *given):
    yield lambda: stacked.mixture(*given)
    yield lambda: stacked.posterior(*given)
    yield lambda: marginals_in_blocks(stacked, *given)


def refused(stacked, *given):
    for call in calls(stacked, *given):
        with pytest.raises(ValueError, match=r"call fit\(...\) or load_state_dict\(...\) first"):
            call()


@pytest.mark.parametrize("options", [{}, {"prior": {"gamma": (1.0, 0.5)}}])
def test_module_without_a_fit(options):
    hood, scores, y = problem()
    given = hood, scores, y, KNOWN
    stacked = StackedNMM(3, **options)
    refused(stacked, *given)
    refused(copy.deepcopy(stacked).float().double(), *given)
    stacked(*given)  # a network for Pyro's programs
    fitted = copy.deepcopy(stacked).fit(hood, scores, y, [0, 2], KNOWN, num_steps=1)
    loaded = StackedNMM(3, **options)
    loaded.load_state_dict(fitted.state_dict())
    copies = fitted, loaded, copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))
    expected = fitted.mixture(*given).marginals()
    for each in copies:
        torch.testing.assert_close(each.mixture(*given).marginals(), expected)
        for call in calls(each, *given):
            call()


def test_module_without_a_fit_on_scores_alone(tmp_path):
    hood, scores, y = problem()
    stacked = StackedNMM(pool=False)
    with pytest.raises(ValueError, match="first"):
        stacked.mixture(hood, scores)
    optimizer = torch.optim.Adam(stacked.parameters(), lr=1e-3)
    stacked(hood, scores)[1].square().sum().backward()
    optimizer.step()
    stacked.mixture(hood, scores)
    torch.save(stacked, tmp_path / "stacked.pt")
    torch.load(tmp_path / "stacked.pt", weights_only=False).posterior(hood, scores, y, KNOWN)


def test_swapped_arguments():
    hood, scores, y = problem()
    stacked, train, none = moved(StackedNMM(3)), ~KNOWN, r".*got <class 'torch.Tensor'>"
    fit = StackedNMM(3).fit
    weight = torch.ones(hood.num_edges)
    edges = torch.stack([hood.source, hood.target])
    for call, match in (
        (lambda: fit(scores, hood, y, train, KNOWN), "hood must be a Neighborhood" + none),
        (lambda: fit(scores, hood, y, folds=y), "hood must be a Neighborhood" + none),
        (lambda: stacked.update(scores, hood, y, train, KNOWN), "hood must be a Neighborhood"),
        (lambda: stacked(scores, hood, y, KNOWN), "hood must be a Neighborhood" + none),
        (lambda: stacked.mixture(scores, hood), "hood must be a Neighborhood" + none),
        (lambda: edge_weights(edges, hood, weight), "hood must be a Neighborhood" + none),
        (lambda: edge_weights(hood, weight, edges), r"edge_index must have shape \(2, num_edges\)"),
        (
            lambda: marginals_in_blocks(hood, stacked, scores, y, KNOWN),
            "hood must be a Neighborhood, got .*StackedNMM",
        ),
        (
            lambda: fit(hood, y, scores, train, KNOWN),
            r"scores must have shape \(5, 3\).*got \(5,\)",
        ),
        (lambda: fit(hood, scores, train, y, KNOWN), "train must be a boolean mask .*that repeat"),
        (lambda: fit(hood, scores, train, train, KNOWN), "y must hold .*got torch.bool"),
        (lambda: stacked.posterior(hood, scores, KNOWN, y), "y must hold integer .*got torch.bool"),
        (lambda: stacked.posterior(hood, y, scores, KNOWN), r"scores must have shape .*got \(5,\)"),
        (lambda: stacked.mixture(hood, scores, scores, KNOWN), r"y must hold integer.*float64"),
        (lambda: stacked.mixture(hood, scores, y.expand(5, 5), KNOWN), r"y must have shape \(5,\)"),
        (lambda: stacked.mixture(hood, scores, y, scores), "known must be .*got torch.float64"),
        (lambda: stacked.mixture(hood, scores, y, hood), "known must be .*got .*Neighborhood"),
        (lambda: stacked.mixture(hood, scores, y, KNOWN, y), r"edge_weight must have shape"),
        (lambda: stacked.posterior(hood, scores, y, KNOWN, weight), "num_samples must be"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("bad", [(-1,), (2, -3), (1.5,), ("a",), 5, -1, None, (None,)])
def test_shapes_of_draws(bad):
    hood, scores, y = problem()
    stacked = moved(StackedNMM(3))
    mix = stacked.mixture(hood, scores, y, KNOWN)
    posterior = stacked.posterior(hood, scores, y, KNOWN)
    for each in (mix, posterior):
        with pytest.raises(ValueError, match="sample_shape must hold integers of at least 0, got"):
            each.sample(bad)
        assert each.sample((np.int64(2), 0)).shape == (2, 0, 5)
        assert each.sample([2]).shape == (2, 5)


def test_large_sets_of_zeros_and_ones():
    """A mask of integers is the same mask on a larger graph."""
    torch.manual_seed(0)
    hood, mask = Neighborhood(erdos_renyi_graph(50, 0.1), 50), torch.rand(50) < 0.3
    scores, y = torch.randn(50, 3), torch.randint(3, (50,))
    expected = StackedNMM(3)(hood, scores, y, mask)
    torch.testing.assert_close(StackedNMM(3)(hood, scores, y, mask.to(torch.int8)), expected)


def test_edges_in_one_direction_are_named():
    torch.manual_seed(0)
    both = erdos_renyi_graph(30, 0.2)
    data = torch.randn(30, 3), torch.randint(3, (30,)), torch.arange(10), torch.arange(10, 30)
    with pytest.warns(UserWarning, match=r"one direction only.*to_undirected\(edge_index\)"):
        StackedNMM(3).fit(Neighborhood(both[:, both[0] < both[1]], 30), *data, num_steps=1)
    StackedNMM(3).fit(Neighborhood(both, 30), *data, num_steps=1)  # warnings are errors
    StackedNMM(3).fit(Neighborhood(both[:, :0], 30), *data, num_steps=1)
