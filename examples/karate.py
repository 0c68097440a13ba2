# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Zachary's karate club: 34 members, four communities, one labelled member in each.

The graph is small enough for exact answers. The example compares the bound with the exact
likelihood, and sampled posterior marginals with exact ones.

    python examples/karate.py --output output/karate.png
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial

import pyro
from common import options, progress_bar
from drawing.karate import draw
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork


def main(args) -> dict:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    data = KarateClub()[0].to(args.device)
    hood = Neighborhood(data.edge_index, data.num_nodes)
    labels = GCN(data.num_features, 16, num_layers=2, out_channels=4, dropout=0.5)
    attention = GCN(data.num_features, 16, num_layers=1)
    network = NMMNetwork(labels, attention, num_classes=4, link="softplus", floor=0.05)
    network = network.to(args.device)
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(num_particles=8, vectorize_particles=True)
    svi = SVI(program.model, program.guide, Adam(partial(settings, args.lr)), elbo)

    inputs, labelled = (data.x, data.edge_index), data.train_mask
    nodes = labelled.nonzero()[:, 0]
    for _ in progress_bar(range(args.num_steps), desc="karate"):
        svi.step(*inputs, y=data.y, observed=labelled)
    mix = program.mixture(*inputs)
    bound = mix.elbo(data.y, labelled, num_samples=256).mean().item()
    log_prob = mix.log_marginal(nodes, data.y[nodes]).item()

    # Posterior of the unlabelled members: exact, and from samples as on large graphs.
    truth = mix.condition(data.y, labelled)
    post = mix.condition(data.y, labelled, num_samples=256)
    rest = ~labelled
    accuracy = (truth.predict()[rest] == data.y[rest]).double().mean().item()
    error = (truth.marginals() - post.marginals()).abs().max().item()
    choices = int(hood.restrict(labelled).ptr.diff().prod())
    print(f"log p(y) of the 4 labels, exact over {choices} choices  {log_prob:8.4f}")
    print(f"lower bound, mean of 256 samples                   {bound:8.4f}")
    print(f"largest error of a sampled posterior marginal      {error:8.4f}")
    print(f"accuracy on the other {int(rest.sum())} members                   {accuracy:8.4f}")
    if args.output:
        draw(args.output, data, mix, truth)
    return {"accuracy": accuracy, "bound": bound, "log_prob": log_prob, "error": error}


def settings(lr, name) -> dict:
    """Parameter groups with weight decay on all but omega: decay would switch off its attention."""
    return {"lr": lr, "weight_decay": 0.0 if name.endswith("omega") else 0.02}


def parser() -> ArgumentParser:
    return options(__doc__, "karate.png", num_steps=150, lr=0.02, seed=0, device="cpu")


if __name__ == "__main__":
    main(parser().parse_args())
