# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Refusals of the mathematics, a line each: an error names the argument, its value and the cure."""

import networkx as nx
import pytest
import torch
from cases import matrices
from graphs import house, shared_sources, to_hood
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
    lambda *values: NeighborMixture(*values[:3]).condition(*values[3:]),
    lambda *values: NeighborMixture(*values[:3]).condition(*values[3:], 4),
    poutine.trace(nmm),  # Pyro warns of an observation outside of inference
    lambda *values: poutine.trace(nmm)(*values, collapsed=True),
    ordered_guide,
)
GOOD = {"hood": HOOD, "alpha": ALPHA, "logits": LOGITS, "y": Y, "observed": OBSERVED}
ROWS = {"hood": HOOD.restrict(OBSERVED), "logits": LOGITS[HOOD.restrict(OBSERVED).edge]}
AT_DOORS = [
    ({"alpha": ALPHA[:4]}, r"alpha must have shape \(..., 5, C\).* got \(4, 3\)"),
    ({"alpha": ALPHA[:, :1]}, r"alpha must .*C >= 2 labels, got \(5, 1\)"),
    ({"alpha": ALPHA.long()}, "alpha must be a floating-point tensor, got torch.int64"),
    ({"alpha": [1.0]}, "alpha must be a floating-point tensor"),
    *(({"alpha": change(ALPHA, (2, 1), bad)}, r"alpha must be (positive|finite).*got.*\[2, 1\]")
      for bad in (0.0, -1.0, NAN, INF)),
    ({"logits": LOGITS[1:]}, r"logits must .*\(..., 17\).*self-loops included.*got \(16,\)"),
    ({"logits": LOGITS.long()}, "logits must be a floating-point tensor"),
    ({"logits": LOGITS.masked_fill(HOOD.target == 3, -INF)}, "logits of node 3 are all -inf"),
    ({"alpha": ALPHA.float()}, "same dtype, got torch.float32 and torch.float64"),
    ({"observed": None} | ROWS, "hood must hold all 5 nodes, got 3 rows: .*observed"),
    ({"y": ids(0, 3, 2, 0, 1)}, "y holds label 3 at node 1, .* labels 0..2: mask that node out"),
    ({"y": ids(0, 1, 2, -1, 1)}, "y holds label -1 at node 3"),
    ({"y": Y[:4]}, r"y must have shape \(..., 5\), one label per node, got \(4,\)"),
    ({"y": Y.double()}, "y must hold integer labels .* got torch.float64"),
    ({"observed": ids(0, 1, 3)}, "observed must be a boolean mask .*int64; .*index_to_mask"),
    ({"observed": OBSERVED & False}, "observed selects no node"),
    ({"observed": OBSERVED[:4]}, r"observed must have shape \(5,\), one entry per node, got \(4,"),
    ({"observed": [True] * 5}, "observed must be a boolean mask"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "match"), AT_DOORS)
def test_at_every_door(wrong, match):
    for door in DOORS:
        with pytest.raises(ValueError, match=match):
            door(*(GOOD | wrong).values())


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"y": ids(0, 1, 7, 0, -1)},  # labels of nodes that are not observed
        {"logits": LOGITS.masked_fill((HOOD.target == 3) & (HOOD.source != 3), -INF)},
    ],
)
def test_good_values_pass_every_door(other):
    for door in DOORS:
        door(*(GOOD | other).values())


def mixture(relabel=None, batch=()):
    return NeighborMixture(HOOD, ALPHA.expand(*batch, 5, 3), LOGITS, relabel)


def by_matrices():
    return NeighborMixture(HOOD, ALPHA[:, :2], LOGITS, matrices(HOOD, 2))


def ordered(**options):
    return OrderedConditional(HOOD, ALPHA, LOGITS, Y, OBSERVED, **options)


def evidence(value, **options):
    return EvidenceConditional(HOOD, ALPHA, LOGITS, value, **options)


def known(*nodes, size=5):
    """A mask of some nodes."""
    return torch.isin(torch.arange(size), ids(*nodes))


def posterior():
    return mixture().condition(ids(0, 1, 2, 0, 1), known(0, 1))


