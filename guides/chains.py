# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices from Gibbs chains that continue from step to step: the gradient of the likelihood."""

import math
from typing import Any

import pyro
import torch
from pyro.distributions import Delta
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor, nn

from pyro_nmm.arguments import check_integers
from pyro_nmm.caching import LastCall
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.models.plates import COPIES
from pyro_nmm.ops import two_blocks

OTHER = "Chains serves one field on one graph: make another one for each"


class States(Delta):
    """The states of chains themselves, not a view, so that the model knows their edges."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> Delta:
        same = Size(batch_shape) == self.batch_shape
        return self if same else super().expand(batch_shape, _instance)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return super().rsample(sample_shape) if sample_shape else self.v


def _check_parents() -> None:
    """Refuse a guide's draws with a score before the field. It would need log p(y), but the loss
    has log p(y, c)."""
    traces = [handler.trace for handler in _PYRO_STACK if isinstance(handler, TraceMessenger)]
    for trace, name in ((t, name) for t in traces for name in t.nonreparam_stochastic_nodes):
        site = trace.nodes[name]
        if not (site_is_subsample(site) or isinstance(site["fn"], InOrder)):
            raise ValueError(
                f"site {name!r} has no reparameterised draw, so its gradient would need the "
                f"likelihood without choices, which Chains has not: take another estimator, or "
                f"draw the site after the field if the field does not depend on it"
            )


class Chains(nn.Module):
    r"""The states of Gibbs chains, as an ``estimator`` of :func:`~pyro_nmm.guides.ordered_guide`
    and
    :func:`~pyro_nmm.guides.evidence_guide`.

    Choices, and latent labels, are drawn from :math:`p(c \mid y, \theta)`, not from
    :math:`q(c \mid y)`, by ``num_sweeps`` sweeps from the last step's states. By Fisher's identity

    .. math::

        \nabla \log p(y \mid \theta) = E_{p(c \mid y, \theta)}[\nabla \log p(y, c \mid \theta)] ,

    so that SVI is not biased by the gap of the bound, and needs no score of the choices. The loss
    is then :math:`-\log p(y, c \mid \theta)` of the states, no bound: it falls as a fit learns.
    :meth:`~pyro_nmm.NeighborMixture.path_likelihood` compares models.

    >>> import pyro
    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.optim import Adam
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
    >>> chains.states.shape  # four particles
    torch.Size([4, 1, 16])

    Sites of the guide that the field depends on need reparameterised draws, so discrete ones are
    refused.

    An object serves one field. Each particle and each element of a plate has a chain. Subsamples of
    plates and of nodes (``observed``) continue the chains that they had, and a larger number of
    particles starts from copies. The states, ``(particles, ..., 1 or 2, N)``, are part of
    ``state_dict()``. A step with one sweep costs no more than a step by the bound. A CUDA graph can
    hold a step that does not ask for the loss (``docs/results/speed.md``).

    One sweep is often enough, because a step moves parameters little: on 20,000 nodes with two
    labels five sweeps changed log kappa by less than its standard deviation
    (``docs/results/estimators.md``). Take more if a guide draws parameters with a large variance,
    or if ``observed`` is another random batch in each step, because chains then lag behind. A sweep
    on a GPU changes less than a sweep on the processor, so take more there, too.

    :func:`~pyro_nmm.models.fit_field` has chains of its own.
    :class:`~pyro_nmm.guides.DGLFRMGuide` sums its choices out.

    :param int num_sweeps: between two steps.
    """

    #: ``(particles, ..., 1, N)`` choices or ``(particles, ..., 2, N)`` choices and labels, with the
    #: sizes of the plates between; -1 where no step has been.
    states: Tensor | None

    def __init__(self, num_sweeps: int = 1) -> None:
        super().__init__()
        check_integers(1, num_sweeps=num_sweeps)
        self.num_sweeps = num_sweeps
        self.register_buffer("states", None, persistent=False)
        self._last = LastCall()  # entries of the states that it put

    @torch.no_grad()
    def draw(self, q: InOrder) -> Tensor:
        """Samples of ``q`` continued by sweeps, one for each element of the program's plates."""
        _check_parents()
        frames: dict[int, Any] = {f.dim: f for f in get_plates() if f.dim is not None}
        sizes = [frames[d].size if d in frames else 1 for d in range(min(frames, default=0), 0)]
        shape = torch.broadcast_shapes(q.batch_shape, sizes)
        dims = range(-len(shape), 0)
        full = [frames[d].full_size or frames[d].size if d in frames else shape[d] for d in dims]
        copies = bool(full) and -len(full) in frames and frames[-len(full)].name in COPIES
        rows = q.observed_rows
        event = 2 if len(q.event_shape) > 1 else 1, rows.num_nodes
        states = self._states(full if copies else [1, *full], event, rows.device)
        if two_blocks.runs_on(rows.device) and list(shape) == [*states.shape[:-2]][-len(shape) :]:
            return self._on_device(q, states, shape)
        flat = states.view(-1, *event)
        chain = torch.arange(math.prod(full), device=rows.device).view(full)
        chain = pyro.subsample(chain, event_dim=0).expand(shape)  # of the plates' subsamples
        value = flat[chain][..., rows.nodes].view(shape + q.event_shape)
        if (value < 0).any():
            value = value.where(value >= 0, q.expand(shape).sample())
        try:
            value = q.sweep(value, self.num_sweeps)
        except ValueError as error:
            raise ValueError(f"{OTHER}, got states of another one") from error
        column = torch.arange(event[0], device=rows.device)[:, None]
        flat[chain[..., None, None], column, rows.nodes] = value.view(*shape, *event[:1], -1)
        self.states = states
        return value

    def _on_device(self, q: InOrder, states: Tensor, shape: Size) -> Tensor:
        """The same of all chains at once, without a wait if this is about the last step's rows."""
        rows = q.observed_rows

        def start() -> Tensor:
            value = states.index_select(-1, rows.nodes).view(shape + q.event_shape)
            if (value < 0).any():
                value = value.where(value >= 0, q.expand(shape).sample())
            try:
                return q.numbers(value, shape)
            except ValueError as error:
                raise ValueError(f"{OTHER}, got states of another one") from error

        # In place, so that a CUDA graph of the step goes on where it was when it runs again.
        numbers = self._last.get((states, rows), start)
        numbers.copy_(q.continued(numbers, shape, self.num_sweeps))
        value = q.values_of(numbers)
        new = value.view(*states.shape[:-1], rows.num_rows)
        whole = rows.num_rows == rows.num_nodes
        self.states = new if whole else states.index_copy(-1, rows.nodes, new)
        self._last.put((self.states, rows), numbers)
        value = value.view(shape + q.event_shape)
        if len(q.event_shape) == 1:
            rows.last_edges.put((value, shape), (numbers, None))
        return value

    def _states(self, full: list[int], event: tuple[int, int], device: torch.device) -> Tensor:
        """The states of so many particles, or of more, ``(particles, ..., R, N)``."""
        particles, *plates = full
        while plates and plates[0] == 1:
            plates = plates[1:]
        if (old := self.states) is None:
            return torch.full((particles, *plates, *event), -1, device=device)
        if old.shape[1:] != (*plates, *event):
            got = f"states {tuple(old.shape[1:])} for {(*plates, *event)}"
            raise ValueError(f"{OTHER}, got {got}")
        if len(old) == particles and old.device == device:
            return old
        every = torch.arange(max(len(old), particles), device=old.device)
        every[len(old) :] = torch.randint(len(old), (len(every) - len(old),), device=old.device)
        return old[every].to(device)

    def extra_repr(self) -> str:
        return f"num_sweeps={self.num_sweeps}"

    def get_extra_state(self) -> Tensor | None:
        return self.states

    def set_extra_state(self, state: Tensor | None) -> None:
        self.states = state
