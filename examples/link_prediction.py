# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Find communities and predict held-out links of a graph by a deep latent feature model (Mehta, Carin
and Rai, 2019): with its original guide, and with an NMM over the memberships. The default graph is
who meets whom in Les Misérables.

    python examples/link_prediction.py --output output/links.png
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from functools import partial

import networkx
import pyro
import torch
from common import options, progress_bar
from drawing.link_prediction import draw
from sklearn.cluster import KMeans
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.utils import from_networkx

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import LinkSplit, link_split
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.models import DGLFRM
from pyro_nmm.sparse import identity

NAMES = {"original": "DGLFRM", "nmm": "NMM-DGLFRM"}


def load(args) -> tuple[Data, list[str]]:
    """A graph, and the names of its nodes."""
    if args.dataset == "lesmis":
        graph = networkx.les_miserables_graph()
        data = from_networkx(networkx.from_edgelist(graph.edges))
        data.x, data.has_features = identity(len(graph)), False
        return data, list(networkx.from_edgelist(graph.edges))
    pyro.clear_param_store()
    with torch.random.fork_rng():
        pyro.set_rng_seed(0)
        edge_index = DGLFRM(200, 8, concentration=3.0).model()
    data = Data(x=identity(200), edge_index=edge_index, num_nodes=200, has_features=False)
    return data, [str(i) for i in range(200)]


def build(args, data: Data, split: LinkSplit, guide: str) -> DGLFRMGuide:
    target = DGLFRM(
        data.num_nodes, args.num_communities, data.num_features if data.has_features else 0,
        hidden=(args.hidden, args.hidden // 2), concentration=args.concentration,
    )  # fmt: skip
    hood = None if guide == "original" else Neighborhood(split.train, data.num_nodes)
    pair = DGLFRMGuide(
        target, data.num_features, hood, hidden=args.hidden, dropout=args.dropout, gamma=args.gamma
    )
    return pair.to(args.device)


def evaluate(pair: DGLFRMGuide, split: LinkSplit, x: Tensor, part: str = "test") -> dict:
    """Area under the ROC curve and average precision of held-out links, in percent."""
    true, false = getattr(split, part), getattr(split, part + "_false")
    logits = pair.link_logits(torch.cat([true, false], 1), split.train, x).cpu()
    labels = torch.arange(len(logits)) < true.shape[1]
    return {
        "AUC": 100 * roc_auc_score(labels, logits),
        "AP": 100 * average_precision_score(labels, logits),
    }


def main(args) -> dict:
    data, names = load(args)
    split = link_split(data.edge_index, data.num_nodes, args.seed)
    data, split = data.to(args.device), split.to(args.device)
    result, pairs, curves = {}, {}, {}
    for guide in args.guide:
        pyro.clear_param_store()
        pyro.set_rng_seed(args.seed)
        pairs[guide] = build(args, data, split, guide)
        start = time.perf_counter()
        curves[guide] = fit_links(
            pairs[guide], split, data.x, num_steps=args.num_steps,
            progress=partial(progress_bar, desc=NAMES[guide]),
        )  # fmt: skip
        seconds = (time.perf_counter() - start) / args.num_steps
        last = curves[guide][-len(curves[guide]) // 10 :]
        result[guide] = evaluate(pairs[guide], split, data.x)
        result[guide] |= {"loss": sum(last) / len(last), "s/step": seconds}
    print(f"{'':12}" + "".join(f"{name:>10}" for name in result[guide]))
    for guide, row in result.items():
        values = zip(row.values(), (2, 2, 4, 4), strict=True)
        print(f"{NAMES[guide]:12}" + "".join(f"{v:10.{digits}f}" for v, digits in values))
    links, tested = data.num_edges // 2, split.test.shape[1]
    print(f"{data.num_nodes} nodes, {links} links, {tested} of them for testing")
    if args.output:
        groups = communities(list(pairs.values())[-1], split, data.x)
        curves = {NAMES[guide]: curve for guide, curve in curves.items()}
        draw(args.output, data, names, *groups, curves)
    return result


def communities(
    pair: DGLFRMGuide, split: LinkSplit, x: Tensor, number: int = 6, num_samples: int = 50
) -> tuple[Tensor, Tensor]:
    """
    Community of every node, largest first, and the node's fit to it, by clustering the vectors
    that have the links' log-odds as inner products.
    """
    pair.eval()
    with torch.no_grad():
        draws = [pair.target.decoder(pair.guide(split.train, x)) for _ in range(num_samples)]
    factors = F.normalize(torch.stack(draws).mean(0), dim=-1).cpu()
    clusters = KMeans(min(number, len(x)), n_init=10, random_state=0).fit(factors.numpy())
    label = torch.from_numpy(clusters.labels_).long()
    fit = (factors * torch.from_numpy(clusters.cluster_centers_)[label]).sum(-1)
    rank = label.bincount().argsort(descending=True).argsort()
    return rank[label], fit


def parser() -> ArgumentParser:
    return options(
        __doc__, "links.png", {"dataset": ["lesmis", "synthetic"], "guide": NAMES},
        dataset="lesmis", guide=list(NAMES), num_communities=20, concentration=5.0,
        gamma=(0.0, "where self-attention starts"), hidden=32, dropout=0.2, num_steps=500, seed=0,
        device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
