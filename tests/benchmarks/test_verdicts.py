# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The table at the head of docs/results.md: who is compared with whom, and the verdict."""

import pytest
from pandas import DataFrame

from benchmarks import verdicts
from benchmarks.shared.tables import Paired

OURS = {seed: 0.5 + 0.01 * seed for seed in range(4)}


def shifted(by, seeds=range(4)):
    return {seed: OURS[seed] + by + 0.001 * (seed % 2) for seed in seeds}


def cell(number=0, **methods):
    return [{"cell": number, "unit": unit, "method": method, "value": value}
            for method, values in methods.items() for unit, value in values.items()]  # fmt: skip


def test_the_best_rival_has_the_best_mean_on_shared_seeds():
    rivals = {"near": shifted(0.1), "far": shifted(0.3), "one_seed": shifted(-1.0, [0])}
    part = DataFrame(cell(NMM=OURS, **rivals))
    name, gap = verdicts.against_best(part, better=-1)
    assert name == "near"
    assert len(gap) == 4
    assert gap.mean == pytest.approx(-0.1005)
    assert verdicts.against_best(part, better=1)[0] == "far"
    assert verdicts.against_best(DataFrame(cell(NMM=OURS)), 1) is None
    assert verdicts.against_best(DataFrame(cell(**rivals)), 1) is None


@pytest.mark.parametrize("better", [1, -1])
@pytest.mark.parametrize(
    ("by", "said"),
    [((0.2, 0.1), "**behind**"), ((-0.2, -0.1), "**ahead**"), ((0.2, -0.2), "level")],
)
def test_verdict_of_two_cells(better, by, said):
    """Rivals are better by ``by``."""
    weaker = shifted(better * -5.0)
    rows = []
    for number, each in enumerate(by):
        rows += cell(number, NMM=OURS, rival=shifted(better * each), weaker=weaker)
    one = verdicts.Experiment("links", "Links", "NMM", "score", better, 2, lambda files: None)
    line = verdicts.line(one, DataFrame(rows))
    assert line["verdict"] == said
    assert line["best rival (cells)"] == "rival (2)"
    if said == "**ahead**":
        assert line["clearly ahead, behind"] == "2, 0"


def test_verdict_of_few_seeds_and_of_one_rival():
    two = [Paired([0.2, 0.3]), Paired([-0.1, -0.2]), Paired([0.1, 0.3])]
    assert verdicts.verdict(two, 1, 3) == "not tested; better in 2 of 3"
    clear = Paired([0.10, 0.11, 0.12])
    assert verdicts.verdict([clear, clear], 1, 1) == "**ahead** (one rival)"
    # One cell makes the mean, and most are on the other side of it.
    large, small = Paired([5.0, 5.1, 5.2]), Paired([-0.1, 0.0, 0.09])
    assert verdicts.verdict([large, small, small], 1, 2) == "level"
