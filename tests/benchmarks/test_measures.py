# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Small runs of pixels, of speed and of noise, and what their rows must obey."""

import math

import pytest
import torch
from PIL import Image
from stored import counts

import benchmarks.images.run as images
import benchmarks.random_fields.run as random_fields
import benchmarks.scale.run as scale
from benchmarks.images.tables import TABLES as IMAGES
from benchmarks.latent import hidden
from benchmarks.random_fields import fields
from benchmarks.scale import calls, speed
from benchmarks.shared.records import pick, read
from examples.denoising.training import photographs
from pyro_nmm.models import StackedNMM

#: Of a few steps of annealing.
FEW_STEPS = pytest.mark.filterwarnings("ignore:.*raise num_steps:UserWarning")


@pytest.mark.slow
def test_images(smaller, tmp_path):
    """Parts of two photographs, of which one validates."""
    smaller(images, KEPT=1, BATCH=2)
    for folder, number in {"bsds300/images/train": 2, "kodak24": 1}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, image in list(photographs().items())[:number]:
            part = image[:, :48, :56].permute(1, 2, 0).byte().numpy()
            Image.fromarray(part).save(tmp_path / folder / f"{name}.png")
    path, names = tmp_path / "images.jsonl", ["U-Net", "U-Net-log", "U-Net-widths", "NMM"]
    small = ["--num-steps", "5", "--watch-every", "1", "--width", "6", "--depth", "1"]
    small += ["--datasets", "kodak24", "--results", str(path)]
    small += ["--data-root", str(tmp_path), "--checkpoints", str(tmp_path), "--methods", *names]
    tasks = ["train", "test", "joint", "cost", *small]
    rows = images.main(tasks).rows
    steps = 5 + 4 + 3  # in one phase, the trunk, and on it
    assert counts(rows) == {"train": steps, "test": 4, "tiles": 2, "spectra": 2, "cost": 1}
    # What is stored is not measured again, and checkpoints are not trained further.
    assert images.main(tasks).rows == rows == read(path)
    noise = 20 * math.log10(255 / 25)  # the PSNR of an untrained U-Net; an NMM averages
    for row in pick(rows, task="test"):
        more = 5 * (row["method"] == "NMM")
        assert more < row["PSNR"] - noise < more + 2
        best = row.get("log p, scaled", row["log p"])
        assert max(row["log p"], -5) <= best < -4
        if "joint" in row:
            gap = row["joint"] - row["log p"]
            assert gap > 0.01 if more else abs(gap) < 1e-6
        if row["method"] != "U-Net-widths":
            assert 0.85 < row["coverage"] < (1 if more else 0.95)
            assert 60 < row["length"] < 90
    alone, mixed = pick(rows, task="tiles")
    for row in (alone, mixed):
        gaps = [row[f"joint {side}"] - row["log p"] for side in (2, 4, 8, 16)]
        assert all(gap > 0.01 if row is mixed else abs(gap) < 1e-6 for gap in gaps)
    assert gaps == sorted(gaps)
    for row in pick(rows, task="spectra"):
        assert all(len(row[name]) == 16 for name in ("error", "sample", "another", "apart"))
    assert all("| ---" in make({"images": rows}) for make in IMAGES)
    # Other noise is measured anew on what was trained, and other settings are another run.
    other = [*tasks[1:2], *small, "--crop", "32", "--noise", "25", "50", "--methods", "U-Net"]
    more = images.main(other).rows[len(rows) :]
    assert [row.get("noise") for row in more] == [None, 50.0]
    assert more[0]["settings"]["crop"] == 32


@pytest.mark.slow
@FEW_STEPS
def test_hidden_fields(twice, smaller):
    smaller(hidden, SIZE=10, NUM_STEPS=2, SWEEPS=8, ANNEAL=3, ROUNDS=1, FIELDS=["potts", "nmm"])
    rows = twice(hidden.main, "normalizers select compare --seeds 1 --noise 0.5")
    number = {"normalizers": len(hidden.COUPLINGS), "search": 2 * len(hidden.SOURCES)}
    assert counts(rows) == number | {"compare": 2 * 5}
    for row in pick(rows, task="compare"):
        assert 0 <= row["Brier"] <= 2
        assert 0 <= row["accuracy"] <= 1
        assert row["method"] != "independent" or row["bound"] == row["log evidence"]


