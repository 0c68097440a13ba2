# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Log-likelihoods of labels that correlate: the bound, particles and path sampling."""

import torch
from torch import Tensor

from benchmarks.scale.speed import cpu_timed
from benchmarks.shared.records import Records
from benchmarks.shared.timing import in_a_process, peak_memory
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


def sweeps(args, results: Records) -> None:
    """Two paths of the same labels, at several numbers of sweeps."""
    torch.set_default_dtype(torch.double)
    each = {"classes": [2, 7], "sweeps": [1, 3, 10], "repeat": range(args.repeats)}
    for key in results.missing(task="sweeps", nodes=NODES, kappa=TRUTH, **each):
        mix = mixture(*labelled(NODES, key["classes"], 0)[:2], TRUTH, key["classes"])
        y = labelled(NODES, key["classes"], 0)[2]
        torch.manual_seed(2000 + key["repeat"])
        (value, error), seconds = cpu_timed(mix.path_likelihood, y, num_sweeps=key["sweeps"])
        results.add(**key, path=value.item(), error=error.item(), seconds=seconds)


def path_growth(args, results: Records) -> None:
    """Seconds and memory of a path and of 64 particles, each in a process of its own."""
    each = {"nodes": args.sizes, "method": ["path", "particles"]}
    for key in results.missing(task="path_growth", classes=2, **each):
        results.add(**key, **in_a_process(args.threads, estimated, key["nodes"], key["method"]))


def estimated(num_nodes: int, method: str) -> dict:
    torch.set_default_dtype(torch.double)
    for size in (100, num_nodes):  # the first pays for what is loaded or compiled once
        hood, logits, y = labelled(size, 2, 0)
        mix = mixture(hood, logits, TRUTH, 2)
        query = mix.path_likelihood if method == "path" else mix.log_likelihood
        (found, seconds), peak, above = peak_memory(cpu_timed, query, y)
    value, error = found if method == "path" else (found, None)
    row = {"edges": hood.num_edges, "seconds": seconds, "peak": peak, "above": above}
    row["value"] = value.item()
    return row if error is None else row | {"error": error.item()}