def large(num_nodes=40):
    hood = to_hood(nx.cycle_graph(num_nodes))
    return NeighborMixture(hood, torch.ones(num_nodes, 2), torch.zeros(hood.num_edges))


ZERO, SOME = torch.zeros(5, dtype=torch.long), known(0, 1, size=40)
EDGE, PAIRS, META = pair(0, 1, 1, 0), pair(0, 1), torch.device("meta")
EVIDENCE, FLIP = torch.zeros(5, 3).double(), ids(1, 0).expand(3, 2)
STRANGER, SPARSE = ids(4, 0, 0), torch.eye(2).to_sparse()
PATH, SHARED = Neighborhood(pair(0, 1, 1, 2, 1, 0, 2, 1), 3), shared_sources()

GRAPHS = [
    (lambda: Neighborhood(torch.zeros(3, 2).long(), 4), r"edge_index .*\(2, num_edges\), got \(3"),
    (lambda: Neighborhood(torch.zeros(2).long(), 4), r"edge_index must .* got \(2,\)"),
    (lambda: Neighborhood([[0], [1, 2]], 4), "edge_index must be a tensor, an array or a nested"),
    (lambda: Neighborhood("edges", 4), "edge_index must be a tensor, an array or a nested list"),
    (lambda: Neighborhood([[0.0], [1.0]], 4), "edge_index must hold integers"),
    (lambda: Neighborhood(EDGE.double(), 4), "edge_index must hold integers .* got torch.float64"),
    (lambda: Neighborhood(SPARSE, 2), "edge_index .* sparse matrix: .* to_edge_index"),
    (lambda: Neighborhood(SPARSE.coalesce(), 2), "edge_index .* sparse matrix: .* to_edge_index"),
    (lambda: Neighborhood(EDGE.to(META), 4), "edge_index is on the meta device"),
    (lambda: Neighborhood(EDGE, 1), r"node id 1, but ids lie in 0..0: .*raise num_nodes"),
    (lambda: Neighborhood(EDGE - 1, 4), "edge_index holds node id -1"),
    (lambda: Neighborhood(EDGE, 0), "num_nodes must be a positive integer, got 0"),
    (lambda: Neighborhood(4, EDGE), "num_nodes must be a positive integer"),
    (lambda: Neighborhood(EDGE, ids(3)[0]), "num_nodes must be a positive integer"),
    (lambda: Neighborhood(EDGE, 3, 2), "edge_index has no edge into node 2 .1 such"),
    (lambda: Neighborhood(EDGE, 3, 1), "edge_index holds source id 1"),
    (lambda: Neighborhood(EDGE, 1, 2), "edge_index holds node id 1"),
    (lambda: Neighborhood(EDGE, 2, 0), "num_sources must be a positive integer"),
    (lambda: Neighborhood.grid(0, 3), "height must be an integer of at least 1, got 0"),
    (lambda: Neighborhood.grid(3.0, 3), "must be an integer of at least"),
    (lambda: Neighborhood.grid(3, 3.5), "must be an integer of at least"),
    (lambda: Neighborhood.grid(3, 3, 1.0), "must be an integer of at least"),
    (lambda: HOOD.restrict(OBSERVED.to(META)), "observed is on meta"),
    (lambda: HOOD.subgraph(ids(0, 5)), "nodes holds node id 5, but ids lie in 0..4"),
    (lambda: HOOD.subgraph(ids(-1)), "nodes holds node id -1, but ids lie in 0..4"),
    (lambda: HOOD.subgraph(OBSERVED & False), "nodes selects no node"),
    (lambda: HOOD.subgraph(OBSERVED[1:]), "nodes must be a boolean mask"),
    (lambda: HOOD.subgraph(ids(0.5)), "nodes must be a boolean mask"),
    (lambda: HOOD.subgraph([0.5, 1]), "nodes must be a boolean mask"),
    (lambda: PATH.subgraph(ids(0, 1, 0)), "nodes must be .*(distinct|repeat)"),
    (lambda: PATH.take(ids(3)), r"rows must lie in 0\.\.2, got 3"),
    (lambda: PATH.take(ids(0, -1)), r"rows must lie in 0\.\.2, got -1"),
    (lambda: PATH.take(ids(0.5)), "rows must hold integers"),
    (lambda: PATH.take(ids(0)[None]), r"rows must have shape \(R,\)"),
    (lambda: PATH.take(ids(0), 9), "num_edges must be 2, of rows, got 9"),
    (lambda: PATH.find(ZERO[:3].view(1, 3, 1)), r"choices must have shape \(B, 3\)"),
    (lambda: PATH.find(torch.zeros(1, 3)), "choices must hold integers"),
    (lambda: PATH.common_neighbors(pair(0, -1)), r"pairs .*row numbers in 0\.\.2, got -1"),
    (lambda: PATH.common_neighbors(pair(0, 3)), r"pairs .*row numbers in 0\.\.2, got 3"),
    (lambda: PATH.common_neighbors(pair(0.5, 1)), "pairs must hold integers"),
    (lambda: PATH.common_neighbors(ZERO[:3, None]), r"pairs must have shape \(2, P\)"),
    (lambda: PATH.softmax("word"), "logits must be a tensor, an array or a nested list"),
    *((lambda name=name, bad=bad: getattr(PATH, name)(bad), r"must have shape \(..., 7\)")
      for name in ("softmax", "log_softmax", "logsumexp", "sum")
      for bad in (torch.zeros(6), torch.zeros(7, 1))),
    (lambda: sources.grid(9, 9, stride=6, radius=1), "radius=1 reaches no source"),
    (lambda: sources.grid(9, 0, stride=6), "width must be an integer of at least 1, got 0"),
    (lambda: sources.points(torch.zeros(3, 2), 1.0, 2.0), "radius must be at least"),
    (lambda: sources.points(torch.zeros(3), 1.0, 1.0), r"positions must have shape \(N, D\)"),
    (lambda: sources.points(torch.zeros(3, 2), "1", 1.0), "radius must be a finite number, got "),
    (lambda: sources.communities(EDGE, 2, torch.zeros(2)), "membership must hold integers"),
    (lambda: sources.communities(EDGE, 2, ids(0, -1)), "membership must not be negative"),
    (lambda: sources.walks(EDGE, 2, EDGE), r"shape \(2,\), one"),
    (lambda: sources.walks(EDGE, 2, EDGE[0], 0), "num_steps must be an integer of at least 1"),
    (lambda: sources.hops(EDGE, 2, 1, 2), "radius must be an integer of at least 2"),
    (lambda: sources.hops(EDGE, 2, spacing=0), "spacing must be an integer of at least 1"),
]  # fmt: skip

