# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What the loops that fit refuse: bad data, bad numbers, and losses that are not finite."""

import math
import re

import pyro
import pytest
import torch
from graphs import house
from runs import changed, denoise, gcn, pair, ring
from torch_geometric.datasets import KarateClub

from pyro_nmm import Neighborhood
from pyro_nmm.checkpoints import load_checkpoint
from pyro_nmm.datasets.links import link_split
from pyro_nmm.datasets.nodes import inner_edges, random_split, select_split
from pyro_nmm.guides import (
    Consistency,
    DGLFRMGuide,
    fit_classifier,
    fit_images,
    fit_links,
    fit_mixture,
    fit_nmm,
    mean_field,
)
from pyro_nmm.models import DGLFRM, Denoiser, FreeNMM, StackedNMM, UNet, grid_edges, ising, potts


def classify(data, **options):
    torch.manual_seed(0)
    return fit_classifier(gcn(4, 2), data, **{"num_epochs": 2} | options)


def mix(data, network=None, hood=None, **options):
    torch.manual_seed(0)
    hood = hood or Neighborhood(ring().edge_index, 12)
    return fit_nmm(network or pair(), data, hood, **{"num_epochs": 2} | options)


BOTH = pytest.mark.parametrize("run", [classify, mix])


def without(name):
    data = ring()
    del data[name]
    return data


def labelled(mask, label):
    """One node of a mask with another label."""
    data = ring()
    data.y[data[mask].nonzero()[1, 0]] = label
    return data


@BOTH
def test_masks_that_overlap(run):
    """Observed labels are known to the posterior: validation would score them at 1."""
    data = ring()
    data.val_mask = data.val_mask | (torch.arange(12) == 6)
    with pytest.raises(ValueError, match=r"train_mask and data\.val_mask both hold node 6.*known"):
        run(data)


@BOTH
@pytest.mark.parametrize("name", ["train_mask", "val_mask", "y", "edge_index"])
def test_data_that_are_missing(run, name):
    with pytest.raises(ValueError, match=rf"data has no {name}"):
        run(without(name))


@BOTH
@pytest.mark.parametrize("mask", ["train_mask", "val_mask"])
@pytest.mark.parametrize("label", [-1, -100, 2, 7])
def test_labels_out_of_range(run, mask, label):
    data = labelled(mask, label)
    node = data[mask].nonzero()[1].item()
    with pytest.raises(ValueError, match=rf"data\.y holds label {label} at node {node} of data\."):
        run(data)


@BOTH
def test_labels_outside_the_masks_may_be_anything(run):
    data, other = ring(), ring()
    other.y[~(other.train_mask | other.val_mask)] = -100
    assert run(data)[1] == run(other)[1]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bool])
def test_labels_that_are_no_integers(run, dtype):
    with pytest.raises(ValueError, match=r"data\.y must hold integer labels .* got torch\."):
        run(changed(y=ring().y.to(dtype)))
    with pytest.raises(ValueError, match=r"data\.y must have shape \(12,\).* got \(12, 1\)"):
        run(changed(y=ring().y[:, None]))


@BOTH
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_small_integers_are_labels(run, dtype):
    assert run(changed(y=ring().y.to(dtype)))[1] == run(ring())[1]


@BOTH
@pytest.mark.parametrize("name", ["x", "edge_index", "y", "train_mask"])
def test_arrays_and_meta_tensors(run, name):
    value = ring()[name]
    with pytest.raises(ValueError, match=rf"data\.{name} must be a tensor.*ndarray.*from_numpy"):
        run(changed(**{name: value.numpy()}))
    with pytest.raises(ValueError, match=rf"data\.{name} is on the meta device"):
        run(changed(**{name: value.to("meta")}))


@BOTH
def test_sparse_edges(run):
    data = ring()
    sparse = torch.eye(12).to_sparse_csr()
    for matrix in (sparse, sparse.to_sparse_coo()):
        with pytest.raises(ValueError, match=r"data\.edge_index must have shape \(2, num_edges\)"):
            run(changed(edge_index=matrix))
    data = without("edge_index")
    data.adj_t = sparse
    with pytest.raises(ValueError, match=r"data has no edge_index: to_edge_index .* of adj_t"):
        run(data)


def test_a_hood_of_another_graph():
    with pytest.raises(ValueError, match="hood has 5 nodes, but data 12"):
        mix(ring(), hood=house())


