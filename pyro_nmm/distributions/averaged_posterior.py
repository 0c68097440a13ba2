# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors under several draws of the parameters, averaged."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_nmm.arguments import as_shape
from pyro_nmm.distributions.posterior import Method, Posterior
from pyro_nmm.model_arguments import as_nodes
from pyro_nmm.neighborhood import Neighborhood


class AveragedPosterior(Posterior):
    r"""Posteriors of one graph's labels under draws :math:`\theta_b` of the parameters, averaged.

    .. math::

        p(y \mid y_\tau) \approx \frac{1}{B} \sum_{b=1}^B p(y \mid y_\tau, \theta_b)

    Labels of nodes that share no source depend on each other too, through the parameters, so counts
    in large sets vary more than under one member. It has the queries of a
    :class:`~pyro_nmm.Posterior`, at ``B`` times their cost, but for draws.

    >>> from pyro_nmm import Neighborhood, NeighborMixture
    >>> hood, y = Neighborhood(torch.tensor([[0], [1]]), num_nodes=2), torch.tensor([1, -1])
    >>> alphas = torch.tensor([[[4.0, 1.0], [1.0, 1.0]], [[1.0, 4.0], [1.0, 1.0]]])
    >>> mixes = [NeighborMixture(hood, alpha, torch.zeros(3)) for alpha in alphas]
    >>> members = [mix.condition(y, torch.tensor([True, False])) for mix in mixes]
    >>> AveragedPosterior(members).marginals()
    tensor([[0.0000, 1.0000],
            [0.4583, 0.5417]])

    :meth:`condition` observes labels in every member. Members keep equal weights, as components do
    by default: new labels change what is known about choices, not about the parameters.

    :param Sequence members: posteriors ``(B,)`` of the same nodes, given the same labels.
    :raises ValueError: for no members, and members of other graphs or given other labels.
    """

    def __init__(self, members: Sequence[Posterior]) -> None:
        self.members = tuple(members)
        if not self.members:
            raise ValueError("members must hold a posterior at least")
        first = self.members[0]
        super().__init__(first.components, is_exact=False, weighted=False)
        sizes = [(p.hood.num_nodes, p.hood.num_edges, p.num_classes) for p in self.members]
        if other := [size for size in sizes if size != sizes[0]]:
            got = f"(nodes, edges, labels) {sizes[0]} and {other[0]}"
            raise ValueError(f"members must be of one graph and one set of labels, got {got}")
        for member in self.members:
            same = torch.equal(member.observed, first.observed)
            if not first.components.latent:
                same = same and torch.equal(member.labels, first.labels)
            if member.components.latent != first.components.latent or not same:
                raise ValueError("members must be given the same labels of the same nodes")
        self._probs = _mean([p._probs[p._place[self.nodes]] for p in self.members])
        self.labels[self.nodes] = self._probs.argmax(-1)  # of latent labels, on average

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_members={len(self.members)}, {self.members[0]})"

    def condition(
        self, y: Tensor, observed: Tensor | None = None, num_samples: int | None = None
    ) -> "AveragedPosterior":
        """Every member given more labels: :meth:`Posterior.condition`, with its arguments."""
        return AveragedPosterior([p.condition(y, observed, num_samples) for p in self.members])

    def _marginals(self, rows: Neighborhood) -> Tensor:
        return _mean([member._marginals(rows) for member in self.members])

    def pairwise(self, pairs: Tensor) -> Tensor:
        """``(P, C, C)``: the mean of the members' tables, see :meth:`Posterior.pairwise`."""
        return _mean([member.pairwise(pairs) for member in self.members])

    def log_marginal(self, nodes: Tensor, labels: Tensor) -> Tensor:
        """``(...)``: :meth:`Posterior.log_marginal` of labels ``(..., K)`` of a few nodes."""
        return _log_mean([member.log_marginal(nodes, labels) for member in self.members])

    def log_likelihood(
        self, y: Tensor, observed: Tensor | None = None, num_particles: int = 64
    ) -> Tensor:
        """:meth:`Posterior.log_likelihood` of labels ``(N,)``, with so many particles a member."""
        return _log_mean([p.log_likelihood(y, observed, num_particles) for p in self.members])

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = (), nodes: Tensor | None = None) -> Tensor:
        """``(*sample_shape, K)``: joint draws, each of a random member."""
        nodes, shape = as_nodes(self.hood, nodes), as_shape(sample_shape)
        numbers = torch.randint(len(self.members), (shape.numel(),), device=nodes.device)
        value = nodes.new_empty(shape.numel(), len(nodes))
        for number, member in enumerate(self.members):
            draws = (numbers == number).nonzero()[:, 0]
            if len(draws):
                value[draws] = member.sample((len(draws),), nodes)
        return value.view(*shape, len(nodes))

    def predict(self, nodes: Tensor | None = None, method: Method = "marginal") -> Tensor:
        """:meth:`Posterior.predict`, but ``"sequential"``, which continues one member alone."""
        if method == "sequential":
            cure = "take posterior.members[0], or ask for the fitted parameters, num_draws=0"
            raise ValueError(f"method='sequential' needs one draw of the parameters: {cure}")
        return super().predict(nodes, method)


def _mean(tables: list[Tensor]) -> Tensor:
    return sum(tables[1:], tables[0]) / len(tables)


def _log_mean(log_probs: list[Tensor]) -> Tensor:
    return torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))
