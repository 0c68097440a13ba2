# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of README.md and docs/results.md whose numbers follow from the stored results."""

from __future__ import annotations

import json
from statistics import mean

import images_tables
import links_tables
import nodes_claims
from common import GRAPHS, difference, p_text, p_value, pick, wrapped
from nodes_runs import Runs
from references import PAPER_LINKS

RESULTS = "docs/results.md"
Rows = dict[str, list[dict]]


def tables(rows: Rows, tightness: list[dict]) -> dict[str, str]:
    return {
        "what reproduces": first_screen(rows),
        "fields claim": fields(rows["fields"]),
        "links claim": links(rows["links"]),
        "yeast claim": against_paper(rows["links"], "yeast"),
        "denoising claim": denoising(rows["images"]),
        "widths claim": widths(rows["images"]),
        "whole images claim": whole_images(rows["images"]),
        "compiled claim": compiled(rows["speed"]),
        "bound claim": bound(tightness),
    }


def bullets(*lines: str) -> str:
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines if line)


def first_screen(rows: Rows) -> str:
    """What of the paper reproduces and what does not, a line for each experiment."""
    return bullets(*on_nodes(rows["nodes"]), on_fields(rows["fields"]), on_links(rows["links"]),
                   on_images(rows["images"]))  # fmt: skip


def see(section: str) -> str:
    return f"[{section}]({RESULTS}#{section.lower().replace(' ', '-')})"


def on_nodes(rows: list[dict]) -> list[str]:
    runs = Runs(pick(rows, task="accuracy"))
    hits = nodes_claims.Gaps(runs, "test.accuracy", "NMM", "backbone")
    nll = nodes_claims.Gaps(runs, "test.nll", "NMM", "backbone, temperature")
    on_top = nodes_claims.Gaps(runs, "test.nll", "backbone, stacked", "backbone, temperature")
    share = nodes_claims.shares(Runs(pick(rows, task="pairs")), False)
    seeds = min(found.seeds for _, found in hits.cells)
    return [
        f"{see('Node classification')}: **not reproduced.** An NMM trained on a backbone is "
        f"significantly more accurate than the backbone in {len(hits.clear(1))} of "
        f"{len(hits.cells)} cells ({seeds} seeds), less in "
        f"{len(hits.clear(-1))}. Its negative log-likelihood (NLL) is significantly worse than the "
        f"temperature-scaled backbone's in {len(nll.clear(1))} of {len(nll.cells)}. The "
        f"correlation that it learns is worth {mean(share):.4f} nats a pair of nodes.",
        f"An NMM *on top of a trained classifier*, `StackedNMM`, **helps a little**: its NLL is "
        f"{-max(on_top.means()):.3f} to {-min(on_top.means()):.3f} nats a node below temperature "
        f"scaling's, significantly in {len(on_top.clear(-1))} of {len(on_top.cells)} cells.",
    ]


def on_fields(rows: list[dict]) -> str:
    free = ratios(rows, "NMM")
    return (
        f"{see('Markov random fields')}: **reproduced in part.** The NMM's bound on the KL "
        f"divergence is {min(free):.2f} to {max(free):.2f} times the mean field's, below it on "
        f"{sum(r < 1 for r in free)} of {len(free)} fields; that of a network fitted to a single "
        f"field is above it on {len(lost(rows))} of {len(large(rows))}."
    )


def on_links(rows: list[dict]) -> str:
    every = gaps(rows, "AP")
    return (
        f"{see('Link prediction')}: **not reproduced.** Average precision gains "
        f"{mean(b - a for a, b in every):+.2f} points ({p_text(p_value(every))}, {len(every)} "
        f"splits); the paper has {paper_gain('AP'):+.2f}."
    )


def on_images(rows: list[dict]) -> str:
    control = "U-Net-log", "NMM"
    alone = means(rows, "best", "U-Net-log", "U-Net-widths", 3, True)
    return (
        f"{see('Image denoising')}: **not reproduced.** Against the same U-Net trained as long "
        f"without an NMM, the PSNR differs by {means(rows, 'PSNR', *control, 2)} dB, the "
        f"log-likelihood by {means(rows, 'best', *control, 2)} nats a value; on a small network by "
        f"{means(rows, 'best', *control, 3, True)}, where a width for each pixel without an NMM "
        f"gives {alone}."
    )


