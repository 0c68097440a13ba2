# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The paper's schedule: early stopping, weight decay of first layers, consistency, and batches."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from benchmarks.shared.scores import mean_log_prob
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM, Chains
from pyro_nmm.models import Compatibility, NMMNetwork, Parameters, nmm

Scores = list[tuple[float, ...]]


def steps(optimizer: Optimizer, loss: Callable[[], Tensor], number: int) -> Iterator[int]:
    """Steps down a loss, numbered from one."""
    for step in range(1, number + 1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        yield step


def descend(module: nn.Module, optimizer: Optimizer, loss: Callable, num_epochs: int) -> nn.Module:
    """The module in evaluation mode, after steps down its loss in training mode."""
    module.train()
    for _ in steps(optimizer, loss, num_epochs):
        pass
    return module.eval()


class Consistency(nn.Module):
    r"""A penalty for learning from unobserved nodes: the divergence of marginals :math:`u` from the
    sharpened memory of posteriors :math:`p(y_i \mid y_\tau)`.

    .. math::

        \bar p_i \leftarrow m \, \bar p_i + (1 - m) \, p(y_i \mid y_\tau), \qquad
        t_{ik} \propto \bar p_{ik}^{1 / T}, \qquad
        \text{penalty} = w \, \frac1N \sum_i \mathrm{KL}(t_i \,\|\, u_i)

    Temporal ensembling (Laine and Aila 2017, ICLR) with the sharpening of Berthelot et al. (2019,
    "MixMatch", NeurIPS). The weight :math:`w` grows linearly over ``warmup`` calls.
    """

    def __init__(
        self, num_nodes: int, num_classes: int, *, weight: float = 1.0, temperature: float = 0.5,
        memory: float = 0.9, warmup: int = 50,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.temperature = weight, temperature
        self.memory, self.warmup = memory, warmup
        self.past: Tensor
        self.register_buffer("past", torch.zeros(num_nodes, num_classes))
        self.calls = 0

    def forward(self, probs: Tensor, teacher: Tensor) -> Tensor:
        """The penalty of ``probs`` ``(N, C)``, once the constant ``teacher`` is in the memory."""
        with torch.no_grad():
            self.calls += 1
            self.past.lerp_(teacher.to(self.past), 1 - self.memory)
            target = (self.past.log() / self.temperature).softmax(-1).to(probs)
        weight = self.weight * (torch.tensor(self.calls) / max(self.warmup, 1)).clamp(max=1)
        log_probs = probs.clamp(min=1e-8).log()
        return weight.to(probs) * F.kl_div(log_probs, target, reduction="batchmean")


class ConsistentNMM(AmortizedNMM):
    """A pair of programs whose model has the factor ``consistency``. The loss is then no bound."""

    def __init__(self, hood: Neighborhood, network: nn.Module, consistency: Consistency, **options):
        super().__init__(hood, network, **options)
        self.consistency = consistency

    def model(self, *inputs, y: Tensor, observed: Tensor) -> Tensor:  # type: ignore[override]
        alpha, logits, relabel = outputs = Parameters(*self.take(inputs))
        # Draws of its own: the guide's choices would be charged with a constant teacher.
        constant = (part if part is None else part.detach() for part in outputs)
        teacher = NeighborMixture(self.hood, *constant).condition(y, observed, num_samples=4)
        marginals = NeighborMixture(self.hood, *outputs).marginals()
        size = self.hood.restrict(observed).num_rows
        pyro.factor("consistency", -size * self.consistency(marginals, teacher.marginals()))
        return nmm(self.hood, alpha, logits, y, observed, relabel=relabel, collapsed=True)


@dataclass(frozen=True)
class Schedule:
    """Adam with ``weight_decay`` of the first layer alone, as in Kipf and Welling (2017), until the
    validation score has not improved for ``patience`` epochs.
    """

    lr: float = 0.01
    weight_decay: float = 5e-4
    num_epochs: int = 200
    patience: int = 100
    criterion: str = "accuracy"  #: or "likelihood"; the other one breaks ties
    progress: Callable[[range], Iterable[int]] = iter

    def fit(
        self, network: nn.Module, data: Data, backward: Callable[[], None],
        predict: Callable[[], Tensor],
    ) -> Scores:  # fmt: skip
        """Both validation scores of every epoch, ``criterion`` first. The network ends as it was
        in the best epoch.
        """
        optimizer = torch.optim.Adam(decay_first(network, self.weight_decay), lr=self.lr)
        y = data.y[data.val_mask]

        def validate() -> tuple[float, float]:
            probs = predict()[data.val_mask]
            accuracy = (probs.argmax(-1) == y).double().mean().item()
            likelihood = mean_log_prob(probs.clamp(min=1e-12), y).item()
            first = self.criterion == "accuracy"
            return (accuracy, likelihood) if first else (likelihood, accuracy)

        def step(epoch: int) -> None:
            optimizer.zero_grad()
            backward()
            optimizer.step()

        epochs = self.progress(range(self.num_epochs))
        return best_epoch(network, epochs, step, validate, self.patience)


def best_epoch(
    module: nn.Module, epochs: Iterable[int], step: Callable[[int], None],
    validate: Callable[[], tuple[float, ...]], patience: int,
) -> Scores:  # fmt: skip
    """Every epoch's score. The module has the state of the best epoch, and of equal ones the
    first; epochs end ``patience`` after it.
    """
    history: Scores = []
    best, state = -1, copy.deepcopy(module.state_dict())
    for epoch in epochs:
        if epoch - max(best, 0) > patience:
            break
        module.train()
        step(epoch)
        module.eval()
        with torch.no_grad():
            history.append(validate())
        if any(map(math.isnan, history[-1])):
            raise ValueError(f"validation gave {history[-1]} in epoch {epoch}")
        if best < 0 or history[-1] > history[best]:
            best, state = epoch, copy.deepcopy(module.state_dict())
    module.load_state_dict(state)
    module.eval()
    return history


def train_classifier(
    network: nn.Module, data: Data, *, consistency: Consistency | None = None, **options
) -> tuple[Tensor, Scores]:
    """Fit a classifier alone by cross-entropy: ``(N, C)`` logits of the best epoch, and scores.

    :param Consistency consistency: a penalty, taught by the classifier's own predictions.
    :param options: of :class:`Schedule`.
    """
    inputs, mask = (data.x, data.edge_index), data.train_mask

    def backward() -> None:
        out = network(*inputs)
        loss = F.cross_entropy(out[mask], data.y[mask])
        if consistency is not None:
            probs = out.softmax(-1)
            loss = loss + consistency(probs, probs.detach())
        loss.backward()

    def predict() -> Tensor:
        return network(*inputs).softmax(-1)

    scores = Schedule(**options).fit(network, data, backward, predict)
    with torch.no_grad():
        return network(*inputs), scores


def train_nmm(
    network: nn.Module, data: Data, hood: Neighborhood, *, consistency: Consistency | None = None,
    estimator: str | Chains = "reward_to_go", **options,
) -> tuple[NeighborMixture, Scores]:  # fmt: skip
    r"""Fit an NMM by the bound on the joint likelihood of the training nodes :math:`\tau`, the
    paper's equation (5), with early stopping on :math:`p(y_i \mid y_\tau)` of the validation nodes.

    :param Consistency consistency: a penalty, with the posterior as the teacher.
    :param options: of :class:`Schedule`.
    """
    inputs, known = (data.x, data.edge_index), {"y": data.y, "observed": data.train_mask}
    program, loss = AmortizedNMM(hood, network, estimator=estimator), Trace_ELBO
    if consistency is not None:
        # Trace_ELBO would charge the choices with the penalty, which does not depend on them.
        program = ConsistentNMM(hood, network, consistency, estimator=estimator)
        loss = TraceGraph_ELBO
    number = int(data.train_mask.sum())
    model, guide = (poutine.scale(f, 1 / number) for f in (program.model, program.guide))
    elbo = loss(4, max_plate_nesting=0, vectorize_particles=True)

    def backward() -> None:
        with pyro.validation_enabled(False):
            elbo.loss_and_grads(model, guide, *inputs, **known)

    def predict() -> Tensor:
        mixture = NeighborMixture(hood, *network(hood, *inputs), validate_args=False)
        return mixture.condition(**known, num_samples=8).marginals()

    with pyro.get_param_store().scope():
        scores = Schedule(**options).fit(network, data, backward, predict)
        return program.mixture(*inputs), scores


def decay_first(network: nn.Module, weight_decay: float) -> list[dict]:
    """Groups of Adam: the first layer of every backbone with weight decay, and all others."""
    inner = network.network if isinstance(network, Compatibility) else network
    backbones = (inner.labels, inner.attention) if isinstance(inner, NMMNetwork) else (inner,)
    decayed: list[nn.Parameter] = []
    for backbone in filter(None, backbones):
        # A root with children is no layer, whatever parameters of its own it has.
        parts = [m for m in backbone.modules() if m is not backbone or not list(m.children())]
        # A convolution is one layer, also if only its parts have parameters.
        whole = ((m, isinstance(m, MessagePassing)) for m in parts)
        owners = (m for m, all_of_it in whole if any(True for _ in m.parameters(all_of_it)))
        decayed += next(owners, nn.Identity()).parameters()
    known = {id(p) for p in decayed}
    rest = [p for p in network.parameters() if id(p) not in known]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest}]
