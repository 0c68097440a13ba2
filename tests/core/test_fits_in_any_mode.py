# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every fit has the same result in every gradient mode of its caller, and on a device."""

import copy
import sys
import time
from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from cases import There
from sklearn.naive_bayes import GaussianNB
from stacking import QuickClassifier
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood, compiled
from pyro_nmm.fitting import Steps
from pyro_nmm.guides import (
    AmortizedNMM,
    DGLFRMGuide,
    fit_links,
    fit_mixture,
    fit_nmm,
)
from pyro_nmm.models import (
    DGLFRM,
    Annotators,
    FreeNMM,
    MarginalField,
    NMMNetwork,
    NormalEmission,
    StackedNMM,
    fit_field,
    grid_edges,
    ising,
    leave_one_out,
)


def ring(size=12):
    here = torch.arange(size)
    edges = torch.stack([here, (here + 1) % size])
    return torch.cat([edges, edges.flip(0)], 1)


def graph(size=12):
    """Two halves of a ring, with features, labels and masks, and its neighbourhoods."""
    y = (torch.arange(size) >= size // 2).long()
    x, masks = torch.randn(size, 3) + y[:, None], torch.arange(size) % 3
    data = Data(x, ring(size), y=y, train_mask=masks == 0, val_mask=masks == 1)
    return data, Neighborhood(data.edge_index, size)


def numbers(module):
    return [*module.parameters(), *module.buffers()]


def square(there):
    field = ising(*there(grid_edges(3, 3), torch.tensor(0.3), torch.randn(9))).scaled(0.9)
    return field, there(Neighborhood.grid(3, 3))


# Each makes arguments on a device up to its yield, and then yields what a fit to them gives.


def mixture(there, part=False):
    field, hood = square(there)
    if part:
        hood = there(Neighborhood(torch.tensor([[0, 1], [1, 2]]), 5))
        field = MarginalField(field, there(torch.arange(9) % 2 == 0))
    network = there(FreeNMM(hood, 2))
    yield
    target, order = (lambda _: field, torch.cat(field.colors())) if part else (field, None)
    mix, losses = fit_mixture(target, hood, network, order=order, num_steps=3)
    yield [mix.alpha, *losses, *numbers(network)]


def amortized(there):
    network = NMMNetwork(GCN(3, 4, 2, 2), GCN(3, 4, 2, 4), num_classes=2)
    data, hood, network = there(*graph(), network)
    yield
    mix, losses = fit_nmm(network, data, hood, num_steps=3)
    yield [mix.alpha, mix.logits, *losses, *numbers(network)]


def links(there):
    edges, x = there(ring(24), torch.randint(2, (24, 3)).double())
    held_out = there(torch.tensor([[0, 3], [9, 7]]))
    pair = there(DGLFRMGuide(DGLFRM(24, 3, 3, concentration=2.0), 3))
    yield
    losses = fit_links(pair, edges, x, held_out, num_steps=3)
    yield [losses, pair.link_logits(held_out, edges, x), *numbers(pair)]


def stacked(there):
    data, hood, scores = there(*graph(), torch.randn(12, 2))
    both, model = (hood, scores, data.y, data.train_mask, data.val_mask), StackedNMM(2)
    yield
    fitted = [number.clone() for number in numbers(model.fit(*both, num_steps=2))]
    posterior = model.update(*both, num_steps=2).posterior(*both[:4])
    yield [*fitted, *numbers(model), posterior.marginals()]


def table(there):
    x, y = torch.randn(24, 2).numpy(), (torch.arange(24) % 2).numpy()
    model = QuickClassifier(GaussianNB(), random_state=0)
    yield
    yield [model.fit(x, y).predict_proba(x), model.label_distributions_]


FEW = {"num_steps": 2, "num_starts": 1, "num_draws": 2, "num_chains": 2}


def annotators(there):
    data, wrong = there(graph()[0], torch.rand(12, 3) < 0.2)
    answers, labels = (data.y[:, None] + wrong) % 2, Annotators(2)
    yield
    consensus = labels.fit(data.edge_index, answers, **FEW)
    yield [consensus.probs, *consensus.powers.values(), *numbers(consensus.field.prior)]


def hidden(there):
    data, hood, attr = there(*graph(), torch.randn(36, 1))
    yield
    field = fit_field(NormalEmission(2), hood, data.x, attr, **FEW)
    yield [field.probs, leave_one_out(field, data.x), *numbers(field.prior)]


FITS = {
    "fit_mixture": mixture,
    "fit_mixture, MarginalField": partial(mixture, part=True),
    "fit_nmm": amortized,
    "fit_links": links,
    "StackedNMM": stacked,
    "NeighborMixtureClassifier": table,
    "Annotators": annotators,
    "fit_field": hidden,
}
#: Where arguments are made, and where the fit runs; each pair is compared with a fit without any.
MODES = [
    (nullcontext, torch.no_grad),
    (torch.inference_mode, torch.inference_mode),
    (torch.inference_mode, nullcontext),
]


def result(name, making=nullcontext, fitting=nullcontext, place="cpu"):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    fit = FITS[name](There(place))
    with making():
        next(fit)
    with fitting():
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        values = next(fit)
        assert mode == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert all(tensor.device.type == place for tensor in tensors)
    return [torch.as_tensor(value).detach().cpu().clone() for value in values]


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_the_same_in_every_mode(name):
    usual = result(name)
    assert all(value.isfinite().all() for value in usual)
    for making, fitting in MODES[1:2] if name == "NeighborMixtureClassifier" else MODES:
        torch.testing.assert_close(result(name, making, fitting), usual, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in FITS if name != "NeighborMixtureClassifier"])
def test_a_fit_on_a_device(device, name, monkeypatch):
    """The same, up to rounding, if the device draws the CPU's random numbers in the CPU's order."""
    monkeypatch.setattr(compiled, "DEVICES", set())
    values = result(name, place=device)
    assert all(value.isfinite().all() for value in values)
    if device != "cuda" and name != "fit_links":
        torch.testing.assert_close(values, result(name), rtol=1e-4, atol=1e-4)


def test_a_network_that_inference_mode_holds_is_refused():
    """Pyro's store has weak references to its parameters."""
    data, hood = graph()
    with torch.inference_mode():
        network = NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)
        AmortizedNMM(hood, network).mixture(data.x, data.edge_index)
    with pytest.raises(ValueError, match=r"of NMMNetwork was made in torch.inference_mode\(\)"):
        fit_nmm(network, data, hood, num_steps=1)
    fit_nmm(copy.deepcopy(network), data, hood, num_steps=1)


@pytest.mark.parametrize("terminal", [False, True])
def test_fits_show_a_bar(terminal, monkeypatch, capsys):
    """On a terminal, after two seconds, and not elsewhere."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    progress = Steps().progress
    for _ in progress(range(4)):
        time.sleep(0.75)
    assert ("3/4" in capsys.readouterr().err) == terminal
