# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of README.md and docs/results.md whose numbers follow from the stored results."""

from __future__ import annotations

from statistics import mean

from benchmarks.images import tables as images_tables
from benchmarks.links import rivals_tables as links_rivals_tables
from benchmarks.links import tables as links_tables
from benchmarks.nodes import claims as nodes_claims
from benchmarks.on_top import tables as calibration_tables
from benchmarks.random_fields import compared_tables as fields_compared_tables
from benchmarks.random_fields import tables as fields_tables
from benchmarks.shared.common import pick, wrapped
from benchmarks.shared.writing import Paired, Rows, bullets, made, p_text, scores

NAMES = {"AP": "average precision", "AUC": "AUC"}
#: Of the small network: a method, what it is compared with, and what it adds.
WIDTHS = {
    ("NMM", "U-Net-log"): "The NMM as a whole",
    ("U-Net-widths", "U-Net-log"): "A width for each pixel, without neighbours",
    ("NMM", "U-Net-widths"): "Neighbours on top of widths",
    ("NMM-one-width", "U-Net-log"): "Neighbours without widths",
}
#: What tells fields apart.
ON = ("coupling", "seed")
#: By the file that they are stored in.
Files = dict[str, Rows]


def tables(files: Files) -> dict[str, str]:
    makers = [what_reproduces, fields_claim, links_claim, yeast_claim, denoising_claim]
    makers += [widths_claim, whole_images_claim, compiled_claim, bound_claim]
    return made(dict.fromkeys(makers, 0), files)


def what_reproduces(files: Files) -> str:
    """What of the paper reproduces and what does not, a line for each experiment."""
    lines = [*on_nodes(files), *calibration_tables.in_brief(files.get("calibration", []))]
    lines += [on_fields(files), on_links(files["links"]), on_images(files["images"])]
    return bullets(lines)


def see(section: str) -> str:
    return f"[{section}](docs/results.md#{section.lower().replace(' ', '-')})"


def on_nodes(files: Files) -> list[str]:
    rows = files["nodes"]
    hits = nodes_claims.over_cells(rows, "accuracy", "NMM", "backbone")
    raw = nodes_claims.over_cells(rows, "nll", "NMM", "backbone")
    nll = nodes_claims.over_cells(rows, "nll", "NMM", "backbone, temperature")
    on_top = nodes_claims.over_cells(rows, "nll", "backbone, stacked", "backbone, temperature")
    found = (
        f"An NMM *on top of a trained classifier*, of its scores alone, **helps a little**: on the "
        f"public split its NLL is {-on_top.means[-1]:.3f} to {-on_top.means[0]:.3f} nats a node "
        f"below temperature scaling's, significantly in {len(on_top.lower)} of {on_top.number} "
        f"cells"
    )
    if gaps := calibration_tables.scores_alone(files.get("calibration", [])):
        means = [gap.mean for gap in gaps]
        found += (
            f"; on published splits it differs by {min(means):+.3f} to {max(means):+.3f}, "
            f"significantly better in {sum(gap.clear(-1) for gap in gaps)} of {len(gaps)} and "
            f"worse in {sum(gap.clear(1) for gap in gaps)}"
        )
    return [
        f"{see('Node classification')}: **not reproduced.** An NMM trained on a backbone is "
        f"significantly more accurate than the backbone in {len(hits.higher)} of {hits.number} "
        f"cells ({hits.seeds[0]} seeds), less in {len(hits.lower)}. Its negative log-likelihood "
        f"(NLL) differs from the backbone's by {raw.span}, significantly in "
        f"{len(raw.higher) + len(raw.lower)} of {raw.number}; temperature scaling, which the NMM "
        f"did not have, is better by {nll.means[0]:.3f} to {nll.means[-1]:.3f}, significantly in "
        f"{len(nll.higher)}. The correlation that it learns is worth "
        f"{mean(nodes_claims.shares(rows, False)):.4f} nats a pair of nodes.",
        f"{found}.",
    ]


def against_mean_field(rows: Rows) -> tuple[list[float], Rows, int]:
    """
    The NMM's bound on the KL divergence over the mean field's, of every field; large fields on
    which NMM-CNN is above the mean field; and how many large ones there are.
    """
    large = fields_tables.with_kl(rows)
    free = [row["NMM bound"] / row["mean field"] for row in pick(rows, task="strips")]
    free += [row["NMM"] / row["mean field"] for row in large]
    return free, [row for row in large if row["NMM-CNN"] > row["mean field"]], len(large)


