# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every row of the tables in docs/pyro.md: what works, what is refused, what the limits are."""

import re

import pyro_distributions  # noqa: F401
import pyro_handlers  # noqa: F401
import pyro_inference  # noqa: F401
import pyro_plates  # noqa: F401
import pytest
from pyro_rows import CHECKS, ROWS

SLOW = {name for name in ROWS if name.startswith(("torch.compile", "NUTS,", "FieldGibbs"))}
LOSSES = {"TraceGraph_ELBO", "Trace_ELBO", "RenyiELBO", "ReweightedWakeSleep"}


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW | LOSSES else name


def test_the_page_has_rows():
    assert len(ROWS) > 40
    assert {status for status, _ in ROWS.values()} == {"works", "refused", "limit"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [marked(name) for name in sorted(ROWS.keys() | CHECKS.keys())])
def test_row(name):
    assert name in ROWS, f"docs/pyro.md has no row {name!r}, which tests have"
    assert name in CHECKS, f"no test has the row {name!r} of docs/pyro.md"
    status, told = ROWS[name]
    if status != "refused":
        CHECKS[name]()
        return
    # Pyro and torch raise many kinds; the row has the message.
    (message,) = re.findall(r"^`(.*)`$", told)
    with pytest.raises(Exception) as refused:  # noqa: PT011
        CHECKS[name]()
    assert message in f"{refused.type.__name__}: {refused.value}"
