# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The conventions of docs/api.md: what pages import, and what fits and their helpers take."""

import re

import pyro
import pytest
import torch
from documents import DOCUMENTS, ROOT, TUTORIALS
from emissions import COUNTS, FEATURES
from graphs import shared_sources
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GraphSAGE

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import link_split
from pyro_nmm.guides import DGLFRMGuide, SeedLoss, fit_links, mean_field
from pyro_nmm.models import (
    DGLFRM,
    Annotators,
    NMMNetwork,
    NormalEmission,
    PoissonEmission,
    compatibility,
    fit_field,
    grid_edges,
    ising,
)

KARATE = KarateClub()[0]
KARATE.x = KARATE.x.double()
HOOD = Neighborhood(KARATE.edge_index, 34)
SHORT = {"num_starts": 1, "num_steps": 2, "num_draws": 2}


def pages():
    """Full names that docs/api.md lists, and the modules that hold them."""
    module, names = None, set()
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif module and re.fullmatch(r"   [\w.]+", line):
            names.add(f"{module}.{line.strip()}")
    return names, {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize(
    "path",
    [*DOCUMENTS, *TUTORIALS, *sorted((ROOT / "examples").glob("*.py"))],
    ids=lambda path: path.name,
)
def test_a_name_that_users_see_imported_has_a_page(path):
    names, modules = pages()
    found = re.findall(r"^from (pyro_nmm[\w.]*) import (\([^)]*\)|.*)$", path.read_text(), re.M)
    for module, imported in found:
        for name in re.findall(r"\w+", imported):
            assert f"{module}.{name}" in names | modules, f"{module}.{name}"


def test_listed_names_exist():
    names, modules = pages()
    assert {"pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides.fitting"} < modules
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=[last]), last), name


def labels_of_annotators(graph):
    answers = KARATE.y[:, None].expand(-1, 2).clone()
    return Annotators(4).fit(graph, answers, **SHORT).probs


def losses_of_links(x):
    pair = DGLFRMGuide(DGLFRM(34, 3, concentration=4.0), 34)
    split = link_split(KARATE.edge_index, 34, seed=0)
    return torch.tensor(fit_links(pair, split, x, num_steps=1))


def loss_of_seeds(seeds):
    network = NMMNetwork(GraphSAGE(34, 4, 1, out_channels=4), GraphSAGE(34, 4, 1), num_classes=4)
    with pytest.warns(UserWarning, match="no in_degree"):
        return SeedLoss(network)(KARATE, seeds).detach()


def mean_of_field(starts):
    field = ising(grid_edges(2, 2), 0.1, torch.tensor([1.0, 0.0, 0.0, -1.0]))
    return mean_field(field, starts, num_random=0).losses


TAKEN = {
    "Annotators.fit": (labels_of_annotators, KARATE.edge_index),
    "NormalEmission": (
        lambda data: fit_field(NormalEmission(2), shared_sources(), data, **SHORT).probs,
        FEATURES,
    ),
    "PoissonEmission": (
        lambda data: fit_field(PoissonEmission(2), shared_sources(), data, **SHORT).probs,
        COUNTS,
    ),
    "fit_links": (losses_of_links, KARATE.x),
    "subgraph": (lambda nodes: HOOD.subgraph(nodes).source, torch.arange(9)),
    "SeedLoss": (loss_of_seeds, torch.arange(5)),
    "mean_field": (mean_of_field, torch.full((1, 4, 2), 0.5)),
    "compatibility": (lambda known: compatibility(HOOD, KARATE.y, known, 4), torch.arange(20)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_arrays_and_lists_are_taken_as_tensors_are(name):
    call, given = TAKEN[name]
    found = []
    for form in (given, given.numpy(), given.tolist()):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        found.append(call(form))
    assert all(torch.allclose(each, found[0]) for each in found[1:])


def test_sets_of_nodes_are_masks_or_ids():
    mask = KARATE.train_mask
    tables = [compatibility(HOOD, KARATE.y, known, 4) for known in (mask, mask.nonzero()[:, 0])]
    assert torch.equal(*tables)
