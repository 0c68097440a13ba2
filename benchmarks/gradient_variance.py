# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
The noise of each gradient estimator under Pyro's TraceGraph_ELBO, at equal particles.

    python benchmarks/gradient_variance.py
    python benchmarks/gradient_variance.py --data-root data/planetoid

The graph has Cora's size, labels are drawn from an NMM, and gradients (to log alpha and
logits) are taken at perturbed parameters. ``sd`` is the root of the total variance of one
step's gradient, ``score`` the share of the true score term that an estimator carries: one
for the unbiased ones and zero for ``no_score`` by construction, measured for ``one_step_credit``.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import torch
from common import arguments, citation_like
from pyro.infer import TraceGraph_ELBO
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import planetoid
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

ESTIMATORS = ("reinforce", "reward_to_go", "one_step_credit", "no_score")


def problem(args):
    """A graph, labels, and parameters away from those that made the labels."""
    num_classes = 7
    if args.data_root:
        data = planetoid("cora", args.data_root)
        edge_index, y = data.edge_index, data.y
    else:
        edge_index, y = citation_like(2708, 5278, args.seed), None
    num_nodes = int(edge_index.max()) + 1
    hood = Neighborhood(edge_index, num_nodes)
    logits = torch.randn(hood.num_edges)
    if y is None:
        alpha = torch.randn(num_nodes, num_classes).mul(1.5).exp()
        y = NeighborMixture(hood, alpha, logits).sample()
    else:
        votes = hood.sum(one_hot(y[hood.source], num_classes).T.double()).T
        alpha = votes + 0.3
    log_alpha = alpha.log() + 0.3 * torch.randn(alpha.shape)
    return hood, y, log_alpha, logits + 0.5 * torch.randn(logits.shape)


def gradients(hood, y, log_alpha, logits, observed, estimator, args):
    """``(repeats, P)`` gradients of the loss."""
    elbo = TraceGraph_ELBO(args.particles, max_plate_nesting=0, vectorize_particles=True)
    model = partial(nmm, collapsed=True)
    guide = partial(ordered_guide, collapsed=True, estimator=estimator)
    rows = []
    # The true score term is a difference of noisy means: its unbiased half needs more steps.
    for _ in range(args.repeats * (5 if estimator == "reward_to_go" else 1)):
        a, b = log_alpha.clone().requires_grad_(), logits.clone().requires_grad_()
        elbo.loss_and_grads(model, guide, hood, a.exp(), b, y, observed)
        rows.append(torch.cat([a.grad.flatten(), b.grad]))
    return torch.stack(rows)


def main(args):
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(args.threads)
    pyro.set_rng_seed(args.seed)
    hood, y, log_alpha, logits = problem(args)
    print(f"{hood}, {args.particles} particles, {args.repeats} steps")
    print(
        f"{'labelled':>9} {'estimator':>10} {'|mean|':>9} {'sd':>9} {'joint/sd':>9} {'score':>14}"
    )
    for share in args.labelled:
        observed = torch.rand(hood.num_nodes) < share
        grads = {e: gradients(hood, y, log_alpha, logits, observed, e, args) for e in ESTIMATORS}
        sd = {e: g.var(0).sum().sqrt().item() for e, g in grads.items()}
        part, error = score_share(
            grads["one_step_credit"], grads["reward_to_go"], grads["no_score"]
        )
        shares = {"reward_to_go": "1", "reinforce": "1", "no_score": "0"}
        shares["one_step_credit"] = f"{part:7.2f} ± {error:.2f}"
        for e, g in grads.items():
            print(
                f"{int(observed.sum()):>9} {e:>10} {g.mean(0).norm():>9.2f} {sd[e]:>9.2f} "
                f"{sd['joint'] / sd[e]:>9.1f} {shares[e]:>14}"
            )


def score_share(biased, unbiased, direct):
    """
    How much of the true score term, ``unbiased`` minus ``direct`` in the mean, ``biased``
    carries, and the standard error of that ratio. The term's direction comes from the first
    half of the steps of ``biased``, so that noise in it cannot look like a share.
    """
    half = len(direct) // 2
    direction = biased[:half].mean(0) - direct[:half].mean(0)
    base = direct[half:] @ direction
    above, truth = biased[half:] @ direction, unbiased @ direction
    share = (above.mean() - base.mean()) / (truth.mean() - base.mean())
    variance = [x.var() / len(x) for x in (above, truth, base)]
    variance = variance[0] + share**2 * variance[1] + (1 - share) ** 2 * variance[2]
    return share.item(), (variance.sqrt() / (truth.mean() - base.mean()).abs()).item()


def parser() -> ArgumentParser:
    return arguments(
        __doc__, data_root=(Path, "folder of PyG's Planetoid data, for Cora itself"),
        labelled=[0.05, 0.2, 0.6, 1.0], particles=4, repeats=200, seed=0, threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
