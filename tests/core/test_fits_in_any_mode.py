# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every fit has the same result, bit for bit, whatever the gradient mode of its caller."""

import copy
from contextlib import contextmanager, nullcontext

import pyro
import pytest
import torch
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from sklearn.naive_bayes import GaussianNB
from stacking import QuickClassifier
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import link_split
from pyro_nmm.guides import (
    AmortizedNMM,
    Consistency,
    DGLFRMGuide,
    HiddenFieldGuide,
    fit_classifier,
    fit_images,
    fit_links,
    fit_mixture,
    fit_nmm,
    fit_unet,
    mean_field,
)
from pyro_nmm.guides.fitting import train
from pyro_nmm.models import (
    DGLFRM,
    Annotators,
    CopyingAnnotators,
    Denoiser,
    FreeNMM,
    MarginalField,
    NMMNetwork,
    NormalEmission,
    StackedNMM,
    UNet,
    fit_field,
    grid_edges,
    ising,
    leave_one_out,
    temperature_scaling,
)
from pyro_nmm.models.annotators import out_of_fold


@contextmanager
def switched_off():
    """A caller's ``torch.set_grad_enabled(False)``, which no context ends."""
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


def ring(size=12):
    here = torch.arange(size)
    edges = torch.stack([here, (here + 1) % size])
    return torch.cat([edges, edges.flip(0)], 1)


def data(size=12):
    """Two halves of a ring, with features, labels and masks."""
    y = (torch.arange(size) >= size // 2).long()
    x, masks = torch.randn(size, 3) + y[:, None], torch.arange(size) % 3
    return Data(x, ring(size), y=y, train_mask=masks == 0, val_mask=masks == 1)


def numbers(module, *more):
    return [*module.parameters(), *module.buffers(), *more]


# Each makes arguments, and returns the fit that has not run yet.


def of_mixture():
    field = ising(grid_edges(3, 3), 0.3, torch.randn(9)).scaled(0.9)
    hood = Neighborhood.grid(3, 3)
    network = FreeNMM(hood, 2)
    return lambda: [*numbers(network), fit_mixture(field, hood, network, num_steps=3)[0].alpha]


def of_mixture_in_part():
    whole = ising(grid_edges(3, 3), 0.3, torch.randn(9))
    field = MarginalField(whole, torch.arange(9) % 2 == 0)
    hood = Neighborhood(torch.tensor([[0, 1], [1, 2]]), 5)
    network = FreeNMM(hood, 2)
    return lambda: numbers(network, *fit_mixture(lambda _: field, hood, network, num_steps=3)[1])


def of_classifier():
    graph, network, penalty = data(), GCN(3, 4, 2, 2), Consistency(12, 2)

    def fit():
        scores, curve = fit_classifier(network, graph, consistency=penalty, num_epochs=3)
        return [scores, curve, *numbers(network)]

    return fit


def of_nmm():
    graph, penalty = data(), Consistency(12, 2)
    hood = Neighborhood(graph.edge_index, 12)
    network = NMMNetwork(GCN(3, 4, 2, 2), GCN(3, 4, 2, 4), num_classes=2)

    def fit():
        mix, curve = fit_nmm(network, graph, hood, consistency=penalty, num_epochs=3)
        return [mix.alpha, mix.logits, curve, *numbers(network)]

    return fit


def of_links():
    split, x = link_split(ring(24), 24, 0), torch.randint(2, (24, 3)).double()
    pair = DGLFRMGuide(DGLFRM(24, 3, 3, concentration=2.0), 3)
    return lambda: [fit_links(pair, split, x, num_steps=3), *numbers(pair)]


def of_unet():
    patches, unet = torch.randint(256, (1, 3, 4, 4)), UNet(width=6, depth=1)
    return lambda: [fit_unet(unet, lambda: patches, num_steps=2), *numbers(unet)]


def of_images():
    patches, network = torch.randint(256, (1, 3, 4, 4)), Denoiser(UNet(width=6, depth=1))
    return lambda: [fit_images(network, lambda: patches, num_steps=2), *numbers(network)]


def of_loop():
    network, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.Adam(network.parameters())  # holds the parameters already

    def backward(step):
        loss = network(x.clone()).square().sum()
        loss.backward()
        return loss.item()

    return lambda: [train(network, optimizer, backward, num_epochs=3), *numbers(network)]


def of_temperature():
    scores, y = torch.randn(12, 2), torch.arange(12) % 2
    return lambda: [temperature_scaling(scores, y, torch.arange(12))]


def stacked(**options):
    graph, scores = data(), torch.randn(12, 2)
    hood, model = Neighborhood(graph.edge_index, 12), StackedNMM(2, **options)
    both = hood, scores, graph.y, graph.train_mask, graph.val_mask

    def fit():
        fitted = numbers(model.fit(*both, num_steps=2, refit_steps=2))
        fitted = [each.clone() for each in fitted]
        posterior = model.update(*both, num_steps=2).posterior(*both[:4])
        return [*fitted, *numbers(model), posterior.marginals()]

    return fit


def of_folds():
    graph, scores = data(), torch.randn(2, 12, 2)
    hood, model, folds = Neighborhood(graph.edge_index, 12), StackedNMM(2), torch.arange(12) % 2
    return lambda: numbers(model.fit(hood, scores, graph.y, folds=folds, num_steps=2))


def of_table():
    x, y = torch.randn(24, 2).numpy(), (torch.arange(24) % 2).numpy()
    model = QuickClassifier(GaussianNB(), cv=2, n_neighbors=3, random_state=0)
    return lambda: [model.fit(x, y).predict_proba(x), model.label_distributions_]


FEW = {"num_steps": 2, "num_starts": 1, "num_draws": 2, "num_chains": 2}


def answered(kind):
    graph, known = data(), torch.tensor([0, -1, -1] * 4)
    answers, labels = (graph.y[:, None] + (torch.rand(12, 3) < 0.2)) % 2, kind(2)

    def fit():
        found = labels.fit(graph, answers, known=known, **FEW)
        return [found.probs, *found.powers.values(), *numbers(found.field.prior)]

    return fit


def hidden(network=None):
    graph = data()
    hood, attr = Neighborhood(graph.edge_index, 12), torch.randn(36, 1)
    given = {"prior": network(graph), "inputs": (graph.x, graph.edge_index)} if network else {}

    def fit():
        own = None if network else attr
        field = fit_field(NormalEmission(2), hood, graph.x, own, **given, **FEW)
        return [field.probs, leave_one_out(field, graph.x, 2), *numbers(field.prior)]

    return fit


def of_program():
    graph = data()
    hood = Neighborhood(graph.edge_index, 12)
    pair = HiddenFieldGuide(NormalEmission(2), hood, graph.x)

    def fit():
        return [pair.field(num_draws=2, num_sweeps=2).probs, *pair.values().values()]

    return fit


def of_mean_field():
    field = ising(grid_edges(3, 3), 0.3, torch.randn(9))
    return lambda: [*mean_field(field, num_sweeps=9), field.marginals(), field.log_normalizer()]


FITS = {
    "fit_mixture": of_mixture,
    "fit_mixture, MarginalField": of_mixture_in_part,
    "fit_classifier": of_classifier,
    "fit_nmm": of_nmm,
    "fit_links": of_links,
    "fit_unet": of_unet,
    "fit_images": of_images,
    "train": of_loop,
    "temperature_scaling": of_temperature,
    "StackedNMM": stacked,
    "StackedNMM of scores": lambda: stacked(pool=False),
    "StackedNMM of folds": of_folds,
    "NeighborMixtureClassifier": of_table,
    "Annotators": lambda: answered(Annotators),
    "CopyingAnnotators": lambda: answered(CopyingAnnotators),
    "fit_field": hidden,
    "fit_field of a network": lambda: hidden(lambda _: NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)),
    "HiddenFieldGuide": of_program,
    "mean_field": of_mean_field,
}
#: Where arguments are made, and where the fit runs; each pair is compared with a fit without any.
MODES = {
    "no_grad": (nullcontext, torch.no_grad),
    "off": (nullcontext, switched_off),
    "inference mode": (nullcontext, torch.inference_mode),
    "all in inference mode": (torch.inference_mode, torch.inference_mode),
    "made in inference mode": (torch.inference_mode, nullcontext),
}


