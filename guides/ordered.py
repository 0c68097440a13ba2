# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Guides without parameters: choices, and latent labels, node after node."""

from typing import Any

import pyro
from pyro.distributions import Delta, Dirichlet
from pyro.distributions.score_parts import ScoreParts
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_nmm import EvidenceConditional, Neighborhood, OrderedConditional
from pyro_nmm.arguments import as_member
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.guides.chains import Chains, States
from pyro_nmm.models.plates import OneEvent, check_plates
from pyro_nmm.ops.counts import posterior_alpha
from pyro_nmm.ops.score_costs import Estimator, ScoreEstimator


def ordered_guide(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    y: Tensor,
    observed: Tensor | None = None,
    *,
    relabel: Tensor | None = None,
    collapsed: bool = False,
    estimator: Estimator | Chains = "reward_to_go",
) -> None:
    r"""The parameter-free guide of :func:`~pyro_nmm.models.nmm`: choices node after node from
    :math:`q(c \mid y)`, the paper's equation (6), then ``z`` from its conjugate posterior.

    .. math::

        c \sim \prod_i p(c_i \mid y_i, c_{<i}, y_{<i}), \qquad
        z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j(c, y))

    It has the sites of the model, other than ``y``, and no parameters of its own.
    ``TraceGraph_ELBO`` has the gradient of the bound on :math:`\log p(y)` with the least variance.

    >>> from pyro.infer import TraceGraph_ELBO
    >>> from pyro_nmm.models import nmm
    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    >>> alpha, logits = torch.ones(3, 2), torch.zeros(hood.num_edges)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True)
    >>> elbo.loss(nmm, ordered_guide, hood, alpha, logits, torch.tensor([0, 0, 1])) > 0
    True

    Parameters as for :func:`~pyro_nmm.models.nmm`, with ``y`` ``(..., N)`` required. ``estimator``
    and cost as for :class:`~pyro_nmm.OrderedConditional`; or ``estimator`` is
    :class:`~pyro_nmm.guides.Chains`, with which choices come from :math:`p(c \mid y)`.

    :raises ValueError: without ``y``, for an unknown estimator, and as
        :func:`~pyro_nmm.models.nmm`; in ``RenyiELBO`` unless ``estimator`` is ``"reinforce"``.
    """
    if y is None:
        raise ValueError("y is required: the guide is the posterior of c given labels")
    prior = Parameters.of(hood, alpha, logits, relabel)
    if not prior.channel.keeps:
        evidence = prior.evidence(y, observed)
        _latent_sites(hood, prior.alpha, logits, evidence, observed, estimator, collapsed, "u")
        return
    name, chains = _split(estimator)
    q = OrderedConditional(hood, alpha, logits, y, observed, estimator=name)
    check_plates(q.observed_rows, q.batch_shape)
    with OneEvent(q.observed_rows, q.batch_shape):
        c = pyro.sample("c", q if chains is None else States(*chains.draw(q), 1))
        if not collapsed:
            posterior = posterior_alpha(q.alpha, c, q.data_of(q.observed_rows))
            pyro.sample("z", Dirichlet(posterior).to_event(1))
        elif any(isinstance(h, InitMessenger | ConditionMessenger) for h in _PYRO_STACK):
            # Predictive runs the guide: nmm draws replicates given the choices and these labels.
            borrowed = q.data_of(q.observed_rows).expand(c.shape)
            borrowed = Delta(borrowed, event_dim=1).mask(False)
            pyro.sample("u", borrowed, infer={"is_auxiliary": True})


