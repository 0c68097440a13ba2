# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of denoising: a small run of all tasks, its scores and its tables."""

import json
import math
import re

import pytest
import scipy.stats
import torch
from PIL import Image

from benchmarks.images import run, scores, tables
from benchmarks.shared.records import RESULTS, Records, pick, read
from pyro_nmm import LogisticConcentrations, Neighborhood, NeighborMixture
from pyro_nmm.datasets import photographs

FOLDERS = {"bsds300/images/train": 2, "bsds300/images/test": 2, "kodak24": 1}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Options of a small run on parts of two photographs, of which one validates."""
    torch.set_default_dtype(torch.float)
    monkeypatch.setattr(run, "KEPT", 1)
    monkeypatch.setattr(run, "BATCH", 2)
    for folder, number in FOLDERS.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, image in list(photographs().items())[:number]:
            part = image[:, :48, :56].permute(1, 2, 0).byte().numpy()
            Image.fromarray(part).save(tmp_path / folder / f"{name}.png")
    sizes = {"num-steps": 5, "watch-every": 1, "width": 6, "depth": 1, "data-root": tmp_path}
    sizes |= {"results": tmp_path / "images.jsonl", "checkpoints": tmp_path}
    return [text for name, value in sizes.items() for text in (f"--{name}", str(value))]


def test_a_small_run_of_all_tasks(small, tmp_path):
    tasks = ["train", "test", "cost", *small]
    rows, number = run.main(tasks).rows, len(run.METHODS)
    trained = 5 + 4 + (number - 2) + 5  # in one phase, the trunk, on it, and in one phase again
    assert len(rows) == len(read(tmp_path / "images.jsonl")) == trained + 3 * number + 1
    # What is stored is not measured again, and checkpoints are not trained further.
    assert len(run.main(tasks).rows) == len(rows)
    check_tests(pick(rows, task="test"))
    rows = run.main(["joint", "--methods", "U-Net", "U-Net-widths", "NMM", *small]).rows
    check_dependence(rows[trained + 3 * number + 1 :])
    assert rows == read(tmp_path / "images.jsonl")
    found = {table.__name__: table({"images": rows}) for table in tables.TABLES}
    assert found["denoised"].count("\n") == 1 + 2 * number
    assert found["denoising_steps"].count("\n") == 1 + 2 * math.comb(number, 2)
    assert found["denoising_tiles"].count("\n") == 1 + 2 * 2
    assert found["denoising_spectra"].count("\n") == 1 + 2 * 2 * 3
    assert found["denoising_samples"].count("\n") == 1 + 2 * 2 * 4
    assert found["denoising_cost"].count("\n") == 2
    for make in tables.FIGURES.values():
        make({"images": rows}).savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000


def check_tests(rows):
    noise = 20 * math.log10(255 / 25)  # the PSNR of an untrained U-Net; an NMM averages
    for row in rows:
        if row["method"] in ("NMM-Gaussian", "NMM-paper"):  # they attend mostly to the pixel itself
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


def check_dependence(rows):
    """Rows of methods with a joint distribution alone."""
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        alone = row["method"] == "U-Net-widths"
        if row["task"] == "tiles":
            gaps = [row[f"joint {side}"] - row["log p"] for side in (2, 4, 8, 16)]
            assert all(abs(gap) < 1e-6 if alone else gap > 0.01 for gap in gaps)
            assert alone or gaps == sorted(gaps)
        else:
            assert all(len(row[name]) == 16 for name in ("error", "sample", "another", "apart"))


def test_options_of_the_test(small):
    tasks = ["test", "--methods", "U-Net-widths", "--crop", "32", *small]
    rows = run.main(tasks).rows  # also trains
    assert len(pick(rows, task="test")) == 3
    other = ["--noise", "25", "50", "--datasets", "kodak24"]
    more = run.main([*tasks, *other]).rows[len(rows) :]
    assert [row["noise"] for row in more] == [50.0]
    assert more[0]["settings"]["crop"] == 32
    with pytest.raises(ValueError, match=r"checkpoint .* is of another run"):
        run.main([*tasks, "--lr", "0.1"])


def test_noise_of_other_levels_is_the_same_but_for_its_size():
    image = torch.randint(256, (3, 5, 4))
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(7))
    assert torch.equal(run.noisy(image, 7), image + 25.0 * noise)
    assert torch.equal(run.noisy(image, 7, 50.0), image + 50.0 * noise)


@pytest.mark.parametrize("name", ["log p", "log p, logistic"])
def test_densities_of_grey_levels(name):
    """Masses that sum to one, as SciPy's, far out too."""
    density = scores.DENSITIES[name]
    law = {"log p": scipy.stats.norm, "log p, logistic": scipy.stats.logistic}[name]
    floor = 0.0 if name == "log p" else 1e-5
    for mean in (-3.0, 100.2, 254.9):
        at = torch.tensor([mean])
        found = [density(at, torch.tensor([k]), 8.0) for k in range(256)]
        assert sum(map(math.exp, found)) == pytest.approx(1)
        for k in (0, 1, 41, 100, 160, 254, 255):
            gap = abs(k - mean)
            mass = law.sf((gap - 0.5) / 8) - law.sf((gap + 0.5) / 8)
            mass = law.cdf((0.5 - mean) / 8) if k == 0 else mass
            mass = law.sf((254.5 - mean) / 8) if k == 255 else mass
            mass = (20 * mass + floor) / (20 + 256 * floor)
            assert found[k] == pytest.approx(math.log(mass), rel=1e-6)


