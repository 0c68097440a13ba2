# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""The posterior of a few parameters by scores at some points, with choices sampled at each.

By Fisher's identity chains of choices have the gradient of :math:`\log p(\theta, y)` at a point,
and the probabilities of a sweep remove most of its noise. Gradients at a few points around the mode
give a polynomial in place of the log-density, as in a nested Laplace approximation [1], whose
points these are, or with gradients on a grid [2]. How many sweeps are worth a given error in
standard deviations of the posterior does not depend on the size of the graph.

[1] Håvard Rue, Sara Martino, Nicolas Chopin (2009) "Approximate Bayesian inference for latent
Gaussian models by using integrated nested Laplace approximations", Journal of the Royal Statistical
Society B 71, https://doi.org/10.1111/j.1467-9868.2008.00700.x.
[2] Bazahica, Avalos-Pacheco, Moores, Roininen (2026), https://arxiv.org/abs/2603.29436.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import MultivariateStudentT
from pyro.infer.mcmc import RandomWalkKernel
from torch import Tensor

from pyro_nmm import AveragedPosterior
from pyro_nmm.arguments import check_integers
from pyro_nmm.distributions.path import PathEstimate
from pyro_nmm.fitting import bar, with_gradients
from pyro_nmm.guides.gibbs import FieldGibbs
from pyro_nmm.guides.langevin import Langevin

#: Parameters of a posterior: a polynomial of degree four in eight has 494 coefficients.
MOST_NUMBERS = 8
#: Steps to the mode, each after one sweep; and how much longer the first ones are than those of EM,
#: which moves by the observed share of the information, a twentieth or less on large graphs. Each
#: that goes back makes them shorter: without it two climbs on three nodes end 1.2 standard
#: deviations apart, with it .3.
CLIMB, LONGER = 60, 4.0
#: Pilots of a few points that go from there to the mode and the widths. Two or three are enough.
MOST_TURNS = 10
#: Rounds of points, until their center is less than so many standard deviations from the mean, and
#: widths by a factor of less than exp(OFF / 2).
ROUNDS, OFF = 4, 0.5
#: Radii of the points in standard deviations: half of a normal density of two parameters lies
#: within the first, and 94 % within the second.
RADII = 1.2, 2.4
#: Batches of sweeps at a point, for the error of its score.
BATCHES = 20
#: Draws from which moments are weighted means: their own errors are .01 standard deviations.
DRAWS = 20_000
#: Repetitions with the errors of scores, for the errors of moments.
REPEATS = 30
#: Residuals of scores that do not matter, in units of the score one standard deviation off. With .1
#: a posterior of five nodes passed whose width was 16 % too small, without one was refused that was
#: right to 2 %.
CLOSE = 0.03
#: Of 400 simulated data sets of 2,000 nodes 357 have a misfit below half of it and 35 up to it,
#: with the truth a root mean square of 1.0 and 1.2 standard deviations from the mean; 4 up to twice
#: of it and 4 above, of 1.1 to 2.0.
MOST_MISFIT = 2.6
#: Two ways to one mode end .5 standard deviations apart in the median of these. Two of the 400 are
#: refused; with half of it 10 would be, and twice of it could hide modes that are near.
MOST_APART = 4.0


