# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pyro
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.guides.ordered import evidence_guide
from pyro_nmm.models.latent import (
    Emission,
    FieldPrior,
    HiddenField,
    Values,
    check_edge_attr,
    hidden_field,
    sample_field,
)
from pyro_nmm.models.param_store import register
from pyro_nmm.validation import check_all_rows


class HiddenFieldGuide(nn.Module):
    r"""
    A hidden field and its parameter-free guide as a pair of Pyro programs.
    :func:`~pyro_nmm.models.fit_field` fits the same model by expectation maximisation.

    .. math::

        E_q \Big[\sum_i f_i\Big] + \log p(\theta) \le \log p(w \mid \theta) + \log p(\theta)

    with :math:`q` and :math:`f_i` of :class:`~pyro_nmm.EvidenceConditional`.

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm import sources
    >>> from pyro_nmm.models import NormalEmission
    >>> hood = sources.grid(12, 12, stride=4)
    >>> truth = (torch.arange(144) % 12 >= 6).long()
    >>> x = 3.0 * truth[:, None] + torch.randn(144, 1)
    >>> pair = HiddenFieldGuide(NormalEmission(num_labels=2), hood, x)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    >>> svi = SVI(pair.model, pair.guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step() for _ in range(100)]
    >>> pair.values()["mean"].flatten().sort().values.round().tolist()
    [0.0, 3.0]
    >>> pair.field().probs.shape  # (N, C)
    torch.Size([144, 2])

    ``emission``, ``hood``, ``data`` and ``edge_attr``, of shape ``(num_edges, F)``, are parameters
    of :func:`~pyro_nmm.models.fit_field`. The emission also starts the fit.

    :param str estimator: of the gradient, see :class:`~pyro_nmm.OrderedConditional`.
    :param str name: of the parameters in Pyro's store.
    """

    def __init__(
        self,
        emission: Emission,
        hood: Neighborhood,
        data: Any,
        edge_attr: Tensor | None = None,
        *,
        estimator: str = "reward_to_go",
        name: str = "field",
    ) -> None:
        super().__init__()
        check_all_rows(hood)
        self.emission, self.hood, self.data = emission, hood, emission.check(hood, data)
        self.edge_attr, self.estimator = check_edge_attr(hood, edge_attr), estimator
        self.name, self.start = name, emission.start(self.data, hood)
        evidence = emission.log_prob(self.start, self.data)
        self.prior = FieldPrior.of(emission.num_labels, self.edge_attr).to(evidence)

    def values(self) -> Values:
        """The emission's parameters, from Pyro's store."""
        support = self.emission.support
        return {
            key: pyro.param(f"{self.name}.{key}", value, constraint=support[key])
            for key, value in self.start.items()
        }

    def model(self) -> Tensor:
        """:func:`~pyro_nmm.models.hidden_field`; returns the labels."""
        register(f"{self.name}.prior", self.prior)
        arguments = self.hood, self.prior, self.emission, self.values(), self.data
        return hidden_field(*arguments, self.edge_attr)

    def guide(self) -> Tensor:
        """:func:`~pyro_nmm.guides.evidence_guide`; returns the labels."""
        register(f"{self.name}.prior", self.prior)
        evidence = self.emission.log_prob(self.values(), self.data)
        parameters = self.prior(self.hood, self.edge_attr)
        return evidence_guide(
            self.hood, *parameters, evidence, collapsed=True, estimator=self.estimator
        )

    def field(self, **options) -> HiddenField:
        """The fitted field: :func:`~pyro_nmm.models.sample_field`, whose ``options`` these are."""
        values = {key: value.detach() for key, value in self.values().items()}
        arguments = self.emission, self.hood, self.data, self.prior, values, self.edge_attr
        return sample_field(*arguments, **options)
