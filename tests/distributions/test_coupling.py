# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Coupled chains are Gibbs chains, and the sweeps that they certify are enough."""

import pytest
import torch
from distributions.test_sweeps import as_values, enumerated, p_value, problem
from graphs import parameters, random_sources

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.compiled.coupling import coupled
from pyro_nmm.ops.coupling import Meetings
from pyro_nmm.ops.sampling import uniforms_of

CASES = "labels", "evidence", "evidence of edges", "sources", "mask"


@pytest.mark.parametrize("case", CASES)
def test_each_chain_keeps_its_distribution(case):
    """From two exact draws, and one of them is there after a sweep as likely as before."""
    q, evidence = problem(case)
    states, probs = enumerated(q, evidence)
    number, shape = 6_000, torch.Size([12_000])
    exact = as_values(q, states[probs.multinomial(2 * number, replacement=True)])
    draw, together = q._states(exact, shape, q.rows), 0
    edges, labels = (part.expand(*shape, -1).numpy().copy() for part in draw[:2])
    entries = q._constants(torch.Size([1]))
    for k in range(number):
        pair = slice(2 * k, 2 * k + 2)
        uniforms = uniforms_of(q.rows, 1, 3)
        together += coupled(q.rows, entries, edges[pair], labels[pair], uniforms)
    value = q._columns(draw._replace(edges=torch.tensor(edges), labels=torch.tensor(labels)), shape)
    for each in (value[::2], value[1::2]):
        assert p_value(each, as_values(q, states), probs) > 1e-4
    same = (value[::2] == value[1::2]).flatten(1).all(1)
    assert together == int(same.sum()) > number / 20


def case_of(seed):
    """A random problem: of labels or of evidence, with some nodes masked."""
    torch.manual_seed(seed)
    sources = int(torch.randint(2, 4, ()))
    hood = random_sources(4, sources, torch.Generator().manual_seed(seed))
    alpha, logits = parameters(hood, 2)
    alpha, logits = alpha * torch.rand(()) ** 2 * 2 + 0.02, logits * 3 * torch.rand(())
    mix = NeighborMixture(hood, alpha, logits)
    if seed % 2:
        evidence = 2 * torch.randn(4, 2)
        return mix.latents(evidence), evidence[hood.target]
    y = torch.randint(2, (4,))
    return mix.choices(y), torch.nn.functional.one_hot(y[hood.target], 2).double().log()


def check_certificate(seed):
    """After the certified sweeps probabilities of states are the enumerated ones."""
    q, evidence = case_of(seed)
    states, probs = enumerated(q, evidence.double())
    number = q.meetings(num_pairs=100, lag=5).num_sweeps(0.01)
    value = q.sample((6_000,))
    value = q.sweep(value, number) if number else value
    keys = [(s.flatten() * 5 ** torch.arange(s.numel())).sum() for s in as_values(q, states)]
    flat = (value.flatten(1) * 5 ** torch.arange(value[0].numel())).sum(1)
    share = torch.stack([(flat == key).double().mean() for key in keys])
    # Half of the sum of differences is the distance; of exact draws it is mostly less than this.
    noise = (probs * (1 - probs) / 6_000).sqrt().sum() / 2
    assert (share - probs).abs().sum() / 2 < 0.02 + 1.5 * noise, (seed, number)


@pytest.mark.parametrize("seed", range(10))
def test_certified_sweeps_are_enough(seed):
    check_certificate(seed)


@pytest.mark.slow
def test_two_hundred_certificates():
    for seed in range(10, 210):
        check_certificate(seed)


def test_bound():
    meetings = Meetings(torch.tensor([12.0, 15.0, 31.0]), 10)
    assert meetings.distance(0) == (1 + 1 + 3) / 3
    assert meetings.distance(5) == 2 / 3
    assert meetings.distance(21) == 0
    assert meetings.num_sweeps(0.4) == 11


def test_refusals():
    hood = Neighborhood.grid(3, 3)
    mix = NeighborMixture(hood, torch.full((9, 2), 1e-3), torch.zeros(hood.num_edges))
    q = mix.choices(torch.arange(9) % 2)
    with pytest.raises(ValueError, match="chains did not meet: raise max_sweeps"):
        q.meetings(num_pairs=20, max_sweeps=1).num_sweeps()
    meetings = Meetings(torch.ones(3), 1)
    for distance in (-1.0, 0.0, float("nan"), "x"):
        with pytest.raises(ValueError, match="distance must be positive"):
            meetings.num_sweeps(distance)
    with pytest.raises(ValueError, match="num_sweeps must be an integer"):
        meetings.distance(2.5)
    with pytest.raises(ValueError, match="num_pairs must"):
        q.meetings(num_pairs=0)
    with pytest.raises(ValueError, match="meetings"):
        q.expand((2,)).meetings()
