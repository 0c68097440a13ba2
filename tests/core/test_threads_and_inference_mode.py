# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Threads with one graph, what a graph keeps, and queries in inference mode."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from sklearn.naive_bayes import GaussianNB
from stacking import QuickClassifier

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.datasets import link_split
from pyro_nmm.models import grid_edges, ising

OBSERVED, PAIRS = torch.tensor([True, False, True, False, False]), torch.tensor([[0, 1], [3, 4]])
QUERIES = {
    "row": lambda mix, _: mix.hood.row,
    "components": lambda mix, _: mix.hood.components(),
    "restrict": lambda mix, _: mix.hood.restrict(OBSERVED).edge,
    "marginals": lambda mix, _: mix.marginals(),
    "pairwise": lambda mix, _: mix.pairwise(PAIRS),
    "node_log_probs": lambda mix, _: mix.node_log_probs(LABELS),
    "condition": lambda mix, _: mix.condition(LABELS, OBSERVED, None).marginals(),
    "posterior": lambda _, posterior: posterior.marginals(),
    "posterior pairs": lambda _, posterior: posterior.pairwise(PAIRS),
}


def in_threads(work, number=8):
    """What a function of a thread's number returns in threads that start together."""
    start, interval = threading.Barrier(number), sys.getswitchinterval()

    def run(thread):
        start.wait()
        return work(thread)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(run, range(number)))
    finally:
        sys.setswitchinterval(interval)


def test_threads_share_first_answers(kernels):
    """Half of them ask in inference mode, and the others take gradients."""
    hood, alpha, logits = house_and_parameters()
    alpha.requires_grad_()

    def shared():
        mix = NeighborMixture(copy.copy(hood), alpha, logits)
        return mix, mix.condition(LABELS, OBSERVED, None)

    def gradient(mix):
        loss = mix.marginals().square().sum() + mix.pairwise(PAIRS).square().sum()
        return torch.autograd.grad(loss, alpha, retain_graph=True)[0]

    alone = shared()
    expected = {name: query(*alone) for name, query in QUERIES.items()}
    for _ in range(5):
        mix, posterior = shared()

        def work(thread, mix=mix, posterior=posterior):
            order = [*QUERIES][thread:] + [*QUERIES][:thread]
            with torch.inference_mode(thread % 2 == 0):
                found = {name: QUERIES[name](mix, posterior).clone() for name in order}
                mix.sample((3,)), posterior.sample((3,)), mix.elbo(LABELS, OBSERVED, 2)
                return found, None if thread % 2 == 0 else gradient(mix)

        for found, slope in in_threads(work):
            torch.testing.assert_close({name: found[name] for name in QUERIES}, expected)
            if slope is not None:
                torch.testing.assert_close(slope, gradient(alone[0]))


def test_threads_draw_from_their_seeds():
    """The seed is of a generator that all threads share."""
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    edges, state = torch.randint(30, (2, 80)), torch.get_rng_state()

    def work(seed):
        model = QuickClassifier(GaussianNB(), cv=2, random_state=seed % 2)
        return *link_split(edges, 30, seed), model.fit(x, y).label_distributions_

    alone = [work(seed) for seed in range(4)]
    torch.testing.assert_close(in_threads(work, 4), alone, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kernels", ["loops", "tensors"], indirect=True)
def test_two_threads_share_a_graph(kernels):
    """Each thread draws, and gets for its draws what it gets alone."""
    hood, alpha, logits = house_and_parameters()
    wrong, start = [], threading.Barrier(2)

    def work(number):
        start.wait()
        for _ in range(100):
            q = OrderedConditional(hood, alpha, logits, LABELS, validate_args=False)
            c = q.sample((8 + number,))
            found = NeighborChoice(hood, logits, validate_args=False).log_prob(c)
            alone = NeighborChoice(copy.copy(hood), logits, validate_args=False).log_prob(c)
            if not torch.equal(found, alone):
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not wrong


def test_a_graph_keeps_no_draw():
    hood, alpha, logits = house_and_parameters()
    assert len(hood.row) == len(hood.edge)  # lists of its edges that a graph does keep
    size = len(pickle.dumps(hood))
    q = OrderedConditional(hood, alpha, logits, LABELS)
    c = q.sample((1000,))
    q.log_prob(c)
    NeighborChoice(hood, logits).log_prob(c)
    assert len(pickle.dumps(hood)) == size


def test_queries_in_inference_mode_leave_training_alone(kernels):
    hood, alpha, logits = house_and_parameters()
    mask = torch.tensor([True, True, False, True, True])
    alpha.requires_grad_()
    mix = NeighborMixture(hood, alpha, logits.requires_grad_())
    q = mix.choices(LABELS, mask)
    pairs, order = hood.source[None, :4].repeat(2, 1), torch.tensor([4, 2, 0, 1, 3])
    field = ising(grid_edges(1, 5), 0.3, torch.zeros(5))
    with torch.inference_mode():
        mix.marginals(), mix.pairwise(pairs), mix.elbo(LABELS, mask, 2)
        mix.entropy_bound(2, "reward_to_go", order), mix.entropy_bound(2, "one_step_credit", order)
        mix.condition(LABELS, mask, 3).marginals()
        field.expected_potential(mix)
        c = q.sample((3,))
        q.log_prob(c), q.score_parts(c)
        other = Neighborhood.grid(1, 5)
    losses = [
        mix.marginals().square().sum(),
        mix.elbo(LABELS, mask, 2).sum(),
        mix.entropy_bound(2, "reward_to_go", order).sum(),
        mix.entropy_bound(2, "one_step_credit", order).sum(),
        field.expected_potential(mix),
        q.log_prob(c).sum(),
        sum(part.sum() for part in q.score_parts(c)),
        NeighborMixture(other, alpha, torch.zeros(13)).elbo(LABELS).sum(),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, alpha, retain_graph=True)
        assert gradient.abs().sum() > 0
    assert torch.autograd.grad(losses[0], logits)[0].abs().sum() > 0
