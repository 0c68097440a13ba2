# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A consensus of annotators that also reads the nodes' features, through a classifier."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MLP, GraphSAGE, SAGEConv
from torch_geometric.utils import grid

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators
from pyro_nmm.models.annotators import out_of_fold as module
from pyro_nmm.models.annotators.consensus import ALONE
from pyro_nmm.models.annotators.out_of_fold import NUM_FOLDS, OutOfFold

EDGES, PLACES = grid(16, 16)
QUICK = {"num_steps": 30, "num_draws": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float)
    monkeypatch.setattr(module, "NUM_EPOCHS", 60)


def crowd():
    """Features that separate three labels, and few answers of three people: .5 are right."""
    truth = torch.randint(3, (256,))
    x = torch.randn(256, 4) + 2 * torch.nn.functional.one_hot(truth, 4)
    wrong = (truth[:, None] + torch.randint(1, 3, (256, 3))) % 3
    answers = torch.where(torch.rand(256, 3) < 0.6, truth[:, None], wrong)
    answers[torch.rand(256) < 0.5] = -1
    return Data(x, EDGES), answers, truth


def learned(classifier, data, truth):
    """Predictions after training on the true labels of all nodes."""
    targets = torch.nn.functional.one_hot(truth, 3).float()
    return OutOfFold(classifier, data)(targets, torch.ones(256, dtype=torch.bool))


class Nodewise(torch.nn.Module):
    """Features alone, whatever the edges."""

    def __init__(self, *widths):
        super().__init__()
        self.layer = MLP([4, *(widths or (3,))], norm=None)

    def forward(self, x, edge_index):
        return self.layer(x)


class Memory:
    """The label of a row that it has seen, else the last label, with the names of scikit-learn."""

    def fit(self, x, y):
        self.seen = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, x):
        found = [self.seen.get(row.tobytes(), self.classes_[-1]) for row in x]
        return (np.array(found)[:, None] == self.classes_).astype(float)


def test_no_node_is_predicted_from_its_own_label():
    data, _, truth = crowd()
    targets = torch.nn.functional.one_hot(truth % 2, 3).double()
    found = OutOfFold(Memory(), data)(targets, torch.ones(256, dtype=torch.bool))
    learned = torch.tensor([204, 205]).double()  # rows outside a fifth, and one more of each label
    sure, none = ((learned + 1) / (learned + 3), 1 / (learned + 3))
    # Never its own: labels with zeros would be remembered.
    assert torch.isclose(found[:, 1, None], sure).any(1).all()
    assert torch.isclose(found[:, 2, None], none).any(1).all()
    rows = torch.arange(256) < 128
    targets[128:] = torch.tensor([0.0, 0.0, 1.0]).double()
    found = OutOfFold(Memory(), data)(targets, rows)
    assert (found[:, 2] < 1 / 80).all()  # and nothing is learned from other rows


def test_a_network_learns_uncertain_labels(monkeypatch):
    """Probabilities of one feature: the logits' slope comes back."""
    x = torch.randn(3000, 4)
    targets = torch.stack([3 * x[:, 0], -3 * x[:, 0], 0 * x[:, 0]], 1).softmax(-1)
    edges = torch.empty(2, 0, dtype=torch.long)
    monkeypatch.setattr(module, "NUM_EPOCHS", 300)
    monkeypatch.setattr(module, "LR", 0.03)
    found = OutOfFold(Nodewise(), Data(x, edges))(targets, torch.ones(3000, dtype=torch.bool))
    assert (found - targets).abs().mean() < 0.03


def test_training_stops_before_it_learns_noise(monkeypatch):
    """Labels that features say nothing about: predictions stay near the shares of the labels."""
    x, shares = torch.randn(256, 4), torch.tensor([0.6, 0.3, 0.1])
    labels = torch.distributions.Categorical(shares).sample((256,))
    given = torch.nn.functional.one_hot(labels, 3).double(), torch.ones(256, dtype=torch.bool)
    network, data = Nodewise(64, 3), Data(x, EDGES)
    monkeypatch.setattr(module, "NUM_EPOCHS", 400)
    losses = []
    for held_out in (10, 1000):  # a thousandth of 256 nodes is none
        monkeypatch.setattr(module, "HELD_OUT", held_out)
        found = OutOfFold(network, data)(*given)
        losses.append(-found.gather(1, labels[:, None]).log().mean())
    assert losses[0] < losses[1] - 0.1


