# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Arrays as users have them, in every call that takes ids, labels or edges."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.data import Data

from pyro_nmm import InnerProductGraph, Neighborhood, NeighborMixture, OrderedConditional, sources
from pyro_nmm.arguments import as_tensor
from pyro_nmm.datasets import inner_edges, link_split, seed_batch
from pyro_nmm.guides import FieldGuide
from pyro_nmm.labels import in_label_order
from pyro_nmm.metrics import brier, independent_pairs, pair_log_likelihood
from pyro_nmm.models import (
    FreeNMM,
    PairwiseMRF,
    PoissonEmission,
    StackedNMM,
    compatibility,
    edge_weights,
    ising,
    temperature_scaling,
)

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
PAIRS, PATH = EDGES[:, ::2].sort(0).values, torch.stack([torch.arange(20), torch.arange(1, 21)])
HOOD, Y, TWO = Neighborhood(EDGES, 4), torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1])
SCORES, MASK = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 3.0], [1.0, 0.0]]), torch.arange(4) < 2


def mixture():
    return NeighborMixture(HOOD, torch.ones(4, 2), torch.zeros(HOOD.num_edges))


#: Calls with ids, labels or edges, each a function of how these are given.
CALLS = {
    "Neighborhood": lambda as_: Neighborhood(as_(EDGES), 4).source,
    "take": lambda as_: HOOD.take(as_(TWO)).source,
    "subgraph": lambda as_: HOOD.subgraph(as_(TWO)).source,
    "common_neighbors": lambda as_: HOOD.common_neighbors(as_(EDGES))[0],
    "communities": lambda as_: sources.communities(as_(EDGES), 4, as_(Y)).source,
    "walks": lambda as_: sources.walks(as_(EDGES), 4, as_(Y))[1],
    "hops": lambda as_: sources.hops(as_(EDGES), 4)[1],
    "counts": lambda as_: mixture().condition(Y, MASK).counts([as_(TWO)], 1),
    "edge_weights": lambda as_: edge_weights(HOOD, as_(EDGES), torch.ones(6)),
    "StackedNMM": lambda as_: StackedNMM(2)(HOOD, SCORES, as_(Y), as_(TWO))[0],
    "temperature": lambda as_: temperature_scaling(SCORES, as_(Y), as_(TWO)),
    "compatibility": lambda as_: compatibility(HOOD, as_(Y), as_(TWO), 2),
    "brier": lambda as_: brier(SCORES.softmax(-1), as_(Y)),
    "pairs": lambda as_: pair_log_likelihood(
        independent_pairs(SCORES.softmax(-1), as_(EDGES)), as_(Y), as_(EDGES)
    ),
    "inner_edges": lambda as_: inner_edges(as_(EDGES), MASK),
    "link_split": lambda as_: link_split(as_(PATH), 21, seed=0).train,
    "seed_batch": lambda as_: seed_batch(Data(SCORES, EDGES), as_(TWO), 1).n_id,
    "order": lambda as_: (
        FieldGuide(
            HOOD, FreeNMM(HOOD, 2), ising(PAIRS, 0.3, torch.zeros(4)), order=as_(torch.arange(4))
        ).order
    ),
    "counts of words": lambda as_: PoissonEmission(2).check(HOOD, as_(PATH[:, :4].T)),
    "pair_logits": lambda as_: InnerProductGraph(SCORES).pair_logits(as_(EDGES)),
}
#: Of these only tensors are taken.
OF_TENSORS = {
    "condition": lambda as_: mixture().condition(as_(Y), MASK).marginals(),
    "OrderedConditional": lambda as_: (
        OrderedConditional(HOOD, torch.ones(4, 2), torch.zeros(HOOD.num_edges), as_(Y), MASK).alpha
    ),
    "edges of data": lambda as_: seed_batch(Data(SCORES, as_(EDGES)), TWO, 1).n_id,
    "PairwiseMRF": lambda as_: (
        PairwiseMRF(as_(PAIRS), torch.zeros(4, 2), torch.zeros(1), torch.eye(2)).edges
    ),
    "log_potential": lambda as_: ising(PAIRS, 0.3, torch.ones(4)).log_potential(as_(Y)),
}
WIDE = torch.uint16, torch.uint32, torch.uint64
UNSIGNED = [lambda x, dtype=dtype: x.to(dtype) for dtype in WIDE]


