# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import pyro
from pyro.distributions import Delta, Dirichlet
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_nmm import EvidenceConditional, Neighborhood
from pyro_nmm.models.one_event import OneEvent
from pyro_nmm.ops.counts import posterior_alpha
from pyro_nmm.ops.score_costs import ScoreEstimator


def evidence_guide(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    evidence: Tensor,
    observed: Tensor | None = None,
    *,
    collapsed: bool = False,
    estimator: str = "reward_to_go",
) -> Tensor:
    r"""
    The parameter-free guide of :func:`~pyro_nmm.models.nmm` where its labels are latent: choices
    and labels node after node given what hangs on the labels, then ``z`` from its conjugate
    posterior.

    .. math::

        c, u \sim \prod_i p(c_i, u_i \mid w_i, c_{<i}, u_{<i}), \qquad
        z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j(c, u))

    The model is ``y = nmm(hood, alpha, logits)`` and, below it, any emission of the labels, whose
    log-density at each label is the evidence. Parameters of the emission are learned along.

    >>> import torch
    >>> from pyro.distributions import Normal
    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm.models import nmm
    >>> hood = Neighborhood.grid(4, 4)
    >>> alpha, logits = torch.ones(16, 2), torch.zeros(hood.num_edges)
    >>> w = torch.tensor([-1.0, 1.0]).repeat_interleave(8) + 0.3 * torch.randn(16)
    >>> def emission(y):
    ...     means = pyro.param("means", torch.tensor([-0.1, 0.1]))
    ...     return Normal(means[y], 0.5)
    >>> def model():
    ...     y = nmm(hood, alpha, logits, collapsed=True)
    ...     pyro.sample("w", emission(y).to_event(1), obs=w)
    >>> def guide():
    ...     evidence = emission(torch.arange(2)).log_prob(w[:, None])
    ...     evidence_guide(hood, alpha, logits, evidence, collapsed=True)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    >>> svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step() for _ in range(100)]
    >>> bool(pyro.param("means")[1] > 0.5)
    True

    Sites ``c`` and ``y`` of event shape ``(n,)`` and, unless ``collapsed``, ``z`` of ``(M, C)``.
    Choices and labels are drawn together, at the auxiliary site ``c and y``, and given to the two,
    of which ``c`` has the density. The other parameters are those of
    :class:`~pyro_nmm.EvidenceConditional`, whose bound and gradient these are.

    :return: ``(..., n)`` the labels.
    """
    arguments = hood, alpha, logits, evidence, observed, None, estimator
    return latent_sites(arguments, collapsed)


def latent_sites(arguments: tuple, collapsed: bool, site: str = "y") -> Tensor:
    """The sites of :func:`evidence_guide`, that of the borrowed labels under another name."""
    q = _Draw(*arguments)
    with OneEvent(q.rows.num_rows):
        both = pyro.sample(f"c and {site}", q, infer={"is_auxiliary": True})
        c, labels = both.unbind(-2)
        pyro.sample("c", Delta(c, q.density(both), event_dim=1))
        pyro.sample(site, Delta(labels, event_dim=1))
        if not collapsed:
            pyro.sample("z", Dirichlet(posterior_alpha(q.alpha, c, labels)).to_event(1))
    return labels


class _Draw(EvidenceConditional):
    """
    The score of a draw without its density, which another site has: Pyro's ``Trace_ELBO`` leaves
    the density of an auxiliary site out of the costs, and would be biased.
    """

    def density(self, value: Tensor) -> Tensor:
        return super().log_prob(value)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.alpha.new_zeros(value.shape[:-2])

    def score_parts(self, value: Tensor) -> ScoreParts:
        log_prob, score, entropy = super().score_parts(value)
        if self.estimator is not ScoreEstimator.REINFORCE:
            entropy = entropy - log_prob
        return ScoreParts(self.log_prob(value), score, entropy)
