# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data, metrics, backbones and the two ways of training for node classification."""

import math

import pytest
import torch
from graphs import house
from sklearn.metrics import brier_score_loss, log_loss
from torch_geometric.data import Data
from torch_geometric.nn import MLP

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import digits, inner_edges, planetoid, random_split, select_split
from pyro_nmm.guides import AmortizedNMM, Consistency, fit_classifier, fit_nmm
from pyro_nmm.metrics import brier, independent_pairs, mean_log_prob, pair_log_likelihood
from pyro_nmm.models import NMMNetwork, temperature_scaling
from pyro_nmm.models.backbones import RandomInput, appnp, gat, gcn, mlp


def test_metrics_agree_with_scikit_learn():
    probs, y = torch.randn(50, 4).softmax(-1), torch.randint(4, (50,))
    expected = -log_loss(y, probs, labels=range(4))
    assert mean_log_prob(probs, y).item() == pytest.approx(expected)
    assert brier(probs, y).item() == pytest.approx(
        brier_score_loss(y, probs, labels=range(4), scale_by_half=False)
    )


def test_pairs():
    probs, y = torch.randn(5, 3).softmax(-1), torch.randint(3, (5,))
    pairs = torch.tensor([[0, 1], [2, 4]])
    table = independent_pairs(probs, pairs)
    expected = [math.log(probs[i, y[i]] * probs[j, y[j]]) for i, j in pairs.T.tolist()]
    value = pair_log_likelihood(table, y, pairs).item()
    assert value == pytest.approx(sum(expected) / 2)
    torch.testing.assert_close(table.sum((1, 2)), torch.ones(2))


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


def test_select_split_takes_both_mask_shapes():
    mask = torch.tensor([[True, False], [False, True]])
    data = Data(num_nodes=2, train_mask=mask, val_mask=mask.flip(1), test_mask=mask)
    assert select_split(data, 1).train_mask.tolist() == [False, True]
    flat = select_split(select_split(data, 0))
    assert flat.val_mask.tolist() == [False, True]
    with pytest.raises(ValueError, match=r"split must be in 0\.\.1, got 2"):
        select_split(data, 2)
    with pytest.raises(ValueError, match="split must be 0"):
        select_split(flat, 1)


def test_planetoid_names_what_it_knows():
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'karate'"):
        planetoid("karate")


def test_inner_edges():
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 0, 2, 1, 2, 0]])
    mask = torch.tensor([False, True, True])
    assert inner_edges(edge_index, mask).tolist() == [[1], [2]]
    for directed in ([[2], [1]], [[2, 1, 2], [1, 2, 1]]):
        assert inner_edges(torch.tensor(directed), mask).tolist() == [[1], [2]]


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


def test_consistency_by_hand():
    """Memory, sharpening and KL in NumPy's terms; the teacher is constant."""
    consistency = Consistency(2, 3, weight=2.0, temperature=0.5, memory=0.75, warmup=4)
    past = torch.zeros(2, 3)
    for call in range(1, 7):
        teacher, logits = torch.randn(2, 3).softmax(-1), torch.randn(2, 3, requires_grad=True)
        teacher.requires_grad_()
        past = 0.75 * past + 0.25 * teacher.detach()
        target = past**2 / (past**2).sum(-1, keepdim=True)
        probs = logits.softmax(-1)
        kl = (target * (target.log() - probs.log())).sum(-1).mean()
        penalty = consistency(probs, teacher)
        torch.testing.assert_close(penalty, 2 * min(1, call / 4) * kl)
        penalty.backward()
        assert teacher.grad is None
        assert logits.grad is not None


@pytest.mark.parametrize(
    ("teacher", "probs", "temperature", "expected"),
    [
        ([1.0, 0.0], [0.25, 0.75], 0.5, math.log(4)),
        ([0.2] * 3 + [0.1] * 4, [1 / 7] * 7, 0.02, math.log(7 / 3)),
    ],
)
def test_consistency_takes_certain_teachers(teacher, probs, temperature, expected):
    """And sharp temperatures."""
    consistency = Consistency(1, len(teacher), temperature=temperature, warmup=0)
    probs = torch.tensor([probs], requires_grad=True)
    penalty = consistency(probs, torch.tensor([teacher]))
    assert penalty.item() == pytest.approx(expected, rel=1e-4)
    penalty.backward()
    assert probs.grad.isfinite().all()