def frozen(x):
    array = x.numpy().copy()
    array.setflags(write=False)
    return array


ARRAYS = [
    lambda x: x.numpy().astype("u2"),
    lambda x: x.numpy().astype(">i8"),
    lambda x: x.numpy().astype(object),
    lambda x: x.flip(0).numpy()[::-1],
    frozen,
]


@pytest.mark.parametrize("call", [*CALLS, *OF_TENSORS])
def test_ids_of_every_type(call):
    same = torch.testing.assert_close
    for as_ in [lambda x: x, *UNSIGNED, *(ARRAYS if call in CALLS else [])]:
        torch.manual_seed(0)
        expected = (CALLS | OF_TENSORS)[call](lambda x: x)
        torch.manual_seed(0)
        same((CALLS | OF_TENSORS)[call](as_), expected, check_dtype=False)


FRAME = pd.DataFrame(SCORES.numpy())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.ma.array([1, 2], mask=[False, True]), "x has 1 masked entries.*pass x.filled"),
        (FRAME.iloc[::-1], r"rows in another order than its index.*pass x.sort_index\(\)"),
        (FRAME[0].iloc[::-1], r"rows in another order than its index.*x.reset_index\(drop"),
        (np.array([1, None]), "array or a nested list of numbers, got .*ndarray.* of object"),
    ],
)
def test_arrays_that_are_refused(value, match):
    with pytest.raises(ValueError, match=match):
        as_tensor("x", value)


def test_an_index_of_other_numbers_is_not_read():
    assert as_tensor("x", FRAME.set_index(np.array([9, 3, 5, 7]))).tolist() == SCORES.tolist()


def test_columns_numbered_by_labels():
    """In any order, in every call that takes scores or probabilities."""
    probs, given = SCORES.softmax(-1), FRAME[[1, 0]]
    mixed = pd.DataFrame(probs.numpy())[[1, 0]]
    same = torch.testing.assert_close
    same(StackedNMM(2)(HOOD, given, Y, TWO)[0], StackedNMM(2)(HOOD, SCORES, Y, TWO)[0])
    assert temperature_scaling(given, Y, TWO) == temperature_scaling(SCORES, Y, TWO)
    same(brier(mixed, Y), brier(probs, Y))
    same(independent_pairs(mixed, EDGES), independent_pairs(probs, EDGES))
    same(FreeNMM(HOOD, 2, mixed).log_alpha, FreeNMM(HOOD, 2, probs).log_alpha)
    assert [*in_label_order("x", mixed.set_axis(["b", "a"], axis=1), ["a", "b"])] == ["a", "b"]
    assert [*in_label_order("x", mixed.set_axis(["1", "0"], axis=1))] == ["0", "1"]


def test_whole_logits_are_taken():
    whole, same = SCORES.long(), torch.testing.assert_close
    scores = SCORES.double()
    same(StackedNMM(2)(HOOD, whole, Y, TWO), StackedNMM(2)(HOOD, scores, Y, TWO))
    assert temperature_scaling(whole.tolist(), Y, TWO) == temperature_scaling(scores, Y, TWO)


def test_a_masked_label_is_missing():
    y = np.ma.array([0, 1, 10, 9], mask=[False, False, True, True])
    same = torch.testing.assert_close
    for given in (y, y.astype("u8")):
        same(StackedNMM(2)(HOOD, SCORES, given, TWO), StackedNMM(2)(HOOD, SCORES, Y, TWO))
    same(compatibility(HOOD, y, TWO, 2), compatibility(HOOD, Y, TWO, 2))
    for call in (lambda: StackedNMM(2)(HOOD, SCORES, y, ~MASK), lambda: brier(SCORES, y)):
        with pytest.raises(ValueError, match=r"holds label -1|2 masked entries"):
            call()
