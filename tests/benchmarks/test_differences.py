# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What tables compare: the same seeds, splits and images, and fits that the answers chose."""

import statistics

import torch
from stored import lines

from benchmarks.images import tables as images
from benchmarks.links import tables as links
from benchmarks.nodes import tables as nodes
from benchmarks.on_top import tables as on_top
from benchmarks.scale import tables as scale


def seeds(row, *values, **more):
    """A row for each seed, with the values of that seed."""
    return [row | more | {"seed": seed} | value for seed, value in enumerate(values)]


def scored(**scores):
    return {"test": {"accuracy": 0.5, "nll": 0.5, "ece": 0.0, "brier": 0.5} | scores}


NODES = {"dataset": "cora", "backbone": "gcn", "joint": 0.0}


def test_pairs_of_nodes_are_on_the_splits_that_all_methods_share():
    """Public means are over all seeds, and tests over the common ones."""
    known = {"backbone": range(6), "backbone, temperature": range(6), "NMM": range(1, 5),
             "NMM, stacked": (9,)}  # fmt: skip
    torch.manual_seed(0)
    rows, values = [], {}
    for method, seed in ((m, s) for m, splits in known.items() for s in splits):
        # The seeds that the NMM lacks have the backbone's worst values.
        score = 0.5 + 0.01 * torch.rand(()).item() - 0.4 * (seed in (0, 5)) + 0.01 * ("N" in method)
        values[method, seed] = score
        row = NODES | {"method": method, "seed": seed} | scored(accuracy=score, nll=-score)
        rows += [row | {"task": "accuracy"}]
        rows += [row | {"task": "pairs", "ratio": 0.2, "own product": score}]

    def mean(method, splits):
        return statistics.mean(values[method, seed] for seed in splits)

    made = (
        make({"nodes": rows})
        for make in (nodes.accuracy, nodes.pairs, nodes.against_backbone_in_short)
    )
    hits, pairs, gains = ({line["model"]: line for line in lines(text)} for text in made)
    hits = {name: line["Cora: accuracy, %"] for name, line in hits.items()}
    assert hits["backbone"].startswith(f"{100 * mean('backbone', range(6)):.1f} ± ")
    assert hits["NMM"].startswith(f"{100 * mean('NMM', range(1, 5)):.1f} ± ")
    gap = 100 * (mean("NMM", range(1, 5)) - mean("backbone", range(1, 5)))
    assert gains["NMM"]["accuracy minus backbone, points"] == f"{gap:+.1f}"
    for name in ("backbone", "NMM"):
        cell = pairs[name]["Cora 0.2"]
        assert cell.startswith(f"{mean(name, range(1, 5)):.3f} ± ")
        assert "split" not in cell
    assert pairs["number of splits"]["Cora 0.2"] == "4"
    assert pairs["StackedNMM on NMM"]["Cora 0.2"].endswith("(1 split)")


