# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Other models of the winners in counties: regressions, fields and a graph network."""

import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from scipy.sparse import csr_matrix
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from benchmarks.maps.data import Problem
from pyro_nmm.models import potts

#: Joint draws of the held-out labels.
NUM_DRAWS = 400
#: Rounds of imputation of the autologistic model, its chains, and sweeps of a round.
ROUNDS, CHAINS, SWEEPS = 40, 20, 5
#: Epochs of a network at most, and epochs without a better validation score before it stops.
MOST_EPOCHS, PATIENCE = 500, 50
#: Warm-up steps and draws of NUTS.
WARMUP, SAMPLES = 400, 200


class Found(NamedTuple):
    """Probabilities ``(N,)`` of label 1, joint draws ``(D, N)`` if there are any, and a row."""

    probs: Tensor
    draws: Tensor | None = None
    row: dict = {}


def covariates(problem: Problem, around: bool) -> ndarray:
    """``(N, F)``; ``around`` appends the means of the neighbours."""
    parts = [problem.data.x, problem.around] if around else [problem.data.x]
    return torch.cat(parts, 1).double().numpy()


def regression(problem: Problem, settings: dict) -> Found:
    """Logistic regression."""
    x, train = covariates(problem, settings["around"]), problem.train.numpy()
    fit = LogisticRegression(C=settings["C"], max_iter=2000)
    fit.fit(x[train], problem.data.y.numpy()[train])
    return Found(torch.from_numpy(fit.predict_proba(x)[:, 1]))


def adjacency(problem: Problem) -> csr_matrix:
    """``(N, N)``, without the diagonal."""
    source, target = problem.data.edge_index.numpy()
    size = problem.data.num_nodes
    return csr_matrix((np.ones(len(source)), (target, source)), shape=(size, size))


def autologistic(problem: Problem, settings: dict) -> Found:
    r"""A Potts field of two labels with covariates, fitted by pseudo-likelihood (Besag 1975).

    .. math::

        \mathrm{logit}\, p(y_i = 1 \mid y_{-i}) = x_i \beta + \eta \sum_{j \sim i} (2 y_j - 1)

    ``mean`` divides the sum by the number of neighbours. The pseudo-likelihood has the training
    counties. Gibbs sampling draws their unobserved neighbours between its maximisations, and the
    second half of the rounds is averaged.
    """
    size, train = problem.data.num_nodes, problem.train.numpy()
    x, matrix = covariates(problem, settings["around"]), adjacency(problem)
    if settings["mean"]:
        degree = np.maximum(matrix.sum(1).A1, 1)
        matrix = csr_matrix(matrix.multiply(1 / degree[:, None]))
    source, target = problem.data.edge_index
    pairs = problem.data.edge_index[:, source < target]
    colors = potts(pairs, 1.0, torch.zeros(size, 2)).colors()
    colors = [color[~problem.train[color]].numpy() for color in colors]
    parts = [(color, matrix[color]) for color in colors if len(color)]
    random = np.random.default_rng(settings["seed"])
    start = regression(problem, settings).probs.numpy()[:, None]
    labels = (random.random((size, CHAINS)) < start) * 2.0 - 1
    labels[train] = 2.0 * problem.data.y.numpy()[train, None] - 1

    def sweep(weights: ndarray) -> None:
        fixed = x @ weights[1:-1] + weights[0]
        for color, part in parts:
            logits = fixed[color, None] + weights[-1] * (part @ labels)
            labels[color] = (random.random(logits.shape) < expit(logits)) * 2.0 - 1

    def maximum() -> ndarray:
        around = (matrix @ labels)[train]
        rows = np.concatenate([np.c_[x[train], column] for column in around.T[:4]])
        fit = LogisticRegression(C=settings["C"] / 4, max_iter=2000)
        fit.fit(rows, np.tile(problem.data.y.numpy()[train], 4))
        return np.r_[fit.intercept_, fit.coef_[0]]

    weights, kept = maximum(), []
    for number in range(ROUNDS):
        for _ in range(SWEEPS):
            sweep(weights)
        weights = maximum()
        if number >= ROUNDS // 2:
            kept.append(weights)
    weights, probs, draws = np.mean(kept, 0), 0.0, []
    fixed = x @ weights[1:-1] + weights[0]
    for _ in range(10 * SWEEPS):
        sweep(weights)
    number = NUM_DRAWS // CHAINS
    for _ in range(number):
        for _ in range(SWEEPS):
            sweep(weights)
        local = expit(fixed[:, None] + weights[-1] * (matrix @ labels))
        probs = probs + local.mean(1) / number
        draws.append(labels.T > 0)
    row = {"coupling": float(weights[-1]), "coefficients": weights[:-1].tolist()}
    return Found(torch.from_numpy(probs), torch.from_numpy(np.concatenate(draws)).long(), row)


