# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Which runs a checkpoint may continue, and that no checkpoint is ever lost."""

import functools
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import changed, denoise, fit, pair, ring
from torch import nn
from torch_geometric.nn import MLP

from pyro_nmm import Neighborhood, checkpoints
from pyro_nmm.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.fitting import train
from pyro_nmm.guides import Consistency, fit_classifier, fit_images
from pyro_nmm.models import Denoiser, UNet
from pyro_nmm.models.backbones import appnp, gcn


def moved(value, index=0, by=1):
    value = value.clone()
    value.view(-1)[index] += by
    return value


def frozen():
    network = pair()
    network.omega.requires_grad_(False)
    return network


def quiet(part):
    """A network whose repr looks like any other's."""
    part.__class__ = type(part.__class__.__name__, (part.__class__,), {"__repr__": lambda s: "M"})
    return part


DATA = {
    r"data\.x": {"x": moved(ring().x, by=0.01)},
    r"data\.edge_index": {"edge_index": ring().edge_index.roll(1, 1)},
    r"data\.y": {"y": 1 - ring().y},
    r"data\.train_mask": {"train_mask": ring().train_mask & (torch.arange(12) > 0)},
    r"data\.val_mask": {"val_mask": ring().val_mask & (torch.arange(12) > 1)},
}


@pytest.mark.parametrize("kind", ["nmm", "classifier"])
@pytest.mark.parametrize("named", DATA)
def test_other_data_are_refused(tmp_path, kind, named):
    path = tmp_path / "run.pt"
    first, scores = fit(path, kind)
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt is of another run.*{named}"):
        fit(path, kind, changed(**DATA[named]))
    again, same = fit(path, kind)
    assert same == scores
    assert torch.equal(again, first)


def test_labels_outside_the_masks_make_no_other_run(tmp_path):
    path = tmp_path / "run.pt"
    first, _ = fit(path)
    other = ring()
    other.y[~(other.train_mask | other.val_mask)] = 1
    assert torch.equal(fit(path, data=other)[0], first)


def test_other_sparse_features_are_refused(tmp_path):
    path, sparse = tmp_path / "run.pt", ring().x.relu().to_sparse_csr()
    fit(path, "classifier", changed(x=sparse))
    with pytest.raises(ValueError, match=r"data\.x"):
        fit(path, "classifier", changed(x=2 * sparse))
    fit(path, "classifier", changed(x=sparse.clone()))


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (r"\bhood\b", {"hood": Neighborhood(torch.tensor([[0], [1]]), 12)}),
        ("initial weights.* seed|seed.* initial weights", {"seed": 1}),
        ("initial weights", {"skipped": 1}),
        (r"dropout \(0\.5 there, 0\.4 here\)", {"network": lambda: pair(gcn(4, 2, dropout=0.4))}),
        ("drop_nodes", {"network": lambda: pair(gcn(4, 2, drop_nodes=0.2))}),
        (r"link \('exp' there, 'square' here\)", {"network": lambda: pair(link="square")}),
        ("floor", {"network": lambda: pair(floor=0.5)}),
        ("frozen", {"network": frozen}),
        (r"optimizer\.lr", {"lr": 0.02}),
        (r"optimizer\.weight_decay", {"weight_decay": 0.0}),
        ("criterion", {"criterion": "likelihood"}),
        ("estimator", {"estimator": "no_score"}),
        ("num_particles", {"num_particles": 3}),
        (r"num_samples \(8 there, 9 here\)", {"num_samples": 9}),
        ("consistency|module", {"consistency": Consistency(12, 2)}),
    ],
)
def test_other_runs_are_refused(tmp_path, named, options):
    path = tmp_path / "run.pt"
    fit(path, network=pair)
    with pytest.raises(ValueError, match=f"of another run.*(?:{named}).*: remove it or give"):
        fit(path, **{"network": pair} | options)


