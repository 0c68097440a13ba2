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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 may wait for ever on gloo"),
]


def start(port, *command):
    """A command as two processes of a group, which meet at the store of this port."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for rank in ("0", "1"):
        own = os.environ | group | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        yield subprocess.Popen([sys.executable, *map(str, command)], env=own, **pipes)


@pytest.fixture(scope="module")
def begin():
    """Starts a command as two processes; none is left behind."""
    started, stores = [], []

    def begin(*command):
        # The store keeps its port: another process may take one that is only looked up.
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        started.extend(start(stores[-1].port, *command))
        return started[-2:]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def ended(processes):
    """What they printed, with no error."""
    printed = [process.communicate(timeout=LIMIT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return "".join(printed)


def wait_for(path, processes):
    while not path.exists():
        assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pair(begin, tmp_path_factory):
    """Two processes of ``ranks.py`` that have stored what they found, and go on taking steps."""
    folder = tmp_path_factory.mktemp("pair")
    names = "together", "random_numbers", "waiting"
    processes = begin(ROOT / "tests" / "ranks.py", folder, *names)
    for rank in range(2):
        wait_for(folder / f"running.{rank}", processes)
    return processes, folder


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


def test_one_process_does_not_outlive_the_other(pair):
    processes, _ = pair
    processes[1].kill()
    printed = processes[0].communicate(timeout=LIMIT)[0]
    assert processes[0].returncode != 0
    assert "Error" in printed


#: 90 seeds, one of which is left for the last step: the second process has none.
SMALL = [EXAMPLE, "--num-epochs", 4, "--save-every", 1, "--batch-size", 89, "--checkpoint"]


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


def test_torchrun(uninterrupted):
    state, printed, _ = uninterrupted
    assert printed.startswith("digits, 2 processes, 4 epochs: test accuracy")
    assert state["epochs"] == 4
    assert state["settings"]["world"] == 2


def test_a_run_that_was_killed_goes_on(begin, tmp_path, uninterrupted):
    """From the checkpoint before the last one, and ends as one that was not."""
    path, (wanted, _, before) = tmp_path / "broken.pt", uninterrupted
    path.write_bytes(before)
    assert torch.load(path)["epochs"] == 3
    ended(begin(*SMALL, path, "--resume"))
    found = torch.load(path)
    assert found["epochs"] == 4
    for name, value in wanted["network"].items():
        assert torch.equal(found["network"][name], value), name


def test_example_learns(capsys):
    """In one process, without a group."""
    from documents import load

    torch.set_default_dtype(torch.float)
    example = load("examples/distributed.py")
    scores = example.main(example.parser().parse_args(["--num-epochs", "30"]))
    assert "1 processes" in capsys.readouterr().out
    assert scores["accuracy"] > 0.9
    assert scores["nats a node"] > -0.35
