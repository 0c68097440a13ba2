# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What annotators take and refuse: answers, probabilities and graphs in any form."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from crowds import EDGES, SHORT, TRUTH, answers_to
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators

HOOD, NUMBERS, GRAPH = (
    Neighborhood(EDGES, 256),
    TRUTH.numpy(),
    Data(edge_index=EDGES, num_nodes=256),
)
TABLE, IDS = np.stack([NUMBERS] * 3, 1), [f"n{number}" for number in range(256)]
PROBS = pd.DataFrame(np.eye(3)[NUMBERS])


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float)


def other_order(table):
    return table.iloc[np.random.default_rng(0).permutation(256)]


#: The message, and arguments: answers, and others by name.
REFUSED = [
    ("hold none of annotator 1: leave that column out", TABLE * [1, 0, 0] - [0, 1, 1]),
    (r"answers must have shape \(256, M\), .* got \(256, 0\)", TABLE[:, :0]),
    (r"in the order of their numbers .*sort_index\(\), or", other_order(pd.DataFrame(TABLE))),
    (r"answers must lie in 0\.\.2, got 3 at .*: number from 0, or raise num_labels", TABLE + 1),
    (r"answers must hold integers, -1 or NaN.*got 0.5", TABLE / 2),
    ("got text: pandas.factorize", pd.DataFrame(TABLE).astype(str)),
    ("answers must be -1 where missing, got -2", torch.from_numpy(TABLE - 2)),
    (r"answers must have shape \(256, M\).*got \(3, 256\)", TABLE.T, {"graph": HOOD}),
    ("pred_probs must have its rows in the order of answers", pd.DataFrame(TABLE, index=IDS),
     {"pred_probs": other_order(pd.DataFrame(np.eye(3)[NUMBERS], index=IDS))}),
    (r"pred_probs must have shape \(256, 3\)", TABLE, {"pred_probs": torch.rand(256, 2)}),
    ("pred_probs must have rows that sum to one", TABLE, {"pred_probs": torch.rand(256, 3)}),
    ("pred_probs must be probabilities", TABLE, {"pred_probs": -torch.eye(3)[TRUTH]}),
    ("answers must be dense", torch.from_numpy(TABLE).to_sparse()),
    (r"graph holds node id 255, .* in 0\.\.199, the rows of answers", TABLE[:200]),
    ("graph must be a tensor, an array or a nested list", TABLE, {"graph": "edges"}),
    ("edge_attr belongs to a Neighborhood", TABLE, {"edge_attr": torch.zeros(9)}),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0][:40])
def test_refusals(row):
    message, answers, options = *row[:2], dict(*row[2:])
    graph = options.pop("graph", EDGES)
    with pytest.raises(ValueError, match=message):
        Annotators(3).fit(graph, answers, **options, **SHORT)


def test_refusals_of_options():
    with pytest.raises(TypeError, match="known"):  # of 0.3
        Annotators(3).fit(EDGES, TABLE, known=TRUTH)
    for name in ("num_labels", "num_types", "num_answers"):
        with pytest.raises(ValueError, match=name):
            Annotators(**{"num_labels": 2} | {name: 1})


def test_answers_in_every_form():
    answers = answers_to(TRUTH, [0.8, 0.7, 0.6])
    hole = answers.numpy() < 0
    frame = pd.DataFrame(answers.numpy(), columns=["ann", "bob", "eve"]).replace(-1, pd.NA)
    for form in (
        answers.numpy().astype("int8"),
        answers.double().masked_fill(answers < 0, math.nan).numpy(),
        np.ma.array(np.where(hole, 9, answers).astype("u2"), mask=hole),
        np.where(hole, None, answers.numpy()).tolist(),
        frame.astype("Int64"),
        frame.astype("Int64").astype(object).where(frame.notna(), None),
    ):
        found = Annotators(3).fit(GRAPH, form, **SHORT)
        assert torch.equal(found.answers, answers)
        assert torch.equal(found.predict(), found.probs.argmax(1))


def test_columns_of_probabilities():
    found = Annotators(3).fit(EDGES, TABLE, pred_probs=PROBS[[2, 0, 1]], **SHORT)
    np.testing.assert_allclose(found.priors["classifier"], PROBS, atol=1e-3)
