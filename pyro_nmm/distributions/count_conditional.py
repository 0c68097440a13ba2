# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label distributions, and counts of choices by edge and label, given counts of labels."""

from functools import cached_property

import torch
from torch import Size, Tensor

from pyro_nmm.caching import derived
from pyro_nmm.distributions.base import flatten
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.ops.marginals import spread
from pyro_nmm.ops.splits import Level, levels, split


class CountConditional:
    r"""Distribution of label distributions given counts of labels, by data augmentation with
    :math:`m_{ijk}`, the number of units of node :math:`i` with label :math:`k` that chose
    :math:`j`. A sweep draws counts of choices, then label distributions:

    .. math::

        (m_{ijk})_j \mid z \sim \mathrm{Multinomial}(y_{ik}, \propto L_{ij} z_{jk}) , \qquad
        z_j \mid m \sim \mathrm{Dirichlet}(\alpha_j + s_j) , \quad s_{jk} = \sum_i m_{ijk} .

    All is in double precision. States are :math:`\log z`, because shares of small concentrations
    underflow.

    :param parameters: of the observed rows.
    :param Tensor counts: ``(..., num_rows, C)``.
    :param batch_shape: of the draws. Cost of a sweep: :math:`O(B (N + E) C)`.
    """

    latent = False

    def __init__(self, parameters: Parameters, counts: Tensor, batch_shape: Size) -> None:
        self.rows, self.batch_shape = parameters.hood, batch_shape
        self.alpha = flatten(parameters.alpha, batch_shape, 2).double()
        self.logits = flatten(parameters.logits, batch_shape).double()
        self.counts = flatten(counts, batch_shape, 2).double()

    @derived
    def _attention(self) -> Tensor:
        return self.rows.softmax(self.logits)

    @cached_property
    def _halves(self) -> list[Level]:
        return levels(self.rows)

    def log_density(self, log_z: Tensor) -> Tensor:
        r""":math:`\log p(y, z)`, the sum over the batch without a constant of the counts,
        differentiable in the parameters."""
        log_z = flatten(log_z, self.batch_shape, 2)
        prior = ((self.alpha - 1) * log_z).sum(-1) - _log_beta(self.alpha)
        probs = spread(self.rows, log_z.exp(), self._attention)
        return prior.sum() + (self.counts * probs.clamp(min=1e-300).log()).sum()

    def log_joint(self, choices: Tensor) -> Tensor:
        r""":math:`\log p(y, m)`, with label distributions integrated out, likewise."""
        number = choices.sum(-1)
        chosen = number * self.rows.log_softmax(self.logits)
        urns = _log_beta(self.alpha + self._totals(choices)) - _log_beta(self.alpha)
        return chosen.where(number > 0, 0.0).sum() + urns.sum()  # no unit, no log of zero

    @torch.no_grad()
    def sample(self) -> Tensor:
        """States with choices by attention alone, a start for sweeps."""
        weights = self._attention[..., None].expand(-1, -1, self.counts.shape[-1])
        return self.distributions(self._split(weights))

    @torch.no_grad()
    def sweep(self, log_z: Tensor, num_sweeps: int = 1) -> Tensor:
        """States continued by sweeps, which leave their distribution as it is."""
        for _ in range(num_sweeps):
            log_z = self.distributions(self.choices(log_z))
        return log_z

    @torch.no_grad()
    def choices(self, log_z: Tensor) -> Tensor:
        """``(B, num_edges, C)`` counts of choices given states."""
        z = flatten(log_z, self.batch_shape, 2).index_select(-2, self.rows.source).exp()
        return self._split(self._attention[..., None] * z)

    @torch.no_grad()
    def distributions(self, choices: Tensor) -> Tensor:
        """States ``(..., N, C)`` given counts of choices."""
        alpha = (self.alpha + self._totals(choices)).expand(self.batch_shape.numel(), -1, -1)
        # Of a Gamma variate with one more, times a power of a uniform one (Marsaglia, Tsang 2000).
        log_z = (
            torch._standard_gamma(alpha + 1).log() - torch.empty_like(alpha).exponential_() / alpha
        )
        log_z = log_z - log_z.logsumexp(-1, keepdim=True)
        return log_z.view(*self.batch_shape, *log_z.shape[-2:])

    def _split(self, weights: Tensor) -> Tensor:
        size = max(len(weights), len(self.counts))
        weights = weights.expand(size, -1, -1)
        return split(self._halves, self.counts.expand(size, -1, -1), weights)

    @cached_property
    def _cells(self) -> Tensor:
        size = self.alpha.shape[-1]
        return (
            self.rows.source[:, None] * size + torch.arange(size, device=self.rows.device)
        ).view(-1)

    def _totals(self, choices: Tensor) -> Tensor:
        """``(B, N, C)``: how many units chose each source, by label."""
        shape = self.alpha.shape[-2:]  # flat, which is ten times faster than index_add
        empty = choices.new_zeros(len(choices), shape.numel())
        cells = self._cells.expand(len(choices), -1)
        return empty.scatter_add_(-1, cells, choices.flatten(1)).unflatten(-1, shape)


def _log_beta(alpha: Tensor) -> Tensor:
    return alpha.lgamma().sum(-1) - alpha.sum(-1).lgamma()
