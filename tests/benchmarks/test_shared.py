# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Stored rows. Tables of them are on the pages of results, which test_tables.py compares."""

import threading

import pytest

from benchmarks.shared.records import Records, chosen, read


def test_records_know_what_is_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"seed": 0, "method": "a"}\n{"seed": 1, "meth')
    records = Records(path)  # a line that was cut short is dropped
    assert path.read_text().endswith('"a"}\n')
    missing = list(records.missing(method=["a", "b"], seed=range(2), share=None))
    assert missing == [{"method": "a", "seed": 1}, {"method": "b", "seed": 0},
                       {"method": "b", "seed": 1}]  # fmt: skip
    records.add(method="b", seed=0, curve=[1.0])
    assert read(path)[-1] == {"method": "b", "seed": 0, "curve": [1.0]}
    with path.open("a") as file:  # another process is killed
        file.write('{"seed": 1, "met')
    records.add(seed=2)
    assert [row["seed"] for row in Records(path).rows] == [0, 0, 2]


def test_a_file_is_opened_while_another_process_appends(tmp_path):
    """A line that is not finished yet is not taken for one that was cut short."""
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "rows.jsonl"
    Records(path).add(seed=0)
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"seed": 1')
        thread = threading.Thread(target=Records, args=(path,))
        thread.start()
        thread.join(0.1)
        other.write(b"}\n")
    thread.join()
    assert [row["seed"] for row in Records(path).rows] == [0, 1]


def test_settings_of_a_search():
    common = {"task": "search", "graph": "a"}
    found = [common | {"trial": trial, "settings": {"lr": trial}, "score": score}
             for trial, score in ((0, 1.0), (0, 3.0), (1, 2.5), (1, 2.0))]  # fmt: skip

    def mean(trial):
        return sum(row["score"] for row in trial) / len(trial)

    assert chosen(found, mean, 2, graph="a") == {"lr": 1}
    with pytest.raises(ValueError, match="search of a has not been finished"):
        chosen(found, mean, 3, graph="a")
