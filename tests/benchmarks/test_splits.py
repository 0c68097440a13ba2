# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What methods may see: splits, folds, answers, and the settings that searches choose."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

import benchmarks.crowds.run as crowds
import benchmarks.links.run as links
from benchmarks.links.data import link_split
from benchmarks.links.run import LinksSAGE
from benchmarks.nodes import fits
from benchmarks.on_top import data, rivals
from benchmarks.tabular.run import KINDS, Table, log_probs
from pyro_nmm.sparse import identity


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_")
def test_annotators_skip_what_they_learned_from():
    graph = crowds.digits(None, 0)
    assert ((graph.answers < 0).sum(0) == crowds.ROWS).all()
    hits = [(column == graph.y)[column >= 0].double().mean() for column in graph.answers.T]
    assert all(0.35 < hit < 0.85 for hit in hits)


def test_controls_have_the_same_confusions():
    """Of every annotator, and no dependence of two who always agree."""
    y = torch.arange(3000) % 3
    guess = torch.where(torch.rand(3000) < 0.4, torch.randint(3, (3000,)), y)
    found = crowds.independent(torch.stack([guess, guess], 1), y, torch.Generator().manual_seed(0))
    for column in found.T:
        for label in range(3):
            numbers = column[y == label].bincount(minlength=3)
            assert numbers.tolist() == guess[y == label].bincount(minlength=3).tolist()
    right, agree = (guess == y).double().mean(), (found[:, 0] == found[:, 1]).double().mean()
    assert agree < right**2 + (1 - right) ** 2 + 0.03


def test_no_new_label_recalibrates_itself():
    y, seen = torch.randint(2, (30,)), []
    new, known = torch.arange(30) < 20, torch.arange(30) > 24

    def make(given):
        seen.append(given)
        return torch.full((30, 2), 0.5)

    rivals.by_folds(make, Data(y=y, train_mask=known, val_mask=new))
    whole, *folds = seen
    assert torch.equal(whole, known | new)
    left_out = torch.stack([(known | new) & ~given for given in folds])
    assert torch.equal(left_out.sum(0), new.long())


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


class Pointer:
    """Bytes that NumPy would take for the address of an object."""

    def __reduce__(self):
        return np.ndarray, ((1,), np.dtype(object), bytes(8))


def test_published_splits_run_no_code(tmp_path, capsys):
    """Folds of equal and of different sizes are read; a pickle of anything else is refused."""
    path = tmp_path / "split.npz"
    different = np.array([np.arange(2), np.arange(2, 4), np.arange(4, 5)], dtype=object)
    for stored in (np.arange(6).reshape(3, 2), different):
        np.savez(path, k_fold_indices=stored, test_indices=np.array([7, 8]))
        folds, test = data.published(path)
        assert [fold.tolist() for fold in folds] == [fold.tolist() for fold in stored]
        assert test.tolist() == [7, 8]
    for part, error in ((Harmful(), pickle.UnpicklingError), (Pointer(), IndexError)):
        np.savez(path, k_fold_indices=np.array([part, None], object), test_indices=np.array([7]))
        with pytest.raises(error):
            data.published(path)
    assert capsys.readouterr().out == ""


def test_training_stops_when_no_loss_is_equalled():
    """Kept is the last epoch at which both losses are the least so far."""
    losses = [(0.5, 0.9), (0.4, 0.8), (0.4, 0.85), (0.4, 0.8), (0.6, 0.7), (0.6, 0.9), (0.6, 0.9)]
    seen = iter(range(7))
    assert data.stopped_early(seen, losses.__getitem__, patience=1) == 3
    assert next(seen) == 6  # the rest was not trained
    assert data.stopped_early(iter(range(7)), losses.__getitem__, patience=3) == 3


def search(scores, **more):
    return [
        {"task": "search", "trial": trial, "seed": seed, "settings": {"lr": trial}}
        | {"val": dict(zip(("accuracy", "nll", "AP"), value, strict=False))} | more
        for trial, values in scores.items() for seed, value in enumerate(values)
    ]  # fmt: skip


