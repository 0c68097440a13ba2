# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a StackedNMM refuses, warns of and saves."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from graphs import house
from stacking import FEW, few_labels, mask, moved
from torch_geometric.utils import erdos_renyi_graph

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM

KNOWN = torch.tensor([False, True, False, True, True])


def problem():
    torch.manual_seed(0)
    return house(), torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])


def test_labels_as_columns_and_masked():
    hood, scores, y = problem()
    stacked, masked = moved(StackedNMM(3)), np.ma.array(y.numpy(), mask=~KNOWN.numpy())
    for labels in (y[:, None].numpy(), masked):
        found = stacked(hood, scores, labels, KNOWN)
        torch.testing.assert_close(found, stacked(hood, scores, y, KNOWN))


@pytest.mark.parametrize("options", [{}, {"prior": {"gamma": (1.0, 0.5)}}])
def test_module_without_a_fit(options, tmp_path):
    given = *problem(), KNOWN
    stacked = StackedNMM(3, **options)
    for unfitted in (stacked, copy.deepcopy(stacked).float().double()):
        for call in (unfitted.mixture, unfitted.posterior):
            with pytest.raises(ValueError, match=r"call fit\(.*\) or load_state_dict\(.*\) first"):
                call(*given)
    stepped = copy.deepcopy(stacked)  # as Pyro's optimisers do
    stepped(*given)[1].square().sum().backward()
    torch.optim.Adam(stepped.parameters()).step()
    stepped.mixture(*given)
    fitted = copy.deepcopy(stacked).fit(*given[:3], [0, 2], KNOWN, **FEW)
    torch.save(fitted.state_dict(), tmp_path / "state.pt")
    torch.save(fitted, tmp_path / "module.pt")
    loaded = StackedNMM(3, **options)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    saved = torch.load(tmp_path / "module.pt", weights_only=False)
    expected = fitted.mixture(*given).marginals()
    for each in (fitted, loaded, saved, copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        torch.testing.assert_close(each.mixture(*given).marginals(), expected)
        assert repr(each) == repr(fitted)


HOOD, SCORES, Y = problem()
STARS = Neighborhood(torch.tensor([[0, 5, 6, 1, 2], [0, 1, 2, 3, 4]]), 5, num_sources=7)
TRAIN, FITTED = ~KNOWN, moved(StackedNMM(3))
BOTH, HALVES = SCORES.expand(2, 5, 3), torch.tensor([0, 1, 0, 1, -1])


def fit(hood=HOOD, scores=SCORES, y=Y, train=TRAIN, held_out=KNOWN, **options):
    StackedNMM(3).fit(hood, scores, y, train, held_out, **options)


def fold(scores=BOTH, *masks, folds=HALVES):
    StackedNMM(3).fit(HOOD, scores, Y, *masks, folds=folds)


REFUSALS = [
    (lambda: StackedNMM(1), "num_classes must be an integer of at least 2"),
    (lambda: StackedNMM(3, pool=False, prior={"pool.labels": (0.0, 1.0)}), "must .*'pool.labels'"),
    (lambda: StackedNMM(3, prior={"gamma": (0.0, 0.0)}), "prior must .*gamma"),
    (lambda: fit(scores=SCORES * math.nan), "finite floating-point logits, got 15 entries"),
    (lambda: fit(scores=SCORES.repeat(1, 2)), r"must have shape \(5, 3\), num_classes"),
    (lambda: fit(y=Y + 5), "y holds label [567] at node 0"),
    (lambda: FITTED.mixture(HOOD, SCORES), "y and known are needed"),
    (lambda: fit(held_out=TRAIN), "train and held_out must be disjoint.* both hold node 0"),
    (lambda: fit(held_out=mask(5)), "held_out selects no node"),
    (lambda: fit(train=Y), r"train must be a boolean mask \(N,\) or node ids .*that repeat"),
    (lambda: FITTED.update(HOOD, SCORES, Y, TRAIN, TRAIN), "train and new must be disjoint"),
    (lambda: FITTED.posterior(HOOD, SCORES, Y, KNOWN, new=KNOWN), "known and new must be disjoint"),
    (lambda: FITTED.posterior(HOOD, SCORES, Y, KNOWN, num_draws=17), "num_draws must be at most"),
    (lambda: fit(num_steps=0), "num_steps must be an integer of at least 1"),
    (lambda: fold(BOTH, KNOWN), "leave out train, held_out"),
    (lambda: StackedNMM(3).fit(HOOD, SCORES, Y), "train and held_out are needed"),
    (lambda: fold(SCORES), r"have shape \(K, 5, C\)"),
    *((lambda f=f: fold(folds=f), r"folds must hold each of 0\.\.1")
      for f in (HALVES + 1, HALVES.clamp(max=0))),
    (lambda: FITTED(HOOD.restrict(KNOWN), SCORES, Y, KNOWN), "pass the whole neighborhood"),
    (lambda: fit(STARS), "hood has sources that are no nodes: take Neighborhood"),
    (lambda: fit(SCORES, HOOD), "hood must be a Neighborhood"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refusals(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_warnings():
    hood, scores, *labels = few_labels()
    with pytest.warns(UserWarning, match=r"look like probabilities.*scores.clamp"):
        StackedNMM(3).fit(hood, scores.softmax(-1), *labels, **FEW)
    both = erdos_renyi_graph(60, 0.2)
    with pytest.warns(UserWarning, match=r"one direction only.*to_undirected\(edge_index\)"):
        StackedNMM(3).fit(Neighborhood(both[:, both[0] < both[1]], 60), scores, *labels, **FEW)
    for edges in (both, both[:, :0]):  # warnings are errors
        StackedNMM(3).fit(Neighborhood(edges, 60), scores, *labels, **FEW)
