# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors of every kind and all their queries, against the probabilities of all labellings."""

import itertools

import networkx as nx
import pytest
import torch
from cases import enumerated, joint_tables, mask, matrices, sharing_house, table_of
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from scipy.stats import chisquare

from pyro_nmm import AveragedPosterior, NeighborMixture, blocks

GRAPHS = {"house": house, "star": star, "shared": shared_sources}
#: Labels and observed nodes, now and later; nodes with evidence. Other labels are never read.
Y, FIRST, LATER, HINTS = torch.tensor([1, -7, 0, -7, 1]), mask(0, 4), mask(2), mask(0, 3, 4)
BOTH, NODES, NUMBER = FIRST | LATER, torch.tensor([3, 1, 0]), 10_000
PAIRS = torch.tensor(list(itertools.product(range(5), repeat=2))).T


class Case:
    """A mixture, evidence, and the probabilities of all labellings given labels and evidence."""

    def __init__(self, graph="house", kind=None, size=2):
        hood = GRAPHS[graph]()
        alpha, logits = parameters(hood, size, scale=1.0)
        relabel = matrices(hood, size) if kind else None
        self.mix = NeighborMixture(hood, 0.5 * alpha, logits, relabel)
        self.labels, self.prior = enumerated(self.mix)
        self.evidence = torch.randn(5, size)
        self.evidence[0, 0] = -torch.inf

    def probs(self, known, hints):
        possible = (self.labels[:, known] == Y[known]).all(1)
        likelihood = self.evidence[torch.arange(5), self.labels][:, hints].sum(-1).exp()
        probs = self.prior * possible * likelihood
        return probs / probs.sum()

    def hinted(self, *options, **more):
        return self.mix.latents(self.evidence, HINTS).posterior(*options, **more)


def close(found, expected, error):
    torch.testing.assert_close(found, expected, rtol=0, atol=error)


def check(posterior, labels, probs, error):
    """Queries have the enumerated values; draws have the posterior's own probabilities."""
    joint, few = joint_tables(labels, probs), labellings(3, posterior.num_classes)
    marginals = joint.diagonal().sum(0).T
    close(posterior.marginals(), marginals, error)
    close(posterior.pairwise(PAIRS), joint.flatten(0, 1), error)
    close(posterior.log_marginal(torch.arange(5), labels).exp(), probs, error)
    chances = probs @ (labels[:, None, NODES] == few).all(-1).double()
    close(posterior.log_marginal(NODES, few).exp(), chances, error)
    if error < 1e-6:
        assert torch.equal(posterior.predict(), marginals.argmax(-1))
        assert torch.equal(posterior.predict(NODES, "joint"), few[chances.argmax()])
    for nodes in (NODES, torch.arange(5)):
        draws, every = posterior.sample((NUMBER,), nodes), labellings(len(nodes), joint.shape[-1])
        expected = NUMBER * posterior.log_marginal(nodes, every).exp()
        number = (draws[:, None] == every).all(-1).sum(0)
        assert number.sum() == NUMBER
        assert number[expected == 0].sum() == 0
        often = expected > 5
        if often.sum() > 1:
            expected = expected[often] * number[often].sum() / expected[often].sum()
            assert chisquare(number[often], expected).pvalue > 1e-4


EXACT = {
    "prior": lambda case: (case.mix.prior(), [], []),
    "labels": lambda case: (case.mix.condition(Y, BOTH), BOTH, []),
    "in steps": lambda case: (case.mix.condition(Y, FIRST).condition(Y, LATER), BOTH, []),
    "hints": lambda case: (case.hinted(), [], HINTS),
    "hints, then labels": lambda case: (case.hinted().condition(Y, LATER), LATER, HINTS),
    "hints of all": lambda case: (
        case.mix.latents(case.evidence).posterior(), [], mask(*range(5))
    ),
}  # fmt: skip
#: With the largest error of a probability. Equal weights have the guide's bias.
DRAWN = {
    "equal": (0.1, lambda case: (case.mix.condition(Y, BOTH, NUMBER), BOTH, [])),
    "weighted": (0.03, lambda case: (case.mix.condition(Y, BOTH, NUMBER, True), BOTH, [])),
    "in steps": (0.03, lambda case: (
        case.mix.condition(Y, FIRST, NUMBER, True).condition(Y, LATER), BOTH, []
    )),
    "from exact": (0.03, lambda case: (
        case.mix.condition(Y, FIRST).condition(Y, LATER, num_samples=NUMBER), BOTH, []
    )),
    "hints, then labels": (0.03, lambda case: (
        case.hinted(NUMBER, weighted=True).condition(Y, LATER), LATER, HINTS
    )),
    "chains": (0.03, lambda case: (case.hinted(2000, num_sweeps=20), [], HINTS)),
}  # fmt: skip


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize(
    ("graph", "kind", "size"),
    [
        ("house", None, 2),
        ("shared", None, 3),
        ("shared", "matrices", 2),
    ],
)
def test_exact(graph, kind, size, way):
    if kind and "hints" in way:
        pytest.skip("edges that relabel have no posterior of hints")
    case = Case(graph, kind, size)
    posterior, known, hints = EXACT[way](case)
    assert posterior.is_exact
    probs = case.probs(known, hints)
    check(posterior, case.labels, probs, 1e-9)


