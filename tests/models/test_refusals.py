# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Refusals of fields, emissions, scores and data sets, a line each."""

import pytest
import torch
from graphs import house
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import (
    letters,
    random_split,
)
from pyro_nmm.models import (
    Compatibility,
    FreeNMM,
    MarginalField,
    NormalEmission,
    PairwiseMRF,
    PooledScores,
    StackedNMM,
    annealed_log_normalizer,
    coarse_to_fine,
    compatibility,
    grid_edges,
    ising,
    ising_posterior,
    nmm,
    potts,
    temperature_scaling,
)

NAN, INF = float("nan"), float("inf")


def ids(*values):
    return torch.tensor(values)


EDGE, PAIRS, ZERO = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0], [1]]), torch.zeros(5).long()
PATH = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
GRID, EYE = grid_edges(1, 3), torch.eye(2)
NORMAL = {"mean": torch.zeros(2, 1), "variance": torch.ones(2, 1)}
FEATURES = torch.tensor([[0.0], [1.0], [NAN]])


def field(**changes):
    parts = ising(GRID, 0.3, torch.zeros(3))
    names = "edges", "unary", "strength", "interaction"
    return PairwiseMRF(**{name: getattr(parts, name) for name in names} | changes)


def annealed(start=None, **options):
    return annealed_log_normalizer(field(), torch.ones(3, 2) if start is None else start, **options)


FIELDS = [
    *((lambda name=name: field(**{name: EYE.numpy()}), rf"{name} must .*, got .*ndarray")
      for name in ("edges", "unary", "strength", "interaction")),
    (lambda: field(interaction=EYE / 0), "interaction must be"),
    (lambda: field().log_potential(ids(0, -7, 0)), r"hold labels in 0\.\.1, got -7"),
    (lambda: field().log_potential(torch.zeros(3)), "value must hold integer labels .*float64"),
    (lambda: field().log_prob(ids(0, 2, 0)), r"value must hold labels in 0\.\.1, got 2"),
    (lambda: field().local_logits(EYE), r"probs must have shape \(..., 3, 2\)"),
    (lambda: field().sample((0.5,)), "sample_shape must hold integers"),
    (lambda: MarginalField(field()).sample("a"), "sample_shape must hold integers"),
    (lambda: MarginalField(field()).complete([2]), r"value must hold labels in 0\.\.1, got 2"),
    (lambda: ising(GRID, "word", torch.zeros(3)), "coupling must be a tensor, an array"),
    (lambda: ising(GRID, 0.3, torch.tensor(0.0)), r"field must have shape \(..., N\)"),
    (lambda: ising(GRID, NAN, torch.zeros(3)), "strength must be finite, got nan"),
    (lambda: potts(GRID, 0.3, torch.tensor(0.0)), r"unary must have shape \(..., N, C\)"),
    (lambda: potts(GRID, [0.3, INF], torch.zeros(3, 2)), "strength must be finite, got inf"),
    (lambda: ising_posterior(torch.zeros(0, 3)), r"image must have shape \(height, width\)"),
    (lambda: ising_posterior(torch.zeros(2, 3).long()), "image must be a floating-point tensor"),
    (lambda: ising_posterior(torch.zeros(2, 3), sigma=NAN), "sigma must be positive"),
    (lambda: grid_edges(2, NAN), "width must be an integer of at least 1, got nan"),
    (lambda: coarse_to_fine("3", 3), "height must be an integer of at least 1, got '3'"),
    (lambda: annealed(num_steps=1.5), "num_steps must be an integer of at least 1, got 1.5"),
    (lambda: annealed(torch.full((3, 2), NAN)), "start must be finite and not negative, got nan"),
    (lambda: NormalEmission(2).start(FEATURES, Neighborhood.grid(1, 4)), r"data must have shape"),
    (lambda: NormalEmission(2).start(FEATURES, None), "hood must be a Neighborhood"),
    (lambda: NormalEmission(2).start(FEATURES / 0, PATH), "data must be finite or NaN"),
    (lambda: NormalEmission(2).log_prob(NORMAL, FEATURES.T), r"data must have shape \(N, 1\)"),
    (lambda: NormalEmission(2).log_prob(NORMAL, [[0.5]]), "data must be a floating-point tensor"),
    (lambda: NormalEmission(2).log_prob(NORMAL, FEATURES / 0), "data must be finite or NaN"),
]  # fmt: skip

