# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits that are killed end with the same bits, refuse other runs' files, and never lose a file."""

import os
from pathlib import Path

import pytest
import torch
from runs import changed, fit, pair, ring
from torch import nn

from pyro_nmm import Neighborhood
from pyro_nmm.checkpoints import digest, load_checkpoint, save_checkpoint
from pyro_nmm.fitting import Steps
from pyro_nmm.guides import Chains, fit_mixture
from pyro_nmm.models import FreeNMM, grid_edges, ising


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library may catch it."""


def killed_after(number):
    """Progress that fails after so many steps of all starts."""
    left = iter(range(number - 1))

    def wrap(steps):
        for step in steps:
            yield step
            if next(left, None) is None:
                raise Killed

    return wrap


HOOD = Neighborhood.grid(6, 6)
X = torch.randn(36, 2, generator=torch.Generator().manual_seed(0), dtype=torch.double)


def loop(seed=0, spoil=None, lr=0.05, **options):
    """A network with dropout and a buffer, so that generators and buffers matter."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    x, target = torch.randn(20, 4), torch.randn(20, 1)

    def backward(step):
        loss = (network(x) - target).square().mean()
        loss.backward()
        if spoil == ("loss", step):
            return torch.nan
        if spoil == ("gradient", step):
            network[0].weight.grad.fill_(torch.nan)
        return loss.item()

    options, optimizer = Steps(12, **options), torch.optim.Adam(network.parameters(), lr=lr)
    losses = options.train(network, optimizer, backward, lambda step: 1 / (1 + step), x=x)
    # The draws after a run are the same, too.
    return [*network.state_dict().values(), torch.tensor(losses), torch.rand(2)]


def nmm(**options):
    mix, losses = fit(**options)
    return [mix.alpha, mix.logits, torch.tensor(losses)]


def mixture(scale=1.0, free=True, **options):
    torch.manual_seed(0)
    field, hood = ising(grid_edges(2, 2), 0.3, torch.ones(4)), Neighborhood.grid(2, 2)
    network = FreeNMM(hood, 2) if free else None
    mix, losses = fit_mixture(field.scaled(scale), hood, network, num_steps=12, **options)
    return [mix.marginals(), torch.tensor(losses)]


#: By name: the run, and steps after which it is killed. All save every two steps.
RUNS = {
    "loop": (loop, (1, 4, 9)),
    "nmm": (nmm, (3,)),
    "nmm by chains": (lambda **o: nmm(estimator=Chains(), **o), (3,)),
    "mixture": (mixture, (3, 8)),
    "mixture of two starts": (lambda **o: mixture(free=False, **o), (5,)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_fit_ends_with_the_same_bits(name, tmp_path):
    run, kills = RUNS[name]
    whole, taken = run(), []

    def counted(steps):
        for step in steps:
            taken.append(step)
            yield step

    for number in kills:
        options = {"checkpoint": tmp_path / f"{number}.pt", "save_every": 2}
        with pytest.raises(Killed):
            run(**options, progress=killed_after(number))
        lengths = []
        for _ in range(2):  # from the middle, then from the end
            taken.clear()
            again = run(**options, progress=counted)
            assert all(map(torch.equal, again, whole))
            lengths.append(len(taken))
        assert lengths[1] < lengths[0]


#: A run, the change of another one.
OTHERS = [
    ("loop", {"seed": 1}),
    ("loop", {"lr": 0.1}),
    *(("nmm", {"data": data}) for data in (
        lambda: changed(x=ring().x + 0.01),
        lambda: changed(edge_index=ring().edge_index.roll(1, 1)),
        lambda: changed(y=1 - ring().y),
        lambda: changed(train_mask=torch.arange(12) < 4))),
    ("nmm", {"network": lambda: pair(0.4)}),
    ("nmm", {"estimator": "no_score"}),
    ("nmm", {"lr": 0.02}),
    ("mixture", {"scale": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name, change, tmp_path):
    (run, _), path = RUNS[name], tmp_path / "run.pt"
    run(checkpoint=path)
    with pytest.raises(ValueError, match=r"run\.pt is of another run.*: to resume, use the"):
        run(checkpoint=path, **change)


def test_labels_outside_the_mask_make_no_other_run(tmp_path):
    first = nmm(checkpoint=tmp_path / "run.pt")
    again = nmm(
        checkpoint=tmp_path / "run.pt",
        data=lambda: changed(y=ring().y.where(ring().train_mask, -7)),
    )
    assert all(map(torch.equal, again, first))


def test_digests_are_of_contents():
    """Not of addresses or strides, so that a new process knows its run."""
    eye, relu = torch.eye(2), nn.functional.relu
    assert digest(eye.numpy(), relu, [1]) == digest(eye.T, relu, (1,))
    assert digest(object(), lambda x: x) == digest(object(), lambda x: x)
    assert digest(eye.to_sparse_csr()) == digest(eye.to_sparse())
    assert digest(torch.ones(1).expand(2, 2)) == digest(torch.ones(2, 2))
    values = eye, 2 * eye, eye.float(), eye.bfloat16(), eye[None], eye.to_sparse(), [eye], None
    values = *values, eye.flip(0).to_sparse()  # the same numbers at other places
    assert len({digest(value) for value in values}) == len(values)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nan_stops_a_run_and_is_not_saved(what, tmp_path):
    message = {"loss": "the loss is nan in step 5", "gradient": r"0\.weight holds NaN after step 5"}
    with pytest.raises(ValueError, match=f"{message[what]}.* lr"):
        loop(spoil=(what, 5), checkpoint=tmp_path / "run.pt", save_every=2)
    assert len(load_checkpoint(tmp_path / "run.pt")["losses"]) == 4


@pytest.mark.parametrize(("owner", "name"), [(torch, "save"), (os, "fsync"), (Path, "replace")])
def test_a_save_that_fails_loses_nothing(owner, name, tmp_path, monkeypatch):
    path, error = tmp_path / "run.pt", OSError(28, "No space left on device")
    save_checkpoint({"epoch": 2}, path)

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="No space"):
            save_checkpoint({"epoch": 3}, path)
    assert load_checkpoint(path) == {"epoch": 2}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"some file of the user's", {"w": 1}, [1, 2]])
def test_another_file_under_the_path_is_refused(content, tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"run\.pt (cannot be read|is of another run).*another path"
    ):
        loop(checkpoint=path)
    assert path.read_bytes() == before


def test_a_number_that_was_expanded_has_a_digest():
    number = torch.tensor(0.3).expand(1)
    assert digest(number) == digest(torch.tensor([0.3])) != digest(torch.tensor([0.4]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    disk = Path("/dev/full").open
    monkeypatch.setattr(Path, "open", lambda path, mode: disk(mode))
    with pytest.raises(OSError, match=r"run\.pt"):
        save_checkpoint({"x": torch.zeros(9)}, tmp_path / "run.pt")
