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


class Reads(MLP):
    def forward(self, x):
        return super().forward(torch.as_tensor(x))


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


def fit(
    checkpoint=None, progress=iter, data=X, network=False, emission=None, edge_attr=HOPS,
    inputs=(X,), seed=1, **options,
):  # fmt: skip
    pyro.set_rng_seed(seed)
    emission = NormalEmission(3) if emission is None else emission
    options = QUICK | {"checkpoint": checkpoint, "progress": progress} | options
    if network:
        prior = NMMNetwork(Reads([2, 8, 3], dropout=0.5, norm=None), Reads([2, 4]), num_classes=3)
        return fit_field(emission, HOOD, data, prior=prior, inputs=inputs, **options)
    return fit_field(emission, HOOD, data, edge_attr, **options)


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


class Scaled:
    """An emission that is no data class."""

    def __init__(self, scale):
        self.num_labels, self.scale = 3, scale

    def __getattr__(self, name):
        return getattr(NormalEmission(3, self.__dict__["scale"]), name)


@pytest.mark.parametrize(
    "change",
    [
        {"data": X + 1},
        {"num_steps": 9},
        {"num_chains": 3},
        {"lr": 0.2},
        {"network": True},
        {"known": torch.zeros(36, dtype=torch.long)},
        {"edge_attr": 2 * HOPS},
        {"emission": NormalEmission(3, 2.0)},
        {"emission": Scaled(1.0)},
        {"seed": 2},
    ],
    ids=lambda change: f"other-{next(iter(change))}",
)
def test_a_checkpoint_of_another_fit_is_refused(change, tmp_path):
    fit(tmp_path / "field.pt")
    with pytest.raises(ValueError, match="is of another run, which differs in"):
        fit(tmp_path / "field.pt", **change)


def test_attributes_of_any_emission_and_arrays_are_compared(tmp_path):
    fit(tmp_path / "one.pt", emission=Scaled(1.0))
    with pytest.raises(ValueError, match="differs in emission's attributes"):
        fit(tmp_path / "one.pt", emission=Scaled(2.0))
    fit(tmp_path / "two.pt", network=True, inputs=(X.numpy(),))
    with pytest.raises(ValueError, match="differs in inputs"):
        fit(tmp_path / "two.pt", network=True, inputs=((X + 1).numpy(),))


@pytest.mark.parametrize("path", ["", 3])
def test_a_checkpoint_needs_a_path(path):
    with pytest.raises(ValueError, match="checkpoint must be the path of a file"):
        fit(path)


def test_annotators_are_resumed(tmp_path):
    answers, path = torch.randint(-1, 3, (36, 4)), tmp_path / "crowd.pt"
    edges = torch.stack([HOOD.source, HOOD.row])
    options = {"num_steps": 6, "save_every": 2, "num_draws": 2}

    def fit(**more):
        pyro.set_rng_seed(2)
        return Annotators(3).fit(edges, answers, **options, **more).probs

    whole, seen = fit(), []
    with pytest.raises(Killed):
        fit(checkpoint=path, progress=killed_after(3))
    again = fit(checkpoint=str(path), progress=lambda steps: seen.append(steps) or steps)
    assert seen == [range(2, 6)]
    assert torch.equal(again, whole)
