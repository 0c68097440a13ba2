# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How many nodes of a set have a label: intervals of a joint distribution, of the product of its own
marginals, and of temperature scaling.
"""

from __future__ import annotations

from itertools import chain, islice

import networkx as nx
import torch
from pyro.ops.stats import crps_empirical
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.on_top.data import cases, given
from benchmarks.on_top.rivals import temperature
from benchmarks.shared.records import Records
from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM

SIZES = [10, 30, 100]
SETS, DRAWS = 100, 400


def grown(hood: Neighborhood, inside: Tensor, size: int, seed: int) -> Tensor:
    """``(S, size)``: nodes of ``inside`` around random ones, the nearest first."""
    graph, nodes = nx.DiGraph(), inside.nonzero()[:, 0].tolist()
    edges = inside[hood.target] & inside[hood.source]
    graph.add_nodes_from(nodes)
    graph.add_edges_from(torch.stack([hood.target, hood.source], 1)[edges].tolist())
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = []
    for _ in range(20 * SETS):  # components may be too small
        start = nodes[torch.randint(len(nodes), (1,), generator=generator)]
        near = chain([start], (node for _, node in nx.bfs_edges(graph, start)))
        found.append(list(islice(near, size)))
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
        nodes, size = sets.unique(), data.logits.shape[1]
        posterior = StackedNMM(size).fit(*given(data), data.val_mask).posterior(*given(data))
        found = {"joint": posterior.sample((DRAWS,), nodes)}
        alone = {"own product": posterior.marginals(), "temperature": temperature(data)}
        for name, probs in alone.items():
            found[name] = Categorical(probs[nodes]).sample((DRAWS,))

        def tally(labels: Tensor, size: int = size) -> Tensor:
            return torch.stack([(labels == label).sum(-1) for label in range(size)], -1)

        place, truth = torch.searchsorted(nodes, sets), tally(data.y[sets])
        row = {name: summary(tally(draws[:, place]), truth) for name, draws in found.items()}
        results.add(**key, sets=len(sets), **row)
