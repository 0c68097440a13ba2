# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Two processes with gloo do what one does, end together, and go on where they were."""

import os
import subprocess
import sys
import time

import pytest
import ranks
import torch
from documents import ROOT
from torch.distributed import TCPStore

EXAMPLE = ROOT / "examples" / "distributed.py"
#: Seconds after which a process counts as hanging: ten times torch's limit for one that waits.
LIMIT = 600

pytestmark = pytest.mark.slow


def wait_for(path, processes):
    while not path.exists():
        assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
        time.sleep(0.05)


#: 90 seeds, one of which is left for the last step: the second process has none.
SMALL = [*map(str, (EXAMPLE, *ranks.SMALL))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The checkpoint of a run of torchrun, what it printed, and the file before the last one."""
    path = tmp_path_factory.mktemp("torchrun") / "whole.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", *SMALL, path]
    options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    done = subprocess.run(list(map(str, command)), **options)
    assert done.returncode == 0, done.stderr
    return torch.load(path), done.stdout, path.with_name("whole.pt.previous").read_bytes()


@pytest.fixture(scope="module")
def pair(uninterrupted, tmp_path_factory):
    """Two processes of ``ranks.py`` that have stored what they found, and go on taking steps."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "broken.pt").write_bytes(uninterrupted[2])
    command = [sys.executable, str(ROOT / "tests" / "ranks.py"), str(folder)]
    command += ["together", "random_numbers", "resumed", "fingerprints", "waiting"]
    # The store keeps its port: another process may take one that is only looked up.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=os.environ | group | {"RANK": rank, "PYTHONHASHSEED": rank},
                         **pipes) for rank in "01"
    ]  # fmt: skip
    try:
        for rank in range(2):
            wait_for(folder / f"running.{rank}", processes)
        yield processes, folder
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_gradient_and_parameters_are_those_of_one_process(pair):
    """Also after steps of seeds that do not divide, and of fewer seeds than processes."""
    first, second = (torch.load(pair[1] / f"together.{rank}.pt") for rank in range(2))
    alone = ranks.one_after_the_other()
    assert not torch.equal(first["own start"], second["own start"])
    assert alone["gradient"].abs().max() > 0.1
    assert (alone["end"] - alone["start"]).abs().max() > 0.1
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)


def test_random_numbers(pair):
    """Processes of one seed subsample the same elements: one does the work of the other."""
    first, second = (torch.load(pair[1] / f"random_numbers.{rank}.pt") for rank in range(2))
    assert torch.equal(first["shared"], second["shared"])
    assert not torch.equal(first["own"], second["own"])


def test_a_run_that_was_killed_goes_on(pair, uninterrupted):
    """From the checkpoint before the last one, and ends as one that was not."""
    first, path = (torch.load(pair[1] / name) for name in ("resumed.0.pt", "broken.pt"))
    assert (first["epochs"], path["epochs"]) == (1, 2)
    for name, value in uninterrupted[0]["network"].items():
        assert torch.equal(path["network"][name], value), name


def test_a_new_process_knows_its_run(pair):
    """Whatever the process's hash seed: nothing of the fingerprint is an address or an order."""
    here = ranks.fingerprints()
    for rank in range(2):
        assert torch.load(pair[1] / f"fingerprints.{rank}.pt") == here


def test_one_process_does_not_outlive_the_other(pair):
    processes, _ = pair
    processes[1].kill()
    printed = processes[0].communicate(timeout=LIMIT)[0]
    assert processes[0].returncode != 0
    assert "Error" in printed


def test_torchrun(uninterrupted):
    state, printed, _ = uninterrupted
    last = printed.splitlines()[-1]  # after what gloo of PyTorch 2.10 prints of its connections
    assert last.startswith("digits, 2 processes, 2 epochs: test accuracy")
    assert state["epochs"] == 2
    assert state["settings"]["world"] == 2


def test_example_learns(capsys):
    """In one process, without a group."""
    from documents import load

    torch.set_default_dtype(torch.float)
    example = load("examples/distributed.py")
    scores = example.main(example.parser().parse_args(["--num-epochs", "30"]))
    assert "1 processes" in capsys.readouterr().out
    assert scores["accuracy"] > 0.9
    assert scores["nats a node"] > -0.35