def on_fields(files: Files) -> str:
    free, lost, number = against_mean_field(files["fields"])
    found = (
        f"{see('Markov random fields')}: **reproduced in part.** The NMM's bound on the KL "
        f"divergence is {min(free):.2f} to {max(free):.2f} times the mean field's, below it on "
        f"{sum(r < 1 for r in free)} of {len(free)} fields; that of a network fitted to a single "
        f"field is above it on {len(lost)} of {number}."
    )
    kl = {
        name: scores(pick(files.get("fields_compared", []), task="strips"), "KL", ON, method=method)
        for name, method in (("all", "NMM, 2000 steps"), ("half", "NMM of half, 2000 steps"),
                             ("windows", "windows 7 x 7, 8 given"), ("VAN", "VAN, 600 steps"))
    }  # fmt: skip
    both = [key for key in kl["all"] if all(key in values for values in kl.values())]
    if both:
        all_of, half, windows, van = (mean(each[key] for key in both) for each in kl.values())
        closer = {
            name: sum(kl[name][key] < min(kl["all"][key], kl["half"][key]) for key in both)
            for name in ("windows", "VAN")
        }
        found += (
            f" Strong rivals come closer: on {len(both)} narrow grids the NMM's mean is "
            f"{all_of:.1f} nats, with half of the pixels summed out exactly (`MarginalField`) "
            f"{half:.1f}; that of conditionals in windows of 7 x 7, which need no fit, is "
            f"{windows:.1f}, closer than both on {closer['windows']}, and that of an "
            f"autoregressive network {van:.1f}, closer than both on {closer['VAN']}."
        )
    every = list(fields_compared_tables.closest(files.get("fields_compared", [])))
    if won := [each for each in every if each[0].startswith("NMM")]:
        which = " and ".join(f"{labels} labels at {share}" for _, labels, share, _ in won)
        found += (
            f" Of all methods an NMM is the closest on average in {len(won)} of {len(every)} kinds "
            f"of such grids ({which} of the critical coupling)."
        )
    won, number = fields_compared_tables.large_won(files)
    if number:
        found += (
            f" On 128 x 128 pixels, where no network was fitted, it is, with half summed out, on "
            f"{won} of {number} fields."
        )
    return found


def fields_claim(files: Files) -> str:
    free, lost, number = against_mean_field(files["fields"])
    each = (f"{r['NMM-CNN']:.1f} nats against {r['mean field']:.1f} on {r['name']}" for r in lost)
    return wrapped(
        f"Free parameters come closer than the mean field on {sum(r < 1 for r in free)} of "
        f"{len(free)} fields below. A network fitted to a single field (NMM-CNN) does not on "
        f"{len(lost)} of {number}: {'; '.join(each)}. In the paper it stays within one "
        f"percent of free parameters."
    )


def paper_gain(measure: str) -> float:
    return mean(ours - theirs for theirs, ours in links_tables.published(measure).values())


def on_links(rows: Rows) -> str:
    every = links_tables.pooled(rows, "AP")
    found = (
        f"{see('Link prediction')}: **not reproduced.** Average precision gains "
        f"{every.mean:+.2f} points ({p_text(every.p)}, {len(every)} splits); the paper has "
        f"{paper_gain('AP'):+.2f}."
    )
    parts = links_rivals_tables.by_graph(rows).values()
    gaps = [gap for part in parts if (gap := links_rivals_tables.gap(part, "AP", "sage"))]
    if gaps:
        ahead = sum(gap.clear(-1) for gap in gaps)
        found += f" GraphSAGE is significantly ahead on {ahead} of {len(gaps)} graphs."
    return found


def links_claim(files: Files) -> str:
    known, pooled = links_tables.compared(files["links"]).values(), []
    for measure, name in NAMES.items():
        every = links_tables.pooled(files["links"], measure)
        paper = f"{p_text(every.p)}; the paper {paper_gain(measure):+.2f}"
        pooled.append(f"{every.mean:+.2f} points of {name} ({paper})")
    single = [links_tables.gap(part, measure) for part in known for measure in NAMES]
    single = [found for found in single if found]
    return wrapped(
        f"Over all {len(every)} splits of {len(single) // 2} graphs on which no settings were "
        f"chosen, the NMM's guide minus the original one is {' and '.join(pooled)}. Of the "
        f"{len(single)} differences of single graphs, {sum(found.clear() for found in single)} "
        f"have p < .05."
    )


def yeast_claim(files: Files) -> str:
    """How far both guides are from what the paper has."""
    part, parts = links_tables.compared(files["links"])["Yeast"], []
    for measure, name in NAMES.items():
        here, paper = links_tables.both(part, measure), links_tables.published(measure)["yeast"]
        below = (f"{there - mean(values):.1f}" for there, values in zip(paper, here, strict=True))
        parts.append(f"{' and '.join(below)} points below the paper's {name}")
    return wrapped(
        f"On Yeast DGLFRM and NMM-DGLFRM stay {', and '.join(parts)}, on splits of the same sizes."
    )


