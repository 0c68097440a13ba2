# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators as people have them: few answers each, own networks, numbers without names."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import grid

from pyro_nmm import Neighborhood
from pyro_nmm.checkpoints import fingerprint
from pyro_nmm.guides import HiddenFieldGuide
from pyro_nmm.models import Annotators, NormalEmission, accuracy, fit_field, information
from pyro_nmm.models.annotators import out_of_fold
from pyro_nmm.models.annotators.consensus import left_out_answers
from pyro_nmm.models.hidden import hidden_field
from pyro_nmm.models.hidden.field import matched

EDGES, PLACES = grid(12, 12)
TRUTH = (PLACES[:, 0] >= 6).long()
QUICK = {"num_steps": 20, "num_draws": 5}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)


def answers_of(number, right=0.8, each=None):
    """Of people who are asked about all nodes, or of ``each`` of many about a node."""
    answers = TRUTH[:, None] ^ (torch.rand(144, number) > right).long()
    if each:
        asked = torch.rand(144, number).argsort(1) < each
        answers = answers.masked_fill(~asked, -1)
    return answers


def test_pairs_of_many_people_with_few_answers():
    """Values are moderate, unknown where two people share no node, and can be printed."""
    answers = answers_of(40, each=3)
    found = Annotators(2).fit(EDGES, answers, **QUICK).pairs()
    shared = (answers >= 0).double()
    never = (shared.mT @ shared == 0).fill_diagonal_(False)
    for each in found:
        assert each.shape == (40, 40)
        assert each[never].isnan().all()
        assert each[each.isfinite()].abs().max() < 100
    assert found.excess[~never].isfinite().double().mean() > 0.6
    assert "40 annotators" in str(found)


def test_pairs_without_two_answers_are_unknown():
    found = Annotators(2).fit(EDGES, answers_of(4, each=1), **QUICK).pairs()
    off = ~torch.eye(4, dtype=torch.bool)
    assert found.excess.shape == (4, 4)
    assert found.excess[off].isnan().all()
    assert not found.found.any()


def test_answers_are_left_out_at_the_cost_of_answers():
    """Independent annotators take a sum; other ones, and this one of their kind, ask each time."""

    class Other(Annotators):
        def maximise(self, data, probs, values):
            found = super().maximise(data, probs, values)
            return found | {"more": torch.zeros(())}

    answers, part = answers_of(9, each=4), torch.arange(144) % 10
    answers[0, 1:] = -1  # one answer alone
    field = fit_field(Annotators(2), Neighborhood(EDGES, 144), answers, **QUICK)
    fields = field, replace(field, emission=Other(2))
    quick, slow = (left_out_answers(f, answers, field.probs, part) for f in fields)
    for name, one, other in zip(quick._fields, quick, slow, strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert not quick.others[quick.node == 0].any()


class Bag(torch.nn.Module):
    """What many users write first: dropout of the inputs."""

    def __init__(self):
        super().__init__()
        self.layer = SAGEConv(40, 2)

    def forward(self, x, edge_index):
        assert x.layout == torch.strided
        return self.layer(torch.nn.functional.dropout(x, 0.5, self.training), edge_index)


def test_a_network_gets_features_as_they_are(monkeypatch):
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 5)
    x = torch.zeros(144, 40)
    x[torch.arange(144), 20 * TRUTH + torch.arange(144) % 20] = 1  # a bag with one word
    Annotators(2).fit(Data(x, EDGES), answers_of(3), classifier=Bag(), **QUICK)


def test_a_classifier_of_one_label():
    """A part of the nodes may have answers of one label, or none."""
    learn = out_of_fold.OutOfFold(LogisticRegression(), Data(torch.randn(144, 2), EDGES))
    targets, rows = torch.tensor([[0.9, 0.1]]).repeat(144, 1), torch.arange(144) < 3
    found = learn(targets, rows)
    assert (found > 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(144))
    torch.testing.assert_close(learn(targets, rows & False), torch.full((144, 2), 0.5))


@pytest.mark.parametrize("kind", ["clusters", "types", "features"])
def test_known_labels_name_labels(kind):
    """One start of labels without names: sixteen known labels name them."""
    hits = []
    for number in range(2):
        torch.manual_seed(number)
        known = TRUTH.where(torch.randperm(144) < 16, -1)
        if kind == "features":
            hood, x = Neighborhood.grid(12, 12), 2.0 * TRUTH[:, None] + torch.randn(144, 1)
            found = fit_field(NormalEmission(2), hood, x, known=known, num_starts=1, **QUICK)
        else:
            options = {"num_types": 3} if kind == "types" else {"aligned": False}
            people = Annotators(2, **options)
            found = people.fit(EDGES, answers_of(3), known=known, num_starts=1, **QUICK)
        hits.append((found.predict() == TRUTH).double().mean())
    assert min(hits) > 0.8


