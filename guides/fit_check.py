# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Distance of a fit of :class:`~pyro_nmm.guides.AutoNMM` from convergence.

A normal guide of mean :math:`m` and covariance :math:`L L^T` does not move any more where the
scores :math:`g(\theta) = \nabla \log p(y, \theta)` of its own draws :math:`\theta = m + L x` have

.. math::

    E[L^T g] = 0, \qquad E[L^T g \, x^T] = -I ,

the gradients of the bound by :math:`m` and :math:`L`. A least-squares plane of :math:`L^T g` over
:math:`x` has the first as its intercept and the second as its slope, so that Newton's method goes
from the one by the other. By Fisher's identity chains of choices have the score of :math:`\log p(y
\mid \theta)`.
"""

import math
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions.util import sum_rightmost
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.ops.stats import split_gelman_rubin
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_nmm.arguments import check_integers
from pyro_nmm.fitting import with_gradients
from pyro_nmm.guides.automatic import MOST_CORRELATED, AutoNMM
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.dependence import DependenceCheck, check_dependence
from pyro_nmm.guides.program import fields_of

#: A fit has converged if no mean would move by more standard deviations. Intervals of 90 % that are
#: off by so much hold 89 %; by twice as much, 86 %; by half of it, 89.7 %.
MOST_SHIFT = 0.25
#: And if no width is off by a larger factor. Intervals of 90 % then hold 83 or 95 %; with a factor
#: of 1.4 76 or 98 %, and of 1.1 87 or 93 %.
MOST_WIDTH = 1.2
#: Chains agree below this value (Gelman et al., "Bayesian Data Analysis", section 11.5).
MOST_R_HAT = 1.1
#: Draws of labels, at least: two of them may then be as far off as data that are refused. Of half
#: of them none may, and one of five runs of README's program misses its data; twice take twice the
#: time.
REPLICATES = 256
#: Draws of the guide for its mean and covariance, as a multiple of those that have chains. With 64
#: draws they add .016 to the error of a shift, with half of it .022, with twice .011.
MOMENTS = 64
#: Of all draws together, for guides of a million numbers: 80 MB; half or twice for half or twice.
MOST_NUMBERS = 10_000_000


class FitCheck(NamedTuple):
    """Results of :func:`check_fit`; ``print`` shows a table and its conclusions."""

    names: list[str]  #: of the ``d`` numbers of continuous sites
    median: Tensor  #: ``(d,)`` of the guide
    shift: Tensor  #: ``(d,)`` standard deviations by which means would move
    shift_error: Tensor  #: ``(d,)`` its standard error
    width: Tensor  #: ``(d,)`` factors by which standard deviations would grow
    width_error: Tensor  #: ``(d,)`` standard error of its logarithm
    r_hat: Tensor  #: ``(d,)`` of scores, by two chains at each draw of the guide
    replicates: dict[str, DependenceCheck]  #: of each field with observed labels, by its choices

    @property
    def converged(self) -> bool | None:
        """Whether shifts and widths are small; ``None`` if their errors are too large to tell."""
        width = math.log(MOST_WIDTH)
        off = torch.cat([self.shift.abs() / MOST_SHIFT, self.width.log().abs() / width])
        error = torch.cat([self.shift_error / MOST_SHIFT, self.width_error / width])
        return None if (error > 1).any() else bool((off <= 1).all())

    @property
    def mixed(self) -> bool:
        """Whether chains agree."""
        return bool((self.r_hat < MOST_R_HAT).all())

    @property
    def fits(self) -> bool:
        """Whether the model makes such labels."""
        return all(found.fits for found in self.replicates.values())

    def __str__(self) -> str:
        size = max(map(len, self.names))
        lines = [f"{'':{size}}    median    shift           width           R-hat"]
        for name, *numbers in zip(self.names, *map(Tensor.tolist, self[1:7]), strict=True):
            median, shift, error, width, of_width, r_hat = numbers
            cells = f"{median:10.3g}{shift:9.2f} ± {error:4.2f}"
            cells += f"{width:9.2f} ± {width * of_width:4.2f}{r_hat:9.2f}"
            lines.append(f"{name:{size}}{cells}")
        if self.converged is None:
            lines.append("errors are too large to tell: raise num_draws or num_rounds")
        else:
            lines.append("converged" if self.converged else "not converged: take more steps")
        lines += [] if self.mixed else ["chains do not agree: raise their num_sweeps"]
        for found in self.replicates.values():
            lines += found.lines(4)
        lines += [] if self.fits else ["the model does not make such labels"]
        return "\n".join(lines)


@with_gradients
def check_fit(
    guide: AutoNMM,
    *args: Any,
    num_draws: int = 64,
    num_rounds: int = 10,
    num_sweeps: int = 10,
    **kwargs: Any,
) -> FitCheck:
    r"""Whether a fit has converged, its chains mix, and its model makes such labels.

    New chains, two at each of ``num_draws`` draws :math:`\theta` of the guide, give the scores
    :math:`\nabla \log p(y, \theta)` of the posterior. By these, one step of Newton's method to
    the best guide would move the means by ``shift`` and change the widths. Then labels are drawn
    anew from the model, and :func:`~pyro_nmm.guides.check_dependence` compares them with the data.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import nmm
    >>> hood, y = Neighborhood.grid(6, 6), torch.arange(36) // 18
    >>> def model(y):
    ...     kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    ...     alpha = kappa[..., None, None] * torch.full((36, 2), 0.5)
    ...     nmm(hood, alpha, torch.zeros(hood.num_edges), y, collapsed=True)
    >>> guide = AutoNMM(model)
    >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    >>> losses = [svi.step(y) for _ in range(10)]  # too few
    >>> check_fit(guide, y).converged
    False

    A fit that has converged is the best of its guide's family, not the posterior: widths of a guide
    without correlations are those given all other numbers, so that too narrow marginals pass. The
    guide's chains are left as they were; networks are in the mode that they have, and running means
    such as ``BatchNorm``'s see these runs. See ``FitCheck`` for what is returned, with a number for
    each of ``(d,)`` unconstrained values of sites.

    :param args, kwargs: of the model.
    :param int num_draws: of the guide; errors fall with the root of it.
    :param int num_rounds: gradients of the program, each after ``num_sweeps`` sweeps. The first
        comes after 50.
    :raises ValueError: for another guide, or one that has not been called. Cost: that of
        ``num_rounds`` steps with ``2 * num_draws`` particles.
    """
    if not isinstance(guide, AutoNMM):
        raise ValueError(f"guide must be an AutoNMM, got {type(guide).__name__}")
    check_integers(8, num_draws=num_draws)
    check_integers(4, num_rounds=num_rounds)
    if guide.prototype_trace is None:
        raise ValueError("guide has made no step: fit it before check_fit")
    if not guide._continuous:
        raise ValueError("model has no continuous sites, so that its guide has nothing to learn")
    draws = _Draws(guide, args, kwargs, num_draws)
    with guide.new_chains(Chains(num_sweeps)):
        scores = torch.stack([draws.scores() for _ in range(num_rounds)])
    pairs = scores.unflatten(1, (2, -1)).transpose(0, 1)  # (2, T, K, d)
    r_hat = split_gelman_rubin(pairs, chain_dim=0, sample_dim=1)  # (K, d)
    r_hat = r_hat.where(~r_hat.isnan(), 1.0)  # of scores that no choice changes
    x, root, g = draws.x, draws.root, pairs.mean((0, 1)) @ draws.root
    # One slope by all numbers where there are draws enough: a ridge has a long way to go.
    inputs = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    if 4 * inputs.shape[1] <= num_draws:
        line = torch.linalg.lstsq(inputs, g).solution
        residual = g - inputs @ line
        start, slope = line[0], line[1:]
    else:
        centered = x - x.mean(0)
        slope = ((centered * g).mean(0) / centered.square().mean(0)).diag()
        start = g.mean(0) - x.mean(0) @ slope
        residual = g - start - x @ slope
    error = (residual.square().sum(0) / (num_draws - 2) / num_draws).sqrt()
    values, vectors = torch.linalg.eigh(-(slope + slope.T) / 2)
    # Where the posterior looks flat, a step is at most a hundred times as long.
    newton = root @ (vectors / values.clamp(min=0.01)) @ vectors.T
    precision, square = (-slope.diag()).clamp(min=0.01), root.square()
    variance, sd = square @ (1 / precision), square.sum(1).sqrt()
    of_log = square @ (error / precision.square()) / variance / 2
    # Moments of the guide have errors, too: they are of a number of draws.
    return FitCheck(
        draws.names,
        draws.median,
        newton @ start / sd,
        ((newton.square() @ error.square()) / sd.square() + 1 / draws.number).sqrt(),
        variance.sqrt() / sd,
        (of_log.square() + 1 / (2 * draws.number)).sqrt(),
        r_hat.square().mean(0).sqrt(),
        draws.replicates(),
    )


class _Draws:
    """Draws of a guide's continuous sites without their constraints, for two chains each."""

    def __init__(self, guide: AutoNMM, args: tuple, kwargs: dict, size: int) -> None:
        self.guide, self.given, self.size = guide, (args, kwargs), size
        sites = dict(guide._continuous)
        frames = {f.name: f for site in sites.values() for f in site["cond_indep_stack"]}
        if part := [name for name, f in frames.items() if (f.full_size or f.size) > f.size]:
            raise ValueError(
                f"plates {part} subsample continuous sites, of which each call sees others: "
                f"give the program all elements, by a plate without subsample_size"
            )
        self.sites = {name: biject_to(site["fn"].support) for name, site in sites.items()}
        self.shapes = {k: self.sites[k].inv(site["value"]).shape for k, site in sites.items()}
        self.nesting = max(guide._depths, default=0)
        width = sum(shape.numel() for shape in self.shapes.values())
        self.number = number = max(size, min(MOMENTS * size, MOST_NUMBERS // width))
        with torch.no_grad(), poutine.block():
            guide._create_plates(*args, **kwargs)
            with pyro.plate("num_particles_vectorized", number, dim=-1 - self.nesting):
                values = guide.parents(*args, **kwargs)
        free = {name: transform.inv(values[name]) for name, transform in self.sites.items()}
        flat = torch.cat([value.reshape(number, -1) for value in free.values()], 1).double()
        if (flat == flat[0]).all(0).any():
            raise ValueError("guide has no widths, as AutoDelta: there is no posterior to check")
        covariance = flat.T.cov() if 1 < width <= MOST_CORRELATED else flat.var(0).diag()
        self.root = torch.linalg.cholesky(covariance)
        centered = (flat[:size] - flat.mean(0)).T
        self.x = torch.linalg.solve_triangular(self.root, centered, upper=False).T
        self.free, self.names, medians = {}, [], []
        for name, value in free.items():
            self.free[name] = value[:size].repeat(2, *[1] * (value.dim() - 1)).requires_grad_()
            median = value.median(0).values
            whole = self.sites[name](median)
            if whole.numel() == median.numel():
                median = whole
            else:  # such as of a simplex
                name = f"{name}, unconstrained"
            median, several = median.flatten(), median.numel() > 1
            self.names += [f"{name}[{k}]" for k in range(len(median))] if several else [name]
            medians.append(median)
        self.median = torch.cat(medians)

    def _program(self, *args: Any, **kwargs: Any) -> None:
        """The guide with its continuous sites at these draws."""
        guide, values = self.guide, {}
        guide._create_plates(*args, **kwargs)
        for name, transform in self.sites.items():
            site = guide.prototype_trace.nodes[name]
            value, dim = transform(self.free[name]), site["fn"].event_dim
            density = transform.inv.log_abs_det_jacobian(value, self.free[name])
            density = sum_rightmost(density, density.dim() - value.dim() + dim)
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(guide.plates[frame.name])
                values[name] = pyro.sample(name, Delta(value, density, event_dim=dim))
        guide._draw_fields(values, guide._runs(values, int(torch.randint(2**62, ())), args, kwargs))

    def scores(self) -> Tensor:
        """``(2 K, d)``: of the posterior, at states of choices that are swept on."""
        kind, number = TraceEnum_ELBO if self.guide._sums else Trace_ELBO, 2 * self.size
        elbo = kind(number, max_plate_nesting=self.nesting, vectorize_particles=True)
        args, kwargs = self.given
        loss = elbo.differentiable_loss(self.guide.model, self._program, *args, **kwargs)
        found = torch.autograd.grad(loss, [*self.free.values()])
        return -number * torch.cat([part.reshape(number, -1) for part in found], 1).double()

    @torch.no_grad()
    def replicates(self) -> dict[str, DependenceCheck]:
        """Checks of observed labels by labels drawn at draws of the parameters."""
        found: dict[str, list] = defaultdict(list)
        (args, kwargs), model = self.given, poutine.uncondition(self.guide.model)
        with poutine.block():
            plain = poutine.trace(self.guide.model).get_trace(*args, **kwargs)
        fields = fields_of(plain, self.guide._latents)
        of_fields = {name for field in fields.values() for name in field.names}
        data = {
            name: site["value"]
            for name, site in plain.nodes.items()
            if site["type"] == "sample"
            and (site_is_subsample(site) or (site["is_observed"] and name not in of_fields))
        }
        seen = {name: field for name, field in fields.items() if not field.latent}
        for k in range(max(self.size, REPLICATES) if seen else 0):
            k %= self.size
            at = {n: t(self.free[n][k].view(self.shapes[n])) for n, t in self.sites.items()}
            given = poutine.condition(model, data | at)
            with poutine.block():
                trace = poutine.trace(given).get_trace(*args, **kwargs)
            for name, field in seen.items():
                labels: Any = trace.nodes[field.site("y")]["value"]
                found[name].append(labels.int())  # half of the memory
        return {
            name: check_dependence(
                field.prior.hood, field.labels(), torch.stack(found[name]), field.observed
            )
            for name, field in seen.items()
        }
