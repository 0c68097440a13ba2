# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``examples/one_file.py`` beside enumeration and beside the library, on small graphs."""

import itertools
import runpy
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from documents import ROOT, load
from oracle import of_hood
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from pyro.poutine import condition, trace
from torch.testing import assert_close

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import nmm

ONE_FILE = load("examples/one_file.py")
PATH = [[0, 1, 1, 2], [1, 0, 2, 1]]
#: Edges, number of nodes and of labels, observed nodes, whether attention differs.
CASES = {
    "two labels": (PATH, 3, 2, [0, 1, 2], False),
    "three labels": (PATH, 3, 3, [0, 2], False),
    "a node with its self-loop alone": ([[0, 1], [1, 0]], 3, 2, [0, 1, 2], False),
    "weighted attention": ([[0, 1, 2, 3, 0, 2], [1, 0, 3, 2, 2, 0]], 4, 3, [3, 0, 1], True),
    "directed edges": ([[0, 0, 3], [1, 2, 2]], 4, 2, [1, 2, 3], True),
}


@pytest.fixture(params=CASES)
def case(request):
    """Arguments of the file, the mixture of the library, and the table of the oracle."""
    pyro.set_rng_seed(0)
    edges, num_nodes, num_labels, nodes, weighted = CASES[request.param]
    edges, nodes = torch.tensor(edges), torch.tensor(nodes)
    scores = torch.randn(num_nodes, num_nodes).double() * weighted
    L = ONE_FILE.attention(edges, scores)
    alpha = torch.rand(num_nodes, num_labels).double() + 0.2
    labels = torch.randint(num_labels, (num_nodes,))
    hood = Neighborhood(edges, num_nodes)
    logits = scores[hood.target, hood.source]
    assert_close(L[hood.target, hood.source], hood.softmax(logits))
    assert ((L > 0).sum() == hood.num_edges).all()
    oracle = of_hood(hood, alpha, logits, nodes.tolist())
    joint = torch.from_numpy(oracle.log_joint[oracle.index(labels[nodes].numpy())])
    return SimpleNamespace(
        given=(alpha, L, nodes, labels[nodes]), labels=labels, hood=hood, oracle=oracle,
        observed=torch.isin(torch.arange(num_nodes), nodes), joint=joint,
        mix=NeighborMixture(hood, alpha, logits), choices=torch.from_numpy(oracle.choices),
    )  # fmt: skip


def sites_of(nodes, c, **others):
    return others | {f"c_{i}": j for i, j in zip(nodes, c, strict=True)}


def test_model_and_guide(case):
    """At every choice: the model's density is the library's, and its ratio to the guide's is the
    oracle's p(y, c) over the library's q(c | y)."""
    alpha, _, nodes, _ = case.given
    order = nodes.argsort()
    q = case.mix.choices(case.labels, case.observed, order=nodes)
    for c, log_joint in zip(case.choices, case.joint, strict=True):
        z = torch.distributions.Dirichlet(alpha).sample()
        values = sites_of(nodes, c, z=z)
        ours = trace(condition(ONE_FILE.model, values)).get_trace(*case.given).log_prob_sum()
        program = trace(condition(nmm, {"z": z, "c": c[order]}))
        arguments = case.hood, alpha, case.mix.logits, case.labels, case.observed
        assert_close(ours, program.get_trace(*arguments).log_prob_sum())
        guide = trace(condition(ONE_FILE.guide, values)).get_trace(*case.given)
        log_q = guide.log_prob_sum(lambda name, _: name != "z")
        assert_close(log_q, q.log_prob(c[order]))
        assert_close(ours - guide.log_prob_sum(), log_joint - log_q)


def test_bound(case):
    """Its mean is the expectation by enumeration."""
    _, _, nodes, _ = case.given
    q = case.mix.choices(case.labels, case.observed, order=nodes)
    log_q = q.log_prob(case.choices[:, nodes.argsort()])
    mean = (log_q.exp() * (case.joint - log_q)).sum().item()
    draws = torch.tensor([ONE_FILE.bound(*case.given) for _ in range(100)])
    assert abs(draws.mean() - mean) < 4 * draws.std() / 10 + 1e-6
    assert mean <= case.joint.logsumexp(0) + 1e-12


