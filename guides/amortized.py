# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A network and an NMM: the pair of programs, and a fit to the labels of nodes."""

import math
from typing import TYPE_CHECKING, Any, Unpack

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import as_labels, as_set, check_integers
from pyro_nmm.fitting import StepOptions, Steps, with_gradients, with_options
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import SharedForward, unvalidated
from pyro_nmm.models.networks import Parameters
from pyro_nmm.models.nmm import nmm
from pyro_nmm.ops.score_costs import Estimator

if TYPE_CHECKING:
    from torch_geometric.data import Data


class AmortizedNMM(SharedForward[NeighborMixture]):
    r"""A network :math:`(\alpha, \text{logits}) = f_\theta(X)` and an NMM as one pair of model and
    guide for Pyro's SVI, the paper's equation (8): :func:`~pyro_nmm.models.nmm`, ``collapsed``.
    The network runs once a step of vectorized particles, so both programs see one dropout mask.

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

    :param network: a network to :class:`~pyro_nmm.models.Parameters` with ``alpha`` ``(N, C)``.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`.
    :param str name: of the network's parameters in Pyro's store.
    :raises ValueError: in a call for a network with sample sites, another one of this ``name`` in
        Pyro's store, and as :func:`~pyro_nmm.models.nmm`.
    """

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        *,
        estimator: Estimator | Chains = "reward_to_go",
        name: str = "nmm",
    ) -> None:
        super().__init__(hood, network, name, NeighborMixture)
        self.estimator = estimator

    def guide(self, *inputs: Any, y: Tensor, observed: Tensor | None = None) -> None:
        """:func:`~pyro_nmm.guides.ordered_guide` at the network's output."""
        alpha, logits, relabel = Parameters(*self.give(inputs))
        options: Any = {"relabel": relabel, "collapsed": True, "estimator": self.estimator}
        ordered_guide(self.hood, alpha, logits, y, observed, **options)

    def model(
        self,
        *inputs: Any,
        y: Tensor | None = None,
        observed: Tensor | None = None,
        predict: bool = False,
    ) -> Tensor:
        """:func:`~pyro_nmm.models.nmm` at the network's output; ``predict`` is as there."""
        alpha, logits, relabel = Parameters(*self.take(inputs))
        options: Any = {"relabel": relabel, "collapsed": True, "predict": predict}
        return nmm(self.hood, alpha, logits, y, observed, **options)


@with_options
@with_gradients
def fit_nmm(
    network: nn.Module,
    data: "Data",
    hood: Neighborhood,
    *,
    estimator: Estimator | Chains = "reward_to_go",
    num_particles: int = 4,
    weight_decay: float = 5e-4,
    options: Steps = Steps(num_steps=200, lr=0.01),
    **fields: Unpack[StepOptions],
) -> tuple[NeighborMixture, list[float]]:
    r"""Fit an NMM by the bound on the joint likelihood of the training nodes :math:`\tau`, the
    paper's equation (5).

    .. math::

        \min_\theta \; -\frac1{|\tau|} E_{q(c \mid y_\tau)} \left[
            \log \frac{p_\theta(y_\tau, c)}{q_\theta(c \mid y_\tau)} \right]

    >>> from torch_geometric.datasets import KarateClub
    >>> from torch_geometric.nn import GCN
    >>> from pyro_nmm.models import NMMNetwork
    >>> data = KarateClub()[0]
    >>> hood = Neighborhood(data.edge_index, data.num_nodes)
    >>> network = NMMNetwork(GCN(34, 16, 2, 4, dropout=0.5), GCN(34, 16, 1), num_classes=4)
    >>> mix, losses = fit_nmm(network, data, hood, num_steps=50)
    >>> mix.condition(data.y, data.train_mask, num_samples=64).marginals().shape
    torch.Size([34, 4])

    A larger program has the same loss by :class:`~pyro_nmm.guides.AmortizedNMM` and SVI. Pyro's
    parameter store is left as it was.

    :param nn.Module network: a network to :class:`~pyro_nmm.models.Parameters` of ``x`` and
        ``edge_index``, such as :class:`~pyro_nmm.models.NMMNetwork`, or
        :class:`~pyro_nmm.models.Compatibility` for heterophilous graphs.
    :param Data data: with ``x``, ``edge_index``, and integer labels ``y`` ``(N,)``, read in
        ``train_mask`` ``(N,)`` only.
    :param Neighborhood hood: of ``data.edge_index``.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`.
    :param int num_particles: draws of :math:`q(c \mid y)` a step.
    :param float weight_decay: of the network's matrices.
    :param options: keywords of :class:`~pyro_nmm.fitting.Steps`.
    :return: the mixture over ``(N,)`` labels, and every step's loss in nats a training node. Cost
        of a step: the network, and :math:`O(E_\tau \log E_\tau)` a particle.
    :raises ValueError: for incomplete ``data``, wrong labels and options out of range; errors of
        :meth:`~pyro_nmm.fitting.Steps.train`.
    """
    check_integers(1, num_particles=num_particles)
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be finite and not negative, got {weight_decay}")
    for name in ("x", "edge_index", "y", "train_mask"):
        if data.get(name) is None:
            raise ValueError(f"data must have {name}, got {data}")
    program = AmortizedNMM(hood, network, estimator=estimator)
    observed = as_set(data.train_mask, hood.num_nodes, hood.device, "data.train_mask")
    number = int(observed.sum())
    model, guide = (poutine.scale(f, 1 / number) for f in (program.model, program.guide))
    # TraceGraph_ELBO has the same gradient, draw by draw, and is slower on small graphs.
    elbo = Trace_ELBO(num_particles, max_plate_nesting=0, vectorize_particles=True)
    inputs = data.x, data.edge_index

    def backward(step: int) -> float:
        with unvalidated():
            return elbo.loss_and_grads(model, guide, *inputs, y=y, observed=observed)

    with pyro.get_param_store().scope():
        num_classes = program.mixture(*inputs).num_classes  # with all checks of the network
        y = as_labels("data.y", data.y, observed, num_classes, "train_mask")
        matrices: dict[str, Any] = {"params": [p for p in network.parameters() if p.dim() > 1]}
        others = {"params": [p for p in network.parameters() if p.dim() <= 1]}
        groups = [matrices | {"weight_decay": weight_decay}, others]
        whole = nn.ModuleDict({"network": network})
        if isinstance(estimator, Chains):
            whole["chains"] = estimator
        losses = options.train(
            whole,
            torch.optim.Adam(groups, lr=options.lr),
            backward,
            inputs=inputs,
            known=(y[observed], observed),
            hood=(hood.num_sources, hood.ptr, hood.source),
            estimator=str(estimator),
            num_particles=num_particles,
        )
        return program.mixture(*inputs), losses
