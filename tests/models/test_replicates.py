# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that Predictive draws anew, given the choices and labels of a guide."""

from functools import partial

import pyro
import pytest
import torch
from bounds import PATH, all_choices
from cases import KINDS
from graphs import parameters
from pyro import poutine
from pyro.contrib.autoname import name_count
from pyro.infer import Predictive, WeighedPredictive
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture, OrderedConditional
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

Y = torch.tensor([0, 1, 1])


def posterior_predictive(mix, y, rows):
    """``(n, C)``: the mean of every row's label distribution, given labels; sums over choices."""
    hood, nodes = mix.hood, rows.nodes
    c = all_choices(rows)
    log_attention = hood.log_softmax(mix.logits)
    own = rows.find(c)
    log_weight = log_attention[rows.edge][own].sum(-1)
    relabel = mix.relabel
    if relabel is None:
        relabel = torch.arange(mix.num_classes).expand(hood.num_edges, -1)
    relabel = relabel[rows.edge][own]  # (M, n, C)
    borrowed = (relabel == y[nodes][:, None]).int().argmax(-1)  # (M, n)
    counts = torch.zeros(len(c), *mix.alpha.shape)
    for i in range(len(nodes)):  # a Pólya urn, node after node
        alpha = (mix.alpha + counts)[torch.arange(len(c)), c[:, i]]
        log_weight = log_weight + (alpha / alpha.sum(-1, keepdim=True)).log().gather(
            -1, borrowed[:, i : i + 1]
        ).squeeze(-1)
        counts = counts + (
            one_hot(c[:, i], hood.num_nodes)[:, :, None]
            * one_hot(borrowed[:, i], mix.num_classes)[:, None]
        )
    alpha = mix.alpha + counts
    means = (alpha / alpha.sum(-1, keepdim=True)).gather(
        1, c[..., None].expand(-1, -1, mix.num_classes)
    )
    shown = torch.zeros_like(means).scatter_(-1, relabel, means)
    return torch.einsum("m,mnk->nk", log_weight.softmax(0), shown)


def replicates(given, y, num_samples=20_000, parallel=True, collapsed=True, plate=None, **options):
    """Draws of ``y`` and their weights, by Pyro's own classes."""

    def program(field, *labels):
        if plate is None:
            return field(*given, *labels, collapsed=collapsed, **options)
        with pyro.plate("fields", plate):
            return field(*given, *labels, collapsed=collapsed, **options)

    weighed = WeighedPredictive(
        lambda: program(nmm, None, *y[1:]), guide=lambda: program(ordered_guide, *y),
        num_samples=num_samples, parallel=parallel,
    )  # fmt: skip
    found = weighed(model_guide=lambda: program(nmm, *y))
    return found.samples["y"], found.log_weights


