# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every error names the argument, what it got and what would be right."""

import pytest
import torch
from graphs import house, parameters, to_hood
from pyro import poutine
from torch_geometric.data import Data

from pyro_nmm import (
    ChosenLabels,
    InnerProductGraph,
    MembershipMixture,
    NeighborChoice,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
    sources,
)
from pyro_nmm.concentrations import GaussianConcentrations, LogisticConcentrations
from pyro_nmm.datasets import (
    inner_edges,
    letters,
    link_split,
    random_patches,
    random_split,
    seed_batch,
    select_split,
)
from pyro_nmm.guides import ordered_guide
from pyro_nmm.metrics import brier, independent_pairs, mean_log_prob, pair_log_likelihood
from pyro_nmm.models import (
    Compatibility,
    FreeNMM,
    PairwiseMRF,
    PooledScores,
    StackedNMM,
    compatibility,
    grid_edges,
    ising,
    nmm,
    temperature_scaling,
)
from pyro_nmm.ops.intervals import Intervals

GOOD = torch.tensor([[0, 1], [1, 0]])


def error(match):
    return pytest.raises(ValueError, match=match)


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "match"),
    [
        (
            torch.zeros(3, 2, dtype=torch.long),
            4,
            r"edge_index must .* \(2, num_edges\), got \(3, 2\)",
        ),
        (torch.zeros(2, dtype=torch.long), 4, r"edge_index must .* got \(2,\)"),
        ([[0], [1, 2]], 4, "edge_index must be a tensor, an array or a nested list"),
        ("edges", 4, "edge_index must be a tensor, an array or a nested list"),
        ([[0.0], [1.0]], 4, "edge_index must hold integers"),
        (4, GOOD, "num_nodes must be a positive integer"),
        (GOOD.double(), 4, "edge_index must hold integers .* got torch.float64"),
        (GOOD, 1, r"edge_index holds node id 1, but ids lie in 0..0: .*raise num_nodes"),
        (GOOD - 1, 4, "edge_index holds node id -1"),
        (GOOD, 0, "num_nodes must be a positive integer, got 0"),
        (GOOD, torch.tensor(3), "num_nodes must be a positive integer"),
    ],
)
def test_edge_index(edge_index, num_nodes, match):
    with error(match):
        Neighborhood(edge_index, num_nodes)


def test_grid():
    with error("height must be an integer of at least 1, got 0"):
        Neighborhood.grid(0, 3)


class Case:
    """Good arguments of everything that takes (hood, alpha, logits, y, observed)."""

    def __init__(self):
        self.hood = house()
        self.alpha, self.logits = parameters(self.hood, 3)
        self.y = torch.tensor([0, 1, 2, 0, 1])
        self.observed = torch.tensor([True, True, False, True, False])

    def targets(self):
        args = (self.hood, self.alpha, self.logits)
        yield lambda: OrderedConditional(*args, self.y, self.observed)
        yield lambda: NeighborMixture(*args).elbo(self.y, self.observed)
        yield lambda: NeighborMixture(*args).condition(self.y, self.observed)
        yield lambda: NeighborMixture(*args).condition(self.y, self.observed, 4)
        model = poutine.trace(nmm)  # Pyro warns of an observation outside of inference
        yield lambda: model(*args, self.y, self.observed)
        yield lambda: model(*args, self.y, self.observed, collapsed=True)
        yield lambda: ordered_guide(*args, self.y, self.observed)

    def all_raise(self, match):
        for target in self.targets():
            with error(match):
                target()


def test_good_arguments_pass():
    for target in Case().targets():
        target()


def test_alpha():
    case = Case()
    good = case.alpha.clone()
    case.alpha = good[:4]
    case.all_raise(r"alpha must have shape \(..., 5, C\).* got \(4, 3\)")
    case.alpha = good[:, :1]
    case.all_raise(r"alpha must .*C >= 2 labels, got \(5, 1\)")
    case.alpha = torch.ones(5, 3, dtype=torch.long)
    case.all_raise("alpha must be a floating-point tensor, got torch.int64")
    case.alpha = [1.0]
    case.all_raise("alpha must be a floating-point tensor")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_values(bad):
    hood = house()
    alpha, logits = parameters(hood, 3)
    alpha[2, 1] = bad
    match = r"alpha must be (positive|finite).*(got -?\d|got nan|got inf).*\[2, 1\]"
    y = torch.zeros(5, dtype=torch.long)
    for target in (
        lambda: OrderedConditional(hood, alpha, logits, y),
        lambda: NeighborMixture(hood, alpha, logits),
        lambda: nmm(hood, alpha, logits, y),
        lambda: nmm(hood, alpha, logits, y, collapsed=True),
        lambda: ordered_guide(hood, alpha, logits, y),
    ):
        with error(match):
            target()
    NeighborMixture(hood, alpha, logits, validate_args=False)


