# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Arrays, lists, sets of nodes and labels as users have them, in every call that takes them."""

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from emissions import FEATURES
from graphs import shared_sources
from torch_geometric.utils import to_undirected

from pyro_nmm import (
    Neighborhood,
    NeighborMixture,
    edge_values,
    sources,
)
from pyro_nmm.arguments import as_tensor
from pyro_nmm.guides import DGLFRMGuide, fit_links, mean_field
from pyro_nmm.labels import as_array, check_names, in_label_order, is_missing
from pyro_nmm.models import (
    DGLFRM,
    Annotators,
    FreeNMM,
    NormalEmission,
    PooledScores,
    StackedNMM,
    fit_field,
    ising,
    ising_posterior,
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
    "common_neighbors": lambda as_: HOOD.common_neighbors(as_(EDGES))[0],
    "walks": lambda as_: sources.walks(as_(EDGES), 4, as_(Y))[1],
    "counts": lambda as_: mixture().condition(Y, MASK).counts([as_(TWO)], 1),
    "edge_values": lambda as_: edge_values(HOOD, as_(EDGES), torch.ones(6), fill_value=0.0),
    "StackedNMM": lambda as_: StackedNMM(2)(HOOD, SCORES, as_(Y), as_(TWO))[0],
    "find": lambda as_: HOOD.find(as_(torch.stack([Y, 1 - Y]))),
    "Annotators": lambda as_: Annotators(2).fit(as_(EDGES), Y[:, None].expand(4, 2), **SHORT).probs,
}
FIELD, SHORT = ising(PAIRS, 0.3, torch.zeros(4)), {"num_starts": 1, "num_steps": 2, "num_draws": 2}


def field_of(emission, data):
    return fit_field(emission, shared_sources(), data, **SHORT).probs


def losses_of_links(x):
    pair = DGLFRMGuide(DGLFRM(21, 3, concentration=4.0), 2)
    return torch.tensor(fit_links(pair, to_undirected(PATH), x, num_steps=1))


#: Calls with numbers that are no integers.
OF_NUMBERS = {
    "temperature": lambda as_: temperature_scaling(as_(SCORES), Y, TWO),
    "StackedNMM": lambda as_: StackedNMM(2)(HOOD, as_(SCORES), Y, TWO),
    "softmax": lambda as_: HOOD.softmax(as_(torch.arange(10.0))),
    "ising": lambda as_: ising(PAIRS, as_(torch.full((3,), 0.3)), as_(SCORES[:, 0])).unary,
    "ising_posterior": lambda as_: ising_posterior(as_(SCORES)).unary,
    "mean_field": lambda as_: mean_field(FIELD, as_(torch.ones(1, 4, 2) / 2), num_random=0).losses,
    "NormalEmission": lambda as_: field_of(NormalEmission(2), as_(FEATURES)),
    "fit_links": lambda as_: losses_of_links(as_(torch.ones(21, 2))),
}
#: Of these only tensors are taken.
OF_TENSORS = {
    "condition": lambda as_: mixture().condition(as_(Y), MASK).marginals(),
    "log_potential": lambda as_: ising(PAIRS, 0.3, torch.ones(4)).log_potential(as_(Y)),
}
WIDE = torch.uint16, torch.uint32, torch.uint64
UNSIGNED = [lambda x, dtype=dtype: x.to(dtype) for dtype in WIDE]


def frozen(x):
    array = x.numpy().copy()
    array.setflags(write=False)
    return array


LISTS = [torch.Tensor.numpy, torch.Tensor.tolist]
ARRAYS = [
    torch.Tensor.tolist,
    lambda x: x.numpy().astype(">i8"),
    lambda x: x.numpy().astype(object),
    lambda x: x.flip(0).numpy()[::-1],
    frozen,
]


def check(call, forms):
    """The same result, whatever the form of what is given."""
    results = []
    for as_ in (lambda x: x, *forms):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        results.append(call(as_))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], check_dtype=False)


@pytest.mark.parametrize("name", CALLS)
def test_ids_in_arrays_and_lists(name):
    check(CALLS[name], [*UNSIGNED, *ARRAYS])