def large(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["task"] in ("letter", "plain")]


def ratios(rows: list[dict], method: str) -> list[float]:
    """KL divergence (the NMM's upper bound) over the mean field's, of every field."""
    narrow = [row["NMM bound"] / row["mean field"] for row in pick(rows, task="strips")]
    wide = [
        (row[method] + row["log Z"]) / (row["mean field"] + row["log Z"]) for row in large(rows)
    ]
    return (narrow if method == "NMM" else []) + wide


def lost(rows: list[dict]) -> list[tuple[str, float, float]]:
    """Large fields on which NMM-CNN is above the mean field."""
    found = []
    for row in large(rows):
        name = f"{row['task']} {row.get('seed', row.get('coupling'))}"
        ours, theirs = (row[method] + row["log Z"] for method in ("NMM-CNN", "mean field"))
        found += [(name, ours, theirs)] if ours > theirs else []
    return found


def fields(rows: list[dict]) -> str:
    free = ratios(rows, "NMM")
    each = "; ".join(f"{a:.1f} nats against {b:.1f} on {name}" for name, a, b in lost(rows))
    return wrapped(
        f"Free parameters come closer than the mean field on {sum(r < 1 for r in free)} of "
        f"{len(free)} fields below. A network fitted to a single field (NMM-CNN) does not on "
        f"{len(lost(rows))} of {len(large(rows))}: {each}. In the paper it stays within one "
        f"percent of free parameters."
    )


def gaps(rows: list[dict], measure: str) -> list[tuple[float, float]]:
    """Both guides on every split on which no settings were chosen."""
    return [
        (a["test"][measure], b["test"][measure])
        for dataset in links_tables.graphs(rows)
        for a, b in links_tables.pairs(rows, dataset)
    ]


def paper_gain(measure: str) -> float:
    cells = [values for (_, name), values in PAPER_LINKS.items() if name == measure]
    return mean(float(b.split()[0]) - float(a.split()[0]) for a, b in cells)


def links(rows: list[dict]) -> str:
    known = [name for name in links_tables.graphs(rows) if links_tables.pairs(rows, name)]
    clear = 0
    parts = []
    for measure, name in (("AP", "average precision"), ("AUC", "AUC")):
        every = gaps(rows, measure)
        gain = mean(b - a for a, b in every)
        paper = f"the paper {paper_gain(measure):+.2f}"
        parts.append(f"{gain:+.2f} points of {name} ({p_text(p_value(every))}; {paper})")
        for dataset in known:
            both = links_tables.pairs(rows, dataset)
            p = p_value([(a["test"][measure], b["test"][measure]) for a, b in both])
            clear += p is not None and p < 0.05
    return wrapped(
        f"Over all {len(gaps(rows, 'AP'))} splits of {len(known)} graphs on which no settings were "
        f"chosen, the NMM's guide minus the original one is {' and '.join(parts)}. Of the "
        f"{2 * len(known)} differences of single graphs, {clear} have p < .05."
    )


def against_paper(rows: list[dict], dataset: str) -> str:
    """How far both guides are from what the paper has."""
    parts, both = [], links_tables.pairs(rows, dataset)
    for measure, name in (("AP", "average precision"), ("AUC", "AUC")):
        paper = [float(value.split()[0]) for value in PAPER_LINKS[dataset, measure]]
        columns = zip(*both, strict=True)
        here = [mean(row["test"][measure] for row in column) for column in columns]
        below = " and ".join(f"{a - b:.1f}" for a, b in zip(paper, here, strict=True))
        parts.append(f"{below} points below the paper's {name}")
    return wrapped(
        f"On {GRAPHS[dataset]} DGLFRM and NMM-DGLFRM stay {', and '.join(parts)}, on splits of the "
        f"same sizes."
    )


def blocks(rows: list[dict], small: bool) -> list[tuple[str, dict]]:
    """Test images by set: of the network tested on whole images, or of the small one."""
    found = images_tables.tested(rows).items()
    return [(images_tables.title(block)[1], part) for block, part in found
            if ("crop" in json.loads(block[0])) == small]  # fmt: skip


