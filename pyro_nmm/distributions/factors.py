# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The factors of a Neighbor Mixture: choices, and labels given choices."""

from collections.abc import Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.arguments import check_range, expect
from pyro_nmm.blocks import gather
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.model_arguments import check_alpha, check_logits, check_scores, in_single
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.sampling import draw_given_choices, pick
from pyro_nmm.provenance import untracked


class Neighbors(constraints.Constraint):
    """Choices of a neighbour by every row, ``(..., num_rows)``; with ``num_classes`` choices and
    labels, ``(..., 2, num_rows)``."""

    is_discrete = True

    def __init__(self, hood: Neighborhood, num_classes: int | None = None) -> None:
        self.hood, self.num_classes = hood, num_classes
        self.event_dim = 1 if num_classes is None else 2

    def check(self, value: Tensor) -> Tensor:
        choices = value if self.num_classes is None else value.select(-2, 0)
        flat = choices.reshape(-1, self.hood.num_rows)
        good = (self.hood.find(flat) >= 0).all(-1).view(choices.shape[:-1])
        if self.num_classes is None:
            return good
        labels = value.select(-2, 1)
        return good & ((labels >= 0) & (labels < self.num_classes)).all(-1)


class NeighborChoice(GraphDistribution):
    r"""Every node's independent choice of a neighbour, :math:`p(c)`.

    .. math::

        c_i \sim \mathrm{Categorical}(L_i), \quad c_i \in n(i), \quad
        L_i = \mathrm{softmax}_{j \in n(i)}(\text{logits}_{ij})

    This is the second line of the paper's equation (1). A sample holds a node id for each row of
    ``hood``, shape ``batch_shape + (num_rows,)``. Cost: :math:`O(E)` a sample and a ``log_prob``.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    >>> choice = NeighborChoice(hood, torch.zeros(hood.num_edges))
    >>> choice.log_prob(torch.tensor([0, 0, 1])).exp()
    tensor(0.2500)

    :param Neighborhood hood: the neighbourhoods of all or of some nodes.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``, see
        :func:`~pyro_nmm.edge_values`; ``-inf`` switches an edge off.
    :raises ValueError: for a wrong shape, NaN, ``inf``, or ``-inf`` at all edges of a row.
    """

    shown = ("hood",)

    def __init__(
        self, hood: Neighborhood, logits: Tensor, *, validate_args: bool | None = None
    ) -> None:
        self.hood, self.logits = hood, (logits := check_logits(hood, logits))
        super().__init__(logits.shape[:-1], Size([hood.num_rows]), validate_args=validate_args)
        if self._validate_args:
            check_scores(hood, logits)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return Neighbors(self.hood)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """``(*sample_shape, ..., num_rows)``: a node id for each row of ``hood``."""
        shape = self._extended_shape(Size(sample_shape))
        (logits,), provenance = untracked(self.logits)
        attention = flatten(self.hood.softmax(logits), shape[:-1])
        uniforms = torch.rand(shape, dtype=torch.double, device=self.hood.device)
        edges = pick(self.hood, attention, uniforms.view(-1, self.hood.num_rows))
        return track_provenance(self.hood.source[edges].view(shape), provenance)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log p(c)` of choices ``(..., num_rows)``."""
        return self.log_terms(value).sum(-1)

    def log_terms(self, value: Tensor) -> Tensor:
        """``(..., n)``: the log-probability of each row's choice."""
        value, provenance = self._plain(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        hood = self.hood

        def find() -> tuple[Tensor, Tensor]:
            edges = hood.find(flatten(value, shape))
            return edges.clamp(min=0), edges < 0

        edges, wrong = hood.last_edges.get((value, shape), find)
        shifted, total = (flatten(part, shape) for part in hood.shifted_sum(self.logits)[1:])
        # Scores that the batch shares get their gradient in one pass over the choices.
        if len(shifted) > 1:
            offset = hood.num_edges * torch.arange(len(shifted), device=edges.device)
            edges = edges + offset[:, None]
        log_prob = shifted.flatten().index_select(0, edges.flatten()).view_as(edges) - total.log()
        if wrong is not None:
            log_prob = log_prob.masked_fill(wrong, -torch.inf)
        log_prob = log_prob.expand(shape.numel(), -1).view(*shape, hood.num_rows)
        return track_provenance(log_prob, provenance)


class ChosenLabels(GraphDistribution):
    r"""Labels of nodes that share label distributions, :math:`p(y \mid c)` with every
    :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j)` integrated out.

    .. math::

        p(y \mid c) = \prod_j \frac{\mathrm{B}(\alpha_j + s_j)}{\mathrm{B}(\alpha_j)}, \quad
        s_{jk} = |\{i : c_i = j, y_i = k\}|

    the second factor of the paper's equation (4). Cost: :math:`O(n \log n)`.

    >>> alpha = torch.ones(1, 2)
    >>> ChosenLabels(alpha, torch.tensor([0, 0])).log_prob(torch.tensor([1, 1])).exp()
    tensor(0.3333)

    :param Tensor alpha: ``(..., N, C)`` concentrations, as for :class:`~pyro_nmm.NeighborMixture`.
    :param Tensor choices: ``(..., n)`` node ids :math:`c_i` in ``0..N - 1``.
    :raises ValueError: for wrong shapes, ``alpha`` that is not positive, and choices out of range.
    """

    shown = "num_labels", "num_sources", "num_classes"

    def __init__(
        self, alpha: Tensor, choices: Tensor, *, validate_args: bool | None = None
    ) -> None:
        alpha = in_single(expect("alpha", alpha, ("...", "N", "C"), kind="float"))
        expect("choices", untracked(choices)[0][0], ("...", "n"), kind="ids")
        if alpha.shape[-1] < 2:
            raise ValueError(f"alpha must have C >= 2 labels, got {tuple(alpha.shape)}")
        batch_shape = torch.broadcast_shapes(alpha.shape[:-2], choices.shape[:-1])
        self.alpha, self.choices, self.num_labels = alpha, choices, choices.shape[-1]
        self.num_sources, self.num_classes = alpha.shape[-2:]
        super().__init__(batch_shape, choices.shape[-1:], validate_args=validate_args)
        if self._validate_args or choices.device.type == "cpu":  # a GPU would wait for the check
            check_range("choices", untracked(choices)[0][0], self.num_sources)
        if self._validate_args:
            check_alpha(alpha)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_classes - 1), 1)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """``(*sample_shape, ..., n)``: joint draws of a label for each choice."""
        shape = self._extended_shape(Size(sample_shape))
        (alpha, choices), provenance = untracked(self.alpha, self.choices)
        labels = draw_given_choices(alpha, choices.expand(shape))
        return track_provenance(labels, provenance)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log p(y \mid c)` of labels ``(..., n)``."""
        return self.log_terms(value).sum(-1)

    def log_terms(self, value: Tensor) -> Tensor:
        """``(..., n)``: of each label given those before. Terms of a source make its factor."""
        (choices, value), provenance = untracked(self.choices, value)
        value = self._labels(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        # A Pólya urn, because differences of two lgamma lose all digits at large alpha. Labels are
        # exchangeable: it takes them in the order of their nodes.
        choices, value = torch.broadcast_tensors(choices, value)
        j, k = (t.reshape(-1, self.num_labels) for t in (choices, value))
        size = 2, *[1] * (len(shape) + 1 - value.dim()), *value.shape
        counts, keys = (t.view(size) for t in ranks(j, k, self.num_sources, self.num_classes))
        # One table for both takes fewer calls to a GPU.
        prior = gather(torch.cat([self.alpha.flatten(-2), self.alpha.sum(-1)], -1), keys)
        above, below = (prior + counts).log().unbind()
        return track_provenance((above - below).expand(*shape, -1), provenance)
