# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""No checkpoint is lost: whatever fails in a save, and whatever lies under the path."""

import io
import os
import re
from pathlib import Path

import pytest
import torch

from pyro_nmm.fitting import load_checkpoint, save_checkpoint


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library may catch it."""


@pytest.fixture
def path(tmp_path):
    """Of the second of two checkpoints."""
    for epoch in (1, 2):
        save_checkpoint({"epoch": epoch, "w": torch.zeros(500)}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def epoch_of(path):
    return load_checkpoint(path)["epoch"]


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")])
@pytest.mark.parametrize(("owner", "name", "later"), [
    (torch, "save", 0), (os, "fsync", 0), (Path, "replace", 0), (Path, "replace", 1),
])  # fmt: skip
def test_a_save_that_fails_anywhere_loses_nothing(path, monkeypatch, error, owner, name, later):
    original, calls = getattr(owner, name), []

    def die(*args):
        calls.append(args)
        if len(calls) > later:
            raise error
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(type(error)):
            save_checkpoint({"epoch": 3}, path)
    assert not list(path.parent.glob("*.tmp"))
    assert epoch_of(path) == 2
    save_checkpoint({"epoch": 3}, path)
    assert epoch_of(path) == 3
    assert epoch_of(path.with_name("run.pt.previous")) == 2


@pytest.mark.parametrize("room", [0, 700, 1500])
def test_a_full_disk_is_named(path, monkeypatch, room):
    """torch.save raises an error of its own on top of the disk's."""

    class Disk(io.FileIO):
        def write(self, content):
            if self.tell() + len(content) > room:
                raise OSError(28, "No space left on device")
            return super().write(content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Disk(path, "x"))
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint({"epoch": 3, "w": torch.zeros(2000)}, path)
    assert epoch_of(path) == 2


def test_two_processes_on_one_path(path, monkeypatch):
    """A save while another one is under way: both end, the later one stays."""
    sync = os.fsync

    def between(number):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "getpid", lambda: 1)
            save_checkpoint({"epoch": 3}, path)
        sync(number)

    monkeypatch.setattr(os, "fsync", between)
    save_checkpoint({"epoch": 4}, path)
    assert epoch_of(path) == 4
    assert epoch_of(path.with_name("run.pt.previous")) == 3
    assert len(list(path.parent.iterdir())) == 2


def test_an_unreadable_file_is_kept(path):
    """Under another name, so that no save takes the place of the readable one."""
    path.write_bytes(b"cut short")
    with pytest.warns(UserWarning, match=r"run\.pt cannot be read"):
        assert epoch_of(path) == 1
    assert path.with_name("run.pt.unreadable").read_bytes() == b"cut short"
    save_checkpoint({"epoch": 3}, path)
    assert epoch_of(path) == 3
    assert epoch_of(path.with_name("run.pt.previous")) == 1


def test_noise_is_unreadable(path):
    """Whatever torch.load makes of it."""
    noise, previous = torch.Generator().manual_seed(0), path.with_name("run.pt.previous")
    for _ in range(30):
        size = int(torch.randint(1, 300, (), generator=noise))
        path.write_bytes(bytes(torch.randint(256, (size,), generator=noise).tolist()))
        with pytest.warns(UserWarning, match="cannot be read"):
            assert epoch_of(path) == 1
    assert previous.exists()


@pytest.mark.parametrize("sums", [True, False])
def test_a_flipped_bit_is_unreadable(tmp_path, sums):
    """Unless the user has turned off the checksums of torch.save."""
    path, state = tmp_path / "run.pt", {"w": torch.zeros(500)}
    torch.serialization.set_crc32_options(sums)
    try:
        save_checkpoint(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    torch.testing.assert_close(load_checkpoint(path), state)
    content = path.read_bytes()
    place = content.index(bytes(2000)) + 1234
    path.write_bytes(content[:place] + b"\x10" + content[place + 1 :])
    if sums:
        with pytest.warns(UserWarning, match="checksum"), pytest.raises(RuntimeError):
            load_checkpoint(path)


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(5, "Input/output error")])
def test_a_passing_error_is_raised(path, monkeypatch, error):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(type(error), match=re.escape(str(error))):
            load_checkpoint(path)
    assert epoch_of(path) == 2


def test_others_may_read_a_checkpoint(path):
    """As any file that the user writes."""
    plain = path.with_name("plain")
    plain.write_bytes(b"")
    assert plain.stat().st_mode == path.stat().st_mode
