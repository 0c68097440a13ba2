# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Two threads with one graph, what a graph keeps, and queries in inference mode."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.models import grid_edges, ising


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
