# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What fits refuse: bad data, bad numbers, and losses that are not finite."""

import math

import pyro
import pytest
import torch
from graphs import house
from runs import changed, pair, ring
from torch_geometric.datasets import KarateClub

from pyro_nmm import Neighborhood
from pyro_nmm.guides import (
    DGLFRMGuide,
    fit_links,
    fit_mixture,
    fit_nmm,
    mean_field,
)
from pyro_nmm.models import DGLFRM, FreeNMM, StackedNMM, grid_edges, ising, potts


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
STARTS = r"starts must (have shape \(S, 9, 2\)|be probabilities|be a floating-point tensor), got"
EVEN = torch.full((1, 9, 2), 0.5)
#: Data, and the message.
BAD_DATA = [
    *((lambda name=name: without(name), rf"data must have {name}, got Data")
      for name in ("x", "edge_index", "y", "train_mask")),
    *((lambda label=label: labelled(label),
       rf"data\.y must hold labels 0\.\.1 in train_mask, got {label} at \[3\]")
      for label in (-1, 2)),
    (lambda: changed(y=ring().y.float()), r"data\.y must hold integer labels"),
    (lambda: changed(y=ring().y[:, None]), r"data\.y must have shape \(12,\).* got \(12, 1\)"),
    (lambda: changed(x=ring().x[:5]), r"x must have shape \(12, 4\), got \(5, 4\)"),
    (lambda: changed(train_mask=ring().train_mask & False), r"data\.train_mask selects no node"),
]  # fmt: skip
#: Calls, options of which one is wrong, and the message.
REFUSED = [
    *((mix, {"data": data}, message) for data, message in BAD_DATA),
    *((mix, {name: wrong}, rf"{name} {message}.*{wrong}") for name, wrong, message in (
        ("num_steps", 2.5, INTEGER), ("lr", math.nan, POSITIVE),
        ("weight_decay", -1.0, "must be finite and not negative"),
        ("estimator", "chains", "must be one of"))),
    *((run, {"lr": -1.0}, f"lr {POSITIVE} -1.0") for run in (mixture, links)),
    (stacked, {"num_steps": 0}, f"num_steps {INTEGER}"),
    (mix, {"hood": house()}, r"must have shape \(5,\), one label per node, got \(12,\)"),
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


@pytest.mark.parametrize(("run", "options", "message"), REFUSED)
def test_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


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
