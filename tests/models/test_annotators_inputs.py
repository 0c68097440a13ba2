# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What annotators take and refuse: answers, known labels, probabilities and graphs in any form."""

import math

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from crowds import EDGES, PLACES, SHORT, TRUTH, answers_to
from scipy import sparse
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators

HOOD, NUMBERS, LABELS = Neighborhood(EDGES, 256), TRUTH.numpy(), ["ash", "birch", "cedar"]
NAMES, TABLE = np.array(LABELS)[NUMBERS], np.stack([NUMBERS] * 3, 1)
HOLES = np.arange(768).reshape(256, 3) % 4 == 0
GRAPH = Data(edge_index=EDGES, num_nodes=256)


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float)


TRIPLES = NAMES.repeat(3)


def long(label=TRIPLES, columns=("task", "worker", "label"), shift=0):
    task, worker = np.arange(256).repeat(3) + shift, np.tile(range(3), 256)
    return pd.DataFrame(dict(zip(columns, (task, worker, label), strict=True)))


def other_order(table):
    return table.iloc[np.random.default_rng(0).permutation(256)]


IDS = [f"n{number}" for number in range(256)]
PROBS = pd.DataFrame(np.eye(3)[NUMBERS])
#: The message, and arguments: answers, and others by name.
REFUSED = [
    ("hold none of annotator eve: leave that column out",
     pd.DataFrame({"ann": NAMES, "eve": [None] * 256})),
    ("hold none: all are -1", torch.full((256, 2), -1)),
    ("hold none: all are -1", TABLE[:, :0]),
    (r"another order than its index.*sort_index\(\), or", other_order(pd.DataFrame(TABLE))),
    (r"must name 4 labels, got 3.*; pass num_labels=3", long(), {"num_labels": 4}),
    ("must name 3 labels", np.stack([NAMES, PLACES[:, 1].numpy().astype(str)], 1)),
    (r"answers must lie in 0\.\.2, got 3: number from 0, or raise num_labels", TABLE + 1),
    (r"answers must hold integers, -1 or NaN.*got 0.5", TABLE / 2),
    ("answers must be -1 where missing, got -2", torch.from_numpy(TABLE - 2)),
    (r"answers must have shape \(256, M\).*got \(3, 256\)", TABLE.T, {"graph": HOOD}),
    ("answers must hold labels of one type, got",
     np.where(HOLES, NUMBERS[:, None].astype(str), TABLE.astype(object))),
    ("answers holds the text 'nan' .192 times", np.where(HOLES, "nan", NAMES[:, None])),
    ("known holds 'dog', which no annotator answers", NAMES[:, None],
     {"known": np.array(["dog"] * 256)}),
    ("known must name labels as answers do", NAMES[:, None], {"known": TRUTH}),
    ("known must hold integer labels", TABLE, {"known": NAMES}),
    ("known must hold integers.*got 0.5", TABLE, {"known": TRUTH / 2}),
    (r"known must lie in 0\.\.2.*got 3", TABLE, {"known": torch.full((256,), 3)}),
    ("known must have its rows in the order of answers", pd.DataFrame(TABLE, index=IDS),
     {"known": other_order(pd.Series(NUMBERS, index=IDS))}),
    (r"pred_probs must have the columns .*, got .*'Ash'", NAMES[:, None],
     {"pred_probs": PROBS.set_axis(["Ash", "Birch", "Cedar"], axis=1)}),
    (r"pred_probs must have shape \(256, 3\)", TABLE, {"pred_probs": torch.rand(256, 2)}),
    ("pred_probs must have rows that sum to one", TABLE, {"pred_probs": torch.rand(256, 3)}),
    ("pred_probs must be probabilities", TABLE, {"pred_probs": -torch.eye(3)[TRUTH]}),
    (r"node ids 0..255 as tasks, got 256: map ids to nodes", long(shift=1)),
    ("two labels of worker", long().assign(worker=0)),
    ("answers must be dense", sparse.csr_array(TABLE)),
    ("answers must be dense", torch.from_numpy(TABLE).to_sparse()),
    ("answers must have a row for each node, got 200", TABLE[:200]),
    ("graph must be PyG's Data.*a NetworkX graph, a data frame of edges", TABLE,
     {"graph": "edges"}),
    ("edge_attr belongs to a Neighborhood", TABLE, {"edge_attr": torch.zeros(9)}),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0][:40])
