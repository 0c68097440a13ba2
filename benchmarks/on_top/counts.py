# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How many of some adjacent nodes have a label: intervals of a joint distribution, of the product of
its own marginals, and of temperature scaling.
"""

from __future__ import annotations

import itertools

import pyro
import torch
from torch import Tensor

from benchmarks.on_top import rivals
from benchmarks.on_top.data import classifier, load
from benchmarks.shared.common import Records
from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM

SIZES = [10, 30, 100]
SETS, DRAWS = 100, 400


def grown(hood: Neighborhood, inside: Tensor, size: int, generator) -> Tensor | None:
    """Nodes of ``inside`` around a random one, nearest first; none where they end too soon."""
    nodes = inside.nonzero()[:, 0]
    start = nodes[torch.randint(len(nodes), (1,), generator=generator)].item()
    found, last = {start: None}, [start]
    while last and len(found) < size:
        rows = hood.take(torch.tensor(last))
        near = [j for j in rows.source.tolist() if inside[j] and j not in found]
        last = list(dict.fromkeys(near))
        found |= dict.fromkeys(last)
    return torch.tensor(list(found)[:size]) if len(found) >= size else None


def crps(draws: Tensor, truth: Tensor) -> Tensor:
    """Of draws ``(T, S)``: the continuous ranked probability score, in nodes, less being better."""
    ordered, number = draws.double().sort(0).values, len(draws)
    weight = 2 * torch.arange(1, number + 1).double() - number - 1
    spread = (weight[:, None] * ordered).sum(0) / number**2
    return (draws - truth).abs().double().mean(0) - spread


def summary(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Of counts of every label in every set."""
    low, high = draws.double().quantile(torch.tensor([0.05, 0.95]).double(), 0)
    low, high = low.floor(), high.ceil()
    return {
        "coverage": ((truth >= low) & (truth <= high)).double().mean().item(),
        "width": (high - low).mean().item(),
        "CRPS": crps(draws, truth).mean().item(),
    }


def counts(args, results: Records) -> None:
    """Counts of all labels in sets of test nodes that grow around a random one."""
    each = {"split": args.splits, "fold": 0, "size": SIZES}
    kinds = {"dataset": args.graphs, "backbone": args.backbones}
    for key in results.missing(task="counts", **kinds, **each):
        cell = key["dataset"], key["backbone"], key["split"], 0, args.data_root
        data, hood = load(cell[0], *cell[2:])
        logits = classifier(*cell, args.logits, args.num_epochs)
        generator = torch.Generator().manual_seed(key["split"])
        tried = (grown(hood, data.test_mask, key["size"], generator) for _ in range(20 * SETS))
        sets = list(itertools.islice((nodes for nodes in tried if nodes is not None), SETS))
        pyro.set_rng_seed(key["split"])
        known, y = data.train_mask, data.y
        module = StackedNMM(logits.shape[1]).fit(hood, logits, y, known, data.val_mask)
        posterior = module.posterior(hood, logits, y, known)
        labels = range(logits.shape[1])
        truth = torch.cat([torch.stack([(y[nodes] == k).sum() for nodes in sets]) for k in labels])
        union = torch.cat(sets).unique()
        place = [torch.searchsorted(union, nodes) for nodes in sets]

        def of(draws: Tensor, place=place, labels=labels) -> Tensor:
            return torch.cat(
                [torch.stack([(draws[:, p] == k).sum(1) for p in place], 1) for k in labels], 1
            )

        alone = rivals.temperature(data, hood, logits, known, data.val_mask)
        found = {"joint": posterior.sample((DRAWS,), union)}
        for name, probs in (("own product", posterior.marginals()), ("temperature", alone)):
            found[name] = torch.distributions.Categorical(probs[union]).sample((DRAWS,))
        scores = {name: summary(of(draws), truth) for name, draws in found.items()}
        results.add(**key, sets=len(sets), **scores)
