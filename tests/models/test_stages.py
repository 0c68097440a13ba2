# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that a StackedNMM reveals in blocks, against enumeration."""

import itertools

import numpy as np
import oracle
import pytest
import torch
from graphs import house
from scipy.stats import chisquare
from stacking import made, mask, moved

from pyro_nmm import Posterior
from pyro_nmm.models import random_blocks
from pyro_nmm.models.stacked.stages import StagedPosterior, counted
from pyro_nmm.models.stacked.table import GraphScores

KNOWN, BLOCK = mask(5, 3), torch.tensor([1, 0, 2, 7, 2])


def problem(kind, block=BLOCK, known=KNOWN, **options):
    """A module, its arguments, and a staged posterior."""
    torch.manual_seed(3)
    classes = 3 if kind == "relabelled" else 2
    stacked, y = moved(made(kind, classes), 0.7), torch.tensor([0, 0, 0, 1, 0])
    given = house(), torch.randn(5, classes), y, known
    return stacked, given, stacked.posterior(*given, num_draws=0, stages=block, **options)


def counts_of(hood, alpha, logits, relabel, nodes, y):
    """Concentrations with the expected counts of labels, edge by edge."""
    result, attention = alpha.clone(), hood.softmax(logits)
    for i in nodes:
        terms = {}
        for e in range(hood.ptr[i], hood.ptr[i + 1]):
            j = int(hood.source[e])
            for k in range(alpha.shape[1]):
                shown = float(k == y[i]) if relabel is None else relabel[e, k, y[i]]
                terms[j, k] = attention[e] * alpha[j, k] / alpha[j].sum() * shown
        for (j, k), term in terms.items():
            result[j, k] += term / sum(terms.values())
    return result


def enumerated(stacked, given, block):
    """All labellings of the unobserved nodes, and their probabilities."""
    hood, scores, y, known = given
    free, size = (~known).nonzero()[:, 0], scores.shape[1]
    labels = torch.tensor(list(itertools.product(range(size), repeat=len(free))))
    probs = np.ones(len(labels))
    for row, new in enumerate(labels):
        every = y.index_copy(0, free, new)
        for b in block[free].unique().tolist():
            earlier = ~known & (block < b)
            values = stacked(hood, scores, every, known | earlier)
            alpha, logits, relabel = (*(value.detach() for value in values), None)[:3]
            alpha = counts_of(hood, alpha, logits, relabel, earlier.nonzero()[:, 0].tolist(), every)
            part = hood.take((~known & (block == b)).nonzero()[:, 0])
            change = None if relabel is None else relabel[part.edge].numpy()
            table, p = oracle.label_probs(part, alpha, logits[part.edge], change)
            shown = every[part.nodes].numpy()
            probs[row] *= p[(table == shown).all(1)].item()
    return labels, torch.tensor(probs)


@pytest.mark.parametrize("kind", ["pool", "relabelled"])
def test_likelihood_is_the_enumeration(kind):
    known = mask(5, 0, 3) if kind == "relabelled" else KNOWN
    stacked, given, posterior = problem(kind, known=known)
    labels, probs = enumerated(stacked, given, BLOCK)
    assert probs.sum().item() == pytest.approx(1)
    whole = stacked.posterior(*given, num_draws=0)
    free, change = (~known).nonzero()[:, 0], []
    for row in range(0, len(labels), 3):
        y = given[2].index_copy(0, free, labels[row])
        torch.manual_seed(0)
        found = posterior.log_likelihood(y, num_particles=4000)
        torch.testing.assert_close(found.exp(), probs[row], rtol=0.03, atol=1e-4)
        change.append(abs(whole.log_likelihood(y, num_particles=4000) - probs[row].log()))
    assert max(change) > 0.1  # one block is another distribution