class Convolutions(nn.Module):
    """Two layers of a GCN."""

    def __init__(self, num_inputs: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList([
            GCNConv(num_inputs, hidden, normalize=False), GCNConv(hidden, 2, normalize=False)
        ])  # fmt: skip

    def forward(self, x: Tensor, edges: tuple) -> Tensor:
        x = F.dropout(self.layers[0](x, *edges).relu(), self.dropout, self.training)
        return self.layers[1](x, *edges)


def network(problem: Problem, settings: dict) -> Found:
    """A GCN. Without ``epochs`` among the settings, the scored counties stop it early.

    ``labels`` appends the labels of training counties to the covariates. In each epoch a random
    half of them is an input, and the loss has the other half (Shi et al. 2021).
    """
    data, train = problem.data, problem.train
    torch.manual_seed(settings["seed"])
    edges, sign = gcn_norm(data.edge_index, num_nodes=data.num_nodes), 2.0 * data.y[:, None] - 1
    model = Convolutions(
        data.x.shape[1] + 2 * settings["labels"], settings["hidden"], settings["dropout"]
    )
    adam = torch.optim.Adam(model.parameters(), settings["lr"], weight_decay=5e-4)

    def logits(shown: Tensor) -> Tensor:
        seen = shown[:, None].float()
        x = torch.cat([data.x, seen, seen * sign], 1) if settings["labels"] else data.x
        return model(x, edges)

    best, epochs = (float("inf"), 0, copy.deepcopy(model.state_dict())), settings.get("epochs")
    for epoch in range(1, (epochs or MOST_EPOCHS) + 1):
        model.train()
        shown = train & (torch.rand(len(train)) < 0.5) if settings["labels"] else ~train & False
        scored = train & ~shown
        adam.zero_grad()
        F.cross_entropy(logits(shown)[scored], data.y[scored]).backward()
        adam.step()
        if epochs:
            continue
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(logits(train)[problem.scored], data.y[problem.scored]).item()
        if loss < best[0]:
            best = loss, epoch, copy.deepcopy(model.state_dict())
        if epoch - best[1] >= PATIENCE:
            break
    if not epochs:
        model.load_state_dict(best[2])
    model.eval()
    with torch.no_grad():
        probs = logits(train).softmax(-1)[:, 1]
    return Found(probs, None, {} if epochs else {"epochs": best[1]})


def car(problem: Problem, settings: dict) -> Found:
    r"""Logistic regression with a Gaussian conditional autoregressive effect, by NumPyro's NUTS.

    Counties without neighbours have independent effects, because the precision of
    ``numpyro.distributions.CAR`` is zero there. Effects are scaled draws of a unit field, so that
    their standard deviation and they do not depend on each other a priori.
    """
    import jax
    import numpyro
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    x = jnp.asarray(covariates(problem, settings["around"]))
    alone = problem.alone.numpy()
    joined, single = np.flatnonzero(~alone), np.flatnonzero(alone)
    matrix, train = adjacency(problem)[joined][:, joined], np.flatnonzero(problem.train.numpy())
    y = jnp.asarray(problem.data.y.numpy()[train])

    def model() -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(settings["prior"]))
        correlation = numpyro.sample("correlation", dist.Uniform(0.0, 1.0))
        field = dist.CAR(jnp.zeros(len(joined)), correlation, 1.0, matrix, is_sparse=True)
        effect = jnp.zeros(len(x)).at[joined].set(numpyro.sample("effect", field))
        if len(single):
            apart = numpyro.sample("apart", dist.Normal(0.0, 1.0).expand([len(single)]).to_event(1))
            effect = effect.at[single].set(apart)
        logits = numpyro.deterministic("logits", intercept + x @ beta + scale * effect)
        numpyro.sample("y", dist.Bernoulli(logits=logits[train]).to_event(1), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=WARMUP, num_samples=SAMPLES, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(settings["seed"]), extra_fields=("num_steps", "diverging"))
    draws = mcmc.get_samples(group_by_chain=True)
    probs = expit(np.asarray(draws["logits"][0]))
    labels = np.random.default_rng(settings["seed"]).random(probs.shape) < probs
    few = {name: draws[name] for name in ("intercept", "beta", "scale", "correlation")}
    summary = numpyro.diagnostics.summary(few)
    row = {name: float(np.mean(draws[name])) for name in ("scale", "correlation")}
    row["effective draws"] = {name: float(np.min(v["n_eff"])) for name, v in summary.items()}
    extra = mcmc.get_extra_fields()
    row["steps"] = float(np.mean(extra["num_steps"]))
    row |= {"divergent": int(np.sum(extra["diverging"])), "warm-up": WARMUP, "draws": SAMPLES}
    return Found(torch.from_numpy(probs.mean(0)), torch.from_numpy(labels).long(), row)
