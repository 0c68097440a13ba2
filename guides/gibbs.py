# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A kernel of Pyro's MCMC for programs with fields."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Dirichlet
from pyro.infer.mcmc import NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nmm.arguments import check_integers
from pyro_nmm.guides.program import fields_of
from pyro_nmm.models.plates import COPIES
from pyro_nmm.ops.counts import posterior_alpha


class FieldGibbs(MCMCKernel):
    r"""
    Gibbs sampling of a program with one or several :func:`~pyro_nmm.models.nmm`: a kernel for
    Pyro's ``MCMC``.

    Sweeps draw the choices of each field, and its labels if these are latent, given the continuous
    sites :math:`\theta` and the other fields; then a kernel of Pyro's moves :math:`\theta`.
    :math:`\log p(y, c \mid \theta)` is a closed form with a gradient, so nothing is approximate:

    .. math::

        c, y_{\text{latent}} \sim p(c, y_{\text{latent}} \mid \theta, x), \qquad
        \theta \sim p(\theta \mid c, y, x) .

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

    ``MCMC`` keeps the continuous sites. Its ``save_params=["kappa", "c"]`` keeps choices
    ``(num_samples, ..., n)``, and latent labels ``y``, too, as integers, which ``summary()`` and
    ``diagnostics()`` of Pyro cannot average.

    :param model: a Pyro program, without subsampling and vectorized particles.
    :param kernel: of the continuous sites, a class such as ``NUTS``, ``HMC`` or
        ``RandomWalkKernel``, and its ``options``.
    :param int num_sweeps: Gibbs sweeps before each of its steps. A sweep costs little beside a step
        of ``NUTS``.
    :raises ValueError: for a program with no field, a tempered field or another discrete site.
    """

    def __init__(
        self, model: Callable, kernel: Callable[..., MCMCKernel] = NUTS, num_sweeps: int = 20,
        **options: Any,
    ) -> None:  # fmt: skip
        check_integers(1, num_sweeps=num_sweeps)
        if options.get("jit_compile"):
            raise ValueError("jit_compile would keep the first choices: leave it out")
        self.model, self.num_sweeps = model, num_sweeps
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
        check_integers(0, warmup_steps=warmup_steps)
        self._arguments, self.states = (args, kwargs), {}
        trace = self._run({})
        _check(trace)
        sites: dict[str, Any] = dict(trace.iter_stochastic_nodes())
        self.latent = {name for name, site in sites.items() if "nmm" in site["infer"]}
        # The evidence of a field's labels may depend on labels of fields below it.
        values = {name: site["value"] for name, site in sites.items()}
        self._sweep(values)
        self.kernel.setup(warmup_steps, *args, **kwargs)
        if self._start:  # which RandomWalkKernel forgets
            self.kernel.initial_params = self._start
        if not self._saved:
            self.save_params = list(self.kernel.initial_params)

    def _run(self, values: dict[str, Tensor]) -> Trace:
        args, kwargs = self._arguments
        with torch.no_grad():
            given = poutine.condition(self.model, data=values)
            return poutine.trace(given).get_trace(*args, **kwargs)

    @torch.no_grad()
    def _sweep(self, values: dict[str, Tensor]) -> None:
        """New states of every field given the continuous sites, from the old ones if there are."""

        def run(more: dict[str, Tensor]) -> Trace:
            return self._run(values | self.states | more)

        fields = fields_of(run({}), self.latent)
        for number, name in enumerate(fields):  # parameters may depend on labels of earlier fields
            field = fields_of(run({}), self.latent)[name] if number else fields[name]
            q, c = field.conditional(run), field.trace.nodes[name]["value"]
            q = q.expand(torch.broadcast_shapes(q.batch_shape, c.shape[:-1]))
            both, labels = len(q.event_shape) == 2, field.site("y" if field.latent else "u")
            if name not in self.states:
                states = q.sample()
            else:
                states = torch.stack([c, self.states[labels]], -2) if both else c
            states = q.sweep(states, self.num_sweeps)
            c, borrowed = states.unbind(-2) if both else (states, q.borrowed(states))
            self.states |= {name: c} | ({labels: borrowed} if both else {})
            if not field.collapsed:
                alpha = posterior_alpha(field.prior.table, c, borrowed)
                self.states[field.site("z")] = Dirichlet(alpha).sample()

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        params = {name: params[name] for name in self.kernel.initial_params}
        self._sweep({name: self.kernel.transforms[name].inv(params[name]) for name in params})
        if not params:
            return self.states
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
        return self.kernel.diagnostics()

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
    """Refuse programs for which the kernel would not sample the posterior."""
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