@pytest.mark.slow
def test_batches_of_a_large_graph(monkeypatch):
    """A batch has all that the network reads for its seeds, and trains as well as the graph."""
    data, _, truth = crowd()
    data.x, network = data.x[:, :3].contiguous(), GraphSAGE(3, 8, 2, 3)
    edges = data.edge_index, torch.arange(256)
    for name, value in {"LARGE": 100, "BATCH": 9, "NUM_NEIGHBORS": 100}.items():
        monkeypatch.setattr(module, name, value)
    rows = torch.ones(256, dtype=torch.bool)
    learn = OutOfFold(network, data)
    inputs, place, seeds = learn._batch(network, data.x, *edges)
    assert len(inputs[0]) < 256
    torch.testing.assert_close(
        network(*inputs)[place], network(data.x, data.edge_index)[seeds], atol=1e-5, rtol=0
    )
    monkeypatch.setattr(module, "NUM_NEIGHBORS", 2)
    found = learn(torch.nn.functional.one_hot(truth, 3).double(), rows)
    assert (found.argmax(1) == truth).double().mean() > 0.6
    few = torch.arange(256) < 5  # no node is held out
    assert learn(found, few).isfinite().all()
    with pytest.raises(ValueError, match="no cached layer in a graph of more than 100 nodes"):
        OutOfFold(GCN(3, 8, 2, 3, cached=True), data)(found, rows)
    words = Data(module._sparse((torch.rand(256, 40) < 0.05).float()), EDGES)
    assert OutOfFold(None, words)(found, rows).shape == (256, 3)


