# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import NeighborMixture
from pyro_nmm.expect import expect
from pyro_nmm.validation import check_integers


class Consistency(nn.Module):
    r"""
    A penalty for learning from unobserved nodes: the divergence of marginals :math:`u`, ``(N, C)``
    under dropout, from the sharpened memory of earlier posteriors :math:`p(y_i \mid y_\tau)`.

    .. math::

        \bar p_i \leftarrow m \, \bar p_i + (1 - m) \, p(y_i \mid y_\tau), \qquad
        t_{ik} \propto \bar p_{ik}^{1 / T}, \qquad
        \text{penalty} = w \, \frac1N \sum_i \mathrm{KL}(t_i \,\|\, u_i)

    Temporal ensembling (Laine and Aila 2017, ICLR) with the sharpening of Berthelot et al. (2019,
    "MixMatch", NeurIPS), and the NMM's posterior as the teacher. Use it if labels are few. The
    memory is a buffer, so a ``state_dict`` holds it.

    >>> consistency = Consistency(num_nodes=1, num_classes=2, temperature=0.5, warmup=0)
    >>> probs = torch.tensor([[0.6, 0.4]])
    >>> consistency(probs, probs)
    tensor(0.0183)

    :param int num_nodes: ``N``.
    :param int num_classes: ``C``.
    :param float weight: :math:`w`, relative to the mean log-likelihood of a label.
    :param float temperature: :math:`T`, in (0, 1]; smaller is sharper.
    :param float memory: :math:`m`, in [0, 1).
    :param int warmup: calls until the weight is full; it grows linearly.
    """

    past: Tensor
    calls: Tensor

    def __init__(
        self,
        num_nodes: int,
        num_classes: int,
        *,
        weight: float = 1.0,
        temperature: float = 0.5,
        memory: float = 0.9,
        warmup: int = 50,
    ) -> None:
        super().__init__()
        check_integers(1, num_nodes=num_nodes)
        check_integers(2, num_classes=num_classes)
        check_integers(0, warmup=warmup)
        if not 0 <= weight < math.inf:
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
        with torch.no_grad():
            self.calls += 1
            self.past.lerp_(teacher.to(self.past), 1 - self.memory)
            target = (self.past.log() / self.temperature).softmax(-1).to(probs)
            weight = self.weight * (self.calls / max(self.warmup, 1)).clamp(max=1)
        log_probs = probs.clamp(min=1e-8).log()
        return weight.to(probs) * F.kl_div(log_probs, target, reduction="batchmean")

    def of(self, mixture: NeighborMixture, y: Tensor, observed: Tensor | None) -> Tensor:
        """The penalty of a mixture, whose posterior given the observed labels is the teacher."""
        # Draws of its own: choices of a guide would be charged with a teacher that is constant.
        teacher = mixture.condition(y, observed, num_samples=4).marginals()
        return self(mixture.marginals(), teacher)

    def extra_repr(self) -> str:
        names = "weight", "temperature", "memory", "warmup"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
