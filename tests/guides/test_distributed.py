# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Two processes with gloo do what one does, and a resumed run ends with the same bits."""

import subprocess
import sys

import pytest
import ranks
import torch
from documents import ROOT

pytestmark = pytest.mark.slow


def torchrun(*command):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    done = subprocess.run([*start, *map(str, command)], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gradient_and_parameters_are_those_of_one_process(tmp_path):
    """Also after steps of seeds that do not divide, and of fewer seeds than processes."""
    torchrun(ROOT / "tests" / "ranks.py", tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = ranks.one_after_the_other()
    assert not torch.equal(first["own start"], second["own start"])
    assert alone["gradient"].abs().max() > 0.1
    assert (alone["end"] - alone["start"]).abs().max() > 0.1
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)


def test_a_run_that_was_stopped_goes_on(tmp_path):
    """90 seeds, one of which is left for the last step: the second process has none."""
    example = ROOT / "examples" / "distributed.py", "--save-every", 1, "--batch-size", 89
    for name, parts in (("whole", [2]), ("resumed", [1, 2])):
        path = tmp_path / f"{name}.pt"
        for epochs in parts:
            more = "--num-epochs", epochs, "--checkpoint", path, "--resume"
            printed = torchrun(*example, *more)
    whole, resumed = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "resumed"))
    last = printed.splitlines()[-1]  # after what gloo of PyTorch 2.10 prints of its connections
    assert last.startswith("digits, 2 processes, 2 epochs: test accuracy")
    assert (resumed["epochs"], resumed["settings"]["world"]) == (2, 2)
    for name, value in whole["network"].items():
        assert torch.equal(resumed["network"][name], value), name


def test_example_learns(capsys):
    """In one process, without a group."""
    torch.set_default_dtype(torch.float)
    example = ranks.EXAMPLE
    scores = example.main(example.parser().parse_args(["--num-epochs", "30"]))
    assert "1 processes" in capsys.readouterr().out
    assert scores["accuracy"] > 0.9
    assert scores["nats a node"] > -0.35
