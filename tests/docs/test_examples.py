# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The examples run, and reach what they claim."""

import importlib
import inspect

import pytest
import torch
from documents import load

from pyro_nmm.datasets import digits
from pyro_nmm.models import StackedNMM

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def run(example, folder, *options):
    """The result of an example's main function, which draws a picture."""
    output = folder / "out" / "picture.png"
    result = example.main(example.parser().parse_args([*options, "--output", str(output)]))
    assert output.stat().st_size > 50_000
    return result


def test_pyro_program(capsys):
    program = load("examples/pyro_program.py")
    assert program.losses[-1] < 1 < 4 < program.losses[0]
    assert program.right >= 24
    assert program.check.converged
    assert not program.check.fits
    for name, value in program.guide.median().items():
        draws = program.draws[name]
        assert abs(value - draws.median()) < 0.5 * draws.std()
    assert program.same > 0.33
    assert program.by_elbo > 1.2 * program.guide.median()["kappa"]
    assert program.lost > 0.1
    assert len(capsys.readouterr().out.splitlines()) == 21


def test_borrowed_label(tmp_path):
    """Adjacent nodes agree most often, and nodes without a common source as two coins do."""
    equal = run(load("examples/borrowed_label.py"), tmp_path)
    assert equal[0, 4] == pytest.approx(0.5)
    assert equal[0, 1] > equal[0, 2] > equal[0, 3] > equal[0, 4]


def test_karate(tmp_path):
    result = run(load("examples/karate.py"), tmp_path)
    assert result["accuracy"] > 0.8
    assert result["bound"] <= result["log_prob"] + 0.01
    assert result["log_prob"] - result["bound"] < 0.02
    assert result["error"] < 0.02


def test_few_labels(tmp_path, capsys):
    example = load("examples/few_labels.py")
    result = run(example, tmp_path, "--num-seeds", "1", "--max-iter", "10")
    ours = result.pop("boosting + NMM")
    assert ours["accuracy"] > max(row["accuracy"] for row in result.values())
    assert ours["NLL"] < min(row["NLL"] for row in result.values())
    assert "share of the NMM" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_region(tmp_path, monkeypatch, seed):
    """Intervals by stages hold the most counts, and intervals of a product the fewest."""
    example = load("examples/counts_of_a_region.py")
    monkeypatch.setattr(example, "CHAIN_BLOCKS", 1)  # for speed: nothing is said of the chain rule
    result = run(example, tmp_path, "--num-seeds", "1", "--first-seed", str(seed))
    rows = {name: row for name, [row] in result["counts"].items()}
    names = example.STAGED, example.JOINT, example.PRODUCT
    staged, joint, product = (rows[name]["coverage"] for name in names)
    assert staged > joint > product
    assert min(result["asked"][example.TOGETHER]) > 0


def test_node_classification(tmp_path, monkeypatch):
    steps = inspect.unwrap(StackedNMM.fit).__kwdefaults__
    monkeypatch.setitem(steps, "num_steps", 60)
    example = load("examples/node_classification.py")
    result = run(example, tmp_path, "--num-steps", "40")
    alone, together = result["GCN"], result["NMM-GCN + StackedNMM"]
    assert together["accuracy"] > 0.93
    for name, row in result.items():
        if "StackedNMM" in name:
            assert row["NLL"] < alone["NLL"]
            assert row["PLL"] > alone["PLL"]
    assert result["joint"] > -alone["NLL"]
    shared = run(example, tmp_path, "--shared", "--num-steps", "30")
    assert shared["NMM-GCN + StackedNMM"]["accuracy"] > 0.9


def test_ising(tmp_path):
    result = run(load("examples/ising.py"), tmp_path, "--num-steps", "200", "--width", "30")
    assert 0 < result["NMM"]["KL"] < 0.7 * result["mean field"]["KL"]
    assert result["NMM"]["error"] < 0.9 * result["mean field"]["error"]


