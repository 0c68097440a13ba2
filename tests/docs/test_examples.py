# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The examples run, and reach what they claim."""

import pytest
import torch
from documents import load

from pyro_nmm.datasets.nodes import digits
from pyro_nmm.models.annotators import out_of_fold


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_karate(tmp_path):
    karate = load("examples/karate.py")

    args = karate.parser().parse_args(["--output", str(tmp_path / "out" / "karate.png")])
    result = karate.main(args)
    assert args.output.stat().st_size > 50_000
    assert result["accuracy"] > 0.8
    assert result["bound"] <= result["log_prob"] + 0.01
    assert result["log_prob"] - result["bound"] < 0.02
    assert result["error"] < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_few_labels(tmp_path, capsys):
    few_labels = load("examples/few_labels.py")

    output = ["--output", str(tmp_path / "few.png"), "--num-seeds", "1", "--max-iter", "10"]
    args = few_labels.parser().parse_args(output)
    result = few_labels.main(args)
    assert args.output.stat().st_size > 50_000
    ours, others = result["boosting + NMM"], [v for k, v in result.items() if k != "boosting + NMM"]
    assert ours["accuracy"] > max(row["accuracy"] for row in others)
    assert ours["NLL"] < min(row["NLL"] for row in others)
    assert "share of the NMM" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_node_classification(tmp_path):
    node_classification = load("examples/node_classification.py")

    def run(*options):
        output = ["--output", str(tmp_path / "digits.png"), "--num-epochs", "40", *options]
        args = node_classification.parser().parse_args(output)
        return args, node_classification.main(args)

    args, result = run("--checkpoint", str(tmp_path))
    assert args.output.stat().st_size > 50_000
    alone, together = result["GCN"], result["NMM-GCN + StackedNMM"]
    assert together["accuracy"] > 0.93
    for name, row in result.items():
        if "StackedNMM" in name:
            assert row["NLL"] < alone["NLL"]
            assert row["PLL"] > alone["PLL"]
    assert result["joint"] > -alone["NLL"]
    seconds = "s/epoch"
    again = run("--checkpoint", str(tmp_path))[1]  # resumes at the end: the same numbers
    for name in ("GCN", "NMM-GCN + StackedNMM"):
        del result[name][seconds], again[name][seconds]
        assert again[name] == result[name]
    shared = run("--shared", "--consistency", "0", "--num-epochs", "30")[1]
    assert shared["NMM-GCN + StackedNMM"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ising(tmp_path):
    example = load("examples/ising.py")
    args = example.parser().parse_args(
        ["--output", str(tmp_path / "ising.png"), "--num-steps", "200", "--width", "30"]
    )
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    assert 0 < result["NMM"]["KL"] < 0.7 * result["mean field"]["KL"]
    assert result["NMM"]["error"] < 0.9 * result["mean field"]["error"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_link_prediction(tmp_path):
    example = load("examples/link_prediction.py")
    args = example.parser().parse_args(["--output", str(tmp_path / "links.png")])
    args.num_steps = 150
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    for row in result.values():
        assert row["AP"] > 75
        assert row["loss"] < 0.75
    args = example.parser().parse_args(["--dataset", "synthetic", "--num-steps", "2"])
    args.output = None
    assert example.main(args).keys() == {"original", "nmm"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_annotators(tmp_path, monkeypatch):
    """A third of the digits."""
    example = load("examples/annotators.py")
    monkeypatch.setattr(example, "digits", lambda: digits().subgraph(torch.arange(600)))
    args = example.parser().parse_args(["--output", str(tmp_path / "annotators.png")])
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    majority, plain, consensus = (result[name] for name in ("Majority vote", "Dawid-Skene", "NMM"))
    assert majority["accuracy"] < plain["accuracy"] < consensus["accuracy"] - 0.1
    assert consensus["NLL"] < 0.3 * plain["NLL"]
    assert consensus["ECE"] < 0.1
    rates, quality = result["rates"], result["quality"]
    assert ((quality.low - 0.03 < rates) & (rates < quality.high + 0.03)).all()


@pytest.mark.slow
def test_crowds(tmp_path, monkeypatch):
    """Half of the digits: a graph helps, and so does asking."""
    example = load("examples/crowds.py")
    monkeypatch.setattr(example, "digits", lambda: digits().subgraph(torch.arange(900)))
    monkeypatch.setattr(example, "ROUNDS", 1)
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 100)
    options = ["--shares", "0.3", "--output", str(tmp_path / "crowds.png")]
    result = example.main(args := example.parser().parse_args(options))
    assert args.output.stat().st_size > 50_000
    for share, ways in result["shares"].items():
        rivals = ways[example.MAJORITY], ways[example.DAWID_SKENE]
        for name in (example.GRAPH, example.BOTH):
            assert ways[name]["accuracy"] > max(rival["accuracy"] for rival in rivals) + 0.03
            assert ways[name]["NLL"] < min(rival["NLL"] for rival in rivals) / 2
        assert ways[example.BOTH]["ECE"] < 0.1, share
    random, gain = result["asked"].values()
    assert random[0] == gain[0]
    assert gain[1] > random[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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
    output = tmp_path / "cortex.png"
    options = ["--data-root", tmp_path, "--section", "7", "--num-labels", "2", "--output", output]
    result = example.main(example.parser().parse_args([*map(str, options)]))
    assert output.stat().st_size > 50_000
    assert result["NMM"] > 0.9
    assert result["quality"].mean.shape == (6,)


@pytest.mark.slow
def test_denoising(tmp_path):
    example = load("examples/denoising.py")
    small = ["--num-steps", "120", "--width", "8", "--depth", "1", "--crop", "64", "--lr", "0.003"]
    args = example.parser().parse_args([*small, "--output", str(tmp_path / "denoising.png")])
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    assert result["U-Net"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert result["NMM"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert 0.7 < result["NMM"]["coverage"] < 1
