# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Gibbs sweeps from given samples, against the enumerated distribution of all states."""

import itertools

import numpy as np
import pytest
import torch
from cases import matrices
from graphs import parameters, random_sources, to_hood
from networkx import cycle_graph
from oracle import of_hood
from scipy.stats import chisquare
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture, compiled
from pyro_nmm.ops.sampling import draw_entries
from pyro_nmm.ops.sweeps import sweeps

SIZE = 6_000
CASES = "labels", "evidence", "evidence of edges", "matrices", "sources", "mask"


def problem(case, concentration=0.2, dtype=torch.double):
    """The conditional of a small graph, and the evidence of its edges that says the same."""
    hood, num_classes = to_hood(cycle_graph(4)), 2
    if case == "sources":
        hood, num_classes = random_sources(4, 3, torch.Generator().manual_seed(0)), 3
    alpha, logits = parameters(hood, num_classes, scale=0.8)
    alpha, logits = (concentration * alpha).to(dtype), logits.to(dtype)
    y, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, True])
    relabel = matrices(hood, num_classes) if case == "matrices" else None
    mix = NeighborMixture(hood, alpha, logits, relabel)
    shown = y[hood.target]
    evidence = one_hot(shown, num_classes).double().log()
    if case == "matrices":
        evidence = relabel.gather(2, shown[:, None, None].expand(-1, 2, 1))[..., 0].log()
    elif case == "evidence":
        of_nodes = torch.randn(4, 2, dtype=dtype)
        of_nodes[1] = 0  # no observation
        return mix.latents(of_nodes), of_nodes[hood.target]
    elif case == "evidence of edges":
        evidence = torch.randn(hood.num_edges, 2)
        return mix.latents(evidence), evidence
    elif case == "mask":
        return mix.choices(y, mask), evidence
    return mix.in_order(y), evidence


def enumerated(q, evidence):
    """All states ``(Q, 2, n)``, choices with borrowed labels, and their probabilities."""
    states, probs = weighed(q, evidence)
    return states, probs / probs.sum()


def weighed(q, evidence):
    """The same, with probabilities that are joint with the evidence."""
    hood, rows = q.hood, q.observed_rows
    nodes = rows.nodes.tolist()
    oracle = of_hood(hood, q.alpha, q.logits, nodes)
    first, last = hood.ptr[nodes].tolist(), hood.ptr[rows.nodes + 1].tolist()
    edges = np.array(list(itertools.product(*map(range, first, last))))
    terms = evidence.numpy()[edges[None], oracle.labels[:, None]].sum(-1)
    probs = np.exp(oracle.log_joint + terms)  # (labels, choices)
    where = np.nonzero(probs)
    states = np.stack([oracle.choices[where[1]], oracle.labels[where[0]]], 1)
    return torch.as_tensor(states), torch.as_tensor(probs[where])


def as_values(q, states):
    """Samples of ``q``: of observed labels the choices alone."""
    return states if len(q.event_shape) == 2 else states[:, 0]


def p_value(values, states, probs):
    """Of a chi-squared test; cells of few states are pooled."""
    base = 5 ** torch.arange(states[0].numel())
    keys, order = (states.flatten(1) @ base).sort()
    cell = torch.searchsorted(keys, values.flatten(1) @ base).clamp(max=len(keys) - 1)
    assert torch.equal(keys[cell], values.flatten(1) @ base)  # no state of probability zero
    table = torch.stack([cell.bincount(minlength=len(keys)).double(), SIZE * probs[order]])
    table = table[:, table[1].argsort()]
    few = 1 + max(int((part < 8).sum()) for part in (table[1], table[1].cumsum(0)))
    table = torch.cat([table[:, :few].sum(1, keepdim=True), table[:, few:]], 1)
    return chisquare(*table.numpy()).pvalue


def check_sweeps(case):
    """Exact draws stay exact, and a state that all chains start from is forgotten."""
    q, evidence = problem(case)
    states, probs = enumerated(q, evidence)
    exact = as_values(q, states[probs.multinomial(SIZE, replacement=True)])
    states = as_values(q, states)
    for num_sweeps in (1, 2):
        assert p_value(q.sweep(exact, num_sweeps), states, probs) > 1e-4
    one = q.sample().expand(SIZE, *q.event_shape)
    assert p_value(one, states, probs) < 1e-4  # which the test sees
    for start in (one, q.sample((SIZE,))):
        assert p_value(q.sweep(start, 20), states, probs) > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_control_variate(case, way):
    """Has mean zero, exactly, and leaves choices the noise of their probabilities alone."""
    q, evidence = problem(case)
    states, probs = enumerated(q, evidence)
    one = q.sample().expand(SIZE, *q.event_shape)  # of no distribution in particular
    for value in (one, as_values(q, states[probs.multinomial(SIZE, replacement=True)])):
        swept, (shape, rows, drawn, shares) = q.swept_with_shares(value, 1, 0)
        edges = drawn[0].edges
        assert shape == (SIZE,)
        torch.testing.assert_close(rows.sum(shares), torch.ones(SIZE, rows.num_rows).to(shares))
        chosen = torch.zeros_like(shares).scatter_(1, edges, 1.0)
        surplus = chosen - shares
        error = surplus.std(0) / SIZE**0.5
        assert (surplus.mean(0).abs() <= 4.5 * error + 1e-9).all()
        log_attention = rows.log_softmax(q.logits.index_select(-1, rows.edge))
        control = q.control(shape, rows, drawn, shares)
        torch.testing.assert_close(control, (surplus * log_attention).sum(-1).to(control))
        choices = swept if len(q.event_shape) == 1 else swept[:, 0]
        assert torch.equal(rows.source[edges].sort(-1).values, choices.sort(-1).values)
        assert (shares.var(0) < 0.9 * chosen.var(0) + 1e-9).all()
    edges = q._states(as_values(q, states), torch.Size([len(states)]), rows).edges
    weights = probs.repeat_interleave(rows.num_rows)
    exact = torch.zeros(rows.num_edges).to(probs).index_add(0, edges.flatten(), weights)
    assert ((shares.mean(0) - exact).abs() <= 4.5 * shares.std(0) / SIZE**0.5 + 1e-9).all()


