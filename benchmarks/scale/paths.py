# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Log-likelihoods of labels that correlate: the bound, particles and path sampling."""

import torch
from torch import Tensor

from benchmarks.scale.speed import cpu_timed
from benchmarks.shared.records import Records
from pyro_nmm import Neighborhood, NeighborMixture

#: The concentration that labels are drawn with, and those that their likelihood is asked of.
TRUTH, CONCENTRATIONS = 0.4, [0.2, 0.4, 0.8, 4.0]
#: Nodes of a graph whose concentration is asked for.
NODES = 20_000


def labelled(num_nodes: int, classes: int, seed: int) -> tuple[Neighborhood, Tensor, Tensor]:
    """
    A random graph of five edges a node with features of edges as logits, and labels from the
    mixture of the true concentration. Self-loops are left out of the count.
    """
    torch.manual_seed(seed)
    ends = torch.randint(num_nodes, (2, 5 * num_nodes // 2))
    hood = Neighborhood(torch.cat([ends, ends.flip(0)], 1), num_nodes)
    logits = torch.randn(hood.num_edges)
    return hood, logits, mixture(hood, logits, TRUTH, classes).sample()


def mixture(hood: Neighborhood, logits: Tensor, kappa: float, classes: int) -> NeighborMixture:
    alpha = torch.full((hood.num_sources, classes), kappa / classes, dtype=logits.dtype)
    return NeighborMixture(hood, alpha, logits)


def concentration(args, results: Records) -> None:
    """Estimates in nats of likelihoods around the true concentration."""
    torch.set_default_dtype(torch.double)
    each = {"classes": [2, 7], "seed": range(args.num_seeds), "kappa": CONCENTRATIONS}
    for key in results.missing(task="concentration", nodes=NODES, **each):
        hood, logits, y = labelled(NODES, key["classes"], key["seed"])
        mix = mixture(hood, logits, key["kappa"], key["classes"])
        torch.manual_seed(1000 + key["seed"])
        (value, error), seconds = cpu_timed(mix.path_likelihood, y)
        row = {"path": value.item(), "error": error.item(), "seconds": seconds}
        row["bound"] = mix.elbo(y, num_samples=4).mean().item()
        found, seconds = cpu_timed(mix.log_likelihood, y)
        row |= {"particles": found.item(), "seconds of particles": seconds}
        results.add(**key, **row)
