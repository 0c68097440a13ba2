# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data, backbones and a fit for node classification."""

import pytest
import torch
from graphs import house

from benchmarks.shared.backbones import RandomInput, appnp, gat, gcn, mlp
from pyro_nmm.datasets import digits, random_split
from pyro_nmm.models import temperature_scaling


def test_temperature_scaling_finds_the_temperature():
    torch.manual_seed(0)
    truth = torch.randn(20_000, 3)
    y = torch.distributions.Categorical(logits=truth).sample()
    mask = torch.rand(20_000) < 0.5
    assert temperature_scaling(5 * truth, y, mask) == pytest.approx(5, rel=0.05)
    assert temperature_scaling(truth / 3, y, mask) == pytest.approx(1 / 3, rel=0.05)


def test_random_splits_share_test_nodes_and_are_nested():
    data = digits()
    small, large = (random_split(data, f, 0.1, 0.3, seed=4) for f in (0.2, 0.6))
    for name in ("val_mask", "test_mask"):
        assert torch.equal(small[name], large[name])
    assert (large.train_mask | ~small.train_mask).all()
    total = large.train_mask.int() + large.val_mask.int() + large.test_mask.int()
    assert total.max() == 1
    assert [int(m.sum()) for m in (small.train_mask, large.train_mask)] == [359, 1078]
    assert not torch.equal(random_split(data, 0.2, 0.1, 0.3, seed=5).test_mask, small.test_mask)
    with pytest.raises(ValueError, match="sum to at most 1"):
        random_split(data, 0.8, 0.1, 0.3, seed=0)


@pytest.mark.parametrize("build", [gcn, gat, appnp, mlp])
@pytest.mark.parametrize("attention", [False, True])
def test_backbones_take_sparse_features(build, attention):
    torch.manual_seed(0)
    x = (torch.rand(5, 7) < 0.4).double()
    hood = house()
    edge_index = torch.stack([hood.source, hood.target])
    network = build(7, 16, attention=attention).eval()
    dense, sparse = network(x, edge_index), network(x.to_sparse_csr(), edge_index)
    assert dense.shape[0] == 5
    assert attention or dense.shape[1] == 16
    torch.testing.assert_close(dense, sparse)
    network.train()(x.to_sparse_csr(), edge_index).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_backbones_have_the_sizes_of_the_appendix():
    def shapes(network):
        return sorted(tuple(p.shape) for p in network.parameters() if p.dim() == 2)

    assert shapes(gcn(7, 3)) == [(3, 16), (16, 7)]
    assert shapes(gcn(7, 64, attention=True)) == [(64, 7)]
    assert shapes(gat(7, 3)) == [(24, 128), (128, 7)]
    assert shapes(gat(7, 32, attention=True)) == [(256, 7)]
    assert shapes(appnp(7, 3)) == [(3, 64), (64, 7)]


@pytest.mark.parametrize("sparse", [False, True])
def test_random_input_keeps_the_mean(sparse):
    """Whole rows vanish, entries vanish, zeros stay zero and the mean is kept."""
    torch.manual_seed(0)
    x = torch.rand(4000, 6) * (torch.rand(4000, 6) < 0.5)
    network = RandomInput(torch.nn.Identity(), dropout=0.5, drop_nodes=0.5)
    out = network(x.to_sparse_csr() if sparse else x)
    if sparse:
        assert out.layout == torch.sparse_csr
        out = out.to_dense()
    assert (out[x == 0] == 0).all()
    empty = (out == 0).all(-1)[(x > 0).sum(-1) >= 4].double().mean()
    assert 0.5 < empty < 0.57  # half of the nodes, and those whose entries all went
    assert out.sum().item() == pytest.approx(x.sum().item(), rel=0.05)
    assert torch.equal(network.eval()(x), x)