@BOTH
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_epochs", 0), ("num_epochs", -1), ("num_epochs", 2.5), ("patience", -1), ("lr", 0.0),
     ("lr", -0.1), ("lr", math.nan), ("lr", math.inf), ("weight_decay", -1.0),
     ("criterion", "loss")],
)  # fmt: skip
def test_numbers_of_classification(run, name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must .*{re.escape(str(wrong))}"):
        run(ring(), **{name: wrong})


@pytest.mark.parametrize("name", ["num_particles", "num_samples"])
def test_numbers_of_draws(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        mix(ring(), **{name: 0})


@pytest.mark.parametrize("kind", ["unet", "nmm"])
def test_denoiser_stops_at_a_loss_that_is_not_finite(tmp_path, kind):
    path, made = tmp_path / "run.pt", []

    def draw():
        made.append(None)
        if len(made) == 6:
            next(p for name, p in network.named_parameters() if "last" in name).data.fill_(math.nan)
        return torch.randint(256, (2, 1, 8, 8))

    torch.manual_seed(0)
    network = UNet(1, 6, 1) if kind == "unet" else Denoiser(UNet(1, 6, 1))
    with pytest.raises(ValueError, match=r"the loss is nan in step 5.* lr"):
        denoise(path, network=network, draw=draw, num_steps=12)
    assert len(load_checkpoint(path)["history"]) == 4


@pytest.mark.parametrize("num_steps", [4, 3])
def test_denoiser_saves_and_returns_no_nan(tmp_path, num_steps):
    """The gradient of the last step is NaN, its loss is not."""
    torch.manual_seed(0)
    network, calls = UNet(1, 6, 1), []

    def spoil(gradient):
        calls.append(None)
        return gradient * math.nan if len(calls) == num_steps else gradient

    network.last.bias.register_hook(spoil)
    path = tmp_path / "run.pt"
    with pytest.raises(ValueError, match=rf"last\.bias holds NaN after step {num_steps - 1}"):
        denoise(path, network=network, num_steps=num_steps)
    assert len(load_checkpoint(path)["history"]) == 2
    calls.clear()
    network.last.bias.data.zero_()
    network.last.weight.data.zero_()
    with pytest.raises(ValueError, match="holds NaN after step"):
        denoise(None, network=network, num_steps=num_steps)


@pytest.mark.parametrize("kind", ["unet", "nmm"])
def test_grey_levels_are_checked_in_every_step(kind):
    def draw(*values):
        patches = iter(values)
        return lambda: torch.full((1, 1, 8, 8), next(patches))

    with pytest.raises(ValueError, match="draw gave grey level -3 in step 1"):
        denoise(None, kind, draw=draw(5, -3))
    if kind == "nmm":
        with pytest.raises(ValueError, match=r"draw gave grey level 300 in step 2.* 0\.\.255"):
            denoise(None, kind, draw=draw(5, 255, 300))


@pytest.mark.parametrize("kind", ["unet", "nmm"])
def test_patches_of_bytes(kind):
    fixed = torch.randint(256, (2, 1, 8, 8))
    losses = [denoise(None, kind, draw=lambda d=d: fixed.to(d))[0]
              for d in (torch.long, torch.uint8, torch.int32)]  # fmt: skip
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    "wrong",
    [torch.rand(1, 1, 8, 8), torch.zeros(1, 1, 8, 8).bool(), torch.zeros(1, 8, 8).long(),
     torch.zeros(0, 1, 8, 8).long(), torch.zeros(1, 1, 8, 8).long().numpy(), None,
     torch.zeros(1, 1, 8, 8, device="meta").long()],
)  # fmt: skip
def test_patches_that_are_none(wrong):
    with pytest.raises(ValueError, match=r"draw must give integer grey levels of shape \(B"):
        denoise(None, draw=lambda: wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_steps", 0), ("num_steps", 1.5), ("save_every", 0), ("lr", 0.0), ("lr", math.nan),
     ("unet_rate", -1.0), ("max_noise", math.inf), ("last_rate", 2.0)],
)  # fmt: skip
def test_numbers_of_the_denoiser(name, wrong):
    network = Denoiser(UNet(1, 6, 1))
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        fit_images(network, lambda: torch.zeros(1, 1, 8, 8).long(), **{name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_steps", 0), ("num_samples", 0), ("num_samples", 1), ("lr", 0.0), ("lr", -1.0),
     ("lr", math.nan)],
)  # fmt: skip
def test_numbers_of_the_stacked(name, wrong):
    masks = torch.tensor([1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 0, 0]).bool()
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        StackedNMM(2).fit(house(), torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 0]), *masks,
                          **{name: wrong})  # fmt: skip


def field():
    return ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_steps", 0), ("num_samples", 0), ("lr", 0.0), ("lr", -1.0), ("warmup", 2)],
)
def test_numbers_of_a_mixture(name, wrong):
    hood = Neighborhood.grid(3, 3)
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        fit_mixture(field(), hood, FreeNMM(hood, 2), **{"num_steps": 3, name: wrong})


