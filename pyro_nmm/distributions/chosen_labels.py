# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from pyro.distributions import Dirichlet
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.checks import check_values
from pyro_nmm.counts import first_of_run
from pyro_nmm.distributions.batch import GraphDistribution, flatten


class ChosenLabels(GraphDistribution):
    r"""
    Labels of nodes that share label distributions, :math:`p(y \mid c)` with every
    :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j)` integrated out.

    .. math::

        p(y \mid c) = \prod_j \frac{\mathrm{B}(\alpha_j + s_j)}{\mathrm{B}(\alpha_j)}, \quad
        s_{jk} = |\{i : c_i = j, y_i = k\}|

    the second factor of the paper's equation ``eq-joint-y-c``. It is computed as a Pólya
    urn, one factor :math:`(\alpha_{jk} + \text{earlier } k) / (A_j + \text{earlier})` per
    label, because the difference of two ``lgamma`` loses all digits at large ``alpha``.

    >>> alpha = torch.ones(1, 2)
    >>> ChosenLabels(alpha, torch.tensor([0, 0])).log_prob(torch.tensor([1, 1])).exp()
    tensor(0.3333)

    Cost: :math:`O(n \log n)` for ``n`` labels.

    :param Tensor alpha: ``(..., N, C)`` positive concentrations.
    :param Tensor choices: ``(..., n)`` node ids :math:`c_i` in ``0..N - 1``.
    """

    def __init__(self, alpha: Tensor, choices: Tensor, *, validate_args=None) -> None:
        batch_shape = torch.broadcast_shapes(alpha.shape[:-2], choices.shape[:-1])
        self.alpha, self.choices, self.num_classes = alpha, choices, alpha.shape[-1]
        super().__init__(batch_shape, choices.shape[-1:], validate_args=validate_args)
        if self._validate_args:
            check_values(alpha, None)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_classes - 1), 1)

    @torch.no_grad()
    def sample(self, sample_shape=Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        z = Dirichlet(self.alpha).expand(shape[:-1] + self.alpha.shape[-2:-1]).sample()
        index = self.choices[..., None].expand(*shape, self.num_classes)
        return torch.distributions.Categorical(z.gather(-2, index)).sample()

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        num_nodes, num_classes = self.alpha.shape[-2:]
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        full = shape + self.event_shape
        key = (self.choices * num_classes + value).expand(full).reshape(-1, *self.event_shape)
        offset = num_nodes * num_classes * torch.arange(len(key), device=key.device)
        # Labels are exchangeable, so the urn may take them in the order of their sort.
        key, _ = torch.sort((key + offset[:, None]).flatten(), stable=True)
        position = torch.arange(len(key), device=key.device)
        urn = key.div(num_classes, rounding_mode="floor")
        same, every = position - first_of_run(key), position - first_of_run(urn)

        alpha = flatten(self.alpha, shape, 2)
        total = alpha.sum(-1).flatten()
        if len(alpha) == 1:
            key, urn = key % (num_nodes * num_classes), urn % num_nodes
        above = alpha.flatten().index_select(0, key) + same
        below = total.index_select(0, urn) + every
        return (above.log() - below.log()).view(full).sum(-1)
