# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops: opaque to ``torch.compile``, and kept on disk if it can be written."""

import importlib
import warnings

import pytest
import torch
from graphs import house
from numba.core import caching

from pyro_nmm.compiled import loops


@pytest.mark.parametrize("name", ["loops", "draws"])
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
        return loops.find(hood, choices + 0) + 1

    def note(graph, inputs):
        seen.append(graph)
        return graph.forward

    choices = torch.arange(5).expand(2, 5)
    torch._dynamo.reset()
    found = torch.compile(step, backend=note)(choices)
    torch._dynamo.reset()
    assert torch.equal(found, step(choices))
    targets = [str(node.target) for graph in seen for node in graph.graph.nodes]
    assert not any("numpy" in target for target in targets)


def test_a_disk_that_cannot_be_written(monkeypatch):
    """Loops are compiled all the same, and one warning names the cure."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        one, two = loops._compiled(lambda x: x + 1), loops._compiled(lambda x: x + 2)
        assert (one(1), two(1)) == (2, 3)
    texts = {str(warning.message) for warning in caught}
    assert all("set NUMBA_CACHE_DIR to a folder that can be written" in text for text in texts)
    assert texts
