# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of StackedNMM beside its rivals on the same splits, from calibration.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from benchmarks.shared.common import GRAPHS, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, p_text, scores, sections, spread

OURS, ELSEWHERE = "StackedNMM", "StackedNMM, the other graph's priors"
ABLATED = "the pool alone", "StackedNMM, scores alone", ELSEWHERE
BACKBONES = {"gcn": "GCN", "gat": "GAT", "mlp": "MLP"}
RUN = ("split", "fold")
NUMBERS = {
    "pool.log_scale": "log s", "pool.neighbors": "a", "pool.labels": "λ", "pool.agreement": "η",
    "pool.offsets": "sd of b",
    "log_kappa": "log κ", "log_floor": "log ε", "gamma": "γ", "similarity": "β",
}  # fmt: skip


def tables(rows: Rows) -> dict[str, str]:
    makers = {calibration: 3, calibration_claim: 0, calibration_priors: 3, over_nodes: 3}
    makers |= {over_nodes_claim: 0, missed_cells: 2}
    return made(makers, rows)


def cells(rows: Rows) -> dict[tuple, Rows]:
    """By graph and backbone, each row with its scores on the test nodes."""
    found = [row | row["test"] | {"pll": row.get("pairs", row["own product"])}
             for row in pick(rows, task="splits")]  # fmt: skip
    return sections(found, dataset=GRAPHS, backbone=BACKBONES)


def finished(rows: Rows, mlp: bool = False, runs: int = 15) -> dict[tuple, Rows]:
    """Cells of which all runs are there, five splits with three folds: the protocol's, or MLPs'."""
    every = {key: part for key, part in cells(rows).items() if (key[1] == BACKBONES["mlp"]) == mlp}
    return {key: part for key, part in every.items() if len(pick(part, method=OURS)) >= runs}


def rivals(part: Rows) -> list[str]:
    names = dict.fromkeys(row["method"] for row in part)
    return [name for name in names if name not in (OURS, *ABLATED)]


def of(part: Rows, field: str, method: str) -> dict:
    return scores(part, field, RUN, method=method)


def gap(part: Rows, field: str, method: str) -> Paired:
    """Ours minus another one, run by run."""
    return Paired.of(of(part, field, OURS), of(part, field, method))


def clear(part: Rows, field: str, method: str, sign: int = -1) -> bool:
    """Whether the difference is significant after Bonferroni's correction for the rivals."""
    change = gap(part, field, method)
    return change.p < 0.05 / len(rivals(part)) and sign * change.mean > 0


def marked(part: Rows, field: str, method: str) -> str:
    if method == OURS:
        return ""
    mark = " †" * clear(part, field, method) + " ‡" * clear(part, field, method, 1)
    return gap(part, field, method).spread(3) + mark


def calibration(rows: Rows) -> Iterator[dict]:
    """All methods, and what StackedNMM differs from them, run by run."""
    for (graph, backbone), part in cells(rows).items():
        for (method,), found in sections(part, method=[*rivals(part), *ABLATED, OURS]).items():
            line = {"graph": graph, "backbone": backbone, "method": method}
            line["runs"] = f"{len(found)}"
            line["accuracy"] = f"{100 * mean(row['accuracy'] for row in found):.1f}"
            for field, name in (("nll", "NLL"), ("brier", "Brier")):
                values = [row[field] for row in found]
                line[name] = f"{mean(values):.3f} ({median(values):.3f})"
                line[name, "ours minus"] = marked(part, field, method)
            line["ECE"] = f"{mean(row['ece'] for row in found):.3f}"
            line["PLL"] = f"{mean(row['pll'] for row in found):.3f}"
            line["log p(test \\| train)"] = f"{mean(row['joint'] for row in found):.3f}"
            line["s"] = f"{median(row['fit seconds'] for row in found):.1f}"
            yield line


