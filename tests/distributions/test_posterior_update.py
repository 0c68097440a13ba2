# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A posterior that is given more labels."""

import networkx as nx
import pytest
import torch
from cases import mask, sharing_house, table_of
from graphs import parameters, to_hood
from scipy.stats import chi2 as chi2_law

from pyro_nmm import NeighborMixture


@pytest.mark.parametrize("known", [(2,), (0, 1)])
def test_more_labels_of_an_exact_posterior(known):
    """The same as all labels at once, to 1e-10."""
    mix, y = sharing_house()
    first, after = mask(*known), mask(3, 4)
    post = mix.condition(y, first).condition(y.where(after, 99), after)
    assert post.is_exact
    both = mix.condition(y, first | after)
    torch.testing.assert_close(table_of(post), table_of(both), rtol=0, atol=1e-10)
    torch.testing.assert_close(post.marginals(), both.marginals(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kernels", "start"),
    [("loops", "weighted"), ("loops", "exact"), ("tensors", "exact"), ("blocks", "weighted")],
    indirect=["kernels"],
)
def test_more_labels_converge_to_the_exact_posterior(kernels, start):
    """The largest of 32 errors is below .007, half of that of weights that stay as they were."""
    mix, y = sharing_house(seed=8, sharpness=0.3)
    first, after = mask(1, 2), mask(3, 4)
    exact = mix.condition(y, first | after)
    if start == "exact":
        post = mix.condition(y, first).condition(y, after, num_samples=20_000)
    else:
        post = mix.condition(y, first, 20_000, weighted=True).condition(y, after)
    assert not post.is_exact
    assert (table_of(post) - table_of(exact)).abs().max() < 0.007
    # A test of something: weights that stay are far off.
    old = mix.condition(y, first, 20_000, weighted=True)
    stay = old.condition(y, after, weighted=False)
    assert (table_of(stay) - table_of(exact)).abs().max() > 0.015


def test_weights_take_the_probability_of_a_new_label():
    """Each component's weight times what it says of the label, by its own concentrations."""
    mix, y = sharing_house()
    hood = mix.hood
    post = mix.condition(y, mask(1, 2, 4), 50, weighted=True)
    assert post.log_weights.std() > 0.1
    alpha = post.components.concentrations(torch.arange(5))
    row = slice(*hood.ptr[3:5].tolist())
    near = alpha[:, hood.source[row]]
    probs = near[..., y[3]] / near.sum(-1) @ mix.logits[row].softmax(0)
    expected = (post.log_weights + probs.log()).log_softmax(0)
    torch.testing.assert_close(post.condition(y, mask(3)).log_weights, expected)


def test_equal_weights_stay_equal():
    """Every choice is a neighbour of its node, in whatever order new nodes were drawn."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(1), 200).condition(y, mask(0, 3, 4))
    assert post.log_weights.unique().numel() == 1
    assert post.observed.tolist() == mask(0, 1, 3, 4).tolist()
    assert post.components.choices.shape == (200, 4)
    assert (mix.hood.take(post.nodes).find(post.components.choices) >= 0).all()


def test_new_choices_know_of_old_ones(kernels):
    """Two nodes that share one neighbour: q of the second given the first, by enumeration."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(1), num_samples=40_000).condition(y, mask(2))
    joint = mix.condition(y, mask(1, 2), num_samples=1)  # any posterior: for its rows' order
    assert joint.nodes.tolist() == [1, 2]
    hood, attention = mix.hood, mix.hood.softmax(mix.logits)
    rows = [slice(*hood.ptr[i : i + 2].tolist()) for i in (1, 2)]
    for old in hood.source[rows[0]]:
        alpha = mix.alpha.clone()
        alpha[old, y[1]] += 1
        near = hood.source[rows[1]]
        probs = attention[rows[1]] * alpha[near, y[2]] / alpha[near].sum(-1)
        probs = probs / probs.sum()
        new = post.components.choices[post.components.choices[:, 0] == old, 1]
        if len(new) < 100:
            continue
        counts = torch.stack([(new == j).sum() for j in near])
        expected = probs * len(new)
        keep = expected > 5
        chi2 = ((counts - expected) ** 2 / expected)[keep].sum().item()
        assert chi2_law.sf(chi2, int(keep.sum()) - 1) > 1e-4


def test_labels_that_are_known_already():
    mix, y = sharing_house()
    for num_samples in (None, 8):
        post = mix.condition(y, mask(0, 1), num_samples)
        assert post.condition(y, mask(0)) is post
        more = post.condition(y, mask(0, 1, 4))
        assert more.nodes.tolist() == [0, 1, 4]


def test_too_many_labels_for_an_exact_sum():
    hood = to_hood(nx.cycle_graph(40))
    mix = NeighborMixture(hood, *parameters(hood, 2))
    y = mix.sample()
    post = mix.condition(y, torch.arange(40) < 3)
    assert post.condition(y, num_samples=16).observed.all()