def test_one_row_that_is_reversed():
    """Its stride is negative, and NumPy calls it contiguous."""
    row = np.arange(4).reshape(1, 4)
    assert as_tensor("row", row[::-1]).tolist() == row.tolist()


@pytest.mark.parametrize("name", OF_TENSORS)
def test_ids_in_tensors_of_every_type(name):
    check(OF_TENSORS[name], UNSIGNED)


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_numbers_in_arrays_and_lists(name):
    torch.set_default_dtype(torch.float)
    check(OF_NUMBERS[name], LISTS)


#: Calls with a set of nodes; zeros and ones that repeat are a mask, not the ids of two nodes.
SETS = {
    "PooledScores": lambda some: PooledScores(2).terms(HOOD, SCORES, Y, some),
    "StackedNMM": lambda some: StackedNMM(2)(HOOD, SCORES, Y, some),
}


@pytest.mark.parametrize("name", SETS)
def test_sets_of_nodes_are_masks_or_ids(name):
    mask = torch.tensor([False, True, True, True])
    forms = mask.long(), mask.to(torch.uint8), torch.tensor([1, 2, 3]), [1, 2, 3]
    check(lambda as_: SETS[name](as_(mask)), [lambda _, form=form: form for form in forms])


FRAME = pd.DataFrame(SCORES.numpy())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.ma.array([1, 2], mask=[False, True]), "x has 1 masked entries.*pass x.filled"),
        (FRAME.iloc[::-1], r"rows in the order of their numbers .*pass x.sort_index\(\)"),
        (FRAME[0].iloc[::-1], r"rows in the order of their numbers .*x.to_numpy\(\) to"),
        (np.array([1, None]), "array or a nested list of numbers, got .*ndarray.* of object"),
    ],
)
def test_arrays_that_are_refused(value, match):
    with pytest.raises(ValueError, match=match):
        as_tensor("x", value)


def test_columns_numbered_by_labels():
    """In any order, in every call that takes scores or probabilities."""
    probs, given = SCORES.softmax(-1), FRAME[[1, 0]]
    mixed = pd.DataFrame(probs.numpy())[[1, 0]]
    same = torch.testing.assert_close
    same(StackedNMM(2)(HOOD, given, Y, TWO)[0], StackedNMM(2)(HOOD, SCORES, Y, TWO)[0])
    assert temperature_scaling(given, Y, TWO) == temperature_scaling(SCORES, Y, TWO)
    same(FreeNMM(HOOD, 2, mixed).log_alpha, FreeNMM(HOOD, 2, probs).log_alpha)
    assert [*in_label_order(mixed.set_axis(["1", "0"], axis=1))] == ["0", "1"]
    many = pd.DataFrame(torch.rand(3, 12).numpy())  # text has "10" before "2"
    assert [*in_label_order(many[range(11, -1, -1)])] == [*range(12)]


PRESENT = [1, 0, -2, 0.5, True, "", "nan", "-1", b"a", ("a", 1)]


@pytest.mark.parametrize("label", [-1, -1.0, np.nan, None, np.ma.masked, pd.NA, pd.NaT])
def test_missing(label):
    assert is_missing(label)
    assert is_missing(as_array("y", [label, 1]).tolist()[0])
    assert not any(map(is_missing, PRESENT))


@pytest.mark.parametrize("names", [["nano", "NA", "0", "-10"], [1, 2.5, np.int8(3)], [True], []])
def test_names_of_labels(names):
    check_names("y", names)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1, np.nan], [0.0, 1.0, np.nan]),
        ([b"a", b"b"], ["a", "b"]),
        (np.array([b"a", b"b"]), ["a", "b"]),
        (["a", 1], ["a", 1]),
        (np.ma.array([1, 2], mask=[True, False]), [None, 2]),
        (np.ma.array(["a", "b"], mask=[True, False]), [None, "b"]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_arrays_of_labels(labels, expected):
    assert str(as_array("y", labels).tolist()) == str(expected)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="y must hold lists of one length"):
        as_array("y", [[1], [2, 3]])
    with pytest.raises(ValueError, match=r"y must hold numbers or text, got Timestamp.*their text"):
        check_names("y", [pd.Timestamp("2020")])
