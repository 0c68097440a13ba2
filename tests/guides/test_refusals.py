# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What networks, guides and fits refuse: bad data, bad numbers, and losses that are not finite."""

import math
from functools import partial

import pyro
import pytest
import torch
from graphs import house
from pyro import poutine
from runs import changed, pair, ring
from torch import nn
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import (
    AmortizedNMM,
    DGLFRMGuide,
    MarginalGuide,
    MixtureGuide,
    fit_links,
    fit_mixture,
    fit_nmm,
    mean_field,
)
from pyro_nmm.models import (
    DGLFRM,
    ConvolutionalNMM,
    FreeNMM,
    NMMNetwork,
    NormalEmission,
    StackedNMM,
    fit_field,
    grid_edges,
    ising,
    leave_one_out,
    potts,
)
from pyro_nmm.models.hidden import FieldPrior, hidden_field

HOOD, EDGES, X = house(), torch.tensor([[0, 1], [1, 0]]), torch.randn(5, 3).double()
DATA = torch.tensor([[0.0], [0.1], [2.0], [2.1], [1.9]]).double()
VALUES = {"mean": 2 * torch.eye(2)[:, 1:].double(), "variance": torch.ones(2, 1).double()}
EMISSION, TARGET = NormalEmission(2), DGLFRM(5, 4).double()


def mix(data=ring, network=pair, hood=None, **options):
    torch.manual_seed(0)
    hood = hood or Neighborhood(ring().edge_index, 12)
    return fit_nmm(network(), data(), hood, **{"num_steps": 2} | options)


def stacked(**options):
    masks = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 0, 0]).bool()
    y = torch.tensor([0, 1, 0, 1, 0])
    StackedNMM(2).fit(house(), torch.randn(5, 2), y, *masks, **options)


def field():
    return ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))


def mixture(target=None, height=3, **options):
    hood = Neighborhood.grid(3, height)
    target = field() if target is None else target()
    fit_mixture(target, hood, FreeNMM(hood, 2), **{"num_steps": 3} | options)


def links(x=lambda x: x, **options):
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float)
    data = KarateClub()[0]
    guide = DGLFRMGuide(DGLFRM(34, 4, concentration=4.0), data.num_features)
    fit_links(guide, data.edge_index, x(data.x), **{"num_steps": 2} | options)


def without(name, **more):
    data = changed(**more)
    del data[name]
    return data


def labelled(label):
    """Node 3, which is observed, with another label."""
    return changed(y=ring().y.index_fill(0, torch.tensor([3]), label))


INTEGER, POSITIVE = "must be an integer of at least", "must be positive and finite, got"
STARTS = r"starts must (have shape \(S, 9, 2\)|be probabilities|be a floating-point tensor.*), got"
EVEN = torch.full((1, 9, 2), 0.5)
#: Data, and the message.
BAD_DATA = [
    *((lambda name=name: without(name), rf"data must have {name}, got Data")
      for name in ("x", "edge_index", "y", "train_mask")),
    *((lambda label=label: labelled(label),
       rf"data\.y must hold labels 0\.\.1 where train_mask, got {label} at \[3\]")
      for label in (-1, 2)),
    (lambda: changed(y=ring().y.float()), r"data\.y must hold integer labels"),
    (lambda: changed(y=ring().y[:, None]), r"data\.y must have shape \(12,\).* got \(12, 1\)"),
    (lambda: changed(x=ring().x[:5]), r"x must have shape \(12, 4\), got \(5, 4\)"),
    (lambda: changed(train_mask=ring().train_mask & False), r"data\.train_mask selects no node"),
]  # fmt: skip
#: Fits, options of which one is wrong, and the message.
FITS = [
    *((mix, {"data": data}, message) for data, message in BAD_DATA),
    *((mix, {name: wrong}, rf"{name} {message}.*{wrong}") for name, wrong, message in (
        ("num_steps", 2.5, INTEGER), ("lr", math.nan, POSITIVE),
        ("weight_decay", -1.0, "must be finite and not negative"),
        ("estimator", "chains", "must be one of"))),
    *((run, {"lr": -1.0}, f"lr {POSITIVE} -1.0") for run in (mixture, links)),
    (stacked, {"num_steps": 0}, f"num_steps {INTEGER}"),
    (mix, {"hood": house()}, r"data\.train_mask must .* N = 5, got torch.bool of shape \(12,\)"),
    (mixture, {"height": 4}, "field must have the 12 nodes of hood"),
    (mixture, {"height": 4, "target": lambda: lambda _: field(), "order": torch.arange(12)},
     "must have the 12 nodes of hood"),
    (mixture, {"target": lambda: lambda _: field()}, "order must be given if field is a function"),
    (lambda **options: fit_mixture(lambda _: field(), **options),
     {"hood": Neighborhood.grid(3, 3)}, "network must be given if field is a function"),
    (mixture, {"target": lambda: field().unary.numpy()},
     r"field must be a PairwiseMRF, a MarginalField or .*ndarray"),
    (mixture, {"target": lambda: ising(grid_edges(3, 3), 0.3, torch.zeros(3, 9))},
     "field must have .* no batch dimensions"),
    (links, {"x": lambda x: x[:30]}, r"x must have shape \(34, F\)"),
    *((lambda **options: mean_field(field(), **options), {name: wrong}, f"{name} must .*{wrong}")
      for name, wrong in (("num_sweeps", 0), ("tolerance", math.nan))),
    *((lambda starts: mean_field(field(), starts), {"starts": wrong}, STARTS)
      for wrong in (EVEN[0].numpy(), EVEN[0], EVEN * math.nan, -EVEN, EVEN.long())),
]  # fmt: skip

