# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import operator

import pyro
import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides.agreement import Agreement
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.models.nmm import nmm


class AmortizedNMM(nn.Module):
    r"""
    A network and an NMM as one model and guide pair for Pyro's SVI.

    .. math::

        (\alpha, \text{logits}) = f_\theta(X), \qquad y \sim \mathrm{NMM}(\alpha, \text{logits})

    The network runs once for each pair of guide and model, so both see the same dropout
    mask: once a step with vectorized particles. All its parameters are learned.

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from torch_geometric.nn import GCN
    >>> from pyro_nmm.models import NMMNetwork
    >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> x, y, train = torch.eye(3), torch.tensor([0, 1, -1]), torch.tensor([True, True, False])
    >>> hood = Neighborhood(edge_index, num_nodes=3)
    >>> network = NMMNetwork(GCN(3, 16, 2, 2), GCN(3, 16, 1), num_classes=2)
    >>> program = AmortizedNMM(hood, network)
    >>> elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True)
    >>> svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    >>> losses = [svi.step(x, edge_index, y=y, observed=train) for _ in range(50)]
    >>> losses[-1] < losses[0]
    True
    >>> program.mixture(x, edge_index).condition(y, train, num_samples=16).predict()[:2]
    tensor([0, 1])

    Sites are those of :func:`~pyro_nmm.models.nmm`; parameters are named after ``name``.

    :param Neighborhood hood: The neighbourhoods.
    :param nn.Module network: ``(hood, *inputs) -> (alpha, logits)``, see
        :class:`~pyro_nmm.models.NMMNetwork`.
    :param bool collapsed: Whether ``z`` is integrated out; the same bound, faster.
    :param str estimator: see :class:`~pyro_nmm.OrderedConditional`.
    :param str name: of the network's parameters in Pyro's store.
    :param Agreement agreement: lets unlabelled nodes teach the network too, in training mode,
        through a factor ``agreement`` in the model; the loss is then no bound any more. Its
        memory advances with every run of the model: once a step with vectorized particles.
    """

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        *,
        collapsed: bool = True,
        estimator: str = "later",
        name: str = "nmm",
        agreement: Agreement | None = None,
    ) -> None:
        super().__init__()
        self.hood, self.network, self.agreement = hood, network, agreement
        self.collapsed, self.estimator, self.name = collapsed, estimator, name
        self._handed: tuple | None = None

    def forward(self, *inputs) -> tuple[Tensor, Tensor]:
        """``alpha`` of shape ``(N, C)`` and ``logits`` of shape ``(num_edges,)``."""
        pyro.module(self.name, self.network)
        store = pyro.get_param_store()
        for key, parameter in self.network.named_parameters():
            if store[f"{self.name}$$${key}"].data_ptr() != parameter.data_ptr():
                raise ValueError(
                    f"Pyro's parameter store already holds another network named {self.name!r}, "
                    f"so this one would not learn: call pyro.clear_param_store() first, or "
                    f"give each program its own name="
                )
        return self.network(self.hood, *inputs)

    def guide(self, *inputs, y: Tensor, observed: Tensor | None = None) -> None:
        """:func:`~pyro_nmm.guides.ordered_guide` at the network's output."""
        parameters = self(*inputs)
        self._handed = inputs, self._state(), parameters
        ordered_guide(
            self.hood, *parameters, y, observed,
            collapsed=self.collapsed, estimator=self.estimator,
        )  # fmt: skip

    def model(self, *inputs, y: Tensor | None = None, observed: Tensor | None = None) -> Tensor:
        """:func:`~pyro_nmm.models.nmm` at the network's output."""
        handed, self._handed = self._handed, None
        if handed is not None and self._is_from(handed, inputs):
            # The guide ran on these inputs and weights just before: its output, not a second
            # dropout mask.
            alpha, logits = handed[2]
        else:
            alpha, logits = self(*inputs)
        if self.agreement is not None and self.training and y is not None:
            mixture = NeighborMixture(self.hood, alpha, logits)
            size = self.hood.restrict(observed).num_rows
            pyro.factor("agreement", -size * self.agreement.of(mixture, y, observed))
        return nmm(self.hood, alpha, logits, y, observed, collapsed=self.collapsed)

    def mixture(self, *inputs) -> NeighborMixture:
        """The fitted distribution, for queries: evaluation mode, without gradients."""
        mode = self.training
        try:
            with torch.no_grad():
                return NeighborMixture(self.hood, *self.eval()(*inputs))
        finally:
            self.train(mode)

    def _state(self) -> tuple:
        versions = [p._version for p in self.network.parameters()]
        return self.training, torch.is_grad_enabled(), versions

    def _is_from(self, handed: tuple, inputs: tuple) -> bool:
        same = len(handed[0]) == len(inputs) and all(map(operator.is_, handed[0], inputs))
        return same and handed[1] == self._state()
