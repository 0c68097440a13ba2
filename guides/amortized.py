# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A network and an NMM as model and guide, and a penalty for few labels."""

import pyro
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import check_each_call, check_finite, check_integers, expect
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import SharedForward
from pyro_nmm.models.networks import Parameters
from pyro_nmm.models.nmm import nmm
from pyro_nmm.provenance import untracked


class Consistency(nn.Module):
    r"""
    A penalty for learning from unobserved nodes, for few labels: the divergence of marginals
    :math:`u`, ``(N, C)``, from the sharpened memory of earlier posteriors :math:`p(y_i \mid
    y_\tau)`.

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
    r"""
    A network :math:`(\alpha, \text{logits}) = f_\theta(X)` and an NMM as one pair of model and
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
        estimator: str | Chains = "reward_to_go", name: str = "nmm", consistency: Consistency | None = None,
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
            # Draws of its own: the guide's choices would be charged with a constant teacher.
            constant = self.family(self.hood, *untracked(alpha, logits, relabel)[0])
            teacher = constant.condition(y, observed, num_samples=4).marginals()
            size = self.hood.restrict(observed).num_rows
            pyro.factor("consistency", -size * self.consistency(mixture.marginals(), teacher))
        options = {"relabel": relabel, "collapsed": self.collapsed, "predict": predict}
        return nmm(self.hood, alpha, logits, y, observed, **options)
