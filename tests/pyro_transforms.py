# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: transforms of functions and modules."""

from functools import partial

import pyro
import pytest
import torch
from bounds import PATH
from pyro import infer
from pyro_rows import Pair, Y, row, vectorized
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm


class Program(nn.Module):
    """A pair whose field comes from a module."""

    def __init__(self, pair, field):
        super().__init__()
        self.log_alpha, self.logits = nn.Parameter(pair.log_alpha.detach()), pair.logits
        self.field = field

    def forward(self):
        self.field(PATH, self.log_alpha.exp(), self.logits, Y, collapsed=True)


def step(log_alpha, logits):
    return vectorized(infer.Trace_ELBO, 3).differentiable_loss(
        nmm, ordered_guide, PATH, log_alpha.exp(), logits, Y, None
    )


def gradient(function, leaf):
    pyro.set_rng_seed(2)
    return torch.autograd.grad(function(), leaf)[0]


@row("torch.compile")
def compiled():
    pair = Pair()
    torch._dynamo.reset()
    grads = [
        gradient(lambda run=run: run(pair.log_alpha, pair.logits), pair.log_alpha)
        for run in (step, torch.compile(step, backend="eager"))
    ]
    torch.testing.assert_close(*grads)


@row("torch.compile, TraceGraph_ELBO")
def compiled_provenance():
    pair = Pair()
    torch._dynamo.reset()
    run = torch.compile(vectorized(size=2).loss_and_grads, backend="eager")
    with pytest.raises(TypeError):
        run(pair.model, pair.guide)
    network = torch.compile(nn.Linear(2, 2).double(), backend="eager")
    alpha = network(pair.alpha).exp()
    vectorized(size=2).loss_and_grads(nmm, ordered_guide, PATH, alpha, pair.logits, Y)
    assert network._orig_mod.weight.grad.abs().sum() > 0


@row("torch.jit.trace")
def jit():
    torch.jit.trace(
        lambda alpha: NeighborMixture(PATH, alpha, torch.zeros(7)).log_prob(Y), Pair().alpha
    )


@row("torch.vmap, torch.func.vmap")
def vmap():
    assert torch.func.vmap is torch.vmap
    pair = Pair()
    batch = pair.alpha * torch.tensor([1.0, 2.0, 3.0])[:, None, None]

    def log_prob(alpha, **options):
        return NeighborMixture(PATH, alpha, pair.logits, **options).log_prob(Y)

    mapped = torch.vmap(lambda alpha: log_prob(alpha, validate_args=False))(batch)
    torch.testing.assert_close(mapped, log_prob(batch))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(log_prob)(batch)


@row("torch.func.grad")
def functional_grad():
    if torch.__version__ < "2.7":
        pytest.skip("torch 2.6 has no Tensor.tolist under torch.func.grad")
    pair = Pair()
    gradient = torch.func.grad(lambda leaf: pair.mixture(leaf.exp()).log_prob(Y))(pair.log_alpha)
    torch.testing.assert_close(gradient, pair.gradient(pair.log_prob()))


@row("torch.func.functional_call")
def functional_call():
    pair, network = Pair(), nn.Linear(2, 2).double()
    weights = {name: torch.randn_like(p).requires_grad_() for name, p in network.named_parameters()}

    def loss(run):
        return step(run(pair.alpha), pair.logits)

    def called(x):
        return torch.func.functional_call(network, weights, (x,))

    of_call = gradient(lambda: loss(called), weights["weight"])
    network.load_state_dict(weights)
    torch.testing.assert_close(of_call, gradient(lambda: loss(network), network.weight))


@row("ELBOModule", "DistributedDataParallel")
def modules(name):
    pair = Pair()
    model, guide = (Program(pair, field) for field in (nmm, ordered_guide))
    guide.log_alpha = model.log_alpha
    wanted = gradient(lambda: step(model.log_alpha, pair.logits), model.log_alpha)
    module = vectorized(infer.Trace_ELBO, 3)(model, guide)
    if name == "ELBOModule":
        torch.testing.assert_close(gradient(module, model.log_alpha), wanted)
        return
    if torch.__version__ < "2.7":
        pytest.skip("torch 2.6 may wait for ever when it frees a gloo process group")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        pyro.set_rng_seed(2)
        DistributedDataParallel(module)().backward()
        torch.testing.assert_close(model.log_alpha.grad, wanted)
    finally:
        torch.distributed.destroy_process_group()


@row("checkpoint")
def recomputed():
    pair = Pair()
    again = partial(checkpoint, use_reentrant=False)
    grads = [
        gradient(lambda run=run: run(step, pair.log_alpha, pair.logits), pair.log_alpha)
        for run in (lambda function, *args: function(*args), again)
    ]
    torch.testing.assert_close(*grads)
