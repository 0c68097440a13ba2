# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The latent feature model of graphs and its two guides."""

import itertools
import math

import pyro
import pytest
import torch
from documents import load
from pyro import poutine
from pyro.distributions import Beta, Kumaraswamy
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.optim import Adam
from scipy.integrate import quad
from scipy.stats import kstest
from torch.distributions import kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected

from pyro_nmm import MembershipMixture, NeighborChoice, Neighborhood
from pyro_nmm.distributions.memberships import relaxed_logits
from pyro_nmm.guides import DGLFRMGuide
from pyro_nmm.models import DGLFRM, dglfrm
from pyro_nmm.models.dglfrm import InnerProductGraph, StickShares, stick_logits
from pyro_nmm.models.networks import attention_scores

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
    return DGLFRMGuide(target, NUM_FEATURES, hood, **{"hidden": (4, 16)} | options)


@pytest.fixture(params=[2**20, 30])
def blocks(request, monkeypatch):
    """All pairs at once, and in blocks of a few rows."""
    monkeypatch.setattr(dglfrm, "BLOCK", request.param)


def vectors(batch=()):
    factors = torch.randn(*batch, 11, 3, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 1, 5, 9], [1, 2, 3, 4, 5, 9, 10]])
    held_out = torch.tensor([[5, 6, 2, 10, 6], [1, 0, 4, 9, 0]])  # two of them are edges
    return factors, to_undirected(edges), held_out


def dense(factors, edge_index, weight, held_out):
    """The density of a graph by the matrix of all pairs."""
    size, x = factors.shape[-2], factors @ factors.mT
    edges = torch.zeros(size, size, dtype=torch.bool)
    edges[tuple(edge_index)] = True
    log_prob = torch.where(edges, weight * logsigmoid(x), logsigmoid(-x))
    mask = torch.ones(size, size).triu(1)
    for i, j in held_out.T:
        mask[min(i, j), max(i, j)] = 0
    own = logsigmoid(x.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return (log_prob * mask).sum((-2, -1)) + 0.5 * weight * own


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_density_of_graphs(blocks, batch):
    """And its gradient; repetitions, loops, and small integers change nothing."""
    factors, edge_index, held_out = vectors(batch)
    loops = torch.tensor([[3, 4], [3, 4]])
    untidy = torch.cat([edge_index, loops, edge_index[:, :4]], 1).int()
    graph = InnerProductGraph(factors, 4.0, torch.cat([held_out.flip(0), loops, held_out], 1).int())
    expected, log_prob = dense(factors, edge_index, 4.0, held_out), graph.log_prob(untidy)
    assert torch.allclose(log_prob, expected, rtol=1e-12)
    expanded = graph.expand([5, *batch]).log_prob(edge_index)
    torch.testing.assert_close(expanded, log_prob.expand(5, *batch), rtol=1e-12, atol=0)
    weights = torch.randn(log_prob.shape)
    gradients = [torch.autograd.grad((v * weights).sum(), factors)[0] for v in (log_prob, expected)]
    assert torch.allclose(*gradients, rtol=1e-10)


def test_draws_of_graphs(blocks):
    """2,000 graphs notice probabilities that are all off by 5 %."""
    factors, _, _ = vectors()
    graph, num_draws = InnerProductGraph(factors.detach(), 1.0), 2000
    counts = torch.zeros(11, 11)
    for _ in range(num_draws):
        counts[tuple(graph.sample())] += 1
    assert torch.equal(counts, counts.T)
    assert not counts.diagonal().any()
    probs = (factors @ factors.T).sigmoid().detach()
    z = (counts / num_draws - probs) / (probs * (1 - probs) / num_draws).sqrt()
    assert z.triu(1).abs().max() < 4.5  # 55 pairs
    assert z.triu(1).square().sum() < 55 + 4 * 110**0.5


def test_single_precision_of_many_pairs():
    factors, edge_index = 0.3 * torch.randn(700, 16), torch.tensor([[0, 1], [1, 0]])
    values = [InnerProductGraph(f, 1.0).log_prob(edge_index) for f in (factors, factors.float())]
    assert values[1].dtype == torch.float
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-6)