def by_set(rows: Rows, small: bool) -> list[tuple[str, Rows]]:
    """Test images: of the network tested on whole images, or of the small one."""
    found = [(t["images"], p, p[0]["settings"]) for t, p in images_tables.tested(rows)]
    found = [each for each in found if images_tables.usual(each[2])]
    return [(name, p) for name, p, settings in found if ("crop" in settings) == small]


def gaps(rows: Rows, field: str, ours: str, base: str, small: bool) -> list[tuple[str, Paired]]:
    found = [(name, images_tables.gap(p, field, ours, base)) for name, p in by_set(rows, small)]
    return [(name, gap) for name, gap in found if gap]


def means(rows: Rows, field: str, ours: str, base: str, digits: int, small: bool = False) -> str:
    found = gaps(rows, field, ours, base, small)
    return " and ".join(f"{gap.mean:+.{digits}f} ({name})" for name, gap in found)


def texts(rows: Rows, field: str, ours: str, base: str, digits: int, small: bool = False) -> str:
    found = gaps(rows, field, ours, base, small)
    return ", ".join(f"{gap.text(digits)} on {name}" for name, gap in found)


def on_images(rows: Rows) -> str:
    control = "NMM", "U-Net-log"
    return (
        f"{see('Image denoising')}: **not reproduced.** Against the same U-Net trained as long "
        f"without an NMM, the PSNR differs by {means(rows, 'PSNR', *control, 2)} dB, the "
        f"log-likelihood by {means(rows, 'best', *control, 2)} nats a value; on a small network by "
        f"{means(rows, 'best', *control, 3, True)}, where a width for each pixel without an NMM "
        f"gives {means(rows, 'best', 'U-Net-widths', 'U-Net-log', 3, True)}."
    )


def denoising_claim(files: Files) -> str:
    rows, control, squared = files["images"], ("NMM", "U-Net-log"), ("NMM", "U-Net")
    return bullets(
        [
            f"*PSNR*, the NMM minus its control, the same U-Net trained to the end without an NMM: "
            f"{texts(rows, 'PSNR', *control, 2)}, in dB.",
            f"*PSNR* against a U-Net fitted to squared errors: {texts(rows, 'PSNR', *squared, 2)}; "
            f"the control against it: {texts(rows, 'PSNR', 'U-Net-log', 'U-Net', 2)}.",
            f"*Likelihood*, nats a value, against the U-Net fitted to squared errors with a "
            f"Gaussian of one width: {texts(rows, 'log p', *squared, 3)}; against the control with "
            f"a logistic one: {texts(rows, 'best', *control, 3)}.",
        ]
    )


def widths_claim(files: Files) -> str:
    """What widths and neighbours add apart, on the small network."""
    rows = files["images"]
    return bullets(
        f"*{name}*: log p {texts(rows, 'best', *both, 3, True)}; PSNR "
        f"{texts(rows, 'PSNR', *both, 2, True)}."
        for both, name in WIDTHS.items()
    )


def whole_images_claim(files: Files) -> str:
    """The bound of whole images minus the sum of their pixels' marginals."""
    parts = []
    for name, every in by_set(files["images"], True):
        part = pick(every, method="NMM")
        parts.append(
            f"{images_tables.between(part, part, 'joint', 'log p').text(3)} nats on {name}"
        )
    return wrapped(f"Correlations of the NMM are worth at least {' and '.join(parts)}.")


def compiled_claim(files: Files) -> str:
    """Compiled loops against tensor code."""
    part = pick(files["speed"], task="draw", device="cpu")
    seconds = {(row["code"], row["particles"]): row["seconds"] for row in part}
    sizes = sorted(size for code, size in seconds if code == "compiled")
    ratio = [f"{seconds['sweeps', n] / seconds['compiled', n]:.0f}" for n in sizes]
    return wrapped(
        f"On a CPU compiled loops draw {' and '.join(ratio)} times faster than tensor code with "
        f"{' and '.join(map(str, sizes))} particles."
    )


def bound_claim(files: Files) -> str:
    """How tight the bound is while a model trains."""
    pair = max(abs(row["pair gap"]) for row in files["tightness"])
    gap, epoch = max((r["test estimate"] - r["test bound"], r["epoch"]) for r in files["tightness"])
    return wrapped(
        f"The largest gaps are {pair:.4f} nats a node for pairs and {gap:.4f} for the whole test "
        f"set, the latter at epoch {epoch}."
    )