def test_consistency_refuses_bad_numbers():
    with pytest.raises(ValueError, match="temperature must be in"):
        Consistency(2, 3, temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher must have shape \(2, 3\)"):
        Consistency(2, 3)(torch.ones(3, 3), torch.ones(3, 3))


def small_problem():
    data = random_split(digits(), 0.1, 0.1, 0.5, seed=0)
    data.x = data.x.double()
    return data, Neighborhood(data.edge_index, data.num_nodes)


def test_consistency_is_a_factor_of_the_model_in_training_only():
    """The loss is the bound minus |tau| times the penalty, and the bound alone in evaluation."""
    import pyro.poutine as poutine

    hood, y = house(), torch.tensor([0, 1, 0, 1, 1])
    observed = torch.tensor([True, True, False, False, True])
    network = NMMNetwork(MLP([5, 2]), MLP([5, 4]), num_classes=2)
    program = AmortizedNMM(hood, network, consistency=Consistency(5, 2, warmup=0))
    x = torch.eye(5)
    trace = poutine.trace(program.model).get_trace(x, y=y, observed=observed)
    factor = trace.nodes["consistency"]["fn"].log_factor
    mixture = NeighborMixture(hood, *network(hood, x))
    other = Consistency(5, 2, warmup=0)
    other.past.copy_(program.consistency.past / (1 - 0.9))  # one call: the teacher itself
    again = other(mixture.marginals(), other.past.clone())
    torch.testing.assert_close(factor, -3 * again)
    labels = program.consistency.past[observed] / (1 - 0.9)
    torch.testing.assert_close(labels, torch.eye(2)[y[observed]])
    program.eval()
    assert "consistency" not in poutine.trace(program.model).get_trace(x, y=y, observed=observed)


@pytest.mark.slow
def test_training_learns():
    """A few epochs on the digits."""
    data, hood = small_problem()
    torch.manual_seed(0)
    network = NMMNetwork(gcn(64, 10), gcn(64, 64, attention=True), num_classes=10, floor=0.1)
    consistency, options = Consistency(data.num_nodes, 10), {"lr": 0.03, "patience": 60}
    _, curve = fit_nmm(network, data, hood, consistency=consistency, num_epochs=40, **options)
    assert max(curve)[0] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
def test_classifier_learns(agree):
    data, _ = small_problem()
    consistency = Consistency(data.num_nodes, 10) if agree else None
    torch.manual_seed(0)
    out, curve = fit_classifier(gcn(64, 10), data, lr=0.03, num_epochs=60, consistency=consistency,
                                criterion="likelihood")  # fmt: skip
    hit = (out.argmax(-1) == data.y)[data.test_mask]
    assert hit.double().mean() > 0.9
    assert max(curve)[0] < 0 < max(curve)[1]  # likelihood first
    with pytest.raises(ValueError, match="criterion must be 'accuracy' or 'likelihood'"):
        fit_classifier(gcn(64, 10), data, criterion="loss")


def test_empty_and_stacked_masks_are_refused():
    data, _ = small_problem()
    for mask in (torch.zeros(1797, dtype=torch.bool), data.val_mask[:, None].expand(-1, 3)):
        other = data.clone()
        other.val_mask = mask
        with pytest.raises(ValueError, match=r"data\.val_mask must be a boolean mask"):
            fit_classifier(gcn(64, 10), other, num_epochs=1)


def test_weight_decay_reaches_first_layers_only():
    from pyro_nmm.guides.amortized import _groups

    network = NMMNetwork(gcn(7, 3), gcn(7, 5, attention=True), num_classes=3)
    decayed, rest = _groups(network, [network.labels, network.attention], 0.1)
    assert decayed["weight_decay"] == 0.1
    assert sorted(p.numel() for p in decayed["params"]) == [5, 16, 35, 112]
    assert any(p is network.omega for p in rest["params"])
    assert "weight_decay" not in rest
    odd = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    odd.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    assert [p.numel() for p in _groups(odd, [odd], 0.1)[0]["params"]] == [6, 3]
    total = sum(p.numel() for p in network.parameters())
    assert sum(p.numel() for g in (decayed, rest) for p in g["params"]) == total