@pytest.mark.parametrize(("a", "b", "prior"), [(2.0, 0.7, 3.0), (0.6, 2.5, 0.8), (4.0, 1.3, 5.0)])
def test_divergence_of_sticks(a, b, prior):
    p, q = StickShares(torch.tensor(a), torch.tensor(b)), StickShares(torch.tensor(prior), 1.0)

    def integrand(v):
        v = torch.tensor(v)
        log_p = p.log_prob(v)
        return (log_p.exp() * (log_p - Beta(prior, 1.0).log_prob(v))).item()

    v = torch.tensor([0.1, 0.9])
    assert torch.allclose(q.log_prob(v), Beta(prior, 1.0).log_prob(v))
    assert kl_divergence(p, q).item() == pytest.approx(quad(integrand, 0, 1)[0], abs=1e-6)


def test_shares_of_sticks():
    a, b = torch.tensor([0.5, 2.0, 12.0]), torch.tensor([2.0, 0.4, 1.0])
    v = StickShares(a, b).sample((5000,))
    for column, (p, q) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        cdf = lambda x, p=p, q=q: 1 - (1 - x**p) ** q  # noqa: E731
        assert kstest(v[:, column].numpy(), cdf).pvalue > 1e-3
    values = 0.2 + 0.7 * torch.rand(7, 3)  # at .03 ** 12 the other one rounds to zero
    assert torch.allclose(StickShares(a, b).log_prob(values), Kumaraswamy(a, b).log_prob(values))
    assert torch.allclose(stick_logits(values).sigmoid(), values.cumprod(-1))


def test_extreme_sticks():
    """They stay finite in single precision, and so do their gradients."""
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
    identity.encoder.load_state_dict(original.encoder.state_dict(), strict=False)
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
def test_swaps():
    """Against the density of the whole program, one node at a time; on average with few columns."""
    edge_index, x, held_out = graph()
    target = DGLFRM(NUM_NODES, NUM_COMMUNITIES, NUM_FEATURES)
    v, s, others, r = torch.rand(6, 3), *torch.randn(3, 6, 3)

    def log_density(s):
        program = poutine.condition(target.model, {"v": v, "s": s, "r": r})
        return poutine.trace(program).get_trace(edge_index, x, held_out).log_prob_sum()

    expected = []
    for node in range(NUM_NODES):
        swapped = s.clone()
        swapped[node] = others[node]
        expected.append(log_density(swapped) - log_density(s))
    expected, draws = torch.stack(expected), (v, s, r, others)
    for features in (x, x.to_sparse_csr()):
        assert torch.allclose(target.swaps(draws, (edge_index, features, held_out), 6), expected)
    data = edge_index, x, held_out
    found = torch.stack([target.swaps(draws, data, 2) for _ in range(300)])
    z = (found.mean(0) - expected) / (found.std(0) / len(found) ** 0.5)
    assert z.abs().max() < 4


def enumerated(pair, edge_index, x, held_out):
    """The loss at drawn sticks and strengths, with the choices of all nodes summed out."""
    target, hood = pair.target, pair.hood
    sticks = StickShares(*pair.encoder.sticks(target.concentration)).expand(target.shape)
    v = sticks.rsample()
    mean, log_scale, odds, vectors = pair.encoder(edge_index, x)
    logits = attention_scores(hood, vectors, pair.encoder.omega.square(), pair.encoder.gamma)
    family = MembershipMixture(hood, odds + stick_logits(v), logits)
    choices = torch.tensor([*itertools.product(*hood.source.split(hood.ptr.diff().tolist()))])
    weight = NeighborChoice(hood, logits).log_prob(choices).exp()
    s = relaxed_logits(family.log_odds[choices], 1.0).rsample()
    normal = pyro.distributions.Normal(mean, log_scale.exp())
    r = normal.rsample()
    program = poutine.condition(target.model, {"v": v, "s": s, "r": r.expand_as(s)})
    trace = poutine.trace(program).get_trace(edge_index, x, held_out)
    trace.compute_log_prob(lambda name, site: name != "r")
    log_p = sum(trace.nodes[name]["log_prob"] for name in ("s", "x", "edges"))
    log_q = family.log_prob(s)
    prior = StickShares(torch.tensor(target.concentration), torch.ones(()))
    standard = pyro.distributions.Normal(0.0, 1.0)
    divergences = kl_divergence(sticks, prior).sum() + kl_divergence(normal, standard).sum()
    return divergences + (weight * (log_q - log_p)).sum()