def test_logits():
    case = Case()
    good = case.logits
    case.logits = good[:-1]
    edges = case.hood.num_edges
    case.all_raise(
        rf"logits must have shape \(..., {edges}\).*self-loops included.*got \({edges - 1},\)"
    )
    case.logits = good.long()
    case.all_raise("logits must be a floating-point tensor")
    case.logits = good.clone()
    case.logits[3] = float("nan")
    with error(r"logits must not be NaN .* \[3\]"):
        NeighborChoice(case.hood, case.logits)


def test_dtypes_that_differ_and_rows_without_attention():
    case = Case()
    case.alpha = case.alpha.float()
    case.all_raise("alpha and logits must have the same dtype, got torch.float32 and torch.float64")
    case = Case()
    case.logits[case.hood.target == 3] = -torch.inf
    for target in case.targets():
        with error("logits of node 3 are all -inf"):
            target()
    case.logits[case.hood.ptr[3]] = 0.0
    for target in case.targets():
        target()


def test_restricted_neighborhoods():
    case = Case()
    case.hood, case.observed = case.hood.restrict(case.observed), None
    case.logits = case.logits[case.hood.edge]
    case.all_raise("hood must hold all 5 nodes, got 3 rows: .*observed")


def test_chosen_labels(kernels):
    alpha = torch.ones(3, 2)
    for bad in (torch.tensor([0, 10**9]), torch.tensor([-1, 0])):
        with error(r"choices holds node id .*, but ids lie in 0..2"):
            ChosenLabels(alpha, bad)
    with error("choices must hold node ids .*got torch.float64"):
        ChosenLabels(alpha, torch.ones(2))
    with error("alpha must be a floating-point tensor"):
        ChosenLabels([[1.0]], torch.zeros(2, dtype=torch.long))
    law = ChosenLabels(alpha, torch.tensor([0, 2]), validate_args=False)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        law.log_prob(torch.tensor([0, 10**6]))


def test_labels():
    case = Case()
    case.y = torch.tensor([0, 1, 7, 0, -1])  # wrong only where nobody looks
    for target in case.targets():
        target()
    case.y = torch.tensor([0, 3, 2, 0, 1])
    case.all_raise(r"y holds label 3 at node 1, but alpha has labels 0..2: mask that node out")
    case.y = torch.tensor([0, 1, 2, -1, 1])
    case.all_raise("y holds label -1 at node 3")
    case.y = torch.zeros(4, dtype=torch.long)
    case.all_raise(r"y must have shape \(..., 5\), one label per node, got \(4,\)")
    case.y = torch.zeros(5)
    case.all_raise("y must hold integer labels .* got torch.float64")


def test_observed():
    case = Case()
    case.observed = torch.tensor([0, 1, 3])
    case.all_raise("observed must be a boolean mask .* got torch.int64; .*index_to_mask")
    case.observed = torch.zeros(5, dtype=torch.bool)
    case.all_raise("observed selects no node")
    case.observed = torch.ones(4, dtype=torch.bool)
    case.all_raise(r"observed must have shape \(5,\), one entry per node, got \(4,\)")
    case.observed = [True] * 5
    case.all_raise("observed must be a boolean mask")


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 4], [0, 0, 1], [0, 1, 3, 2]])
def test_order(order):
    case = Case()
    args = (case.hood, case.alpha, case.logits, case.y, case.observed)
    with error("order must be a permutation of the 3 observed node ids"):
        OrderedConditional(*args, torch.tensor(order))
    with error("order must be a permutation"):
        OrderedConditional(*args, [0, 1, 3])


def test_estimator():
    case = Case()
    with error("estimator must be one of .*'reward_to_go'.*got 'latter'"):
        OrderedConditional(case.hood, case.alpha, case.logits, case.y, estimator="latter")


def test_devices_that_differ():
    hood = house()
    alpha, logits = (p.to("meta") for p in parameters(hood, 3))
    with error(r"alpha is on meta but hood on cpu: move one with .to\(device\)"):
        NeighborMixture(hood, alpha, logits)
    good = parameters(hood, 3)
    with error("logits is on meta"):
        NeighborMixture(hood, good[0], logits)
    with error("y is on meta"):
        OrderedConditional(hood, *good, torch.zeros(5, dtype=torch.long, device="meta"))
    with error("observed is on meta"):
        hood.restrict(torch.ones(5, dtype=torch.bool, device="meta"))


