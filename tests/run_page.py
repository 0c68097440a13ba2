# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Snippets of pages as pasted, one after another, each page in a process of its own; then its claims.

    python run_page.py links.md pyro.md

Torch is seeded and imported before the first snippet. Nothing else is there.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback

from documents import SNIPPETS, errors_of_warnings


def run_snippets(name: str) -> None:
    """All snippets of a page, and the check of what they leave behind."""
    namespace, printed = {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(SNIPPETS[name]):
            exec(compile(code, f"{name}, snippet {number + 1}", "exec"), namespace)
    print(name, printed.getvalue(), sep="\n")
    from page_checks import CHECKS

    CHECKS[name](namespace, printed.getvalue())


def in_child(name: str) -> bool:
    """Whether a page runs in a copy of this process, which has run no page."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_snippets(name)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def main(*names: str) -> None:
    import pyro
    import torch
    import torch_geometric  # noqa: F401

    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    errors_of_warnings()  # after these imports, which warn
    failed = [name for name in names if not in_child(name)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
