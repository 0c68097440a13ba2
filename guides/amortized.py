# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import pyro
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.guides.consistency import Consistency
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import SharedForward
from pyro_nmm.models.networks import Parameters
from pyro_nmm.models.nmm import nmm


class AmortizedNMM(SharedForward):
    r"""
    A network and an NMM as one model and guide pair for Pyro's SVI.

    .. math::

        (\alpha, \text{logits}) = f_\theta(X), \qquad y \sim \mathrm{NMM}(\alpha, \text{logits})

    The network runs once for each pair of guide and model, so both see the same dropout mask: once
    a step with vectorized particles. Sites are those of :func:`~pyro_nmm.models.nmm`.

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
    >>> program.mixture(x, edge_index).condition(y, train, num_samples=16).predict()[:2]
    tensor([0, 1])

    :param nn.Module network: a :class:`~pyro_nmm.models.ParameterNetwork` with an ``alpha`` of
        shape ``(N, C)``.
    :param bool collapsed: Whether ``z`` is integrated out; the same bound, faster.
    :param str estimator: see :class:`~pyro_nmm.OrderedConditional`.
    :param str name: of the network's parameters in Pyro's store.
    :param Consistency consistency: a penalty in training mode, the factor ``consistency`` of the
        model; the loss is then no bound. Its memory advances with every run of the model.
    """

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        *,
        collapsed: bool = True,
        estimator: str = "reward_to_go",
        name: str = "nmm",
        consistency: Consistency | None = None,
    ) -> None:
        super().__init__(hood, network, name)
        self.consistency, self.collapsed, self.estimator = consistency, collapsed, estimator

    def forward(self, *inputs) -> tuple:
        """The network's output: ``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        return self.run(inputs)

    def guide(self, *inputs, y: Tensor, observed: Tensor | None = None) -> None:
        """:func:`~pyro_nmm.guides.ordered_guide` at the network's output."""
        alpha, logits, relabel = Parameters(*self.give(inputs))
        ordered_guide(
            self.hood, alpha, logits, y, observed, relabel=relabel,
            collapsed=self.collapsed, estimator=self.estimator,
        )  # fmt: skip

    def model(
        self, *inputs, y: Tensor | None = None, observed: Tensor | None = None,
        predict: bool = False,
    ) -> Tensor:  # fmt: skip
        """
        :func:`~pyro_nmm.models.nmm` at the network's output. ``Predictive`` of the unobserved nodes
        takes ``functools.partial(program.model, predict=True)``.
        """
        alpha, logits, relabel = Parameters(*self.take(inputs))
        if self.consistency is not None and self.training and y is not None:
            mixture = self.family(self.hood, alpha, logits, relabel)
            size = self.hood.restrict(observed).num_rows
            pyro.factor("consistency", -size * self.consistency.of(mixture, y, observed))
        options = {"relabel": relabel, "collapsed": self.collapsed, "predict": predict}
        return nmm(self.hood, alpha, logits, y, observed, **options)