CONDITIONALS = [
    *((lambda order=order: ordered(order=ids(*order)), "order .*permutation of the 3 observed node")
      for order in ([0, 1], [0, 1, 4], [0, 0, 1], [0, 1, 3, 2])),
    (lambda: ordered(order=[0, 1, 3]), "order must be a permutation"),
    (lambda: ordered(estimator="latter"), "estimator must be one of .*'reward_to_go'.*'latter'"),
    (lambda: ordered().log_prob(STRANGER), "support"),
    (lambda: ordered().score_parts(STRANGER), "support"),
    (lambda: NeighborChoice(HOOD, LOGITS).log_prob(ids(4, 0, 0, 0, 0)), "support"),
    (lambda: NeighborChoice(HOOD, change(LOGITS, 3, NAN)), r"logits must not be NaN .* \[3\]"),
    (lambda: OrderedConditional(HOOD, ALPHA, LOGITS, Y.to(META)), "y is on meta"),
    (lambda: NeighborMixture(HOOD, ALPHA.to(META), LOGITS), r"alpha is on meta .*\.to\(device\)"),
    (lambda: NeighborMixture(HOOD, ALPHA, LOGITS.to(META)), "logits is on meta"),
    (lambda: NeighborMixture(HOOD, ALPHA, None), "logits must be a floating-point .*NoneType"),
    (lambda: NeighborMixture(HOOD, ALPHA.numpy(), LOGITS), "alpha must be a floating.*ndarray"),
    (lambda: NeighborMixture(SHARED, ALPHA[:2], LOGITS[:8]), "alpha must .* one row per source"),
    (lambda: NeighborMixture(HOOD.restrict(known(0)), ALPHA, LOGITS[:3]), "hood must hold all 5 "),
    (lambda: evidence(EVIDENCE[1:]), "evidence must hold log-likelihoods of shape"),
    (lambda: evidence(EVIDENCE.long()), "evidence must be a floating-point tensor"),
    (lambda: evidence(EVIDENCE * NAN), "evidence must not be NaN"),
    (lambda: evidence(change(EVIDENCE, 2, -INF)), "evidence rules out every label of node 2"),
    (lambda: evidence(EVIDENCE.float()), "same dtype"),
    (lambda: evidence(EVIDENCE).posterior(num_sweeps=5), "num_sweeps needs num_samples"),
    (lambda: evidence(EVIDENCE).posterior(num_samples=0), "num_samples must be .*at least 1"),
    (lambda: evidence(EVIDENCE).posterior(3, num_states=5), "num_states is .* after sweeps"),
    (lambda: evidence(EVIDENCE).posterior(3, num_sweeps=4, num_states=2), "num_states .*least 3"),
    (lambda: large(25).latents(torch.zeros(25, 2)).posterior(), "enumeration over 25 nodes"),
    (lambda: large(25).latents(torch.zeros(25, 2), known(0, 1, size=25)).posterior().condition(
        torch.zeros(25).long(), ~known(0, 1, size=25)), "over 23 nodes .* condition with num_samp"),
    (lambda: evidence(EVIDENCE).log_likelihood(num_given=-1), "num_given must .* at least 0"),
    (lambda: evidence(EVIDENCE, observed=known(0)).posterior().condition(ZERO, known(0, 1)),
     "observed selects node 0, which has evidence already"),
    (lambda: evidence(EVIDENCE, observed=known(0)).posterior(9, weighted=True).condition(ZERO),
     "observed selects node 0, which has evidence already"),
    (lambda: ChosenLabels(ALPHA, ids(0, 10**9)), "choices holds node id .*, but ids lie in 0"),
    (lambda: ChosenLabels(ALPHA, ids(-1, 0)), r"choices holds node id .*, but ids lie in 0"),
    (lambda: ChosenLabels(ALPHA, torch.ones(2)), "choices must hold node ids .*torch.float64"),
    (lambda: ChosenLabels([[1.0]], ids(0)), "alpha must be a floating-point tensor"),
    (lambda: ChosenLabels(ALPHA[:, :1], ids(0)), "alpha must have C >= 2 labels"),
    (lambda: ChosenLabels(ALPHA, ids(0, 0)).log_prob([0, 0]), "value must be a tensor, got .*list"),
    (lambda: ChosenLabels(ALPHA, ids(0)).log_prob(ids(0.5)), "support"),
    (lambda: ChosenLabels(ALPHA, ids(0, 0)).log_prob(ids(0)[:0]), "broadcast|shape|size"),
    (lambda: ChosenLabels(ALPHA[:, :2], ids(0, 1, 1), 0 * FLIP), r"0..1, got \[0, 0\] at \[0\]"),
    *((lambda bad=bad: ChosenLabels(ALPHA[:, :2], ids(0, 1, 1), bad),
       r"relabel must hold integers of shape \(\.\.\., 3, 2\)")
      for bad in (FLIP.double(), FLIP[:2], FLIP[0], ids(0, 1, 2).expand(3, 3), FLIP.tolist())),
]  # fmt: skip

