# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and sentences of links_rivals.py and links_attention.py, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev

from benchmarks.links import tables as links_tables
from benchmarks.links.tables import GUIDES, MEASURES, RIVALS
from benchmarks.shared.common import GRAPHS, grouped, pick, wrapped
from benchmarks.shared.references import VGAE_LINKS
from benchmarks.shared.writing import Paired, Rows, made, p_text, scores, sections, spread

#: In the order of the table; what else was compared comes after them.
METHODS = {"katz": "Katz", **RIVALS, **GUIDES}
OURS = "nmm"
#: Of references.VGAE_LINKS.
SOURCES = ("its authors", "DGL's example")


def tables(rows: Rows) -> dict[str, str]:
    lines = {link_rivals: 2, vgae_anchor: 1, link_attention: 2}
    claims = (rivals_claim, anchor_claim, attention_claim, why_links)
    return made(lines | dict.fromkeys(claims, 0), rows)


def by_graph(rows: Rows) -> dict[str, Rows]:
    """What was measured on test links of splits on which no settings were chosen."""
    known = links_tables.blocks(rows, rivals=True).items()
    return {graph: part for (graph, searched), part in known if not searched}


def gap(part: Rows, measure: str, method: str) -> Paired:
    """NMM-DGLFRM minus another one, on the same splits."""
    return Paired.of_rows(pick(part, guide=OURS), pick(part, guide=method), measure)


def link_rivals(rows: Rows) -> Iterator[dict]:
    for graph, part in by_graph(rows).items():
        for (name,), own in sections(part, guide=METHODS).items():
            line = {"graph": graph, "method": name, "splits": f"{len(own)}"}
            steps = [row["step"] for row in own if "step" in row]
            line["best step"] = f"{mean(steps):.0f}" if steps else ""
            for measure in MEASURES:
                line[measure] = spread(scores(own, measure).values(), 2)
            for measure in MEASURES if own[0]["guide"] != OURS else ():
                line[f"{measure}, NMM-DGLFRM minus it"] = gap(part, measure, own[0]["guide"]).text(
                    2
                )
            yield line


def above(part: Rows, measure: str) -> list[float]:
    """By how many standard deviations of our splits what was published is above our mean."""
    own = [row["test"][measure] for row in part]
    published = VGAE_LINKS.get((part[0]["dataset"], measure), ())
    return [(each - mean(own)) / stdev(own) for each in published] if len(own) > 1 else []


def anchors(rows: Rows) -> dict[str, Rows]:
    found = sections(pick(rows, task="anchor"), dataset=GRAPHS)
    return {graph: part for (graph,), part in found.items()}


def vgae_anchor(rows: Rows) -> Iterator[dict]:
    """VGAE by its authors' protocol, on splits of our own; published values in our sd from them."""
    for graph, part in anchors(rows).items():
        line = {"graph": graph, "splits": f"{len(part)}"}
        for measure in reversed(MEASURES):
            line[f"{measure}, here"] = spread([row["test"][measure] for row in part], 2)
            published = VGAE_LINKS.get((part[0]["dataset"], measure), ())
            far = above(part, measure) or [0.0] * len(published)
            for name, value, each in zip(SOURCES, published, far, strict=False):
                line[f"{measure}, {name} (above ours, sd)"] = f"{value} ({each:+.1f})"
        yield line


def anchor_claim(rows: Rows) -> str:
    """Published values are of one split: two standard deviations of splits are no rare distance."""
    known = [above(part, measure) for part in anchors(rows).values() for measure in MEASURES]
    parts = []
    for name, far in zip(SOURCES, zip(*filter(None, known), strict=True), strict=False):
        near, wide = (sum(each <= limit for each in far) for limit in (1, 2))
        parts.append(
            f"of the {len(far)} figures of {name}, {near} are at most one standard deviation of "
            f"our splits above our mean and {wide} at most two (the farthest {max(far):+.1f})"
        )
    return wrapped(f"VGAE: {'; '.join(parts) or 'nothing has been compared yet'}.")


def rivals_claim(rows: Rows) -> str:
    """How often NMM-DGLFRM is ahead of each rival, and by how much."""
    parts, lines = by_graph(rows), []
    for method in ("katz", *RIVALS):
        found = {graph: gap(part, "AP", method) for graph, part in parts.items()}
        found = {graph: each for graph, each in found.items() if each}
        if found:
            ahead = [graph for graph, each in found.items() if each.clear(1)]
            behind = [graph for graph, each in found.items() if each.clear(-1)]
            means = sorted(each.mean for each in found.values())
            lines.append(
                f"{METHODS[method]}: {means[0]:+.2f} to {means[-1]:+.2f} points over {len(found)} "
                f"graphs, above it on {listed(ahead)}, below it on {listed(behind)}"
            )
    if not lines:
        return "No rival has been compared yet."
    return wrapped(
        f"Average precision of NMM-DGLFRM minus that of {'; '.join(lines)} (p < .05, paired)."
    )


def listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def attention_rows(rows: Rows) -> Iterator[tuple[str, str, Rows, Rows]]:
    """By graph and task: what was run with a reading of the appendix, and links.py's own."""
    for task, base in (("attention", "search"), ("attended", "compare")):
        found = sections(pick(rows, task=task), dataset=GRAPHS, reading=[])
        for (graph, reading), part in found.items():
            changed = {"own_attention", "width"}
            settings = {k: v for k, v in part[0]["settings"].items() if k not in changed}
            known = {"guide": OURS, "dataset": part[0]["dataset"], "settings": settings}
            seeds = {row["seed"] for row in part}
            ours = [r for r in pick(rows, task=base, **known) if r["seed"] in seeds]
            yield graph, reading, part, ours


def link_attention(rows: Rows) -> Iterator[dict]:
    """Readings of the appendix beside links.py's attention, and what they change."""
    done = set()
    for graph, reading, part, ours in attention_rows(rows):
        where = "test" if "test" in part[0] else "val"
        both = {f"{reading}, as wide as the communities": part}
        if (graph, where) not in done:
            done.add((graph, where))
            both = {"first layer shared, 16 outputs": ours} | both
        for name, own in both.items():
            line = {"graph": graph, "attention": name, "splits": f"{len(own)}"}
            line["links"] = {"test": "test", "val": "validation, of the search"}[where]
            for measure in MEASURES:
                line[measure] = spread([row[where][measure] for row in own], 2)
            line["bound"] = spread([-row["loss"] for row in own], 4) if own else ""
            if own is part:
                for measure in MEASURES:
                    line[f"{measure}, change"] = change(part, ours, measure, where).text(2)
                line["bound, change"] = Paired.of_rows(ours, part, "loss").text(4)
            yield line


def change(part: Rows, ours: Rows, measure: str, where: str) -> Paired:
    flat = ([row | row[where] for row in each] for each in (part, ours))
    return Paired.of_rows(*flat, measure)


def attention_claim(rows: Rows) -> str:
    found = list(attention_rows(rows))
    if not found:
        return "The appendix's attention has not been compared yet."
    gains = {
        (graph, reading): Paired.of_rows(ours, part, "loss").mean
        for graph, reading, part, ours in found
        if "test" not in part[0]
    }
    liked = [f"{graph} ({reading})" for (graph, reading), gain in gains.items() if gain > 0]
    text = (
        f"On the splits of the search the bound changes by {min(gains.values()):+.4f} to "
        f"{max(gains.values()):+.4f} nats a pair and is above that of links.py's attention in "
        f"{len(liked)} of {len(gains)} cases: {listed(liked)}."
    )
    for graph, reading, part, ours in found:
        if "test" in part[0]:
            gap = change(part, ours, "AP", "test")
            text += (
                f" On {len(gap)} other splits of {graph}, {reading}, average precision on test "
                f"links changes by {gap.text(2)} points."
            )
    return wrapped(text)


def why_links(rows: Rows) -> str:
    """What the NMM adds, when it would add more, and what to take where it does not."""
    every = links_tables.pooled(rows, "AP")
    given = grouped(pick(rows, task="memberships"), "dataset")
    known = {
        GRAPHS.get(name, name): {who: mean(row["AP"][who] for row in part) for who in part[0]["AP"]}
        for (name,), part in given.items()
    }
    if not every or not known:
        return "Too little has been measured to say why."
    near = [ap["own"] - ap["a neighbour's"] for ap in known.values()]
    far = {graph: ap["own"] - ap["anyone's"] for graph, ap in known.items()}
    least, most = (pick_one(far, key=far.__getitem__) for pick_one in (min, max))
    bounds = [-links_tables.gap(p, "loss").mean for p in links_tables.compared(rows).values()]
    lines = [
        f"*What the NMM adds* to the guide that it replaces is {every.mean:+.2f} points of average "
        f"precision ({p_text(every.p)}, {len(every)} splits) and {min(bounds):+.4f} to "
        f"{max(bounds):+.4f} nats a pair of the bound.",
        f"*It would add more* if links depended on which neighbour's memberships a node has, which "
        f"is all that its attention chooses: to a fitted guide a node's own are worth "
        f"{min(near):+.2f} to {max(near):+.2f} points more than a random neighbour's, and "
        f"{far[least]:+.2f} ({least}) to {far[most]:+.2f} ({most}) more than those of any node.",
        f"*What to take*, by mean average precision: {taken(rows)}.",
    ]
    return wrapped(" ".join(lines))


def taken(rows: Rows) -> str:
    """The best method of every graph, and how far NMM-DGLFRM is from it."""
    lines = []
    for graph, part in by_graph(rows).items():
        means = {
            guide: mean(scores(own, "AP").values())
            for (guide,), own in grouped(part, "guide").items()
        }
        best = max(means, key=means.__getitem__)
        if best == OURS:
            lines.append(f"on {graph} NMM-DGLFRM itself")
        else:
            text = gap(part, "AP", best).brief(2)
            lines.append(f"on {graph} {METHODS.get(best, best)} (NMM-DGLFRM minus it {text})")
    return "; ".join(lines)
