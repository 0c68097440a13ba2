# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noise of gradients and errors of sampled estimates, in small."""

import torch

from benchmarks.scale import run, speed


def test_share_of_the_score_term():
    """The estimate is a half for gradients that have half of the term, within its own error."""
    term = torch.randn(30)
    direct, half, whole = (share * term + 0.5 * torch.randn(800, 30) for share in (0.0, 0.5, 1.0))
    found = speed.score_share(whole, half, direct)
    assert abs(found["score"] - 0.5) < 4 * found["score error"] < 0.1


def test_gradients_of_estimators(tmp_path):
    path = tmp_path / "gradients.jsonl"
    command = ["variance", "gradients", "--shares", "0.02", "--samples", "2", "--repeats", "4"]
    rows = run.main([*command, "--results", str(path)]).rows
    assert len(rows) == len(path.read_text().splitlines()) == 4 + 3
    assert len(run.main([*command, "--results", str(path)]).rows) == len(rows)
    noisy = {row["estimator"]: row["sd"] for row in rows if "task" not in row}
    assert noisy["reinforce"] > noisy["reward_to_go"] > noisy["no_score"] > 0
    assert [row["steps"] for row in rows] == [4, 20, 4, 4, 4, 4, 4]
    assert torch.get_default_dtype() == torch.float


def test_sampled_estimates(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "CHAINS", 8)
    path = tmp_path / "samples.jsonl"
    command = ["marginals", "likelihood", "--shares", "0.02", "--samples", "2", "16"]
    command += ["--repeats", "3", "--results", str(path)]
    rows = run.main(command).rows
    assert len(run.main(command).rows) == len(rows) == 4 + 3
    error = {(row["weighted"], row["draws"]): row["error"] for row in rows[:4]}
    assert 0 < error[False, 16] < error[False, 2] < 0.1
    bound, *estimates = (row["mean"] for row in rows[4:])
    assert abs(bound - estimates[-1]) < 1 < -bound