def test_choice_outside_its_neighborhood():
    case = Case()
    stranger = torch.tensor([4, 0, 0])
    q = OrderedConditional(case.hood, case.alpha, case.logits, case.y, case.observed)
    with error("support"):
        q.log_prob(stranger)
    with error("support"):
        q.score_parts(stranger)
    q = OrderedConditional(
        case.hood, case.alpha, case.logits, case.y, case.observed, validate_args=False
    )
    assert q.log_prob(stranger) == -torch.inf


def test_enumeration_past_its_size():
    import networkx as nx

    hood = to_hood(nx.cycle_graph(40))
    mix = NeighborMixture(hood, *parameters(hood, 2))
    y = mix.sample()
    with error(
        r"enumeration over 40 nodes would need about 10\^19 choices.*use log_likelihood or elbo"
    ):
        mix.log_prob(y)
    with error("num_samples"):
        mix.condition(y)
    with error("use log_likelihood or elbo"):
        mix.log_marginal(torch.arange(20), y[:20])
    some = torch.arange(40) < 2
    post = mix.condition(y, some)
    with error(r"method='joint' would compare 2\^38 labellings .*sequential"):
        post.predict(method="joint")


def test_queries():
    hood = house()
    mix = NeighborMixture(hood, *parameters(hood, 3))
    with error(r"nodes must hold node ids .*\(K,\)"):
        mix.log_marginal(torch.tensor([[0]]), torch.tensor([0]))
    with error("nodes holds node id 5, but ids lie in 0..4"):
        mix.log_marginal(torch.tensor([5]), torch.tensor([0]))
    with error("nodes must be distinct"):
        mix.log_marginal(torch.tensor([1, 1]), torch.tensor([0, 0]))
    with error("y holds label 3 at node 2"):
        mix.log_marginal(torch.tensor([1, 2]), torch.tensor([0, 3]))
    with error(r"pairs must hold node ids .*\(2, P\)"):
        mix.pairwise(torch.tensor([0, 1]))
    with error("pairs holds node id -1"):
        mix.pairwise(torch.tensor([[0], [-1]]))
    with error("support"):
        mix.log_prob(torch.tensor([0, 0, 0, 0, 3]))
    with error("method must be 'marginal', 'joint' or 'sequential', got 'mode'"):
        mix.condition(torch.zeros(5, dtype=torch.long)).predict(method="mode")
    y = torch.zeros(5, dtype=torch.long)
    with error("num_samples must be .*at least 1, got 0"):
        mix.condition(y, None, 0)
    with error(r"condition needs one labelling y of shape \(N,\), got \(2, 5\)"):
        mix.condition(y.expand(2, 5), None, 4)
    some = torch.arange(5) < 2
    for bad in (-1, 3):
        with error(f"y holds label {bad} at node 4"):
            mix.condition(y, some).log_marginal(torch.tensor([4]), torch.tensor([bad]))
    with error("cannot expand batch_shape"):
        NeighborMixture(hood, *parameters(hood, 3, batch=(3,))).expand((1,))
    with error("condition needs a mixture without batch"):
        NeighborMixture(hood, *parameters(hood, 3, batch=(2,))).condition(
            torch.zeros(5, dtype=torch.long)
        )
    with error("hood must hold all 5 nodes, got 1 rows"):
        rows = hood.restrict(torch.tensor([True, False, False, False, False]))
        NeighborMixture(rows, torch.ones(5, 2), torch.zeros(rows.num_edges))


def test_arrays_and_sizes():
    hood, (alpha, logits) = house(), parameters(house(), 2)
    mix = NeighborMixture(hood, alpha, logits)
    with error(r"num_samples must be .*at least 1, got 0"):
        mix.elbo(torch.zeros(5, dtype=torch.long), num_samples=0)
    with error(r"logits must be a floating-point tensor, got .*NoneType"):
        NeighborMixture(hood, alpha, None)
    with error(r"alpha must be a floating-point tensor, got .*ndarray"):
        NeighborMixture(hood, alpha.numpy(), logits)
    numbers = alpha.numpy()
    with error(r"factors must be a floating-point tensor, got .*ndarray"):
        InnerProductGraph(numbers)
    with error(r"log_odds must be a floating-point tensor, got .*ndarr"):
        MembershipMixture(hood, numbers, logits)
    field = ising(grid_edges(1, 5), 0.3, torch.zeros(5))
    for name in ("edges", "unary", "strength", "interaction"):
        given = {n: getattr(field, n) for n in ("edges", "unary", "strength", "interaction")}
        with error(rf"{name} must be a tensor, got .*ndarray"):
            PairwiseMRF(**given | {name: numbers})
    for sizes in ((3.0, 3), (3, 3.5), (3, 3, 1.0)):
        with error("must be an integer of at least"):
            Neighborhood.grid(*sizes)
    adjacency = torch.eye(2).to_sparse()
    for sparse in (adjacency, torch.eye(2).to_sparse_coo().coalesce()):
        with error(r"edge_index .* sparse matrix: .* to_edge_index"):
            Neighborhood(sparse, 2)
    with error("edge_index is on the meta device"):
        Neighborhood(torch.zeros(2, 3, dtype=torch.long, device="meta"), 4)
    with error("num_samples must be an integer of at least 2, got 1"):
        mix.entropy_bound(estimator="reward_to_go")


