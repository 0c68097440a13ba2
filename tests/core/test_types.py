# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A type checker and the library agree on calls of a user's script: tests/typed_calls.py."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pyro
import pytest
import typed_calls
from typed_calls import RIGHT, WRONG

from pyro_nmm.fitting import StepOptions, Steps
from pyro_nmm.models.hidden import FieldOptions, FieldRun
from pyro_nmm.models.networks import LINKS
from pyro_nmm.ops.score_costs import Estimator, ScoreEstimator

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(typed_calls.__file__)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Lines of the script with an error of mypy, which sees the package as it is installed."""
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(ROOT / "pyro_nmm", folder / "pyro_nmm")
    for name in ("models", "guides"):
        shutil.copytree(ROOT / name, folder / "pyro_nmm" / name)
    shutil.copy(SCRIPT, folder)
    options = ["--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "--python-version", "3.11", SCRIPT.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found = re.findall(r"^(.+?):(\d+): error: ", done.stdout, re.MULTILINE)
    assert {name for name, _ in found} <= {SCRIPT.name}, done.stdout
    return [SCRIPT.read_text().splitlines()[int(line) - 1] for _, line in found]


def lines(name):
    """The calls of a list, a line each."""
    return re.search(rf"^{name} = \[\n(.*?)^\]", SCRIPT.read_text(), re.M | re.S)[1].splitlines()


@pytest.mark.slow
def test_a_type_checker_finds_the_wrong_calls_alone(errors):
    assert len(lines("RIGHT")) == len(lines("WRONG")) == 12
    assert errors == lines("WRONG")


@pytest.mark.parametrize("call", RIGHT)
def test_right_calls_run(call):
    pyro.clear_param_store()
    call()


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls_fail(call):
    pyro.clear_param_store()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        call()


def test_keywords_of_fits_are_the_fields_of_their_options():
    for keywords, options in ((StepOptions, Steps), (FieldOptions, FieldRun)):
        assert keywords.__annotations__ == options.__annotations__


def test_literals_are_the_choices():
    assert set(get_args(Estimator)) == set(ScoreEstimator)
    link = typed_calls.NMMNetwork.__init__.__annotations__["link"]
    assert set(get_args(link)) == LINKS.keys()