MIXTURES = [
    *((lambda relabel=relabel: mixture(relabel), match) for relabel, match in (
        (torch.zeros(17, 2).long(), r"shape \(17, 3\) or probabilities of shape \(17, 3, 3\)"),
        (torch.zeros(17, 3), r"got torch.float32 of shape \(17, 3\)"),
        (change(torch.arange(3).repeat(17, 1), 3, 0), r"permutations.*\[0, 0, 0\] at \[3\]"),
        (torch.full((17, 3, 3), 0.4), r"sum to one over the last .* got \[0.4.* at \[0, 0\]"),
        ([[0, 1]], "relabel must be a tensor, got"),
    )),
    (lambda: by_matrices().choices(ZERO), "relabel must hold integers"),
    (lambda: by_matrices().intervals(), "edges that keep labels"),
    (lambda: by_matrices().entropy_bound(), "edges that keep labels"),
    (lambda: by_matrices().prior(4).predict(method="sequential"), "is for edges that keep labels"),
    (lambda: by_matrices().elbo(ZERO + 2), "label 2"),
    (lambda: mixture().elbo(ZERO, num_samples=0), r"num_samples must be .*at least 1, got 0"),
    (lambda: NeighborMixture(SHARED, ALPHA[:3], LOGITS[:8]).elbo(ZERO, batch=torch.arange(5)),
     "share sources"),
    (lambda: mixture().entropy_bound(0), "num_samples"),
    (lambda: mixture().entropy_bound(estimator="no_score"), "estimator must be one of"),
    (lambda: mixture().entropy_bound(order=ids(0, 0, 1, 2, 3)), "order"),
    (lambda: mixture().entropy_bound(1, "reward_to_go"), "num_samples .* at least 2, got 1"),
    (lambda: mixture(batch=(2,)).entropy_bound(), "without batch"),
    (lambda: mixture().log_prob([0] * 5), "value must be a tensor, got .*list"),
    (lambda: mixture().log_prob(ids(0, 0, 0, 0, 3)), "support"),
    (lambda: mixture().log_prob(ZERO[:0]), "broadcast|shape|size"),
    (lambda: large().log_prob(torch.zeros(40)), r"about 10\^19 .*use log_likelihood or elbo"),
    (lambda: mixture().log_marginal(ids(0)[None], ids(0)), r"nodes must hold node ids .*\(K,\)"),
    (lambda: mixture().log_marginal(ids(5), ids(0)), "nodes holds node id 5, but ids lie in 0..4"),
    (lambda: mixture().log_marginal(ids(1, 1), ids(0, 0)), "nodes must be distinct"),
    (lambda: mixture().log_marginal(ids(1, 2), ids(0, 3)), "y holds label 3 at node 2"),
    (lambda: large().log_marginal(torch.arange(20), torch.zeros(20).long()), "log_likelihood or"),
    (lambda: mixture().pairwise(ids(0, 1)), r"pairs must hold node ids .*\(2, P\)"),
    (lambda: mixture().pairwise(pair(0, -1)), "pairs holds node id -1"),
    (lambda: mixture(batch=(3,)).expand((1,)), "cannot expand batch_shape"),
    (lambda: mixture().log_likelihood(ZERO, known(0), known(0)), "both hold node 0"),
    (lambda: mixture().log_likelihood(ZERO, given=ids(0)), "given must be a boolean mask"),
    (lambda: mixture().log_likelihood(ZERO, given=known()), "given selects no node"),
    (lambda: mixture().log_likelihood(ZERO, num_particles=0), "num_particles must .* at least 1"),
    (lambda: mixture().log_likelihood(ZERO, order=ids(0)), "order"),
    (lambda: mixture().log_likelihood(ZERO + 7), "y holds label 7 at node"),
]  # fmt: skip