PROBS, Y, PAIRS = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]), GOOD[:, :1]
EDGES, TWO = torch.tensor([range(20), range(1, 21)]), torch.tensor([True, True])
NAN, IMAGE = float("nan"), torch.zeros(3, 8, 8)
HOOD = Neighborhood(GOOD, 2)
SPLIT = Data(num_nodes=4, y=torch.zeros(4), **{f"{n}_mask": torch.eye(4) > 0
             for n in ("train", "val", "test")})  # fmt: skip
ENDS = Intervals(*torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 3.0]]))
PEAK = LogisticConcentrations(torch.tensor([3.0, 9.0]), 5.0).peak


@pytest.mark.parametrize(
    ("call", "match"),
    [
        *((lambda f=f: f(PROBS * NAN, Y), "probs must hold probabilities, got nan at")
          for f in (brier, mean_log_prob)),
        (lambda: brier(PROBS.log(), Y), "probs must hold probabilities, got -0.69"),
        (lambda: brier(PROBS, Y - 7), r"y must hold labels 0\.\.1, got -7 at \[0\]"),
        (lambda: brier(PROBS, Y + 0.5), "y must hold integer labels"),
        (lambda: mean_log_prob(PROBS[:1], Y), r"y must have shape \(1,\), one label per row"),
        (lambda: mean_log_prob(PROBS[None], Y), r"probs must have shape \(n, C\)"),
        (lambda: independent_pairs(PROBS, PAIRS + 9), "pairs holds node id 10, but ids lie in 0"),
        (lambda: independent_pairs(PROBS, PAIRS[:1]), r"pairs must have shape \(2, P\)"),
        (lambda: independent_pairs(PROBS / 0, PAIRS), "probs must hold probabilities, got inf"),
        (lambda: pair_log_likelihood(PROBS, Y, PAIRS), r"table must have shape \(P, C, C\)"),
        (lambda: pair_log_likelihood(PROBS.expand(3, 2, 2), Y, PAIRS), "table .*one table per"),
        (lambda: pair_log_likelihood(PROBS[None], Y + 5, PAIRS), r"y\[pairs\] must hold labels"),
        (lambda: PEAK(Y - 1, PROBS[0], 5.0), r"labels must lie in 0\.\.255, got -1"),
        (lambda: PEAK(Y + 0.5, PROBS[0], 5.0), "labels must hold integer labels"),
        (lambda: PEAK(Y, PROBS[0] * NAN, 5.0), "mean must be finite, got nan"),
        (lambda: PEAK(Y, PROBS[0], 0.0), "width must be positive and finite, got 0"),
        (lambda: PEAK(Y, PROBS[0].repeat(2), 5.0), "labels, mean and width must broadcast"),
        (lambda: GaussianConcentrations(PROBS[0], 1.0, num_classes="9"), "num_classes must be"),
        (lambda: ENDS.coverage(Y[:1]), r"y must have shape \(..., 2\), one label per node"),
        (lambda: ENDS.coverage(Y - 1), "y must hold labels, which are not negative, got -1"),
        (lambda: ENDS.coverage(Y + 0.5), "y must hold integers"),
        (lambda: random_split(SPLIT, NAN, 0.3, 0.3, 0), "train, val and test must .* got nan"),
        (lambda: random_split(SPLIT, 0.3, "3", 0.3, 0), "train, val and test must .* 3, 0.3 of"),
        (lambda: random_split(SPLIT, 0.3, 0.3, 0.3, "a"), "seed must be an integer, got 'a'"),
        (lambda: select_split(SPLIT, "1"), r"split must be in 0\.\.3, got '1'"),
        (lambda: link_split(EDGES, NAN, 0), "num_nodes must be a positive integer, got nan"),
        (lambda: link_split(EDGES + 9, 21, 0), "edge_index holds node id 28"),
        (lambda: link_split(EDGES, 21, 0.5), "seed must be an integer, got 0.5"),
        (lambda: link_split(EDGES, 21, 0, val=NAN), "val must be a finite number, got nan"),
        (lambda: inner_edges(GOOD + 7, TWO), "edge_index holds node id 8, but ids lie in 0..1"),
        (lambda: inner_edges(GOOD + 0.5, TWO), "edge_index must hold integers"),
        (lambda: letters("A", 4.5, 4), "height must be an integer of at least 1, got 4.5"),
        (lambda: letters(" ", 4, 4), "text must hold letters"),
        (lambda: letters("A", 4, 4, margin=0.5), "margin be less than 0.5, got 'A' and 0.5"),
        (lambda: random_patches([IMAGE], 2.0, 4), "number and size must be positive .* got 2.0"),
        (lambda: random_patches([IMAGE[0]], 1, 4), r"images must have shape \(channels, H, W\)"),
        (lambda: sources.points(PROBS, "1", 1.0), "radius must be a finite number, got '1'"),
        (lambda: temperature_scaling(PROBS * NAN, Y, TWO), "scores must be finite, got nan"),
        (lambda: temperature_scaling(PROBS, Y + 1, TWO), r"y must hold labels 0\.\.1 where held_o"),
        (lambda: temperature_scaling(PROBS, Y[:1], TWO), "y must have .* per row of scores"),
        (lambda: compatibility(HOOD, Y + 1, TWO, 2), r"y must hold labels 0\.\.1 where observed"),
        (lambda: compatibility(HOOD, Y[:1], TWO, 2), r"y must have shape \(2,\), one label per"),
        (lambda: compatibility(HOOD, Y, TWO, 2.5), "num_classes must be an integer of at least 2"),
        (lambda: Compatibility(FreeNMM(HOOD, 2), "2"), "num_classes must be an integer"),
        (lambda: PooledScores(2)(PROBS.expand(3, 2, 2)), r"terms must have shape \(4, N, 2\)"),
        (lambda: PooledScores(2)(PROBS.tolist()), "terms must be a floating-point tensor"),
        (lambda: StackedNMM(2)(HOOD, PROBS, Y, TWO[:0]), r"known must be a boolean mask .* \(0,\)"),
    ],
)  # fmt: skip
def test_values_at_the_door(call, match):
    with error(match):
        call()