def test_what_a_repr_hides(tmp_path):
    """Networks of one repr, with one set of weights."""

    def build(dropout=0.5, act="relu", depth=10):
        def network():
            label = MLP([4, 5, 2], dropout=dropout, norm=None, act=act)
            smooth = appnp(4, 3)
            smooth.network.module_1.K = depth
            return pair(quiet(label), quiet(smooth))

        return network

    path = tmp_path / "run.pt"
    classify = functools.partial(fit, path, "nmm", ring())
    classify(network=lambda: Wrapped(build()()))
    for change in ({"dropout": 0.1}, {"act": "elu"}, {"depth": 3}):
        with pytest.raises(ValueError, match="of another run"):
            classify(network=lambda change=change: Wrapped(build(**change)()))
    with pytest.raises(ValueError, match=r"activation \(relu there, elu here\)"):
        train_with(path.with_name("b.pt"), nn.functional.relu, nn.functional.elu)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hood, x, edge_index):
        alpha, logits = self.inner.labels(x), self.inner.attention(x, edge_index)
        return alpha.exp() + 1, torch.zeros(hood.num_edges) + logits.mean()

    def __repr__(self):
        return "Wrapped"


def train_with(path, *activations):
    for activation in activations:
        torch.manual_seed(0)
        module = nn.Linear(1, 1)
        module.activation = activation
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        train(module, optimizer, lambda epoch: 0.0, lambda: (0.0,), num_epochs=2, patience=2,
              save_every=1, checkpoint=path)  # fmt: skip


@pytest.mark.parametrize("shared", ["seed", "weights"])
def test_seed_sweep_on_one_path_is_refused(tmp_path, shared):
    """Not the first run again and again."""
    state = gcn(4, 2).state_dict()

    def network():
        built = gcn(4, 2)
        if shared == "weights":
            built.load_state_dict(state)
        return built

    path = tmp_path / "run.pt"
    fit(path, "classifier", network=network, seed=0)
    with pytest.raises(ValueError, match=r"seed \(0 there, 1 here\)"):
        fit(path, "classifier", network=network, seed=1)
    if shared == "seed":  # no seed between the runs: other weights
        with pytest.raises(ValueError, match="initial weights"):
            fit_classifier(network(), ring(), num_epochs=20, checkpoint=path)


def test_fewer_epochs_or_less_patience_than_are_stored(tmp_path):
    path = tmp_path / "run.pt"
    _, scores = fit(path, num_epochs=40)
    assert len(scores) == 40
    with pytest.raises(ValueError, match="holds 40 epochs, more than num_epochs=10 and patience"):
        fit(path, num_epochs=10)
    with pytest.raises(ValueError, match="holds 40 epochs, more than num_epochs=40 and patience=0"):
        fit(path, num_epochs=40, patience=0)
    longer, curve = fit(path, num_epochs=60)
    whole, expected = fit(None, num_epochs=60)
    assert curve == expected
    assert torch.equal(longer, whole)


def test_fewer_steps_than_are_stored(tmp_path):
    """A run without validation, whose options are not in its settings."""

    def steps(number):
        torch.manual_seed(0)
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return train(module, optimizer, float, num_epochs=number, checkpoint=tmp_path / "run.pt")

    assert steps(4) == steps(4) == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="holds 4 steps, more than num_epochs=2 "):
        steps(2)


def test_nan_in_a_checkpoint_is_refused(tmp_path):
    """Also after the last epoch, when no loss would show it."""
    path = tmp_path / "run.pt"
    fit(path)
    state = load_checkpoint(path)
    name = next(iter(state["module"]))
    state["module"][name].view(-1)[0] = torch.nan
    save_checkpoint(state, path)
    with pytest.raises(ValueError, match=f"{name} holds NaN after reading .*run.pt: remove"):
        fit(path)


def test_the_last_epoch_is_stored_too(tmp_path):
    """A run that has ended has nothing left to do."""
    path, seen = tmp_path / "run.pt", []
    first, scores = fit(path, num_epochs=23)
    again, curve = fit(path, num_epochs=23, progress=lambda e: seen.append(len(e)) or e)
    assert seen == [0]
    assert curve == scores
    assert torch.equal(first, again)


@pytest.mark.parametrize("kind", ["unet", "nmm"])
def test_other_denoisers_are_refused(tmp_path, kind):
    path = tmp_path / "run.pt"
    first, end = denoise(path, kind)

    def wide():
        torch.manual_seed(0)
        return Denoiser(UNet(1, 6, 1), floor=1e-3) if kind == "nmm" else UNet(1, 6, 1, tile=8)

    changes = [
        ({"seed": 1}, r"seed \(0 there, 1 here\)"),
        ({"network": wide()}, "floor" if kind == "nmm" else "tile"),
        ({"network": Denoiser(UNet(1, 6, 2))}, r"depth|module \(UNet there, Denoiser here\)"),
        ({"settings": "other patches"}, r"settings \('' there, 'other patches' here\)"),
        ({"lr": 0.1}, r"optimizer\.lr"),
        ({"num_steps": 5}, r"num_steps \(4 there, 5 here\)"),
        ({"max_noise": 5.0}, r"max_noise \(50\.0 there, 5\.0 here\)"),
    ]
    for change, named in changes:
        with pytest.raises(ValueError, match=f"of another run.*{named}.*remove it or give"):
            denoise(path, kind, **change)
    losses, again = denoise(path, kind)
    assert losses == first
    assert all(map(torch.equal, end.state_dict().values(), again.state_dict().values()))


