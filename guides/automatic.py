# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A guide in one line for any program with fields."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoNormal
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.ordered import evidence_guide, ordered_guide
from pyro_nmm.guides.program import Field, Run, fields_of
from pyro_nmm.models.plates import beside


class AutoNMM(AutoGuide):
    r"""
    A guide for a program with one or several :func:`~pyro_nmm.models.nmm`.

    An autoguide draws the continuous sites. Then each field's choices, and its labels if these are
    latent, come from :func:`~pyro_nmm.guides.ordered_guide` or
    :func:`~pyro_nmm.guides.evidence_guide`, or from :class:`~pyro_nmm.guides.Chains`, given what
    was drawn before:

    .. math::

        q(\theta, c, y) = q(\theta) \prod_f q(c_f, y_f \mid \theta, x, c_{<f}, y_{<f}) .

    The evidence of latent labels is computed: the program runs with every label in turn, and a run
    with random labels checks that the sum over nodes is the program's own likelihood.

    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import nmm
    >>> hood, x = Neighborhood.grid(4, 4), torch.randn(16) + torch.arange(16) // 8
    >>> def model():
    ...     kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    ...     gap = pyro.sample("gap", dist.LogNormal(0.0, 1.0))
    ...     alpha = kappa[..., None, None] * torch.full((16, 2), 0.5)
    ...     y = nmm(hood, alpha, torch.zeros(hood.num_edges), collapsed=True)
    ...     pyro.sample("x", dist.Normal(gap[..., None] * y, 1.0).to_event(1), obs=x)
    >>> guide = AutoNMM(model)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    >>> svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step() for _ in range(5)]
    >>> sorted(guide.median())
    ['gap', 'kappa']

    :param model: a Pyro program. Plates, scopes, partly observed labels, and vectorized particles
        are its own affair.
    :param guide: makes the autoguide of the continuous sites from a program, such as
        ``AutoMultivariateNormal`` or ``functools.partial(AutoNormal, init_scale=0.01)``.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`. Every field has a copy of
        :class:`~pyro_nmm.guides.Chains`.
    :param create_plates: as for every autoguide, for plates that subsample.
    """

    def __init__(
        self, model: Callable, guide: Callable[[Callable], AutoGuide] = AutoNormal, *,
        estimator: str | Chains = "reward_to_go", create_plates: Callable | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, create_plates=create_plates)
        self.estimator = estimator
        self.parents = guide(poutine.block(model, hide_fn=_of_field))
        self.chains = nn.ModuleDict()

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        with poutine.block():
            whole = poutine.trace(self.model).get_trace(*args, **kwargs)
        # Plates of observed sites may subsample too, and the model takes over the guide's choice.
        frames = (site.get("cond_indep_stack", ()) for site in whole.nodes.values())
        self._prototype_frames |= {frame.name: frame for part in frames for frame in part}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            if site["fn"].support.is_discrete and not _of_field(site):
                raise ValueError(
                    f"site {name!r} is discrete and no nmm: sum it out in the program, or append "
                    f"no guide but write one for it"
                )

    def _check_prototype(self, trace: Trace) -> None:
        """Called by ``parents``, whose sites are some of this program's."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        values = self._parents(args, kwargs)
        for name in self._fields(values, args, kwargs):
            field = self._fields(values, args, kwargs)[name]
            draw = self._guide_of(field, self._runs(values, args, kwargs))
            with ExitStack() as stack:
                for frame in field.trace.nodes[name]["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                stack.enter_context(_Named(name))
                sites = stack.enter_context(poutine.trace()).trace.nodes
                draw()
            values |= {key: sites[key]["value"] for key in field.names & sites.keys()}
        return values

    def _parents(self, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        sites = self.prototype_trace.iter_stochastic_nodes()
        some = not all(_of_field(site) for _, site in sites)
        return dict(self.parents(*args, **kwargs)) if some else {}

    def _runs(self, values: dict, args: tuple, kwargs: dict) -> Run:
        """Runs of the program with these values, beside the handlers around the guide."""
        known = values | {name: plate.indices for name, plate in self.plates.items()}

        def run(more: dict[str, Tensor]) -> Trace:
            with poutine.block():
                given = poutine.condition(self.model, data=known | more)
                return poutine.trace(given).get_trace(*args, **kwargs)

        return run

    def _fields(self, values: dict, args: tuple, kwargs: dict) -> dict[str, Field]:
        latent = self.prototype_trace.nodes
        return fields_of(self._runs(values, args, kwargs)({}), latent)

    def _guide_of(self, field: Field, run: Run) -> Callable[[], Any]:
        hood, alpha, logits, channel = vars(field.prior).values()
        estimator: Any = self.estimator
        if isinstance(estimator, Chains):
            key = field.name.replace(".", "/")
            if key not in self.chains:
                self.chains[key] = copy.deepcopy(estimator)
            estimator = self.chains[key]
        options = {"collapsed": field.collapsed, "estimator": estimator}
        if field.latent:
            arguments = hood, field.prior.table, logits, field.evidence(run), field.observed
            return partial(evidence_guide, *arguments, **options)
        arguments = hood, alpha, logits, field.labels(), field.observed
        return partial(ordered_guide, *arguments, relabel=channel, **options)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Medians of the continuous sites, as the autoguide has them."""
        return self.parents.median(*args, **kwargs)

    def quantiles(self, quantiles: list[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of the continuous sites, as the autoguide has them."""
        return self.parents.quantiles(quantiles, *args, **kwargs)


class _Named(Messenger):
    """Gives the sites of a guide the names of a field's: its scope, and its number."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _pyro_sample(self, msg: Any) -> None:
        msg["name"] = beside(self.name, msg["name"])


def _of_field(site: Any) -> bool:
    return "nmm" in site["infer"]
