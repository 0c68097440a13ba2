# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The latent feature model of graphs and its two guides."""

import copy

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Beta, Kumaraswamy
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam
from scipy.integrate import quad
from scipy.stats import kstest
from torch.distributions import kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected

from pyro_nmm import Neighborhood
from pyro_nmm.distributions.memberships import StickShares, stick_logits
from pyro_nmm.guides import DGLFRMGuide
from pyro_nmm.models import DGLFRM

NUM_NODES, NUM_FEATURES, NUM_COMMUNITIES = 6, 5, 3


def graph():
    edge_index = to_undirected(torch.tensor([[0, 1, 2, 2, 3, 4], [1, 2, 0, 3, 4, 5]]))
    x = torch.bernoulli(torch.full((NUM_NODES, NUM_FEATURES), 0.4))
    return edge_index, x, torch.tensor([[0, 1], [5, 4]])


def make(kind, num_features=0, **options):
    target = DGLFRM(NUM_NODES, NUM_COMMUNITIES, num_features, hidden=(4, 3), concentration=2.0)
    if kind == "identity":
        hood = Neighborhood(torch.zeros(2, 0, dtype=torch.long), NUM_NODES)
    else:
        hood = None if kind == "original" else Neighborhood(graph()[0], NUM_NODES)
    return DGLFRMGuide(target, NUM_FEATURES, hood, hidden=4, **options)


@pytest.mark.parametrize(("a", "b", "prior"), [(2.0, 0.7, 3.0), (0.6, 2.5, 0.8), (4.0, 1.3, 5.0)])
def test_divergence_of_sticks(a, b, prior):
    p, q = Kumaraswamy(torch.tensor(a), torch.tensor(b)), StickShares(torch.tensor(prior), 1.0)

    def integrand(v):
        v = torch.tensor(v)
        log_p = p.log_prob(v)
        return (log_p.exp() * (log_p - Beta(prior, 1.0).log_prob(v))).item()

    v = torch.tensor([0.1, 0.9])
    assert torch.allclose(q.log_prob(v), Beta(prior, 1.0).log_prob(v))
    assert kl_divergence(p, q).item() == pytest.approx(quad(integrand, 0, 1)[0], abs=1e-6)


def test_stick_logits():
    v = torch.rand(4, 7)
    assert torch.allclose(stick_logits(v).sigmoid(), v.cumprod(-1))
    for dtype in (torch.float, torch.double):
        ends = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.5]], dtype=dtype, requires_grad=True)
        odds = stick_logits(ends)
        assert odds.isfinite().all()
        assert torch.autograd.grad(odds.sum(), ends)[0].isfinite().all()


def test_prior_graphs():
    """More concentrated sticks leave more memberships; features come along."""
    sizes = []
    for concentration in (1.0, 30.0):
        pyro.clear_param_store()
        model = DGLFRM(20, 8, 5, concentration=concentration)
        trace = poutine.trace(model.model).get_trace()
        assert trace.nodes["x"]["value"].shape == (20, 5)
        assert trace.nodes["edges"]["value"].max() < 20
        sizes.append((trace.nodes["s"]["value"] > 0).sum().item())
    assert sizes[0] < sizes[1]


def test_attention_to_oneself_is_the_original():
    """Every log-density agrees, at the same draws."""
    edge_index, x, held_out = graph()
    original, identity = make("original"), make("identity")
    shared = original.encoder.state_dict()
    identity.encoder.load_state_dict(shared, strict=False)
    identity.target.load_state_dict(original.target.state_dict())
    original.eval(), identity.eval()
    draw = poutine.trace(original.guide).get_trace(edge_index, x, held_out)
    for mine, other in ((original.guide, identity.guide), (original.model, identity.model)):
        values = []
        for program in (mine, other):
            pyro.clear_param_store()
            trace = poutine.trace(poutine.replay(program, draw))
            values.append(trace.get_trace(edge_index, x, held_out).log_prob_sum())
        assert torch.allclose(*values)


def gradient(pair, elbo, num_steps, names):
    """
    Mean and standard error of derivatives, towards some of the encoder's parameters and the
    decoder's last ones.
    """
    data, found = graph(), []
    parameters = dict(pair.encoder.named_parameters()) | {"bias": pair.target.decoder[2].bias}
    for _ in range(num_steps):
        pair.zero_grad()
        elbo.loss_and_grads(pair.model, pair.guide, *data)
        found.append(torch.cat([parameters[name].grad.flatten() for name in [*names, "bias"]]))
    found = torch.stack(found)
    return found.mean(0), found.std(0) / num_steps**0.5