def moments(pair, loss, num_steps):
    """Mean and standard error of derivatives, and of the loss, over steps."""
    names, found = ["gamma", "omega", "heads.3.lin.weight", "log_sticks"], []
    parameters = dict(pair.encoder.named_parameters()) | {"bias": pair.target.decoder[2].bias}
    for _ in range(num_steps):
        pair.zero_grad()
        value = loss()
        grads = [parameters[name].grad.flatten() for name in [*names, "bias"]]
        found.append(torch.cat([torch.tensor([value]), *grads]))
    found = torch.stack(found)
    return found.mean(0), found.std(0) / num_steps**0.5


@pytest.mark.slow
@pytest.mark.parametrize("decoded", [True, False])
def test_gradient_by_enumeration(decoded, monkeypatch):
    """Of the local estimator with few columns, for the encoder and the decoder. If the decoder
    ignores memberships, the gain is that of their prior and entropy."""
    pyro.enable_validation(False)
    monkeypatch.setattr("pyro_nmm.guides.dglfrm.NUM_COLUMNS", 3)
    pair, data, elbo = (
        make("nmm", NUM_FEATURES, hidden=(4, 2)).eval(),
        graph(),
        TraceMeanField_ELBO(),
    )
    if not decoded:
        torch.nn.init.zeros_(pair.target.decoder[2].weight)

    def summed():
        loss = enumerated(pair, *data)
        loss.backward()
        return loss.item()

    exact, exact_error = moments(pair, summed, 30)
    mean, error = moments(pair, lambda: elbo.loss_and_grads(pair.model, pair.guide, *data), 300)
    z = (mean - exact) / (error.square() + exact_error.square() + 1e-18).sqrt()
    assert z.abs().max() < 4.5  # about 20 numbers
    if decoded:  # there is something to estimate
        assert (mean[1:3].abs() / error[1:3]).max() > 2.5
        assert (mean[-3:].abs() / error[-3:]).max() > 4


def test_credit_of_memberships():
    """If the decoder ignores memberships, each row's attention has the derivative of E[log p(s)]
    and the entropy, by draws from each neighbour."""
    torch.manual_seed(0)
    pair, data = make("nmm"), (graph()[0], None, None)
    torch.nn.init.zeros_(pair.target.decoder[2].weight)
    hood, v, odds = pair.hood, torch.rand(6, 3), 2 * torch.randn(6, 3)
    logits = torch.randn(hood.num_edges, requires_grad=True)
    family = MembershipMixture(hood, odds, logits, estimator="detached")
    draws, exact = relaxed_logits(odds, 1.0).sample((10_000,)), []
    for i in range(6):
        row = slice(hood.ptr[i], hood.ptr[i + 1])
        s, weight = draws[:, hood.source[row]], logits[row].detach().softmax(0)
        each = relaxed_logits(odds[hood.source[row]], 1.0).log_prob(s[:, :, None]).sum(-1)
        prior = relaxed_logits(stick_logits(v[i]), dglfrm.TEMPERATURE).log_prob(s).sum(-1)
        gain = (prior - (each + weight.log()).logsumexp(-1)).mean(0)
        exact.append(weight * (gain - weight @ gain))
    found = []
    for _ in range(40):
        credits = [pair._credit(family, (v, family.sample(), v), data) for _ in range(20)]
        found.append(torch.autograd.grad(sum(credits), logits)[0] / 20)
    found = torch.stack(found)
    error = (found.std(0) / 40**0.5).square() + 0.02**2  # and of the other draws
    assert ((found.mean(0) - torch.cat(exact)).abs() < 4 * error.sqrt()).all()


