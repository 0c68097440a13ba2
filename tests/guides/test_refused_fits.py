# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What fits refuse: bad data, bad numbers, and losses that are not finite."""

import math

import pyro
import pytest
import torch
from graphs import house
from runs import changed, gcn, pair, ring
from torch_geometric.datasets import KarateClub

from pyro_nmm import Neighborhood
from pyro_nmm.datasets.links import link_split
from pyro_nmm.datasets.nodes import inner_edges, random_split, select_split
from pyro_nmm.guides import (
    Consistency,
    DGLFRMGuide,
    fit_classifier,
    fit_links,
    fit_mixture,
    fit_nmm,
    mean_field,
)
from pyro_nmm.models import DGLFRM, FreeNMM, StackedNMM, grid_edges, ising, potts


def classify(data=ring, **options):
    torch.manual_seed(0)
    return fit_classifier(gcn(4, 2), data(), **{"num_epochs": 2} | options)


def mix(data=ring, network=pair, hood=None, **options):
    torch.manual_seed(0)
    hood = hood or Neighborhood(ring().edge_index, 12)
    return fit_nmm(network(), data(), hood, **{"num_epochs": 2} | options)


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
    split = link_split(data.edge_index, 34, seed=0)
    guide = DGLFRMGuide(DGLFRM(34, 4, concentration=4.0), data.num_features)
    fit_links(guide, split, x(data.x), **{"num_steps": 2} | options)


def consistency(probs=None, **options):
    penalty = Consistency(**{"num_nodes": 3, "num_classes": 2} | options)
    if probs is not None:
        penalty(probs, torch.full((3, 2), 0.5))


def without(name, **more):
    data = changed(**more)
    del data[name]
    return data


def labelled(mask, label):
    """One node of a mask with another label."""
    data = ring()
    data.y[data[mask].nonzero()[1, 0]] = label
    return data