def runs(lead):
    """Fifteen runs of StackedNMM, a rival that is worse by ``lead``, and one that is as good."""
    noise = torch.linspace(-0.01, 0.01, 15).tolist()
    methods = {"GATS": [0.5 + lead + x for x in noise], "C&S": [0.501 - x for x in noise]}
    row = {"task": "splits", "dataset": "cora", "backbone": "gcn", "joint": -0.4, "pairs": -0.9}
    return [
        row | {"method": method, "split": number // 3, "fold": number % 3, "fit seconds": 1.0}
        | scored(nll=nll, brier=nll, ece=nll)
        for method, values in (methods | {"StackedNMM": [0.5] * 15}).items()
        for number, nll in enumerate(values)
    ]  # fmt: skip


def test_differences_from_rivals_are_marked_and_missed_cells_named():
    text = on_top.calibration({"calibration": runs(0.02)}).splitlines()[2:]
    found = {line.split(" | ")[2]: line.split(" | ")[6] for line in text}
    assert found["GATS"] == "-0.020 ± 0.006 †"
    assert found["C&S"] == "-0.001 ± 0.006"
    assert found["StackedNMM"] == ""
    assert "+0.020 ± 0.006 ‡" in on_top.calibration({"calibration": runs(-0.02)})
    [line] = lines(on_top.missed_cells({"calibration": runs(-0.02)}))
    assert line["NLL minus the best rival's"] == "+0.0200 (GATS)"
    assert line["missed"] == "NLL, Brier, ECE"


def test_differences_of_images_are_paired_at_each_noise():
    row = {"task": "test", "dataset": "kodak24", "coverage": 0.9, "length": 9.0, "joint": -3.4}
    row |= {"log p, logistic": None, "joint, scaled": -3.3, "settings": {"num_steps": 9}}
    row["settings"] |= {"width": 2, "depth": 1, "batch_size": 1, "lr": 1e-3}
    rows = [
        row | noise | {"method": method, "seed": seed, "image": image, "PSNR": 30 + more,
                       "log p": -3.5 + more, "log p, scaled": -3.4 + more}
        for noise, gain in (({"noise": 50.0}, -0.2), ({}, 0.3))
        for method, more in (("U-Net-log", 0.0), ("NMM", gain), ("U-Net-widths", 0.1))
        for seed in (0, 1) for image in "abc"
    ]  # fmt: skip
    found = lines(images.denoising_steps({"images": rows}))
    by_name = {(line["noise"], line["method"], line["minus"]): line["PSNR, dB"] for line in found}
    assert next(iter(by_name))[0] == "25"  # rows without noise, and by size
    assert by_name["25", "NMM", "U-Net-log"] == "+0.30 ± 0.00 (median +0.30)"
    assert by_name["50", "NMM", "U-Net-log"] == "-0.20 ± 0.00 (median -0.20)"
    assert len(by_name) == 6
    # A seed of one method alone counts in no difference.
    more = [*rows, rows[0] | {"method": "NMM", "seed": 2, "PSNR": 90.0}]
    assert lines(images.denoising_steps({"images": more})) == found
    assert images.denoised({"images": more}) != images.denoised({"images": rows})


def measured(guide, gain, **more):
    row = {"task": "compare", "dataset": "cora", "guide": guide} | more
    return seeds(row, *[{"test": {"AP": 90 + gain + s / (2 + gain), "AUC": 80 + gain}}
                        for s in range(4)])  # fmt: skip


def test_rivals_of_links_are_paired():
    """On the same splits, and apart from splits that settings were searched on."""
    rows = measured("nmm", 1.0) + measured("sage", 3.0)[1:]
    first, second = lines(links.link_rivals({"links": rows}))
    assert (first["method"], second["method"]) == ("GraphSAGE", "NMM-DGLFRM")
    assert first["AUC, NMM-DGLFRM minus it"] == "-2.00 ± 0.00 (median -2.00)"
    assert second["AUC, NMM-DGLFRM minus it"] == ""
    rows += [{"task": "search", "dataset": "cora", "guide": "nmm", "seed": 0}]
    found = lines(links.link_rivals({"links": rows}))
    assert [(line["splits"], line["method"], line["number"]) for line in found] == [
        ("new", "GraphSAGE", "3"), ("new", "NMM-DGLFRM", "3"), ("of the search", "NMM-DGLFRM", "1")
    ]  # fmt: skip


def test_links_beside_published_figures():
    """All splits together, and the graphs' means beside the paper's."""
    rows = [row | {"dataset": dataset} for dataset, gain in (("cora", 1.0), ("yeast", 2.0))
            for row in measured("original", 0.0) + measured("nmm", gain)]  # fmt: skip
    _, auc = lines(links.pooled_links({"links": rows}))
    assert (auc["splits"], auc["splits that gain"]) == ("8", "8")
    assert auc["all splits"].startswith("+1.50 ± 0.53")
    assert auc["means of the graphs"].startswith("+1.50 ± 0.71")
    assert auc["means of the graphs in the paper"].startswith("+0.79 ± 0.43")  # .48 and 1.09


def test_ratios_and_exponents_of_seconds():
    """A query that takes a hundred times as long on ten times as many edges is quadratic."""
    row = {"task": "scale", "query": "sample", "name": "sample", "classes": 2, "above": 0}
    rows = [row | {"nodes": size, "edges": size, "seconds": size**2 / 1e4, "peak": 1e9}
            for size in (1000, 100)]  # fmt: skip
    first, second = lines(scale.scale({"speed": rows}))
    assert (first["exponent of time"], second["exponent of time"]) == ("", "2.00")
