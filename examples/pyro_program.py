# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Neighbor Mixture Model as a Pyro program: 34 members of a club, 4 observed communities."""

from pathlib import Path

import pyro
import torch
from pyro.distributions import LogNormal, Normal
from pyro.infer import MCMC, SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import Adam, ClippedAdam
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN
from torch_geometric.utils import degree

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM, AutoNMM, FieldGibbs, check_fit
from pyro_nmm.models import NMMNetwork, nmm

pyro.set_rng_seed(0)
data = KarateClub()[0]
hood = Neighborhood(data.edge_index, data.num_nodes)

print("A network, and the labels of four members")
network = NMMNetwork(GCN(34, 16, 2, 4), GCN(34, 16, 1), num_classes=4)
program, inputs = AmortizedNMM(hood, network), (data.x, data.edge_index)
svi = SVI(program.model, program.guide, Adam({"lr": 0.01}), TraceGraph_ELBO())
losses = [svi.step(*inputs, y=data.y, observed=data.train_mask) for _ in range(200)]
print(f"negative bound on log p(4 labels): {losses[0]:.2f} nats, {losses[-1]:.2f} at the end")

posterior = program.mixture(*inputs).condition(data.y, data.train_mask)
marginals, rest = posterior.marginals(), ~data.train_mask
right = int((marginals.argmax(1) == data.y)[rest].sum())
print(f"most probable community is right for {right} of the other {int(rest.sum())} members")
size = (posterior.sample((1000,)) == 0).sum(1).double()  # of community 0, in joint draws
truth = int((data.y == 0).sum())
print(f"size of community 0: {size.mean():.1f} ± {size.std():.1f}, truth {truth}")
print("The interval has labels alone: it takes the network, learned from four, for the true one")

print("\nPriors, and all 34 labels")
fame = degree(hood.source).log()[hood.source]  # of each edge: its source's number of friends


def model(y):  # no network: equal concentrations, whose sum has a prior
    kappa = pyro.sample("kappa", LogNormal(0.0, 1.0))
    beta = pyro.sample("beta", Normal(0.0, 1.0))
    alpha = kappa[..., None, None] * torch.full((34, 4), 0.25)
    nmm(hood, alpha, beta[..., None] * fame, y, collapsed=True)


guide = AutoNMM(model)
elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
svi = SVI(model, guide, ClippedAdam({"lr": 0.1, "lrd": 0.99}), elbo)
for _ in range(300):
    svi.step(data.y)
check = check_fit(guide, data.y)
print(check)

with pyro.get_param_store().scope():  # another guide, with parameters of the same names
    loose = AutoNMM(model, estimator="reward_to_go")  # choices from q(c | y): the ELBO of an NMM
    svi = SVI(model, loose, ClippedAdam({"lr": 0.1, "lrd": 0.99}), elbo)
    for _ in range(300):
        svi.step(data.y)
    by_elbo = loose.median()["kappa"]
    with torch.no_grad():
        kappas = {"SVI, ELBO alone": torch.stack([loose(data.y)["kappa"] for _ in range(1000)])}
by_chains = guide.median()["kappa"]
print(f"median of kappa by the ELBO alone: {by_elbo:.2f}; by AutoNMM: {by_chains:.2f}")

mcmc = MCMC(FieldGibbs(model), num_samples=300, warmup_steps=50)  # with a bar of its progress
mcmc.run(data.y)
draws = mcmc.get_samples()
ends = [0.05, 0.95]
for name, by_svi in guide.quantiles(ends).items():
    by_mcmc = draws[name].quantile(torch.tensor(ends)).tolist()
    svi_low, svi_high, low, high = (f"{end:.2f}" for end in [*by_svi, *by_mcmc])
    print(f"{name}: 90 % in {svi_low} to {svi_high} by SVI, in {low} to {high} by MCMC")
alpha = draws["kappa"].mean() * torch.full((34, 4), 0.25)
learned = NeighborMixture(hood, alpha, draws["beta"].mean() * fame)
same = learned.pairwise(torch.tensor([[14], [15]])).diagonal(dim1=1, dim2=2).sum()
print(
    f"14 and 15, who have the same friends, agree before a label is seen: {same:.2f}, chance 0.25"
)
entropies = []
for seen in data.train_mask, data.train_mask | (torch.arange(34) == 14):
    probs = learned.condition(data.y, seen, num_samples=2000).marginals()
    entropies.append(torch.special.entr(probs).sum(1))
lost = (entropies[0] - entropies[1])[[15, 18, 20, 22]].mean()
print(f"the label of 14 takes {lost:.2f} nats of entropy from each of four others with its friends")

if __name__ == "__main__":
    from drawing.pyro_program import draw

    with torch.no_grad():
        kappas["SVI, AutoNMM"] = torch.stack([guide(data.y)["kappa"] for _ in range(1000)])
    kappas["MCMC, FieldGibbs"] = draws["kappa"]
    draw(Path("output/pyro_program.png"), kappas, data.edge_index, entropies, data.train_mask, 14)