def test_the_default_network_is_a_gcn():
    """Of PyG: values and gradients, of dense and of sparse features, on edges of one direction."""
    edges, x = torch.randint(40, (2, 150)), (torch.rand(40, 30) < 0.05).float()
    ours, theirs = module._GCN(30, 3).eval(), GCN(30, 64, 2, 3).eval()
    for layer, weight in zip(theirs.convs, ours.weights, strict=True):
        layer.lin.weight.data = weight.data.T.clone()
    expected = theirs(x, edges)
    expected.square().sum().backward()
    for features in (x, module._Kept(module._sparse(x))):
        ours.zero_grad()
        found = ours(features, module._normalized(edges, 40))
        found.square().sum().backward()
        torch.testing.assert_close(found, expected)
        for layer, weight, bias in zip(theirs.convs, ours.weights, ours.biases, strict=True):
            torch.testing.assert_close(weight.grad, layer.lin.weight.grad.T, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(bias.grad, layer.bias.grad, atol=1e-4, rtol=1e-4)


def test_folds_have_networks_of_their_own(monkeypatch):
    """A network as it was is unchanged, and layers draw their parameters anew."""
    data, _, truth = crowd()
    network = Nodewise()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    targets, rows = torch.nn.functional.one_hot(truth).double(), torch.ones(256, dtype=torch.bool)
    monkeypatch.setattr(module, "NUM_EPOCHS", 0)
    found = OutOfFold(network, data)(targets, rows)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    same = torch.isclose(network(data.x, data.edge_index).softmax(-1).double(), found).all(1)
    assert same.sum() < 256 / NUM_FOLDS


@pytest.mark.parametrize("kind", ["default", "network", "rows", "probabilities"])
def test_features_help(kind):
    """Labels without a graph: neighbours are random, and features separate the labels."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    data, answers, truth = crowd()
    torch.manual_seed(0)
    without = Annotators(3).fit(data.edge_index, answers, **QUICK)
    options = {
        "default": {},
        "network": {"classifier": Nodewise()},
        "rows": {"classifier": sklearn.LogisticRegression()},
        "probabilities": {"pred_probs": (2 * data.x[:, :3]).softmax(-1).numpy()},
    }
    torch.manual_seed(0)
    found = Annotators(3).fit(data, answers, **options[kind], **QUICK)
    assert list(found.powers) == ["shares", "walk", "potts", "classifier", "answers"]
    assert "classifier" in found.summary()

    def score(consensus, rows):
        return -consensus.probs[rows].gather(1, truth[rows, None]).log().mean()

    answered = (answers >= 0).any(1)
    if kind != "default":  # a GCN mixes the features of neighbours, which have other labels here
        assert score(found, answered) < score(without, answered) - 0.1
        assert score(found, ~answered) < score(without, ~answered) - 0.2
    assert found.pairs().excess.isfinite().all()


def test_progress_covers_the_classifier():
    data, answers, _ = crowd()
    ranges = []
    options = QUICK | {"progress": lambda steps: ranges.append(steps) or steps}
    Annotators(3).fit(data, answers, classifier=Memory(), **options)
    assert ranges == [range(30), range(NUM_FOLDS), range(NUM_FOLDS)]  # the field, and two rounds


def test_one_annotator_and_known_labels():
    data, answers, truth = crowd()
    data.x[:, 3] = truth
    one = Annotators(3).fit(data, answers[:, :1], classifier=Nodewise(), **QUICK)
    weight = 1 - one.powers["shares"]
    assert one.powers["answers"] == pytest.approx(weight * ALONE + 1 - weight)
    assert weight > 0.5  # the classifier predicts answers
    assert one.powers["walk"] < 0.1  # the graph predicts no answer
    known = truth.where(torch.arange(256) < 60, -1)
    found = Annotators(3).fit(data, answers[:, :1], classifier=Nodewise(), known=known, **QUICK)
    assert (found.probs[:60].argmax(1) == truth[:60]).all()
    assert found.powers != one.powers


def test_sparse_features():
    """Words: the same fit from a dense matrix, which becomes sparse, and from a sparse one."""
    answers = crowd()[1]
    words = (torch.rand(256, 40) < 0.05).float()
    kept = []
    for x in (words, module._sparse(words)):
        assert module._sparse(x).layout == torch.sparse_csr
        torch.manual_seed(0)
        kept.append(Annotators(3).fit(Data(x, EDGES), answers, **QUICK).probs)
    torch.testing.assert_close(*kept)
    rows = torch.ones(256, dtype=torch.bool)
    targets = torch.nn.functional.one_hot(answers[:, 0].clamp(min=0), 3).double()
    found = OutOfFold(Memory(), Data(module._sparse(words), EDGES))(targets, rows)
    torch.testing.assert_close(
        found.sum(1), torch.ones(256).double()
    )  # rows of a sparse matrix reach scikit-learn
    network = GCN(40, 8, 2, 3)
    assert network(module._sparse(words), EDGES).shape == (256, 3)


def test_a_classifier_of_one_label():
    """A part of the nodes may have answers of one label, or none."""
    learn = OutOfFold(LogisticRegression(), Data(torch.randn(256, 2), EDGES))
    targets, rows = torch.tensor([[0.9, 0.1]]).repeat(256, 1), torch.arange(256) < 3
    found = learn(targets, rows)
    assert (found > 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(256))
    torch.testing.assert_close(learn(targets, rows & False), torch.full((256, 2), 0.5))


class NotANumber(LogisticRegression):
    def predict_proba(self, X):
        return super().predict_proba(X) * np.where(np.arange(len(X)) == 7, np.nan, 1)[:, None]


class Diverged(Nodewise):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) / 0


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("classifier must be a network, or have fit and predict_proba", {"classifier": "forest"}),
        (r"pred_probs must have shape \(256, 3\)", {"pred_probs": torch.rand(256, 2)}),
        ("pred_probs must have rows that sum to one", {"pred_probs": torch.rand(256, 3)}),
        ("be probabilities", {"pred_probs": torch.eye(3).repeat(86, 1)[:256] * 2 - 1 / 3}),
        ("pred_probs must be a floating-point", {"pred_probs": torch.ones(256, 3).long()}),
        ("not both", {"pred_probs": torch.ones(256, 3) / 3, "classifier": Nodewise()}),
        ("classifier must return logits", {"classifier": Nodewise(2)}),
        ("requires_grad: .* as pred_probs", {"classifier": Nodewise().requires_grad_(False)}),
        (r"1 of 256 rows .* not finite, first row 7", {"classifier": NotANumber()}),
        ("logits of classifier must not be NaN", {"classifier": Diverged()}),
        ("classifier must have predict_proba, got LinearSVC", {"classifier": LinearSVC()}),
        (
            "classifier needs features",
            {"classifier": Nodewise(), "graph": Neighborhood(EDGES, 256)},
        ),
        (r"graph.x must be finite, got nan at \[3, 1\]", {"graph": "nan"}),
    ],
)
def test_refusals(message, options):
    data, answers, _ = crowd()
    if (graph := options.get("graph", data)) == "nan":
        graph = data
        graph.x[3, 1] = torch.nan
    options = {name: value for name, value in options.items() if name != "graph"}
    with pytest.raises(ValueError, match=message):
        Annotators(3).fit(graph, answers, **options, **QUICK)


class Bag(torch.nn.Module):
    """What many users write first: dropout of the inputs, here above a frozen layer."""

    def __init__(self):
        super().__init__()
        self.frozen, self.layer = torch.nn.Linear(4, 4), SAGEConv(4, 3)
        self.frozen.requires_grad_(False).weight.data = torch.eye(4)

    def forward(self, x, edge_index):
        assert x.layout == torch.strided
        assert torch.equal(self.frozen.weight, torch.eye(4))
        x = torch.nn.functional.dropout(self.frozen(x), 0.2, self.training)
        return self.layer(x, edge_index)


@pytest.mark.parametrize(
    "kind",
    [Bag(), StackingClassifier([("a", LogisticRegression())], cv=2)],
    ids=["network", "rows"],
)
def test_classifiers_of_many_kinds(kind):
    """A frozen layer stays as it is; a stack has probabilities after its fit only; NumPy's data."""
    data, _, truth = crowd()
    expected = learned(kind, data, truth)
    assert (expected.argmax(1) == truth).double().mean() > 0.6
    torch.manual_seed(0)
    one = Annotators(3).fit(data, crowd()[1], classifier=Memory(), **QUICK).probs
    torch.manual_seed(0)
    arrays = Data(data.x.numpy(), data.edge_index.numpy())
    assert torch.equal(
        Annotators(3).fit(arrays, crowd()[1], classifier=Memory(), **QUICK).probs, one
    )