@pytest.mark.slow
def test_estimators_agree():
    """
    On the whole model, with the pathwise one, which is tested by enumeration: ``"local"``, and a
    site ``c`` under ``TraceGraph_ELBO``, for the encoder and the decoder.
    """
    pyro.enable_validation(False)
    names = ["gamma", "omega", "heads.3.lin.weight", "log_sticks"]
    state, results = None, []
    for options in ({"estimator": "pathwise"}, {"num_columns": 3}, {"marginal": False}):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = make("nmm", NUM_FEATURES, width=2, **options)
        state = state or pair.state_dict()
        pair.load_state_dict(state, strict=False)  # a site c needs an order
        pair.eval()
        elbo = TraceMeanField_ELBO() if options.get("marginal", True) else TraceGraph_ELBO()
        results.append(gradient(pair, elbo, 120, names))
    for mean, error in results[1:]:
        z = (mean - results[0][0]) / (error.square() + results[0][1].square()).sqrt()
        assert z.abs().max() < 4.5  # about 70 numbers each
    mean, error = results[1]
    assert (mean[:2].abs() / error[:2]).max() > 2.5  # there is something to estimate
    assert (mean[-3:].abs() / error[-3:]).max() > 4


@pytest.mark.slow
def test_local_credit_has_the_entropy():
    """Where the decoder ignores memberships, the gain is that of their prior and entropy."""
    pyro.enable_validation(False)
    names, state, results = ["gamma", "omega", "heads.3.lin.weight"], None, []
    for options in ({"estimator": "pathwise"}, {"num_columns": 3}):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = make("nmm", NUM_FEATURES, width=2, **options)
        state = state or pair.state_dict()
        pair.load_state_dict(state)
        torch.nn.init.zeros_(pair.target.decoder[2].weight)
        results.append(gradient(pair.eval(), TraceMeanField_ELBO(), 150, names))
    (exact, error), (mean, other_error) = results
    z = (mean - exact) / (error.square() + other_error.square()).sqrt()
    # Ten correlated numbers, without the bias, which has no gradient: 2 here, 40 at a wrong sign.
    assert z[:10].square().sum() < 25


@pytest.mark.slow
def test_bounds_agree():
    """Every ELBO of Pyro's has the same mean, with choices summed out and with a site c."""
    pyro.enable_validation(False)
    losses, data = [], graph()
    for marginal, elbo in (
        (True, TraceMeanField_ELBO()), (True, Trace_ELBO()), (False, TraceGraph_ELBO())
    ):  # fmt: skip
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = make("nmm", NUM_FEATURES, marginal=marginal).eval()
        with torch.no_grad():
            draws = torch.tensor([elbo.loss(pair.model, pair.guide, *data) for _ in range(40)])
        losses.append((draws.mean(), draws.var() / len(draws)))
    for mean, variance in losses[1:]:
        assert abs(mean - losses[0][0]) < 4 * (variance + losses[0][1]).sqrt()


def test_objective():
    """The authors' loss, written out, at given v, s and r: times N^2, without its divergences."""
    edge_index, x, held_out = graph()
    pair, size = make("original", NUM_FEATURES), NUM_NODES
    draw = poutine.trace(pair.guide).get_trace(edge_index, x, held_out)
    model = poutine.trace(poutine.replay(pair.model, draw)).get_trace(edge_index, x, held_out)
    model.compute_log_prob()
    members = draw.nodes["s"]["value"].sigmoid() * draw.nodes["r"]["value"]
    factors = pair.target.decoder(members)
    labels, mask = torch.eye(size), torch.ones(size, size)
    labels[tuple(edge_index)] = 1
    for i, j in held_out.T:
        mask[i, j] = mask[j, i] = 0  # the authors' code hides (i, j) alone
    assert not (labels * (1 - mask)).any()
    weight = (size**2 - labels.sum()) / labels.sum()
    norm = size**2 / (2 * (size**2 - labels.sum()))
    cross = binary_cross_entropy_with_logits(
        factors @ factors.T, labels, pos_weight=weight, reduction="none"
    )
    loss = norm * (cross * mask).sum() / (size**2 - held_out.shape[1])
    ones = x.sum()
    features = binary_cross_entropy_with_logits(
        pair.target.features(members), x, pos_weight=(x.numel() - ones) / ones
    )
    found = model.nodes["edges"]["log_prob_sum"], model.nodes["x"]["log_prob_sum"]
    assert torch.allclose(torch.stack(found), -(size**2) * torch.stack([loss, features]))


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [True, False])
def test_swaps(balanced):
    """Against the density of the whole program, one node at a time; on average with few columns."""
    edge_index, x, held_out = graph()
    target = DGLFRM(NUM_NODES, NUM_COMMUNITIES, NUM_FEATURES, balanced=balanced)
    v, s, others = torch.rand(6, 3), torch.randn(6, 3), torch.randn(6, 3)
    r = torch.randn(6, 3)

    def log_density(s):
        program = poutine.condition(target.given, {"s": s, "r": r})
        return poutine.trace(program).get_trace(v, edge_index, x, held_out).log_prob_sum()

    expected = []
    for node in range(NUM_NODES):
        swapped = s.clone()
        swapped[node] = others[node]
        expected.append(log_density(swapped) - log_density(s))
    expected, inputs = torch.stack(expected), (v, s, r, others, edge_index)
    for features in (x, x.to_sparse_csr()):
        assert torch.allclose(target.swaps(*inputs, features, held_out), expected)
    draws = torch.stack([target.swaps(*inputs, x, held_out, 2) for _ in range(150)])
    z = (draws.mean(0) - expected) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 4


