# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Refusals of the mathematics: an error names the argument, its value and the cure. Values of wrong
types, shapes and ranges in every public call are those of ``test_doctests.py``."""

import networkx as nx
import pytest
import torch
from graphs import house, shared_sources, to_hood
from hostile import hostile
from pyro import poutine

from pyro_nmm import (
    AveragedPosterior,
    ChosenLabels,
    EvidenceConditional,
    MembershipMixture,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
    sources,
)
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm
from pyro_nmm.models.dglfrm import InnerProductGraph

NAN, INF = float("nan"), float("inf")
HOOD = house()  # of 5 nodes and 17 edges
ALPHA, LOGITS = torch.rand(5, 3).double() + 0.5, torch.randn(17).double()
Y, OBSERVED = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([True, True, False, True, False])


def change(value, index, entry):
    """The value with another entry."""
    changed = value.clone()
    changed[index] = entry
    return changed


def ids(*values):
    return torch.tensor(values)


def pair(*values):
    return torch.tensor(values).view(2, -1)


#: Everything that takes (hood, alpha, logits, y, observed).
DOORS = (
    OrderedConditional,
    lambda *values: NeighborMixture(*values[:3]).elbo(*values[3:]),
    lambda *values: NeighborMixture(*values[:3]).condition(*values[3:], 4),
    poutine.trace(nmm),  # Pyro warns of an observation outside of inference
    lambda *values: poutine.trace(nmm)(*values, collapsed=True),
    ordered_guide,
)
GOOD = {"hood": HOOD, "alpha": ALPHA, "logits": LOGITS, "y": Y, "observed": OBSERVED}
ROWS = {"hood": HOOD.restrict(OBSERVED), "logits": LOGITS[HOOD.restrict(OBSERVED).edge]}
AT_DOORS = [
    ({"alpha": ALPHA[:, :1]}, r"alpha must .*C >= 2 labels, got \(5, 1\)"),
    ({"alpha": change(ALPHA, (2, 1), 0.0)}, r"alpha must be positive.*got.*\[2, 1\]"),
    ({"logits": LOGITS[1:]}, r"logits must .*\(..., 17\).*self-loops included.*got \(16,\)"),
    ({"logits": LOGITS.masked_fill(HOOD.target == 3, -INF)}, "logits of node 3 are all -inf"),
    ({"alpha": ALPHA.float()}, "same dtype, got torch.float32 and torch.float64"),
    ({"observed": None} | ROWS, "hood must hold all 5 nodes, got 3 rows: .*observed"),
    ({"y": ids(0, 3, 2, 0, 1)}, "y holds label 3 at node 1, .* labels 0..2: mask that node out"),
    ({"observed": ids(0, 1, 3)}, "observed must be a boolean mask .*index_to_mask.*int64"),
    ({"observed": OBSERVED & False}, "observed selects no node"),
]
#: Arguments, hostile values of each, and what the error begins with.
AT_DOORS += [
    ({name: wrong}, f"^{name} ")
    for name in ("alpha", "logits", "y", "observed")
    for _, wrong, must_fail in hostile(GOOD[name])
    if must_fail
]


@pytest.mark.parametrize(("wrong", "match"), AT_DOORS)
def test_at_every_door(wrong, match):
    for door in DOORS:
        with pytest.raises(ValueError, match=match):
            door(*(GOOD | wrong).values())


@pytest.mark.parametrize(
    "other",
    [
        {"y": ids(0, 1, 7, 0, -1)},  # labels of nodes that are not observed
        {"logits": LOGITS.masked_fill((HOOD.target == 3) & (HOOD.source != 3), -INF)},
    ],
)
def test_good_values_pass_every_door(other):
    for door in DOORS:
        door(*(GOOD | other).values())


def mixture(relabel=None, batch=()):
    return NeighborMixture(HOOD, ALPHA.expand(*batch, 5, 3), LOGITS, relabel)


def ordered(**options):
    return OrderedConditional(HOOD, ALPHA, LOGITS, Y, OBSERVED, **options)


def evidence(value, **options):
    return EvidenceConditional(HOOD, ALPHA, LOGITS, value, **options)


def known(*nodes, size=5):
    """A mask of some nodes."""
    return torch.isin(torch.arange(size), ids(*nodes))


def posterior():
    return mixture().condition(ids(0, 1, 2, 0, 1), known(0, 1))


def average():
    return AveragedPosterior([posterior()] * 2)


def large(num_nodes=40):
    hood = to_hood(nx.cycle_graph(num_nodes))
    return NeighborMixture(hood, torch.ones(num_nodes, 2), torch.zeros(hood.num_edges))


ZERO, SOME = torch.zeros(5, dtype=torch.long), known(0, 1, size=40)
EDGE, META = pair(0, 1, 1, 0), torch.device("meta")
EVIDENCE, STRANGER = torch.zeros(5, 3).double(), ids(4, 0, 0)
PATH, SHARED = Neighborhood(pair(0, 1, 1, 2, 1, 0, 2, 1), 3), shared_sources()

GRAPHS = [
    (lambda: Neighborhood(torch.eye(2).to_sparse(), 2), "sparse matrix: .* to_edge_index"),
    (lambda: Neighborhood([[0.0], [1.0]], 4), "edge_index must hold integers"),
    (lambda: Neighborhood(EDGE, 1), r"node id 1, but ids lie in 0..0: .*raise num_nodes"),
    (lambda: Neighborhood(4, EDGE), "num_nodes must be an integer of at least 1"),
    (lambda: Neighborhood(EDGE, 3, 2), "edge_index has no edge into node 2 .1 such"),
    (lambda: Neighborhood(EDGE, 3, 1), "edge_index holds source id 1"),
    (lambda: PATH.take(ids(0), 9), "num_edges must be 2, of rows, got 9"),
    (lambda: PATH.common_neighbors(pair(0, 3)), r"pairs .*row numbers in 0\.\.2, got 3"),
    (lambda: sources.grid(9, 9, stride=6, radius=1), "radius=1 reaches no source"),
    (lambda: sources.points(torch.zeros(3, 2), 1.0, 2.0), "radius must be at least"),
    (lambda: sources.walks(EDGE, 2, EDGE), r"shape \(2,\), one"),
    (lambda: sources.walks(EDGE, 2, ids(0, -1)), "membership must not be negative"),
    (lambda: sources.hops(EDGE, 2, 1, 2), "radius must be an integer of at least 2"),
]

CONDITIONALS = [
    *((lambda order=order: ordered(order=ids(*order)), "order .*permutation of the 3 observed node")
      for order in ([0, 1], [0, 1, 4], [0, 0, 1])),
    (lambda: ordered(estimator="latter"), "estimator must be one of .*'reward_to_go'.*'latter'"),
    (lambda: ordered().log_prob(STRANGER), "support"),
    (lambda: NeighborChoice(HOOD, LOGITS).log_prob(ids(4, 0, 0, 0, 0)), "support"),
    (lambda: NeighborMixture(HOOD, ALPHA.to(META), LOGITS), r"alpha is on meta .*\.to\(device\)"),
    (lambda: NeighborMixture(SHARED, ALPHA[:2], LOGITS[:8]), "alpha must .* one row per source"),
    (lambda: evidence(EVIDENCE[1:]), "evidence must hold log-likelihoods of shape"),
    (lambda: evidence(EVIDENCE * NAN), "evidence must not be NaN"),
    (lambda: evidence(change(EVIDENCE, 2, -INF)), "evidence rules out every label of node 2"),
    (lambda: evidence(EVIDENCE).posterior(num_sweeps=5), "num_sweeps needs num_samples"),
    (lambda: evidence(EVIDENCE).log_likelihood(num_given=-1), "num_given must .* at least 0"),
    (lambda: evidence(EVIDENCE, observed=known(0)).posterior().condition(ZERO, known(0, 1)),
     "observed selects node 0, which has evidence already"),
    (lambda: ChosenLabels(ALPHA, ids(-1, 0)), r"choices holds node id .*, but ids lie in 0"),
    (lambda: ChosenLabels(ALPHA, torch.ones(2)), "choices must hold node ids .*torch.float64"),
    (lambda: ChosenLabels(ALPHA, ids(0)).log_prob(ids(0.5)), "support"),
]  # fmt: skip

MIXTURES = [
    (lambda: mixture(torch.full((17, 3, 3), 0.4)), r"sum to one over the last .* at \[0, 0\]"),
    (lambda: mixture([[0, 1]]), r"relabel must .* of shape \(..., 17, 3, 3\), probabilities"),
    (lambda: mixture().entropy_bound(0), "num_samples .* at least 1, got 0"),
    (lambda: mixture(batch=(2,)).entropy_bound(), "without batch"),
    (lambda: mixture().log_prob(ids(0, 0, 0, 0, 3)), "support"),
    (lambda: large().log_prob(torch.zeros(40)), r"about 10\^19 .*use log_likelihood or elbo"),
    (lambda: mixture().log_marginal(ids(1, 1), ids(0, 0)), "nodes must be distinct"),
    (lambda: mixture().log_marginal(ids(1, 2), ids(0, 3)), "y holds label 3 at node 2"),
    (lambda: mixture().pairwise(pair(0, -1)), "pairs holds node id -1"),
    (lambda: mixture(batch=(3,)).expand((1,)), "cannot expand batch_shape"),
    (lambda: mixture().log_likelihood(ZERO, known(0), known(0)), "both hold node 0"),
    (lambda: mixture().log_likelihood(ZERO, given=known()), "given selects no node"),
]

POSTERIORS = [
    (lambda: mixture().condition(ZERO.expand(2, 5), None, 4), r"one labelling y .*got \(2, 5\)"),
    (lambda: mixture(batch=(2,)).condition(ZERO), "condition needs a mixture without batch"),
    (lambda: large().condition(torch.zeros(40).long(), SOME).condition(torch.zeros(40).long()),
     "condition with num_samples"),
    (lambda: large().condition(torch.zeros(40).long(), SOME).predict(method="joint"),
     r"method='joint' would compare 2\^38 labellings .*sequential"),
    (lambda: posterior().predict(method="mode"), "method .*'joint' or 'sequential', got 'mode'"),
    (lambda: posterior().condition(ZERO, known(1, 3)), "label 0 at node 1, which is known to"),
    (lambda: posterior().log_marginal(ids(4), ids(3)), "y holds label 3 at node 4"),
    (lambda: posterior().counts([ids(0)], label=3), r"label must lie in 0..2, got 3"),
    (lambda: posterior().counts(ids(0, 1), label=1), r"sets must be a sequence.*\[nodes\]"),
    (lambda: posterior().sample((2,), ids(1, 1)), "nodes must be distinct"),
    (lambda: AveragedPosterior([]), "members must hold a posterior"),
    (lambda: AveragedPosterior([posterior(), large().prior(2)]), r"members must be of one graph"),
    (lambda: AveragedPosterior([posterior(), mixture().prior()]), "be given the same labels"),
    (lambda: average().predict(method="sequential"), "num_draws=0"),
    (lambda: average().log_likelihood(Y + 1, known(0)), "y holds label .* at node 0"),
]  # fmt: skip

FACTORS, LINKS = torch.arange(22.0).view(11, 2).double(), pair(0, 1, 1, 2, 1, 0, 2, 1)


def graph(held_out=None):
    return InnerProductGraph(FACTORS, 1.0, held_out)


def memberships(log_odds=FACTORS[:5], logits=LOGITS, **options):
    return MembershipMixture(HOOD, log_odds, logits, **options)


LINKED = [
    (lambda: graph(held_out=LINKS + 9), "held_out holds node id .*, but ids lie in 0..10"),
    (lambda: graph().log_prob(LINKS[:, :3]), "both directions of every edge: use PyG's to_"),
    (lambda: memberships(FACTORS[:3]), r"log_odds must have shape \(..., 5, K\).*got \(3, 2\)"),
    (lambda: memberships(temperature=0.0), "temperature must be positive"),
    (lambda: memberships(estimator="score"), "estimator must be"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), GRAPHS + CONDITIONALS + MIXTURES + POSTERIORS + LINKED)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_what_is_not_implemented():
    with pytest.raises(NotImplementedError, match="one by one"):
        graph().sample((2,))
    for law in (NeighborChoice, OrderedConditional, ChosenLabels, NeighborMixture):
        with pytest.raises(NotImplementedError, match=f"{law.__name__} has too many values"):
            law.enumerate_support(object.__new__(law))


def test_without_validation(kernels):
    """Nothing is checked, a choice outside of its neighbourhood has probability zero, and no loop
    reads past the end of a table."""
    NeighborMixture(HOOD, -ALPHA, LOGITS, validate_args=False)
    assert ordered(validate_args=False).log_prob(STRANGER) == -INF
    law = ChosenLabels(ALPHA, ids(0, 2), validate_args=False)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        law.log_prob(ids(0, 10**6))
