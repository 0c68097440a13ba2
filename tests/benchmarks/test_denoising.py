# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of denoising, in small."""

import math
from importlib import import_module

import pytest
import scipy.stats
import torch


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
def test_benchmark_of_denoising(tmp_path):
    benchmark, tables = (
        import_module("benchmarks.images.run"),
        import_module("benchmarks.images.tables"),
    )
    path = tmp_path / "images.jsonl"
    small = ["--smoke", "--results", str(path), "--checkpoints"]
    tasks = ["train", "test", "cost", *small, str(tmp_path)]
    rows = benchmark.main(tasks).rows
    number = len(benchmark.METHODS)
    trained = 5 + 4 + (number - 2) + 5  # in one phase, the trunk, on it, and in one phase again
    assert len(rows) == len(path.read_text().splitlines()) == trained + 4 * number + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    tested = [row for row in rows if row["task"] == "test"]
    noise = 20 * math.log10(255 / 25)  # which an untrained network leaves, and an NMM averages
    for row in tested:
        if row["method"] in ("NMM-Gaussian", "NMM-paper"):  # attend mostly to the pixel itself
            continue
        mixes = row["method"].startswith("NMM")
        more = 5 if mixes else 0
        assert more < row["PSNR"] - noise < more + 2
        best = row.get("log p, scaled", row["log p"])
        assert -5 < best < -4
        if "joint" in row:
            assert best >= row["log p"]
            gap = row["joint"] - row["log p"]
            assert gap > 0.01 if mixes else abs(gap) < 1e-6
        if row["method"] != "U-Net-widths":
            assert 0.85 < row["coverage"] < (1 if more else 0.95)
            assert 60 < row["length"] < 90
    found = {name: text.count("\n") for name, text in tables.tables(rows).items()}
    assert found["denoised"] == 1 + 2 * number
    assert found["denoising steps"] == 1 + 2 * len(tables.STEPS)
    assert found["joint images"] == 1 + 2 * len(benchmark.PARTS)
    assert found["denoising cost"] == 2
    import_module("benchmarks.figures").denoising_steps(rows, tmp_path)
    assert (tmp_path / "denoising_steps.png").stat().st_size > 10_000
    rows = joint_rows(benchmark, [*small, str(tmp_path)], len(rows))
    import_module("benchmarks.images.figures").spectra(rows, tmp_path / "spectra.png")
    assert (tmp_path / "spectra.png").stat().st_size > 10_000
    path.unlink()
    tasks = ["test", "--methods", "NMM", "--crop", "32", *small]
    assert len(benchmark.main([*tasks, str(tmp_path)]).rows) == 4
    other = [str(tmp_path), "--noise", "25", "50", "--datasets", "kodak24"]
    assert len(benchmark.main([*tasks, *other]).rows) == 4 + 2
    path.unlink()
    with pytest.raises(ValueError, match=r"NMM\.0\.fitted\.pt is not there for .*, run train"):
        benchmark.main([*tasks, str(tmp_path / "none")])


def joint_rows(benchmark, small, before):
    """What tiles and spectra add, of networks that give a joint distribution alone."""
    tasks = ["tiles", "spectra", "--methods", "U-Net", "U-Net-widths", "NMM", *small]
    rows = benchmark.main(tasks).rows
    assert len(rows) == before + 2 * 2 * 4
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows[before:]:
        alone = row["method"] == "U-Net-widths"
        if row["task"] == "tiles":
            gaps = [row[f"joint {side}"] - row["log p"] for side in (2, 4, 8, 16)]
            assert all(abs(gap) < 1e-6 if alone else gap > 0.01 for gap in gaps)
            assert alone or gaps == sorted(gaps)
        else:
            assert all(len(row[name]) == 16 for name in ("error", "sample", "another", "apart"))
    joint, claims = (
        import_module("benchmarks.images.joint_tables"),
        import_module("benchmarks.images.claims"),
    )
    found = {name: text.count("\n") for name, text in joint.tables(rows).items()}
    assert found == {"denoising tiles": 1 + 2 * 2, "denoising spectra": 1 + 2 * 2 * 3}
    assert "for the U-Net with widths" in " ".join(claims.spectra_claim(rows).split())
    return rows


@pytest.mark.parametrize("name", ["log p", "log p, logistic"])
def test_densities_of_grey_levels(name):
    """Masses that sum to one, as SciPy's, far out too."""
    density = import_module("benchmarks.images.scores").DENSITIES[name]
    law = {"log p": scipy.stats.norm, "log p, logistic": scipy.stats.logistic}[name]
    floor = 0.0 if name == "log p" else 1e-5
    for mean in (-3.0, 100.2, 254.9):
        at = torch.tensor([mean], dtype=torch.double)
        found = [density(at, torch.tensor([k]), 8.0) for k in range(256)]
        assert sum(map(math.exp, found)) == pytest.approx(1)
        for k in (0, 1, 41, 100, 160, 254, 255):
            gap = abs(k - mean)
            mass = law.sf((gap - 0.5) / 8) - law.sf((gap + 0.5) / 8)
            mass = law.cdf((0.5 - mean) / 8) if k == 0 else mass
            mass = law.sf((254.5 - mean) / 8) if k == 255 else mass
            mass = (20 * mass + floor) / (20 + 256 * floor)
            assert found[k] == pytest.approx(math.log(mass), rel=1e-6)