def test_arrays_and_lists_at_the_door():
    """They give what tensors give."""
    torch.set_default_dtype(torch.float)
    edges, members, data = GOOD.tolist(), [0, 0], Data(x=PROBS, edge_index=GOOD, y=Y)
    same = torch.testing.assert_close
    for form in (torch.Tensor.numpy, torch.Tensor.tolist):
        probs, y, pairs, two = map(form, (PROBS, Y, PAIRS, TWO))
        same(brier(probs, y), brier(PROBS, Y))
        same(mean_log_prob(probs, y), mean_log_prob(PROBS, Y))
        same(temperature_scaling(probs, y, two), temperature_scaling(PROBS, Y, TWO))
        table = independent_pairs(PROBS, PAIRS)
        same(independent_pairs(probs, pairs), table)
        same(pair_log_likelihood(form(table), y, pairs), pair_log_likelihood(table, Y, PAIRS))
        same(ENDS.coverage(y), ENDS.coverage(Y))
        same(PEAK(y, form(PROBS[0]), 5.0), PEAK(Y, PROBS[0], torch.tensor(5.0)))
        same(inner_edges(form(GOOD), two), inner_edges(GOOD, TWO))
        same(link_split(form(EDGES), 21, seed=0), link_split(EDGES, 21, seed=0))
        same(seed_batch(data, y, 1).n_id, seed_batch(data, Y, 1).n_id)
        same(compatibility(HOOD, y, two, 2), compatibility(HOOD, Y, TWO, 2))
        terms = PooledScores(2).terms
        same(terms(HOOD, probs, y, two), terms(HOOD, PROBS, Y, TWO))
        same(StackedNMM(2)(HOOD, probs, y, two), StackedNMM(2)(HOOD, PROBS, Y, TWO))
        same(sources.points(probs, 1.0, 1.0)[1], sources.points(PROBS, 1.0, 1.0)[1])
    same(sources.communities(edges, 2, members).source, torch.tensor([0, 1, 2, 0, 1, 2]))
    same(sources.walks(edges, 2, members)[1], torch.zeros(2))
    same(sources.hops(edges, 2)[1].sort().values, torch.tensor([0, 1]))
