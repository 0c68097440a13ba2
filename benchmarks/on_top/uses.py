# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Uses of the joint distribution: how many nodes of a set have a label, and labels that are observed
after a classifier was trained, a share of the test labels or twenty that are asked for in turn.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from statistics import mean

import networkx as nx
import pyro
import torch
from pyro.ops.stats import crps_empirical
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.nn import LabelPropagation
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import node_scores
from benchmarks.on_top import rivals
from benchmarks.on_top.data import cases, given, graph, shuffled, trained
from benchmarks.shared.louvain import louvain
from benchmarks.shared.records import Records
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood, Posterior
from pyro_nmm.models import StackedNMM
from pyro_nmm.sources import communities

SIZES, SETS, DRAWS = [10, 30, 100], 100, 400
SHARES, FOLDS = [0.0, 0.1, 0.3, 0.5], 5
UPDATED = "StackedNMM, updated"
QUESTIONS, SHOWN = 20, [0, 5, 10, 20]
#: Nodes of each label that a classifier learns from, and these and one that is held out.
LEARNED, LABELLED = 2, 3
#: Nodes that may be asked for, and the resolution of Louvain's communities.
OPEN, RESOLUTION = 150, 4.0


def grown(hood: Neighborhood, inside: Tensor, size: int, seed: int) -> Tensor:
    """``(S, size)``: nodes of ``inside`` around random ones, the nearest first."""
    edges = torch.stack([hood.target, hood.source], 1)
    graph, nodes = nx.DiGraph(edges[inside[edges].all(1)].tolist()), inside.nonzero()[:, 0]
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(20 * SETS):  # components may be too small
        start = nodes[torch.randint(len(nodes), (1,), generator=generator)].item()
        found.append(list(islice(chain.from_iterable(nx.bfs_layers(graph, start)), size)))
    return torch.tensor([near for near in found if len(near) == size][:SETS])


