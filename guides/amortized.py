# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A network and an NMM: the pair of programs, a penalty for few labels, and the fits to nodes."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import (
    as_set,
    check_each_call,
    check_finite,
    check_integers,
    check_positive,
    expect,
)
from pyro_nmm.datasets.batches import IN_DEGREE
from pyro_nmm.datasets.entries import checked, contents, entry, labels_in
from pyro_nmm.fitting import Run, train, with_gradients, with_options
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import NoSites, SharedForward, unvalidated
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models import Compatibility, NMMNetwork
from pyro_nmm.models.networks import Parameters
from pyro_nmm.models.nmm import nmm
from pyro_nmm.provenance import untracked


class Consistency(nn.Module):
    r"""A penalty for learning from unobserved nodes, for few labels: the divergence of marginals
    :math:`u` ``(N, C)`` from the sharpened memory of posteriors :math:`p(y_i \mid y_\tau)`.

    .. math::

        \bar p_i \leftarrow m \, \bar p_i + (1 - m) \, p(y_i \mid y_\tau), \qquad
        t_{ik} \propto \bar p_{ik}^{1 / T}, \qquad
        \text{penalty} = w \, \frac1N \sum_i \mathrm{KL}(t_i \,\|\, u_i)

    Temporal ensembling (Laine and Aila 2017, ICLR) with the sharpening of Berthelot et al. (2019,
    "MixMatch", NeurIPS). A ``state_dict`` holds the memory.

    >>> consistency = Consistency(num_nodes=1, num_classes=2, temperature=0.5, warmup=0)
    >>> probs = torch.tensor([[0.6, 0.4]])
    >>> consistency(probs, probs)
    tensor(0.0183)

    :param float weight: :math:`w`, relative to the mean log-likelihood of a label.
    :param float temperature: :math:`T`, in (0, 1]; smaller is sharper.
    :param float memory: :math:`m`, in [0, 1).
    :param int warmup: calls until the weight is full; it grows linearly.
    """

    past: Tensor
    calls: Tensor

    def __init__(
        self, num_nodes: int, num_classes: int, *, weight: float = 1.0, temperature: float = 0.5,
        memory: float = 0.9, warmup: int = 50,
    ) -> None:  # fmt: skip
        super().__init__()
        check_integers(1, num_nodes=num_nodes)
        check_integers(2, num_classes=num_classes)
        check_integers(0, warmup=warmup)
        check_finite(weight=weight, temperature=temperature, memory=memory)
        if weight < 0:
            raise ValueError(f"weight must be finite and not negative, got {weight}")
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature must be in (0, 1], got {temperature}")
        if not 0 <= memory < 1:
            raise ValueError(f"memory must be in [0, 1), got {memory}")
        self.weight, self.temperature = weight, temperature
        self.memory, self.warmup = memory, warmup
        self.register_buffer("past", torch.zeros(num_nodes, num_classes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, probs: Tensor, teacher: Tensor) -> Tensor:
        """The penalty of ``probs`` ``(N, C)``, once the constant ``teacher`` is in the memory."""
        for name, value in (("teacher", teacher), ("probs", probs)):
            expect(name, value, tuple(self.past.shape))
            check_each_call(name, value)
        with torch.no_grad():
            self.calls += 1
            self.past.lerp_(teacher.to(self.past), 1 - self.memory)
            target = (self.past.log() / self.temperature).softmax(-1).to(probs)
            weight = self.weight * (self.calls / max(self.warmup, 1)).clamp(max=1)
        log_probs = probs.clamp(min=1e-8).log()
        return weight.to(probs) * F.kl_div(log_probs, target, reduction="batchmean")

    def extra_repr(self) -> str:
        names = "weight", "temperature", "memory", "warmup"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class AmortizedNMM(SharedForward):
    r"""A network :math:`(\alpha, \text{logits}) = f_\theta(X)` and an NMM as one pair of model and
    guide for Pyro's SVI, with the sites of :func:`~pyro_nmm.models.nmm`. The network runs once a
    step with vectorized particles, so both programs see the same dropout mask.

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

    :param network: a :class:`~pyro_nmm.models.ParameterNetwork` with ``alpha`` ``(N, C)``.
    :param bool collapsed: Whether ``z`` is integrated out; the same bound, faster.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`.
    :param str name: of the network's parameters in Pyro's store.
    :param Consistency consistency: a penalty in training mode, the factor ``consistency`` of the
        model; the loss is then no bound. Its memory advances with every run of the model.
    """

    def __init__(
        self, hood: Neighborhood, network: nn.Module, *, collapsed: bool = True,
        estimator: str | Chains = "reward_to_go", name: str = "nmm",
        consistency: Consistency | None = None,
    ) -> None:  # fmt: skip
        check_hood(hood)
        super().__init__(hood, network, name)
        self.consistency, self.collapsed, self.estimator = consistency, collapsed, estimator

    def forward(self, *inputs) -> tuple:
        """The network's output: ``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        return self.run(inputs)

    def guide(self, *inputs, y: Tensor, observed: Tensor | None = None) -> None:
        """:func:`~pyro_nmm.guides.ordered_guide` at the network's output."""
        alpha, logits, relabel = Parameters(*self.give(inputs))
        options: Any = {"relabel": relabel, "collapsed": self.collapsed}
        ordered_guide(self.hood, alpha, logits, y, observed, estimator=self.estimator, **options)

    def model(
        self, *inputs, y: Tensor | None = None, observed: Tensor | None = None,
        predict: bool = False,
    ) -> Tensor:  # fmt: skip
        """:func:`~pyro_nmm.models.nmm` at the network's output; ``predict`` is as there."""
        alpha, logits, relabel = Parameters(*self.take(inputs))
        if self.consistency is not None and self.training and y is not None:
            mixture = self.family(self.hood, alpha, logits, relabel)
            # Draws of its own: the guide's choices would be charged with a constant teacher.
            constant = self.family(self.hood, *untracked(alpha, logits, relabel)[0])
            teacher = constant.condition(y, observed, num_samples=4).marginals()
            size = self.hood.restrict(observed).num_rows
            pyro.factor("consistency", -size * self.consistency(mixture.marginals(), teacher))
        options = {"relabel": relabel, "collapsed": self.collapsed, "predict": predict}
        return nmm(self.hood, alpha, logits, y, observed, **options)


class SeedLoss(nn.Module):
    r"""The loss of a mini-batch: the negative bound of :func:`fit_nmm` on the joint likelihood
    :math:`p(y_s)` of its seed nodes :math:`s`, a mean over the seeds.

    Other labels are marginalised exactly. The bound equals the seeds' bound in the whole graph if
    the batch has every edge into a seed, and behind these the hops of the network
    (:func:`~pyro_nmm.datasets.seed_batch`, or ``NeighborLoader`` with a first fan-out of -1). The
    sum over batches bounds a composite likelihood (Varin, Reid and Firth 2011, Statistica Sinica).

    ``DistributedDataParallel`` and Lightning may wrap the module: the loss is differentiable, and
    no parameter store is used. If gradients of several processes are averaged, give each process
    ``total``, the number of all seeds divided by the number of processes.

    >>> from torch_geometric.datasets import KarateClub
    >>> from torch_geometric.nn import GraphSAGE
    >>> from pyro_nmm.datasets import seed_batch, with_in_degree
    >>> from pyro_nmm.models import NMMNetwork
    >>> data = with_in_degree(KarateClub()[0])
    >>> labels, attention = GraphSAGE(34, 16, 2, out_channels=4), GraphSAGE(34, 16, 1)
    >>> loss = SeedLoss(NMMNetwork(labels, attention, num_classes=4))
    >>> for seeds in torch.randperm(34).split(12):
    ...     loss(seed_batch(data, seeds, num_hops=3)).backward()  # and a step of any optimizer

    Cost: the network, ``alpha`` ``(N, C)``, and :math:`O(E_s)` a particle for edges into seeds.

    :param nn.Module network: a :class:`~pyro_nmm.models.ParameterNetwork`, no layer ``cached``.
    :param inputs: names of the batch's entries that are the network's arguments, in order.
    :param int num_particles: draws of :math:`q(c \mid y)`.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`. Chains start anew in every batch.
    """

    def __init__(
        self, network: nn.Module, *, inputs: Sequence[str] = ("x", "edge_index"),
        num_particles: int = 4, estimator: str | Chains = "reward_to_go",
    ) -> None:  # fmt: skip
        super().__init__()
        check_integers(1, num_particles=num_particles)
        for name, part in network.named_modules():
            if getattr(part, "cached", False):
                cure = "use cached=False, for GCN as in docs/distributed.md"
                raise ValueError(f"network.{name} is cached, which fits one graph only: {cure}")
        self.network, self.inputs, self.estimator = network, tuple(inputs), estimator
        self._elbo = Trace_ELBO(num_particles, max_plate_nesting=0, vectorize_particles=True)
        self._told = False

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, num_particles={self._elbo.num_particles}"

    def forward(self, batch: Data, seeds: Any = None, total: float | None = None) -> Tensor:
        """
        :param Data batch: with ``edge_index`` ``(2, num_edges)``, ``y`` ``(N,)``, read at the seeds
            only, the entries of ``inputs``, and ``in_degree`` ``(N,)`` by
            :func:`~pyro_nmm.datasets.with_in_degree`, which reveals seeds without all their edges.
        :param Tensor seeds: node ids of the batch, or a mask ``(N,)``; default the first
            ``batch.batch_size`` nodes, as PyG's loaders have them.
        :param float total: divides the bound, default the number of seeds. The share of seeds among
            all labelled nodes gives an estimate of the sum over these nodes.
        :return: a number; zero for a batch without seeds.
        """
        edge_index = entry(batch, "edge_index")
        if seeds is None:
            if (number := batch.get("batch_size")) is None:
                raise ValueError("batch has no batch_size, which seed_batch sets: give seeds")
            seeds = torch.arange(batch.num_nodes, device=edge_index.device) < number
        mask = as_set(seeds, batch.num_nodes, edge_index.device, "seeds", empty=True)
        if not mask.any():
            # Every parameter takes part, or other processes would wait for its gradient.
            return torch.stack([(0 * p).sum() for p in self.parameters() if p.requires_grad]).sum()
        if total is not None:
            check_positive(total=total)
        # The model needs the seeds' rows alone; the network sees all edges.
        hood = Neighborhood(edge_index[:, mask[edge_index[1]]], batch.num_nodes)
        self._check_whole(batch, hood, mask)
        with NoSites():
            outputs = Parameters(*self.network(hood, *(batch[name] for name in self.inputs)))
        arguments = hood, outputs.alpha, outputs.logits, entry(batch, "y"), mask
        options = {"relabel": outputs.relabel, "collapsed": True}
        model = functools.partial(nmm, *arguments, **options)
        estimator = self.estimator
        if isinstance(estimator, Chains):  # a batch is a graph of its own
            estimator = Chains(estimator.num_sweeps)
        guide = functools.partial(ordered_guide, *arguments, estimator=estimator, **options)
        bound = self._elbo.differentiable_loss(model, guide)
        return bound / (int(mask.sum()) if total is None else total)

    def _check_whole(self, batch: Data, hood: Neighborhood, mask: Tensor) -> None:
        if (whole := batch.get(IN_DEGREE)) is None:
            if not self._told:
                warnings.warn(
                    "batch has no in_degree, so missing edges into seeds would change the loss "
                    "unnoticed: load batches of with_in_degree(data)",
                    stacklevel=3,
                )
                self._told = True
            return
        loaded = hood.ptr.diff() - 1
        if (cut := mask & (loaded < whole)).any():
            node = cut.nonzero()[0].item()
            raise ValueError(
                f"seed {node} has {loaded[node].item()} of its {whole[node].item()} neighbours in "
                f"the batch ({int(cut.sum())} such seeds): the fan-out of the first hop must be -1"
            )


Scores = list[tuple[float, ...]]


@dataclass(frozen=True)
class NodeRun(Run):
    """Options of :func:`fit_classifier` and :func:`fit_nmm`, besides the options of
    :class:`~pyro_nmm.guides.fitting.Run`.

    :param float lr: Adam's learning rate.
    :param float weight_decay: of the first layer alone, as in Kipf and Welling (2017).
    :param int num_epochs: the most epochs.
    :param int patience: epochs without a better validation score, after which a fit stops.
    :param str criterion: the score, ``"accuracy"`` or ``"likelihood"``; the other breaks ties.
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
        parts = (inner.labels, inner.attention) if isinstance(inner, NMMNetwork) else (inner,)
        backbones = [part for part in parts if part is not None]
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
    r"""Fit a classifier alone by the mean of :math:`-\log \mathrm{softmax}(f_\theta(X)_i)_{y_i}`
    over training nodes, with early stopping on the validation nodes.

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
    :param Consistency consistency: the penalty, taught by the classifier's own predictions.
    :param options: keywords of :class:`~pyro_nmm.guides.fitting.NodeRun`.
    :return: ``(N, C)`` logits of the best epoch, and the two validation scores of every epoch,
        ``criterion`` first. Cost of an epoch: two runs of the network.
    """
    data = checked(data)
    inputs = (data.x, data.edge_index)

    def backward(epoch: int) -> float:
        out = network(*inputs)
        loss = F.cross_entropy(out[data.train_mask], labels_in(data, "train_mask", out.shape[-1]))
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
    r"""Fit an NMM by the bound on the joint likelihood of the training nodes :math:`\tau`, the
    paper's equation (5), with early stopping on :math:`p(y_i \mid y_\tau)` of the validation nodes.

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
        others: dict[str, object] = {"consistency": consistency, "chains": estimator}
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