def calibration_claim(rows: Rows) -> str:
    """Where StackedNMM is ahead of all rivals, and every cell where it is not."""
    found = finished(rows)
    if not found:
        return "Nothing has been measured yet."
    texts, missed = [], []
    for field, name in (("nll", "NLL"), ("brier", "Brier score")):
        ahead = sure = 0
        for (graph, backbone), part in found.items():
            behind = [rival for rival in rivals(part) if not gap(part, field, rival).mean < 0]
            unsure = [rival for rival in rivals(part) if not clear(part, field, rival)]
            ahead, sure = ahead + (not behind), sure + (not unsure)
            missed += [f"{graph} with {backbone}: {name} {gap(part, field, rival).mean:+.4f} "
                       f"against {rival}" for rival in behind]  # fmt: skip
        texts.append(
            f"StackedNMM's mean {name} is below that of every rival in {ahead} of {len(found)} "
            f"cells (graph and backbone), significantly below each of them in {sure}."
        )
    every = [nearest_of(part, "ece")[1].mean for part in found.values()]
    texts.append(
        f"Its calibration error is above that of the best rival in "
        f"{sum(value > 0 for value in every)}, by up to {max(every):.3f}."
    )
    errors = {key: gap(part, "ece", "GATS") for key, part in found.items()}
    errors = {key: change for key, change in errors.items() if len(change)}
    if errors:
        worse = {key: change for key, change in errors.items() if change.mean > 0.002}
        changes = [change.mean for change in errors.values()]
        texts.append(
            f"It differs from that of GATS by {min(changes):+.3f} to "
            f"{max(changes):+.3f}, by more than +.002 in {len(worse)}."
        )
        missed += [f"{graph} with {backbone}: calibration error {change.mean:+.4f} against GATS"
                   for (graph, backbone), change in worse.items()]  # fmt: skip
    pool = [gap(part, "nll", ABLATED[0]).mean for part in found.values()]
    joint = [mean(of(part, "joint", OURS).values()) + mean(of(part, "nll", OURS).values())
             for part in found.values()]  # fmt: skip
    texts.append(
        f"Most of this is the pool: with an NMM on it, the NLL changes by {min(pool):+.4f} to "
        f"{max(pool):+.4f}. What the NMM adds is the joint: log "
        f"p(test | train) is {min(joint):.3f} to {max(joint):.3f} nats a node above the sum of its "
        f"own marginals."
    )
    texts.append(f"**Missed**: {'; '.join(missed)}." if missed else "No cell is missed.")
    texts.append(f"**Priors**: {on_its_own(found)}")
    alone = {key[0]: gap(part, "ece", "temperature") for key, part in finished(rows, True).items()}
    if alone:
        each = ", ".join(f"{name} {change.text(3)}" for name, change in alone.items())
        texts.append(f"On MLPs its calibration error minus temperature scaling's: {each}.")
    return wrapped(" ".join(texts))


def in_brief(rows: Rows) -> list[str]:
    """For the README: what is won, what is missed, and whose gain it is."""
    found = finished(rows)
    if not found:
        return []
    texts = []
    for field, name, digits in (("nll", "NLL", 3), ("brier", "Brier score", 3)):
        nearest = [nearest_of(part, field)[1].mean for part in found.values()]
        texts.append(
            f"its {name} is below all of theirs in {sum(value < 0 for value in nearest)} of "
            f"{len(found)} cells (against the best of them {min(nearest):+.{digits}f} to "
            f"{max(nearest):+.{digits}f})"
        )
    errors = [nearest_of(part, "ece")[1].mean for part in found.values()]
    gats = [gap(part, "ece", "GATS") for part in found.values()]
    pool = [gap(part, "nll", ABLATED[0]).mean for part in found.values()]
    number = max(sum(name != "raw" for name in rivals(part)) for part in found.values())
    return [
        f"With a pool of scores, neighbours and known labels, `StackedNMM(num_classes)`, it is "
        f"[compared with {number} rivals](docs/results.md#on-top-of-trained-classifiers-a-published"
        f"-protocol) and the classifier itself on published splits: {' and '.join(texts)}. "
        f"Missed: its calibration error is above that of the best of them in "
        f"{sum(value > 0 for value in errors)} of {len(found)}, by up to {max(errors):.3f}, and "
        f"more than .002 above that of GATS in "
        f"{sum(len(change) > 0 and change.mean > 0.002 for change in gats)}.",
        f"Most of that gain is the pool's, which is no NMM: with an NMM on it the NLL changes by "
        f"{min(pool):+.4f} to {max(pool):+.4f}. {on_its_own(found)}",
    ]


