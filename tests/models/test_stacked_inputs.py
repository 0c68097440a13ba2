# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What users give a StackedNMM: arrays, lists, sets of nodes, and arguments that are refused."""

import copy
import math
import pickle

import pytest
import torch
from graphs import house
from stacking import FEW, few_labels, mask, moved
from torch_geometric.utils import erdos_renyi_graph

from pyro_nmm import Neighborhood
from pyro_nmm.models import PooledScores, StackedNMM

KNOWN = torch.tensor([False, True, False, True, True])


def problem():
    torch.manual_seed(0)
    return house(), torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])


FORMS = {
    "uint8": lambda mask: mask.to(torch.uint8),
    "zeros and ones": lambda mask: mask.long().tolist(),
    "array of booleans": lambda mask: mask.numpy(),
    "small ids": lambda mask: mask.nonzero()[:, 0].to(torch.uint8),
    "list of ids": lambda mask: mask.nonzero()[:, 0].flip(0).tolist(),
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
        fits.append(StackedNMM(3).fit(hood, scores, y, train, held_out, **FEW))
    assert repr(fits[0]) == repr(fits[1])
    nothing = stacked(hood, scores, y, mask(5))
    torch.testing.assert_close(stacked(hood, scores, y, form(mask(5))), nothing)


def test_scores_and_labels_as_arrays():
    """NumPy's arrays, and OGB's columns of labels; nested lists of folds."""
    hood, scores, y, train, held_out = few_labels()
    both, folds = torch.stack([scores, 2 * scores]), torch.arange(60) % 2
    column, ids = y[:, None].numpy(), held_out.nonzero()[:, 0].int().numpy()
    for given, options, others, as_lists in (
        ((scores, y, train, held_out), {}, (scores.numpy(), column, train.numpy(), ids), {}),
        ((both, y), {"folds": folds}, (both.tolist(), y), {"folds": folds.tolist()}),
    ):
        found = []
        for each, more in ((given, options), (others, as_lists)):
            torch.manual_seed(0)
            stacked = StackedNMM(3).fit(hood, *each, **more, **FEW)
            found.append([*stacked.state_dict().values()])
        torch.testing.assert_close(*found)


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
TRAIN, WEIGHT, NONE = ~KNOWN, torch.ones(HOOD.num_edges), r".*got <class 'torch.Tensor'>"
FITTED = moved(StackedNMM(3))
BOTH, HALVES = SCORES.expand(2, 5, 3), torch.tensor([0, 1, 0, 1, -1])
WRONG_SET = r"train must be a (boolean mask \(N,\) or node ids \(K,\), N = 5, got torch|tensor, an)"
NOT_FINITE = "finite floating-point logits, got 1 entries"


def fit(hood=HOOD, scores=SCORES, y=Y, train=TRAIN, held_out=KNOWN, module=(3,), **options):
    StackedNMM(*module).fit(hood, scores, y, train, held_out, **options)


def plain(hood=HOOD, scores=SCORES, y=Y, **options):
    StackedNMM(3, pool=False).fit(hood, scores, y, TRAIN, KNOWN, **options)


def one(value, *place):
    """The scores or labels, but for one entry."""
    changed = (SCORES if isinstance(value, float) else Y).clone()
    changed[place] = value
    return changed


REFUSALS = [
    # Modules
    (lambda: StackedNMM(1), "num_classes must be an integer of at least 2"),
    (lambda: PooledScores(1), "num_classes must be an integer of at least 2"),
    (lambda: StackedNMM(3, pool=False, prior={"kappa": (0.0, 1.0)}), "prior must .*'kappa'"),
    (lambda: StackedNMM(3, prior={"gamma": (0.0, 0.0)}), "prior must .*gamma"),
    (lambda: StackedNMM(3, pool=False, prior={"pool.labels": (0.0, 1.0)}), "must .*'pool.labels'"),
    # Scores
    (lambda: fit(scores=one(math.nan, 3, 1)), NOT_FINITE),
    (lambda: plain(scores=SCORES[:4]), r"scores must have shape \(5, C\)"),
    (lambda: fit(module=(4,)), r"scores must have shape \(5, 4\), num_classes columns"),
    # Labels and sets of nodes
    (lambda: plain(y=one(5, 0)), "y holds label 5 at node 0"),
    (lambda: fit(y=Y.float()), "y must hold integer labels"),
    (lambda: FITTED.posterior(HOOD, SCORES, one(3, 0), KNOWN, new=TRAIN), "y holds label 3"),
    (lambda: FITTED.mixture(HOOD, SCORES), "y and known are needed"),
    (lambda: fit(held_out=TRAIN), "train and held_out must be disjoint.* both hold node 0"),
    (lambda: fit(held_out=mask(5)), "held_out selects no node"),
    (lambda: FITTED(HOOD, SCORES, Y, [5]), "holds node id 5, but ids lie in 0..4"),
    *((lambda bad=bad: fit(train=bad), WRONG_SET)
      for bad in (Y, [0, 1, 1], [2, 2], KNOWN[:4], KNOWN[:, None], KNOWN.double(), "train")),
    (lambda: FITTED.update(HOOD, SCORES, Y, TRAIN, TRAIN), "train and new must be disjoint"),
    (lambda: FITTED.posterior(HOOD, SCORES, Y, KNOWN, new=KNOWN), "known and new must be disjoint"),
    # Options
    (lambda: fit(num_step=3), "num_step"),
    *((lambda n=n: FITTED.posterior(HOOD, SCORES, Y, KNOWN, num_draws=n), "num_draws")
      for n in (-1, 17, 1.5)),
    (lambda: fit(num_steps=0), "num_steps must be an integer of at least 1"),
    # Folds
    (lambda: StackedNMM(3).fit(HOOD, BOTH, Y, KNOWN, folds=HALVES), "leave out train, held_out"),
    (lambda: StackedNMM(3).fit(HOOD, SCORES, Y), "train and held_out are needed"),
    (lambda: StackedNMM(3).fit(HOOD, SCORES, Y, folds=HALVES), r"have shape \(K, 5, C\)"),
    *((lambda f=f: StackedNMM(3).fit(HOOD, BOTH, Y, folds=f), r"folds must hold each of 0\.\.1")
      for f in (HALVES + 1, HALVES.clamp(max=0))),
    # Graphs
    (lambda: FITTED(HOOD.restrict(KNOWN), SCORES, Y, KNOWN), "observed"),
    (lambda: plain(STARS), "hood has sources that are no nodes: take Neighborhood"),
    # Swapped arguments
    (lambda: fit(SCORES, HOOD), "hood must be a Neighborhood" + NONE),
    (lambda: fit(HOOD, Y, SCORES), r"scores must have shape \(5, C\).*got \(5,\)"),
    (lambda: fit(HOOD, SCORES, TRAIN, Y), "train must be a boolean mask .*that repeat"),
    (lambda: FITTED.mixture(HOOD, SCORES, Y.expand(5, 5), KNOWN), r"y must have shape \(5,\)"),
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
