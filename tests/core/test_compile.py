# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``torch.compile`` of a step: compiled loops are opaque to it, and the gradient is the same (of a
Pyro pair: the row of docs/pyro.md)."""

import importlib

import pytest
import torch
from graphs import house, parameters

from pyro_nmm import EvidenceConditional, compiled

MASK = torch.tensor([True, True, False, True, True])


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
    return (q.log_terms(value).sum(-1) + parts.log_prob - parts.entropy_term).sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gradient_of_a_compiled_step():
    hood = house()
    leaves = [leaf.requires_grad_() for leaf in parameters(hood, 2)]
    grads = []
    for function in (of_evidence, torch.compile(of_evidence, backend="eager")):
        torch.manual_seed(0)
        loss = function(hood, *leaves)
        grads.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*grads)
    assert grads[0][1].abs().sum() > 0


@pytest.mark.parametrize("name", ["loops", "entries"])
def test_every_loop_is_left_alone(name):
    module = importlib.import_module(f"pyro_nmm.compiled.{name}")
    found = [
        function
        for key, function in vars(module).items()
        if key[0] != "_" and getattr(function, "__module__", "") == module.__name__
    ]
    assert found
    assert all(getattr(function, "_torchdynamo_disable", False) for function in found), found


def test_loops_are_opaque():
    """Called from traced code, they see tensors with values and leave no traced frame behind."""
    seen, hood = [], house()

    def step(choices):
        return compiled.find(hood, choices + 0) + 1

    def note(graph, inputs):
        seen.append(graph)
        return graph.forward

    choices = torch.arange(5).expand(2, 5)
    found = torch.compile(step, backend=note)(choices)
    assert torch.equal(found, step(choices))
    targets = [str(node.target) for graph in seen for node in graph.graph.nodes]
    assert not any("numpy" in target for target in targets)
