# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices from Gibbs chains that continue from step to step: the gradient of the likelihood."""

import math
import warnings
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Delta
from pyro.infer import ELBO
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor, nn

from pyro_nmm import Neighborhood, compiled
from pyro_nmm.arguments import check_integers
from pyro_nmm.caching import LastCall
from pyro_nmm.consumers import PREDICTIVE, WEIGHING, consumer
from pyro_nmm.distributions.conditional import Conditional
from pyro_nmm.models.plates import COPIES
from pyro_nmm.provenance import untracked

OTHER = "Chains serves one field on one graph: make another one for each"
#: The mean total variation between the evidence of two steps from which it is of other data. Half
#: of it is reached by the first steps of Adam at rate 0.1; twice misses sets that share most nodes.
OTHER_DATA = 0.1


def _refuse_weights(name: str) -> None:
    raise ValueError(
        f"{name} weighs draws by their densities, but the states of Chains have none: use "
        f'Trace_ELBO, TraceGraph_ELBO or TraceEnum_ELBO, or estimator="reinforce" in this guide'
    )


class _Place(NamedTuple):
    """The states that a step is about."""

    states: Tensor  #: of all chains, ``(particles, ..., columns, N)``
    shape: Size  #: of this step's chains
    full: list[int]  #: sizes of particles and plates
    copies: bool  #: whether the first of these are particles
    predicts: bool  #: whether states are of one prediction and not kept

    def chains(self) -> Tensor:
        """Numbers of the chains of the plates' subsamples."""
        numbers = torch.arange(math.prod(self.full), device=self.states.device).view(self.full)
        return pyro.subsample(numbers, event_dim=0).expand(self.shape)

    def elements(self) -> Tensor:
        """The same of one particle."""
        return self.chains()[0] if self.copies else self.chains()

    def read(self, chain: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., columns, n)``: states of chains at nodes, and whether there are none yet."""
        value = self.states.flatten(end_dim=-3)[chain][..., nodes]
        return value, value < 0

    def write(self, chain: Tensor, nodes: Tensor, value: Tensor) -> None:
        """Keep states ``(..., columns, n)``."""
        columns = self.states.shape[-2]
        column = torch.arange(columns, device=nodes.device)[:, None]
        flat = self.states.view(-1, *self.states.shape[-2:])
        flat[chain[..., None, None], column, nodes] = value.view(*self.shape, columns, -1)


class States(Delta):
    """The states of chains themselves, not a view, so that the model knows their edges."""

    def log_prob(self, x: Tensor) -> Tensor:
        if not consumer(ELBO):  # such as weights by hand
            _refuse_weights("a log-probability of the guide's trace")
        return super().log_prob(x)

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
        if not (site_is_subsample(site) or isinstance(site["fn"], Conditional)):
            raise ValueError(
                f"site {name!r} has no reparameterised draw, so its gradient would need the "
                f"likelihood without choices, which Chains has not: take another estimator, or "
                f"draw the site after the field if the field does not depend on it"
            )


def warn_of_other_data(what: str, num_sweeps: int) -> None:
    """Say what changed, and name the plate that would keep a chain for each data set."""
    names = [f.name for f in get_plates() if f.dim is not None and f.name not in COPIES]
    plate = f"plate {names[-1]!r}" if names else "a pyro.plate around the field"
    warnings.warn(
        f"the {what} changed since the step before, so chains took {num_sweeps} sweeps. If each "
        f"step has other data, give {plate} the number of data sets as size and subsample= their "
        f"numbers in this step: then each has a chain of its own",
        stacklevel=3,
    )


class Chains(nn.Module):
    r"""The states of Gibbs chains, as an ``estimator`` of :func:`~pyro_nmm.guides.ordered_guide`
    and
    :func:`~pyro_nmm.guides.evidence_guide`.

    Choices, and latent labels, are drawn from :math:`p(c \mid y, \theta)`, not from
    :math:`q(c \mid y)`, by ``num_sweeps`` sweeps from the last step's states. By Fisher's identity

    .. math::

        \nabla \log p(y \mid \theta) = E_{p(c \mid y, \theta)}[\nabla \log p(y, c \mid \theta)] ,

    so that SVI is not biased by the gap of the bound, and needs no score of the choices. A sweep
    knows the probabilities :math:`p_{ij}` of a row's edges when it draws the row. The guide's site
    ``c`` has a control variate by these, :math:`\sum_i \log L_{i c_i} - \sum_{ij} p_{ij} \log
    L_{ij}`, whose gradient has mean zero: the gradient of attention has 12 to 44 times less
    variance (34 to 20,000 nodes; in two blocks, for devices, 4 to 16 times).

    The loss is :math:`-\log p(y, c \mid \theta)` of the states less this, no bound. It has the
    entropy of the choices in it, so it may rise while :math:`\log p(y \mid \theta)` rises, and
    does not show convergence: :func:`~pyro_nmm.guides.check_fit` does.
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

    **Losses.** ``Trace_ELBO``, ``TraceGraph_ELBO`` and ``TraceEnum_ELBO`` average over draws. The
    states have no density :math:`q`, so ``Importance``, ``RenyiELBO`` and others that weigh draws
    are refused. Sites of the guide that the field depends on need reparameterised draws, so
    discrete ones are refused.

    **States.** An object serves one field. Each particle and each element of a plate has a chain.
    Subsamples of plates and of nodes (``observed``) continue the chains that they had. A new chain
    starts from a draw of :math:`q` and takes ``warmup_sweeps``; under ``Predictive`` each chain is
    new, and the states of the fit stay. The states, ``(particles, ..., 1 or 2, N)``, are part of
    ``state_dict()``. A step with one sweep costs no more than a step by the bound. A CUDA graph can
    hold a step that does not ask for the loss (``docs/results/speed.md``).

    **Data.** If labels or evidence are of other data than in the step before, chains take
    ``warmup_sweeps`` and warn: several data sets belong into a plate, whose elements have chains of
    their own. Evidence on a GPU is not compared, because a step would wait for it.

    One sweep is enough if parameters are points, because a step moves them little. Take ten, as
    AutoNMM does, if a guide draws parameters, or if ``observed`` is another random batch in each
    step: a chain that still remembers other parameters makes posteriors too narrow
    (``docs/results/posteriors.md``). The second half of the sweeps counts: gradients are means
    over their states. A sweep on a GPU changes less than a sweep on the processor, so take more.

    :func:`~pyro_nmm.models.fit_field` has chains of its own.
    :class:`~pyro_nmm.guides.DGLFRMGuide` sums its choices out.

    :param int num_sweeps: between two steps. Half of them forget, and their other half is averaged.
    :param int warmup_sweeps: of a new chain, and after a change of the data. In a star of four
        nodes with concentrations of 0.05, probabilities after 20 sweeps were off by 0.015, after 40
        and 100 by less than 0.002.
    :raises ValueError: for another field or graph, and for algorithms that weigh draws.
    """

    #: ``(particles, ..., 1, N)`` choices or ``(particles, ..., 2, N)`` choices and labels, with the
    #: sizes of the plates between; -1 where no step has been.
    states: Tensor | None
    #: Whether a guide knows that its data are, or are not, other data; else the chains compare.
    other_data: bool | None = None
    #: Whether these chains are of one prediction; else each of its draws starts anew.
    of_prediction = False

    def __init__(self, num_sweeps: int = 1, warmup_sweeps: int = 50) -> None:
        super().__init__()
        check_integers(1, num_sweeps=num_sweeps, warmup_sweeps=warmup_sweeps)
        self.num_sweeps, self.warmup_sweeps = num_sweeps, max(num_sweeps, warmup_sweeps)
        self.register_buffer("states", None, persistent=False)
        self._last = LastCall()  # entries of the states that it put
        self._last_data = LastCall()
        self._seen: Tensor | None = None  # labels, or probabilities by the evidence alone

    def draw(self, q: Conditional) -> tuple[Tensor, Tensor]:
        """Samples of ``q`` continued by sweeps, one for each element of the program's plates, and
        their control variates."""
        value, chosen = self._continue(q)
        return value, q.control(*chosen)

    @torch.no_grad()
    def _continue(self, q: Conditional) -> tuple[Tensor, Any]:
        if name := consumer(*WEIGHING):
            _refuse_weights(name)
        _check_parents()
        rows, at = q.observed_rows, self._at(q.observed_rows, q.batch_shape, 1 + q.latent)
        other = not at.predicts and self._of_other_data(q, at)
        whole = list(at.shape) == [*at.states.shape[:-2]][-len(at.shape) :]
        if not compiled.runs_on(rows.device) and whole and not at.predicts:
            return self._on_device(q, at.states, at.shape, other)
        chain = at.chains()
        value, new = at.read(chain, rows.nodes)
        value = value.view(at.shape + q.event_shape)
        if new.any():
            new = new.view_as(value)
            value = value.where(~new, q.expand(at.shape).sample())
            other = other or bool(new.flatten(len(at.shape)).all(-1).any())
        counted = max(1, self.num_sweeps // 2)
        before = (self.warmup_sweeps if other else self.num_sweeps) - counted
        try:
            value, chosen = q.swept_with_shares(value, counted, before)
        except ValueError as error:
            raise ValueError(f"{OTHER}, got states of another one") from error
        if not at.predicts:
            at.write(chain, rows.nodes, value)
            self.states = at.states
        return value, chosen

    def _at(self, rows: Neighborhood, batch_shape: Size, columns: int) -> "_Place":
        """Where the states of a step are, of ``columns`` choices or choices and labels."""
        frames: dict[int, Any] = {f.dim: f for f in get_plates() if f.dim is not None}
        sizes = [frames[d].size if d in frames else 1 for d in range(min(frames, default=0), 0)]
        shape = torch.broadcast_shapes(batch_shape, sizes)
        dims = range(-len(shape), 0)
        full = [frames[d].full_size or frames[d].size if d in frames else shape[d] for d in dims]
        copies = bool(full) and -len(full) in frames and frames[-len(full)].name in COPIES
        predicts = not self.of_prediction and consumer(*PREDICTIVE) is not None
        old, event = None if predicts else self.states, (columns, rows.num_nodes)
        states = self._states(old, full if copies else [1, *full], event, rows.device)
        return _Place(states, shape, full, copies, predicts)

    def stored(self, rows: Neighborhood, values: list[Tensor]) -> Tensor:
        """``(..., columns, n)``: states of rows, and values ``(..., n)`` where there are none."""
        at = self._at(rows, values[0].shape[:-1], len(values))
        value, new = at.read(at.chains(), rows.nodes)
        return value.where(~new, torch.stack(values, -2))

    def _on_device(
        self, q: Conditional, states: Tensor, shape: Size, other: bool
    ) -> tuple[Tensor, Any]:
        """The same of all chains at once, without a wait if this is about the last step's rows."""
        rows = q.observed_rows

        def start() -> Tensor:
            value = states.index_select(-1, rows.nodes).view(shape + q.event_shape)
            new = value < 0
            if any_new := bool(new.any()):
                value = value.where(~new, q.expand(shape).sample())
            try:
                numbers = q.numbers(value, shape)
            except ValueError as error:
                raise ValueError(f"{OTHER}, got states of another one") from error
            starts = any_new and bool(new.flatten(len(shape)).all(-1).any())
            # Contiguous, because these numbers are written in place from now on.
            swept = q.continued(numbers, shape, self.warmup_sweeps)[-1] if starts else numbers
            return swept.contiguous()

        # In place, so that a CUDA graph of the step goes on where it was when it runs again.
        numbers = self._last.get((states, rows), start)
        counted = max(1, self.num_sweeps // 2)
        before = (self.warmup_sweeps if other else self.num_sweeps) - counted
        if before:
            numbers.copy_(q.continued(numbers, shape, before)[-1])
        shares = q.logits.new_zeros(len(numbers), rows.num_edges)
        drawn = q.continued(numbers, shape, counted, shares)
        numbers.copy_(drawn[-1])
        value = q.values_of(numbers)
        new = value.view(*states.shape[:-1], rows.num_rows)
        whole = rows.num_rows == rows.num_nodes
        self.states = new if whole else states.index_copy(-1, rows.nodes, new)
        self._last.put((self.states, rows), numbers)
        value = value.view(shape + q.event_shape)
        if len(q.event_shape) == 1:
            rows.last_edges.put((value, shape), (numbers, None))
        draws = [q.draw_of(state, shape) for state in drawn]
        return value, (shape, rows, draws, shares.div_(counted))

    def _states(
        self, old: Tensor | None, full: list[int], event: tuple[int, int], device: torch.device
    ) -> Tensor:
        """The states of so many particles, or of more, ``(particles, ..., R, N)``."""
        particles, *plates = full
        while plates and plates[0] == 1:
            plates = plates[1:]
        each = *plates, *event
        if old is not None and old.shape[1:] != each:
            raise ValueError(
                f"{OTHER}, got states {tuple(old.shape[1:])} for {each}. A plate with other "
                f"elements in each step needs its full size, and subsample= their numbers"
            )
        number = 0 if old is None else len(old)
        if number < particles:
            new = torch.full((particles - number, *each), -1, device=device)
            return new if old is None else torch.cat([old.to(device), new])
        assert old is not None
        return old if old.device == device else old.to(device)

    def _of_other_data(self, q: Conditional, at: "_Place") -> bool:
        """Whether labels or evidence are of other data than before, for elements of plates."""
        if self.other_data is not None:
            return self.other_data
        data = q.data_of(q.observed_rows)
        if data.is_floating_point() and not compiled.runs_on(data.device):
            return False
        other = self._last_data.get((data,), lambda: self._compare(q, data, at.elements()))
        self._last_data.put((data,), False)  # labels that do not change are looked at once
        return other

    def _compare(self, q: Conditional, data: Tensor, element: Tensor) -> bool:
        """Keep labels or evidence beside those before, and warn if these are of other data."""
        (data,), _ = untracked(data)
        rows, latent = q.observed_rows, data.is_floating_point()
        new = data.softmax(-1) if latent else data.unsqueeze(-1)
        while new.dim() - 2 > element.dim():  # of particles
            new = new.mean(0) if latent else new[0]
        by_edge = new.shape[-2] != rows.num_rows
        places, size = (rows.edge, q.hood.num_edges) if by_edge else (rows.nodes, rows.num_nodes)
        new = new.expand(*element.shape, *new.shape[-2:]).reshape(-1, *new.shape[-2:])
        elements, number = element.flatten()[:, None], int(element.max()) + 1
        full = new.new_full((number, size, new.shape[-1]), -1)
        seen = full if self._seen is None else self._seen.to(new)
        if seen.shape[1:] != full.shape[1:]:
            seen = full
        self._seen = seen = torch.cat([seen, full[len(seen) :]]) if len(seen) < number else seen
        old = seen[elements, places]
        distance = (old - new).abs().sum(-1) / 2 if latent else (old != new).any(-1).float()
        distance = distance[(old >= 0).all(-1)]
        seen[elements, places] = new
        if not distance.numel() or distance.mean() <= (OTHER_DATA if latent else 0):
            return False
        what = f"evidence, by {distance.mean():.2f} of its probability," if latent else "labels"
        warn_of_other_data(what, self.warmup_sweeps)
        return True

    @property
    def num_chains(self) -> int:
        """Of each element of plates."""
        return 0 if self.states is None else len(self.states)

    def extra_repr(self) -> str:
        return f"num_sweeps={self.num_sweeps}"

    def get_extra_state(self) -> Tensor | None:
        return self.states

    def set_extra_state(self, state: Tensor | None) -> None:
        self.states = state
