# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Options, and the fixtures of ``shared_fixtures.py``."""


def pytest_addoption(parser):
    parser.addoption("--data-root", default=None, help="folder of the real data sets")


def pytest_configure(config):
    # Where others run the tests, a process need not wait for PyTorch before it starts them.
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")