@pytest.mark.parametrize("way", DRAWN)
@pytest.mark.parametrize(
    ("kernels", "graph", "kind"),
    [
        ("loops", "house", None),
        ("blocks", "star", None),
        ("tensors", "shared", "matrices"),
    ],
    indirect=["kernels"],
)
def test_drawn(kernels, graph, kind, way):
    if kind and way in ("hints, then labels", "chains"):
        pytest.skip("edges that relabel have no posterior of hints")
    case, (error, make) = Case(graph, kind), DRAWN[way]
    posterior, known, hints = make(case)
    assert not posterior.is_exact
    if graph == "house":
        assert (posterior.log_weights.unique().numel() == 1) == (way in ("equal", "chains"))
    check(posterior, case.labels, case.probs(known, hints), error)


def test_averaged():
    """The mean of the members' probabilities, before and after more labels."""
    cases = [Case(), Case()]
    posterior = AveragedPosterior([case.mix.condition(Y, FIRST) for case in cases])
    for known in (FIRST, BOTH):
        probs = sum(case.probs(known, []) for case in cases) / 2
        posterior = posterior.condition(Y, known)
        assert torch.equal(posterior.observed, known)
        check(posterior, cases[0].labels, probs, 1e-9)


def test_components_are_drawn_by_their_weight():
    """One by one, in no order; those without weight never."""
    mix, y = sharing_house()
    components = mix.condition(y, mask(0, 1), num_samples=3).components
    components.log_weights = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = components.drawn(4000)
    assert chisquare(drawn.bincount(), 4000 * components.weights).pvalue > 1e-4
    repeats = (drawn[1:] == drawn[:-1]).double().mean()
    assert abs(repeats - 0.38) < 0.03  # of independent draws
    components.log_weights = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert (components.drawn(1000) == 1).all()


