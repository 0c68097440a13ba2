# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that Predictive draws anew, given the choices and labels of a guide."""

from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from bounds import PATH, all_choices
from cases import everything, matrices
from graphs import parameters
from pyro import poutine
from pyro.infer import Predictive, WeighedPredictive
from pyro_rows import in_plate
from torch.nn.functional import one_hot

from pyro_nmm import NeighborChoice, NeighborMixture, OrderedConditional
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm

Y = torch.tensor([0, 1, 1])


def posterior_predictive(mix, y, rows):
    """``(n, C)``: the mean of every row's label distribution, given labels; sums over choices."""
    nodes, c = rows.nodes, all_choices(rows)
    draw, edges = torch.arange(len(c)), rows.edge[rows.find(c)]
    log_weight = mix.hood.log_softmax(mix.logits)[edges].sum(-1)
    alpha = mix.alpha.repeat(len(c), 1, 1)
    for i in range(len(nodes)):  # a Pólya urn, node after node
        source, label = c[:, i], y[nodes[i]]
        log_weight = log_weight + (alpha[draw, source, label] / alpha[draw, source].sum(-1)).log()
        alpha[draw, source, label] += 1
    means = (alpha / alpha.sum(-1, keepdim=True)).gather(
        1, c[..., None].expand(-1, -1, mix.num_classes)
    )
    return torch.einsum("m,mnk->nk", log_weight.softmax(0), means)


def shown_again(mix, y, rows):
    """``(n, C)``: what edges make of the borrowed labels, which are sites of their own."""
    value = everything(rows, mix.num_classes)
    q = mix.in_order(y, torch.isin(mix.hood.nodes, rows.nodes))
    weight = (q.log_prob(value) + q.log_terms(value).sum(-1)).softmax(0)
    edges = rows.edge[rows.find(value[:, 0])]
    return torch.einsum("q,qnk->nk", weight, mix.relabel[edges, value[:, 1]])


def check(draws, log_weights, exact):
    weights, hit = log_weights.softmax(0), one_hot(draws, exact.shape[-1]).double()
    error = (weights[:, None, None] ** 2 * (hit - exact) ** 2).sum(0).sqrt()
    assert (torch.einsum("s,snk->nk", weights, hit) - exact).abs().le(4.5 * error + 1e-9).all()


def weighed(model, guide, num_samples=20_000, parallel=True, **model_guide):
    """Draws and their weights, by Pyro's own class."""
    draws = WeighedPredictive(model, guide=guide, num_samples=num_samples, parallel=parallel)
    return draws(**model_guide)


def case(share=0.5, num_classes=2, relabel=None, collapsed=True):
    """A mixture, and both programs."""
    alpha, logits = parameters(PATH, num_classes, scale=1.0)
    mix = NeighborMixture(PATH, share * alpha, logits, relabel)
    options = {"relabel": relabel, "collapsed": collapsed}
    return mix, *(partial(f, PATH, mix.alpha, logits, **options) for f in (nmm, ordered_guide))


@pytest.mark.parametrize("collapsed", [True, False])
@pytest.mark.parametrize("kind", [None, matrices])
@pytest.mark.parametrize("observed", [None, torch.tensor([True, False, True])])
def test_weighed_replicates_are_exact(kind, observed, collapsed):
    relabel = kind and kind(PATH, 3)
    mix, field, guide = case(0.5, 3, relabel, collapsed)
    model, guide = partial(field, None, observed), partial(guide, Y, observed)
    drawn = weighed(model, guide, model_guide=partial(field, Y, observed))
    exact = (shown_again if kind else posterior_predictive)(mix, Y, PATH.restrict(observed))
    check(drawn.samples["y"], drawn.log_weights, exact)


def test_fields_of_a_plate():
    (mix, *programs), fields = case(0.3), torch.tensor([[0, 0, 0], [1, 1, 1]])
    field, guide = (in_plate(program, 2) for program in programs)
    drawn = weighed(field, partial(guide, fields), model_guide=partial(field, fields))
    for number, y in enumerate(fields):
        exact = posterior_predictive(mix, y, PATH)
        check(drawn.samples["y"][:, number], drawn.log_weights, exact)


def test_labels_that_are_not_conditioned_on():
    """Pyro's own way to replicate observed sites, and the other way round, with other nodes."""
    (mix, field, guide), known = case(), torch.tensor([True, False, True])
    model = partial(field, Y)
    drawn = weighed(poutine.uncondition(model), partial(guide, Y), model_guide=model)
    check(drawn.samples["y"], drawn.log_weights, posterior_predictive(mix, Y, PATH))
    rest = poutine.condition(partial(field, None, known, predict=True), data={"y": Y[known]})
    drawn = weighed(rest, partial(guide, Y, known))
    exact = mix.condition(Y, known).marginals()[~known]
    check(drawn.samples["y_rest"], drawn.log_weights, exact)


def test_choices_without_their_labels():
    """By a guide of the user's own, which may draw the labels, too."""
    mix, field, _ = case()

    def guide(labels=False):
        pyro.sample("c", OrderedConditional(PATH, mix.alpha, mix.logits, Y))
        if labels:
            pyro.sample("y", pyro.distributions.Delta(Y, event_dim=1))

    options = {"num_samples": 3, "parallel": True}
    with pytest.raises(ValueError, match=r"drawn given choices alone.*collapsed=False"):
        Predictive(field, guide=guide, **options)()
    drawn = Predictive(field, guide=partial(guide, True), **options)()
    assert torch.equal(drawn["y"], Y.expand(3, 3))
    # Choices of a guide's own may depend on labels; independent ones do not.
    delta = pyro.distributions.Delta(torch.tensor([1, 1, 1]), event_dim=1)
    for law, refused in ((delta, True), (NeighborChoice(PATH, mix.logits + 1.0), False)):
        replayed = poutine.replay(
            field, poutine.trace(lambda law=law: pyro.sample("c", law)).get_trace()
        )
        with pytest.raises(ValueError, match="given choices alone") if refused else nullcontext():
            replayed()
    # Labels given choices are another question, with its own answer.
    chosen = poutine.condition(field, data={"c": torch.tensor([1, 1, 1])})
    assert torch.equal(poutine.trace(chosen).get_trace().nodes["y"]["fn"].alpha, mix.alpha)
