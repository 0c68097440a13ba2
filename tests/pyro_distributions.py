# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: distributions made of others, transforms, copies, files, and posteriors."""

import copy
import io
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import PATH, check_against, gradients, near
from graphs import labellings
from pyro import infer
from pyro_rows import Pair, Y, row, vectorized
from torch import nn
from torch.distributions import kl_divergence
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

LABELS, KNOWN = labellings(3), torch.tensor([True, True, False])


@row("MixtureSameFamily")
def mixtures():
    pair, weights = Pair(), torch.tensor([0.2, 0.5, 0.3])
    parts = pair.mixture(pair.alpha * torch.tensor([0.1, 1.0, 9.0])[:, None, None])
    both = dist.MixtureSameFamily(dist.Categorical(weights), parts)
    assert (both.batch_shape, both.event_shape) == ((), (3,))
    exact = weights @ parts.log_prob(LABELS[:, None]).exp().T
    torch.testing.assert_close(both.log_prob(LABELS).exp(), exact)
    drawn = pyro.sample("y", both.expand_by([4000]))
    for labels, prob in zip(LABELS, exact, strict=True):
        near((drawn == labels).all(-1).double(), prob)


@row("TransformedDistribution")
def transformed():
    mix, turn = Pair().mixture(), torch.tensor([2, 0, 1])
    for change, volume in (
        (dist.transforms.Permute(turn), 1),
        (dist.transforms.AffineTransform(1, -1), 1),
        (dist.transforms.AffineTransform(0, 2), 2**3),
    ):
        law = dist.TransformedDistribution(mix, [change])
        total = law.log_prob(change(LABELS)).exp().sum()
        torch.testing.assert_close(total, torch.tensor(1.0 / volume))
    assert torch.equal(dist.transforms.Permute(turn)(Y), Y[turn])


@row("kl_divergence")
def divergence():
    kl_divergence(Pair().mixture(), Pair().mixture())


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def ask(law):
    if hasattr(law, "marginals"):
        return law.marginals()
    torch.manual_seed(1)
    return law.log_prob(law.sample())


@row("deepcopy", "torch.save")
def copies(name):
    change = copy.deepcopy if name == "deepcopy" else partial(saved, weights_only=False)
    mix = Pair().mixture()
    for law in (mix, mix.choices(Y), mix.latents(torch.zeros(3, 2)), mix.condition(Y, KNOWN)):
        torch.testing.assert_close(ask(change(law)), ask(law))
    fitted = Pair().mixture(Pair().log_alpha.exp())
    torch.testing.assert_close(change(fitted.prior()).marginals(), fitted.marginals().detach())


@row("deepcopy, with a gradient")
def copied_graph():
    pair = Pair()
    copy.deepcopy(pair.mixture(pair.log_alpha.exp()))


@row("torch.load, weights_only")
def unsafe_files():
    mix = Pair().mixture()
    content = {"edge_index": torch.stack([PATH.source, PATH.row]), "alpha": mix.alpha}
    assert torch.equal(saved(content, weights_only=True)["alpha"], mix.alpha)
    saved(mix, weights_only=True)


class BelowSwitch(Pair):
    """The label of the third node, drawn by a posterior whose ``alpha`` has a discrete parent."""

    def __init__(self):
        super().__init__()
        self.rate = torch.tensor(0.4, requires_grad=True)
        self.gain = torch.tensor([2.0, -2.0])  # nats, of both labels

    def posterior(self, x):
        alpha = self.alpha + 9 * torch.stack([1 - x, x])
        return self.mixture(alpha).condition(Y, KNOWN)

    def own(self):
        return dist.Bernoulli(logits=pyro.param("rate", self.rate))

    def guide(self):
        pyro.sample("x", self.own())

    def model(self):
        x = pyro.sample("x", dist.Bernoulli(0.4))
        pyro.factor("w", self.gain[self.posterior(x).sample()[2]])

    def bound(self):
        terms = []
        for x in (torch.tensor(0.0), torch.tensor(1.0)):
            log_q, log_prior = self.own().log_prob(x), dist.Bernoulli(0.4).log_prob(x)
            gain = self.posterior(x).marginals()[2] @ self.gain
            terms.append(log_q.exp() * (gain + log_prior - log_q))
        return sum(terms)


@row("Posterior, Trace_ELBO", "Posterior, TraceGraph_ELBO")
def below_a_site(name):
    pair, kind = BelowSwitch(), getattr(infer, name.split()[1])
    sampled = gradients(kind(), pair.model, pair.guide, [pair.rate], 400)
    check_against(-pair.bound(), [pair.rate], *sampled)


@row("Posterior, parameters")
def no_gradient():
    pair, gain = Pair(), torch.tensor([2.0, -2.0])

    def model():
        alpha = pyro.param("log_alpha", pair.log_alpha).exp()
        drawn = pair.mixture(alpha).condition(Y, KNOWN).sample()
        pyro.factor("w", gain[drawn[2]])

    elbo = infer.Trace_ELBO()
    sampled = [elbo.loss_and_grads(model, lambda: None) for _ in range(300)]
    log_probs = torch.stack([pair.log_prob(torch.tensor([*Y[:2], k])) for k in (0, 1)])
    exact = -log_probs.softmax(0) @ gain
    near(torch.tensor(sampled), exact.detach())
    assert pair.log_alpha.grad is None
    assert pair.gradient(exact).norm() > 0.05


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
