# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import pyro
from pyro.distributions import Dirichlet
from torch import Tensor

from pyro_nmm import Neighborhood, OrderedConditional
from pyro_nmm.concentrations import written_out
from pyro_nmm.guides.evidence import latent_sites
from pyro_nmm.models.one_event import OneEvent
from pyro_nmm.ops.counts import posterior_alpha
from pyro_nmm.relabel import as_channel, evidence_of


def ordered_guide(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    y: Tensor,
    observed: Tensor | None = None,
    *,
    relabel: Tensor | None = None,
    collapsed: bool = False,
    estimator: str = "reward_to_go",
) -> None:
    r"""
    The parameter-free guide of :func:`~pyro_nmm.models.nmm`: choices node after node from
    :math:`q(c \mid y)`, then ``z`` from its conjugate posterior.

    .. math::

        c \sim \prod_i p(c_i \mid y_i, c_{<i}, y_{<i}), \qquad
        z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j(c, y))

    Sites ``c`` of event shape ``(n,)`` and, unless ``collapsed``, ``z`` of ``(N, C)``; where edges
    relabel by matrices, ``u`` too.
    It reuses the model's ``alpha`` and ``logits``, so the bound on :math:`\log p(y)` needs
    nothing else to be learned. Made for ``TraceGraph_ELBO``, whose gradient it makes precise:

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from torch.distributions import constraints
    >>> from pyro_nmm.models import nmm
    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    >>> y = torch.tensor([0, 0, 1])
    >>> def model():
    ...     alpha = pyro.param("alpha", torch.ones(3, 2), constraint=constraints.positive)
    ...     logits = pyro.param("logits", torch.zeros(hood.num_edges))
    ...     nmm(hood, alpha, logits, y)
    >>> def guide():
    ...     alpha = pyro.param("alpha", torch.ones(3, 2), constraint=constraints.positive)
    ...     logits = pyro.param("logits", torch.zeros(hood.num_edges))
    ...     ordered_guide(hood, alpha, logits, y)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True)
    >>> svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step() for _ in range(100)]
    >>> losses[-1] < losses[0]
    True

    :param str estimator: how choices are charged with costs in the gradient, see
        :class:`~pyro_nmm.OrderedConditional`; bind it with ``functools.partial`` where model
        and guide take the same arguments.

    The other parameters are those of :func:`~pyro_nmm.models.nmm`; ``y`` is required.
    """
    if y is None:
        raise ValueError("y is required: the guide is the posterior of c given labels")
    if not as_channel(relabel).certain:
        evidence = evidence_of(hood, relabel, y, observed)
        arguments = hood, written_out(alpha), logits, evidence, observed, None, estimator
        latent_sites(arguments, collapsed, site="u")
        return
    q = OrderedConditional(hood, alpha, logits, y, observed, estimator=estimator, relabel=relabel)
    with OneEvent(q.observed_rows.num_rows):
        c = pyro.sample("c", q)
        if not collapsed:
            table = written_out(q.alpha)
            pyro.sample("z", Dirichlet(posterior_alpha(table, c, q.borrowed(c))).to_event(1))