def test_single_precision():
    """Extreme sticks and memberships stay finite, and so do their gradients."""
    torch.set_default_dtype(torch.float)
    for a, b in ((0.3, 5.0), (40.0, 0.3), (10.0, 1.0), (100.0, 100.0)):
        a, b = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
        sticks = StickShares(a, b).expand((2000, 100))
        v = sticks.rsample()
        total = stick_logits(v).sum() + sticks.log_prob(v).sum()
        assert total.isfinite()
        assert all(grad.isfinite() for grad in torch.autograd.grad(total, [a, b]))
    target = DGLFRM(4, 3, concentration=120.0)
    assert DGLFRMGuide(target, 2).encoder.sticks(120.0)[:, 0].tolist() == pytest.approx([120.0, 1])


def test_shares_of_sticks():
    a, b = torch.tensor([0.5, 2.0, 12.0]), torch.tensor([2.0, 0.4, 1.0])
    v = StickShares(a, b).sample((5000,))
    for column, (p, q) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        cdf = lambda x, p=p, q=q: 1 - (1 - x**p) ** q  # noqa: E731
        assert kstest(v[:, column].numpy(), cdf).pvalue > 1e-3
    values = 0.2 + 0.7 * torch.rand(7, 3)  # at .03 ** 12 the other one rounds to zero
    assert torch.allclose(StickShares(a, b).log_prob(values), Kumaraswamy(a, b).log_prob(values))


def test_held_out_pairs_are_not_looked_at():
    """In the model they may be edges or not: value and gradients are the same bit for bit."""
    edge_index, held_out = graph()[0], torch.tensor([[0, 5, 1], [3, 2, 4]])
    marked = to_undirected(torch.cat([edge_index, held_out], 1))
    target = DGLFRM(NUM_NODES, NUM_COMMUNITIES)
    results = {}
    for name, edges, hidden in (("plain", edge_index, held_out), ("marked", marked, held_out),
                                ("seen", marked, None)):  # fmt: skip
        pyro.set_rng_seed(0)
        loss = poutine.trace(target.model).get_trace(edges, None, hidden).log_prob_sum()
        results[name] = [loss, *torch.autograd.grad(loss, list(target.parameters()))]
    same, seen = (
        [torch.equal(a, b) for a, b in zip(results["plain"], results[name], strict=True)]
        for name in ("marked", "seen")
    )
    assert all(same)
    assert not any(seen)


def test_encoder():
    """Against PyG's own graph convolutions."""
    (edge_index, x, _), encoder = graph(), make("original").encoder.eval()
    v = torch.rand(NUM_NODES, NUM_COMMUNITIES)
    outputs, _ = encoder(None, v, edge_index, x.to_sparse_csr())
    layers = [encoder.first.network, encoder.heads[2]]
    for layer in layers:
        layer.normalize = layer.add_self_loops = True
    hidden = torch.nn.functional.leaky_relu(layers[0](x, edge_index), 0.2)
    assert torch.allclose(outputs.log_odds, layers[1](hidden, edge_index) + stick_logits(v))


