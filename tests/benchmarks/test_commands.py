# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pages of results name the files of their commands, and these are accepted."""

import importlib
import re
import subprocess
from argparse import ArgumentParser

import pytest
from documents import RESULTS, ROOT

#: In place of Python and pip, in the shell of a README: print the arguments, and nothing.
SHELL = """python() { printf '%s\\037' "$@"; printf '\\n'; }
pip() { :; }
"""
READMES = sorted((ROOT / "benchmarks").glob("*/README.md"))


class Parsed(Exception):
    """The arguments are accepted, and nothing is run."""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_names_the_files_of_its_commands(path):
    assert re.search(r"`benchmarks/\w+/README\.md`", path.read_text())


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_commands_of_a_benchmark_are_accepted(path, monkeypatch):
    parse = ArgumentParser.parse_args

    def stop(parser, argv):
        parse(parser, argv)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    (block,) = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    done = subprocess.run(["bash", "-c", SHELL + block], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        _, module, *argv = line.split("\037")[:-1]
        with pytest.raises(Parsed):
            importlib.import_module(module).main(argv)
