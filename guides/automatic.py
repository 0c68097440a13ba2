# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A guide in one line for any program with fields."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer import TraceGraph_ELBO
from pyro.infer.autoguide import (
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import get_plates
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import biject_to

from pyro_nmm import Posterior
from pyro_nmm.consumers import PREDICTIVE, consumer
from pyro_nmm.guides.chains import Chains, warn_of_other_data
from pyro_nmm.guides.hidden_sites import check_hidden, is_enumerated, through_blocks
from pyro_nmm.guides.ordered import check_estimator, evidence_guide, ordered_guide
from pyro_nmm.guides.program import Field, Run, check_tracked, fields_of
from pyro_nmm.models.plates import COPIES, AgreedSubsamples, beside, check_site
from pyro_nmm.ops.score_costs import Estimator

#: The most continuous numbers whose correlations the default guide learns. With half and with twice
#: of it, intervals on 2,000 nodes hold the truth as often as without correlations, or more often.
MOST_CORRELATED = 50
#: Of the default's chains, between two draws of parameters. On 2,000 nodes half of it takes .9 of
#: the time, with widths that vary more, and twice takes 1.3, with the same widths.
SWEEPS = 10


class AutoNMM(AutoGuide):
    r"""A guide for a program with one or several :func:`~pyro_nmm.models.nmm`.

    An autoguide draws the continuous sites :math:`\theta`. Then each field's choices, and its
    labels if these are latent, come from Gibbs chains at :math:`\theta`
    (:class:`~pyro_nmm.guides.Chains`), so that SVI maximises the bound of :math:`q(\theta)` alone:

    .. math::

        E_{q(\theta)} \left[ \log p(x, \theta) - \log q(\theta) \right] ,

    or, with the name of an ``estimator``, from :func:`~pyro_nmm.guides.ordered_guide` and
    :func:`~pyro_nmm.guides.evidence_guide`, whose looser bound overestimates concentrations.
    :func:`~pyro_nmm.guides.check_fit` says whether a fit has converged.

    The evidence of latent labels, ``(..., n, C)``, is computed: the program runs with every label
    in turn. A run with random labels checks at every step that the log-likelihood is a sum over
    nodes. Plates below latent labels may subsample, but cost as much as the whole plate. Discrete
    sites with ``infer={"enumerate": "parallel"}`` below labels are summed out, for
    ``TraceEnum_ELBO``, whether ``poutine.block`` hides them or not. Other hidden sites are refused
    if anything depends on them.

    **Several fields.** Labels of one field may be in the concentrations or the logits of another.
    With chains each field has its exact conditional given the states of all others, and sites may
    depend on several latent fields. By the bound, the evidence leaves later fields out.
    ``Predictive`` begins new chains in each call of the guide, so give it ``parallel=True``.

    **Scales.** ``poutine.scale`` around a field multiplies its :math:`\log p(x \mid \theta)`, or
    the bound on it. **Dropout.** Model and guide see the same masks: a call of the guide seeds
    torch's random numbers for the run of the model that follows.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.optim import ClippedAdam
    >>> from pyro_nmm.guides import check_fit
    >>> from pyro_nmm.models import nmm
    >>> hood, x = Neighborhood.grid(4, 4), torch.randn(16) + torch.arange(16) // 8
    >>> def model():
    ...     kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    ...     gap = pyro.sample("gap", dist.LogNormal(0.0, 1.0))
    ...     alpha = kappa[..., None, None] * torch.full((16, 2), 0.5)
    ...     y = nmm(hood, alpha, torch.zeros(hood.num_edges), collapsed=True)
    ...     pyro.sample("x", dist.Normal(gap[..., None] * y, 1.0).to_event(1), obs=x)
    >>> guide = AutoNMM(model)
    >>> svi = SVI(model, guide, ClippedAdam({"lr": 0.1, "lrd": 0.995}), Trace_ELBO())
    >>> losses = [svi.step() for _ in range(5)]  # 600 are enough, with four particles
    >>> found = check_fit(guide)
    >>> found.names, found.converged
    (['kappa', 'gap'], False)

    :param model: a Pyro program, also with plates, scopes and partly observed labels.
    :param guide: makes the autoguide of the continuous sites from a program, such as
        ``functools.partial(AutoNormal, init_scale=0.01)``. Default ``AutoMultivariateNormal`` for
        up to 50 numbers outside of plates that subsample, else ``AutoNormal``, whose intervals are
        too narrow if sites correlate (``docs/results/posteriors.md``).
    :param estimator: default ``Chains(10)``, of which every field has a copy; or one of
        :func:`~pyro_nmm.guides.ordered_guide` by name, for losses that weigh draws.
    :param create_plates: as for every autoguide, for plates that subsample around a field.
    :raises ValueError: for discrete sites of no field, ``AutoLaplaceApproximation``, labels whose
        evidence is no sum over nodes, subsamples that the model alone is given, and under
        ``TraceGraph_ELBO`` distributions that lose track of labels. Cost: a run of the program for
        each field, ``C + 1`` more if its labels are latent, and one more for several fields with
        chains.

    ``state_dict()`` has parameters and chains. Call a new guide once before ``load_state_dict()``.
    A fit that also restores the optimiser and ``torch.get_rng_state()`` continues as if it had not
    been interrupted.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable[[Callable], AutoGuide] | None = None,
        *,
        estimator: Estimator | Chains | None = None,
        create_plates: Callable | None = None,
    ) -> None:
        if isinstance(guide, AutoGuide):
            kind = type(guide).__name__
            raise ValueError(
                f"guide must make an autoguide from a program, got an {kind}: pass the class, "
                f"AutoNMM(model, {kind}), or functools.partial({kind}, ...) with options"
            )
        estimator = Chains(SWEEPS) if estimator is None else estimator
        check_estimator(estimator)
        super().__init__(model, create_plates=create_plates)
        self.estimator = estimator
        self.parents: Any = None if guide is None else guide(_of_parents(model))
        if isinstance(self.parents, AutoLaplaceApproximation):
            raise ValueError(
                "guide must not be AutoLaplaceApproximation, whose Hessian would lack the "
                "likelihood of the fields: use AutoMultivariateNormal"
            )
        self.chains = nn.ModuleDict()
        self._after: tuple[int, Tensor] | None = None  # random numbers of the next call
        self._data: dict[str, tuple[Tensor, int]] = {}  # of the step before, with versions
        self._rows: Tensor | None = None  # of the first field in the step before
        self._sums: list[str] = []  # enumerated sites
        self._tracked: set[str] = set()  # fields whose labels no distribution loses

    def __getstate__(self) -> dict:
        model = self._model
        state = super().__getstate__()  # which takes the model away
        self._model = model
        return {**state, "_model": model, "_data": {}, "_rows": None}

    def get_extra_state(self) -> tuple[int, Tensor] | None:
        return self._after

    def set_extra_state(self, state: tuple[int, Tensor] | None) -> None:
        self._after = state

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with poutine.block(), through_blocks():
            self.prototype_trace = poutine.trace(self.model).get_trace(*args, **kwargs)
        # Plates of observed sites may subsample too, and the model takes over the guide's choice.
        stacks = (s.get("cond_indep_stack", ()) for s in self.prototype_trace.nodes.values())
        frames = {frame.name: frame for stack in stacks for frame in stack}
        self._depths = [-frame.dim for frame in frames.values() if frame.dim is not None]
        drawn = (s for _, s in self.prototype_trace.iter_stochastic_nodes() if not is_enumerated(s))
        around = {frame.name for site in drawn for frame in site["cond_indep_stack"]}
        # Plates of data alone may have another size in each call.
        self._prototype_frames = {
            name: frame
            for name, frame in frames.items()
            if name in around or (frame.full_size or frame.size) > frame.size
        }
        self._latents = set()
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            discrete = not site_is_subsample(site) and site["fn"].support.is_discrete
            if discrete and is_enumerated(site):
                self._sums.append(name)
                continue
            if discrete and not _of_field(site):
                raise ValueError(
                    f"site {name!r} is discrete and belongs to no nmm: sum it out in the program, "
                    f'or by infer={{"enumerate": "parallel"}} and TraceEnum_ELBO below labels, or '
                    f"write a guide by hand, with ordered_guide or evidence_guide for the nmm"
                )
            if "nmm_counts" in site["infer"]:
                warnings.warn(
                    f"site {name!r} of nmm_counts is left to the autoguide, which overestimates "
                    f"concentrations: use MCMC(FieldGibbs(model))",
                    stacklevel=2,
                )
            self._latents.add(name)
        if self.parents is None:
            self.parents = self._default_guide()(_of_parents(self.model))
        with poutine.block():
            self._create_plates(*args, **kwargs)
            values = dict(self.parents(*args, **kwargs)) if self._continuous else {}
            run = self._runs(values, int(torch.randint(2**62, ())), args, kwargs, sums=False)
            check_hidden(run, self._sums)

    def _check_prototype(self, trace: Trace) -> None:
        """Called by ``parents``, whose sites are some of this program's."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        if self._after is not None and torch.initial_seed() == self._after[0]:
            torch.set_rng_state(self._after[1])
        self._create_plates(*args, **kwargs)
        values = dict(self.parents(*args, **kwargs)) if self._continuous else {}
        seed = int(torch.randint(2**62, ()))
        run = self._runs(values, seed, args, kwargs)
        with self.new_chains(self.estimator) if consumer(*PREDICTIVE) else nullcontext():
            self._draw_fields(values, run)
        # The model comes next. Its networks see the dropout masks that the guide's runs saw.
        self._after = seed, torch.get_rng_state()
        _seed(seed)
        return values

    @contextmanager
    def new_chains(self, estimator: Estimator | Chains) -> Iterator[None]:
        """New chains of an estimator beside those of the fit, which stay as they were."""
        kept = self.chains, self.estimator, self._data, self._rows
        del self.estimator  # no name can take the place of a module
        self.chains, self.estimator, self._rows = nn.ModuleDict(), estimator, None
        try:
            yield
        finally:
            del self.estimator
            self.chains, self.estimator, self._data, self._rows = kept

    def _default_guide(self) -> Callable[[Callable], AutoGuide]:
        sites = [site for _, site in self._continuous]
        frames = [frame for site in sites for frame in site["cond_indep_stack"]]
        whole = all((frame.full_size or frame.size) == frame.size for frame in frames)
        free = (biject_to(site["fn"].support).inv(site["value"]) for site in sites)
        size = sum(value.numel() for value in free)
        few = size <= MOST_CORRELATED and whole and self.create_plates is None
        return AutoMultivariateNormal if few else AutoNormal

    @property
    def _continuous(self) -> list[tuple[str, Any]]:
        sites = self.prototype_trace.iter_stochastic_nodes()
        return [(k, s) for k, s in sites if not (_not_of_parents(s) or site_is_subsample(s))]

    def _runs(self, values: dict, seed: int, args: tuple, kwargs: dict, sums: bool = True) -> Run:
        """Runs of the program with these values, beside the handlers around the guide; ``sums``
        gives enumerated sites all of their values."""
        indices = {name: plate.indices for name, plate in self.plates.items()}
        model, reveal = AgreedSubsamples(indices)(self.model), sums
        sums = sums and bool(self._sums)
        # Left of all plates, and of all dimensions that values may have.
        depths = [-frame.dim for frame in get_plates() if frame.dim is not None] + self._depths
        first = -1 - max([*depths, *(value.dim() for value in values.values())], default=0)

        def run(more: dict[str, Tensor]) -> Trace:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with ExitStack() as stack:
                stack.enter_context(poutine.block())
                stack.enter_context(torch.random.fork_rng(devices))
                _seed(seed)
                given = poutine.condition(model, data=indices | values | more)
                if reveal:
                    stack.enter_context(through_blocks())
                if sums:
                    given = poutine.enum(given, first_available_dim=first)
                trace = poutine.trace(given).get_trace(*args, **kwargs)
            for site in trace.nodes.values():
                if site["type"] == "sample" and not _of_field(site):
                    check_site(site, first if sums else None)
            return trace

        return run

    def _fields(self, run: Run) -> dict[str, Field]:
        # The data of a plate that the caller makes may be of its subsample alone.
        given = () if self.create_plates is None else self.plates
        return fields_of(run({}), self._latents.difference(given))

    def _draw_fields(self, values: dict, run: Run) -> None:
        """Adds the sites of all fields to the values, and to the trace of the guide."""
        fields, num_turns = self._fields(run), 1
        if isinstance(self.estimator, Chains):
            every = [self._chains(field) for field in fields.values()]
            seen = [] if consumer(*PREDICTIVE) else [*fields.values()][:1]
            other = any(self._of_other_data(field) for field in seen)
            for chains in every:
                chains.other_data = other and len(every) == 1
            if len(every) > 1:  # chains of one field depend on the states of others
                size = next((frame.size for frame in get_plates() if frame.name in COPIES), 1)
                starts = other or any(chains.num_chains < size for chains in every)
                num_turns = self.estimator.warmup_sweeps if starts else 1
                for field in fields.values():
                    values |= self._stored(field)
                fields = self._fields(run)
        for turn in range(num_turns):
            for number, name in enumerate(fields):
                field = self._fields(run)[name] if number or turn else fields[name]
                draw = self._guide_of(field, run)
                # Plates around the guide are still seen, by messages of another type.
                last = turn + 1 == num_turns
                quiet = nullcontext() if last else poutine.block(hide_types=["sample"])
                with quiet, self._around(field), _Named(field), poutine.trace() as sites:
                    draw()
                found = field.names & sites.trace.nodes.keys()
                values |= {key: sites.trace.nodes[key]["value"] for key in found}

    @contextmanager
    def _around(self, field: Field) -> Iterator[None]:
        """The plates, the mask and the scale of a field."""
        site = field.trace.nodes[field.name]
        with ExitStack() as stack:
            scale = site["scale"]
            for frame in site["cond_indep_stack"]:
                if frame.dim is not None:
                    stack.enter_context(self.plates[frame.name])
                    scale = scale * frame.size / (frame.full_size or frame.size)
            if isinstance(scale, Tensor) or abs(scale - 1) > 1e-9:
                stack.enter_context(poutine.scale(scale=scale))
            if site["mask"] is not None:
                stack.enter_context(poutine.mask(mask=site["mask"]))
            yield

    def _guide_of(self, field: Field, run: Run) -> Callable[[], Any]:
        prior, observed = field.prior, field.observed
        given = prior.hood, prior.alpha, prior.logits
        options: Any = {"collapsed": field.collapsed, "estimator": self.estimator}
        chains = isinstance(self.estimator, Chains)
        if chains:
            options["estimator"] = self._chains(field)
        if field.latent:
            if not (chains or field.name in self._tracked) and consumer(TraceGraph_ELBO):
                check_tracked(run, field)
                self._tracked.add(field.name)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not chains):
                evidence = field.evidence(run, given_later=chains)
            return partial(evidence_guide, *given, evidence, observed, **options)
        options["relabel"] = prior.channel
        return partial(ordered_guide, *given, field.labels(), observed, **options)

    def _of_other_data(self, field: Field) -> bool:
        """Whether observed values or masks are other ones than in the step before, if the field's
        rows are the same: the data of other rows are their own."""
        trace = field.trace
        own = self._latents.union(self.plates)  # which a run is given
        whole: dict[str, Any] = {
            name: site["value"]
            for name, site in trace.nodes.items()
            if site["type"] == "sample"
            and site["is_observed"]
            and name not in own
            and all((f.full_size or f.size) == f.size for f in site["cond_indep_stack"])
        }
        for name in [*whole]:
            fn, masks = trace.nodes[name]["fn"], [trace.nodes[name]["mask"]]
            while hasattr(fn, "base_dist"):
                masks.append(getattr(fn, "_mask", None))
                fn = fn.base_dist
            given = enumerate(mask for mask in masks if isinstance(mask, Tensor))
            whole |= {f"{name}, mask {number}": mask for number, mask in given}
        rows = field.prior.hood.restrict(field.observed).nodes
        same_rows = self._rows is not None and torch.equal(self._rows, rows)
        old, changed, self._rows = (self._data if same_rows else {}), [], rows
        self._data = {k: (v, 0 if v.is_inference() else v._version) for k, v in whole.items()}
        for name in old.keys() & whole.keys():
            (before, version), (value, now) = old[name], self._data[name]
            equal = torch.equal(before.nan_to_num(), value.nan_to_num())
            changed += [] if (version == now if before is value else equal) else [name]
        if changed:
            assert isinstance(self.estimator, Chains)
            warn_of_other_data(f"data of sites {changed}", self.estimator.warmup_sweeps)
        return bool(changed)

    def _chains(self, field: Field) -> Chains:
        key = field.name.replace(".", "/")  # no name of a module has a dot
        if key not in self.chains:
            chains: Any = copy.deepcopy(self.estimator)
            self.chains.add_module(key, chains)
            chains.of_prediction = bool(consumer(*PREDICTIVE))
        return self.chains[key]  # type: ignore[return-value]

    def _stored(self, field: Field) -> dict[str, Tensor]:
        """The states of a field's chains; of new chains, the sites of the field's run."""
        names, rows = field.unknown, field.prior.hood.restrict(field.observed)
        sites = torch.broadcast_tensors(*(field.trace.nodes[name]["value"] for name in names))
        with self._around(field):
            value = self._chains(field).stored(rows, sites)
        return dict(zip(names, value.unbind(-2), strict=True))

    @torch.no_grad()
    def posterior(
        self, *args: Any, num_samples: int | None = 64, num_sweeps: int = 20, **kwargs: Any
    ) -> dict[str, Posterior | list[Posterior]]:
        """The posterior of each field at the medians of the continuous sites, by the name of its
        choices; within plates a list, of a subsample's elements in their order. Fields that depend
        on one another are each given a draw of the others.

        :param num_samples, num_sweeps: of chains, as for
            :meth:`~pyro_nmm.EvidenceConditional.posterior`; or ``None`` and 0 for an exact sum.
            A field with ``relabel`` has weighted draws without sweeps.
        """
        with poutine.block():
            values = self.median(*args, **kwargs)
            self._create_plates(*args, **kwargs)
            run = self._runs(values, int(torch.randint(2**62, ())), args, kwargs)
            self._draw_fields(values, run)
            fields = self._fields(run).items()
            return {name: f.posterior(run, num_samples, num_sweeps) for name, f in fields}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Medians of the continuous sites, as the autoguide has them; of 99 draws of a flow."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        if not self._continuous:
            return {}
        try:
            return self.parents.median(*args, **kwargs)
        except NotImplementedError:
            with poutine.block(), torch.no_grad():
                self._create_plates(*args, **kwargs)
                draws = [self.parents(*args, **kwargs) for _ in range(99)]
            return {k: torch.stack([d[k] for d in draws]).median(0).values for k in draws[0]}

    def quantiles(self, quantiles: list[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of the continuous sites, as the autoguide has them."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return self.parents.quantiles(quantiles, *args, **kwargs) if self._continuous else {}


class _Named(Messenger):
    """Gives the sites of a guide the names of a field's: its scope, and their numbers."""

    def __init__(self, field: Field) -> None:
        super().__init__()
        self.field = field

    def _pyro_sample(self, msg: Any) -> None:
        msg["name"] = self.field.site(msg["name"]) or beside(self.field.name, msg["name"])


def _seed(seed: int) -> None:
    # torch.manual_seed formats a stack for every kind of device that is not initialised.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _of_field(site: Any) -> bool:
    return "nmm" in site["infer"]


def _of_parents(model: Callable) -> Callable:
    return poutine.block(model, hide_fn=_not_of_parents)


def _not_of_parents(site: Any) -> bool:
    return _of_field(site) or is_enumerated(site)
