# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices from Gibbs chains that go on from step to step: the gradient of the likelihood itself."""

from typing import Any

import pyro
import torch
from pyro.poutine.runtime import get_plates
from torch import Size, Tensor, nn

from pyro_nmm.arguments import check_integers
from pyro_nmm.distributions.in_order import InOrder


class Chains(nn.Module):
    r"""
    The states of Gibbs chains, as an ``estimator`` of :func:`~pyro_nmm.guides.ordered_guide` and
    :func:`~pyro_nmm.guides.evidence_guide`.

    Choices, and latent labels, are drawn from :math:`p(c \mid y, \theta)`, not from
    :math:`q(c \mid y)`, by ``num_sweeps`` sweeps from the states of the step before. By Fisher's
    identity

    .. math::

        \nabla \log p(y \mid \theta) = E_{p(c \mid y, \theta)}[\nabla \log p(y, c \mid \theta)] ,

    so that SVI is not biased by the gap of the bound, and needs no score of the choices. The loss
    is then :math:`-\log p(y, c \mid \theta)` of the states, no bound: it falls as a fit learns, but
    compares no two models.
    :meth:`~pyro_nmm.NeighborMixture.path_likelihood` does.

    >>> import pyro
    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.guides import ordered_guide
    >>> from pyro_nmm.models import nmm
    >>> hood, y = Neighborhood.grid(4, 4), torch.arange(16) // 8
    >>> def field(program, **options):
    ...     kappa = pyro.param("kappa", torch.tensor(1.0), torch.distributions.constraints.positive)
    ...     alpha = kappa * torch.full((16, 2), 0.5)
    ...     program(hood, alpha, torch.zeros(hood.num_edges), y, collapsed=True, **options)
    >>> chains = Chains(num_sweeps=2)
    >>> model, guide = (lambda: field(nmm)), (lambda: field(ordered_guide, estimator=chains))
    >>> svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO(4, 0, vectorize_particles=True))
    >>> losses = [svi.step() for _ in range(20)]
    >>> chains.choices.shape  # four particles
    torch.Size([4, 16])

    An object serves one field. Each particle and each element of a plate has a chain. Subsamples of
    plates and of nodes (``observed``) continue the chains that they had. The states are part of
    ``state_dict()``. Cost of a sweep: as of a draw.

    :param int num_sweeps: between two steps. One suffices where the parameters move slowly.
    """

    choices: Tensor | None  #: ``(..., N)``, -1 where no step has been; ``(..., 2, N)`` with labels

    def __init__(self, num_sweeps: int = 1) -> None:
        super().__init__()
        check_integers(1, num_sweeps=num_sweeps)
        self.num_sweeps = num_sweeps
        self.choices = None

    @torch.no_grad()
    def draw(self, q: InOrder) -> Tensor:
        """Samples of ``q`` continued by sweeps, one for each element of the program's plates."""
        full, shape = _plates(q.batch_shape)
        nodes, event = q.observed_rows.nodes, (*q.event_shape[:-1], q.hood.num_nodes)
        states = self._states(full, event, nodes.device)
        place = torch.arange(full.numel(), device=nodes.device).view(full)
        place = pyro.subsample(place, event_dim=0).expand(shape)  # of the plates' subsamples
        value = states[place][..., nodes]
        if (value < 0).any():
            value = value.where(value >= 0, q.expand(shape).sample())
        value = q.sweep(value, self.num_sweeps)
        index = place.reshape(place.shape + (1,) * len(event))
        columns = [torch.arange(size, device=nodes.device) for size in event[:-1]]
        states[(index, *(c[:, None] for c in columns), nodes)] = value
        self.choices = states.view(full + event)
        return value

    def _states(self, full: Size, event: tuple[int, ...], device: torch.device) -> Tensor:
        """Stored states ``(chains, ..., N)``; those of another number of particles at random."""
        old, tail = self.choices, (*full[1:], *event)
        if old is not None and full and old.shape[1:] == tail != old.shape[:0]:
            if len(old) != full[0]:
                old = old[torch.randint(len(old), full[:1], device=old.device)]
        elif old is not None and old.shape == tail:
            old = old.expand(full + event)
        elif old is not None and old.shape[1:] == full + event:
            old = old[torch.randint(len(old), (), device=old.device)]
        elif old is None or old.shape != full + event:
            old = torch.full(full + event, -1)
        return old.to(device, copy=True).reshape(full.numel(), *event)

    def extra_repr(self) -> str:
        return f"num_sweeps={self.num_sweeps}"

    def get_extra_state(self) -> Tensor | None:
        return self.choices

    def set_extra_state(self, state: Tensor | None) -> None:
        self.choices = state


def _plates(batch_shape: Size) -> tuple[Size, Size]:
    """The batch shapes of all chains and of those in the subsamples of the enclosing plates."""
    frames: list[Any] = [frame for frame in get_plates() if frame.dim is not None]
    depth = max((-frame.dim for frame in frames), default=0)
    full, part = [1] * depth, [1] * depth
    for frame in frames:
        full[frame.dim], part[frame.dim] = frame.full_size or frame.size, frame.size
    shape = torch.broadcast_shapes(batch_shape, part)
    full = [*shape[: len(shape) - depth], *full]
    owned = {frame.dim for frame in frames}
    for dim in range(-len(shape), 0):
        if dim not in owned:
            full[dim] = shape[dim]
    return Size(full), shape