def test_marginals(case):
    alpha, L, nodes, _ = case.given
    ours = ONE_FILE.marginals(alpha, L)
    assert_close(ours, case.mix.marginals())
    for position, i in enumerate(nodes):
        assert_close(ours[i], torch.from_numpy(case.oracle.marginal(position)))


def test_prediction(case):
    """The mean over all choices, by their probabilities, is the exact posterior."""
    weights = case.joint.softmax(0)
    each = [ONE_FILE.predict(*case.given, c) for c in case.choices]
    ours = torch.einsum("t,tnk->nk", weights, torch.stack(each))
    assert_close(ours, case.mix.condition(case.labels, case.observed).marginals())
    alpha, _, nodes, y = case.given
    every = of_hood(case.hood, alpha, case.mix.logits)
    rest, log_probs = every.given(nodes.tolist(), y.numpy())
    others = [i for i in range(len(alpha)) if i not in nodes]
    for position, i in enumerate(others):
        table = np.bincount(rest[:, position], np.exp(log_probs), alpha.shape[1])
        assert_close(ours[i], torch.from_numpy(table))


def test_gibbs_sweep(case, monkeypatch):
    """A sweep draws every choice from the oracle's p(c_i | other choices, y)."""
    _, _, nodes, _ = case.given
    known = {
        tuple(c): p.item() for c, p in zip(case.choices.tolist(), case.joint.exp(), strict=True)
    }
    start = case.choices[len(case.choices) // 2]
    seen, draw = [], torch.Tensor.multinomial

    def recorded(weights, number):
        seen.append((weights / weights.sum(), draw(weights, number)))
        return seen[-1][1]

    monkeypatch.setattr(torch.Tensor, "multinomial", recorded)
    end, state = ONE_FILE.gibbs_sweep(*case.given, start), start.tolist()
    for n, (weights, chosen) in enumerate(seen):
        exact = torch.zeros_like(weights)
        for j in range(len(weights)):
            exact[j] = known.get((*state[:n], j, *state[n + 1 :]), 0.0)
        assert_close(weights, exact / exact.sum())
        state[n] = chosen.item()
    assert end.tolist() == state
    assert len(seen) == len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceGraph_ELBO])
def test_gradient(loss):
    """Pyro's losses have the gradient of the bound by enumeration."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    L, nodes, y = ONE_FILE.attention(torch.tensor(PATH), torch.zeros(3, 3)), [0, 1, 2], [0, 0, 1]
    given = L.double(), nodes, torch.tensor(y)
    alpha = torch.full((3, 2), 0.6).double().requires_grad_()
    bound = 0.0
    for c in itertools.product(*(row.nonzero()[:, 0] for row in L)):
        sites = sites_of(nodes, c, z=torch.full((3, 2), 0.5).double())
        q = trace(condition(ONE_FILE.guide, sites)).get_trace(alpha, *given)
        p = trace(condition(ONE_FILE.model, sites)).get_trace(alpha, *given)
        weight = q.log_prob_sum(lambda name, _: name != "z").exp()
        bound = bound + weight * (p.log_prob_sum() - q.log_prob_sum())
    exact = torch.autograd.grad(bound, alpha)[0]
    parameter = pyro.param("alpha", alpha.detach())
    programs = [
        lambda f=f: f(pyro.param("alpha"), *given) for f in (ONE_FILE.model, ONE_FILE.guide)
    ]
    grads = []
    for _ in range(200):
        loss().loss_and_grads(*programs)
        grads.append(-parameter.grad)
        parameter.grad = None
    grads = torch.stack(grads)
    assert ((grads.mean(0) - exact).abs() < 4.5 * grads.std(0) / 200**0.5).all()


@pytest.mark.slow
def test_it_runs(capsys):
    """As a program: it compares itself with the library, and fails where they differ."""
    runpy.run_path(str(ROOT / "examples" / "one_file.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    drawn = ["standard errors" in line for line in lines]
    assert drawn == [False, False, True, False, False, True]


def test_it_is_short():
    text = (ROOT / "examples" / "one_file.py").read_text()
    assert len(text.splitlines()) <= 120
    assert "pyro_nmm" not in text.partition("if __name__")[0]
