# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The table at the head of docs/results.md: who is compared with whom, and what is said of it."""

from importlib import import_module

import pytest


@pytest.fixture(scope="module")
def verdicts():
    return import_module("benchmarks.verdicts")


OURS = {(seed,): 0.5 + 0.01 * seed for seed in range(4)}


def shifted(by, seeds=range(4)):
    return {(seed,): OURS[(seed,)] + by + 0.001 * (seed % 2) for seed in seeds}


def test_the_best_rival_is_that_of_the_best_mean_on_shared_seeds(verdicts):
    rivals = {"near": shifted(0.1), "far": shifted(0.3), "one seed": shifted(-1.0, [0])}
    name, gap = verdicts.against_best(rivals, OURS, better=-1)
    assert name == "near"
    assert len(gap) == 4
    assert gap.mean == pytest.approx(-0.1005)
    assert verdicts.against_best(rivals, OURS, better=1)[0] == "far"
    assert verdicts.against_best({}, OURS, 1) is None
    assert verdicts.against_best(rivals, {}, 1) is None


@pytest.mark.parametrize("better", [1, -1])
@pytest.mark.parametrize(
    ("by", "said"),
    [((0.2, 0.1), "**behind**"), ((-0.2, -0.1), "**ahead**"), ((0.2, -0.2), "level")],
)
def test_what_is_said(verdicts, monkeypatch, better, by, said):
    """Of two cells; rivals are better by a number of the measure."""
    weaker = shifted(better * -5.0)
    cells = [({"rival": shifted(better * each), "weaker": weaker}, OURS) for each in by]
    one = verdicts.Experiment("Links", "NMM", "score", better, 2, lambda files: cells)
    monkeypatch.setattr(verdicts, "EXPERIMENTS", (one,))
    (line,) = verdicts.verdicts({})
    assert line["verdict"] == said
    assert line["best rival (cells)"] == "rival (2)"
    if said == "**ahead**":
        assert line["clearly ahead, behind"] == "2, 0"


def test_what_is_said_of_few_seeds_and_of_one_rival(verdicts):
    of = verdicts.Paired
    two = [of([0.2, 0.3]), of([-0.1, -0.2]), of([0.1, 0.3])]
    assert verdicts.verdict(two, 1, 3) == "not tested; better in 2 of 3"
    clear = of([0.10, 0.11, 0.12])
    assert verdicts.verdict([clear, clear], 1, 1) == "**ahead** (one rival)"
    # One cell makes the mean, and most are on the other side of it.
    large, small = of([5.0, 5.1, 5.2]), of([-0.1, 0.0, 0.09])
    assert verdicts.verdict([large, small, small], 1, 2) == "level"


def test_nothing_measured(verdicts, monkeypatch):
    empty = verdicts.Experiment("Links", "NMM", "score", 1, 2, lambda files: [])
    monkeypatch.setattr(verdicts, "EXPERIMENTS", (empty,))
    assert list(verdicts.verdicts({})) == []
