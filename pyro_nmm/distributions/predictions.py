# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

from torch import Tensor

from pyro_nmm.distributions.sequential import predict_in_turn
from pyro_nmm.ops import enumeration


def predicted(posterior: Any, nodes: Tensor, method: str, generator: Any) -> Tensor:
    """:meth:`Posterior.predict` of ``nodes`` that are checked."""
    # Labels that differ between components have a mode too, jointly with others.
    joint = posterior.components.latent and method == "joint"
    free = nodes if joint else nodes[~posterior.observed[nodes]]
    labels = posterior.labels.clone()
    if method == "marginal":
        labels[free] = posterior._marginals(posterior.hood.take(free)).argmax(-1)
    elif method == "joint" and len(free):
        size = posterior.num_classes
        if size ** len(free) > enumeration.MAX_CHOICES:
            number = f"{size}^{len(free)} labellings of nodes"
            raise ValueError(f"method='joint' would compare {number}: use method='sequential'")
        every = enumeration.enumerate_labels(len(free), size, free.device)
        labels[free] = every[posterior.log_marginal(free, every).argmax()]
    elif method == "sequential" and not posterior.channel.keeps:
        raise ValueError("method='sequential' is for edges that keep labels: use 'marginal'")
    elif method == "sequential" and len(free):
        certainty = posterior._marginals(posterior.hood.take(free)).max(-1).values
        order = free[certainty.argsort(descending=True, stable=True)]
        given = posterior.hood, posterior.logits, posterior.components
        labels[order] = predict_in_turn(*given, order, generator)
    elif method not in ("joint", "sequential"):
        raise ValueError(f"method must be 'marginal', 'joint' or 'sequential', got {method!r}")
    return labels[nodes]
