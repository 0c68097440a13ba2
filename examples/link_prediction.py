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
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import from_networkx

from pyro_nmm import Neighborhood
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


def split_links(data: Data, seed: int) -> list[Data]:
    """Graphs with 85 percent of the links, and with labelled pairs to validate and to test."""
    pyro.set_rng_seed(seed)  # PyG draws pairs without a link by Python's generator
    options = {"is_undirected": True, "add_negative_train_samples": False}
    return RandomLinkSplit(num_val=0.05, num_test=0.1, **options)(data)


def build(args, train: Data, guide: str) -> DGLFRMGuide:
    target = DGLFRM(
        train.num_nodes, args.num_communities, train.num_features if train.has_features else 0,
        hidden=(args.hidden, args.hidden // 2), concentration=args.concentration,
    )  # fmt: skip
    hood = None if guide == "original" else Neighborhood(train.edge_index, train.num_nodes)
    widths = args.hidden, 16
    pair = DGLFRMGuide(
        target, train.num_features, hood, hidden=widths, dropout=args.dropout, gamma=args.gamma
    )
    return pair.to(args.device)


def evaluate(pair: DGLFRMGuide, train: Data, test: Data) -> dict:
    """Area under the ROC curve and average precision of held-out links, in percent."""
    logits = pair.link_logits(test.edge_label_index, train.edge_index, train.x).cpu()
    labels = test.edge_label.cpu()
    return {
        "AUC": 100 * roc_auc_score(labels, logits),
        "AP": 100 * average_precision_score(labels, logits),
    }


def main(args) -> dict:
    data, names = load(args)
    train, val, test = (part.to(args.device) for part in split_links(data, args.seed))
    held_out = torch.cat([val.edge_label_index, test.edge_label_index], 1)
    result, groups = {}, {}
    for guide in args.guide:
        pyro.clear_param_store()
        pyro.set_rng_seed(args.seed)
        pair = build(args, train, guide)
        start = time.perf_counter()
        losses = fit_links(
            pair, train.edge_index, train.x, held_out, num_steps=args.num_steps,
            progress=partial(progress_bar, desc=NAMES[guide]),
        )  # fmt: skip
        seconds = (time.perf_counter() - start) / args.num_steps
        last = losses[-len(losses) // 10 :]
        result[guide] = evaluate(pair, train, test)
        result[guide] |= {"loss": sum(last) / len(last), "s/step": seconds}
        if args.output:
            groups[NAMES[guide]] = communities(pair, train)
    print(f"{'':12}" + "".join(f"{name:>10}" for name in result[guide]))
    for guide, row in result.items():
        values = zip(row.values(), (2, 2, 4, 4), strict=True)
        print(f"{NAMES[guide]:12}" + "".join(f"{v:10.{digits}f}" for v, digits in values))
    links, tested = data.num_edges // 2, int(test.edge_label.sum())
    print(f"{data.num_nodes} nodes, {links} links, {tested} of them for testing")
    if args.output:
        draw(args.output, data, names, groups)
    return result


def communities(pair: DGLFRMGuide, train: Data, number: int = 6, num_samples: int = 50) -> Tensor:
    """
    Community of every node, largest first, by clustering the vectors that have the links' log-odds
    as inner products.
    """
    pair.eval()
    with torch.no_grad():
        draws = [
            pair.target.decoder(pair.guide(train.edge_index, train.x)) for _ in range(num_samples)
        ]
    factors = F.normalize(torch.stack(draws).mean(0), dim=-1).cpu()
    clusters = KMeans(min(number, train.num_nodes), n_init=10, random_state=0).fit(factors.numpy())
    label = torch.from_numpy(clusters.labels_).long()
    rank = label.bincount().argsort(descending=True).argsort()
    return rank[label]


def parser() -> ArgumentParser:
    return options(
        __doc__, "links.png", {"dataset": ["lesmis", "synthetic"], "guide": NAMES},
        dataset="lesmis", guide=list(NAMES), num_communities=20, concentration=5.0,
        gamma=(0.0, "where self-attention starts"), hidden=32, dropout=0.2, num_steps=500, seed=0,
        device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
