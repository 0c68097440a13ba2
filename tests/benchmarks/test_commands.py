# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The commands of the pages of results have tasks and options that there are."""

import importlib
import re
import subprocess
from argparse import ArgumentParser

import pytest
from documents import RESULTS

#: In place of Python and pip, in the shell of a page: print the arguments, and nothing.
SHELL = """python() { printf '%s\\037' "$@"; printf '\\n'; }
pip() { :; }
"""


class Parsed(Exception):
    """The arguments are accepted, and nothing is run."""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_commands_of_a_page_are_accepted(path, monkeypatch):
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
