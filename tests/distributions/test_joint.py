# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The joint log-probability in one loop, beside its factors by automatic differentiation."""

import pytest
import torch
from graphs import parameters, random_sources

from pyro_nmm import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.joint import LogJoint
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.ops.entries import Draw

HOOD = random_sources(6, 4, torch.Generator().manual_seed(1))


def given(batch, observed):
    alpha, logits = parameters(HOOD, 3)
    sizes = (2, 1) if batch == "some" else (2, 5) if batch == "all" else ()
    alpha = (alpha * (0.2 + torch.rand(*sizes, 1, 1))).double().requires_grad_()
    logits = (logits + torch.randn(*sizes, 1) * torch.randn(HOOD.num_edges)).double()
    logits[..., 1] = -torch.inf  # an edge that is switched off
    logits.requires_grad_()
    mask = torch.tensor([True, True, False, True, True, False]) if observed else None
    part = Parameters(HOOD, alpha, logits).of_rows(HOOD.restrict(mask))
    shape = torch.Size([2, 5] if batch else [5])
    choices = NeighborChoice(part.hood, part.logits.detach()).expand(shape).sample()
    return part, shape, choices, torch.randint(3, (part.hood.num_rows,)), [alpha, logits]


def slopes(value, leaves):
    return torch.autograd.grad(value, leaves, retain_graph=True)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("batch", ["", "some", "all"])
def test_value_and_gradient(batch, observed):
    part, shape, choices, labels, leaves = given(batch, observed)
    found = LogJoint(part, shape)(choices, labels)
    exact = NeighborChoice(part.hood, part.logits).log_prob(choices)
    exact = (exact + ChosenLabels(part.alpha, choices).log_prob(labels)).sum()
    torch.testing.assert_close(found, exact)
    for one, other in zip(slopes(2 * found, leaves), slopes(2 * exact, leaves), strict=True):
        torch.testing.assert_close(one, other.nan_to_num())


@pytest.mark.parametrize("batch", ["", "some", "all"])
def test_average_of_states(batch):
    """With their own edges for shares it is the mean of the joints."""
    part, shape, choices, labels, leaves = given(batch, True)
    joint, flat = LogJoint(part, shape), (shape.numel(), -1)
    others = NeighborChoice(part.hood, part.logits.detach()).expand(shape).sample()
    draws, shares = [], torch.zeros(shape.numel(), part.hood.num_edges).double()
    for value in (choices, others):
        edges = part.hood.find(value.view(flat))
        draws.append(Draw(edges, labels.expand_as(edges)))
        shares.scatter_add_(1, edges, torch.full(edges.shape, 0.5).double())
    found, exact = (
        joint.average(draws, shares),
        (joint(choices, labels) + joint(others, labels)) / 2,
    )
    torch.testing.assert_close(found, exact)
    for one, other in zip(slopes(found, leaves), slopes(exact, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_labels_beyond_the_classes_are_refused():
    part, shape, choices, labels, _ = given("", False)
    with pytest.raises(ValueError, match=r"label outside 0\.\.2"):
        LogJoint(part, shape)(choices, labels + 3)
