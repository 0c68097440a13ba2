# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Why an NMM adds little to node classification, in three sentences that follow from the rows."""

from __future__ import annotations

from statistics import mean

from benchmarks.nodes.claims import over_cells, shares
from benchmarks.shared.common import pick
from benchmarks.shared.writing import Paired, Rows, bullets, made, scores

RUN = ("dataset", "backbone", "split", "fold")


def tables(files: dict[str, Rows]) -> dict[str, str]:
    return made({why_nodes: 0}, files)


def flat(rows: Rows) -> Rows:
    """Scores on the test nodes beside the others, and what the joint has over the marginals."""
    found = [row | row["test"] for row in pick(rows, task="splits")]
    return [row | {"dependence": row["joint"] + row["nll"]} for row in found]


def gain(rows: Rows, ours: str, theirs: str) -> float:
    """Of the negative log-likelihood, by which one method is below another, run by run."""
    found = (scores(rows, "nll", RUN, method=method) for method in (theirs, ours))
    return Paired.of(*found).mean


def by_backbone(rows: Rows) -> tuple[list[str], list[str]]:
    """What the scores' NMM gains in marginals and in the joint, by kind of classifier."""
    names = {"mlp": "an MLP, which sees no neighbour", "gcn": "a GCN", "gat": "a GAT"}
    alone, texts, joint = "StackedNMM, scores alone", [], []
    graphs = [{row["dataset"] for row in pick(rows, backbone=kind, method=alone)} for kind in names]
    shared = set.intersection(*graphs)
    for kind, name in names.items():
        part = [row for row in pick(rows, backbone=kind) if row["dataset"] in shared]
        texts.append(f"{gain(part, alone, 'temperature'):.3f} on {name}")
        joint.append(f"{mean(row['dependence'] for row in pick(part, method=alone)):.3f}")
    return texts, joint


def why_nodes(files: dict[str, Rows]) -> str:
    rows, nodes = flat(files["calibration"]), files["nodes"]
    trained = shares(nodes, False)
    hits = over_cells(nodes, "accuracy", "backbone + consistency", "backbone")
    if not rows or not trained or not hits.number:
        return "Nothing has been measured yet."
    texts, joint = by_backbone(rows)
    seeing, blind = ([r for r in rows if (r["backbone"] == "mlp") == mlp] for mlp in (False, True))
    (pool, whole), (pool_blind, whole_blind) = (
        [gain(part, name, "temperature") for name in ("the pool alone", "StackedNMM")]
        for part in (seeing, blind)
    )
    dependence = [row["dependence"] for row in pick(rows, method="StackedNMM")]
    return bullets([
        f"*What the NMM adds*: given a network that has seen the neighbours, labels of neighbours "
        f"hardly depend on each other any more, so that all it can share is worth "
        f"{mean(trained):.4f} nats a pair of adjacent test nodes where it is trained with the "
        f"network, and jointly {mean(dependence):.3f} nats a test node in StackedNMM "
        f"({min(dependence):.3f} to {max(dependence):.3f} by run).",
        f"*What would have to be true for it to add more*: that the classifier leaves unused what "
        f"neighbours tell; on the graphs that three kinds of classifier share, StackedNMM of the "
        f"scores alone has a negative log-likelihood below temperature scaling's by "
        f"{', '.join(texts[:-1])} and {texts[-1]}, and a joint above its own marginals by "
        f"{', '.join(joint[:-1])} and {joint[-1]} nats a node.",
        f"*What to take instead*: where marginals are all that is asked for, the pool alone "
        f"(`PooledScores`), which is {pool:.3f} nats below temperature scaling where StackedNMM is "
        f"{whole:.3f} (GCN and GAT; {pool_blind:.3f} and {whole_blind:.3f} on MLPs), and for "
        f"accuracy with few labels consistency among unlabelled nodes without an NMM ({hits.span} "
        f"points on the public split, significant in {len(hits.higher)} of {hits.number} cells); "
        f"StackedNMM where pairs, counts or all labels at once matter.",
    ])  # fmt: skip