def test_dropout_of_features():
    """Dense, sparse and in coordinates, zeros stay zeros and the mean is kept."""
    encoder = make("original").encoder
    x = torch.bernoulli(torch.full((2000, NUM_FEATURES), 0.5))
    for features in (x, x.to_sparse_csr(), x.to_sparse_coo()):
        found = encoder._thinned(features).to_dense()
        assert not found[x == 0].any()
        assert set(found.unique().tolist()) == {0.0, 2.0}
        assert found.mean().item() == pytest.approx(x.mean().item(), rel=0.05)


@pytest.mark.slow
def test_learns():
    """Links of the karate club come out on top of other pairs."""
    data = KarateClub()[0]
    x = data.x.to(torch.get_default_dtype())
    target = DGLFRM(34, 6, hidden=(8, 4), concentration=3.0)
    hood = Neighborhood(data.edge_index, 34)
    pair = DGLFRMGuide(target, 34, hood, hidden=(8, 16), dropout=0.0)
    svi = SVI(pair.model, pair.guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    losses = [svi.step(data.edge_index, x) for _ in range(200)]
    assert sum(losses[-20:]) < sum(losses[:20])
    pairs = torch.combinations(torch.arange(34)).T
    linked = torch.zeros(34, 34, dtype=torch.bool)
    linked[tuple(data.edge_index)] = True
    logits, linked = pair.link_logits(pairs, data.edge_index, x), linked[tuple(pairs)]
    assert (logits[linked][:, None] > logits[~linked]).double().mean() > 0.7
    assert pair.training


@pytest.mark.parametrize("guide", ["original", "nmm"])
def test_fits_do_not_see_held_out_links(guide):
    """Held-out links may be links or not, and come in any order: training of the example ends with
    the same parameters, bit for bit. If fewer pairs are held out they change."""
    torch.set_default_dtype(torch.float)
    example, results = load("examples/link_prediction.py"), []
    args = example.parser().parse_args(["--num-communities", "5", "--hidden", "8"])
    train, val, test = example.split_links(example.load(args)[0], 0)
    held_out = torch.cat([val.edge_label_index, test.edge_label_index], 1)
    for hidden in (held_out, held_out.flip(0, 1), held_out[:, 1:]):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        pair = example.build(args, train, guide)
        losses = example.fit_links(pair, train.edge_index, train.x, hidden, num_steps=5)
        results.append((losses, list(pair.state_dict().values())))
    assert 0 <= example.evaluate(pair, train, test)["AP"] <= 100
    assert results[0][0] == results[1][0] != results[2][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def features(change, **options):
    edge_index, x, _ = graph()
    DGLFRM(NUM_NODES, 3, **{"num_features": NUM_FEATURES} | options).model(edge_index, change(x))


REFUSED = [
    (lambda: DGLFRM(5, 3, concentration=0.0), "concentration must be positive"),
    (lambda: DGLFRM(NUM_NODES, 3).model(graph()[0][:, :0]), "some but not all pairs"),
    (lambda: DGLFRMGuide(DGLFRM(5, 3), 4, Neighborhood(graph()[0], 6)), "hood must have the 5 nod"),
    (lambda: make("nmm", estimator="locale"), "estimator must be"),
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


def test_prior_of_the_memberships():
    """The density of the relaxed memberships by hand, at the authors' temperature of one half."""
    trace = poutine.trace(DGLFRM(5, 3).model).get_trace()
    trace.compute_log_prob()
    v, s = (trace.nodes[name]["value"] for name in "vs")
    odds = torch.special.logit(v.cumprod(-1)) - s / 2
    expected = math.log(0.5) + odds - 2 * torch.nn.functional.softplus(odds)
    torch.testing.assert_close(trace.nodes["s"]["log_prob_sum"], expected.sum())