PROBS, LABELS, TWO = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), ids(0, 1), ids(True, True)
IMAGE = torch.zeros(3, 8, 8)
SMALL = Neighborhood(EDGE, 2)
MASKS = {f"{name}_mask": torch.eye(4) > 0 for name in ("train", "val", "test")}
SPLIT = Data(num_nodes=4, y=torch.zeros(4), **MASKS)


def scaled(scores=PROBS, y=LABELS, held_out=TWO):
    return temperature_scaling(scores, y, held_out)


def counted(y=LABELS, observed=TWO, num_classes=2):
    return compatibility(SMALL, y, observed, num_classes)


SCORES = [
    (lambda: random_split(SPLIT, NAN, 0.3, 0.3, 0), "train, val and test must .* got nan"),
    (lambda: random_split(SPLIT, 0.3, "3", 0.3, 0), "train, val and test must .* 3, 0.3 of"),
    (lambda: random_split(SPLIT, 0.3, 0.3, 0.3, "a"), "seed must be an integer, got 'a'"),
    (lambda: letters("A", 4.5, 4), "height must be an integer of at least 1, got 4.5"),
    (lambda: letters(" ", 4, 4), "text must hold letters"),
    (lambda: letters("A", 4, 4, margin=0.5), "margin be less than 0.5, got 'A' and 0.5"),
    (lambda: scaled(PROBS * NAN), "scores must be finite"),
    (lambda: scaled(y=LABELS + 1), r"y must hold labels 0\.\.1 where held_out"),
    (lambda: scaled(y=LABELS[:1]), "y must have .*, one label per node"),
    (lambda: scaled(torch.zeros(5, 2), ZERO, ids(3, 3)), "held_out must be a bool.*that repeat"),
    (lambda: scaled(held_out=TWO & False), "held_out selects no node"),
    (lambda: counted(LABELS + 1), r"y must hold labels 0\.\.1 where observed"),
    (lambda: counted(LABELS[:1]), r"y must have shape \(2,\), one label per"),
    (lambda: counted(LABELS, TWO[:1]), r"observed must be a boolean mask \(N,\)"),
    (lambda: counted(LABELS, ids(0, 0, 1)), "observed must be a boolean mask"),
    (lambda: counted(num_classes=2.5), "num_classes must be an integer of at least 2"),
    (lambda: Compatibility(FreeNMM(SMALL, 2), "2"), "num_classes must be an integer"),
    (lambda: PooledScores(2)(PROBS.expand(3, 2, 2)), r"terms must have shape \(4, N, 2\)"),
    (lambda: PooledScores(2)(PROBS.tolist()), "terms must be a floating-point tensor"),
    (lambda: PooledScores(2).terms(house(), torch.zeros(5, 2), ZERO, ids(2, 2)),
     "known must be a boolean mask.*that repeat"),
    (lambda: StackedNMM(2)(SMALL, PROBS, LABELS, TWO[:0]), r"known .* boolean mask .* \(0,\)"),
]  # fmt: skip


ONES, LOGITS = torch.ones(3, 2), torch.zeros(PATH.num_edges)
SUMMED = [
    (lambda: nmm(PATH, ONES, LOGITS, choices="drawn"), 'choices must be "sampled" or "summed"'),
    *((lambda more=more: nmm(PATH, ONES, LOGITS, ids(0, 1, 1), choices="summed", **more),
       "has z as a site: leave out collapsed and predict")
      for more in ({"collapsed": True}, {"predict": True, "observed": ids(1, 1, 0).bool()})),
    (lambda: nmm(PATH, ONES, LOGITS, ids(0, 1, 2), choices="summed"), "y holds label 2 at node 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), FIELDS + SCORES + SUMMED)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call()
