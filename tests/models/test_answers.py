# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Names of labels and annotators, and the order of rows."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.utils import grid

from pyro_nmm.models import Annotators

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
