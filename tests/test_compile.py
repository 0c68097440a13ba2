# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``torch.compile`` of a step: compiled loops are opaque to it, and the gradient is the same."""

import pytest
import torch
from graphs import house, parameters
from pyro.infer import Trace_ELBO

from pyro_nmm import EvidenceConditional, backend
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

MASK = torch.tensor([True, True, False, True, True])
Y = torch.tensor([0, 1, -1, 0, 1])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of_evidence(hood, alpha, logits):
    evidence = torch.arange(10).view(5, 2).cos()
    q = EvidenceConditional(hood, alpha, logits, evidence, MASK)
    value = q.sample((3,))
    parts = q.score_parts(value)
    return (q.log_evidence(value).sum(-1) + parts.log_prob - parts.entropy_term).sum()


def of_program(hood, alpha, logits):
    elbo = Trace_ELBO(3, vectorize_particles=True, max_plate_nesting=0)
    return elbo.differentiable_loss(nmm, ordered_guide, hood, alpha, logits, Y, MASK)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [of_evidence, of_program])
def test_gradient_of_a_compiled_step(step):
    hood = house()
    leaves = [leaf.requires_grad_() for leaf in parameters(hood, 2)]
    grads = []
    for function in (step, torch.compile(step, backend="eager")):
        torch.manual_seed(0)
        loss = function(hood, *leaves)
        grads.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*grads)
    assert grads[0][1].abs().sum() > 0


@pytest.mark.skipif(backend.compiled is None, reason="needs numba")
def test_loops_are_opaque():
    """Called from traced code, they see tensors with values and leave no traced frame behind."""
    seen, hood = [], house()

    def step(choices):
        return backend.compiled.find(hood, choices + 0) + 1

    def note(graph, inputs):
        seen.append(graph)
        return graph.forward

    choices = torch.arange(5).expand(2, 5)
    found = torch.compile(step, backend=note)(choices)
    assert torch.equal(found, step(choices))
    targets = [str(node.target) for graph in seen for node in graph.graph.nodes]
    assert not any("numpy" in target for target in targets)
