# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Which labels to ask for: twenty questions, one after the other, by what an answer is expected to
tell of all labels, by what it is expected to tell of the node itself, and at random.
"""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask

from benchmarks.nodes.fits import node_scores
from benchmarks.on_top.data import graph, kept
from benchmarks.shared.common import Records
from benchmarks.shared.louvain import louvain
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.models import StackedNMM
from pyro_nmm.sources import communities

QUESTIONS, SHOWN = 20, [0, 5, 10, 20]
#: Nodes of each label that a classifier learns from, and that are held out.
LEARNED, HELD_OUT = 2, 1
#: Nodes that may be asked for; and the resolution of Louvain's communities.
OPEN, RESOLUTION = 150, 4.0


def information(posterior: Posterior, nodes: Tensor) -> Tensor:
    return posterior.information_gain(nodes)


def entropy(posterior: Posterior, nodes: Tensor) -> Tensor:
    return torch.special.entr(posterior.marginals()[nodes]).sum(-1)


def chance(posterior: Posterior, nodes: Tensor) -> Tensor:
    return torch.rand(len(nodes))


RULES: dict[str, Callable[[Posterior, Tensor], Tensor]] = {
    "information gain": information, "entropy": entropy, "at random": chance,
}  # fmt: skip


def drawn(y: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Masks: learned from, held out, open to questions, and half of all, whose scores are shown."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    of = [order[y[order] == label] for label in range(int(y.max()) + 1)]
    few = LEARNED + HELD_OUT
    rest = torch.cat([nodes[few:] for nodes in of])
    rest = rest[torch.randperm(len(rest), generator=generator)]
    sets = [torch.cat([nodes[:LEARNED] for nodes in of])]
    sets += [torch.cat([nodes[LEARNED:few] for nodes in of])]
    sets += [rest[len(rest) // 2 :][:OPEN], rest[: len(rest) // 2]]
    return tuple(index_to_mask(nodes, len(y)) for nodes in sets)


def questions(args, results: Records) -> None:
    """The same classifier, and the same StackedNMM for every rule, given every answer at once."""
    each = {"split": args.seeds, "communities": [False, True], "method": list(RULES)}
    data, near = graph("digits", None)
    data, y = data.clone(), data.y
    shared = communities(data.edge_index, data.num_nodes, louvain(data, RESOLUTION))
    for key in results.missing(task="questions", dataset="digits", backbone="gcn", **each):
        data.train_mask, data.val_mask, open_to, test = drawn(y, key["split"])
        path = args.logits and args.logits / f"questions_{key['split']}.pt"
        logits = kept(path, "gcn", data, key["split"], args.num_epochs)
        hood, known = shared if key["communities"] else near, data.train_mask | data.val_mask
        pyro.set_rng_seed(key["split"])
        stacked = StackedNMM(logits.shape[1], communities=key["communities"])
        stacked.fit(hood, logits, y, data.train_mask, data.val_mask)
        curve, alike = {}, []
        for number in range(QUESTIONS + 1):
            posterior = stacked.posterior(hood, logits, y, known)
            if number in SHOWN:
                curve[str(number)] = node_scores(posterior.marginals()[test], y[test])
            nodes = (open_to & ~known).nonzero()[:, 0]
            told = RULES[key["method"]](posterior, nodes)
            both = torch.stack([told, entropy(posterior, nodes)])
            alike.append(torch.corrcoef(both)[0, 1].item())
            known = known.clone()
            known[nodes[told.argmax()]] = True
        results.add(**key, curve=curve, alike=sum(alike) / len(alike))
