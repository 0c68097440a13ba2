# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The Neighbor Mixture Model in plain Pyro on Zachary's karate club, compared with the library.

N nodes have C labels. alpha (N, C) are concentrations. L (N, N) is the attention: node i chooses
neighbour j with probability L[i, j]. nodes (n,) are the observed nodes, and y (n,) their labels.
"""

import pyro
import torch
from pyro.distributions import Categorical, Dirichlet
from pyro.infer import Trace_ELBO
from pyro.poutine import condition, replay, trace
from torch.nn.functional import one_hot
from torch_geometric.datasets import KarateClub


def attention(edge_index, scores):
    """L: the softmax of scores (N, N) over the neighbours of each node and the node itself."""
    near = torch.eye(len(scores), dtype=torch.bool)
    near[edge_index[1], edge_index[0]] = True
    return scores.masked_fill(~near, -torch.inf).softmax(1)


def model(alpha, L, nodes, y):
    """Equation (1) of the paper. Leaving out unobserved nodes marginalises them exactly."""
    z = pyro.sample("z", Dirichlet(alpha).to_event(1))  # (N, C): a label distribution of each node
    for i, label in zip(nodes, y, strict=True):
        c = pyro.sample(f"c_{i}", Categorical(L[i]))  # node i chooses a neighbour
        pyro.sample(f"y_{i}", Categorical(z[c]), obs=label)  # and draws its label from it


def guide(alpha, L, nodes, y):
    """Equation (6): each node chooses given its label and the choices and labels before it."""
    urns = alpha  # row j: alpha_j plus the number of times that each label was drawn from z_j
    for i, label in zip(nodes, y, strict=True):
        weights = L[i] * urns[:, label] / urns.sum(1)  # p(c_i, y_i | earlier choices and labels)
        c = pyro.sample(f"c_{i}", Categorical(weights))
        urns = urns + one_hot(c, len(alpha))[:, None] * one_hot(label, alpha.shape[1])
    pyro.sample("z", Dirichlet(urns).to_event(1))  # the exact posterior given the choices


def bound(alpha, L, nodes, y):
    """One draw of log p(z, c, y) - log q(z, c | y). Its mean is the bound (5) on log p(y)."""
    return -Trace_ELBO().loss(model, guide, alpha, L, nodes, y)


def count(alpha, y, c):
    """(N, C): alpha plus the number of nodes that chose source j and have label k."""
    return alpha.index_put((c, y), torch.ones_like(alpha[c, y]), accumulate=True)


def marginals(alpha, L):
    """(N, C): p(y_i) of every node, by the mean of equation (2)."""
    return L @ (alpha / alpha.sum(1, keepdim=True))


def predict(alpha, L, nodes, y, c):
    """(N, C): p(y_i | c, y), section 3.6. The mean over draws of p(c | y) is p(y_i | y)."""
    probs = marginals(count(alpha, y, c), L)
    probs[nodes] = one_hot(y, alpha.shape[1]).to(probs)
    return probs


def gibbs_sweep(alpha, L, nodes, y, c):
    """Draw each choice again, given all others. After many sweeps c is a draw of p(c | y)."""
    c, urns = c.clone(), count(alpha, y, c)
    for n, i in enumerate(nodes):
        urns[c[n], y[n]] -= 1
        c[n] = (L[i] * urns[:, y[n]] / urns.sum(1)).multinomial(1)  # as in the guide
        urns[c[n], y[n]] += 1
    return c


def compare(name, ours, library, error=None):
    """Print our last entry and the largest difference: rounding, or below 4 standard errors."""
    difference = (ours - library).abs().max().item()
    unit = f", {difference / error:.1f} standard errors" if error else ""
    print(f"{name:28} {ours.flatten()[-1]:8.3f}   library differs by {difference:.0e}{unit}")
    assert difference < (4 * error if error else 1e-10)


if __name__ == "__main__":
    from pyro_nmm import Neighborhood, NeighborMixture
    from pyro_nmm.models import nmm

    pyro.set_rng_seed(0)
    data, nodes = KarateClub()[0], torch.arange(0, 34, 2)  # every second label is observed
    y, friends = data.y[nodes], data.edge_index[0].bincount().double()
    alpha = (1 + y.bincount(minlength=4).double()).expand(34, 4) / (4 + len(y))  # frequencies + 1
    L = attention(data.edge_index, friends.log().expand(34, 34))  # proportional to friends
    given = alpha, L, nodes, y

    observed = torch.isin(torch.arange(34), nodes)
    hood = Neighborhood(data.edge_index, 34)
    mix = NeighborMixture(hood, alpha, L[hood.target, hood.source].log())
    q = mix.choices(data.y, observed, order=nodes)
    draw = trace(guide).get_trace(*given)
    z, c = draw.nodes["z"]["value"], torch.stack([draw.nodes[f"c_{i}"]["value"] for i in nodes])
    ours = trace(replay(model, draw)).get_trace(*given)
    library = trace(condition(nmm, {"z": z, "c": c}))
    library = library.get_trace(hood, alpha, mix.logits, data.y, observed)
    compare("log p(z, c, y)", ours.log_prob_sum(), library.log_prob_sum())
    compare("log q(c | y)", draw.log_prob_sum(lambda name, _: name != "z"), q.log_prob(c))
    draws = torch.tensor([bound(*given) for _ in range(100)])
    library = q.log_terms(q.sample((10_000,))).sum(1)
    compare("bound on log p(y)", draws.mean(), library.mean(), draws.std().item() / 10)
    compare("p(y_i), last p(y_33 = 3)", marginals(alpha, L), mix.marginals())
    one = mix.condition(data.y, observed, num_samples=1)
    ours = predict(alpha, L, one.nodes, data.y[one.nodes], one.components.choices[0])
    compare("p(y_i | c, y)", ours, one.marginals())
    for k in range(100):
        c = L[nodes].multinomial(1)[:, 0]  # from the prior
        for _ in range(10):
            c = gibbs_sweep(*given, c)
        draws[k] = predict(*given, c)[:, 0].sum()
    library = mix.condition(data.y, observed, num_samples=1000, num_sweeps=20).marginals()[:, 0]
    compare("E[members with label 0 | y]", draws.mean(), library.sum(), draws.std().item() / 10)