def test_refusals(row):
    message, answers, options = *row[:2], dict(*row[2:])
    graph, labels = options.pop("graph", EDGES), options.pop("num_labels", 3)
    with pytest.raises((ValueError, TypeError), match=message):
        Annotators(labels).fit(graph, answers, **options, **SHORT)


def test_refusals_of_constructors():
    for name in ("num_labels", "num_types", "num_answers"):
        with pytest.raises(ValueError, match=name):
            Annotators(**{"num_labels": 2} | {name: 1})


def forms():
    answers = answers_to(TRUTH, [0.8, 0.7, 0.6])
    names = np.array([*LABELS, ""])[answers.numpy()]
    wide = pd.DataFrame(answers.numpy(), columns=["ann", "bob", "eve"]).replace(-1, pd.NA)
    node, worker = (answers >= 0).nonzero(as_tuple=True)
    rows = {"task": node.numpy(), "worker": worker.numpy()}
    hole = answers.numpy() < 0
    return answers, {
        "small": answers.numpy().astype("int8"),
        "floats": answers.double().masked_fill(answers < 0, math.nan).numpy(),
        "masked": np.ma.array(np.where(hole, 9, answers).astype("u2"), mask=hole),
        "None": np.where(hole, None, answers.numpy()).tolist(),
        "wide": wide.astype("Int64").astype(object).where(wide.notna(), None),
        "long": pd.DataFrame(rows | {"label": answers[node, worker].numpy()}),
        "text in a frame": pd.DataFrame(names, columns=["ann", "bob", "eve"]),
        "text, masked": np.ma.array(np.where(hole, "zelkova", names), mask=hole),
        "text and None": np.where(hole, None, names.astype(object)).tolist(),
        "text, long": pd.DataFrame(rows | {"label": names[node, worker]}).sample(
            frac=1.0, random_state=0
        ),
    }


def test_answers_in_every_form():
    answers, tables = forms()
    for name, form in tables.items():
        torch.manual_seed(0)
        found = Annotators(3).fit(GRAPH, form, **SHORT)
        assert torch.equal(found.answers, answers), name
        assert found.labels == (LABELS if "text" in name else None), name
        numbers = found.probs.argmax(1)
        expected = np.array(LABELS)[numbers] if "text" in name else numbers
        assert (found.predict() == expected).all(), name
        if "frame" in name or name == "wide":
            assert found.annotators == ["ann", "bob", "eve"]


KNOWN = np.where(np.arange(256) < 9, NUMBERS, -1)


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        (TABLE, KNOWN.astype(">f4")),
        (TABLE, np.ma.array(np.where(KNOWN < 0, 2, KNOWN), mask=KNOWN < 0)),
        (NAMES[:, None], np.where(KNOWN < 0, "", NAMES)),
        (NAMES[:, None], np.ma.array(np.where(KNOWN < 0, "ash", NAMES), mask=KNOWN < 0)),
        (pd.DataFrame(TABLE, index=IDS), pd.Series(KNOWN, index=IDS)),
    ],
)
def test_known_labels_in_every_form(answers, known):
    found = Annotators(3).fit(EDGES, answers, known=known, **SHORT)
    assert found.field.known.tolist() == KNOWN.tolist()
    assert (found.predict()[:9] == (NUMBERS if found.labels is None else NAMES)[:9]).all()


def test_columns_of_probabilities():
    probs = pd.DataFrame(0.8 * np.eye(3)[NUMBERS] + 0.2 / 3)
    for answers, table in (
        (TABLE, probs[[2, 0, 1]]),
        (TABLE, probs.rename(columns=str)[["1", "2", "0"]]),
        (NAMES[:, None], probs.set_axis(LABELS, axis=1)[["cedar", "ash", "birch"]]),
    ):
        found = Annotators(3).fit(EDGES, answers, pred_probs=table, **SHORT)
        np.testing.assert_allclose(found.priors["classifier"], probs, atol=1e-6)


def test_names_of_rows():
    """Nodes of a graph are rows of a wide frame by their names."""
    graph = nx.relabel_nodes(nx.Graph([*EDGES.T.tolist()][::-1]), dict(enumerate(IDS)))
    sources = []
    for edges, table in ((EDGES, TABLE), (graph, pd.DataFrame(TABLE, index=IDS))):
        torch.manual_seed(0)
        sources.append(Annotators(3).fit(edges, table, **SHORT).field.hood.source)
    assert torch.equal(*sources)
    for table in (TABLE, long()):
        with pytest.raises(ValueError, match=r"got 'n\d+': networkx.relabel_nodes\(graph, {name"):
            Annotators(3).fit(graph, table, **SHORT)