def test_the_highest_of_a_peak():
    """As a search of all values finds it, at the ends too, and in fewer steps."""
    for place in range(-3, 45):
        asked = []

        def score(value, place=place, asked=asked):
            asked.append(value)
            return -abs(scores.FACTORS.index(value) - place)

        assert scores.highest(scores.FACTORS, score) == scores.FACTORS[min(max(place, 0), 40)]
        assert len(asked) <= 12
    y = torch.distributions.Normal(100.0, 9.0).sample((3, 20, 20)).round().clamp(0, 255)

    def likelihood(width):
        return scores.log_logistic(torch.full(y.shape, 100.0), y.long(), width)

    assert scores.highest(scores.WIDTHS, likelihood) == max(scores.WIDTHS, key=likelihood)


def mixture(height, width, scale=2.0, level=None):
    """Pixels with means of their own, or all the same."""
    torch.manual_seed(0)
    hood, shape = Neighborhood.grid(height, width), (1, 3, height * width)
    mean = 60 + 20 * torch.rand(shape) if level is None else torch.full(shape, level)
    alpha = LogisticConcentrations(mean, 4.0, scale)
    return NeighborMixture(hood, alpha, torch.randn(1, 1, hood.num_edges))


@pytest.mark.parametrize("side", [1, 2, 3])
def test_tiles_are_marginals_of_the_mixture(side):
    """Exactly, also where an image does not split into whole tiles."""
    mix = mixture(3, 4)
    y = torch.randint(50, 90, (1, 3, 12))
    parts, pixels = scores.cut(mix, 3, 4, side)
    assert sorted(pixels.tolist()) == list(range(12))
    place = pixels.argsort()
    for top in range(0, 3, side):
        for left in range(0, 4, side):
            tile = [4 * i + j for i in range(top, min(top + side, 3))
                    for j in range(left, min(left + side, 4))][:3]  # fmt: skip
            nodes = torch.tensor(tile)
            expected = mix.log_marginal(nodes, y[..., nodes])
            found = parts.log_marginal(place[nodes], y[..., nodes])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_tiles_share_no_source():
    mix = mixture(4, 4)
    parts, pixels = scores.cut(mix, 4, 4, 2)
    y, near = torch.full((1, 3, 2), 70), torch.tensor([1, 2])  # of two tiles
    pair = pixels.argsort()[near]
    alone = sum(parts.log_marginal(pair[i : i + 1], y[..., i : i + 1]) for i in (0, 1))
    torch.testing.assert_close(parts.log_marginal(pair, y), alone)
    assert (mix.log_marginal(near, y) > alone).all()


