# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How much forest is in a district, and where should one look next? A simulated map of four kinds of
land, a classifier, and the true label of one cell in twenty. Intervals come from the joint
distribution, at once and by stages, from a product of marginals, and from the chain rule.

    python examples/counts_of_a_region.py --output output/counts_of_a_region.png
"""

from __future__ import annotations

import time
from argparse import ArgumentParser

import numpy as np
import pyro
import torch
from common import options, progress_bar
from drawing.counts_of_a_region import draw
from scipy.ndimage import gaussian_filter
from sklearn.linear_model import LogisticRegression
from torch.distributions import Categorical
from torch.nn.functional import nll_loss, one_hot
from torch_geometric.utils import grid, index_to_mask, remove_self_loops

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, random_blocks

KINDS, SIZE, DISTRICTS = 4, 40, 4
STAGED, JOINT = "joint, ten stages", "joint, at once"
PRODUCT, CHAIN = "product of marginals", "chain rule"
#: Draws of all labels. Stages and the chain rule need a pool for each draw and block.
NUM_DRAWS, FEW_DRAWS, CHAIN_BLOCKS = 1000, 32, 20
RANDOM, SINGLY, TOGETHER = "at random", "the ten largest gains", "ten nodes together"


def simulate(seed: int):
    """Labels ``(N,)`` of a smooth map, and noisy features ``(N, 4)``."""
    rng = np.random.default_rng(seed)
    fields = [gaussian_filter(rng.normal(size=(SIZE, SIZE)), 3.0) for _ in range(KINDS)]
    y = np.stack([field / field.std() for field in fields]).argmax(0).flatten()
    x = 1.2 * np.eye(KINDS)[y] + rng.normal(size=(SIZE**2, KINDS))
    return torch.from_numpy(y), torch.from_numpy(x).float()


def mapped(seed: int, share: float):
    """A fitted StackedNMM and its arguments. A half of the known labels is held out."""
    y, x = simulate(seed)
    hood = Neighborhood(remove_self_loops(grid(SIZE, SIZE)[0])[0], num_nodes=SIZE**2)
    order = torch.randperm(len(y))[: int(share * len(y))]
    train, held_out = (index_to_mask(part, len(y)) for part in order.chunk(2))
    model = LogisticRegression(max_iter=500).fit(x[train], y[train])
    scores = torch.full((len(y), KINDS), -20.0)
    scores[:, model.classes_] = torch.from_numpy(model.predict_log_proba(x)).float()
    given = hood, scores, y, train
    return StackedNMM(KINDS).fit(*given, held_out), given, held_out


def by_chain_rule(stacked, given, known):
    """Draws ``(FEW_DRAWS, N)``: the pool predicts a block, whose drawn labels are then known."""
    hood, scores, y, _ = given
    block, draws = random_blocks(~known, CHAIN_BLOCKS), []
    for _ in range(FEW_DRAWS):
        labels, seen = y.where(known, 0), known.clone()
        for number in range(CHAIN_BLOCKS):
            probs = stacked.pool(stacked.pool.terms(hood, scores, labels, seen))
            new = ~known & (block == number)
            labels[new] = Categorical(probs[new]).sample()
            seen |= new
        draws.append(labels)
    return torch.stack(draws)


def samplers(stacked, given, held_out) -> dict:
    """Functions that draw the labels of all cells."""
    posterior = stacked.posterior(*given, new=held_out)
    block = random_blocks(~(given[-1] | held_out), 10)
    staged = stacked.posterior(*given, new=held_out, stages=block)
    return {
        STAGED: lambda: staged.sample((FEW_DRAWS,)),
        JOINT: lambda: posterior.sample((NUM_DRAWS,)),
        PRODUCT: lambda: Categorical(posterior.marginals()).sample((NUM_DRAWS,)),
        CHAIN: lambda: by_chain_rule(stacked, given, given[-1] | held_out),
    }


def districts():
    """``(D, n)``: the cells of each district."""
    cells = torch.arange(SIZE**2).view(SIZE, SIZE)
    side = SIZE // DISTRICTS
    return cells.unfold(0, side, side).unfold(1, side, side).reshape(DISTRICTS**2, -1)


def intervals(draws, truth) -> dict[str, float]:
    """Coverage and width of 90 % intervals of the counts ``(draws, D, 4)``."""
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    inside = (np.floor(low) <= truth) & (truth <= np.ceil(high))
    return {"coverage": inside.mean(), "width": (high - low).mean()}


def information(posterior, hood):
    """``(N, N)``: mutual information of two labels of neighbours or of neighbours' neighbours."""
    near = torch.zeros(hood.num_nodes, hood.num_nodes)
    near[hood.source, hood.target] = 1
    pairs = (near @ near + near).fill_diagonal_(0).triu().nonzero().T
    tables = posterior.pairwise(pairs)
    ends = torch.special.entr(tables.sum(1)).sum(-1) + torch.special.entr(tables.sum(2)).sum(-1)
    mutual = near.new_zeros(near.shape)
    mutual[pairs[0], pairs[1]] = (ends - torch.special.entr(tables).sum((1, 2))).float()
    mutual = mutual.clamp(min=0)  # rounding
    entropy = torch.special.entr(posterior.marginals()).sum(-1).float()
    return mutual + mutual.T + entropy.diag()


