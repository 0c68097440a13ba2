# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fixtures of all tests, and the state in which each of them begins."""

import pyro
import pytest
import torch
from hypothesis import HealthCheck, settings
from simulated_device import NAME, register, simulated

from pyro_nmm import compiled
from pyro_nmm.ops import sampling

# No example has a time limit: the machine may do other work. The fixture ``kernels`` may serve all
# examples of a test.
ALLOWED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "any machine", deadline=None, max_examples=40, suppress_health_check=ALLOWED
)
settings.load_profile("any machine")

# Before the first gradient: from then on autograd serves the devices that it found.
NO_DEVICE = register()


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():  # the same tests run on the simulated device
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    no_data = pytest.mark.skip(reason="needs --data-root")
    for item in items:
        if "data" in item.keywords and config.getoption("--data-root") is None:
            item.add_marker(no_data)


@pytest.fixture(autouse=True)
def fresh():
    """Double precision, a fixed seed, no parameters left over."""
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(1)  # the graphs here are small
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    pyro.enable_validation(True)
    yield
    torch.set_default_dtype(torch.float)


@pytest.fixture(params=[NAME, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The name of a device that is not the CPU: CUDA if there is one, and the simulated one."""
    if request.param != NAME:
        yield request.param
        return
    if NO_DEVICE:
        pytest.skip(NO_DEVICE)
    with simulated():
        yield NAME


@pytest.fixture(params=["loops", "tensors", "blocks"])
def kernels(request, monkeypatch):
    """
    Run with the compiled loops, with the tensor code of other devices, and with that code in blocks
    of a few rows.
    """
    if request.param == "blocks":
        monkeypatch.setitem(sampling.BLOCK, "cpu", 3)
    if request.param != "loops":
        monkeypatch.setattr(compiled, "DEVICES", set())
    return request.param


@pytest.fixture(params=["collapsed", "two blocks"])
def way(request, monkeypatch):
    """How sweeps are made: as on the processor, or as on other devices."""
    if request.param == "two blocks":
        monkeypatch.setattr(compiled, "DEVICES", set())
