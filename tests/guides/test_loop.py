# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Early stopping, and checkpoints that survive being killed anywhere."""

import random

import pytest
import torch
from torch import nn

from pyro_nmm import checkpoints
from pyro_nmm.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.fitting import train


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library may catch it."""


def problem(seed=0):
    """A network with dropout and a buffer, so that generators and buffers matter."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    x, target = torch.randn(20, 4), torch.randn(20, 1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)

    def backward(epoch):
        loss = (network(x) - target).square().mean()
        loss.backward()
        return loss.item()

    def validate():
        return (-(network(x) - target).square().mean().item(),)

    return network, optimizer, backward, validate


def run(path, seed=0, fuse=None, **options):
    network, optimizer, backward, validate = problem(seed)
    steps = {"left": fuse}

    def burning(function):
        def call(*args):
            if steps["left"] is not None:
                steps["left"] -= 1
                if steps["left"] < 0:
                    raise Killed
            return function(*args)

        return call

    options = {"num_epochs": 60, "patience": 60, "save_every": 3} | options
    scores = train(
        network, optimizer, burning(backward), burning(validate), checkpoint=path, **options
    )
    return scores, network.state_dict()


def test_killed_twenty_times_ends_the_same(tmp_path):
    whole_scores, whole = run(None)
    path, kills, rng = tmp_path / "run.pt", 0, random.Random(0)
    while kills < 20:
        try:
            scores, state = run(path, fuse=rng.randrange(1, 14))
        except Killed:
            kills += 1
        else:
            break
    scores, state = run(path)
    assert kills == 20
    assert scores == whole_scores
    assert all(torch.equal(state[key], whole[key]) for key in whole)


def test_killed_while_writing(tmp_path, monkeypatch):
    """At every system call of a save, a readable checkpoint is under one of the names."""
    path = tmp_path / "run.pt"
    save_checkpoint({"epoch": 1}, path)
    save_checkpoint({"epoch": 2}, path)
    places = [(checkpoints.os, "fsync"), (checkpoints.shutil, "copyfile"), (torch, "save"),
              (checkpoints.Path, "replace")]  # fmt: skip
    for module, attribute in places:
        with monkeypatch.context() as patch:

            def die(*args):
                raise Killed

            patch.setattr(module, attribute, die)
            with pytest.raises(Killed):
                save_checkpoint({"epoch": 3}, path)
        assert load_checkpoint(path) == {"epoch": 2}


def test_killed_while_writing_after_a_fallback(tmp_path, monkeypatch):
    """An unreadable checkpoint never takes the place of the readable one before it."""
    path = tmp_path / "run.pt"
    save_checkpoint({"epoch": 1}, path)
    save_checkpoint({"epoch": 2}, path)
    path.write_bytes(b"cut short")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert load_checkpoint(path) == {"epoch": 1}

    def die(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Path, "replace", die)
        with pytest.raises(Killed):
            save_checkpoint({"epoch": 3}, path)
    assert load_checkpoint(path) == {"epoch": 1}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_checkpoint_falls_back_to_the_previous(tmp_path, share):
    whole_scores, whole = run(None)
    path = tmp_path / "run.pt"
    with pytest.raises(Killed):
        run(path, fuse=40)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.warns(UserWarning, match=r"checkpoint .*run\.pt cannot be read"):
        scores, state = run(path)
    assert scores == whole_scores
    assert all(torch.equal(state[key], whole[key]) for key in whole)


def test_no_readable_checkpoint_is_an_error(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"no checkpoint")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(RuntimeError, match=r"run\.pt cannot be read; remove to start anew"),
    ):
        run(path)


def test_other_settings_are_an_error(tmp_path):
    path = tmp_path / "run.pt"
    run(path, num_epochs=6, settings="lr=1")
    with pytest.raises(ValueError, match=r"settings \('lr=1' there, 'lr=2' here\)"):
        run(path, settings="lr=2")


def test_early_stopping_returns_the_best_epoch():
    """Scores that rise to epoch 3: the run ends ``patience`` later, with epoch 3's weights."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def backward(epoch):
        module.weight.grad = -torch.ones_like(module.weight)
        return 0.0

    scores = train(
        module, optimizer, backward, lambda: (-abs(module.weight.item() - 4),),
        num_epochs=100, patience=5,
    )  # fmt: skip
    assert len(scores) == 9
    assert module.weight.item() == 4
    assert not module.training


def test_ties_keep_the_first_epoch():
    module = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    start = module.weight.item()

    def backward(epoch):
        module.weight.grad = -torch.ones_like(module.weight)
        return 0.0

    scores = train(module, optimizer, backward, lambda: (0.0,), num_epochs=10, patience=3)
    assert len(scores) == 4
    assert module.weight.item() == pytest.approx(start + 1)


def test_nan_scores_are_an_error():
    network, optimizer, backward, _ = problem()
    with pytest.raises(ValueError, match=r"validate returned \(nan,\) in epoch 0"):
        train(network, optimizer, backward, lambda: (float("nan"),), num_epochs=2, patience=2)
