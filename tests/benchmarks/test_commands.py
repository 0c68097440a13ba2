# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Commands of the pages of results and of the files that they name are accepted."""

import importlib
import re
import subprocess
from argparse import ArgumentParser

import pytest
from documents import RESULTS, ROOT

#: In place of Python and pip, in the shell of a page: print the arguments, and nothing.
SHELL = """python() { printf '%s\\037' "$@"; printf '\\n'; }
pip() { :; }
"""


READMES = sorted((ROOT / "benchmarks").glob("*/README.md"))


def blocks(path):
    return re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)


class Parsed(Exception):
    """The arguments are accepted, and nothing is run."""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_has_commands_or_names_their_files(path):
    named = re.findall(r"`(benchmarks/\w+/README\.md)`", path.read_text())
    assert blocks(path) or named
    assert all(blocks(ROOT / name) for name in named)


PAGES = [path for path in RESULTS + READMES if blocks(path)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_commands_of_a_page_are_accepted(path, monkeypatch):
    parse = ArgumentParser.parse_args

    def stop(parser, argv):
        parse(parser, argv)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    (block,) = blocks(path)
    done = subprocess.run(["bash", "-c", SHELL + block], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        _, module, *argv = line.split("\037")[:-1]
        with pytest.raises(Parsed):
            importlib.import_module(module).main(argv)