class NestedPosterior(NamedTuple):
    """What :func:`nested_posterior` found; ``print`` shows a table and whether to believe it."""

    names: list[str]  #: of the ``d`` unconstrained numbers of continuous sites
    mean: Tensor  #: ``(d,)``
    sd: Tensor  #: ``(d,)`` standard deviations
    mean_error: Tensor  #: ``(d,)`` Monte Carlo error of the means, in standard deviations
    sd_error: Tensor  #: ``(d,)`` and of the logarithm of the standard deviations
    misfit: float  #: residuals of scores by their errors, near one if the polynomial is right
    apart: float  #: how far two climbs from opposite sides end apart, in standard deviations
    effective_size: float  #: what the draws are worth by their weights
    draws: Tensor  #: ``(T, d)``
    log_weights: Tensor  #: ``(T,)``
    log_density: float  #: of the unconstrained numbers at the means
    log_density_error: float  #: its Monte Carlo error
    gibbs: FieldGibbs  #: chains of choices

    @property
    def fits(self) -> bool:
        """Whether the polynomial fits its scores, and both climbs lead to one mode."""
        return self.misfit < MOST_MISFIT and self.apart < MOST_APART

    def __str__(self) -> str:
        size = max(map(len, self.names))
        lines = [f"{'':{size}}      mean ± error          sd ± error"]
        for row in zip(self.names, *map(Tensor.tolist, self[1:5]), strict=True):
            name, mean, sd, error, of_sd = row
            cells = f"{mean:10.3f} ± {error * sd:<8.3f}{sd:11.3f} ± {sd * of_sd:.3f}"
            lines.append(f"{name:{size}}{cells}")
        lines.append(f"misfit {self.misfit:.2f}, modes {self.apart:.1f} standard deviations apart")
        if self.apart >= MOST_APART:
            lines.append("two modes: use FieldGibbs with several chains")
        elif not self.fits:
            lines.append("the polynomial does not fit: use FieldGibbs")
        return "\n".join(lines)

    def sample(self, num_samples: int) -> dict[str, Tensor]:
        """Draws of the continuous sites ``(num_samples, ...)``, with their constraints, such as
        ``Predictive(model, draws)`` takes."""
        check_integers(1, num_samples=num_samples)
        drawn = torch.multinomial(self.log_weights.exp(), num_samples, replacement=True)
        parts = [self._at(position).values for position in self.draws[drawn]]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    @torch.no_grad()
    def posterior(
        self, num_draws: int = 16, num_samples: int = 8, num_sweeps: int = 20
    ) -> dict[str, AveragedPosterior]:
        """The posterior of each field's labels, averaged over draws of the parameters, by the name
        of its choices.

        :param int num_draws: of the parameters. For each, ``num_samples`` chains of ``num_sweeps``
            sweeps, as in :meth:`~pyro_nmm.EvidenceConditional.posterior`.
        :raises ValueError: for fields in plates.
        """
        check_integers(1, num_draws=num_draws, num_samples=num_samples)
        check_integers(0, num_sweeps=num_sweeps)
        drawn = torch.multinomial(self.log_weights.exp(), num_draws, replacement=True)
        members: dict[str, list] = {}
        for position in self.draws[drawn]:
            program = self._at(position)
            run = partial(self.gibbs._run_given, program.values)
            for name, field in program.fields.items():
                members.setdefault(name, []).append(field.posterior(run, num_samples, num_sweeps))
        if plated := [name for name, found in members.items() if isinstance(found[0], list)]:
            raise ValueError(f"fields {plated} are in plates: give sample(n) to Predictive")
        return {name: AveragedPosterior(found) for name, found in members.items()}

    @torch.no_grad()
    def log_evidence(self, num_chains: int = 4, num_points: int = 41) -> PathEstimate:
        r"""The logarithm of the evidence, in nats, with a standard error,

        .. math::

            \log p(y) = \log p(y \mid \theta) + \log p(\theta) - \log p(\theta \mid y)

        at the means, with :meth:`~pyro_nmm.NeighborMixture.path_likelihood` and its arguments.

        :raises ValueError: for latent labels, which depend on data at other sites.
        """
        if not self.gibbs._fixed:
            raise ValueError("log_evidence is of observed labels")
        program = self._at(self.mean)
        value = float(program.rest) - self.log_density
        variance = self.log_density_error**2
        for name in program.fields:
            q = self.gibbs._conditional(program, name)
            found = q.path_likelihood(num_chains, num_points)
            value += found.log_likelihood.sum().item()
            variance += found.standard_error.square().sum().item()
        return PathEstimate(*torch.tensor([value, variance**0.5]).double())

    def _at(self, position: Tensor) -> Any:
        """A run of the program, with others' labels drawn anew."""
        params = self.gibbs._params_at(position)
        self.gibbs._sweep(params, 1)
        return self.gibbs._at(params)


class _Polynomial:
    """Gradients of monomials of some degree in ``d`` numbers, and their values."""

    def __init__(self, size: int, degree: int) -> None:
        every = [
            powers
            for total in range(1, degree + 1)
            for powers in combinations_with_replacement(range(size), total)
        ]
        counts = [[powers.count(k) for k in range(size)] for powers in every]
        self.powers = torch.tensor(counts, dtype=torch.double)  # (M, d)

    def values(self, x: Tensor) -> Tensor:
        """``(K, M)`` at ``(K, d)``."""
        return x[:, None].pow(self.powers).prod(-1)

    def gradients(self, x: Tensor) -> Tensor:
        """``(K, d, M)``."""
        columns = []
        for k in range(x.shape[1]):
            lower = self.powers.clone()
            lower[:, k] = (lower[:, k] - 1).clamp(min=0)
            columns.append(self.powers[:, k] * x[:, None].pow(lower).prod(-1))
        return torch.stack(columns, 1)