def test_equal_weights_stay_equal():
    """Every choice is a neighbour of its node, in whatever order new nodes were drawn."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(1), 200).condition(y, mask(0, 3, 4))
    assert post.log_weights.unique().numel() == 1
    assert post.observed.tolist() == mask(0, 1, 3, 4).tolist()
    assert post.components.choices.shape == (200, 4)
    assert (mix.hood.take(post.nodes).find(post.components.choices) >= 0).all()
    # Weights that changed once change with later labels.
    first = mix.condition(y, mask(0, 1), 50, weighted=True)
    second = first.condition(y, mask(3))
    assert second.weighted
    assert not torch.equal(second.log_weights, first.log_weights)
    assert first.condition(y, mask(3), num_samples=9).weighted


@pytest.mark.parametrize("num_samples", [None, 8])
def test_labels_that_are_observed_already(num_samples):
    """They change nothing, and ``num_samples`` draws components as ever."""
    mix, y = sharing_house()
    post = mix.condition(y, mask(0, 1), num_samples)
    assert post.condition(y, mask(0)) is post
    assert post.condition(y, mask(0, 1, 4)).nodes.tolist() == [0, 1, 4]
    drawn = post.condition(y, mask(0), num_samples=5000)
    assert len(drawn.components) == 5000
    torch.testing.assert_close(drawn.marginals(), post.marginals(), atol=0.05, rtol=0)


def test_posterior_is_detached():
    mix, y = sharing_house()
    relabel = torch.eye(2).expand(mix.hood.num_edges, 2, 2).clone()
    parts = [part.clone().requires_grad_() for part in (mix.alpha, mix.logits, relabel)]
    mix = NeighborMixture(mix.hood, *parts)
    assert mix.marginals().requires_grad
    for num_samples in (None, 4):
        post = mix.condition(y, mask(0, 1), num_samples)
        assert not post.marginals().requires_grad
        assert not post.pairwise(torch.tensor([[2], [3]])).requires_grad


@pytest.mark.parametrize("num_samples", [None, 4])
def test_a_label_that_no_edge_shows(num_samples):
    hood = to_hood(nx.path_graph(3))
    shown = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    mix = NeighborMixture(hood, *parameters(hood, 3), shown.expand(hood.num_edges, 3, 3))
    with pytest.raises(ValueError, match="rules out every label of node 0"):
        mix.condition(torch.tensor([2, 0, 1]), mask(0, size=3), num_samples)


def test_queries_in_blocks(monkeypatch):
    """Some components, pairs, edges and draws at a time give what all at once give."""
    mix, y = sharing_house()
    pairs, nodes = torch.tensor([[2, 0, 4], [4, 2, 4]]), torch.tensor([2, 4])

    def queries():
        torch.manual_seed(3)
        post = mix.condition(y, mask(0, 1, 3), 7, weighted=True)
        yield from (post.pairwise(pairs), post.marginals(), post.log_marginal(nodes, y[nodes]))
        yield from (post.components.choices, mix.pairwise(pairs), mix.marginals())

    whole = list(queries())
    table = table_of(posterior := mix.condition(y, mask(0, 1)))
    monkeypatch.setattr(blocks, "NUMBERS", 8)
    for found, expected in zip(queries(), whole, strict=True):
        torch.testing.assert_close(found, expected)
    monkeypatch.setattr(blocks, "NUMBERS", 5000)
    numbers = posterior.sample((10_000,)) @ 2 ** torch.arange(4, -1, -1)
    torch.testing.assert_close(numbers.bincount(minlength=32) / 10_000, table, atol=0.02, rtol=0)


def test_gradients_in_blocks(monkeypatch):
    """Of closed forms, through what blocks write in place."""
    mix, _ = sharing_house()
    monkeypatch.setattr(blocks, "NUMBERS", 8)
    pairs = torch.tensor([[2, 0, 4], [4, 2, 4]])

    def query(alpha, logits):
        mixture = NeighborMixture(mix.hood, alpha.exp(), logits)
        return mixture.pairwise(pairs), mixture.marginals()

    inputs = [t.detach().requires_grad_() for t in (mix.alpha.log(), mix.logits)]
    torch.autograd.gradcheck(query, inputs)


def test_means_where_everybody_chose():
    """In float32, with hardly any concentration: no weight is left over for the prior."""
    hood = to_hood(nx.star_graph(30))
    logits = 30.0 * (hood.source == 0).float()
    mix = NeighborMixture(hood, torch.full((31, 3), 1e-4).float(), logits)
    y = torch.arange(31) % 2
    post = mix.condition(y, torch.arange(31) > 0, 50)
    assert (post.components.choices == 0).all()
    exact = (1e-4 + torch.tensor([15.0, 15.0, 0.0])) / (30 + 3e-4)
    torch.testing.assert_close(post.components.mean()[0], exact.float(), rtol=1e-5, atol=0)


def one_by_one(post, order, uniforms):
    """The sequential rule as a plain loop over nodes."""
    hood, weights = post.hood, post.log_weights.exp()
    alpha = post.components.concentrations(torch.arange(hood.num_nodes))
    attention = hood.softmax(post.logits)
    labels = []
    for place, i in enumerate(order.tolist()):
        row = slice(hood.ptr[i], hood.ptr[i + 1])
        share = alpha[:, hood.source[row]] / alpha[:, hood.source[row]].sum(-1, keepdim=True)
        score = attention[row, None] * share  # (T, deg, C)
        label = int(torch.einsum("t,tdc->c", weights, score).argmax())
        labels.append(label)
        cumulative = score[..., label].cumsum(-1)
        for t in range(len(alpha)):
            threshold = uniforms[t, place] * cumulative[t, -1]
            pick = int((cumulative[t] <= threshold).sum())
            alpha[t, hood.source[row][pick], label] += 1
    return labels


@pytest.mark.parametrize("seed", range(4))
def test_sequential_prediction_is_the_loop_over_nodes(seed):
    torch.manual_seed(seed)
    hood = to_hood(nx.barabasi_albert_graph(25, 2, seed=seed))
    mix = NeighborMixture(hood, *parameters(hood, 3, scale=2.0))
    y, observed = mix.sample(), torch.rand(25) < 0.3
    observed[0] = True
    post = mix.condition(y, observed, num_samples=4)
    log_weights = torch.tensor([0.1, 0.1, 0.2, 0.6]).log()
    post.log_weights = post.components.log_weights = log_weights
    order = (~observed).nonzero()[:, 0]
    order = order[torch.randperm(len(order))]
    torch.manual_seed(seed)
    labels = post.components.predict_in_turn(order)
    torch.manual_seed(seed)
    uniforms = torch.rand(4, len(order), dtype=torch.double)
    assert labels.tolist() == one_by_one(post, order, uniforms)


def test_predictions_keep_what_is_known():
    hood, observed = house(), mask(0, 1, 3)
    mix, y = NeighborMixture(hood, *parameters(hood, 3)), torch.randint(3, (5,))
    y[~observed] = -1
    post = mix.condition(y, observed, 16)
    for method in ("marginal", "joint", "sequential"):
        labels = post.predict(method=method)
        assert (labels[observed] == y[observed]).all()
        assert (labels >= 0).all()
        assert (labels < 3).all()
    some = torch.tensor([4, 0])
    assert post.predict(some).tolist() == post.predict()[some].tolist()
    everything = mix.condition(y.clamp(min=0), None, 4)
    assert torch.equal(everything.predict(method="joint"), y.clamp(min=0))
    assert everything.log_marginal(torch.tensor([0, 1]), y[:2]) == 0
    assert everything.log_marginal(torch.tensor([0]), (y[:1] + 1) % 3) == -torch.inf
