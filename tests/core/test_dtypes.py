# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels of small integers and of floats, and parameters in half and in single precision."""

import pytest
import torch
from cases import HOUSE_LABELS as LABELS
from cases import house_and_parameters
from graphs import parameters
from pyro import poutine

from pyro_nmm import (
    ChosenLabels,
    LogisticConcentrations,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.models import nmm
from pyro_nmm.ops.entropy import entropy_samples


def test_the_score_cancels_before_it_meets_the_bound():
    """
    In single precision the score of many nodes would swallow the digits of their entropy. Where
    each row is its own component, the score is zero.
    """
    hood = Neighborhood(torch.randint(4000, (2, 8000)), 4000)
    alpha, logits = (t.float() for t in parameters(hood, 2))
    c = NeighborChoice(hood, logits).sample((16,))
    given = hood, alpha, hood.softmax(logits), hood.find(c), ChosenLabels(alpha, c).sample()
    alone = entropy_samples(*given, torch.arange(4000))
    assert torch.equal(entropy_samples(*given, hood.components()), alone)
    torch.testing.assert_close(entropy_samples(*given, None), alone, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("num_classes", [2, 256, 300])
@pytest.mark.parametrize("kernels", ["loops", "tensors"], indirect=True)
def test_labels_of_small_integer_types(dtype, num_classes, kernels):
    hood, alpha, logits = house_and_parameters(num_classes)
    y, order = LABELS.to(dtype), torch.arange(5)
    mask = torch.tensor([True, True, False, True, True])
    mix = NeighborMixture(hood, alpha, logits)
    wanted, found = [], []
    for labels, results in ((LABELS, wanted), (y, found)):
        torch.manual_seed(3)
        q = mix.choices(labels, order=order)
        c = q.sample((2,))
        results += [c, q.log_prob(c), mix.elbo(labels), mix.given(c).log_prob(labels)]
        results += [mix.log_marginal(torch.tensor([0, 3]), labels[[0, 3]])]
        results += [mix.condition(labels, mask, 4).marginals()]
        results += [mix.condition(labels, mask, 4).log_marginal(torch.tensor([2]), labels[2:3])]
        results += [mix.log_likelihood(labels, mask, num_particles=2)]
        results += [poutine.trace(nmm).get_trace(hood, alpha, logits, labels).nodes["y"]["value"]]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


def test_float_labels():
    law = ChosenLabels(torch.ones(5, 2), torch.tensor([0, 1, 1]))
    value = torch.tensor([1, 0, 1])
    assert torch.equal(law.log_prob(value.double()), law.log_prob(value))  # as Categorical


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_in_single(dtype):
    hood, alpha, logits = house_and_parameters()
    half = alpha.to(dtype).requires_grad_(), logits.to(dtype)
    single = half[0].float(), half[1].float()
    c = torch.arange(5)
    for make in (
        lambda a, s: NeighborMixture(hood, a, s).log_prob(LABELS),
        lambda a, s: OrderedConditional(hood, a, s, LABELS, order=torch.arange(5)).log_prob(c),
        lambda a, s: NeighborChoice(hood, s).log_prob(c),
        lambda a, s: ChosenLabels(a, c).log_prob(LABELS),
        lambda a, s: poutine.trace(nmm).get_trace(hood, a, s, LABELS).nodes["y"]["value"].float(),
    ):
        found = make(*half)
        assert found.dtype == torch.float32
        assert torch.equal(found, make(*single))
    NeighborMixture(hood, *half).elbo(LABELS).sum().backward()
    assert half[0].grad.dtype == dtype
    levels = LogisticConcentrations(torch.ones(5).to(dtype), width=2.0)
    assert levels.totals().dtype == torch.float32