def test_attention_of_its_own():
    """What attention follows from, the other outputs do not, nor the other way round."""
    edge_index, x, _ = graph()
    pair = make("nmm", own_attention=True)
    encoder, v = pair.encoder.eval(), torch.rand(NUM_NODES, NUM_COMMUNITIES)
    outputs, logits = encoder(pair.hood, v, edge_index, x)
    layers = [encoder.first.network.lin.weight, encoder.attention.network.lin.weight]
    for output, used in ((logits, [False, True]), (outputs.log_odds, [True, False])):
        found = torch.autograd.grad(output.square().sum(), layers, allow_unused=True)
        assert [g is not None and bool(g.abs().sum() > 0) for g in found] == used
    encoder.attention.load_state_dict(encoder.first.state_dict())
    shared = make("nmm").encoder.eval()
    shared.load_state_dict(encoder.state_dict(), strict=False)
    pairs = (network(pair.hood, v, edge_index, x) for network in (encoder, shared))
    for ours, theirs in zip(*((*outputs, logits) for outputs, logits in pairs), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert make("original", own_attention=True).encoder.attention is None


def test_another_graph_is_another_graph():
    """Nothing of the first call's graph is kept for the second."""
    edge_index, x, _ = graph()
    pair, pairs = make("original"), torch.tensor([[0, 1], [3, 5]])
    found = []
    for edges in (edge_index, edge_index[:, :2], edge_index):
        pyro.set_rng_seed(0)
        found.append(pair.link_logits(pairs, edges, x))
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])
    edge_index[:] = edge_index[:, [2, 3] * (edge_index.shape[1] // 2)]  # in place
    pyro.set_rng_seed(0)
    assert not torch.allclose(pair.link_logits(pairs, edge_index, x), found[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["original", "nmm"])
def test_learns(kind):
    """Links of the karate club come out on top of other pairs."""
    data = KarateClub()[0]
    x = data.x.to(torch.get_default_dtype())
    target = DGLFRM(34, 6, hidden=(8, 4), concentration=3.0)
    hood = None if kind == "original" else Neighborhood(data.edge_index, 34)
    pair = DGLFRMGuide(target, 34, hood, hidden=8, dropout=0.0)
    svi = SVI(pair.model, pair.guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    losses = [svi.step(data.edge_index, x) for _ in range(200)]
    assert sum(losses[-20:]) < sum(losses[:20])
    pairs = torch.combinations(torch.arange(34)).T
    linked = torch.zeros(34, 34, dtype=torch.bool)
    linked[tuple(data.edge_index)] = True
    logits = pair.link_logits(pairs, data.edge_index, x)
    linked = linked[tuple(pairs)]
    better = (logits[linked][:, None] > logits[~linked]).double().mean()
    assert better > 0.7
    assert pair.training
    copied = copy.deepcopy(pair)  # to keep the best one, say
    assert torch.equal(copied.encoder.log_sticks, pair.encoder.log_sticks)


def features(change, **options):
    edge_index, x, _ = graph()
    DGLFRM(NUM_NODES, 3, **{"num_features": NUM_FEATURES} | options).model(edge_index, change(x))


REFUSED = [
    (lambda: DGLFRM(5, 3, concentration=0.0), "concentration must be positive"),
    (lambda: DGLFRMGuide(DGLFRM(5, 3), 4, Neighborhood(graph()[0], 6)), "hood must have the 5 nod"),
    (lambda: make("nmm", estimator="locale"), "estimator must be one of"),
    (lambda: make("nmm", num_columns=0), "num_columns must be an integer of at least 1"),
    (lambda: make("nmm", temperature=0.0), "temperature must be positive"),
    (lambda: features(lambda x: x[:, :4]), r"x must have shape \(6, 5\), .*, got \(6, 4\)"),
    (lambda: features(lambda x: x, num_features=0), r"x must have shape \(6, 0\)"),
    (lambda: features(lambda x: x / 3), "x must hold zeros and ones"),
    (lambda: make("nmm").link_logits(*graph()[:1], *graph()[:2], num_samples=0), "num_samples m"),
    (lambda: make("original").guide(graph()[0], graph()[1], graph()[0][:, :1]),
     "edge_index must not hold pairs of held_out"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_second_guides_and_vectorized_particles_are_refused():
    edge_index, x, _ = graph()
    first, second = make("original"), make("original")
    first.guide(edge_index, x)
    with pytest.raises(ValueError, match="already holds another network named 'dglfrm_guide'"):
        second.guide(edge_index, x)
    pyro.clear_param_store()
    pair = make("nmm")
    vectorized = TraceMeanField_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=0)
    with pytest.raises(NotImplementedError, match="vectorize_particles=False"):
        vectorized.loss_and_grads(pair.model, pair.guide, *graph())
