# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of node classifiers and NMMs, stopped early by the validation nodes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.datasets.entries import checked, contents, labels_in
from pyro_nmm.fitting import Run, train, with_gradients, with_options
from pyro_nmm.guides.amortized import AmortizedNMM, Consistency
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.shared_forward import unvalidated
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models import Compatibility, NMMNetwork

Scores = list[tuple[float, ...]]


@dataclass(frozen=True)
class NodeRun(Run):
    """
    Options of :func:`fit_classifier` and :func:`fit_nmm`, besides the options of
    :class:`~pyro_nmm.guides.fitting.Run`.

    :param float lr: Adam's learning rate.
    :param float weight_decay: of the first layer alone, as in Kipf and Welling (2017).
    :param int num_epochs: the most epochs.
    :param int patience: epochs without a better validation score, after which a fit stops.
    :param str criterion: the score, ``"accuracy"`` or ``"likelihood"``; the other one decides
        between equal scores.
    """

    lr: float = 0.01
    weight_decay: float = 5e-4
    num_epochs: int = 200
    patience: int = 100
    criterion: str = "accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(lr=self.lr)
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.criterion not in ("accuracy", "likelihood"):
            must = "'accuracy' or 'likelihood'"
            raise ValueError(f"criterion must be {must}, got {self.criterion!r}")

    def fit(
        self, network: nn.Module, others: dict[str, object], data: Data,
        backward: Callable[[int], float], predict: Callable[[], Tensor], **settings: object,
    ) -> Scores:  # fmt: skip
        """Adam, stopped early by the predictions ``(N, C)`` for the validation nodes."""
        inner = network.network if isinstance(network, Compatibility) else network
        backbones = [inner]
        if isinstance(inner, NMMNetwork):
            backbones = [b for b in (inner.labels, inner.attention) if b is not None]
        optimizer = torch.optim.Adam(_groups(network, backbones, self.weight_decay), lr=self.lr)
        modules = {key: part for key, part in others.items() if isinstance(part, nn.Module)}

        def validate() -> tuple[float, float]:
            probs = predict()
            y = labels_in(data, "val_mask", probs.shape[-1])
            probs = probs[data.val_mask]
            accuracy = (probs.argmax(-1) == y).double().mean().item()
            likelihood = mean_log_prob(probs.clamp(min=1e-12), y).item()
            first = self.criterion == "accuracy"
            return (accuracy, likelihood) if first else (likelihood, accuracy)

        return train(
            nn.ModuleDict({"network": network} | modules), optimizer, backward, validate,
            num_epochs=self.num_epochs, patience=self.patience,
            options=self.also(**contents(data), criterion=self.criterion, **settings),
        )  # fmt: skip


@with_options
@with_gradients
def fit_classifier(
    network: nn.Module, data: Data, *, consistency: Consistency | None = None,
    options: NodeRun = NodeRun(),
) -> tuple[Tensor, Scores]:  # fmt: skip
    r"""
    Fit a classifier alone by the cross entropy :math:`-\frac1{|\tau|} \sum_{i \in \tau} \log
    \mathrm{softmax}(f_\theta(X)_i)_{y_i}` of the training nodes :math:`\tau`, with early stopping
    on the validation nodes.

    >>> from torch_geometric.datasets import KarateClub
    >>> from torch_geometric.nn import GCN
    >>> data = KarateClub()[0]
    >>> data.val_mask = ~data.train_mask
    >>> scores, curve = fit_classifier(GCN(34, 16, 2, out_channels=4), data, num_epochs=5)
    >>> scores.shape, len(curve)
    (torch.Size([34, 4]), 5)

    :param nn.Module network: ``(x, edge_index) -> (N, C)``.
    :param Data data: with ``x``, ``edge_index``, integer labels ``y`` ``(N,)``, read in the masks
        only, and disjoint boolean masks ``(N,)`` ``train_mask`` and ``val_mask``.
    :param Consistency consistency: the penalty, with the classifier's own predictions as the
        teacher.
    :param options: keywords of :class:`~pyro_nmm.guides.fitting.NodeRun`.
    :return: ``(N, C)`` logits of the best epoch, and the two validation scores of every epoch,
        ``criterion`` first. Cost of an epoch: two runs of the network.
    """
    data = checked(data)
    inputs = (data.x, data.edge_index)

    def backward(epoch: int) -> float:
        out = network(*inputs)
        y = labels_in(data, "train_mask", out.shape[-1])
        loss = F.cross_entropy(out[data.train_mask], y)
        if consistency is not None:
            probs = out.softmax(-1)
            loss = loss + consistency(probs, probs.detach())
        loss.backward()
        return loss.item()

    def predict() -> Tensor:
        return network(*inputs).softmax(-1)

    scores = options.fit(network, {"consistency": consistency}, data, backward, predict)
    with torch.no_grad():
        return network(*inputs), scores