POSTERIORS = [
    (lambda: mixture().condition(ZERO, None, 0), "num_samples must be .*at least 1, got 0"),
    (lambda: mixture().condition(ZERO.expand(2, 5), None, 4), r"one labelling y .*got \(2, 5\)"),
    (lambda: mixture(batch=(2,)).condition(ZERO), "condition needs a mixture without batch"),
    (lambda: large().condition(torch.zeros(40).long()), "num_samples"),
    (lambda: large().condition(torch.zeros(40).long(), SOME).condition(torch.zeros(40).long()),
     "condition with num_samples"),
    (lambda: large().condition(torch.zeros(40).long(), SOME).predict(method="joint"),
     r"method='joint' would compare 2\^38 labellings .*sequential"),
    (lambda: posterior().predict(method="mode"), "method .*'joint' or 'sequential', got 'mode'"),
    (lambda: posterior().condition(ZERO, known(1, 3)), "label 0 at node 1, which is known to"),
    (lambda: posterior().condition(Y + 5, known(3)), "y holds label 5 at node 3"),
    (lambda: posterior().condition(Y, known(3), 0), "num_samples must be .*at least 1, got 0"),
    (lambda: posterior().condition(Y.expand(2, 5), known(3)), "condition needs one labelling y"),
    (lambda: posterior().log_marginal(ids(4), ids(-1)), "y holds label -1 at node 4"),
    (lambda: posterior().log_marginal(ids(4), ids(3)), "y holds label 3 at node 4"),
    (lambda: posterior().counts([ids(0)], label=3), r"label must lie in 0..2, got 3"),
    (lambda: posterior().counts(ids(0, 1), label=1), r"sets must be a sequence.*\[nodes\]"),
    (lambda: posterior().counts([ids(0)], 1, num_samples=0), "num_samples must be .*at least 1"),
    (lambda: posterior().sample((2,), ids(1, 1)), "nodes must be distinct"),
    (lambda: AveragedPosterior([]), "members must hold a posterior"),
    (lambda: AveragedPosterior([posterior(), large().prior(2)]), r"members must be of one graph"),
    (lambda: AveragedPosterior([posterior(), mixture().prior()]), "be given the same labels"),
    (lambda: average().predict(method="sequential"), "num_draws=0"),
    (lambda: average().log_likelihood(Y + 1, known(0)), "y holds label .* at node 0"),
    (lambda: average().log_likelihood(Y, num_particles=0), "num_particles"),
]  # fmt: skip


