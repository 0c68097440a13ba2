# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels given choices, with the label distributions integrated out."""

from collections.abc import Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.arguments import check_ids, expect
from pyro_nmm.concentrations import (
    Concentrations,
    OrdinalConcentrations,
    at_labels,
    gather,
    in_single,
    totals,
)
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.graph_arguments import check_alpha
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.sampling import draw_given_choices
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel, check_permutations


class ChosenLabels(GraphDistribution):
    r"""
    Labels of nodes that share label distributions, :math:`p(y \mid c)` with every
    :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j)` integrated out.

    .. math::

        p(y \mid c) = \prod_j \frac{\mathrm{B}(\alpha_j + s_j)}{\mathrm{B}(\alpha_j)}, \quad
        s_{jk} = |\{i : c_i = j, y_i = k\}|

    the second factor of the paper's equation (4). A Pólya urn computes it, because the difference
    of two ``lgamma`` loses all digits at large ``alpha``. Cost: :math:`O(n \log n)`.

    >>> alpha = torch.ones(1, 2)
    >>> ChosenLabels(alpha, torch.tensor([0, 0])).log_prob(torch.tensor([1, 1])).exp()
    tensor(0.3333)

    :param alpha: ``(..., N, C)`` concentrations, as for :class:`~pyro_nmm.NeighborMixture`.
    :param Tensor choices: ``(..., n)`` node ids :math:`c_i` in ``0..N - 1``.
    :param Tensor relabel: ``(..., n, C)`` integers, the permutation of every choice's edge:
        ``relabel[i, k]`` is the label of entry ``i`` if it takes label ``k``.
    """

    shown = "num_labels", "num_sources", "num_classes"

    def __init__(
        self,
        alpha: Concentrations,
        choices: Tensor,
        relabel: Tensor | Channel | None = None,
        *,
        validate_args=None,
    ) -> None:
        if not isinstance(alpha, OrdinalConcentrations):
            alpha = in_single(expect("alpha", alpha, ("...", "N", "C"), kind="float"))
        check_ids("choices", untracked(choices)[0][0], ("...", "n"), alpha.shape[-2])
        if alpha.shape[-1] < 2:
            raise ValueError(f"alpha must have C >= 2 labels, got {tuple(alpha.shape)}")
        self.channel = check_permutations(relabel, choices, alpha.shape[-1])
        batches = alpha.shape[:-2], choices.shape[:-1], self.channel.batch_shape
        batch_shape = torch.broadcast_shapes(*batches)
        self.alpha, self.choices, self.num_labels = alpha, choices, choices.shape[-1]
        self.num_sources, self.num_classes = alpha.shape[-2:]
        super().__init__(batch_shape, choices.shape[-1:], validate_args=validate_args)
        if self._validate_args:
            check_alpha(alpha)
            untracked(self.channel)[0][0].check_values()

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_classes - 1), 1)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        (alpha, choices, channel), provenance = untracked(self.alpha, self.choices, self.channel)
        labels = channel.show(draw_given_choices(alpha, choices.expand(shape)))
        return track_provenance(labels, provenance)

    def log_prob(self, value: Tensor) -> Tensor:
        given = self.choices, self._labels(value), self.channel
        (choices, value, channel), provenance = untracked(*given)
        value = channel.borrow(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        # Labels are exchangeable: the urn may take them in the order of their nodes.
        pairs = torch.broadcast_tensors(choices, value)
        flat = (t.reshape(-1, *self.event_shape) for t in pairs)
        same, every = (count.view_as(pairs[0]) for count in ranks(*flat, *self.alpha.shape[-2:]))
        above = at_labels(self.alpha, *pairs) + same
        below = gather(totals(self.alpha), choices) + every
        log_prob = (above / below).log().sum(-1).expand(shape)
        return track_provenance(log_prob, provenance)
