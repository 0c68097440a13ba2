# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels of connected sets of test nodes: joint likelihoods, and draws whose counts are scored."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch_geometric.data import Data

from benchmarks.on_top import rivals, stages
from benchmarks.on_top.data import given
from pyro_nmm.models import random_blocks

#: Nodes of a set, sets of each size, and draws of the labels of all test nodes.
SIZES, NUM_SETS, NUM_DRAWS = (2, 10, 100, None), 20, 32

#: Log-likelihood of the labels of a mask, and draws ``(S, N)``.
Joint = tuple[Callable[[Tensor], float], Callable[[], Tensor]]


def product(probs: Tensor, data: Data) -> Joint:
    def log_prob(part: Tensor) -> float:
        return stages.log_probs(probs, data.y, part).sum().item()

    return log_prob, lambda: Categorical(probs).sample((NUM_DRAWS,))


def chain(make: Callable[[Tensor], Tensor], data: Data) -> Joint:
    """One node after the other in a set, and draws in as many blocks as for all test labels."""

    def log_prob(part: Tensor) -> float:
        return stages.revealed(make, data, part, int(part.sum()))

    def sample() -> Tensor:
        true, block, draws = data.y, random_blocks(data.test_mask, stages.CHAIN), []
        for _ in range(NUM_DRAWS):
            data.y, known = true.clone(), data.train_mask  # ``make`` reads the labels of ``data``
            for k in range(stages.CHAIN):
                part = data.test_mask & (block == k)
                data.y[part] = Categorical(make(known)[part]).sample()
                known = known | part
            draws.append(data.y)
        data.y = true
        return torch.stack(draws)

    return log_prob, sample


def at_once(data: Data) -> Joint:
    posterior = stages.fitted(data).posterior(*given(data), num_draws=0)
    return (
        lambda part: posterior.log_likelihood(data.y, part).item(),
        lambda: posterior.sample((NUM_DRAWS,)),
    )


def by_stages(data: Data) -> Joint:
    """Held-out labels choose the number of blocks; a set has at most as many as nodes."""
    module = stages.fitted(data)
    number = stages.chosen(stages.held_out_nll(module, data))

    def posterior(part: Tensor):
        block = random_blocks(part, min(number, int(part.sum())))
        return module.posterior(*given(data), num_draws=0, stages=block)

    return (
        lambda part: posterior(part).log_likelihood(data.y, part).item(),
        lambda: posterior(data.test_mask).sample((NUM_DRAWS,)),
    )


METHODS: dict[str, Callable[[Data], Joint]] = {
    "temperature": lambda data: product(rivals.temperature(data), data),
    "C&S as a chain": lambda data: chain(stages.correct_and_smooth(data), data),
    "the pool as a chain": lambda data: chain(rivals.fitted_pool(data), data),
    "StackedNMM, product of marginals": lambda data: product(
        stages.fitted(data).posterior(*given(data), num_draws=0).marginals(), data
    ),
    "StackedNMM": at_once,
    "StackedNMM by stages": by_stages,
}