def result(name, making, fitting):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with making():
        fit = FITS[name]()
    with fitting():
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = fit()
        assert mode == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return [torch.as_tensor(each).detach().clone() for each in found]


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_the_same_in_every_mode(name, monkeypatch):
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 2)
    usual = result(name, nullcontext, nullcontext)
    assert all(each.isfinite().all() for each in usual)
    for making, fitting in MODES.values():
        torch.testing.assert_close(result(name, making, fitting), usual, rtol=0, atol=0)


def test_programs_made_in_inference_mode_are_trained_outside():
    def trained(making):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        graph = data()
        with making():
            hood = Neighborhood(graph.edge_index, 12)
            network = NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)
            pair = HiddenFieldGuide(
                NormalEmission(2), hood, graph.x, prior=network, inputs=(graph.x, graph.edge_index)
            )
        elbo = TraceGraph_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(pair.model, pair.guide, Adam({"lr": 0.1}), elbo)
        losses = [svi.step() for _ in range(3)]
        return [torch.tensor(losses), *network.parameters()]

    found, usual = trained(torch.inference_mode), trained(nullcontext)
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


def test_a_network_that_inference_mode_holds_is_refused():
    """Pyro's store has weak references to its parameters."""
    graph = data()
    hood = Neighborhood(graph.edge_index, 12)
    with torch.inference_mode():
        network = NMMNetwork(GCN(3, 4, 2, 4), num_classes=2)
        AmortizedNMM(hood, network).mixture(graph.x, graph.edge_index)
    with pytest.raises(ValueError, match=r"of NMMNetwork was made in torch.inference_mode\(\)"):
        fit_nmm(network, graph, hood, num_epochs=1)
    fit_nmm(copy.deepcopy(network), graph, hood, num_epochs=1)


def test_an_error_leaves_the_mode_as_it_was():
    with torch.inference_mode():
        with pytest.raises(ValueError, match="held_out"):
            temperature_scaling(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([5]))
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