def test_a_mixture_over_other_nodes():
    hood = Neighborhood.grid(3, 4)
    for target in (field(), lambda step: field()):
        with pytest.raises(ValueError, match="hood has 12 nodes, but field 9"):
            fit_mixture(target, hood, FreeNMM(hood, 2), num_steps=3)
    with pytest.raises(
        ValueError, match=r"field must be a PairwiseMRF, a MarginalField or .*ndarray"
    ):
        fit_mixture(field().unary.numpy(), Neighborhood.grid(3, 3), None, num_steps=3)


def test_a_mixture_of_a_target_that_is_nan():
    hood, unary = Neighborhood.grid(3, 3), torch.zeros(9, 2)
    network = FreeNMM(hood, 2)

    def target(step):
        return potts(grid_edges(3, 3), 0.4, unary).scaled(math.nan if step == 2 else 1.0)

    with pytest.raises(ValueError, match="the loss is nan in step 2: lower lr"):
        fit_mixture(target, hood, network, order=torch.arange(9), num_steps=50)
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "wrong"), [("num_sweeps", 0), ("num_random", -1), ("tolerance", -1.0),
                        ("tolerance", math.nan)]
)  # fmt: skip
def test_numbers_of_the_mean_field(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        mean_field(field(), **{name: wrong})


def test_starts_of_the_mean_field():
    good = torch.full((1, 9, 2), 0.5)
    mean_field(field(), good, num_random=0)
    for wrong in (good[0].numpy(), good[0], good * math.nan, -good, good.long()):
        with pytest.raises(ValueError, match=r"starts must hold .* of shape \(S, 9, 2\)"):
            mean_field(field(), wrong)


def links(x=None, **options):
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float)
    data = KarateClub()[0]
    split = link_split(data.edge_index, 34, seed=0)
    guide = DGLFRMGuide(DGLFRM(34, 4, concentration=4.0), data.num_features)
    x = data.x if x is None else x(data.x)
    return fit_links(guide, split, x, **{"num_steps": 2} | options)


@pytest.mark.parametrize(("name", "wrong"), [("num_steps", 0), ("lr", 0.0), ("lr", -1.0)])
def test_numbers_of_links(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        links(**{name: wrong})


@pytest.mark.parametrize(
    "wrong", [lambda x: x[:30].numpy(), lambda x: x[:30], lambda x: x.to("meta"), lambda x: x[0]]
)
def test_features_of_links(wrong):
    with pytest.raises(ValueError, match=r"x must (have shape \(34, F\)|be a tensor)|x is on"):
        links(wrong)


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_links_that_diverge():
    pyro.enable_validation(False)
    with pytest.raises(ValueError, match="the loss is nan in step 0"):
        links(lambda x: x * math.nan)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_nodes", 0), ("num_classes", 1), ("weight", -1.0), ("weight", math.nan),
     ("temperature", 0.0), ("memory", 1.0), ("memory", math.nan), ("warmup", -1)],
)  # fmt: skip
def test_numbers_of_consistency(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        Consistency(**{"num_nodes": 3, "num_classes": 2} | {name: wrong})


def test_consistency_about_other_nodes():
    """One row would broadcast."""
    consistency = Consistency(3, 2, warmup=0)
    with pytest.raises(ValueError, match=r"probs must have shape \(3, 2\), got \(1, 2\)"):
        consistency(torch.full((1, 2), 0.5), torch.full((3, 2), 0.5))


def test_half_precision():
    """The backbones may be narrow; the NMM over them computes in single precision."""
    data = changed(x=ring().x.bfloat16())
    mixture, scores = mix(data, pair().bfloat16())
    assert mixture.alpha.dtype == torch.float
    assert all(math.isfinite(s) for score in scores for s in score)
    alpha, logits = (
        pair()
        .half()
        .eval()(Neighborhood(ring().edge_index, 12), ring().x.half(), ring().edge_index)
    )
    assert alpha.dtype == logits.dtype == torch.float


def test_splits_of_data_without_labels_or_masks():
    with pytest.raises(ValueError, match="data has no y"):
        random_split(without("y"), 0.2, 0.2, 0.2, seed=0)
    with pytest.raises(ValueError, match="data has no test_mask"):
        select_split(ring())
    with pytest.raises(ValueError, match="mask must be a boolean mask"):
        inner_edges(ring().edge_index, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="edge_index must"):
        inner_edges(torch.eye(12).to_sparse_csr(), ring().train_mask)


def test_fit_names_its_options():
    field, hood = ising(grid_edges(2, 2), 0.1, torch.zeros(4)), Neighborhood.grid(2, 2)
    with pytest.raises(
        TypeError, match=r"fit_mixture\(\) got an unexpected keyword argument 'steps'"
    ):
        fit_mixture(field, hood, FreeNMM(hood, 2), steps=3)