def test_denoisers_in_a_row_resume(tmp_path):
    """A trunk that ended, a network on top of it that was interrupted; no data for the trunk."""

    class Interruption(Exception):
        pass

    def until(steps):
        for step in steps:
            if step == 3:
                raise Interruption
            yield step

    def never():
        raise AssertionError("the trunk has been fitted")

    def whole(folder, progress=iter, draw=None):
        _, trunk = denoise(folder / "trunk.pt", "unet", draw=draw, loss="log")
        network = Denoiser(trunk)
        patches = lambda: torch.randint(256, (2, 1, 8, 8))  # noqa: E731
        losses = fit_images(network, patches, num_steps=5, checkpoint=folder / "nmm.pt",
                            save_every=2, progress=progress)  # fmt: skip
        return losses, network.state_dict()

    expected, end = whole(tmp_path / "a")
    with pytest.raises(Interruption):
        whole(tmp_path / "b", until)
    losses, state = whole(tmp_path / "b", draw=never)
    assert losses == expected
    assert all(torch.equal(state[name], end[name]) for name in end)


@pytest.mark.slow
def test_a_new_process_knows_its_run(tmp_path):
    """Whatever the process's hash seed: nothing of the fingerprint is an address or an order."""
    script = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from runs import fit
alpha, scores = fit(sys.argv[1], num_epochs=int(sys.argv[3]))
print(alpha.sum().item(), len(scores))
"""
    outs = []
    for seed, epochs in ((1, 25), (2, 25)):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        command = [
            sys.executable,
            "-c",
            script,
            tmp_path / "run.pt",
            Path(__file__).parent.parent,
            epochs,
        ]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False,
                              env=environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        outs.append(done.stdout)
    assert outs[0] == outs[1]


# What lies under the path.


@pytest.mark.parametrize(
    "content",
    [nn.Linear(2, 2).state_dict(), [1, 2], {"settings": "lr=1"}, {"settings": {"lr": 1.0}}],
)
def test_something_else_under_the_path(tmp_path, content):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    before = path.read_bytes()
    for run in (fit, denoise):
        with pytest.raises(ValueError, match=r"checkpoint .*model\.pt holds no run of this kind"):
            run(path)
    assert path.read_bytes() == before


def test_the_other_loop_s_checkpoint(tmp_path):
    denoise(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="of another run"):
        fit(tmp_path / "run.pt")


def test_an_unreadable_file_is_kept(tmp_path):
    """Under another name, so that no save takes the place of the readable one."""
    path = tmp_path / "run.pt"
    for bad in (b"cut short", b"again"):
        save_checkpoint({"epoch": 1}, path)
        save_checkpoint({"epoch": 2}, path)
        path.write_bytes(bad)
        with pytest.warns(UserWarning, match=r"run\.pt cannot be read .*kept as .*\.unreadable"):
            assert load_checkpoint(path) == {"epoch": 1}
        save_checkpoint({"epoch": 3}, path)
        assert load_checkpoint(path) == {"epoch": 3}
    kept = sorted(p.read_bytes() for p in tmp_path.glob("run.pt.unreadable*"))
    assert kept == [b"again", b"cut short"]


def test_nothing_readable_changes_nothing(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"some file of the user's")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(RuntimeError):
        load_checkpoint(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_noise_is_unreadable(tmp_path):
    """Whatever torch.load makes of it."""
    path, rng = tmp_path / "run.pt", torch.Generator().manual_seed(0)
    for _ in range(60):
        save_checkpoint({"epoch": 1}, path)
        save_checkpoint({"epoch": 2}, path)
        size = int(torch.randint(1, 300, (), generator=rng))
        path.write_bytes(bytes(torch.randint(256, (size,), generator=rng).tolist()))
        with pytest.warns(UserWarning, match="cannot be read"):
            assert load_checkpoint(path) == {"epoch": 1}


@pytest.mark.parametrize("sums", [True, False])
def test_a_flipped_bit_is_unreadable(tmp_path, sums):
    """Unless the user has turned off the checksums of torch.save."""
    path, state, rng = tmp_path / "run.pt", {"w": torch.zeros(500)}, torch.Generator()
    torch.serialization.set_crc32_options(sums)
    try:
        save_checkpoint(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    content = path.read_bytes()
    torch.testing.assert_close(load_checkpoint(path), state)
    start = content.index(bytes(4000))
    for place in torch.randint(start, start + 4000, (10,), generator=rng).tolist() if sums else ():
        path.write_bytes(content[:place] + b"\x10" + content[place + 1 :])
        with pytest.warns(UserWarning, match="checksum"), pytest.raises(RuntimeError):
            load_checkpoint(path)


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(5, "Input/output error")])
def test_a_passing_error_is_raised(tmp_path, monkeypatch, error):
    path = tmp_path / "run.pt"
    save_checkpoint({"epoch": 1}, path)
    save_checkpoint({"epoch": 2}, path)

    def fail(*args, **options):
        raise error

    for owner, name in ((torch, "load"), (Path, "read_bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(type(error), match=re.escape(str(error))):
                load_checkpoint(path)
        assert load_checkpoint(path) == {"epoch": 2}


def test_two_processes_on_one_path(tmp_path, monkeypatch):
    """A save while another one is under way: both end, the later one stays."""
    path, sync = tmp_path / "run.pt", os.fsync

    def between(number):
        monkeypatch.setattr(checkpoints.os, "fsync", sync)
        save_checkpoint({"epoch": 2}, path)
        sync(number)

    save_checkpoint({"epoch": 0}, path)
    monkeypatch.setattr(checkpoints.os, "fsync", between)
    save_checkpoint({"epoch": 1}, path)
    assert load_checkpoint(path) == {"epoch": 1}
    assert load_checkpoint(path.with_name("run.pt.previous")) == {"epoch": 2}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", ["save", "fsync", "copyfile", "replace"])
def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, place):
    path = tmp_path / "run.pt"
    save_checkpoint({"epoch": 1}, path)
    owners = {"save": torch, "fsync": os, "copyfile": checkpoints.shutil, "replace": Path}

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owners[place], place, full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint({"epoch": 2}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert load_checkpoint(path) == {"epoch": 1}


@pytest.mark.parametrize("room", [0, 700, 5000])
def test_a_full_disk_is_named(tmp_path, monkeypatch, room):
    """torch.save raises an error of its own on top of the disk's."""
    path = tmp_path / "run.pt"

    class Disk(io.FileIO):
        def write(self, content):
            if self.tell() + len(content) > room:
                raise OSError(28, "No space left on device")
            return super().write(content)

    save_checkpoint({"epoch": 1}, path)
    monkeypatch.setattr(Path, "open", lambda path, mode: Disk(path, "x"))
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint({"epoch": 2, "w": torch.zeros(2000)}, path)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert load_checkpoint(path) == {"epoch": 1}


def test_files_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """After an hour, when no process can be writing them."""
    path, sync, left = tmp_path / "run[1].pt", os.fsync, []

    def killed(number):
        sync(number)
        left.extend(tmp_path.glob("*.tmp"))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", killed)
        save_checkpoint({"epoch": 1}, path)
    old, young = left[0], left[0].with_name(left[0].name.replace(".0.", ".1."))
    mine, other = tmp_path / "run[1].pt.notes.tmp", tmp_path / left[0].name.replace("[1]", "1")
    for file in (old, young, mine, other):
        file.touch()
    for file in (old, mine, other):
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 4000))
    save_checkpoint({"epoch": 2}, path)
    assert [file.exists() for file in (old, young, mine, other)] == [False, True, True, True]
    assert load_checkpoint(path) == {"epoch": 2}


def test_others_may_read_a_checkpoint(tmp_path):
    """As any file that the user writes."""
    (tmp_path / "plain").write_bytes(b"")
    save_checkpoint({"epoch": 1}, tmp_path / "run.pt")
    modes = [(tmp_path / name).stat().st_mode for name in ("plain", "run.pt")]
    assert modes[0] == modes[1]
