# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A kernel of Pyro's MCMC for programs with fields."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Dirichlet
from pyro.infer.mcmc import NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.ops.welford import WelfordCovariance
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nmm.arguments import check_integers
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.guides.program import Field, fields_of
from pyro_nmm.models.plates import COPIES
from pyro_nmm.ops.counts import posterior_alpha


class FieldGibbs(MCMCKernel):
    r"""
    Gibbs sampling of a program with one or several :func:`~pyro_nmm.models.nmm`: a kernel for
    Pyro's ``MCMC``.

    Each iteration has three steps. All leave the posterior as it is, so nothing is approximate:

    1. ``num_sweeps`` sweeps draw the choices of each field, and its labels if these are latent,
       from :math:`p(c, y_{\text{latent}} \mid \theta, x)` for the continuous sites
       :math:`\theta`.
    2. A kernel of Pyro's moves :math:`\theta` by :math:`p(\theta \mid c, y, x)`, of which
       :math:`\log p(y, c \mid \theta)` is a closed form with a gradient.
    3. ``num_moves`` random walks move :math:`\theta` and :math:`c` together [1]. A proposal
       :math:`\theta'` carries the choices along by ``num_sweeps`` sweeps at parameters between,
       with weight :math:`w` of :math:`p(y \mid \theta') / p(y \mid \theta)` by annealed
       importance sampling. The walk has nearly the size of :math:`p(\theta \mid y)`, where steps
       given :math:`c` are short.

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

    ``MCMC`` keeps the continuous sites. Its ``save_params=["kappa", "c"]`` keeps choices, and
    latent labels ``y``, too, as integers, which ``summary()`` and ``diagnostics()`` of Pyro cannot
    average.

    :param model: a Pyro program, without subsampling and vectorized particles.
    :param kernel: of the continuous sites, a class such as ``NUTS``, ``HMC`` or
        ``RandomWalkKernel``, and its ``options``.
    :param int num_sweeps: Gibbs sweeps of an iteration, and of each joint move.
    :param int num_moves: joint moves of an iteration, by default four of up to 20 continuous
        numbers, else none.
    :raises ValueError: for a program with no field, a tempered field or another discrete site.

    [1] Radford M. Neal (2004) "Taking bigger Metropolis steps by dragging fast variables",
    https://arxiv.org/abs/math/0502099.
    """

    def __init__(
        self, model: Callable, kernel: Callable[..., MCMCKernel] = NUTS, num_sweeps: int = 20,
        num_moves: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_integers(1, num_sweeps=num_sweeps)
        if num_moves is not None:
            check_integers(0, num_moves=num_moves)
        if options.get("jit_compile"):
            raise ValueError("jit_compile would keep the first choices: leave it out")
        self.model, self.num_sweeps, self.num_moves = model, num_sweeps, num_moves
        self.kernel: Any = kernel(self._given_fields, **options)
        self.latent: set[str] = set()  #: label sites that the program does not observe
        self.states: dict[str, Tensor] = {}  #: of all sites of fields
        self._arguments: tuple[tuple, dict] = (), {}
        self._saved: list[str] = []
        self._start: dict[str, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        # Hooks read step sizes and the like.
        if name.startswith("__") or name == "kernel":
            raise AttributeError(name)
        return getattr(self.kernel, name)

    @property
    def save_params(self) -> list[str]:
        """Names of the sites that ``MCMC`` keeps, in its order."""
        return self._saved

    @save_params.setter
    def save_params(self, names: list[str]) -> None:
        self._saved = sorted(names)

    def _given_fields(self, *args: Any, **kwargs: Any) -> Any:
        with poutine.condition(data=self.states):
            return self.model(*args, **kwargs)

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        self._arguments, self.states = (args, kwargs), {}
        trace = self._run({})
        _check(trace)
        sites: dict[str, Any] = dict(trace.iter_stochastic_nodes())
        self.latent = {name for name, site in sites.items() if "nmm" in site["infer"]}
        # The evidence of a field's labels may depend on labels of fields below it.
        values = {name: site["value"] for name, site in sites.items()}
        self._sweep(_Point({}, values, self._run(values), {}))
        self.kernel.setup(warmup_steps, *args, **kwargs)
        if self._start:  # which RandomWalkKernel forgets
            self.kernel.initial_params = self._start
        if not self._saved:
            self.save_params = list(self.kernel.initial_params)
        size = sum(value.numel() for value in self.kernel.initial_params.values())
        number = self.num_moves
        self._moves = (4 if 0 < size <= 20 else 0) if number is None else number if size else 0
        self._walk = _Walk(size, warmup_steps * self._moves)

    def _run(self, values: dict[str, Tensor]) -> Trace:
        args, kwargs = self._arguments
        with torch.no_grad():
            given = poutine.condition(self.model, data=values)
            return poutine.trace(given).get_trace(*args, **kwargs)

    def _at(self, params: dict[str, Tensor]) -> "_Point":
        values = {name: self.kernel.transforms[name].inv(params[name]) for name in params}
        return _Point(params, values, self._run(values | self.states), self.kernel.transforms)

    def _conditional(
        self, point: "_Point", name: str, order: Tensor | None = None
    ) -> tuple[Field, InOrder]:
        """A field, and its choices given continuous sites and the states of other fields."""

        def run(more: dict[str, Tensor]) -> Trace:
            return self._run(point.values | self.states | more)

        field = fields_of(point.trace, self.latent)[name]
        q, c = field.conditional(run, order), field.trace.nodes[name]["value"]
        return field, q.expand(torch.broadcast_shapes(q.batch_shape, c.shape[:-1]))

    def _state(self, field: Field, q: InOrder) -> Tensor:
        c = self.states[field.name]
        return torch.stack([c, self.states[_labels(field)]], -2) if len(q.event_shape) == 2 else c

    def _put(self, field: Field, q: InOrder, state: Tensor) -> None:
        c, borrowed = _parts(q, state)
        self.states |= {field.name: c} | ({_labels(field): borrowed} if state is not c else {})
        if not field.collapsed:
            self.states[field.site("z")] = _given(field, c, borrowed).sample()

    @torch.no_grad()
    def _sweep(self, point: "_Point") -> None:
        """New states of every field given the continuous sites, from the old ones if there are."""
        names = [*fields_of(point.trace, self.latent)]
        for name in names:
            if name != names[0]:  # of which parameters may depend on labels before
                point = replace(point, trace=self._run(point.values | self.states))
            field, q = self._conditional(point, name)
            state = self._state(field, q) if name in self.states else q.sample()
            self._put(field, q, q.sweep(state, self.num_sweeps))

    @torch.no_grad()
    def _move(self, here: "_Point") -> "_Point":
        """A step of continuous sites, whose fields follow it by annealing, or none."""
        there = self._at(self._walk.draw(here.params))
        log_ratio, moved = there.log_prob - here.log_prob, []
        for name in self._together(here) if log_ratio.isfinite() else ():
            field, q = self._conditional(here, name)
            field_there, end = self._conditional(there, name, q.order)
            before = self._state(field, q)
            state, gain = q.anneal(before, end, self.num_sweeps)
            log_ratio = log_ratio + gain.sum()
            if not field.collapsed:  # z is integrated out, and drawn anew
                z, parts = self.states[field.site("z")], _parts(q, before)
                ratio = _given(field, *parts).log_prob(z) - _given(field_there, *parts).log_prob(z)
                log_ratio = log_ratio + ratio.sum()
            moved.append((field_there, end, state))
        if not self._walk.accept(here.params, log_ratio):
            return here
        for part in moved:
            self._put(*part)
        return self._at(there.params)

    def _together(self, point: "_Point") -> list[str]:
        """At random, all fields with observed labels, or one with latent labels."""
        fields = fields_of(point.trace, self.latent)
        observed = [name for name, field in fields.items() if not field.latent]
        groups = [[name] for name in fields if name not in observed] + [observed][: len(observed)]
        return groups[int(torch.randint(len(groups), ()))]

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        params = {name: params[name] for name in self.kernel.initial_params}
        self._sweep(self._at(params))
        if not params:
            return self.states
        if hasattr(self.kernel, "clear_cache"):
            self.kernel.clear_cache()
        else:  # of RandomWalkKernel: the energy of the parameters at the states before
            self.kernel._energy_last = self.kernel.potential_fn(params)
        params = self.kernel.sample(params)
        if self._moves:
            point = self._at(params)
            for _ in range(self._moves):
                point = self._move(point)
            params = point.params
        return params | self.states

    @property
    def initial_params(self) -> dict[str, Tensor]:
        return self.kernel.initial_params | self.states

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        self.kernel.initial_params = self._start = params

    @property
    def transforms(self) -> dict[str, Any] | None:
        transforms = self.kernel.transforms
        if transforms is None:
            return None  # before setup
        whole = (name for name, state in self.states.items() if not state.is_floating_point())
        return transforms | dict.fromkeys(whole, _Whole)

    def logging(self) -> OrderedDict:
        return self.kernel.logging()

    def diagnostics(self) -> dict:
        return self.kernel.diagnostics() | {"accepted moves": self._walk.rate}

    def end_warmup(self) -> None:
        self.kernel.end_warmup()

    def cleanup(self) -> None:
        self.kernel.cleanup()
        self._start = None


class _Whole:
    """``MCMC`` keeps all sites in one tensor of floating point."""

    @staticmethod
    def inv(value: Tensor) -> Tensor:
        return value.round().long()


def _check(trace: Any) -> None:
    """Refuse programs of which the kernel would not sample the posterior."""
    if not fields_of(trace, set()):
        raise ValueError("model has no nmm with sampled choices: use the kernel of Pyro itself")
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        if site_is_subsample(site):
            if len(site["value"]) < site["fn"].size:
                raise ValueError(f"plate {name!r} subsamples: give MCMC all elements")
        elif any(frame.name in COPIES for frame in site["cond_indep_stack"]):
            raise ValueError(f"site {name!r} has a dimension of particles: give MCMC one copy")
        elif "nmm" in site["infer"]:
            scale, mask = torch.as_tensor(site["scale"]), site["mask"]
            if (scale != 1).any() or not (mask is None or torch.as_tensor(mask).all()):
                raise ValueError(
                    f"field of site {name!r} is in poutine.scale or poutine.mask: its choices are "
                    f"drawn without, so leave it out, or fit the field with SVI"
                )
        elif not site["is_observed"] and site["fn"].support.is_discrete:
            raise ValueError(f"site {name!r} is discrete and no nmm: sum it out in the program")


@dataclass(frozen=True)
class _Point:
    """Continuous sites, unconstrained and as they are, and a run of the program with them."""

    params: dict[str, Tensor]
    values: dict[str, Tensor]
    trace: Trace
    transforms: dict[str, Any]

    @cached_property
    def log_prob(self) -> Tensor:
        """Of all sites, of continuous ones in unconstrained space."""
        log_prob: Any = self.trace.log_prob_sum()
        for name, value in self.params.items():
            transform = self.transforms[name]
            log_prob = log_prob - transform.log_abs_det_jacobian(self.values[name], value).sum()
        return log_prob


class _Walk:
    """A random walk, with the covariance of later warm-up steps, that is accepted at .3."""

    def __init__(self, size: int, warmup: int) -> None:
        self.size, self.warmup, self.steps, self.rate = size, warmup, 0, 0.0
        self.moments = WelfordCovariance(diagonal=False)
        self.log_scale, self.root = math.log(0.5), torch.eye(size)

    def draw(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(params.values()))
        step = math.exp(self.log_scale) * self.root.to(like) @ torch.randn(self.size).to(like)
        parts = step.split([value.numel() for value in params.values()])
        pairs = zip(params.items(), parts, strict=True)
        return {name: value + part.view_as(value) for (name, value), part in pairs}

    def accept(self, params: dict[str, Tensor], log_ratio: Tensor) -> bool:
        """Decide on a step, and learn from it during warm-up."""
        rate, self.steps = log_ratio.exp().clamp(max=1).nan_to_num(0.0).item(), self.steps + 1
        late = self.steps - self.warmup // 4
        if self.steps > self.warmup:
            self.rate += (rate - self.rate) / (self.steps - self.warmup)
        else:
            self.log_scale += 2 * (rate - 0.3) / (late if late > 0 else self.steps) ** 0.6
            if late > 0:
                self.moments.update(torch.cat([part.reshape(-1) for part in params.values()]))
            if late >= 10 * self.size:
                if late == 10 * self.size:
                    self.log_scale = math.log(2.4 / self.size**0.5)
                self.root = torch.linalg.cholesky(self.moments.get_covariance())
        return torch.rand(()).item() < rate


def _labels(field: Field) -> str:
    return field.site("y" if field.latent else "u")


def _parts(q: InOrder, state: Tensor) -> Any:
    """Choices and borrowed labels."""
    return state.unbind(-2) if len(q.event_shape) == 2 else (state, q.borrowed(state))


def _given(field: Field, c: Tensor, borrowed: Tensor) -> Dirichlet:
    """Label distributions given choices and borrowed labels."""
    return Dirichlet(posterior_alpha(field.prior.table, c, borrowed))
