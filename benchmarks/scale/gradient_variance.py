# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
The noise of each gradient estimator under Pyro's TraceGraph_ELBO, at equal particles.

    python benchmarks/gradient_variance.py --results benchmarks/results/gradient_variance.jsonl
    python benchmarks/gradient_variance.py --data-root data/planetoid

The graph has Cora's size, labels are drawn from an NMM, and gradients (to log alpha and
logits) are taken at perturbed parameters. ``sd`` is the root of the total variance of one
step's gradient, ``score`` the share of the true score term that an estimator carries: one
for the unbiased ones and zero for ``no_score`` by construction, measured for ``one_step_credit``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch.nn.functional import one_hot

from benchmarks.shared.common import Records, grouped, started, table, wrapped
from benchmarks.shared.timing import citation_like
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import planetoid
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

ESTIMATORS = ("reinforce", "reward_to_go", "one_step_credit", "no_score")
EXACT = {"reinforce": "1", "reward_to_go": "1", "no_score": "0"}


def problem(args, num_classes: int = 7):
    """A graph, labels, and parameters away from those that made the labels."""
    if args.data_root:
        data = planetoid("cora", args.data_root)
        hood, y = Neighborhood(data.edge_index, data.num_nodes), data.y
        logits = torch.randn(hood.num_edges)
        alpha = hood.sum(one_hot(y[hood.source], num_classes).T.double()).T + 0.3
    else:
        edge_index = citation_like(2708, 5278, args.seed)
        hood = Neighborhood(edge_index, int(edge_index.max()) + 1)
        logits = torch.randn(hood.num_edges)
        alpha = torch.randn(hood.num_nodes, num_classes).mul(1.5).exp()
        y = NeighborMixture(hood, alpha, logits).sample()
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


def main(argv: list[str] | None = None) -> Records:
    args = started(
        argv, __doc__, smoke={"labelled": [0.05], "particles": 2, "repeats": 4},
        data_root=(Path, "folder of PyG's Planetoid data, for Cora itself"),
        labelled=[0.05, 0.2, 0.6, 1.0], particles=4, repeats=200, seed=0,
        results=(Path, "lines of JSON that are added to"),
    )  # fmt: skip
    torch.set_default_dtype(torch.double)
    results = Records(args.results)
    known = {"graph": "Cora" if args.data_root else "of Cora's size", "particles": args.particles}
    known |= {"repeats": args.repeats, "seed": args.seed}
    for key in results.missing(**known, share=args.labelled):
        pyro.set_rng_seed(args.seed)
        hood, *parameters = problem(args)
        observed = torch.rand(hood.num_nodes) < key["share"]
        grads = {e: gradients(hood, *parameters, observed, e, args) for e in ESTIMATORS}
        share = score_share(grads["one_step_credit"], grads["reward_to_go"], grads["no_score"])
        for estimator, found in grads.items():
            row = {"labelled": int(observed.sum()), "estimator": estimator, "steps": len(found)}
            row |= {"mean": found.mean(0).norm().item(), "sd": found.var(0).sum().sqrt().item()}
            if estimator == "one_step_credit":
                row |= {"score": share[0], "score error": share[1]}
            results.add(**key, **row)
    print(tables(results.rows)["gradient variance"])
    return results


def parts(rows: list[dict]) -> list[dict[str, dict]]:
    """Rows of one problem each, by estimator."""
    found = grouped(rows, "graph", "particles", "repeats", "seed", "share").values()
    return [{row["estimator"]: row for row in part} for part in found]


def tables(rows: list[dict]) -> dict[str, str]:
    """Of the stored measurements, for ``report.py``."""
    lines = []
    for part in parts(rows):
        noise = part.get("reinforce", {}).get("sd")
        for estimator, row in part.items():
            # A mean that is within twice its own noise says nothing.
            known = row["mean"] > 2 * row["sd"] / row["steps"] ** 0.5
            measured = f"{row['score']:.2f} ± {row['score error']:.2f}" if "score" in row else ""
            mean, ratio = f"{row['mean']:.2f}" if known else "–", noise and noise / row["sd"]
            cells = [f"{row['labelled']}", f"`{estimator}`", f"{row['steps']}", mean]
            cells += [f"{row['sd']:,.2f}", f"{ratio:,.0f}" if ratio else ""]
            lines.append([*cells, measured or EXACT.get(estimator, "")])
    head = "labelled | estimator | steps | \\|mean\\| | sd | sd of `reinforce` / sd | "
    share = "share of the score term"
    return {"gradient variance": table(head + share, lines, left=2), "gradient bias": bias(rows)}


def bias(rows: list[dict]) -> str:
    """What the biased estimators leave out, and what the unbiased ones pay, in a sentence."""
    whole = [part for part in parts(rows) if part.keys() >= set(ESTIMATORS)]
    shares = [part["one_step_credit"]["score"] for part in whole]
    means = [part["no_score"]["mean"] / part["reward_to_go"]["mean"] for part in whole]
    noise = [part["reward_to_go"]["sd"] / part["one_step_credit"]["sd"] for part in whole]
    nodes = [part["no_score"]["labelled"] for part in whole]
    return wrapped(
        f"With {min(nodes)} to {max(nodes)} labelled nodes `one_step_credit` carries "
        f"{min(shares):.2f} to {max(shares):.2f} of the true score term, and `no_score` none. "
        f"The score term is small: the mean gradient of `no_score` has {min(means):.3f} to "
        f"{max(means):.3f} of the length of that of `reward_to_go`. The noise of `reward_to_go` is "
        f"{min(noise):.0f} to {max(noise):.0f} times that of `one_step_credit`."
    )


if __name__ == "__main__":
    main()
