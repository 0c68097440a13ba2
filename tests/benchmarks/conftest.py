# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Single precision, as commands have it, and runs of commands that are repeated."""

import pytest
import torch

from benchmarks.shared.records import read


@pytest.fixture(autouse=True)
def single(fresh):
    torch.set_default_dtype(torch.float)


@pytest.fixture
def double(single):
    torch.set_default_dtype(torch.double)


@pytest.fixture
def twice(tmp_path):
    """Rows that a command adds to a file. All are stored, and a second run finds nothing to do."""

    def run(main, command, name="rows"):
        path = tmp_path / f"{name}.jsonl"
        before, argv = len(read(path)), [*command.split(), "--results", str(path)]
        rows = main(argv).rows
        assert len(rows) == len(read(path)) == len(main(argv).rows)
        return rows[before:]

    return run


@pytest.fixture
def smaller(monkeypatch):
    """Set constants of a module, for small runs."""

    def change(module, **constants):
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)

    return change