def test_bounds_of_tiles():
    mix = mixture(12, 10, scale=1.0)
    row = scores.tiles(mix, mix.sample().view(3, 12, 10))
    bounds = [row["log p"], *(row[f"joint {side}"] for side in scores.SIDES), row["joint"]]
    assert bounds[0] < bounds[1] < bounds[-1]
    assert row["joint 16"] == pytest.approx(row["joint"], abs=0.1)  # another order, same image


def test_power_spectra():
    """White noise has its variance everywhere, a wave its power in its own bin."""
    torch.manual_seed(0)
    found = scores.power(3 * torch.randn(400, 3, 32, 48))
    assert len(found) == scores.BINS
    assert found == pytest.approx([9.0] * scores.BINS, rel=0.1)
    wave = torch.sin(2 * math.pi * 0.27 * torch.arange(64)).expand(1, 64, 64)
    for field in (wave, wave.mT):
        found = scores.power(field)
        assert found.index(max(found)) == int(0.27 / scores.NYQUIST * scores.BINS)


def test_correlations_at_a_distance():
    torch.manual_seed(0)
    x = torch.randn(200, 1, 60, 60)
    smooth = x[..., 1:, 1:] + x[..., :-1, 1:] + x[..., 1:, :-1] + x[..., :-1, :-1]
    for field, lag, expected in ((x, 1, 0.0), (smooth, 1, 2.0), (smooth, 2, 0.0)):
        assert scores.at_lag(torch.mul, field, lag) == pytest.approx(expected, abs=0.04)
    assert scores.at_lag(torch.eq, torch.eye(4), 1) == 0.5


def test_spectra_of_samples():
    """Shared neighbours make samples smoother than independent draws from their marginals."""
    mix = mixture(48, 48, scale=0.2, level=100.0)
    mix = NeighborMixture(mix.hood, mix.alpha, torch.zeros_like(mix.logits))
    row = scores.spectra(mix, mix.sample().view(3, 48, 48))
    low, high = (sum(row["sample"][part]) / 4 for part in (slice(4), slice(12, 16)))
    assert low > 1.3 * high
    # Of 81 pairs of choices 6 are the same, and then the second repeats the first.
    repeats = 6 / 81 / (1 + 0.2 + 256e-5)
    assert row["lags"]["sample"][0] == pytest.approx(repeats, abs=0.03)
    assert row["lags"]["apart"][0] == pytest.approx(0, abs=0.03)
    gap = row["ties"]["sample"] - row["ties"]["apart"]
    assert gap == pytest.approx(repeats * (1 - row["ties"]["apart"]), abs=0.02)
    assert row["total"] == pytest.approx(0.2 + 256e-5)
    # Deviations of the same law everywhere: independent ones are white.
    assert sum(row["apart"][:8]) == pytest.approx(sum(row["apart"][8:]), rel=0.3)


SETTINGS = {"num_steps": 9, "width": 2, "depth": 1, "batch_size": 1, "lr": 1e-3}
ROW = {"dataset": "kodak24", "settings": SETTINGS, "method": "NMM", "seed": 0}


def rows_of(noise, gain):
    """Two seeds and three images, on which one method has ``gain`` more than the control."""
    row = ROW | {"task": "test", "coverage": 0.9, "length": 9.0, "log p, logistic": None}
    row |= {} if noise is None else {"noise": noise}
    return [
        row | {"method": method, "seed": seed, "image": image, "PSNR": 30 + more,
               "log p": -3.5 + more, "joint": -3.4, "log p, scaled": -3.4 + more,
               "joint, scaled": -3.3}
        for method, more in (("U-Net-log", 0.0), ("NMM", gain), ("U-Net-widths", 0.1))
        for seed in (0, 1) for image in "abc"
    ]  # fmt: skip


