# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The README's code and the examples run, and reach what they claim."""

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def test_quick_start_of_the_readme(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 25
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"accuracy ([\d.]+)", printed).group(1))
    assert accuracy > 0.75


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_karate(tmp_path):
    import karate

    args = karate.parser().parse_args(["--output", str(tmp_path / "out" / "karate.png")])
    result = karate.main(args)
    assert args.output.stat().st_size > 50_000
    assert result["accuracy"] > 0.8
    assert result["bound"] <= result["log_prob"] + 0.01
    assert result["log_prob"] - result["bound"] < 0.02
    assert result["error"] < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_digits(tmp_path):
    import digits

    output = ["--output", str(tmp_path / "digits.png")]
    args = digits.parser().parse_args(["--num-steps", "60", *output])
    result = digits.main(args)
    assert args.output.stat().st_size > 50_000
    for row in result.values():
        assert row["accuracy"] > 0.95
        assert row["ECE"] < 0.05
        assert row["log-lik."] > -0.15
        assert row["pair log-lik."] > -0.25
    assert result == digits.main(args)  # a seed reproduces a run


@pytest.mark.data
def test_cora_loads(request):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import graphs

    edge_index, y = graphs.cora(request.config.getoption("--data-root"))
    assert edge_index.shape == (2, 10556)
    assert y.shape == (2708,)
