# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Bounds of small fields as sums over all orders, choices and labels, and sampled gradients."""

import itertools
from functools import partial

import pyro
import torch
from graphs import labellings
from oracle import edge_lists, entropy_bound

from pyro_nmm import EvidenceConditional, NeighborChoice, Neighborhood, OrderedConditional
from pyro_nmm.ops.enumeration import enumerate_choices

PATH = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)


def all_choices(hood):
    return hood.source[enumerate_choices(hood)]


def expected_bound(hood, alpha, logits, y):
    """The bound of :func:`ordered_guide` for labels ``(..., N)``, over all orders and choices."""
    c, bounds = all_choices(hood), []
    c = c.view(len(c), *(1,) * (y.dim() - 1), hood.num_nodes)
    for order in itertools.permutations(range(hood.num_nodes)):
        q = OrderedConditional(hood, alpha, logits, y, order=torch.tensor(order))
        bounds.append((q.log_prob(c).exp() * q.log_terms(c).sum(-1)).sum(0))
    return torch.stack(bounds).mean(0)


def gradients(elbo, model, guide, leaves, steps):
    """``(steps,)`` losses and ``(steps, n)`` gradients."""
    losses, grads = [], []
    for _ in range(steps):
        for leaf in leaves:
            leaf.grad = None
        losses.append(elbo.loss_and_grads(model, guide))
        grads.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    return torch.tensor(losses), torch.stack(grads)


def check_against(truth, leaves, losses, grads):
    """In standard errors, each of which must tell the gradient from zero."""
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(truth, leaves)])
    steps = len(losses)
    assert abs(losses.mean() - truth) < 4 * losses.std() / steps**0.5 + 1e-9
    error = grads.std(0) / steps**0.5
    assert ((grads.mean(0) - wanted).abs() < 4.5 * error + 1e-9).all()
    assert wanted.norm() > 5 * error.norm()


def near(found, truth):
    """The mean of ``found`` is ``truth``, in standard errors."""
    found = torch.as_tensor(found)
    error = found.std() / len(found) ** 0.5
    assert (found.mean() - truth).abs() < 4 * error + 1e-9, (found.mean(), truth, error)


def latent_draws(hood, alpha, logits, evidence, observed=None):
    """
    For every order of the nodes with evidence: choices and labels ``(K, 2, n)`` that the evidence
    allows, the logarithm of their probability, and the bound of each, ``(K,)``.
    """
    rows = hood.restrict(observed)
    c, u = rows.source[enumerate_choices(rows)], labellings(rows.num_rows, alpha.shape[-1])
    pairs = torch.cartesian_prod(torch.arange(len(c)), torch.arange(len(u)))
    value = torch.stack([c[pairs[:, 0]], u[pairs[:, 1]]], 1)
    allowed = evidence[rows.nodes, value[:, 1]].isfinite().all(-1)
    value = value[allowed]
    for order in itertools.permutations(rows.nodes.tolist()):
        given = hood, alpha, logits, evidence, observed, torch.tensor(order)
        q = EvidenceConditional(*given)
        yield value, q.log_prob(value), q.log_terms(value).sum(-1)


def expected_evidence_bound(*given, after=None):
    """
    The bound of :func:`evidence_guide` over all orders, choices and labels.

    :param after: what comes after labels ``(K, n)``, in nats, ``(K,)``.
    """
    bounds = []
    for value, log_q, f in latent_draws(*given):
        rest = 0.0 if after is None else after(value[:, 1])
        bounds.append((log_q.exp() * (f + rest)).sum())
    return torch.stack(bounds).mean()


def at_level(model, level):
    """
    The model with ``level`` nats more for any choice. The constant has no gradient, but a plain
    score has far less noise where the costs of the choices are near zero on average.
    """

    def program():
        with pyro.poutine.trace() as tape:
            model()
        choices = tape.trace.nodes["c"]["value"]
        pyro.factor("level", level + 0.0 * choices.sum(-1))

    return program


def check_gradient(program, loss, estimator, collapsed, particles=1250, steps=16):
    """
    The gradient of ``program.loss()``, by a loss of Pyro, in standard errors.

    :param program: has leaf parameters ``leaves``, a ``model``, a ``guide`` and ``loss``, an exact
        sum.
    """
    truth = program.loss()
    level = truth.item() if estimator == "reinforce" else 0.0
    model = at_level(partial(program.model, collapsed=collapsed), level)
    guide = partial(program.guide, collapsed=collapsed, estimator=estimator)
    elbo = loss(particles, max_plate_nesting=0, vectorize_particles=True)
    found = gradients(elbo, model, guide, program.leaves, steps)
    check_against(truth - level, program.leaves, *found)


def mean_over_orders(nodes, bound):
    """The mean of ``bound(order)`` over all orders of some nodes."""
    orders = itertools.permutations(nodes.tolist())
    return torch.stack([bound(torch.tensor(order)) for order in orders]).mean()


def expected_family_loss(mix, order, log_target):
    """
    The paper's equation (10), summed over all choices and labels.

    :param Tensor order: of the nodes, in which the extended target draws choices.
    :param log_target: labels ``(Q, N)`` to the target's log-density, or the bound on it, ``(Q,)``.
    """
    y = labellings(mix.hood.num_nodes, mix.alpha.shape[-1])
    c = all_choices(mix.hood)[:, None]
    log_joint = NeighborChoice(mix.hood, mix.logits).log_prob(c) + mix.given(c).log_prob(y)
    log_q = mix.choices(y, order=order).log_prob(c)
    return (log_joint.exp() * (log_joint - log_q - log_target(y))).sum()


def exact_field_loss(mix, field, order):
    """The mean loss of :class:`FieldGuide`, with the entropy by the oracle's recursion."""
    neighbors, attention = edge_lists(mix.hood, mix.logits)
    entropy = entropy_bound(mix.alpha.detach().numpy(), neighbors, attention, order.tolist())
    return -entropy - field.expected_potential(mix).item()