def lines_of(table, rows):
    """Lines of a table as dicts."""
    head, _, *lines = ([c.strip() for c in re.split(r"(?<!\\)\|", line[1:-1])]
                       for line in table({"images": rows}).splitlines())  # fmt: skip
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_differences_are_paired_at_each_noise():
    rows = rows_of(50.0, -0.2) + rows_of(None, 0.3)
    lines = lines_of(tables.denoising_steps, rows)
    found = {(line["noise"], line["method"], line["minus"]): line["PSNR, dB"] for line in lines}
    assert next(iter(found))[0] == "25"  # rows without noise, and by size
    assert found["25", "NMM", "U-Net-log"] == "+0.30 ± 0.00 (median +0.30)"
    assert found["50", "NMM", "U-Net-log"] == "-0.20 ± 0.00 (median -0.20)"
    assert len(found) == 6
    # A seed of one method alone counts in no difference.
    more = rows[0] | {"method": "NMM", "seed": 2, "PSNR": 90.0}
    assert lines_of(tables.denoising_steps, [*rows, more]) == lines
    assert lines_of(tables.denoised, [*rows, more]) != lines_of(tables.denoised, rows)
    # Stored rows of noise 25 are found by the key that has none.
    records = Records(None)
    records.rows = rows
    key = {"task": "test", "method": "NMM", "seed": [0, 1], "noise": [None, 15.0, 50.0]}
    assert [row["noise"] for row in records.missing(**key)] == [15.0, 15.0]


def test_distances_of_spectra():
    """Ten times the power in one of two halves is 10 dB there, and 10 / sqrt(2) over all."""
    error, more = [1.0] * 16, [1.0] * 8 + [10.0] * 8
    row = ROW | {"task": "spectra", "total": 3.0, "error": error, "apart": error}
    row |= {"sample": more, "another": more, "ties": dict.fromkeys(tables.DRAWN, 0.1)}
    row |= {"lags": {name: [0.4, 0.3, 0.2, 0.1] for name in tables.DRAWN}}
    lines = lines_of(tables.denoising_spectra, [row | {"image": image} for image in "ab"])
    assert [line["all"] for line in lines] == ["7.1 ± 0.0", "0.0 ± 0.0", "0.0 ± 0.0"]
    assert lines[0]["1/4 to 1/2"] == "10.0 ± 0.0 (+10.0)"
    assert lines[0]["1/8 to 1/4"] == "0.0 ± 0.0 (+0.0)"


def stored():
    """The first image of all groups of stored rows."""
    found = {}
    for row in read(RESULTS / "images.jsonl"):
        names = [row.get(name) for name in ("task", "dataset", "method", "seed", "noise")]
        found.setdefault(json.dumps([*names, row["settings"]]), row)
    return list(found.values())


SHOWN = {
    "train": [tables.denoising_validated],
    "test": [tables.denoised],
    "tiles": [tables.denoising_tiles],
    "spectra": [tables.denoising_spectra, tables.denoising_samples],
}


def test_every_group_of_stored_rows_is_shown():
    rows = stored()
    assert len(rows) == 140
    parts = {}
    for row in rows:  # each line depends on the rows of its task, images and network alone
        key = row["task"], row.get("dataset"), json.dumps(row["settings"])
        parts.setdefault(key, []).append(row)
    for (task, *_), part in parts.items():
        for table in SHOWN.get(task, []):
            whole = table({"images": part})
            for row in part:
                left = [other for other in part if other is not row]
                assert table({"images": left}) != whole, row
    assert tables.denoising_cost({"images": rows}).count("\n") == 2


def test_new_names_and_settings_appear():
    """Nothing is looked up in a list of what is known."""
    for task, fields in {"test": ("method", "dataset"), "train": ("method",)}.items():
        rows = pick(stored(), task=task)[-20:]
        for field in fields:
            more = {"images": [*rows, rows[0] | {field: "another one"}]}
            assert "another one" in SHOWN[task][0](more)
        other = rows[0] | {"settings": rows[0]["settings"] | {"num_steps": 123}}
        assert "123 steps" in SHOWN[task][0]({"images": [*rows, other]})