def check(draws, log_weights, exact):
    weights, hit = log_weights.softmax(0), one_hot(draws, exact.shape[-1]).double()
    error = (weights[:, None, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert (torch.einsum("s,snk->nk", weights, hit) - exact).abs().le(4.5 * error + 1e-9).all()


@pytest.mark.parametrize("collapsed", [True, False])
@pytest.mark.parametrize("kind", [None, "permutations"])
@pytest.mark.parametrize("observed", [None, torch.tensor([True, False, True])])
def test_weighed_replicates_are_exact(kind, observed, collapsed):
    alpha, logits = parameters(PATH, 3, scale=1.0)
    relabel = kind and KINDS[kind](PATH, 3)
    mix = NeighborMixture(PATH, 0.5 * alpha, logits, relabel)
    found = replicates(
        (PATH, mix.alpha, logits), (Y, observed), collapsed=collapsed, relabel=relabel
    )
    check(*found, posterior_predictive(mix, Y, PATH.restrict(observed)))


def test_labels_that_are_not_conditioned_on():
    """Pyro's own way to replicate observed sites, and the other way round, with other nodes."""
    alpha, logits = parameters(PATH, 2, scale=1.0)
    mix, known = NeighborMixture(PATH, 0.5 * alpha, logits), torch.tensor([True, False, True])
    given, exact = (PATH, mix.alpha, logits), posterior_predictive(mix, Y, PATH)
    model, guide = (partial(f, *given, Y, collapsed=True) for f in (nmm, ordered_guide))
    weighed = WeighedPredictive(
        poutine.uncondition(model), guide=guide, num_samples=20_000, parallel=True
    )
    found = weighed(model_guide=model)
    check(found.samples["y"], found.log_weights, exact)
    rest = partial(nmm, *given, None, known, collapsed=True, predict=True)
    weighed = WeighedPredictive(
        poutine.condition(rest, data={"y": Y[known]}), num_samples=20_000, parallel=True,
        guide=partial(ordered_guide, *given, Y, known, collapsed=True),
    )  # fmt: skip
    found = weighed()
    marginals = mix.condition(Y, known).marginals()
    check(found.samples["y_rest"], found.log_weights, marginals[~known])


def test_names_that_are_counted():
    """Of two fields with the same data."""
    alpha, logits = parameters(PATH, 2, scale=1.0)
    given = PATH, 0.2 * alpha, logits

    def both(field, *y):
        for _ in range(2):
            field(*given, *y, collapsed=True)

    model, guide = (name_count(partial(both, *f)) for f in ((nmm,), (ordered_guide, Y)))
    drawn = Predictive(model, guide=guide, num_samples=4000, parallel=True)()
    rates = [drawn[name].double().mean(0) for name in ("y", "y__1")]
    assert (rates[0] - rates[1]).abs().max() < 0.1  # the orders of two guides differ
    forgotten = (given[1] / given[1].sum(-1, keepdim=True)).mean(0)[1]
    assert abs(rates[1].mean() - rates[0].mean()) < abs(rates[1].mean() - forgotten)


def test_one_after_the_other():
    alpha, logits = parameters(PATH, 2, scale=1.0)
    mix = NeighborMixture(PATH, 0.5 * alpha, logits)
    found = replicates((PATH, mix.alpha, logits), (Y,), num_samples=1500, parallel=False)
    check(*found, posterior_predictive(mix, Y, PATH))


def test_fields_of_a_plate():
    alpha, logits = parameters(PATH, 2, scale=1.0)
    mix, fields = NeighborMixture(PATH, 0.3 * alpha, logits), torch.tensor([[0, 0, 0], [1, 1, 1]])
    draws, log_weights = replicates((PATH, mix.alpha, logits), (fields,), plate=2)
    for number, y in enumerate(fields):
        check(draws[:, number], log_weights, posterior_predictive(mix, y, PATH))


def test_other_nodes_beside_replicates():
    """Both are drawn from one posterior of ``z``, so equal choices share it."""
    alpha, logits = torch.full((3, 2), 0.05), torch.tensor([-50.0, 0, 0, -50, -50, 0, -50])
    known = torch.tensor([True, False, False])
    given, y = (PATH, alpha, logits), torch.tensor([1, 0, 0])
    program = partial(nmm, collapsed=True, predict=True)
    drawn = Predictive(
        lambda: program(*given, None, known), num_samples=4000, parallel=True,
        guide=lambda: ordered_guide(*given, y, known, collapsed=True),
    )()  # fmt: skip
    exact = (alpha[0, 1] + 1) / (alpha[0].sum() + 1)  # node 1 alone is chosen, by 0 and by 2
    for name, place in (("y", 0), ("y_rest", 1)):
        rate = drawn[name][:, place].double().mean()
        assert (rate - exact).abs() < 4 * (exact * (1 - exact) / 4000).sqrt()
    both = (drawn["y"][:, 0] == drawn["y_rest"][:, 1]).double().mean()
    assert both > 1 - 2 * alpha[0, 0]


def test_choices_without_their_labels():
    """By a guide of the user's own."""
    alpha, logits = parameters(PATH, 2)

    def guide():
        pyro.sample("c", OrderedConditional(PATH, alpha, logits, Y))

    options = {"guide": guide, "num_samples": 3, "parallel": True}
    with pytest.raises(ValueError, match=r"drawn given choices alone.*collapsed=False"):
        Predictive(partial(nmm, PATH, alpha, logits, collapsed=True), **options)()
    # Labels given choices are another question, with its own answer.
    c = torch.tensor([1, 1, 1])
    given = poutine.condition(partial(nmm, PATH, alpha, logits, collapsed=True), data={"c": c})
    assert torch.equal(poutine.trace(given).get_trace().nodes["y"]["fn"].alpha, alpha)


def test_labels_that_a_guide_draws():
    """Latent labels are the guide's own, and not drawn again."""
    alpha, logits = parameters(PATH, 2)

    def guide():
        pyro.sample("c", OrderedConditional(PATH, alpha, logits, Y))
        pyro.sample("y", pyro.distributions.Delta(Y, event_dim=1))

    options = {"guide": guide, "num_samples": 3, "parallel": True}
    drawn = Predictive(partial(nmm, PATH, alpha, logits, collapsed=True), **options)()
    assert torch.equal(drawn["y"], Y.expand(3, 3))
