# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A kernel of Pyro's MCMC for programs with fields."""

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.infer.mcmc import NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nmm.arguments import check_integers
from pyro_nmm.distributions.conditional import Conditional
from pyro_nmm.fitting import ordinary, with_gradients
from pyro_nmm.guides.count_field import CountField, count_fields_of
from pyro_nmm.guides.discrete import other_value, redraw, values_of
from pyro_nmm.guides.gibbs_checks import check_model, check_nan, check_start, of_field
from pyro_nmm.guides.hidden_sites import check_hidden
from pyro_nmm.guides.langevin import MOST, Langevin
from pyro_nmm.guides.program import Field, fields_of
from pyro_nmm.guides.proposals import FEW, Proposals
from pyro_nmm.ops.diagnostics import effective_size

#: Sweeps of a joint move. Effective draws of the slower of two parameters in a CPU minute with 10,
#: 20 and 40: 230, 258 and 236 with 10,000 nodes; with 20 and 50: 2,405 and 1,441 with 400. And with
#: 1, 2 and 4 moves: 205, 342 and 258 with 10,000 nodes, 2,402, 3,258 and 2,405 with 400.
SWEEPS, MOVES = 20, 2
#: Effective draws below which the kernel warns: means then have errors of a tenth of a standard
#: deviation; of .14 with half of them, and .07 with twice as many.
ENOUGH = 100