def summary(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Coverage and width of 90 % intervals, and the CRPS, in nodes, of draws of counts."""
    draws, truth = draws.double(), truth.double()
    low, high = draws.quantile(torch.tensor([0.05, 0.95]).to(draws), 0)
    low, high = low.floor(), high.ceil()
    return {
        "coverage": ((truth >= low) & (truth <= high)).double().mean().item(),
        "width": (high - low).mean().item(),
        "CRPS": crps_empirical(draws, truth).mean().item(),
    }


def counts(args, results: Records) -> None:
    """Counts of all labels in sets of test nodes that grow around a random one."""
    for key, data in cases(args, results, "counts", fold=0, size=SIZES):
        sets = grown(data.hood, data.test_mask, key["size"], key["split"])
        nodes, place = sets.unique(return_inverse=True)
        size = data.logits.shape[1]
        posterior = StackedNMM(size).fit(*given(data), data.val_mask).posterior(*given(data))
        found = {"joint": posterior.sample((DRAWS,), nodes)}
        alone = {"own product": posterior.marginals(), "temperature": rivals.temperature(data)}
        for name, probs in alone.items():
            found[name] = Categorical(probs[nodes]).sample((DRAWS,))
        truth = one_hot(data.y[sets], size).sum(-2)
        tallies = {name: one_hot(draws[:, place], size).sum(-2) for name, draws in found.items()}
        results.add(**key, **{name: summary(tally, truth) for name, tally in tallies.items()})


def by_folds(make: Callable[[Tensor], Tensor], data: Data) -> rivals.Fitted:
    """
    Marginals of ``make`` given all observed labels, and their loss. They are recalibrated on each
    fold of the new labels, ``val_mask``, with marginals of ``make`` given all other labels.
    """
    new, num_nodes = data.val_mask, len(data.y)

    def twice(known: Tensor) -> Tensor:
        left_out = torch.full((num_nodes, int(data.y.max()) + 1), 0.5)
        for fold in range(FOLDS):
            out = index_to_mask(shuffled(new)[fold::FOLDS], num_nodes)
            left_out[out] = make(known | (new & ~out))[out]
        return torch.cat([left_out, make(known | new)])

    val_mask = torch.cat([new, torch.zeros_like(new)])
    both = Data(y=data.y.repeat(2), train_mask=data.train_mask, val_mask=val_mask)
    found, loss = rivals.recalibrated(twice, both)
    return found[num_nodes:], loss


def propagation(data: Data) -> Tensor:
    """PyG's label propagation, which has no classifier."""

    def make(known: Tensor) -> Tensor:
        spread = LabelPropagation(50, 0.9)(data.y, data.edge_index, known) + 1e-3
        return spread / spread.sum(-1, keepdim=True)

    return by_folds(make, data)[0]


OTHERS: dict[str, Callable[[Data], Tensor]] = {
    "C&S": partial(rivals.correct_and_smooth, fitted=by_folds),
    "label propagation": propagation,
    "vector scaling, shrunk": rivals.shrunk_vector,
}


def stacked(data: Data, new: Tensor) -> dict[str, tuple]:
    """Marginals and seconds: conditioned on the new labels at once, and after an update."""
    module = StackedNMM(data.logits.shape[1]).fit(*given(data), data.val_mask)
    conditioned = module.posterior(*given(data)).condition(data.y, new).marginals()

    def update() -> Tensor:
        module.update(*given(data), new)
        return module.posterior(*given(data)[:3], data.train_mask | new).marginals()

    return {"StackedNMM, conditioned": (conditioned, None), UPDATED: timed(update)}


def labels(args, results: Records) -> None:
    """Scores on half of the test nodes, with the held-out labels and some others observed."""
    for key, data in cases(args, results, "labels", fold=0, share=SHARES, method=UPDATED):
        test = shuffled(data.test_mask, torch.Generator().manual_seed(key["split"]))
        more, rest = data.clone(), test[len(test) // 2 :]
        more.val_mask[test[: int(key["share"] * len(test))]] = True
        found = {name: timed(make, more) for name, make in OTHERS.items()}
        for name, (probs, seconds) in (found | stacked(data, more.val_mask)).items():
            row = {"test": node_scores(probs[rest], data.y[rest]), "seconds": seconds}
            results.add(**key | {"method": name}, **row)


def entropy(posterior: Posterior, nodes: Tensor) -> Tensor:
    return torch.special.entr(posterior.marginals()[nodes]).sum(-1)


RULES: dict[str, Callable[[Posterior, Tensor], Tensor]] = {
    "information gain": Posterior.information_gain,
    "entropy": entropy,
    "at random": lambda posterior, nodes: torch.rand(len(nodes)),
}


def few(y: Tensor, seed: int) -> list[Tensor]:
    """Masks: learned from, held out, open to questions, and half of all, whose scores are shown."""
    generator = torch.Generator().manual_seed(seed)
    order = shuffled(torch.ones_like(y), generator)
    labelled = [order[y[order] == label] for label in range(int(y.max()) + 1)]
    parts = (nodes.tensor_split([LEARNED, LABELLED]) for nodes in labelled)
    learned, held_out, rest = map(torch.cat, zip(*parts, strict=True))
    rest = rest[torch.randperm(len(rest), generator=generator)]
    test, others = rest.tensor_split([len(rest) // 2])
    return [index_to_mask(nodes, len(y)) for nodes in (learned, held_out, others[:OPEN], test)]


def questions(args, results: Records) -> None:
    """One classifier and one StackedNMM for all rules; every answer is observed at once."""
    data, hood = graph("digits", None)
    data, groups = data.clone(), louvain(data, RESOLUTION)
    hoods = {False: hood, True: communities(data.edge_index, data.num_nodes, groups)}
    each = {"split": args.splits, "communities": list(hoods), "method": list(RULES)}
    for key in results.missing(task="questions", dataset="digits", backbone="gcn", **each):
        data.hood = hoods[key["communities"]]
        data.train_mask, data.val_mask, open_to, test = few(data.y, key["split"])
        data.logits = trained("gcn", data, key["split"])
        pyro.set_rng_seed(key["split"])
        module = StackedNMM(data.logits.shape[1], communities=key["communities"])
        module.fit(*given(data), data.val_mask)
        known, curve, alike = data.train_mask | data.val_mask, {}, []
        for number in range(QUESTIONS + 1):
            posterior = module.posterior(*given(data)[:3], known)
            if number in SHOWN:
                curve[str(number)] = node_scores(posterior.marginals()[test], data.y[test])
            nodes = (open_to & ~known).nonzero()[:, 0]
            value = RULES[key["method"]](posterior, nodes)
            both = torch.stack([value, entropy(posterior, nodes)])
            alike.append(torch.corrcoef(both)[0, 1].item())
            known = known | index_to_mask(nodes[value.argmax()][None], len(known))
        results.add(**key, curve=curve, alike=mean(alike))