def test_settings_follow_validation_alone():
    """The best mean accuracy, then likelihood; of links average precision, or the NMM's bound."""
    rows = search({0: [(0.7, 0.9), (0.8, 0.9)], 1: [(0.7, 0.5), (0.8, 0.5)], 2: [(0.6, 0.1)] * 2})
    assert fits.chosen(rows) == fits.DEFAULT | {"lr": 1}
    with pytest.raises(ValueError, match="not been finished"):
        fits.chosen(rows[:3])
    scores = {0: [(0, 0, 80.0), (0, 0, 90.0)], 1: [(0, 0, 84.0), (0, 0, 88.0)]}
    rows = search(scores, dataset="cora", guide="sage")
    rows += search({9: [(0, 0, 99.0)]}, dataset="cora", guide="vgae")
    assert links.chosen(rows, "pubmed", "sage") == {"lr": 1}
    with pytest.raises(ValueError, match="search of nips12 sage"):
        links.chosen(rows, "nips12", "sage")
    bounds = [row | {"guide": "nmm", "loss": 0.5 + row["trial"]} for row in rows]
    assert links.chosen(bounds, "cora", "nmm") == {"lr": 0}


def test_random_splits_of_links():
    """Every link is in one part, with as many pairs without one, and draws are the seed's alone."""
    edge_index, state = KarateClub()[0].edge_index, torch.get_rng_state()
    split, again, other = (link_split(edge_index, 34, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    parts = [{tuple(sorted(pair)) for pair in part.T.tolist()} for part in split]
    train, val, val_false, test, test_false = parts
    assert [len(part) for part in parts] == [68, 3, 3, 7, 7]
    links = {tuple(sorted(pair)) for pair in edge_index.T.tolist()}
    assert train | val | test == links
    assert len(val_false | test_false) == 10
    assert not (val_false | test_false) & links
    assert all(torch.equal(a, b) for a, b in zip(split, again, strict=True))
    assert not torch.equal(split.test, other.test)


def test_graphsage_does_not_see_what_it_is_asked(monkeypatch):
    low, high = torch.triu_indices(20, 20, 1)
    kept, seen = torch.rand(len(low)) < 0.3, []
    train = link_split(torch.stack([low[kept], high[kept]]), 20, seed=0).train
    network = LinksSAGE(20, hidden=8)
    logits = network.logits

    def spied(pairs, x, edge_index):
        seen.extend({tuple(pair) for pair in part.T.tolist()}
                    for part in (*pairs.chunk(2, 1), edge_index))  # fmt: skip
        return logits(pairs, x, edge_index)

    monkeypatch.setattr(network, "logits", spied)
    network.loss(identity(20), train)
    (asked, false, shown), known = seen, {tuple(pair) for pair in train.T.tolist()}
    assert not asked & shown
    assert asked | shown <= known
    assert len(shown) + 2 * len(asked) == len(known)
    assert not false & known


def blobs(number, labelled, **options):
    rows, labels = make_blobs(number, 2, random_state=0, **options)
    make = partial(KINDS["logistic regression"], 0)
    return Table(rows, labels, np.arange(labelled), np.arange(labelled, number), make)


def test_folds_hold_out_every_label_once():
    table = blobs(90, 45, centers=3)
    assert np.bincount(table.folds[:45]).tolist() == [9] * 5
    assert (table.folds[45:] == -1).all()
    scores, y = table.held_out(table.parts)
    assert torch.equal(y, torch.from_numpy(table.labels[:45]))
    rest = (table.folds >= 0) & (table.folds != table.folds[3])
    fit = table.make().fit(table.rows[rest], table.labels[rest])
    expected = log_probs(fit.predict_proba(table.rows[3:4]))[0]
    torch.testing.assert_close(scores[3], expected)