def test_matched():
    agree = torch.tensor([[1.0, 5.0, 0.0], [4.0, 6.0, 0.0], [0.0, 0.0, 0.0]])
    assert matched(agree).tolist() == [0, 1, 2]


def test_text_that_names_no_labels():
    """Clusters of text: labels are numbers, in what is given and in what comes back."""
    texts = np.array(["a", "b", "c"])[(TRUTH[:, None] + answers_of(3)).numpy()]
    known = TRUTH.where(torch.arange(144) % 9 == 0, -1)
    probs = pd.DataFrame({"x": 1.0 - TRUTH.numpy(), "y": TRUTH.numpy()})
    people = Annotators(2, aligned=False)
    found = people.fit(EDGES, texts, known=known, pred_probs=probs, num_starts=1, **QUICK)
    assert found.labels is None
    assert (found.predict() == TRUTH).double().mean() > 0.9
    with pytest.raises(ValueError, match="known must hold integer labels"):
        people.fit(EDGES, texts, known=np.where(known.numpy() < 0, "-1", "a"), **QUICK)


def test_bytes_may_be_missing():
    texts = np.array([b"dog", b"cat"])[answers_of(3).numpy()]
    texts[::3, 0] = b"-1"
    found = Annotators(2).fit(EDGES, texts, **QUICK)
    assert found.labels == ["cat", "dog"]
    assert (found.answers[::3, 0] == -1).all()


def test_known_labels_replace_the_guess():
    known = TRUTH.where(torch.arange(144) % 4 == 0, -1)
    alone = Annotators(2).fit(EDGES, answers_of(1), **QUICK)
    assert "powers are defaults" in alone.summary()
    assert "defaults" not in Annotators(2).fit(EDGES, answers_of(1), known=known, **QUICK).summary()


def test_bad_levels_are_found_at_once(monkeypatch):
    found = Annotators(2).fit(EDGES, answers_of(3), **QUICK)
    monkeypatch.setattr("pyro_nmm.models.annotators.quality._by_label", None)
    for query in (accuracy, information):
        with pytest.raises(ValueError, match="level must lie between 0 and 1, got 90"):
            query(found, level=90)


class Network(torch.nn.Module):
    def __init__(self, relabel=None):
        super().__init__()
        self.alpha, self.relabel = torch.nn.Parameter(torch.ones(144, 2)), relabel
        self.dropout = torch.nn.Dropout()

    def forward(self, hood):
        return self.alpha.exp(), torch.zeros(hood.num_edges), self.relabel


def test_edges_of_a_field_do_not_relabel():
    hood, x = Neighborhood.grid(12, 12), torch.randn(144, 1)
    bad = Network(torch.arange(2).expand(hood.num_edges, 2))
    error = pytest.raises(ValueError, match="prior must return alpha and logits alone")
    with error:
        fit_field(NormalEmission(2), hood, x, prior=bad, **QUICK)
    pair = HiddenFieldGuide(NormalEmission(2), hood, x, prior=bad)
    with error:
        pair.guide()
    values = {"mean": torch.tensor([[0.0], [1.0]]), "variance": torch.ones(2, 1)}
    with error:
        hidden_field(hood, bad, NormalEmission(2), values, x)


def test_a_field_leaves_the_network_in_training():
    hood, x = Neighborhood.grid(12, 12), torch.randn(144, 1)
    pair = HiddenFieldGuide(NormalEmission(2), hood, x, prior=Network())
    field = pair.field(num_draws=2, num_sweeps=2)
    assert pair.network.training
    assert pair.network.dropout.training
    with torch.no_grad():
        pair.network.alpha.zero_()
    assert field.prior.alpha.mean() == 1  # a field does not change


def test_a_network_on_a_graph_of_edges():
    """Its own inputs, beside the sources that the graph gives."""
    answers = answers_of(3)

    class Alone(Network):
        def forward(self, hood):
            return torch.ones(hood.num_sources, 2) * self.alpha[:1].exp(), torch.zeros(
                hood.num_edges
            )

    assert Annotators(2).fit(EDGES, answers, prior=Alone(), **QUICK).probs.shape == (144, 2)


def test_settings_of_numpy_have_values():
    module = torch.nn.Dropout()
    lines = [dict(fingerprint({"module": module}, {"n": n})) for n in (np.int64(1), np.int64(2), 1)]
    assert lines[0] != lines[1]
    assert lines[0] == lines[2]
