# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Log-likelihood of all test labels, by products of marginals, by the chain rule, and by stages."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.on_top import rivals
from benchmarks.on_top.data import given
from pyro_nmm.models import StackedNMM, random_blocks

#: Blocks of the chain rule, and numbers of blocks among which held-out labels choose.
CHAIN, STAGES = 100, (1, 3, 10, 30)
#: Nats by which held-out labels may be less likely under more blocks, chosen on other splits.
NEARLY = 0.5


def revealed(make: Callable[[Tensor], Tensor], data: Data, nodes: Tensor, number: int) -> float:
    """Blocks of nodes by marginals given the training labels and all earlier blocks."""
    block, known, total = random_blocks(nodes, number), data.train_mask, 0.0
    for k in range(number):
        part = nodes & (block == k)
        if part.any():
            total += log_probs(make(known), data.y, part).sum().item()
        known = known | part
    return total


def chain(make: Callable[[Tensor], Tensor], data: Data) -> dict:
    test = data.test_mask
    return {"joint": revealed(make, data, test, CHAIN) / int(test.sum())}


def product(probs: Tensor, data: Data) -> dict:
    return {"joint": log_probs(probs, data.y, data.test_mask).mean().item()}


def log_probs(probs: Tensor, y: Tensor, part: Tensor) -> Tensor:
    return probs[part, y[part]].double().clamp(min=1e-12).log()


def mixture(logits: Tensor, data: Data) -> dict:
    """
    Members' joint distribution, a mixture of products: the logarithm of the mean over members of
    the likelihood of all labels. The held-out labels fit the temperature.
    """
    scale = torch.zeros((), requires_grad=True)

    def joint(part: Tensor) -> Tensor:
        probs = rivals.scaled(logits.double(), scale)
        terms = torch.stack([log_probs(member, data.y, part).sum() for member in probs])
        return (terms.logsumexp(0) - math.log(len(terms))) / int(part.sum())

    rivals.fit(lambda: -joint(data.val_mask), [scale])
    return {"joint": joint(data.test_mask).item()}


def correct_and_smooth(data: Data) -> Callable[[Tensor], Tensor]:
    """Marginals given known labels; settings and recalibration as given the training labels."""
    start, fits = rivals.temperature(data), []
    for pair in rivals.PAIRS:
        spread = partial(rivals.smoothed, data, start, first=pair[0], second=pair[1])
        make = rivals.rescaled(spread, data)
        loss = -log_probs(make(data.train_mask), data.y, data.val_mask).mean().item()
        fits.append((loss, make))
    return min(fits, key=lambda found: found[0])[1]


def fitted(data: Data, **options) -> StackedNMM:
    return StackedNMM(data.logits.shape[1]).fit(*given(data), data.val_mask, **options)


def marginals(data: Data) -> dict:
    return product(fitted(data).posterior(*given(data), num_draws=0).marginals(), data)


def at_once(data: Data) -> dict:
    mixture, number = fitted(data).mixture(*given(data)), int(data.test_mask.sum())
    value, error = mixture.path_likelihood(data.y, data.test_mask, data.train_mask)
    return {"joint": value.item() / number, "error": error.item() / number}


def held_out_nll(module: StackedNMM, data: Data) -> dict[int, float]:
    """Negative log-likelihood of all held-out labels, by the number of blocks."""
    nll, own = {}, given(data)
    for size in STAGES:
        block = random_blocks(data.val_mask, size)
        posterior = module.posterior(*own, num_draws=0, stages=block)
        nll[size] = -posterior.log_likelihood(data.y, data.val_mask).item()
    return nll


def chosen(nll: dict[int, float]) -> int:
    """The most blocks under which held-out labels are nearly as likely as under the best number."""
    return max(size for size, value in nll.items() if value <= min(nll.values()) + NEARLY)


def in_blocks(data: Data) -> dict:
    """Each number of blocks, by particles; the held-out labels' is the one that they choose."""
    module, number, found = fitted(data), int(data.test_mask.sum()), {}
    for size in STAGES:
        block = random_blocks(data.test_mask, size)
        posterior = module.posterior(*given(data), num_draws=0, stages=block)
        found[size] = posterior.log_likelihood(data.y, data.test_mask).item() / number
    nll = held_out_nll(module, data)
    held_out = {str(size): value for size, value in nll.items()}
    more = {"blocks": {str(size): value for size, value in found.items()}, "held out": held_out}
    return {"joint": found[chosen(nll)], "chosen": chosen(nll)} | more


METHODS: dict[str, Callable[[Data], dict]] = {
    "temperature": lambda data: product(rivals.temperature(data), data),
    "C&S": lambda data: product(correct_and_smooth(data)(data.train_mask), data),
    "C&S as a chain": lambda data: chain(correct_and_smooth(data), data),
    "Potts as a chain": lambda data: chain(
        rivals.fitted_potts(data, data.logits.softmax(-1)), data
    ),
    "Potts on the pool as a chain": lambda data: chain(
        rivals.fitted_potts(data, rivals.pool_alone(data)), data
    ),
    "masked labels as a chain": lambda data: chain(rivals.masked_labels(data), data),
    "ensemble": lambda data: mixture(rivals.ensemble(data), data),
    "dropout": lambda data: mixture(rivals.dropout(data), data),
    "the pool": lambda data: product(rivals.pool_alone(data), data),
    "the pool as a chain": lambda data: chain(rivals.fitted_pool(data), data),
    "StackedNMM, product of marginals": marginals,
    "StackedNMM": at_once,
    "StackedNMM by stages": in_blocks,
}