def on_its_own(found: dict[tuple, Rows]) -> str:
    """Whose labels set the priors: the graph that had no part in them, and the two that swap."""
    known = {kind: nearest_of(part, "nll")[1]
             for (graph, kind), part in found.items() if graph == GRAPHS["pubmed"]}  # fmt: skip
    texts = [f"{gap.mean:+.4f} nats ({p_text(gap.p)}) with {kind}" for kind, gap in known.items()]
    other = [nearest_of(part, "nll", ELSEWHERE)[1].mean
             for part in found.values() if pick(part, method=ELSEWHERE)]  # fmt: skip
    swapped = (
        f" With the other graph's priors on either, it is {min(other):+.4f} to {max(other):+.4f} "
        f"from the best rival's there, below all in {sum(value < 0 for value in other)} of "
        f"{len(other)}."
    ) if other else ""  # fmt: skip
    return (
        f"Its priors were set on other splits of Cora and CiteSeer, with nearly all their labels; "
        f"on PubMed, which had no part in that, its NLL is {' and '.join(texts)} from the best "
        f"rival's.{swapped}"
    )


def nearest_of(part: Rows, field: str, ours: str = OURS) -> tuple[str, Paired]:
    """The rival of the best mean, and ours minus it, run by run."""
    own = of(part, field, ours)
    changes = {rival: Paired.of(own, of(part, field, rival)) for rival in rivals(part)}
    best = max((name for name in changes if changes[name]), key=lambda name: changes[name].mean)
    return best, changes[best]


def scores_alone(rows: Rows) -> list[Paired]:
    """NLL of the NMM of the scores alone, minus temperature scaling's, by graph and backbone."""
    found = finished(rows).values()
    return [Paired.of(*(of(p, "nll", name) for name in (ABLATED[1], "temperature"))) for p in found]


def missed_cells(rows: Rows) -> Iterator[dict]:
    """For the README: every cell against the best of its rivals, and what is missed."""
    for (graph, backbone), part in finished(rows).items():
        line = {"graph": graph, "backbone": backbone, "runs": f"{len(pick(part, method=OURS))}"}
        missed = []
        for field, name in (("nll", "NLL"), ("brier", "Brier"), ("ece", "ECE")):
            best, change = nearest_of(part, field)
            mark = " †" * all(clear(part, field, rival) for rival in rivals(part))
            digits = 3 if field == "ece" else 4
            line[f"{name} minus the best rival's"] = f"{change.mean:+.{digits}f} ({best}){mark}"
            missed += [name] * (change.mean >= 0)
        line["ECE minus GATS's"] = gap(part, "ece", "GATS").spread(3)
        yield line | {"missed": ", ".join(missed) or "none"}


def over_nodes(rows: Rows) -> Iterator[dict]:
    """95 % bootstrap intervals over nodes, of what StackedNMM differs by."""
    found = sections(pick(rows, task="bootstrap"), dataset=GRAPHS, backbone=BACKBONES)
    for (graph, backbone), part in found.items():
        for field, name in (("nll", "NLL"), ("brier", "Brier")):
            line = {"graph": graph, "backbone": backbone, "ours minus": name}
            for row in part:
                _, low, high = row[field]
                line[row["method"]] = f"{low:+.3f} to {high:+.3f}"
            yield line


def over_nodes_claim(rows: Rows) -> str:
    found = sections(pick(rows, task="bootstrap"), dataset=GRAPHS, backbone=BACKBONES)
    if not found:
        return "Nothing has been measured yet."
    texts = []
    for field, name in (("nll", "NLL"), ("brier", "Brier score")):
        above = []
        for (graph, backbone), part in found.items():
            each = [row["method"] for row in part
                    if row["method"] not in ABLATED and row[field][2] >= 0]  # fmt: skip
            above += [f"{graph} with {backbone} against {', '.join(each)}"] * bool(each)
        text = f"the {name}'s is below zero against every rival in {len(found) - len(above)} of "
        text += f"{len(found)} cells"
        texts.append(text + (f" (not on {'; '.join(above)})" if above else ""))
    return wrapped(f"Intervals over nodes: {', '.join(texts)}.")


def calibration_priors(rows: Rows) -> Iterator[dict]:
    """Numbers fitted to nearly all labels of splits that are not reported."""
    for (graph, backbone), part in sections(
        pick(rows, task="priors"), dataset=GRAPHS, backbone=BACKBONES
    ).items():
        line = {"graph": graph, "backbone": backbone, "fits": f"{len(part)}"}
        for number, name in NUMBERS.items():
            line[name] = spread([row["numbers"][number] for row in part], 2)
        yield line