@pytest.fixture
def small_fields(smaller):
    """Fields of a few pixels, and fits of a few steps."""
    smaller(fields, STRIPS={2: (2, 12), 4: (2, 8), 8: (2, 5)}, SEEDS=range(1), SIZE=6)
    smaller(fields, COUPLINGS={2: [0.4], 4: [1.0], 8: [1.22]})
    smaller(random_fields, STEPS=dict.fromkeys(random_fields.STEPS, 4), SIZES=[8])
    smaller(random_fields, STARTS=1, NARROW={2: [], 4: [], 8: []}, LARGE=[])
    smaller(fields, MANY={"few": ((2, 12), (0.1, 0.6), range(2))})
    smaller(random_fields, FIVE=[(2, 0.4)], LADDER=[2], RUNS=range(1))


@pytest.mark.slow
@FEW_STEPS
def test_random_fields(twice, small_fields, tmp_path):
    """Divergences are positive, and bounds are above them."""
    tasks = "strips letter plain amortized scaling many_fields time_to_divergence"
    rows = twice(random_fields.main, f"{tasks} deviations")
    some = {"amortized": 2, "many fields": len(random_fields.ANSWERS), "time": 1}
    assert counts(rows) == dict.fromkeys(tasks.split()[:5], 1) | some
    fits = twice(random_fields.main, "corrected large_corrected wide_corrected")
    assert counts(fits) == {"corrected": 6, "large, corrected": 8}
    for row in fits:
        assert row["bound"] < row["mean field"] + 4 * row["error"] + 1e-5
        assert row["bound"] > 0 or row["kind"] == "letter"  # whose log Z is an estimate
    (before,) = twice(random_fields.main, "time_to_divergence --code before")
    assert before["KL"] > 0
    for row in pick(rows, task="many fields"):
        assert min(row["KL"]) > 0, row["method"]
        assert all(0 < error < 1 for error in row["error"])
    others = read(tmp_path / "deviations.jsonl")
    assert [row["change"] for row in others] == ["", "no groups"]
    strips, _, plain, *_ = rows
    assert strips["mean field"] > 0
    assert strips["NMM bound"] > strips["NMM"] - 4 * strips["error"] > -8 * strips["error"]
    assert 0 < strips["marginals"]["NMM"] < 1
    assert plain["log Z"] == pytest.approx(fields.kac_ward(6, 6, plain["coupling"]))
    assert min(plain[name] + plain["log Z"] for name in ("mean field", "NMM", "NMM-CNN")) > 0


RIVALS = {
    "strips": ["NMM, 5 x 5, 2 steps", "NMM of half, row by row, 2 steps", "Bethe"],
    "plain": ["mean field", "chains", "NMM of half, 2 steps", "Bethe"],
    "letter": ["VAN, 3 steps", "windows 5 x 5, 4 given"],
}
POTTS = ["NMM, 2 steps", "tree-reweighted", "windows 3 x 3, 3 given"]


@pytest.mark.slow
@pytest.mark.parametrize("task", RIVALS)
def test_rivals_on_random_fields(task, tmp_path, small_fields, smaller):
    """A row for each field and method, once. No divergence and no upper bound is negative."""
    exact = fields.noisy_letter(0)[0].log_normalizer().item()
    (tmp_path / "fields.jsonl").write_text(f'{{"task": "letter", "seed": 0, "log Z": {exact}}}\n')
    smaller(random_fields, NARROW={2: RIVALS["strips"], 4: POTTS, 8: POTTS}, LARGE=RIVALS[task])
    found = []
    for _ in range(2):
        random_fields.main([task, "--results", str(tmp_path / "fields.jsonl")])
        found.append(read(tmp_path / "fields_compared.jsonl"))
    rows = found[0]
    assert [row["method"] for row in rows] == RIVALS[task] + 2 * POTTS * (task == "strips")
    assert len(found[1]) == len(rows)
    for row in rows:
        if row["method"] == "tree-reweighted":
            assert row["log Z error"] > -1e-3
        elif row["method"] != "Bethe":
            assert -5 * row.get("error", 0.0) - 1e-3 < row["KL"] < 100


def test_noise(twice):
    """Gradients of cheaper estimators are less noisy, and estimates nearer with more draws."""
    rows = twice(scale.main, "variance gradients --shares 0.02 --samples 2 --repeats 3")
    noise = {row["estimator"]: row["sd"] for row in rows if "task" not in row}
    assert noise["reinforce"] > noise["reward_to_go"] > noise["no_score"] > 0
    assert [row["steps"] for row in rows] == [3, 15, 3, 3, 3, 3, 3]


