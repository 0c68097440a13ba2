# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: distributions made of others, copies, files, and posteriors."""

import copy
import io
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from bounds import PATH, check_against, gradients, near
from graphs import labellings
from pyro import infer
from pyro_rows import Pair, Y, row
from torch.distributions import kl_divergence

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
    assert torch.equal(copy.deepcopy(fitted.prior()).marginals(), fitted.marginals())


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