@pytest.mark.slow
def test_draws_are_the_enumeration():
    stacked, given, posterior = problem("pool")
    _, probs = enumerated(stacked, given, BLOCK)
    torch.manual_seed(1)
    draws, free = posterior.sample((300,)), torch.tensor([0, 1, 2, 4])
    assert (draws[:, 3] == 1).all()
    place = draws[:, free] @ torch.tensor([8, 4, 2, 1])
    assert chisquare(place.bincount(minlength=16), 300 * probs).pvalue > 1e-4
    torch.manual_seed(1)
    counts = posterior.counts([torch.arange(5), [2, 4]], label=1, num_samples=300)
    assert torch.equal(counts, torch.stack([draws.sum(1), draws[:, [2, 4]].sum(1)], 1))
    assert torch.equal(posterior.sample((4,), torch.tensor([3, 1]))[:, 0], torch.ones(4).long())


def test_one_block_is_the_posterior():
    stacked, given, single = problem("pool", torch.zeros(5, dtype=torch.long))
    whole = stacked.posterior(*given, num_draws=0)
    assert (type(whole), type(single)) == (Posterior, StagedPosterior)
    results = []
    for posterior in (single, whole):
        torch.manual_seed(0)
        results.append((posterior.sample((20,)), posterior.log_likelihood(given[2])))
    assert all(map(torch.equal, *results))


def test_draws_at_once_are_copies_of_the_graph():
    _, _, posterior = problem("relabelled")
    y, known = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 0, 1, 1]]), mask(5, 0, 1, 3)
    both = posterior.given(y, known, 1).marginals().chunk(2)
    for row, marginals in zip(y, both, strict=True):
        torch.testing.assert_close(marginals, posterior.given(row[None], known, 1).marginals())
    assert not torch.equal(*both)


def test_labels_of_temperature_scaling_count_less():
    stacked, given, _ = problem("pool")
    stacked.share.fill_(0.4)
    formula, known = stacked.formula, KNOWN | mask(5, 0)
    data = GraphScores(*given[:3], known, mask(5))
    inputs = formula.inputs(data)
    alpha, logits = formula(given[0], inputs)
    found, *_ = counted(data, inputs, 0.4, mask(5, 0), alpha, logits)
    row = given[0].take(torch.tensor([0]))
    _, p = oracle.label_probs(row, alpha.detach(), logits[row.edge].detach())
    expected = 0.4 * p[0] / (0.4 * p[0] + 0.6 * given[1].softmax(-1)[0, 0].item())
    assert (found - alpha).sum().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("updated", [False, True])
def test_new_labels_stay_evidence(updated):
    stacked, given, _ = problem("pool")
    stacked.updated.fill_(updated)
    posterior = stacked.posterior(*given, num_draws=0, new=mask(5, 0), stages=BLOCK)
    assert posterior.sample((4,))[:, 0].eq(0).all()
    later = posterior.given(posterior.labels[None], posterior.block < 2, 64)
    assert later.observed.tolist() == [True, False, False, False, False]
    exact = posterior.first.marginals()[2]
    torch.testing.assert_close(later.marginals()[2], exact, rtol=0, atol=0.2)


def test_blocks_read_no_labels():
    some = torch.rand(50) < 0.7
    block = random_blocks(some, 4)
    assert torch.equal(block, random_blocks(some, 4))
    assert (block[~some] == 3).all()
    sizes = block[some].bincount()
    assert len(sizes) == 4
    assert sizes.max() - sizes.min() <= 1
    assert not torch.equal(block, random_blocks(some, 4, seed=1))


def test_refused():
    stacked, given, posterior = problem("pool")
    y = given[2]
    assert posterior.log_likelihood(y, mask(5, 0, 1)).isfinite()
    alone = *given[:1], torch.randn(5, 3), *given[2:]
    refused = {
        "leaves out node 0, of an earlier": lambda: posterior.log_likelihood(y, mask(5, 1, 2, 4)),
        "without stages": lambda: posterior.condition(y, mask(5, 0)),
        "with stages it has none": posterior.marginals,
        "blocks 0, 1": lambda: stacked.posterior(*given, stages=BLOCK - 5),
        "stages needs a pool": lambda: moved(made("scores")).posterior(*alone, stages=BLOCK),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()
