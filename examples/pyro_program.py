# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Neighbor Mixture Model as a Pyro program: 34 members of a club, 4 observed communities."""

import pyro
import torch
from pyro.distributions import LogNormal
from pyro.infer import MCMC, SVI, TraceGraph_ELBO
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGibbs, ordered_guide
from pyro_nmm.models import NMMNetwork, nmm

pyro.set_rng_seed(0)
data = KarateClub()[0]
hood = Neighborhood(data.edge_index, data.num_nodes)
network = NMMNetwork(GCN(34, 16, 2, 4), GCN(34, 16, 1), num_classes=4)


def parameters():
    return hood, *pyro.module("network", network)(hood, data.x, data.edge_index)


def model(y, observed):
    nmm(*parameters(), y, observed)  # z ~ Dirichlet(alpha), c ~ Categorical(L), y ~ z[c]


def guide(y, observed):
    ordered_guide(*parameters(), y, observed)  # q(c | y) node after node, then z


svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceGraph_ELBO())
losses = [svi.step(data.y, data.train_mask) for _ in range(200)]
print(f"negative bound on log p(4 labels): {losses[0]:.2f} nats, {losses[-1]:.2f} at the end")

posterior = NeighborMixture(*parameters()).condition(data.y, data.train_mask)
marginals, rest = posterior.marginals(), ~data.train_mask
right = int((marginals.argmax(1) == data.y)[rest].sum())
print(f"most probable community is right for {right} of the other {int(rest.sum())} members")
size = (posterior.sample((1000,)) == 0).sum(1).double()  # of community 0, in joint draws
truth = int((data.y == 0).sum())
print(f"size of community 0: {size.mean():.1f} ± {size.std():.1f}, truth {truth}")


def with_prior(y):  # no network: equal concentrations, whose sum has a prior
    kappa = pyro.sample("kappa", LogNormal(0.0, 1.0))
    nmm(hood, kappa * torch.full((34, 4), 0.25), torch.zeros(hood.num_edges), y, collapsed=True)


mcmc = MCMC(FieldGibbs(with_prior), num_samples=200, warmup_steps=50, disable_progbar=True)
mcmc.run(data.y)
kappa = mcmc.get_samples()["kappa"]
low, high = kappa.quantile(torch.tensor([0.05, 0.95])).tolist()
print(f"concentration given all 34 labels: 90 % in {low:.2f} to {high:.2f}")
alpha = kappa.mean() * torch.full((34, 4), 0.25)
learned = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges))
same = learned.pairwise(torch.tensor([[14], [15]])).diagonal(dim1=1, dim2=2).sum()
print(
    f"14 and 15, who have the same friends, agree before a label is seen: {same:.2f}, chance 0.25"
)
