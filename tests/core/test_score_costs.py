# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The costs that a choice is charged with, against their definitions."""

import networkx as nx
import pytest
import torch
from graphs import parameters, to_hood, two_triangles

from pyro_nmm import OrderedConditional
from pyro_nmm.ops.counts import Groups
from pyro_nmm.ops.predictive import predictive
from pyro_nmm.ops.score_costs import (
    costs_to_go,
    less_baseline,
    one_step_credits,
    others_mean,
)


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


@pytest.mark.parametrize("batch", [(), (3,)])
def test_horizon_is_the_change_that_one_count_makes(kernels, batch):
    hood = to_hood(nx.barabasi_albert_graph(20, 3, seed=1))
    alpha, logits = parameters(hood, 2, batch)
    y = torch.randint(2, (*batch, 20))
    q = OrderedConditional(hood, alpha, logits, y)
    shape = torch.Size([3])
    draw = q._draw(shape)
    entries = q._flat(shape)
    f, _ = predictive(q.rows, entries, draw)
    costs = one_step_credits(q.rows, entries, draw, f)
    labels = draw.labels
    rows = q.rows
    for b in range(3):
        for i in range(20):
            j, expected = rows.source[draw.edges[b, i]], 0.0
            fewer_same, fewer = map(torch.clone, draw.counts)
            later = (rows.row > i) & (rows.source == j)
            fewer[b, later] -= 1
            fewer_same[b, later & (labels[b][rows.row] == labels[b, i])] -= 1
            without, _ = predictive(rows, entries, draw._replace(counts=(fewer_same, fewer)))
            touched = rows.row[later]
            expected = (f[b, touched] - without[b, touched]).sum()
            torch.testing.assert_close(costs[b, i], expected)


def test_others_mean():
    costs = torch.randn(4, 2, 5)
    mean = others_mean(costs, [0])
    torch.testing.assert_close(mean[1, 0], costs[[0, 2, 3], 0].mean(0))
    mean = others_mean(costs, [0, 1])
    rest = [costs[t, k] for t in range(4) for k in range(2) if (t, k) != (2, 1)]
    torch.testing.assert_close(mean[2, 1], torch.stack(rest).mean(0))
    assert others_mean(costs[:1], [0]) is None
    assert others_mean(costs, []) is None


def test_baselines_leave_out_the_draw_itself():
    """Draws share a baseline along dimensions of size one; without any, another draw is made."""
    costs, other = torch.randn(4, 2, 5), torch.randn(4, 2, 5)

    def fresh():
        return other

    rest = (costs.sum((0, 1)) - costs) / 7
    torch.testing.assert_close(less_baseline(costs, torch.Size([1, 1]), fresh), costs - rest)
    pair = costs.flip(1)
    torch.testing.assert_close(less_baseline(costs, torch.Size([4, 1]), fresh), costs - pair)
    torch.testing.assert_close(less_baseline(costs, torch.Size([4, 2]), fresh), costs - other)
