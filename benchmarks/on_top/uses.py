# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of what StackedNMM is for, of calibration.py's results: new labels, counts, questions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from benchmarks.on_top.tables import BACKBONES
from benchmarks.shared.common import GRAPHS, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, scores, sections

#: Other rivals that know the new labels, under the names of their rows.
SAME_LABELS = "label propagation", "vector scaling, shrunk"


def tables(rows: Rows) -> dict[str, str]:
    makers = {new_labels: 3, new_labels_claim: 0, counts_in_sets: 3, counts_claim: 0}
    makers |= {twenty_questions: 2, twenty_questions_claim: 0, weights_of_edges: 1}
    return made(makers, rows)


def by_share(rows: Rows) -> dict[tuple, Rows]:
    """By graph, backbone and the share of the test labels that are known."""
    found = [row | row["test"] for row in pick(rows, task="labels")]
    return sections(found, dataset=GRAPHS, backbone=BACKBONES, share=None)


def new_labels(rows: Rows) -> Iterator[dict]:
    """NLL, and calibration error in brackets, of each method on the same half of the test nodes."""
    for (graph, backbone, share), part in by_share(rows).items():
        line = {"graph": graph, "backbone": backbone, "known": f"{100 * share:.0f} %"}
        for (method,), found in sections(part, method=()).items():
            error = mean(row["ece"] for row in found)
            line[method] = f"{mean(row['nll'] for row in found):.3f} ({error:.3f})"
        seconds = [row["seconds"] for row in part if row["method"] == "StackedNMM, updated"]
        line["update, s"] = f"{median(seconds):.1f}" if seconds else ""
        numbers = {len(found) for found in sections(part, method=()).values()}
        yield line | {"splits": " to ".join(map(str, sorted({min(numbers), max(numbers)})))}


def new_labels_claim(rows: Rows) -> str:
    """StackedNMM after an update against C&S, where some of the test labels are known."""
    found = {key: part for key, part in by_share(rows).items() if key[2] > 0}
    if not found:
        return "Nothing has been measured yet."
    changes: dict[str, list[Paired]] = {"nll": [], "ece": [], "best": []}
    for part in found.values():
        ours, against, *others = (
            pick(part, method=name) for name in ("StackedNMM, updated", "C&S", *SAME_LABELS)
        )
        for field in ("nll", "ece"):
            changes[field].append(Paired.of_rows(ours, against, field, ("split",)))
        every = [Paired.of_rows(ours, rows, "nll", ("split",)) for rows in (against, *others)]
        changes["best"].append(max((gap for gap in every if gap), key=lambda gap: gap.mean))
    texts = {}
    for field, known in changes.items():
        means = [gap.mean for gap in known]
        texts[field] = (
            f"{min(means):+.3f} to {max(means):+.3f}, below it in "
            f"{sum(value < 0 for value in means)} of {len(means)} cells (graph, backbone and "
            f"share), significantly in {sum(gap.clear(-1) for gap in known)}"
        )
    return wrapped(
        f"After an update the NLL of StackedNMM differs from that of C&S with the same labels by "
        f"{texts['nll']}; from that of the best of C&S, {' and '.join(SAME_LABELS)} by "
        f"{texts['best']}. Its calibration error differs from that of C&S by {texts['ece']}."
    )


MODELS = ("joint", "own product", "temperature")


def counts_in_sets(rows: Rows) -> Iterator[dict]:
    """Coverage of 90 % intervals, their width and the CRPS, means over splits."""
    found = sections(pick(rows, task="counts"), dataset=GRAPHS, backbone=BACKBONES, size=None)
    for (graph, backbone, size), part in found.items():
        line = {"graph": graph, "backbone": backbone, "nodes": f"{size}", "splits": f"{len(part)}"}
        for model in MODELS:
            means = {field: mean(row[model][field] for row in part) for field in part[0][model]}
            line[model, f"{model}: coverage"] = f"{100 * means['coverage']:.1f} %"
            line[model, "width"] = f"{means['width']:.2f}"
            line[model, "CRPS"] = f"{means['CRPS']:.4f}"
        yield line


def counts_claim(rows: Rows) -> str:
    """What the joint adds to counts, and what it does not."""
    found = sections(pick(rows, task="counts"), dataset=(), backbone=(), size=None)
    if not found:
        return "Nothing has been measured yet."
    texts = []
    for model in MODELS[1:]:
        changes = [
            Paired([row["joint"]["CRPS"] / row[model]["CRPS"] - 1 for row in part])
            for part in found.values()
        ]
        means = [100 * change.mean for change in changes]
        texts.append(
            f"{min(means):+.1f} to {max(means):+.1f} % against {model} (lower in "
            f"{sum(value < 0 for value in means)} of {len(means)} cells, significantly in "
            f"{sum(change.clear(-1) for change in changes)})"
        )
    each = [[100 * mean(row[model]["coverage"] for row in part) for part in found.values()]
            for model in MODELS]  # fmt: skip
    covered = [f"{min(values):.0f} to {max(values):.0f} % ({name})"
               for name, values in zip(MODELS, each, strict=True)]  # fmt: skip
    return wrapped(
        f"The joint distribution changes the CRPS of counts by {' and '.join(texts)}. Intervals "
        f"that should cover 90 % cover {', '.join(covered)}."
    )


def twenty_questions(rows: Rows) -> Iterator[dict]:
    """NLL after so many answers, accuracy in brackets."""
    found = sections(pick(rows, task="questions"), communities=[False, True], method=())
    for (shared, method), part in found.items():
        line = {"communities": "yes" if shared else "no", "asked by": method}
        for number in part[0]["curve"]:
            at = [row["curve"][number] for row in part]
            accuracy = 100 * mean(score["accuracy"] for score in at)
            line[f"{number} answers"] = f"{mean(s['nll'] for s in at):.3f} ({accuracy:.1f} %)"
        line["correlation with entropy"] = f"{mean(row['alike'] for row in part):.4f}"
        yield line | {"draws": f"{len(part)}"}


def twenty_questions_claim(rows: Rows) -> str:
    """Whether the information gain finds better questions than the entropy does."""
    texts = []
    for (shared,), part in sections(
        pick(rows, task="questions"), communities=[False, True]
    ).items():
        last = list(part[0]["curve"])[-1]
        part = [row | row["curve"][last] for row in part]
        gain, entropy, chance = (
            scores(part, "nll", ("split",), method=method)
            for method in ("information gain", "entropy", "at random")
        )
        against, over = Paired.of(gain, entropy), Paired.of(entropy, chance)
        texts.append(
            f"{'with' if shared else 'without'} communities the NLL after {last} answers is "
            f"{against.text(4)} nats from that of asking by entropy, which is {over.text(4)} from "
            f"asking at random"
        )
    if not texts:
        return "Nothing has been measured yet."
    return wrapped(f"Asking by information gain: {'; '.join(texts)}.")


def weights_of_edges(rows: Rows) -> Iterator[dict]:
    """Scores with weights of edges, without, and the differences, run by run."""
    part = [row | row["test"] for row in pick(rows, task="weights")]
    names = {"nll": "NLL", "brier": "Brier", "ece": "ECE", "joint": "log p(test \\| train)"}
    for (method,), found in sections(part, method=["none", "by distance"]).items():
        line = {"edge weights": method, "runs": f"{len(found)}"}
        for field, name in names.items():
            line[name] = f"{mean(row[field] for row in found):.4f}"
            if method != "none":
                ours, plain = (
                    scores(part, field, ("split", "fold"), method=each) for each in (method, "none")
                )
                line[name] += f" ({Paired.of(ours, plain).spread(4)})"
        yield line