def average():
    return AveragedPosterior([posterior()] * 2)


FACTORS, LINKS = torch.arange(22.0).view(11, 2).double(), pair(0, 1, 1, 2, 1, 0, 2, 1)


def graph(held_out=None):
    return InnerProductGraph(FACTORS, 1.0, held_out)


def memberships(log_odds=FACTORS[:5], logits=LOGITS, **options):
    return MembershipMixture(HOOD, log_odds, logits, **options)


LINKED = [
    (lambda: graph(held_out=LINKS.T), r"held_out must have shape \(2, P\)"),
    (lambda: graph(held_out=LINKS + 9), "held_out holds node id .*, but ids lie in 0..10"),
    (lambda: graph().log_prob(LINKS[:, :3]), "both directions of every edge: use PyG's to_"),
    (lambda: graph().log_prob(pair(0, 3, 1, 2)), "both directions"),
    (lambda: graph().log_prob(LINKS + 0.5), "edge_index must hold integers"),
    (lambda: memberships(FACTORS[:3]), r"log_odds must have shape \(..., 5, K\).*got \(3, 2\)"),
    (lambda: memberships(FACTORS[:5].numpy()), "log_odds must be a floating-point .*ndarr"),
    (lambda: memberships(FACTORS[:5] + INF), "log_odds must be finite, got inf"),
    (lambda: memberships(logits=LOGITS[1:]), "logits must have shape"),
    (lambda: memberships(temperature=0.0), "temperature must be positive"),
    (lambda: memberships(estimator="score"), "estimator must be"),
    (lambda: MembershipMixture(EDGE, FACTORS, LOGITS), "hood must be a Neighborhood"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), GRAPHS + CONDITIONALS + MIXTURES + POSTERIORS + LINKED)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_draws_of_a_graph_one_by_one():
    with pytest.raises(NotImplementedError, match="one by one"):
        graph().sample((2,))


def test_without_validation(kernels):
    """Nothing is checked, a choice outside of its neighbourhood has probability zero, and no loop
    reads past the end of a table."""
    NeighborMixture(HOOD, -ALPHA, LOGITS, validate_args=False)
    assert ordered(validate_args=False).log_prob(STRANGER) == -INF
    law = ChosenLabels(ALPHA, ids(0, 2), validate_args=False)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        law.log_prob(ids(0, 10**6))
