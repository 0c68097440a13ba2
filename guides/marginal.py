# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.guides.shared_forward import SharedForward


class MarginalGuide(SharedForward):
    r"""
    A guide for any Pyro program by a family whose choices are summed out, such as
    :class:`~pyro_nmm.MembershipMixture`.

    .. math::

        \mathrm{KL}\big(p(s) \,\|\, p^*(s) / Z\big) - \log Z
            = E_p \Big[ \log \sum_c p(c) \, p(s \mid c) - \log p^*(s) \Big]

    >>> from pyro.distributions import Normal
    >>> from pyro.infer import Trace_ELBO
    >>> from pyro_nmm import MembershipMixture
    >>> class Free(nn.Module):
    ...     def forward(self, hood):
    ...         return torch.zeros(4, 2), torch.zeros(hood.num_edges)
    >>> def target():
    ...     pyro.sample("s", Normal(0.0, 2.0).expand([4, 2]).to_event(2))
    >>> def family(hood, log_odds, logits):
    ...     return MembershipMixture(hood, log_odds, logits, temperature=0.5)
    >>> pair = MarginalGuide(Neighborhood.grid(2, 2), Free(), target, family, site="s")
    >>> Trace_ELBO(num_particles=64).loss(pair.model, pair.guide) > 0  # KL of 8 log-odds
    True

    :param Neighborhood hood: The neighbourhoods.
    :param nn.Module network: ``(hood, *inputs) -> (parameters, logits)``.
    :param target: a Pyro program with a site for the family and the same inputs.
    :param family: ``(hood, parameters, logits)``, the network's output, to a distribution.
    :param str site: name of the family's values in the program.
    :param str name: of the network's parameters in Pyro's store.
    :param credit: ``(family, values, *inputs)``, with the values of the target's sites, to zero
        with a derivative that is added to the bound's; for families whose samples lack theirs.
    """

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        target: Callable[..., Any],
        family: Callable[[Neighborhood, Any, Tensor], Any],
        *,
        site: str = "y",
        name: str = "mixture",
        credit: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(hood, network, name, family)
        self.target, self.site, self.credit = target, site, credit

    def guide(self, *inputs) -> Tensor:
        """The family's site."""
        return self.draw(*self.give(inputs))

    def draw(self, parameters: Any, logits: Tensor) -> Tensor:
        """The site of :meth:`guide`, for an output of the network."""
        return pyro.sample(self.site, self.family(self.hood, parameters, logits))

    def model(self, *inputs) -> Any:
        """The target, with the factor ``credit`` if there is one."""
        parameters, logits = self.take(inputs)
        if self.credit is None or not torch.is_grad_enabled():
            return self.target(*inputs)
        family = self.family(self.hood, parameters, logits)
        with poutine.trace() as tracer:
            result = self.target(*inputs)
        nodes = tracer.trace.nodes.items()
        values = {key.rpartition("/")[2]: node["value"] for key, node in nodes
                  if node["type"] == "sample"}  # fmt: skip
        pyro.factor("credit", self.credit(family, values, *inputs))
        return result