def evidence_guide(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    evidence: Tensor,
    observed: Tensor | None = None,
    *,
    collapsed: bool = False,
    estimator: Estimator | Chains = "reward_to_go",
) -> Tensor:
    r"""The parameter-free guide of :func:`~pyro_nmm.models.nmm` whose labels are latent: choices
    and labels node after node given the evidence, then ``z`` from its conjugate posterior.

    .. math::

        c, u \sim \prod_i p(c_i, u_i \mid w_i, c_{<i}, u_{<i}), \qquad
        z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j(c, u))

    The model is ``y = nmm(hood, alpha, logits)`` and, below it, any emission of the labels, whose
    log-density at each label is the evidence. Parameters of the emission are learned along.

    >>> from pyro.distributions import Normal
    >>> from pyro.infer import TraceGraph_ELBO
    >>> from pyro_nmm.models import nmm
    >>> hood = Neighborhood.grid(4, 4)
    >>> prior = hood, torch.ones(16, 2), torch.zeros(hood.num_edges)
    >>> w = torch.tensor([-1.0, 1.0]).repeat_interleave(8) + 0.3 * torch.randn(16)
    >>> def emission(y):
    ...     return Normal(pyro.param("means", torch.tensor([-0.1, 0.1]))[y], 0.5)
    >>> def model():
    ...     y = nmm(*prior, collapsed=True)
    ...     pyro.sample("w", emission(y).to_event(1), obs=w)
    >>> def guide():
    ...     evidence = emission(torch.arange(2)).log_prob(w[:, None])
    ...     evidence_guide(*prior, evidence, collapsed=True)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    >>> elbo.loss(model, guide) > 0
    True

    It has the sites of the model, and an auxiliary site ``c and y``, at which choices and labels
    are drawn together. Parameters and cost as for :class:`~pyro_nmm.EvidenceConditional`.

    :return: ``(..., n)`` the labels.
    :raises ValueError: as :func:`ordered_guide`, and for evidence that rules out every label of a
        node.
    """
    return _latent_sites(hood, alpha, logits, evidence, observed, estimator, collapsed, "y")


def check_estimator(estimator: Any) -> None:
    """Refuse what is neither a name nor chains."""
    if isinstance(estimator, type):
        name = estimator.__name__
        raise ValueError(f"estimator must be an object, got the class {name}: write {name}()")
    if not isinstance(estimator, Chains):
        as_member(ScoreEstimator, estimator=estimator)


def _split(estimator: Estimator | Chains) -> tuple[Estimator, Chains | None]:
    """The estimator of a conditional, and chains in its place."""
    check_estimator(estimator)
    return ("no_score", estimator) if isinstance(estimator, Chains) else (estimator, None)


def _latent_sites(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    evidence: Tensor,
    observed: Tensor | None,
    estimator: Estimator | Chains,
    collapsed: bool,
    site: str,
) -> Tensor:
    name, chains = _split(estimator)
    q = _Draw(hood, alpha, logits, evidence, observed, None, name)
    check_plates(q.rows, q.batch_shape, latent=True)
    with OneEvent(q.rows, q.batch_shape):
        if chains is None:
            both = pyro.sample(f"c and {site}", q, infer={"is_auxiliary": True})
            density = q.density(both)
        else:
            both, density = chains.draw(q)
        c, labels = both.unbind(-2)
        pyro.sample("c", (Delta if chains is None else States)(c, density, event_dim=1))
        pyro.sample(site, Delta(labels, event_dim=1))
        if not collapsed:
            pyro.sample("z", Dirichlet(posterior_alpha(q.alpha, c, labels)).to_event(1))
    return labels


class _Draw(EvidenceConditional):
    """The score of a draw without its density, which site ``c`` has: ``Trace_ELBO`` would leave the
    density of an auxiliary site out of the costs. The gradient of the density goes with the score
    if it is plain, because ``RenyiELBO`` takes site ``c`` for a reparameterised one.
    """

    def density(self, value: Tensor) -> Tensor:
        density = super().log_prob(value)
        return density.detach() if self.estimator is ScoreEstimator.REINFORCE else density

    def log_prob(self, value: Tensor) -> Tensor:
        if self.estimator is not ScoreEstimator.REINFORCE:
            return self.alpha.new_zeros(value.shape[:-2])
        density = super().log_prob(value)
        return density - density.detach()

    def score_parts(self, value: Tensor) -> ScoreParts:
        log_prob, score, entropy = super().score_parts(value)
        if self.estimator is not ScoreEstimator.REINFORCE:
            entropy = entropy - log_prob
        return ScoreParts(self.log_prob(value), score, entropy)
