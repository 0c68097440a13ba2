# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every fit has the same result in every gradient mode of its caller, and on a device."""

import copy
from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from cases import There
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from sklearn.naive_bayes import GaussianNB
from stacking import QuickClassifier
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import (
    AmortizedNMM,
    DGLFRMGuide,
    fit_links,
    fit_mixture,
    fit_nmm,
    mean_field,
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
    temperature_scaling,
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


def links(there, nmm=False):
    edges, x = there(ring(24), torch.randint(2, (24, 3)).double())
    held_out = there(torch.tensor([[0, 3], [9, 7]]))
    hood = Neighborhood(edges, 24) if nmm else None
    pair = there(DGLFRMGuide(DGLFRM(24, 3, 3, concentration=2.0), 3, hood))
    yield
    losses = fit_links(pair, edges, x, held_out, num_steps=3)
    yield [losses, pair.link_logits(held_out, edges, x), *numbers(pair)]


def temperature(there):
    given = there(torch.randn(12, 2), torch.arange(12) % 2, torch.arange(12))
    yield
    yield [temperature_scaling(*given)]


def stacked(there, **options):
    data, hood, scores = there(*graph(), torch.randn(12, 2))
    both, model = (hood, scores, data.y, data.train_mask, data.val_mask), StackedNMM(2, **options)
    yield
    fitted = [number.clone() for number in numbers(model.fit(*both, num_steps=2))]
    posterior = model.update(*both, num_steps=2).posterior(*both[:4])
    yield [*fitted, *numbers(model), posterior.marginals()]


def folds(there):
    data, hood, scores, folds = there(*graph(), torch.randn(2, 12, 2), torch.arange(12) % 2)
    model = StackedNMM(2)
    yield
    yield numbers(model.fit(hood, scores, data.y, folds=folds, num_steps=2))


def table(there):
    x, y = torch.randn(24, 2).numpy(), (torch.arange(24) % 2).numpy()
    model = QuickClassifier(GaussianNB(), random_state=0)
    yield
    yield [model.fit(x, y).predict_proba(x), model.label_distributions_]


FEW = {"num_steps": 2, "num_starts": 1, "num_draws": 2, "num_chains": 2}


def annotators(there):
    data, known, wrong = there(graph()[0], torch.tensor([0, -1, -1] * 4), torch.rand(12, 3) < 0.2)
    answers, labels = (data.y[:, None] + wrong) % 2, Annotators(2)
    yield
    consensus = labels.fit(data.edge_index, answers, known=known, **FEW)
    yield [consensus.probs, *consensus.powers.values(), *numbers(consensus.field.prior)]


def hidden(there):
    data, hood, attr = there(*graph(), torch.randn(36, 1))
    yield
    field = fit_field(NormalEmission(2), hood, data.x, attr, **FEW)
    yield [field.probs, leave_one_out(field, data.x), *numbers(field.prior)]


def independent(there):
    field, _ = square(there)
    yield
    yield [*mean_field(field, num_sweeps=9), field.marginals(), field.log_normalizer()]


FITS = {
    "fit_mixture": mixture,
    "fit_mixture, MarginalField": partial(mixture, part=True),
    "fit_nmm": amortized,
    "fit_links": links,
    "fit_links, NMM": partial(links, nmm=True),
    "temperature_scaling": temperature,
    "StackedNMM": stacked,
    "StackedNMM of scores": partial(stacked, pool=False),
    "StackedNMM of folds": folds,
    "NeighborMixtureClassifier": table,
    "Annotators": annotators,
    "fit_field": hidden,
    "mean_field": independent,
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
def test_a_fit_on_a_device(device, name, way):
    """The same, up to rounding, if the device draws the CPU's random numbers in the CPU's order."""
    values = result(name, place=device)
    assert all(value.isfinite().all() for value in values)
    if device != "cuda" and links not in (FITS[name], getattr(FITS[name], "func", None)):
        torch.testing.assert_close(values, result(name), rtol=1e-4, atol=1e-4)


def test_programs_made_in_inference_mode_are_trained_outside():
    def trained(making):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        data, _ = graph()
        inputs = data.x, data.edge_index
        with making():
            hood = Neighborhood(data.edge_index, 12)
            network = NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)
            pair = AmortizedNMM(hood, network)
        elbo = TraceGraph_ELBO(num_particles=2, vectorize_particles=True)
        svi = SVI(pair.model, pair.guide, Adam({"lr": 0.1}), elbo)
        losses = [svi.step(*inputs, y=data.y) for _ in range(3)]
        return [torch.tensor(losses), *network.parameters()]

    found, usual = trained(torch.inference_mode), trained(nullcontext)
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


def test_a_network_that_inference_mode_holds_is_refused():
    """Pyro's store has weak references to its parameters."""
    data, hood = graph()
    with torch.inference_mode():
        network = NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)
        AmortizedNMM(hood, network).mixture(data.x, data.edge_index)
    with pytest.raises(ValueError, match=r"of NMMNetwork was made in torch.inference_mode\(\)"):
        fit_nmm(network, data, hood, num_steps=1)
    fit_nmm(copy.deepcopy(network), data, hood, num_steps=1)


def test_an_error_leaves_the_mode_as_it_was():
    with torch.inference_mode():
        with pytest.raises(ValueError, match="held_out"):
            temperature_scaling(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([5]))
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
