# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Interrupted fits of hidden fields."""

import pyro
import pytest
import torch
from torch_geometric.nn import MLP

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators, NMMNetwork, NormalEmission, fit_field

HOOD = Neighborhood.grid(6, 6)
HOPS = (HOOD.row != HOOD.source).double()
X = torch.randn(36, 2, generator=torch.Generator().manual_seed(0), dtype=torch.double)
QUICK = {"num_steps": 7, "num_starts": 2, "num_chains": 2, "num_draws": 2, "save_every": 2}


class Killed(Exception):
    pass


def killed_after(number):
    """Progress that fails after so many steps of all starts."""
    left = iter(range(number - 1))

    def wrap(steps):
        for step in steps:
            yield step
            if next(left, None) is None:
                raise Killed

    return wrap


def fit(checkpoint=None, progress=iter, data=X, network=False, **options):
    pyro.set_rng_seed(1)
    options = QUICK | {"checkpoint": checkpoint, "progress": progress} | options
    if network:
        prior = NMMNetwork(MLP([2, 8, 3], dropout=0.5, norm=None), MLP([2, 4]), num_classes=3)
        return fit_field(NormalEmission(3), HOOD, data, prior=prior, inputs=(X,), **options)
    return fit_field(NormalEmission(3), HOOD, data, HOPS, **options)


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("number", [1, 5, 6, 7, 12])
def test_a_killed_fit_ends_as_another(number, network, tmp_path):
    whole, path = fit(network=network), tmp_path / "field.pt"
    with pytest.raises(Killed):
        fit(path, killed_after(number), network=network)
    seen = []
    again = fit(path, lambda steps: seen.append(steps) or steps, network=network)
    assert sum(map(len, seen)) == 14 - number // 7 * 7 - number % 7 // 2 * 2
    assert torch.equal(again.probs, whole.probs)
    assert torch.equal(again.samples, whole.samples)
    assert again.score == whole.score
    for one, two in zip(again.prior.parameters(), whole.prior.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "change", [{"data": X + 1}, {"num_steps": 9}, {"lr": 0.2}, {"network": True}]
)
def test_a_checkpoint_of_another_fit_is_refused(change, tmp_path):
    fit(tmp_path / "field.pt")
    with pytest.raises(ValueError, match="is of another run, which differs in"):
        fit(tmp_path / "field.pt", **change)


def test_annotators_are_resumed(tmp_path):
    answers, path = torch.randint(-1, 3, (36, 4)), tmp_path / "crowd.pt"
    edges = torch.stack([HOOD.source, HOOD.row])
    found = []
    for options in ({}, {"progress": killed_after(3)}, {}):
        pyro.set_rng_seed(2)
        options |= {"num_steps": 6, "save_every": 2, "checkpoint": path if found else None}
        try:
            found.append(Annotators(3).fit(edges, answers, **options).probs)
        except Killed:
            found.append(None)
    assert torch.equal(found[0], found[2])
    assert found[1] is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["crowd.pt.0", "crowd.pt.0.previous"]
