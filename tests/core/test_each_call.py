# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Values that modules check in every call: with Pyro's validation only, and never in transforms."""

import pyro
import pytest
import torch
from pyro.ops.provenance import track_provenance
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_nmm.arguments import check_each_call
from pyro_nmm.models import NormalEmission, PooledScores

NORMAL = {"mean": torch.zeros(2, 3), "variance": torch.ones(2, 3)}
CALLS = {
    "terms": (PooledScores(2), torch.ones(4, 5, 2)),
    "data": (lambda x: NormalEmission(2).log_prob(NORMAL, x), torch.ones(5, 3)),
}


@pytest.mark.parametrize("name", CALLS, ids="bad-{}".format)
def test_infinity_is_refused(name):
    call, good = CALLS[name]
    good = good.double()
    call(good)
    for bad in (good / 0, track_provenance(good / 0, frozenset({"site"}))):
        with pytest.raises(ValueError, match=f"{name} must be finite.*, got inf at"):
            call(bad)
    with pyro.validation_enabled(False):
        call(good / 0)


def test_transforms_do_not_check():
    def doubled(x):
        check_each_call("x", x)
        return 2 * x

    bad = torch.tensor([1.0, torch.inf])
    for transformed in (
        torch.vmap(doubled),
        func.jacfwd(doubled),
        torch.compile(doubled, backend="eager", fullgraph=True),
    ):
        transformed(bad)
    doubled(bad.to("meta"))
    make_fx(doubled)(bad)
    with FakeTensorMode(allow_non_fake_inputs=True):
        doubled(bad)
    doubled(torch.full((3,), 5e4).half())  # its sum is infinite
    with pytest.raises(ValueError, match="x must be finite, got inf"):
        doubled(bad.bfloat16())
    with pytest.raises(ValueError, match=r"x must be finite, got inf at \[1\]"):
        doubled(bad)
