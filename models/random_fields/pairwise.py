# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields with one interaction: Ising, Potts, their grids, their normalizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor

from pyro_nmm import NeighborMixture
from pyro_nmm.arguments import (
    Array,
    Device,
    as_expected,
    as_shape,
    as_tensor,
    check_integers,
    check_positive,
    expect,
    expect_all,
    out_of_range,
)
from pyro_nmm.blocks import rows_at
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.fitting import with_gradients
from pyro_nmm.models.random_fields.elimination import exact_draws, greedy_colors, log_sum
from pyro_nmm.ops.marginals import expected_interaction, node_marginals
from pyro_nmm.provenance import untracked

#: The product of two spins, by their labels.
SPINS = [[1.0, -1.0], [-1.0, 1.0]]


class PairwiseMRF(GraphDistribution):
    r"""A Markov random field of labels with one interaction and a strength for every edge.

    .. math::

        p(y) = \frac1Z p^*(y), \qquad
        \log p^*(y) = \sum_i u_i(y_i) + \sum_{(i, j)} w_{ij} \, \phi(y_i, y_j)

    :meth:`log_prob`, :meth:`log_normalizer`, :meth:`marginals` and :meth:`sample` are exact, by
    variable elimination. They refuse graphs wider than a grid of two labels and width 17.

    >>> pair = ising(torch.tensor([[0], [1]]), coupling=0.5, field=torch.zeros(2))
    >>> pair.log_normalizer(), pair.log_prob(torch.tensor([1, 1])).exp()
    (tensor(1.5064), tensor(0.3655))

    :param Tensor edges: ``(2, P)`` node ids, every pair once.
    :param Tensor unary: ``(..., N, C)``, :math:`u_i(k)`, in nats.
    :param Tensor strength: ``(..., P)`` or ``(..., 1)``, :math:`w_{ij}`.
    :param Tensor interaction: ``(C, C)`` symmetric, :math:`\phi`.
    :raises ValueError: for wrong shapes, terms that are not finite, pairs that repeat, and an
        ``interaction`` that is not symmetric; in methods for labels out of range and wide graphs.
    """

    shown = "num_nodes", "num_edges", "num_classes"
    support = NeighborMixture.support
    num_edges: int  #: number of pairs ``P``

    def __init__(self, edges: Tensor, unary: Tensor, strength: Tensor, interaction: Tensor) -> None:
        _check(edges, unary, strength, interaction)
        self.edges, self.unary = edges, unary
        self.strength, self.interaction = strength, interaction
        self.num_edges, (self.num_nodes, self.num_classes) = edges.shape[1], unary.shape[-2:]
        batch_shape = torch.broadcast_shapes(unary.shape[:-2], strength.shape[:-1])
        super().__init__(batch_shape, Size([self.num_nodes]), validate_args=False)

    def log_potential(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log p^*(y)` of labels ``(..., N)``. Cost: :math:`O(N + P)`."""
        value = check_labels(self, value, "one label per node")
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        labels = value.expand(*shape, -1).unsqueeze(-1)
        single = self.unary.expand(*shape, -1, -1).gather(-1, labels).squeeze(-1).sum(-1)
        first, second = (value.index_select(-1, nodes) for nodes in self.edges)
        pair = self.interaction.flatten()[first * self.num_classes + second]
        return single + (self.strength * pair).sum(-1)

    def expected_potential(self, mixture: NeighborMixture) -> Tensor:
        r"""``(...)``: exact :math:`E_q[\log p^*(y)]` under a mixture. Cost: :math:`O(E C)`."""
        check_mixture(mixture, self.unary)
        field = self.unary, self.strength, self.interaction
        plain, provenance = untracked(*field, mixture.alpha, mixture.logits)
        unary, strength, interaction, alpha, logits = plain
        attention = mixture.hood.softmax(logits)
        marginals = node_marginals(mixture.hood, alpha, attention)
        single = (unary * marginals).sum((-2, -1))
        arguments = mixture.hood, alpha, attention, marginals, self.edges, interaction
        potential = single + (strength * expected_interaction(*arguments)).sum(-1)
        return track_provenance(potential, provenance)

    def local_logits(self, probs: Tensor) -> Tensor:
        r"""``(..., N, C)``: :math:`u_i + \sum_j w_{ij} \phi \, p_j`, the logits of every node's
        label given its neighbours' labels or distributions :math:`p`. Cost: :math:`O(N C^2 + P C)`.
        """
        probs = as_expected("probs", probs, ("...", *self.unary.shape[-2:]), like=self.unary)
        messages = probs.to(self.interaction) @ self.interaction
        strength = self.strength.unsqueeze(-1)
        batch = torch.broadcast_shapes(self.batch_shape, probs.shape[:-2])
        logits = self.unary.expand(*batch, -1, -1)
        for here, there in (self.edges, self.edges.flip(0)):
            message = strength * rows_at(messages, there)
            logits = logits.index_add(-2, here, message.expand(*logits.shape[:-2], -1, -1))
        return logits

    def colors(self) -> list[Tensor]:
        """Sets of nodes without an edge inside, which may be updated at once; greedily few."""
        return greedy_colors(self.edges, self.num_nodes)

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact; refuses wide graphs."""
        return self.log_potential(value) - self.log_normalizer()

    def log_normalizer(self) -> Tensor:
        r"""``(...)``: exact :math:`\log Z`, differentiable."""
        return log_sum(self.edges, self.unary, self._tables())

    @with_gradients
    def marginals(self) -> Tensor:
        r"""``(..., N, C)``: exact :math:`p(y_i) = \partial \log Z / \partial u_i`."""
        unary = self.unary.detach().expand(*self.batch_shape, -1, -1).clone()
        total = log_sum(self.edges, unary.requires_grad_(), self._tables().detach()).sum()
        return torch.autograd.grad(total, unary)[0]

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Exact and independent samples."""
        batch = torch.broadcast_shapes(self.unary.shape[:-2], self.strength.shape[:-1])
        if batch.numel() > 1:
            raise ValueError(f"sample needs a field without batch, got {batch}")
        shape = as_shape(sample_shape) + self.batch_shape
        (unary, tables), provenance = untracked(self.unary, self._tables())
        unary = unary.reshape(unary.shape[-2:])
        tables = tables.reshape(-1, self.num_classes, self.num_classes)
        draws = exact_draws(self.edges, unary, tables, shape.numel())
        return track_provenance(draws.view(shape + self.event_shape), provenance)

    def scaled(self, share: float) -> PairwiseMRF:
        """The field with its interactions multiplied by ``share``."""
        new = self.expand(self.batch_shape)
        new.strength = share * self.strength
        return new

    def _tables(self) -> Tensor:
        strength = self.strength.expand(*self.strength.shape[:-1], self.num_edges)
        return strength[..., None, None] * self.interaction


def ising(edges: Array, coupling: Array | float, field: Array) -> PairwiseMRF:
    r"""The Ising model of spins :math:`x_i = 2 y_i - 1 \in \{-1, 1\}`.

    .. math::

        \log p^*(x) = \sum_{(i, j)} J_{ij} x_i x_j + \sum_i h_i x_i

    >>> target = ising(torch.tensor([[0], [1]]), coupling=0.5, field=torch.zeros(2))
    >>> target.log_potential(torch.tensor([[0, 0], [0, 1]]))  # equal spins, different spins
    tensor([ 0.5000, -0.5000])

    :param Tensor edges: as for :class:`PairwiseMRF`; of images :func:`grid_edges`.
    :param Tensor coupling: :math:`J`, a number, ``(..., 1)`` or ``(..., P)``.
    :param Tensor field: ``(..., N)``, :math:`h`.
    :raises ValueError: for wrong shapes, values that are not finite, and pairs that repeat.
    """
    field = as_expected("field", field, ("...", "N"), kind="float")
    unary = torch.stack([-field, field], -1)
    return _coupled(edges, coupling, unary, field.new_tensor(SPINS))


def potts(edges: Array, coupling: Array | float, unary: Array) -> PairwiseMRF:
    r"""The Potts model, of unary terms ``(..., N, C)``; other parameters as for :func:`ising`.

    .. math::

        \log p^*(y) = \sum_{(i, j)} J_{ij} \, \delta(y_i = y_j) + \sum_i u_i(y_i)

    >>> target = potts(torch.tensor([[0], [1]]), coupling=0.7, unary=torch.zeros(2, 3))
    >>> target.log_potential(torch.tensor([[2, 2], [0, 1]]))
    tensor([0.7000, 0.0000])

    :raises ValueError: as :func:`ising`, and for fewer than two labels.
    """
    unary = expect("unary", as_tensor("unary", unary), ("...", "N", ("C", 2)), note="C >= 2")
    interaction = torch.eye(unary.shape[-1], dtype=unary.dtype, device=unary.device)
    return _coupled(edges, coupling, unary, interaction)


def ising_posterior(image: Array, coupling: float = 1.0, sigma: float = 2.0) -> PairwiseMRF:
    r"""The posterior of a binary image given a noisy one :math:`v`, ``(H, W)``, of an Ising prior
    and Gaussian noise (Murphy 2012, "Machine Learning: A Probabilistic Perspective", 21.3.2),

    .. math::

        \log p^*(x) = J \sum_{(i, j)} x_i x_j + \sum_i \log \mathcal N(v_i; x_i, \sigma^2)

    >>> ising_posterior(torch.randn(4, 6)).num_nodes
    24

    :raises ValueError: for an image that is no matrix, and values that are not finite or positive.
    """
    image = as_expected("image", image, (("height", 1), ("width", 1)), kind="float")
    check_positive(sigma=sigma)
    (height, width), levels = image.shape, image.new_tensor([-1.0, 1.0])
    unary = torch.distributions.Normal(levels, sigma).log_prob(image.reshape(-1, 1))
    edges = grid_edges(height, width, image.device)
    return _coupled(edges, coupling, unary, image.new_tensor(SPINS))


def grid_edges(height: int, width: int, device: Device | None = None) -> Tensor:
    """``(2, P)``: pairs of pixels side by side, then one above the other, in row-major order.

    >>> grid_edges(2, 2)
    tensor([[0, 2, 0, 1],
            [1, 3, 2, 3]])

    :raises ValueError: for a side below one.
    """
    check_integers(1, height=height, width=width)
    pixel = torch.arange(height * width, device=device).view(height, width)
    across = torch.stack([pixel[:, :-1].flatten(), pixel[:, 1:].flatten()])
    down = torch.stack([pixel[:-1].flatten(), pixel[1:].flatten()])
    return torch.cat([across, down], 1)


def coarse_to_fine(height: int, width: int, device: Device | None = None) -> Tensor:
    """``(N,)``: an order of a grid's pixels. Every other pixel of every other row comes first, then
    the pixels in the middle of four of these, then the rest.

    >>> coarse_to_fine(3, 3)
    tensor([0, 2, 6, 8, 4, 1, 3, 5, 7])

    :raises ValueError: for a side below one.
    """
    return torch.argsort(coarseness(height, width, device), stable=True)


def coarseness(height: int, width: int, device: Device | None = None) -> Tensor:
    """``(N,)``: the group of every pixel, 0, 1 or 2, in :func:`coarse_to_fine`."""
    check_integers(1, height=height, width=width)
    pixel = torch.arange(height * width, device=device)
    odd_row, odd_column = pixel // width % 2, pixel % width % 2
    return torch.where(odd_row == odd_column, odd_row, 2)


@torch.no_grad()
def annealed_log_normalizer(
    field: PairwiseMRF, start: Array | None = None, num_steps: int = 1000, num_chains: int = 16
) -> tuple[Tensor, Tensor]:
    r"""An estimate of :math:`\log Z` of a Markov random field of any width, and its standard error,
    in nats: annealed importance sampling (Neal 2001, Statistics and Computing).

    .. math::

        \hat Z = \frac1M \sum_m \prod_t
            \left( \frac{p^*(y_t^{(m)})}{q(y_t^{(m)})} \right)^{\beta_t - \beta_{t - 1}},
        \qquad y_t \sim \text{a Gibbs sweep of } q^{1 - \beta_t} (p^*)^{\beta_t}

    Chains begin at the field's own terms, :math:`q_i = \mathrm{softmax}(u_i)`, and interactions
    rise from zero. With ``start`` as many chains more begin there. The higher estimate and the
    larger error are returned: :math:`E[\hat Z] = Z`, so :math:`\log \hat Z` is above
    :math:`\log Z + t` with probability :math:`e^{-t}` at most, and below it if modes are missed.

    The error cannot see a mode that no chain has visited: give marginals in it as ``start``. Cost:
    :math:`O(M K (P C + N C^2))` a step, with ``K`` colours of the graph.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.3, field=torch.zeros(9))
    >>> estimate, error = annealed_log_normalizer(field, num_steps=100, num_chains=256)
    >>> bool((estimate - field.log_normalizer()).abs() < 4 * error)
    True

    :param Tensor start: ``(N, C)`` marginals of a further :math:`q`, for example a mean field's.
    :param int num_steps: temperatures :math:`\beta_t`, evenly from 0 to 1, one sweep each.
    :param int num_chains: ``M``, from each start.
    :raises ValueError: for a field with a batch, bad ``start``, and options out of range.
    :raises UserWarning: if both estimates differ by more than three standard errors, or if fewer
        than a quarter of the chains carry the weight, because the error is then too small.
    """
    check_field(field)
    check_integers(1, num_steps=num_steps)
    check_integers(2, num_chains=num_chains)
    starts = [field.unary.log_softmax(-1)]
    if start is not None:
        start = as_expected("start", start, tuple(field.unary.shape), like=field.unary)
        expect_all("start", start, start.isfinite() & (start >= 0), "be finite and not negative")
        starts.append(start.to(field.unary).clamp(min=1e-6).log().log_softmax(-1))
    log_q = torch.stack(starts)[:, None].expand(-1, num_chains, -1, -1)
    classes = torch.eye(field.num_classes, dtype=log_q.dtype, device=log_q.device)
    y = torch.distributions.Categorical(logits=log_q).sample()
    weights = torch.zeros(y.shape[:2], dtype=torch.double, device=log_q.device)
    colors, betas = field.colors(), torch.linspace(0, 1, num_steps + 1).tolist()
    for before, beta in pairwise(betas):
        log_start = log_q.gather(-1, y[..., None]).double().sum((-2, -1))
        weights += (beta - before) * (field.log_potential(y).double() - log_start)
        for color in colors:
            logits = (1 - beta) * log_q + beta * field.local_logits(classes[y])
            logits = logits.index_select(-2, color)
            y[..., color] = torch.distributions.Categorical(logits=logits).sample()
    log_z = weights.logsumexp(1) - math.log(num_chains)
    shares = (weights - log_z[:, None]).exp()
    errors = shares.std(1) / math.sqrt(num_chains)
    # Two errors would warn of one run in 20, and six would miss half of a field at errors of .1.
    if log_z.max() - log_z.min() > 3 * errors.norm():
        both = f"log Z is {log_z[0]:.2f} from the field's own terms and {log_z[1]:.2f} from start"
        cure = "the lower one misses a part of the field; raise num_steps, or leave out start"
        warnings.warn(f"{both}: {cure}", stacklevel=3)
    # An eighth passes estimates that are three errors too low, half warns of good ones.
    if (carry := (num_chains**2 / shares.square().sum(1)).min()) < num_chains / 4:
        few = f"{carry:.1f} of {num_chains} chains carry the weight"
        warnings.warn(f"{few}, so log Z may be too low: raise num_steps", stacklevel=3)
    return log_z.max(), errors.max()


def check_field(field: PairwiseMRF) -> None:
    if not isinstance(field, PairwiseMRF) or field.batch_shape:
        raise ValueError(f"field must be a PairwiseMRF without batch dimensions, got {field}")


def check_labels(field: Any, value: Tensor, note: str) -> Tensor:
    """Labels ``(..., N)`` of a field, as ``torch.long``."""
    value = as_tensor("value", value, field.edges.device)
    value = expect("value", value, ("...", field.num_nodes), kind="labels", note=note).long()
    if (bad := out_of_range(untracked(value)[0][0], field.num_classes)) is not None:
        raise ValueError(f"value must hold labels in 0..{field.num_classes - 1}, got {bad}")
    return value


def check_mixture(mixture: NeighborMixture, unary: Tensor) -> None:
    """A mixture over the nodes and labels of a field, whose edges keep labels."""
    size, got = tuple(unary.shape[-2:]), (mixture.hood.num_nodes, mixture.num_classes)
    if got != size:
        must = f"{size[0]} nodes and {size[1]} labels, as field"
        raise ValueError(f"mixture must have {must}, got {got[0]} and {got[1]}")
    if not mixture.channel.keeps:
        raise ValueError("expected_potential is for edges that keep labels, without relabel")
    if mixture.logits.dtype != unary.dtype:
        raise ValueError(f"mixture must be {unary.dtype}, as field, got {mixture.logits.dtype}")


def _coupled(
    edges: Array, coupling: Array | float, unary: Tensor, interaction: Tensor
) -> PairwiseMRF:
    edges = as_tensor("edges", edges, unary.device)
    as_tensor("coupling", coupling)  # refuses what holds no numbers
    # Tensor.to(), unlike new_tensor(), keeps the provenance of a sampled coupling.
    strength = coupling.to(unary) if isinstance(coupling, Tensor) else unary.new_tensor(coupling)
    return PairwiseMRF(edges, unary, strength.expand(strength.shape or (1,)), interaction)


def _check(edges: Tensor, unary: Tensor, strength: Tensor, interaction: Tensor) -> None:
    expect("edges", edges, (2, "P"), kind="integers")
    expect("unary", unary, ("...", "N", ("C", 2)), kind="float", note="C >= 2")
    expect("strength", strength)
    num_edges, (num_nodes, num_classes) = edges.shape[1], unary.shape[-2:]
    expect("interaction", interaction, (num_classes, num_classes), note="the columns of unary")
    plain, _ = untracked(unary, strength, interaction)
    for name, part in zip(("unary", "strength", "interaction"), plain, strict=True):
        if part.dtype != unary.dtype or part.device != unary.device:
            got = f"{part.dtype} on {part.device}"
            raise ValueError(f"{name} must be {unary.dtype} on {unary.device}, as unary, got {got}")
        cure = ": for labels that cannot be, give 100 less than the largest term, not -inf"
        expect_all(name, part, part.isfinite(), "be finite", cure * bool(part.isneginf().any()))
    if (bad := out_of_range(edges, num_nodes)) is not None:
        raise ValueError(f"edges must hold node ids in 0..{num_nodes - 1}, got {bad}")
    low, high = edges.long().sort(0).values
    if (low == high).any() or len((low * num_nodes + high).unique()) < num_edges:
        cure = "pass remove_self_loops(edges.sort(0).values.unique(dim=1))[0], of PyG"
        raise ValueError(f"edges must hold every pair of different nodes once: {cure}")
    if strength.dim() < 1 or strength.shape[-1] not in (1, num_edges):
        must = f"shape (..., {num_edges}), one number per edge, or (..., 1)"
        raise ValueError(f"strength must have {must}, got {tuple(strength.shape)}")
    cure = ": edges have no direction, so the table equals its transpose"
    expect_all("interaction", plain[2], plain[2] == plain[2].T, "be symmetric", cure)
