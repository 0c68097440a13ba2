# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Names of labels and annotators, and the order of rows."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import grid

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators, CopyingAnnotators, fit_field
from pyro_nmm.models.annotators.answers import edges_and_size, known_labels, read_answers

EDGES, PLACES = grid(16, 16)
NAMES = np.array(["ash", "birch", "cedar"])[(PLACES[:, 0] * 3 // 16).long()]
QUICK = {"num_steps": 20, "num_draws": 5}


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float)


def test_names_are_those_of_all_labels():
    """A label that nobody answers has a name if categories give one, and a column."""
    label, worker = np.tile(NAMES, 3), np.repeat(["ann", "bob", "eve"], 256)
    frame = pd.DataFrame({"task": np.arange(768) % 256, "worker": worker, "label": label})
    with pytest.raises(ValueError, match=r"must name 4 labels, got 3.*; pass num_labels=3, or"):
        Annotators(4).fit(EDGES, frame, **QUICK)
    names = ["ash", "birch", "cedar", "zelkova"]
    frame["label"] = pd.Categorical(label, categories=names[::-1])
    known = np.where(np.arange(256) < 3, "zelkova", None)
    found = Annotators(4).fit(EDGES, frame, known=known, **QUICK)
    assert found.labels == names
    assert (pd.DataFrame(found.probs, columns=found.labels)["zelkova"][:3] > 0.9).all()
    assert (found.predict()[3:] == NAMES[3:]).mean() > 0.9


def test_rows_in_another_order_than_the_index():
    wide = pd.DataFrame({"ann": NAMES, "bob": NAMES}).sample(frac=1, random_state=0)
    with pytest.raises(ValueError, match=r"another order than its index.*sort_index\(\), or"):
        Annotators(3).fit(EDGES, wide, **QUICK)
    found = Annotators(3).fit(EDGES, wide.sort_index(), **QUICK)
    assert (found.predict() == NAMES).mean() > 0.9
    other = wide.sort_index().set_index(np.arange(256) + 1000)  # ids of another kind are not read
    assert (Annotators(3).fit(EDGES, other, **QUICK).predict() == NAMES).mean() > 0.9


def test_an_annotator_without_answers_has_a_name():
    wide = pd.DataFrame({"ann": NAMES, "eve": [None] * 256})
    with pytest.raises(ValueError, match="none of annotator eve: leave that column out"):
        Annotators(3).fit(EDGES, wide, **QUICK)
    with pytest.raises(ValueError, match="holds no answer"):
        Annotators(3).fit(EDGES, torch.full((256, 2), -1), **QUICK)


def test_columns_of_probabilities_with_other_names():
    names = ["Ash", "Birch", "Cedar"]
    probs = pd.DataFrame(torch.rand(256, 3).softmax(-1).numpy(), columns=names)
    with pytest.raises(ValueError, match=r"pred_probs must have the columns .*, got .*'Ash'"):
        Annotators(3).fit(EDGES, NAMES[:, None], pred_probs=probs, **QUICK)


CPU, NUMBERS = torch.device("cpu"), np.searchsorted(["ash", "birch", "cedar"], NAMES)
TABLE = np.stack([NUMBERS, NUMBERS, NUMBERS], 1)
HOLES = np.arange(768).reshape(256, 3) % 4 == 0


def read(data):
    return read_answers(data, 256, CPU)


@pytest.mark.parametrize("text", ["-1.0", "nan", "NaN", "None", "<NA>", "NaT", "null", " "])
def test_text_of_a_missing_value(text):
    names = np.where(HOLES, text, NAMES[:, None])
    for answers in (names, names.astype(object), pd.DataFrame(names), names.tolist()):
        with pytest.raises(ValueError, match=f"answers holds the text '{text}' .192 times"):
            Annotators(4).fit(EDGES, answers)
    known = np.where(np.arange(256) < 9, NAMES, text)
    with pytest.raises(ValueError, match=f"known holds the text '{text}' .247 times"):
        CopyingAnnotators(3).fit(EDGES, NAMES[:, None], known=known)


def test_answers_of_several_types():
    mixed = np.where(HOLES, NUMBERS[:, None].astype(str), TABLE.astype(object))
    for answers in (mixed, mixed.tolist(), np.where(HOLES, NAMES[:, None].astype(object), TABLE)):
        with pytest.raises(ValueError, match=r"answers must hold labels of one type, got"):
            read(answers)


@pytest.mark.parametrize(
    "answers",
    [
        np.ma.array(np.where(HOLES, 9, TABLE), mask=HOLES),
        np.ma.array(np.where(HOLES, 9, TABLE).astype("u2"), mask=HOLES),
        np.ma.array(np.where(HOLES, "zelkova", NAMES[:, None]), mask=HOLES),
        np.where(HOLES, None, TABLE).tolist(),
        np.where(HOLES, None, NAMES[:, None]).tolist(),
        np.where(HOLES, -1, TABLE).astype(">i4"),
        torch.from_numpy(np.where(HOLES, np.nan, TABLE)).half(),
    ],
)
def test_missing_answers_of_every_form(answers):
    assert read(answers).table.tolist() == np.where(HOLES, -1, TABLE).tolist()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_answers_and_known_labels(dtype):
    table = torch.from_numpy(TABLE).to(dtype)
    for answers in (table, table.numpy()):
        assert read(answers).table.tolist() == TABLE.tolist()
        known = known_labels(answers[:, 0], 256, 3, CPU)
        assert known.dtype == torch.long
        assert known.tolist() == NUMBERS.tolist()


def test_a_masked_label_is_unknown():
    unknown = np.arange(256) >= 9
    expected, mask = np.where(unknown, -1, NUMBERS).tolist(), np.where(unknown, 2, NUMBERS)
    assert known_labels(np.ma.array(mask, mask=unknown), 256, 3, CPU).tolist() == expected
    names = np.ma.array(np.where(unknown, "ash", NAMES), mask=unknown)
    assert known_labels(names, 256, ["ash", "birch", "cedar"], CPU).tolist() == expected
    hood = Neighborhood(EDGES, 256)
    given = {"known": np.ma.array(mask, mask=unknown)} | QUICK
    assert fit_field(Annotators(3), hood, torch.from_numpy(TABLE), **given).known.tolist() == (
        expected
    )


@pytest.mark.parametrize("name", ["known", "pred_probs"])
def test_rows_beside_the_answers(name):
    """An index in another order is refused, of numbers or the answers' own."""
    order, ids = np.random.default_rng(0).permutation(256), [f"n{i}" for i in range(256)]
    table = pd.Series(NUMBERS) if name == "known" else pd.DataFrame(np.eye(3)[NUMBERS])
    with pytest.raises(ValueError, match=f"{name} has rows in another order than its index"):
        Annotators(3).fit(EDGES, TABLE, **{name: table.iloc[order]}, **QUICK)
    answers, table = pd.DataFrame(TABLE, index=ids), table.set_axis(ids)
    with pytest.raises(ValueError, match=rf"{name} must have its rows in the order of answers"):
        Annotators(3).fit(EDGES, answers, **{name: table.iloc[order]}, **QUICK)
    Annotators(3).fit(EDGES, answers, **{name: table}, **QUICK)


def test_columns_of_probabilities_with_numbers():
    probs = pd.DataFrame(0.8 * np.eye(3)[NUMBERS] + 0.2 / 3)
    for given in (probs[[2, 0, 1]], probs.rename(columns=str)[["1", "2", "0"]]):
        found = Annotators(3).fit(EDGES, TABLE, pred_probs=given, **QUICK)
        np.testing.assert_allclose(found.priors["classifier"], probs, atol=1e-6)


@pytest.mark.parametrize("labels", [TABLE.ravel(), NAMES.repeat(3)])
def test_long_answers_with_other_names(labels):
    """Of crowd-kit before its columns had these names, and of other libraries."""
    question, performer = np.arange(256).repeat(3), np.tile(range(3), 256)
    long = pd.DataFrame({"question": question, "performer": performer, "answer": labels})
    for graph, rows in ((EDGES, 768), (EDGES, 256), (Neighborhood(EDGES, 256), 768)):
        with pytest.raises(ValueError, match=r"needs the columns task, worker, label, got .'quest"):
            Annotators(3).fit(graph, long[:rows])


@pytest.mark.parametrize(
    "graph",
    [
        nx.Graph([*EDGES.T.tolist()]),
        pd.DataFrame(EDGES.T.numpy(), columns=["source", "target"]),
        Data(edge_index=EDGES.numpy(), num_nodes=256),
        EDGES.numpy()[::-1],
        EDGES.numpy().astype(">i4"),
        EDGES.to(torch.uint16),
    ],
)
def test_graphs_of_any_library(graph):
    edges, size = edges_and_size(graph, TABLE)
    assert size == 256
    assert torch.equal(Neighborhood(edges, 256).source, Neighborhood(EDGES, 256).source)