class _Scores:
    """Scores at points in the coordinates of a normal density, with their errors."""

    def __init__(self, positions: Tensor, scores: Tensor) -> None:
        if not scores.isfinite().all():
            where = positions[~scores.isfinite().all(-1).all(-1)][0].tolist()
            raise ValueError(f"the program has no finite gradient at {where}: use FieldGibbs")
        self.positions, self.mean = positions, scores.mean(1)  # scores: (K, batches, d)
        centered = scores - self.mean[:, None]
        number = scores.shape[1]
        self.covariance = centered.mT @ centered / (number * (number - 1))

    def fit(
        self, center: Tensor, root: Tensor, degree: int, noise: Tensor | None = None
    ) -> tuple[_Polynomial, Tensor, float]:
        """A polynomial in ``root^-1 (position - center)``, by least squares weighted by errors,
        its coefficients, and the misfit."""
        size = len(center)
        x = torch.linalg.solve_triangular(root, (self.positions - center).T, upper=False).T
        polynomial = _Polynomial(size, degree)
        covariance = root.T @ self.covariance @ root
        # Scores without noise are those of a prior alone: to a thousandth of their unit.
        lower = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(size).double())
        scores = self.mean if noise is None else self.mean + noise
        target = torch.linalg.solve_triangular(lower, (scores @ root)[..., None], upper=False)
        gradients = polynomial.gradients(x)
        inputs = torch.linalg.solve_triangular(lower, gradients, upper=False)
        inputs, target = inputs.flatten(0, 1), target.flatten()
        coefficients = torch.linalg.lstsq(inputs, target).solution
        free = max(1, len(target) - inputs.shape[1])
        lower = torch.linalg.cholesky(covariance + CLOSE**2 * torch.eye(size).double())
        left = (gradients @ coefficients - scores @ root)[..., None]
        residual = torch.linalg.solve_triangular(lower, left, upper=False).square().sum().item()
        # Covariances of a few batches are too small as often as too large.
        return polynomial, coefficients, residual / free * (BATCHES - size - 2) / (BATCHES - 1)

    def plane(self, center: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of a quadratic polynomial at the center, and its derivative."""
        polynomial, coefficients, _ = self.fit(center, root, 2)
        ends = torch.cat([torch.zeros_like(root[:1]), torch.eye(len(center)).double()])
        line, *others = polynomial.gradients(ends) @ coefficients
        return line, torch.stack(others, 1) - line[:, None]

    def noise(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self.covariance)
        normal = torch.randn_like(self.mean) * values.clamp(min=0).sqrt()
        return (vectors @ normal[..., None])[..., 0]


def _points(size: int, number: int) -> Tensor:
    """``(K, d)``: the center, and points at two radii, each near the one before."""
    if size == 1:
        return torch.tensor([0.0, 0.8, 1.6, 2.4, -0.8, -1.6, -2.4]).double()[:, None]
    rings = [torch.zeros(1, size).double()]
    if size == 2:
        for radius, count, first in zip(RADII, (6, 8), (0.0, 0.3), strict=True):
            angle = first + 2 * math.pi * torch.arange(count).double() / count
            rings.append(radius * torch.stack([angle.cos(), angle.sin()], 1))
        return torch.cat(rings)
    turn = 0
    while sum(map(len, rings)) < number:
        rotation, _ = torch.linalg.qr(torch.randn(size, size).double())
        radius = RADII[turn % 2] * math.sqrt(size / 2)
        rings.append(radius * torch.cat([rotation, -rotation]))
        turn += 1
    return torch.cat(rings)


class _Weighted(NamedTuple):
    mean: Tensor
    covariance: Tensor
    log_weights: Tensor
    log_total: Tensor  #: logarithm of the integral of the exponential


def _moments(x: Tensor, base: Tensor, polynomial: _Polynomial, coefficients: Tensor) -> _Weighted:
    """Of draws ``x`` with log-density ``base``, weighted to the polynomial's."""
    log_ratios = polynomial.values(x) @ coefficients - base
    log_weights = log_ratios.log_softmax(0)
    weights = log_weights.exp()
    mean = weights @ x
    centered = x - mean
    log_total = log_ratios.logsumexp(0) - math.log(len(x))
    return _Weighted(mean, (centered.T * weights) @ centered, log_weights, log_total)


@pyro.validation_enabled(False)  # after a run with it
@with_gradients
def nested_posterior(
    model: Callable, *args: Any, num_sweeps: int = 200, **kwargs: Any
) -> NestedPosterior:
    r"""The posterior of up to eight continuous numbers of a program with fields, of graphs of any
    size.

    A climb finds the mode. Chains of choices at some points around it, ``num_sweeps`` sweeps each,
    have the gradients of :math:`\log p(\theta, y)`, to which a polynomial :math:`P` of degree four
    is fitted,

    .. math::

        \min_P \sum_k \big\| S_k^{-1/2} (\nabla P(\theta_k) - g_k) \big\|^2 , \qquad
        g_k \approx \nabla \log p(\theta_k, y) .

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import nmm
    >>> hood, y = Neighborhood.grid(8, 8), torch.arange(64) // 32
    >>> def model(y):
    ...     kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    ...     alpha = kappa * torch.full((64, 2), 0.5)
    ...     nmm(hood, alpha, torch.zeros(hood.num_edges), y, collapsed=True)
    >>> posterior = nested_posterior(model, y, num_sweeps=40)
    >>> posterior.sample(5)["kappa"].shape
    torch.Size([5])

    Its numbers are those without constraints, such as :math:`\log \kappa`. ``print`` shows them
    with their Monte Carlo errors, and says if the polynomial does not fit or there are two modes.
    ``posterior()`` has labels, averaged over parameters, and ``log_evidence()`` compares models.

    :param model: a Pyro program as for :class:`~pyro_nmm.guides.FieldGibbs`, and its ``args`` and
        ``kwargs``.
    :param int num_sweeps: at each of 15 points for two numbers, of 7 for one. Errors fall with the
        root of it: with 200 they are about a tenth of a standard deviation.
    :return: a ``NestedPosterior``, with means and standard deviations ``(d,)`` of ``d`` numbers.
    :raises ValueError: for more than eight numbers, and discrete sites. Cost: 4,000 sweeps for two
        numbers with 200 sweeps each point, and gradients of 500 runs of the program.
    """
    check_integers(BATCHES, num_sweeps=num_sweeps)
    gibbs = FieldGibbs(model, RandomWalkKernel, num_moves=0)
    gibbs.setup(0, *args, **kwargs)
    if gibbs._discrete:
        raise ValueError(f"sites {[*gibbs._discrete]} are discrete and of no nmm: use FieldGibbs")
    if gibbs._counts:
        raise ValueError(f"sites {gibbs._counts} belong to fields of counts: use FieldGibbs")
    names = gibbs._names()
    size = len(names)
    if not 0 < size <= MOST_NUMBERS:
        raise ValueError(
            f"model has {size} continuous numbers, and a polynomial 1 to {MOST_NUMBERS}: use "
            f"FieldGibbs or AutoNMM"
        )
    first = torch.cat([part.flatten() for part in gibbs.kernel.initial_params.values()]).double()
    (other, _), (center, root) = (_mode(gibbs, at, num_sweeps // 8) for at in (-first, first))
    degree = 4 if size <= 4 else 3
    number = 1 + math.ceil(1.3 * len(_Polynomial(size, degree).powers) / size)
    points = _points(size, number)
    x, base = _proposals(size, points.norm(dim=1).max().item())
    for turn in range(ROUNDS):
        found = _scores_at(gibbs, center + points @ root.T, num_sweeps, BATCHES)
        polynomial, coefficients, misfit = found.fit(center, root, degree)
        moments = _moments(x, base, polynomial, coefficients)
        widths = torch.linalg.eigvalsh(moments.covariance).log() / 2
        if max(moments.mean.norm(), 2 * widths.abs().max()) < OFF:
            break
        if turn < ROUNDS - 1:
            center = center + root @ moments.mean
            root = root @ _root(moments.covariance)
    else:
        misfit = math.inf
    refits = [found.fit(center, root, degree, found.noise())[:2] for _ in range(REPEATS)]
    others = [_moments(x, base, *refit) for refit in refits]
    sd = (root @ moments.covariance @ root.T).diag().sqrt()
    values = polynomial.values(moments.mean[None])[0]
    log_density = values @ coefficients - moments.log_total - root.diag().log().sum()
    densities = [values @ c - o.log_total for (_, c), o in zip(refits, others, strict=True)]
    means = torch.stack([root @ other.mean for other in others])
    sds = torch.stack([(root @ other.covariance @ root.T).diag().sqrt() for other in others])
    apart = torch.linalg.solve_triangular(root, (other - center)[:, None], upper=False)
    return NestedPosterior(
        names,
        center + root @ moments.mean,
        sd,
        _spread(means) / sd,
        _spread(sds.log()),
        misfit,
        apart.norm().item(),
        1 / (2 * moments.log_weights).logsumexp(0).exp().item(),
        center + x @ root.T,
        moments.log_weights,
        log_density.item(),
        _spread(torch.stack(densities)).item(),
        gibbs,
    )


def _spread(values: Tensor) -> Tensor:
    """Half of the interval that holds two thirds, which a few refits far away do not change."""
    low, high = values.quantile(torch.tensor([0.16, 0.84]).to(values), 0)
    return (high - low) / 2


def _proposals(size: int, radius: float) -> tuple[Tensor, Tensor]:
    """Draws of a Student t within one and a half radii of all points, where the polynomial may be
    trusted, and their log-densities."""
    unit = torch.eye(size, dtype=torch.double)
    law = MultivariateStudentT(5.0 * unit[0, 0], 0 * unit[0], unit)
    x = law.sample((DRAWS,))
    inside = x.norm(dim=1) < 1.5 * radius
    return x[inside], law.log_prob(x[inside]) - inside.double().mean().log()


def _mode(gibbs: FieldGibbs, center: Tensor, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """The mode that new chains find from a position, and a root of the covariance there."""
    size, way, steps, gibbs.states = len(center), [], Langevin(0), {}
    longer, move = LONGER, torch.zeros_like(center)
    gibbs._sweep(gibbs._params_at(center), 1)
    for step in range(CLIMB):
        if not step & (step - 1):
            steps = Langevin(0)
            steps.learn(gibbs._point_at(center), gibbs._point_at)  # given choices
        score = _scores(gibbs, center, 1, 1)[0]
        longer = max(1.0, 0.7 * longer) if score @ move < 0 else longer  # a step too far
        move = (longer * steps.inverse @ score).clamp(-0.5, 0.5)
        center = center + move
        way.append(center)
    center, root = torch.stack(way[-CLIMB // 4 :]).mean(0), _root(4 * steps.inverse)
    cross = RADII[0] * torch.cat([torch.zeros(1, size), torch.eye(size), -torch.eye(size)]).double()
    for turn in range(MOST_TURNS):
        found = _scores_at(gibbs, center + cross @ root.T, max(20, num_sweeps), size + 4)
        line, slope = found.plane(center, root)
        values, vectors = torch.linalg.eigh(-(slope + slope.T) / 2)
        # A step no longer, and a covariance no other, than a few points can tell.
        root_of = vectors * values.clamp(0.1, 10.0).rsqrt() @ vectors.T
        move = root_of @ root_of @ line
        far = move.norm().item()
        center = center + root @ move * min(1.0, 3.0 / far)
        root = _root(root @ root_of @ root_of @ root.T)
        if turn and far < 1.0:
            break
    return center, root


def _root(covariance: Tensor) -> Tensor:
    root, failed = torch.linalg.cholesky_ex(covariance)
    if failed or not root.isfinite().all():
        raise ValueError(
            "model has scores too noisy for a polynomial of its log-density: raise num_sweeps, or "
            "use FieldGibbs"
        )
    return root


def _scores_at(gibbs: FieldGibbs, positions: Tensor, num_sweeps: int, num_batches: int) -> _Scores:
    scores = [_scores(gibbs, position, num_sweeps, num_batches) for position in bar(positions)]
    return _Scores(positions, torch.stack(scores))


def _scores(gibbs: FieldGibbs, position: Tensor, num_sweeps: int, num_batches: int) -> Tensor:
    """``(num_batches, d)``, of all sweeps together, after some that forget the last point."""
    params, found, before = gibbs._params_at(position), [], num_sweeps // BATCHES
    program = gibbs._at(params)
    for _ in range(num_batches):
        score = torch.zeros_like(position)
        for name, field in program.fields.items():
            q = gibbs._conditional(program, name)
            states = gibbs._states_of(field, q)
            states, chosen = q.swept_with_shares(states, num_sweeps // num_batches, before)
            gibbs._put(field, states)
            score += program.gradient(program.joints[name].average(*chosen[2:]))
            program = gibbs._at(params)  # parameters and data of fields depend on labels
        found.append(score + program.gradient(torch.as_tensor(program.rest)))
        before = 0
    return torch.stack(found)