@pytest.mark.parametrize("seed", range(5))
def test_fonts(tmp_path, seed):
    """Closer than the mean field on every word, and no worse after a few steps more."""
    for row in run(load("examples/fonts.py"), tmp_path, "--seed", str(seed)):
        free, network, more = (way["KL"] for way in row.values())
        assert 0 < more < network + 0.3
        assert network < 0.8 * free


def test_link_prediction(tmp_path):
    example = load("examples/link_prediction.py")
    for row in run(example, tmp_path, "--num-steps", "150").values():
        assert row["AP"] > 75
        assert row["loss"] < 0.75
    synthetic = run(example, tmp_path, "--dataset", "synthetic", "--num-steps", "2")
    assert synthetic.keys() == {"original", "nmm"}


def test_annotators(tmp_path, monkeypatch):
    """A third of the digits."""
    example = load("examples/annotators.py")
    monkeypatch.setattr(example, "digits", lambda: digits().subgraph(torch.arange(600)))
    result = run(example, tmp_path)
    names = "Majority vote", "Dawid-Skene", "Label spreading", "NMM"
    majority, plain, spread, consensus = (result[name] for name in names)
    assert majority["accuracy"] < plain["accuracy"] < consensus["accuracy"] - 0.1
    assert plain["accuracy"] < spread["accuracy"] - 0.1
    assert consensus["NLL"] < 0.3 * min(plain["NLL"], spread["NLL"])
    assert consensus["ECE"] < 0.1
    rates, quality = result["rates"], result["quality"]
    assert ((quality.low - 0.03 < rates) & (rates < quality.high + 0.03)).all()


def test_crowds(monkeypatch):
    """Half of the digits: a graph helps, and so does asking."""
    example = load("examples/crowds.py")
    monkeypatch.setattr(example, "digits", lambda: digits().subgraph(torch.arange(900)))
    monkeypatch.setattr(example, "ROUNDS", 1)
    result = example.main(example.parser().parse_args(["--shares", "0.3"]))
    for share, ways in result["shares"].items():
        rivals = ways[example.MAJORITY], ways[example.DAWID_SKENE]
        for name in (example.GRAPH, example.BOTH):
            assert ways[name]["accuracy"] > max(rival["accuracy"] for rival in rivals) + 0.03
            assert ways[name]["NLL"] < min(rival["NLL"] for rival in rivals) / 2
        assert ways[example.BOTH]["ECE"] < 0.1, share
    random, gain = result["asked"].values()
    assert random[0] == gain[0]
    assert gain[1] > random[1]


def test_annotators_of_a_section(tmp_path):
    """Files as those of the cortex: a strip of two layers, clustered badly six times."""
    example, (height, width) = load("examples/annotators.py"), (16, 24)
    folder = tmp_path / "dlpfc"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    names = [f"method{m}_PCA" for m in range(6)]
    places, rows = [], [",".join(["key", "ground_truth", *names, "method0_PCA_spatial"])]
    for row in range(height):
        for column in range(row % 2, 2 * width, 2):
            layer, name = int(column >= width), f"spot{row}.{column}"
            wrong = torch.rand(6, generator=generator) < 0.25
            seen = [layer ^ int(x) for x in wrong]
            places.append(f"{name},1,{row},{column},0,0")
            layer = f"Layer_{layer + 1}" if column > 1 else ""
            rows.append(",".join([f"7_{name}", layer, *[str(x + 1) for x in seen], "1"]))
    (folder / "tissue_positions_7.txt").write_text("\n".join(places))
    (folder / "cluster_labels_7.csv").write_text("\n".join(rows))
    options = "--data-root", str(tmp_path), "--section", "7", "--num-labels", "2"
    result = run(example, tmp_path, *options)
    assert result["NMM"] > 0.9
    assert result["quality"].mean.shape == (6,)


def test_denoising(tmp_path):
    small = ["--num-steps", "200", "--width", "8", "--depth", "1", "--crop", "64", "--lr", "0.003"]
    example = importlib.import_module("examples.denoising.__main__")
    result = run(example, tmp_path, *small)
    assert result["U-Net"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert result["NMM"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert 0.7 < result["NMM"]["coverage"] < 1