@pytest.mark.parametrize("case", CASES)
def test_sweeps(case, way):
    check_sweeps(case)


@pytest.mark.parametrize("case", CASES)
def test_leave_one_out(case):
    """Harmonic means over the posterior of choices are ratios of evidences."""
    q, evidence = problem(case)
    states, joint = weighed(q, evidence)
    found = q.leave_one_out(as_values(q, states))
    means = 1 / ((joint / joint.sum()) @ (-found).exp().double())
    for mean, node in zip(means, q.observed_rows.nodes, strict=True):
        others = evidence.clone()
        others[q.hood.target == node] = 0
        _, without = weighed(q, others)
        assert mean.item() == pytest.approx(joint.sum().item() / without.sum().item(), rel=1e-5)
    with pytest.raises(ValueError, match="value must"):
        q.leave_one_out(torch.full_like(as_values(q, states), 7))


@pytest.mark.parametrize("case", ["labels", "matrices", "mask"])
def test_posterior_of_observed_labels(case):
    """By sweeps it is that of all choices, where draws alone are not."""
    q, _ = problem(case, concentration=0.05)
    y, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, True])
    observed = mask if case == "mask" else torch.tensor([True, True, True, False])
    relabel = matrices(q.hood, 2) if case == "matrices" else None
    mix = NeighborMixture(q.hood, q.alpha, q.logits, relabel)
    exact = mix.condition(y, observed).marginals()
    plain, swept = (mix.condition(y, observed, SIZE, num_sweeps=n).marginals() for n in (0, 20))
    assert (swept - exact).abs().max() < 0.02
    assert case != "labels" or (plain - exact).abs().max() > 0.02
    with pytest.raises(ValueError, match="num_sweeps needs num_samples"):
        mix.condition(y, observed, SIZE, weighted=True, num_sweeps=1)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("concentration", [1e-3, 1e3])
@pytest.mark.parametrize("case", ["labels", "evidence"])
def test_concentrations_of_all_sizes(monkeypatch, case, concentration, dtype):
    """Variates of small ones underflow. Of large ones a count is a small part."""
    monkeypatch.setattr(compiled, "DEVICES", set())
    q, evidence = problem(case, concentration, dtype)
    states, probs = enumerated(q, evidence)
    exact = as_values(q, states[probs.multinomial(SIZE, replacement=True)])
    swept = q.sweep(exact, 2)
    assert (swept != exact).any(-1).double().mean() > 0.05
    assert p_value(swept, as_values(q, states), probs) > 1e-4


def test_what_two_blocks_count(monkeypatch):
    """Visits and totals of every sweep, and edges of their rows."""
    monkeypatch.setattr(compiled, "DEVICES", set())
    q, _ = problem("evidence of edges")
    entries = q._constants(q.batch_shape)
    draw = draw_entries(q.rows, entries, torch.rand(5, 4))
    found = sweeps(q.rows, entries, draw, 7)
    assert (found.visits.sum(-1) == 7).all()
    assert torch.equal(found.visits.sum(1), found.totals.sum(1))
    assert torch.equal(one_hot(found.draw.labels, 2).sum(1), found.totals[:, -1])
    assert torch.equal(q.rows.row[found.draw.edges], torch.arange(4).expand(5, -1))


def test_loops_of_observed_labels_stay_inside_of_their_arrays():
    """Counts that no sweep reads had been written past the end of an array of length zero."""
    hood = Neighborhood.grid(30, 30)
    q = NeighborMixture(hood, torch.full((900, 2), 0.5), torch.zeros(hood.num_edges)).choices(
        torch.randint(2, (900,))
    )
    for _ in range(5):
        values = q.sweep(q.sample((8,)), 3)
    assert q.support.check(values).all()


GOOD = torch.arange(4)


@pytest.mark.parametrize(
    ("case", "value", "match"),
    [
        ("labels", torch.tensor([2, 1, 2, 3]), "value must hold choices of neighbours"),
        ("labels", torch.tensor([0, 1, 2, 9]), "value must hold choices of neighbours"),
        ("matrices", torch.tensor([2, 1, 2, 3]).expand(2, 4), "value must hold choices of neigh"),
        ("evidence", torch.stack([GOOD, GOOD]), "labels of the field"),
        ("evidence", torch.stack([GOOD, -GOOD]), "labels of the field"),
        ("mask", GOOD, "value must have shape"),
    ],
)
def test_refused(way, case, value, match):
    q, _ = problem(case)
    with pytest.raises(ValueError, match=match):
        q.sweep(value)