class FieldGibbs(MCMCKernel):
    r"""Gibbs sampling of a program with one or several :func:`~pyro_nmm.models.nmm`: a kernel for
    Pyro's ``MCMC``.

    Sweeps draw the choices of each field, and its labels if these are latent, given the continuous
    sites :math:`\theta` and the other fields; then :math:`\theta` moves. :math:`\log p(y, c \mid
    \theta)` is a closed form with a gradient, so no step is approximate:

    .. math::

        c, y_{\text{latent}} \sim p(c, y_{\text{latent}} \mid \theta, x), \qquad
        \theta \sim p(\theta \mid c, y, x) .

    Given the choices, parameters move little. With up to eight parameters, ``num_moves`` Metropolis
    steps therefore change :math:`\theta` and all choices together: choices follow to the proposed
    parameters by ``num_sweeps`` sweeps at parameters between, as in "Taking Bigger Metropolis Steps
    by Dragging Fast Variables" (Neal 2005), with less noise (:mod:`pyro_nmm.ops.annealing`). Then
    parameters take an over-relaxed step along the gradient, preconditioned by the Hessian
    (:mod:`pyro_nmm.guides.langevin`). Warm-up tunes both. More than 100 parameters move by NUTS.

    Fields of counts, of :func:`~pyro_nmm.models.nmm_counts`, have counts of choices in place of
    choices. Their parameters take a step given label distributions, and one given choices, without
    joint moves. With hundreds of units at a node label distributions depend strongly on parameters:
    give ``num_sweeps=20`` (49 areas with 50 to 500 units: 2 effective draws a second for .5).

    Discrete sites of no field, with finitely many values, are drawn from their full conditionals by
    a run of the program at each value. Elements in plates are drawn together if no site depends on
    several of them. As many joint moves change an element of these sites and all choices.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import MCMC
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import nmm
    >>> hood, y = Neighborhood.grid(4, 4), torch.arange(16) // 8
    >>> def model():
    ...     kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    ...     alpha = kappa * torch.full((16, 2), 0.5)
    ...     nmm(hood, alpha, torch.zeros(hood.num_edges), y, collapsed=True)
    >>> mcmc = MCMC(FieldGibbs(model), num_samples=20, warmup_steps=10, disable_progbar=True)
    >>> mcmc.run()
    >>> mcmc.get_samples()["kappa"].shape
    torch.Size([20])

    ``diagnostics()`` of ``MCMC`` has the acceptance rate, the log-density of each draw with its
    choices, and the effective number of draws of each parameter and of this density. A warning
    names a parameter with fewer than 100 effective draws, if it has fewer than half of the draws.
    Compare several chains from dispersed starts by their R-hat.

    ``MCMC`` keeps the continuous sites. Its ``save_params=["kappa", "c"]`` keeps choices
    ``(num_samples, ..., n)``, latent labels ``y`` and discrete sites, too, as integers, which
    ``summary()`` and ``diagnostics()`` of Pyro cannot average: give
    ``pyro.infer.mcmc.util.summary`` the draws of the continuous sites alone. ``Predictive`` of
    ``nmm(..., predict=True)`` needs the choices.

    :param model: a Pyro program, without subsampling and vectorized particles.
    :param kernel: of the continuous sites, in place of the steps along the gradient: a class such
        as ``NUTS``, ``HMC`` or ``RandomWalkKernel``, and its ``options``.
    :param int num_sweeps: Gibbs sweeps of a joint move, :math:`O(E)` each; without joint moves,
        sweeps before each of its steps. Default 20, or one before a step along the gradient.
    :param int num_moves: joint moves before each of its steps.
    :raises ValueError: for a program with no field, a tempered field, a discrete site whose values
        cannot be enumerated, and random sites that ``poutine.block`` hides.
    """

    def __init__(
        self,
        model: Callable,
        kernel: Callable[..., MCMCKernel] | None = None,
        num_sweeps: int | None = None,
        num_moves: int = MOVES,
        **options: Any,
    ) -> None:
        check_integers(1, **{} if num_sweeps is None else {"num_sweeps": num_sweeps})
        check_integers(0, num_moves=num_moves)
        if isinstance(model, MCMCKernel) or isinstance(kernel, MCMCKernel):
            made = type(model if isinstance(model, MCMCKernel) else kernel).__name__
            raise ValueError(
                f"model must be a Pyro program and kernel a class, got an object of {made}: write "
                f"FieldGibbs(model, {made}), with options of {made} as keywords"
            )
        if options.get("jit_compile"):
            raise ValueError("jit_compile would keep the first choices: leave it out")
        self.model, self.num_sweeps, self.num_moves = model, num_sweeps, num_moves
        self._kind, self._options, self._own = kernel or NUTS, options, kernel is None
        self.kernel: Any = self._kind(self._given_fields, **options)
        self.latent: set[str] = set()  #: label sites that the program does not observe
        self.states: dict[str, Tensor] = {}  #: of all sites of fields, and of discrete sites
        self._steps: Langevin | None = None
        self._arguments: tuple[tuple, dict] = (), {}
        self._saved: list[str] = []
        self._start: dict[str, Tensor] | None = None
        self._path: list[tuple[Tensor, Tensor]] = []  #: positions and log-densities after warm-up
        self._program: _Program | None = None  #: the last run
        self._num_sweeps = num_sweeps or SWEEPS
        self._transforms: dict[str, Any] = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_program": None}  # whose graph of gradients cannot be copied

    def __getattr__(self, name: str) -> Any:
        # Hooks read step sizes and the like.
        if name.startswith("__") or name == "kernel":
            raise AttributeError(name)
        return getattr(self.kernel, name)

    @property
    def save_params(self) -> list[str]:
        """Names of the sites that ``MCMC`` keeps, in its order."""
        return self._saved or sorted(self.kernel.initial_params)

    @save_params.setter
    def save_params(self, names: list[str]) -> None:
        self._saved = sorted(names)

    def _given_fields(self, *args: Any, **kwargs: Any) -> Any:
        with poutine.condition(data=self.states):
            return self.model(*args, **kwargs)

    @with_gradients
    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        check_integers(0, warmup_steps=warmup_steps)
        start, self._start = self._start, None  # of this run alone, also if it fails
        self._arguments, self.states = (args, kwargs), {}
        trace = self._run({})
        check_model(trace)
        sites: dict[str, Any] = dict(trace.iter_stochastic_nodes())
        check_hidden(self._run)
        self.latent = {name for name, site in sites.items() if of_field(site)}
        rest = {
            name: site
            for name, site in sites.items()
            if not (name in self.latent or site_is_subsample(site))
        }
        #: Discrete sites of no field, and whether their elements in plates are drawn together.
        self._discrete = {k: True for k, site in rest.items() if site["fn"].support.is_discrete}
        if start:
            check_start(start, {k: s for k, s in rest.items() if k not in self._discrete})
        fields = self._fields(trace)
        borrowed = {field.site("y") for field in fields.values() if field.site("u") in sites}
        #: Sites whose density is a field's ``log_joint``.
        self._joint = {name for field in fields.values() for name in field.names} - borrowed
        #: Whether densities of other sites do not depend on states, and these on one another.
        of_labels = any(field.latent for field in fields.values())
        self._fixed = not (of_labels or self._discrete or borrowed)
        # The evidence of a field's labels may depend on labels of fields below it.
        self.states = {name: sites[name]["value"] for name in self._discrete}
        self._names_of_fields, self._program, self._path = [*fields], None, []
        self._transforms = {}  # the first parameters have their constraints
        first = {k: s["value"] for k, s in rest.items() if k not in self._discrete}
        self._not_collapsed = [name for name, field in fields.items() if not field.collapsed]
        self._sweep(first, self._num_sweeps)
        self._draw_distributions(first)
        # A new one, because Pyro's kernels keep the constraints of their first run.
        self.kernel = self._kind(self._given_fields, **self._options)
        if start:
            self.kernel.initial_params = start
        try:
            self.kernel.setup(warmup_steps, *args, **kwargs)
        except ValueError:
            check_nan(trace, masked=True)
            raise
        size = sum(value.numel() for value in self.kernel.initial_params.values())
        #: Fields that move with parameters: all with observed labels, or one with latent labels.
        self._groups = [[name] for name, field in fields.items() if field.latent]
        self._counts = [name for name, field in fields.items() if isinstance(field, CountField)]
        seen = [k for k, field in fields.items() if not (field.latent or k in self._counts)]
        self._groups += [seen] if seen else []
        self._moves = self.num_moves if self._groups and 0 < size <= FEW else 0
        self._flips = self.num_moves if self._discrete and self._groups else 0
        self._proposals = Proposals(warmup_steps * self._moves)
        self._steps = Langevin(warmup_steps) if self._own and 0 < size <= MOST else None
        #: Steps given label distributions, if there are fields of counts.
        self._more_steps = Langevin(warmup_steps) if self._steps and self._counts else None
        self._program, self._transforms = None, self.kernel.transforms
        one = self._moves or self._flips or (self._steps and not self.num_sweeps)
        self._num_between = 1 if one else self._num_sweeps
        if start:  # which RandomWalkKernel forgets
            self.kernel.initial_params = start

    def _run(self, values: dict[str, Tensor]) -> Trace:
        args, kwargs = self._arguments
        given = poutine.condition(self.model, data=values)
        return poutine.trace(given).get_trace(*args, **kwargs)

    def _sweep(self, params: dict[str, Tensor], num_sweeps: int) -> None:
        """New states of every field given the continuous sites, from the old ones if there are."""
        for name in self._names_of_fields:
            program = self._at(params)  # parameters may depend on labels of earlier fields
            field, q = program.fields[name], self._conditional(program, name)
            states = self._states_of(field, q) if name in self.states else q.sample()
            self._put(field, q.sweep(states, num_sweeps))

    def _fields(self, trace: Trace) -> dict[str, Any]:
        return fields_of(trace, self.latent) | count_fields_of(trace, self.latent)

    def _run_given(self, values: dict[str, Tensor], more: dict[str, Tensor]) -> Trace:
        with torch.no_grad():
            return self._run(values | self.states | more)

    def _conditional(self, program: "_Program", name: str) -> Conditional:
        """Of all labellings of a field, with its rows in ascending order."""
        if name not in program.conditionals:
            field, run = program.fields[name], partial(self._run_given, program.values)
            q = field.conditional(run, field.prior.hood.restrict(field.observed).nodes)
            shape = torch.broadcast_shapes(q.batch_shape, field.batch_shape)
            program.conditionals[name] = q if q.batch_shape == shape else q.expand(shape)
        return program.conditionals[name]

    def _states_of(self, field: Field, q: Conditional) -> Tensor:
        """The states of a field as a sample of its conditional."""
        states = [self.states[name] for name in field.unknown]
        return torch.stack(states, -2) if q.latent else states[0]

    def _put(self, field: Field, states: Tensor) -> None:
        """Keep a sample of a field's conditional."""
        parts = states.unbind(-2) if len(field.unknown) > 1 else [states]
        self.states = self.states | dict(zip(field.unknown, parts, strict=True))
        if isinstance(field, CountField):
            self.states[field.name] = field.distributions(states)

    @torch.no_grad()
    def _draw_distributions(self, params: dict[str, Tensor]) -> None:
        """Label distributions that are sites, given all else."""
        for name in self._not_collapsed:
            field = self._at(params).fields[name]
            self.states = self.states | {field.site("z"): field.distributions(self.states)}

    @torch.no_grad()
    def _redraw(self, values: dict[str, Tensor]) -> None:
        """New values of discrete sites of no field given all else."""
        for name, together in self._discrete.items():
            value, independent = redraw(partial(self._run_given, values), name, together)
            self.states = self.states | {name: value}
            self._discrete[name] = together and independent

    def _move(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metropolis steps of parameters, and of an element of a discrete site each, which the
        states of fields follow by annealing."""
        names = self._groups[int(torch.randint(len(self._groups), ()))]
        here = self._at(params)
        log_prob, starts = here.log_prob(self.states), self._conditionals(here, names)
        for flips in [False] * self._moves + [True] * self._flips:
            params, kept, log_ratio = here.params, self.states, torch.zeros(())
            if flips:
                name = list(self._discrete)[int(torch.randint(len(self._discrete), ()))]
                values = values_of(name, here.trace.nodes[name])
                self.states = kept | {name: other_value(kept[name], values)}
            else:
                params, log_ratio = self._proposals.propose(params)
            ends = self._conditionals(self._at(params), names)
            for (field, q), (_, end) in zip(starts, ends, strict=True):
                annealed = q.anneal(self._states_of(field, q), end, self._num_sweeps)
                self._put(field, annealed.states)
                log_ratio = log_ratio + annealed.gain.sum()
            there = self._at(params)  # states of before may be impossible there
            other = there.log_prob(self.states)
            log_ratio = log_ratio + other - log_prob
            if self._proposals.decide(here.params, log_ratio.detach(), learns=not flips):
                here, log_prob, starts = there, other, ends
            else:
                self.states = kept
        self._program = here
        return here.params

    def _conditionals(self, program: "_Program", names: list[str]) -> list[tuple]:
        return [(program.fields[name], self._conditional(program, name)) for name in names]

    def _at(self, params: dict[str, Tensor]) -> "_Program":
        """A run of the program, or the last one if it had these parameters."""
        last = self._program
        if last and self._fixed and all(last.params[name] is v for name, v in params.items()):
            return last
        leaves = {k: v.detach().requires_grad_(torch.is_grad_enabled()) for k, v in params.items()}
        values = self._constrained(leaves)
        trace = self._run(values | self.states)
        rest: Any = trace.log_prob_sum(lambda name, site: name not in self._joint)
        for name, transform in self._transforms.items():
            rest = rest - transform.log_abs_det_jacobian(values[name], leaves[name]).sum()
        fields, joints = self._fields(trace), {}
        for name, field in fields.items():
            joints[name] = field.log_joint()
            fields[name] = field._replace(prior=field.prior.plain)
        values = {name: value.detach() for name, value in values.items()}
        self._program = _Program(params, leaves, values, trace, rest, fields, joints, {})
        return self._program

    def _step(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """A step of parameters given all states. Fields of counts have one given label
        distributions before, with choices integrated out, and then one given choices: the first is
        longer for attention, the second for concentrations."""
        assert self._steps
        program = self._at(params)
        if self._more_steps:
            point = _Point.of(program, self.states)
            program = self._more_steps.step(point, self._point_at).program
            for name in self._counts:
                field, q = program.fields[name], self._conditional(program, name)
                units = q.choices(self._states_of(field, q))
                self.states = self.states | {field.units: units}
        point = self._steps.step(_Point.of(program, self.states), self._point_at)
        if self._steps.num_steps > self._steps.warmup_steps:
            self._path.append((point.position, torch.tensor(point.log_prob).double()))
        self._program = program = point.program
        for name in self._counts if self._more_steps else []:
            field, q = program.fields[name], self._conditional(program, name)
            self._put(field, q.distributions(self.states.pop(field.units)))
        return program.params

    def _names(self) -> list[str]:
        """Of all numbers of the continuous sites."""
        sizes = {name: value.numel() for name, value in self.kernel.initial_params.items()}
        return [f"{k}[{i}]" if n > 1 else k for k, n in sizes.items() for i in range(n)]

    def _params_at(self, position: Tensor) -> dict[str, Tensor]:
        """Unconstrained parameters of all their numbers ``(d,)``."""
        like = self.kernel.initial_params
        parts = position.split([value.numel() for value in like.values()])
        pairs = zip(like.items(), parts, strict=True)
        return {name: part.view_as(value).to(value) for (name, value), part in pairs}

    def _point_at(self, position: Tensor) -> "_Point":
        return _Point.of(self._at(self._params_at(position)), self.states)

    def _constrained(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        known = self._transforms
        return {k: known[k].inv(v) if k in known else v for k, v in params.items()}

    @with_gradients
    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        params = {name: params[name] for name in self.kernel.initial_params}
        self._sweep(params, self._num_between)
        self._redraw(self._constrained(params))
        if self._moves or self._flips:
            params = self._move(params)
        if self._steps:
            params = self._step(params)
        self._draw_distributions(params)
        if self._steps or not params:
            return params | self.states
        if hasattr(self.kernel, "clear_cache"):
            self.kernel.clear_cache()
        else:  # of RandomWalkKernel: the energy of the parameters at the states before
            self.kernel._energy_last = self.kernel.potential_fn(params)
        return self.kernel.sample(params) | self.states

    @property
    def initial_params(self) -> dict[str, Tensor]:
        return self.kernel.initial_params | self.states

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        self.kernel.initial_params = self._start = ordinary(dict(params))

    @property
    def transforms(self) -> dict[str, Any] | None:
        transforms = self.kernel.transforms
        if transforms is None:
            return None  # before setup
        whole = (name for name, state in self.states.items() if not state.is_floating_point())
        return transforms | dict.fromkeys(whole, _Whole)

    def logging(self) -> OrderedDict:
        if not self._steps:
            return self.kernel.logging()
        acceptance = f"{self._steps.acceptance:.3f}"
        return OrderedDict({"step size": f"{self._steps.step_size:.2f}", "acc. prob": acceptance})

    def diagnostics(self) -> dict:
        found = self.kernel.diagnostics() if self.kernel.initial_params else {}
        if self._steps and self._path:
            found = {"acceptance rate": self._steps.acceptance} | self._mixing()
        return {"divergences": []} | found

    def _mixing(self) -> dict:
        """Log-densities of the draws, and how many independent draws each number is worth."""
        positions, log_probs = (torch.stack(part) for part in zip(*self._path, strict=True))
        columns = torch.cat([positions, log_probs[:, None]], 1)
        effective = effective_size(columns[None]).nan_to_num().tolist()
        sizes = dict(zip([*self._names(), "log density"], effective, strict=True))
        name = min(sizes, key=lambda name: sizes[name])
        if len(columns) >= ENOUGH and sizes[name] < min(ENOUGH, len(columns) / 2):
            more = math.ceil(len(columns) * ENOUGH / max(sizes[name], 1.0))
            warnings.warn(
                f"{name} has {sizes[name]:.0f} effective draws of {len(columns)}: raise "
                f"num_samples to {more} for {ENOUGH}, and compare several chains",
                stacklevel=2,
            )
        return {"log density": log_probs, "effective draws": sizes}

    def end_warmup(self) -> None:
        self.kernel.end_warmup()

    def cleanup(self) -> None:
        self.kernel.cleanup()
        self._program, self._path = None, []


class _Program(NamedTuple):
    """A run of the program at unconstrained parameters."""

    params: dict[str, Tensor]
    leaves: dict[str, Tensor]  #: the same, for their gradient
    values: dict[str, Tensor]  #: the same, with their constraints
    trace: Trace
    rest: Tensor  #: the log-density of parameters and of sites that are not in ``joints``
    fields: dict[str, Any]
    joints: dict[str, Any]
    conditionals: dict[str, Conditional]  #: kept for more sweeps

    def log_prob(self, states: dict[str, Tensor]) -> Tensor:
        """With choices, and with label distributions integrated out."""
        found = torch.as_tensor(self.rest).double()
        for name, field in self.fields.items():
            found = found + self.joints[name](*field.draw(states))
        return found

    def gradient(self, value: Tensor) -> Tensor:
        """``(d,)``, of a function of this run. Another one may follow."""
        leaves = [*self.leaves.values()]
        if not value.requires_grad:
            return torch.zeros_like(_flat(leaves))
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return _flat(torch.autograd.grad(value, leaves, **options))


class _Point(NamedTuple):
    """What :class:`Langevin` asks for."""

    program: _Program
    position: Tensor
    log_prob: float
    gradient: Tensor

    @classmethod
    def of(cls, program: _Program, states: dict[str, Tensor]) -> "_Point":
        value = program.log_prob(states)
        position = _flat(program.leaves.values())
        return cls(program, position, value.item(), program.gradient(value))


def _flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts]).double()


class _Whole:
    """``MCMC`` keeps all sites in one tensor of floating point."""

    @staticmethod
    def inv(value: Tensor) -> Tensor:
        return value.round().long()