def test_sampled_estimates(twice, smaller):
    smaller(speed, CHAINS=8)
    rows = twice(scale.main, "marginals likelihood --shares 0.02 --samples 2 16 --repeats 2")
    assert counts(rows) == {"marginals": 4, "likelihood": 3}
    error = {(row["weighted"], row["draws"]): row["error"] for row in rows[:4]}
    assert 0 < error[False, 16] < error[False, 2] < 0.1
    bound, *estimates = (row["mean"] for row in rows[4:])
    assert abs(bound - estimates[-1]) < 1 < -bound


def here(threads, function, *args):
    return function(*args)


def test_speed(twice, smaller):
    smaller(speed, MEDIUM=(150, 300, 3), PUBMED=(150, 300, 3), in_a_process=here)
    small = "--samples 2 --repeats 1 --sizes 1000"
    rows = twice(scale.main, f"draw step evidence growth {small}")
    assert counts(rows)["step"] == 9
    assert counts(rows)["evidence"] == 3
    assert {row["code"] for row in pick(rows, task="draw")} >= {"loop", "sweeps"}
    assert 0 <= rows[-1]["above"] <= rows[-1]["peak"]
    queries = twice(scale.main, "device --sizes 200 --repeats 1")
    gpu = torch.cuda.is_available()
    assert len(queries) == 17 + 5 * gpu
    for row in queries:
        places = set() if "captured" in row["query"] else {"cpu"}
        assert row["seconds"].keys() == (places | {"cuda"} if gpu else places)
    for row in rows + queries:
        seconds = row["seconds"]
        assert min(seconds.values() if isinstance(seconds, dict) else [seconds]) > 0


def test_calls(twice, smaller):
    smaller(calls, SIZE=60, CHAINS=2, STEPS=2)
    rows = twice(scale.main, "calls --code small")
    assert len(rows) == 15
    assert all(row["calls"] >= row["waits"] >= 0 for row in rows)


class Quick(StackedNMM):
    """With a fit of two steps."""

    def fit(self, *args, **options):
        return super().fit(*args, **options | {"num_steps": 2})


def test_large_graphs(twice, smaller):
    smaller(speed, StackedNMM=Quick)
    for query in speed.QUERIES:
        row = speed.one_query(query, 200, 1000, 4)
        assert row["edges"] <= 1200
        assert 0 <= row["above"] <= row["peak"]
        assert row["seconds"] > 0
    smaller(speed, in_a_process=here, QUERIES={"condition": (2000, 20_000, 4)})
    rows = twice(scale.main, "scale sizes --parts 1 100 --sizes 500")
    assert counts(rows) == {"scale": 1, "sizes": 5}
    assert len({row["stage"] for row in rows[1:]}) == 5
    assert len({row["edges"] for row in rows[1:]}) == 1


@pytest.mark.slow
def test_training(twice, smaller):
    settings = {"lr": 0.02, "weight_decay": 5e-4, "dropout": 0.5, "floor": 0.1, "gamma": 2.0}
    smaller(scale, chosen=lambda rows, **key: settings)
    # Two processes that start within two seconds, with half a second an epoch.
    smaller(scale, timed=lambda function, key, root, number: (None, 2 + number / 2))
    small = "--datasets digits --num-epochs 2 --num-seeds 1"
    rows = twice(scale.main, f"training --batch-sizes 30 {small}")
    assert [row["steps"] for row in rows] == [2, 6, 6]
    rows = twice(scale.main, f"bound throughput --batch-sizes 600 {small}")
    assert counts(rows) == {"bound": 3, "throughput": 2}
    parts = {row["way"]: row for row in pick(rows, task="bound")}
    assert all(row["bound"] < row["estimate"] + 0.01 for row in parts.values())
    # Clusters hold neighbours, so that a sum over them loses less of their correlation.
    assert parts["random"]["estimate"] < parts["clusters"]["estimate"]
    assert [row["seconds"] for row in rows[-2:]] == [0.5, 0.5]


@pytest.mark.slow
def test_epochs_and_tightness(twice):
    rows = twice(scale.main, "epochs --datasets digits --repeats 1", "epochs")
    assert [row["backbone"] for row in rows] == ["gcn", "gat", "appnp"]
    assert all(row["ms"]["networks"] > 0 and len(row["ratios"]) == 3 for row in rows)
    rows = twice(scale.main, "tightness --datasets digits --num-epochs 10")
    assert [row["epoch"] for row in rows] == [0, 10]
    for row in rows:
        assert row["pair bound"] < row["pair exact"] + 0.01
        assert row["test bound"] < row["test estimate"] + 0.01