@with_options
@with_gradients
def fit_nmm(
    network: nn.Module, data: Data, hood: Neighborhood, *, consistency: Consistency | None = None,
    estimator: str | Chains = "reward_to_go", num_particles: int = 4, num_samples: int = 8,
    options: NodeRun = NodeRun(),
) -> tuple[NeighborMixture, Scores]:  # fmt: skip
    r"""
    Fit an NMM by the bound on the joint likelihood of the training nodes :math:`\tau`, the paper's
    equation (5), with early stopping on :math:`p(y_i \mid y_\tau)` of the validation nodes.

    .. math::

        \min_\theta \; -\frac1{|\tau|} E_{q(c \mid y_\tau)} \left[
            \log \frac{p_\theta(y_\tau, c)}{q_\theta(c \mid y_\tau)} \right] + \text{penalty}

    >>> from pyro_nmm.datasets import digits, random_split
    >>> from pyro_nmm.models import NMMNetwork
    >>> from pyro_nmm.models.backbones import gcn
    >>> data = random_split(digits(), train=0.05, val=0.1, test=0.5, seed=0)
    >>> hood = Neighborhood(data.edge_index, data.num_nodes)
    >>> network = NMMNetwork(gcn(64, 10), gcn(64, 64, attention=True), num_classes=10)
    >>> mix, curve = fit_nmm(network, data, hood, consistency=Consistency(1797, 10), num_epochs=5)
    >>> mix.condition(data.y, data.train_mask, num_samples=64).marginals().shape
    torch.Size([1797, 10])

    Each step uses Pyro's ELBO on :class:`~pyro_nmm.guides.AmortizedNMM`, which fits the same inside
    a larger program. Pyro's parameter store is left as it was.

    :param nn.Module network: a :class:`~pyro_nmm.models.ParameterNetwork` of ``x`` and
        ``edge_index``, such as :class:`~pyro_nmm.models.NMMNetwork`, or
        :class:`~pyro_nmm.models.Compatibility` for heterophilous graphs.
    :param Neighborhood hood: of ``data.edge_index``.
    :param Consistency consistency: the penalty, with the posterior as the teacher.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`.
    :param int num_particles: draws of :math:`q(c \mid y)` a step.
    :param int num_samples: draws of the posterior, for validation.
    :return: the mixture of the best epoch, over ``(N,)`` labels, and scores as
        :func:`fit_classifier`, whose ``data`` and ``options`` these are. Cost of an epoch: two runs
        of the network, the marginals, and :math:`O(E_\tau \log E_\tau)` a particle.
    """
    data = checked(data)
    check_integers(1, num_particles=num_particles, num_samples=num_samples)
    if hood.num_nodes != data.num_nodes:
        raise ValueError(f"hood has {hood.num_nodes} nodes, but data {data.num_nodes}")
    inputs, known = (data.x, data.edge_index), {"y": data.y, "observed": data.train_mask}

    program = AmortizedNMM(hood, network, estimator=estimator, consistency=consistency)
    number = int(data.train_mask.sum())
    model, guide = (poutine.scale(f, 1 / number) for f in (program.model, program.guide))
    # The gradient is the same draw by draw, and Trace_ELBO is faster on small graphs; but it would
    # charge the choices with the penalty, which does not depend on them.
    loss = Trace_ELBO if consistency is None else TraceGraph_ELBO
    elbo = loss(num_particles, max_plate_nesting=0, vectorize_particles=True)

    def backward(epoch: int) -> float:
        with unvalidated():
            return elbo.loss_and_grads(model, guide, *inputs, **known)

    def predict() -> Tensor:
        mixture = NeighborMixture(hood, *network(hood, *inputs), validate_args=False)
        return mixture.condition(**known, num_samples=num_samples).marginals()

    settings = {
        "hood": (hood.num_sources, hood.ptr, hood.source),
        "estimator": str(estimator), "num_particles": num_particles, "num_samples": num_samples,
    }  # fmt: skip
    with pyro.get_param_store().scope():
        num_classes = program.mixture(*inputs).num_classes
        for mask in ("train_mask", "val_mask"):
            labels_in(data, mask, num_classes)
        others = {"consistency": consistency, "chains": estimator}
        scores = options.fit(network, others, data, backward, predict, **settings)
        return program.mixture(*inputs), scores


def _groups(network: nn.Module, backbones: list[nn.Module], weight_decay: float) -> list[dict]:
    """The first layer of every backbone, with weight decay, and all other parameters."""
    decayed: list[nn.Parameter] = []
    for backbone in backbones:
        # A root with children is no layer, whatever numbers of its own it has.
        parts = [m for m in backbone.modules() if m is not backbone or not list(m.children())]
        # A convolution is one layer, also if only its parts own numbers.
        whole = ((m, isinstance(m, MessagePassing)) for m in parts)
        owners = (m for m, all_of_it in whole if any(True for _ in m.parameters(all_of_it)))
        decayed += next(owners, nn.Identity()).parameters()
    known = {id(p) for p in decayed}
    rest = [p for p in network.parameters() if id(p) not in known]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest}]
