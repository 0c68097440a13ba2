# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Multinomial counts whose totals differ, which Pyro's ``Multinomial`` refuses."""

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints


class LabelCounts(TorchDistribution):
    r"""Counts of labels among units, with a number of units for each element.

    .. math::

        y_i \sim \mathrm{Multinomial}(n_i, p_i)

    :param Tensor total_count: ``(...)`` numbers of units :math:`n_i`.
    :param Tensor probs: ``(..., C)``. Cost: :math:`O(C)` an element, whatever its total.
    """

    arg_constraints: dict = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(
        self, total_count: Tensor, probs: Tensor, *, validate_args: bool | None = None
    ) -> None:
        batch = torch.broadcast_shapes(total_count.shape, probs.shape[:-1])
        self.total_count, self.probs = total_count.double().expand(batch), probs
        super().__init__(batch, probs.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(LabelCounts, _instance)
        new.total_count = self.total_count.expand(batch_shape)
        new.probs = self.probs.expand(*batch_shape, *self.event_shape)
        super(LabelCounts, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        return self.total_count[..., None].to(self.probs) * self.probs

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.probs)

    @torch.no_grad()
    def sample(self, sample_shape=()) -> Tensor:
        """Label after label, binomial given the labels before."""
        shape = self._extended_shape(torch.Size(sample_shape))
        rest, counts = self.total_count.expand(shape[:-1]), []
        probs = self.probs.double().expand(shape)
        left = probs.flip(-1).cumsum(-1).flip(-1)
        for prob, of in zip(probs.unbind(-1), left.unbind(-1), strict=True):
            counts.append(torch.binomial(rest, (prob / of).nan_to_num().clamp(0, 1)))
            rest = rest - counts[-1]
        return torch.stack(counts, -1).to(self.probs)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        exact = value.double()
        sums = exact.sum(-1)
        if self._validate_args and ((sums - self.total_count).abs() > 0.5 + 1e-6 * sums).any():
            raise ValueError("value must have the sums total_count")  # single precision rounds
        # Around the share of each label, because large counts times a logarithm lose digits.
        shares = (exact / sums[..., None].clamp(min=1)).clamp(min=1e-300)
        best = (sums + 1).lgamma() - (exact + 1).lgamma().sum(-1) + (exact * shares.log()).sum(-1)
        # A label of probability zero without units has the gradient zero.
        probs = self.probs.clamp(min=torch.finfo(self.probs.dtype).tiny)
        ratio = probs.log() - shares.log().to(probs)
        found = best.to(probs) + (value.to(probs) * ratio).sum(-1)
        return found.masked_fill(((self.probs == 0) & (value > 0)).any(-1), -torch.inf)
