# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The costs that a choice is charged with, against their definitions."""

import torch
from graphs import two_triangles

from pyro_nmm.ops.counts import Groups
from pyro_nmm.ops.score_costs import costs_to_go, others_mean


def test_sums_within_groups(device):
    """Of keys of their own, and of one line of keys for all lines of values."""
    keys, values = torch.randint(4, (2, 30)), torch.randint(10, (2, 30))
    for place, key in ((p, k) for p in ("cpu", device) for k in (keys, keys[:1])):
        groups = Groups(key.to(place), 4)
        earlier, later = (f(values.to(place)).cpu() for f in (groups.earlier, groups.later))
        for b in range(2):
            own = key[min(b, len(key) - 1)]
            for i in range(30):
                same = own == own[i]
                assert earlier[b, i] == values[b, :i][same[:i]].sum()
                assert later[b, i] == values[b, i + 1 :][same[i + 1 :]].sum()


def test_later_costs_stay_in_their_component():
    hood = two_triangles()
    f = torch.randn(3, 5)
    costs = costs_to_go(hood.components(), f)
    for i in range(5):
        mine = range(3) if i < 3 else range(3, 5)
        torch.testing.assert_close(costs[:, i], f[:, [k for k in mine if k > i]].sum(1))


def test_others_mean():
    costs = torch.randn(4, 2, 5)
    mean = others_mean(costs, [0])
    torch.testing.assert_close(mean[1, 0], costs[[0, 2, 3], 0].mean(0))
    mean = others_mean(costs, [0, 1])
    rest = [costs[t, k] for t in range(4) for k in range(2) if (t, k) != (2, 1)]
    torch.testing.assert_close(mean[2, 1], torch.stack(rest).mean(0))
    assert others_mean(costs[:1], [0]) is None
    assert others_mean(costs, []) is None