def image_pairs(rows: list[dict], field: str, base: str, ours: str, small: bool = False):
    """By image, of every set: its name, and values of both methods."""
    for name, found in blocks(rows, small):
        if base in found and ours in found:
            parts = [images_tables.with_scaled(found[method]) for method in (base, ours)]
            yield name, images_tables.paired(*parts, field)


def means(rows: list[dict], field: str, base: str, ours: str, digits: int, small=False) -> str:
    found = image_pairs(rows, field, base, ours, small)
    return " and ".join(f"{mean(b - a for a, b in p):+.{digits}f} ({name})" for name, p in found)


def compared(rows, field: str, base: str, ours: str, digits: int, small: bool = False) -> str:
    found = image_pairs(rows, field, base, ours, small)
    return ", ".join(f"{difference(pairs, digits)} on {name}" for name, pairs in found)


def denoising(rows: list[dict]) -> str:
    control, squared = ("U-Net-log", "NMM"), ("U-Net", "NMM")
    return bullets(
        f"*PSNR*, the NMM minus its control, the same U-Net trained to the end without an NMM: "
        f"{compared(rows, 'PSNR', *control, 2)}, in dB.",
        f"*PSNR* against a U-Net fitted to squared errors: {compared(rows, 'PSNR', *squared, 2)}; "
        f"the control against it: {compared(rows, 'PSNR', 'U-Net', 'U-Net-log', 2)}.",
        f"*Likelihood*, nats a value, against the U-Net fitted to squared errors with a Gaussian "
        f"of one width: {compared(rows, 'log p', *squared, 3)}; against the control with a "
        f"logistic one: {compared(rows, 'best', *control, 3)}.",
    )


def widths(rows: list[dict]) -> str:
    """What widths and neighbours add apart, on the small network."""
    names = {
        ("U-Net-log", "NMM"): "the NMM as a whole",
        ("U-Net-log", "U-Net-widths"): "a width for each pixel, without neighbours",
        ("U-Net-widths", "NMM"): "neighbours on top of widths",
        ("U-Net-log", "NMM-one-width"): "neighbours without widths",
    }
    lines = [
        f"*{name}*: log p {compared(rows, 'best', *key, 3, True)}; PSNR "
        f"{compared(rows, 'PSNR', *key, 2, True)}."
        for key, name in names.items()
    ]
    return bullets(*(f"{line[:1]}{line[1:2].upper()}{line[2:]}" for line in lines))


def whole_images(rows: list[dict]) -> str:
    """The bound of whole images minus the sum of their pixels' marginals."""
    parts = []
    for name, found in blocks(rows, True):
        part = {k: row for k, row in found["NMM"].items() if "joint" in row}
        columns = (images_tables.by_image(part, field) for field in ("log p", "joint"))
        parts.append(f"{difference(list(zip(*columns, strict=True)), 3)} nats on {name}")
    return wrapped(f"Correlations of the NMM are worth at least {' and '.join(parts)}.")


def compiled(rows: list[dict]) -> str:
    """Compiled loops against tensor code."""
    part = pick(rows, task="draw", device="cpu")
    seconds = {(row["code"], row["particles"]): row["seconds"] for row in part}
    sizes = sorted(size for code, size in seconds if code == "compiled")
    ratio = [f"{seconds['sweeps', n] / seconds['compiled', n]:.0f}" for n in sizes]
    return wrapped(
        f"On a CPU compiled loops draw {' and '.join(ratio)} times faster than tensor code with "
        f"{' and '.join(map(str, sizes))} particles."
    )


def bound(rows: list[dict]) -> str:
    pair = max(abs(row["pair gap"]) for row in rows)
    whole = max(rows, key=lambda row: row["test estimate"] - row["test bound"])
    return wrapped(
        f"The largest gaps are {pair:.4f} nats a node for pairs and "
        f"{whole['test estimate'] - whole['test bound']:.4f} for the whole test set, the latter at "
        f"epoch {whole['epoch']}."
    )