INTEGER, POSITIVE = "must be an integer of at least", "must be positive and finite, got"
STARTS = r"starts must (have shape \(S, 9, 2\)|be probabilities|be a floating-point tensor), got"
EVEN, SPARSE = torch.full((1, 9, 2), 0.5), torch.eye(12).to_sparse_csr()
#: Data, and the message.
BAD_DATA = [
    # Observed labels are known to the posterior: validation would score them at 1.
    (lambda: changed(val_mask=ring().val_mask | (torch.arange(12) == 6)),
     r"train_mask and data\.val_mask both hold node 6.*known"),
    *((lambda name=name: without(name), rf"data has no {name}")
      for name in ("train_mask", "val_mask", "y", "edge_index")),
    *((lambda mask=mask, label=label: labelled(mask, label),
       rf"data\.y holds label {label} at node {ring()[mask].nonzero()[1].item()} of data\.")
      for mask in ("train_mask", "val_mask") for label in (-1, -100, 2, 7)),
    *((lambda dtype=dtype: changed(y=ring().y.to(dtype)),
       r"data\.y must hold integer labels .* got torch\.")
      for dtype in (torch.float, torch.double, torch.bool)),
    (lambda: changed(y=ring().y[:, None]), r"data\.y must have shape \(12,\).* got \(12, 1\)"),
    *((lambda name=name: changed(**{name: ring()[name].numpy()}),
       rf"data\.{name} must be a tensor.*ndarray.*from_numpy")
      for name in ("x", "edge_index", "y", "train_mask")),
    *((lambda name=name: changed(**{name: ring()[name].to("meta")}),
       rf"data\.{name} is on the meta device") for name in ("x", "edge_index", "y", "train_mask")),
    *((lambda matrix=matrix: changed(edge_index=matrix),
       r"data\.edge_index must hold pairs of node ids, got a sparse")
      for matrix in (SPARSE, SPARSE.to_sparse_coo())),
    (lambda: without("edge_index", adj_t=SPARSE),
     r"data has no edge_index: to_edge_index .* of adj_t"),
]  # fmt: skip
#: Calls, options of which one is wrong, and the message.
REFUSED = [
    *((run, {"data": data}, message) for run in (classify, mix) for data, message in BAD_DATA),
    *((run, {name: wrong}, rf"{name} {message}.*{wrong}")
      for run in (classify, mix) for name, wrong, message in (
          ("num_epochs", 0, INTEGER), ("num_epochs", 2.5, INTEGER), ("patience", -1, INTEGER),
          ("lr", 0.0, POSITIVE), ("lr", math.nan, POSITIVE), ("lr", math.inf, POSITIVE),
          ("weight_decay", -1.0, "must not be negative"), ("criterion", "loss", "must be 'acc"))),
    *((run, {name: 0}, f"{name} {INTEGER}") for run, name in (
        (mix, "num_particles"), (mix, "num_samples"), (stacked, "num_steps"),
        (stacked, "num_samples"), (mixture, "num_steps"), (mixture, "num_samples"),
        (links, "num_steps"), (links, "save_every"),
        (consistency, "num_nodes"), (consistency, "num_classes"))),
    *((run, {"lr": wrong}, f"lr {POSITIVE} {wrong}")
      for run in (stacked, mixture, links) for wrong in (0.0, -1.0, math.nan)),
    (stacked, {"num_samples": 1}, f"num_samples {INTEGER} 2, got 1"),
    (mix, {"hood": house()}, "hood has 5 nodes, but data 12"),
    (mixture, {"warmup": 2}, r"warmup must be in \[0, 1\], got 2"),
    (mixture, {"height": 4}, "field must have the 12 nodes of hood"),
    (mixture, {"height": 4, "target": lambda: lambda _: field()}, "must have the 12 nodes of hood"),
    (mixture, {"target": lambda: field().unary.numpy()},
     r"field must be a PairwiseMRF, a MarginalField or .*ndarray"),
    (mixture, {"target": lambda: ising(grid_edges(3, 3), 0.3, torch.zeros(3, 9))},
     "field must have .* no batch dimensions"),
    *((links, {"x": wrong}, r"x must (have shape \(34, F\)|be a tensor)|x is on") for wrong in (
        lambda x: x[:30].numpy(), lambda x: x[:30], lambda x: x.to("meta"), lambda x: x[0])),
    *((consistency, {name: wrong}, f"{name} must .*{wrong}") for name, wrong in (
        ("weight", -1.0), ("weight", math.nan), ("temperature", 0.0), ("memory", 1.0),
        ("memory", math.nan), ("warmup", -1))),
    # One row would broadcast.
    (consistency, {"probs": torch.ones(1, 2)}, r"probs must have shape \(3, 2\), got \(1, 2\)"),
    *((lambda **options: mean_field(field(), **options), {name: wrong}, f"{name} must .*{wrong}")
      for name, wrong in (("num_sweeps", 0), ("num_random", -1), ("tolerance", -1.0),
                          ("tolerance", math.nan))),
    *((lambda starts: mean_field(field(), starts), {"starts": wrong}, STARTS)
      for wrong in (EVEN[0].numpy(), EVEN[0], EVEN * math.nan, -EVEN, EVEN.long())),
    (lambda **options: random_split(without("y"), 0.2, 0.2, 0.2, **options), {"seed": 0}, "no y"),
    (select_split, {"data": ring()}, "data has no test_mask"),
    (inner_edges, {"edge_index": ring().edge_index, "mask": torch.tensor([0, 1])},
     "mask must be a boolean mask"),
    (inner_edges, {"edge_index": SPARSE, "mask": ring().train_mask}, "edge_index must"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "options", "message"), REFUSED)
def test_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_options_are_named():
    with pytest.raises(TypeError, match=r"fit_mixture\(\) got an unexpected keyword .*'steps'"):
        mixture(steps=3)


@pytest.mark.parametrize("run", [classify, mix])
def test_labels_that_are_taken(run):
    """Of any integer type, and outside the masks of any value."""
    other = ring()
    other.y[~(other.train_mask | other.val_mask)] = -100
    usual = run()[1]
    assert run(lambda: other)[1] == usual
    for dtype in (torch.uint8, torch.int8, torch.int32):
        assert run(lambda dtype=dtype: changed(y=ring().y.to(dtype)))[1] == usual


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


def test_half_precision():
    """The backbones may be narrow; the NMM over them computes in single precision."""
    found, scores = mix(lambda: changed(x=ring().x.bfloat16()), network=lambda: pair().bfloat16())
    assert found.alpha.dtype == torch.float
    assert all(math.isfinite(s) for score in scores for s in score)
    alpha, logits = (
        pair()
        .half()
        .eval()(Neighborhood(ring().edge_index, 12), ring().x.half(), ring().edge_index)
    )
    assert alpha.dtype == logits.dtype == torch.float