def together(mutual, free, number: int):
    """Nodes that greedily maximise a bound on the information of all answers about each label:

    .. math:: \\sum_j \\max_{i \\in S} I(y_i; y_j) \\le \\sum_j I(y_S; y_j)
    """
    chosen, covered = [], torch.zeros(len(mutual))
    for _ in range(number):
        gains = (mutual - covered).clamp(min=0).sum(1).masked_fill(~free, -1)
        chosen.append(gains.argmax())
        free = free & ~index_to_mask(chosen[-1][None], len(free))
        covered = torch.maximum(covered, mutual[chosen[-1]])
    return torch.stack(chosen)


def main(args) -> dict:
    torch.set_num_threads(args.num_threads)
    counted: dict[str, list] = {name: [] for name in (STAGED, JOINT, PRODUCT, CHAIN)}
    asked: dict[str, list] = {name: [] for name in (RANDOM, SINGLY, TOGETHER)}
    for seed in progress_bar(range(args.num_seeds), desc="maps", unit="map"):
        pyro.set_rng_seed(args.first_seed + seed)
        stacked, given, held_out = mapped(args.first_seed + seed, args.share)
        hood, _, y, train = given
        known, truth = train | held_out, one_hot(y[districts()], KINDS).sum(1).numpy()
        draws = {}
        for name, sample in samplers(stacked, given, held_out).items():
            start = time.perf_counter()
            labels = sample()
            seconds = (time.perf_counter() - start) / len(labels)
            draws[name] = one_hot(labels[:, districts()], KINDS).sum(2).numpy()
            counted[name].append(intervals(draws[name], truth) | {"ms a draw": 1000 * seconds})
        fitted = stacked.posterior(*given, new=held_out, num_draws=0)
        mutual = information(fitted, hood)
        chosen = {
            RANDOM: (~known).nonzero()[:, 0][torch.randperm(int((~known).sum()))[:10]],
            SINGLY: mutual.sum(1).masked_fill(known, -1).topk(10).indices,
            TOGETHER: together(mutual, ~known, 10),
        }
        before = nll_loss(fitted.marginals()[~known].log(), y[~known]).item()
        for name, nodes in chosen.items():
            more = fitted.condition(y, index_to_mask(nodes, len(y)))
            gain = before - nll_loss(more.marginals()[~known].log(), y[~known]).item()
            asked[name].append(1000 * gain)
    print(f"Counts of {KINDS} kinds in {DISTRICTS**2} districts, mean of {args.num_seeds} maps")
    print(f"{'':24}{'coverage':>10}{'width':>8}{'ms a draw':>11}")
    means = {
        name: {score: float(np.mean([row[score] for row in rows])) for score in rows[0]}
        for name, rows in counted.items()
    }
    for name, row in means.items():
        print(f"{name:24}{row['coverage']:10.1%}{row['width']:8.1f}{row['ms a draw']:11.2f}")
    print("Ten more labels, decrease of the NLL (thousandths of a nat a node)")
    for name, gains in asked.items():
        print(f"{name:24}{np.mean(gains):10.1f}  of maps:", *(f"{gain:6.1f}" for gain in gains))
    if args.output:
        draw(args.output, y.view(SIZE, SIZE), known, draws, truth, chosen)
    return {"counts": counted, "asked": asked}


def parser() -> ArgumentParser:
    return options(
        __doc__, "counts_of_a_region.png", share=(0.05, "of cells with a label"), first_seed=0,
        num_seeds=(5, "maps"), num_threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