OTHER, GRID = Neighborhood(EDGES, 8), ising(grid_edges(2, 3), 0.4, torch.zeros(6))
DISTANCE = torch.arange(HOOD.num_edges) / 10


def link_logits(*inputs):
    return DGLFRMGuide(TARGET, 3, HOOD).link_logits(*inputs)


#: Calls of networks and programs, and the message.
PROGRAMS = [
    *((partial(make, EDGES), "hood must be a Neighborhood, got") for make in (
        lambda hood: AmortizedNMM(hood, nn.Identity()),
        lambda hood: MarginalGuide(hood, nn.Identity(), print, print),
        lambda hood: MixtureGuide(hood, nn.Identity(), print),
        lambda hood: fit_mixture(GRID, hood, None),
    )),
    (lambda: link_logits(EDGES - 7, EDGES, X), "pairs holds node id -7, but ids lie in 0..4"),
    (lambda: FreeNMM(HOOD, 2)(OTHER),
     "hood must have the 5 sources and 17 edges of these parameters, got 8 and 10"),
    (lambda: FreeNMM(HOOD, 2, torch.full((5, 2), torch.nan)), "must be probabilities, got nan"),
    (lambda: ConvolutionalNMM(1)(OTHER, GRID), "hood must have the 6 nodes of field, got"),
    (lambda: ConvolutionalNMM(1)(OTHER, "field"), "field must be a PairwiseMRF"),
    (lambda: MixtureGuide(HOOD, FreeNMM(HOOD, 2), print, order=[4, 3, 2, 1, 1]),
     "order must be a permutation"),
    (lambda: hidden_field(OTHER, FieldPrior(2), EMISSION, VALUES, DATA),
     r"evidence of shape \(N, C\) = \(8, 2\), got \(5, 2\)"),
    (lambda: poutine.trace(hidden_field).get_trace(
        HOOD, FieldPrior(2), EMISSION, VALUES, DATA[:3]), "data and values must give evidence"),
    (lambda: fit_field(EMISSION, HOOD, DATA, "far"),
     "edge_attr must be a tensor, an array or a nested list"),
    (lambda: FieldPrior(2, DISTANCE), r"edge_attr must have shape \(num_edges, F\), got"),
    (lambda: FieldPrior(2, DISTANCE[:, None])(HOOD, DISTANCE),
     r"must have shape \(17, 1\), got \(17,\)"),
    (lambda: leave_one_out(FieldPrior(2), DATA), "field must be a HiddenField"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "options", "message"), [*FITS, *((run, {}, message) for run, message in PROGRAMS)]
)
def test_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("x", "edge_index", "match"),
    [
        (X[:0], EDGES, r"x must have shape \(5, 3\), got \(0, 3\)"),
        (X.numpy(), EDGES, "x must be a floating-point tensor .*ndarray"),
        (X, EDGES - 7, "edge_index holds node id -7, but ids lie in 0..4"),
        (X, EDGES + 0.5, "edge_index must hold integers"),
    ],
)
def test_inputs_of_networks(x, edge_index, match):
    network = NMMNetwork(GCN(3, 4, 1, 2), GCN(3, 4, 1), num_classes=2)
    program = AmortizedNMM(HOOD, network)
    for run in (program, program.model, partial(program.guide, y=None)):
        with pytest.raises(ValueError, match=match):
            run(x, edge_index)
    pair = DGLFRMGuide(TARGET, 3, HOOD)
    for run in (pair.guide, pair.model):
        with pytest.raises(ValueError, match=match):
            run(edge_index, x)


@pytest.mark.filterwarnings("ignore:.*parse")
def test_networks_of_others_take_what_they_like():
    class Embedded(GCN):
        def forward(self, ids, edge_index):
            return super().forward(X[ids], edge_index)

    network = NMMNetwork(Embedded(3, 4, 1, 2), Embedded(3, 4, 1), num_classes=2)
    alpha, _ = network(HOOD, [0, 1, 2, 3, 4], EDGES)
    assert alpha.shape == (5, 2)
    sparse = torch.sparse_coo_tensor(EDGES, torch.ones(2), (5, 5), check_invariants=True)
    network = NMMNetwork(GCN(-1, 4, 1, 2), GCN(-1, 4, 1), num_classes=2)
    assert network(HOOD, X, sparse)[0].shape == (5, 2)


def test_a_mixture_of_a_target_that_is_nan():
    hood, unary = Neighborhood.grid(3, 3), torch.zeros(9, 2)
    network = FreeNMM(hood, 2)

    def target(step):
        return potts(grid_edges(3, 3), 0.4, unary).scaled(math.nan if step == 2 else 1.0)

    with pytest.raises(ValueError, match="the loss is nan in step 2: lower lr"):
        fit_mixture(target, hood, network, order=torch.arange(9), num_steps=50)
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_links_that_diverge():
    pyro.enable_validation(False)
    with pytest.raises(ValueError, match="the loss is nan in step 0"):
        links(lambda x: x * math.nan)
