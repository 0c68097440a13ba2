# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What link prediction is compared with, and what is said of it."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_dense_adj

from pyro_nmm.datasets.links import link_split
from pyro_nmm.sparse import identity


@pytest.fixture(scope="module")
def rivals():
    return import_module("benchmarks.links.rivals")


@pytest.fixture(scope="module")
def tables():
    return import_module("benchmarks.links.rivals_tables")


def planted():
    """Four groups of 20, whose nodes are linked only with one another."""
    torch.manual_seed(0)
    group = torch.arange(80) // 20
    low, high = torch.triu_indices(80, 80, 1)
    kept = (group[low] == group[high]) & (torch.rand(len(low)) < 0.4)
    return link_split(torch.stack([low[kept], high[kept]]), 80, seed=0)


@pytest.mark.parametrize("rival", ["vgae", "sage"])
def test_planted_links_are_found(rivals, rival):
    torch.set_default_dtype(torch.float)
    split, torch_seed = planted(), 1
    torch.manual_seed(torch_seed)
    make = {"vgae": rivals.LinksVGAE, "sage": rivals.LinksSAGE}[rival]
    network, x = make(80, hidden=16, dropout=0.1), identity(80)
    found = rivals.fit(network, x, split, num_steps=150, every=10, parts=["test"])
    # Of the false pairs one in four is within a group, where a link cannot be told from none.
    assert found["test"]["AUC"] > 80
    assert found["val"]["AP"] > 80
    assert found["step"] % 10 == 0
    network.eval()
    pairs = split.test
    logits = network.logits(pairs, x, split.train)
    assert logits.shape == (pairs.shape[1],)
    torch.testing.assert_close(logits, network.logits(pairs.flip(0), x, split.train))


def test_vgae_has_its_authors_loss(rivals):
    """In expectation over the pairs that are drawn, against all pairs of a small graph."""
    torch.set_default_dtype(torch.float)
    torch.manual_seed(0)
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5], [1, 0, 2, 1, 3, 2, 5, 4]])
    network, x = rivals.LinksVGAE(6, hidden=8, width=3).eval(), identity(6)
    with torch.no_grad():
        drawn = torch.stack([network.loss(x, edge_index) for _ in range(4000)])
        z = network.auto_encoder.encode(x, edge_index)
        graph = to_dense_adj(edge_index)[0]
        free = 36 - graph.sum()
        cost = F.binary_cross_entropy_with_logits(
            z @ z.T, graph + torch.eye(6), pos_weight=free / graph.sum()
        )
        mean, log_scale = network.auto_encoder.encoder(x, edge_index)
        normal = torch.distributions.Normal(mean, log_scale.exp())
        unit = torch.distributions.Normal(0.0, 1.0)
        divergence = torch.distributions.kl_divergence(normal, unit).sum() / 36
    exact = cost * 36 / (2 * free) + divergence
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / len(drawn) ** 0.5


def test_graphsage_is_that_of_its_equations(rivals):
    """Means over neighbours beside the node itself, then a perceptron on products."""
    torch.set_default_dtype(torch.float)
    torch.manual_seed(0)
    edge_index = KarateClub()[0].edge_index
    network, x = rivals.LinksSAGE(34, hidden=8, layers=2).eval(), torch.rand(34, 34)
    graph = to_dense_adj(edge_index)[0]
    h = network.first.network(x)
    for number, conv in enumerate(network.network.convs):
        near = graph @ h / graph.sum(1, keepdim=True)
        h = conv.lin_l(near) + conv.lin_r(h)
        h = h if number else h.relu()
    pairs = torch.randint(34, (2, 10))
    expected = network.score(h[pairs[0]] * h[pairs[1]])[:, 0]
    torch.testing.assert_close(network.logits(pairs, x, edge_index), expected)


def test_graphsage_does_not_see_what_it_is_asked(rivals, monkeypatch):
    torch.set_default_dtype(torch.float)
    split, seen = planted(), []
    network = rivals.LinksSAGE(80, hidden=8)
    logits = network.logits

    def spied(pairs, x, edge_index):
        seen.append((pairs, edge_index))
        return logits(pairs, x, edge_index)

    monkeypatch.setattr(network, "logits", spied)
    network.loss(identity(80), split.train)
    (pairs, edges), known = seen[0], {tuple(p) for p in split.train.T.tolist()}
    asked, false = ({tuple(p) for p in part.T.tolist()} for part in pairs.chunk(2, 1))
    shown = {tuple(p) for p in edges.T.tolist()}
    assert not asked & shown
    assert asked | shown <= known
    assert len(shown) + 2 * len(asked) == len(known)
    assert not false & known


@pytest.mark.parametrize("make", ["LinksVGAE", "LinksSAGE"])
def test_links_that_cannot_be(rivals, make):
    torch.set_default_dtype(torch.float)
    network = getattr(rivals, make)(3)
    with pytest.raises(ValueError, match="edge_index must hold two links"):
        network.loss(identity(3), torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match="x must have a row for each node"):
        network.loss(identity(3), torch.tensor([[0, 1, 1, 7], [1, 0, 7, 1]]))


def test_settings_follow_validation_alone(rivals):
    row = {"task": "search", "dataset": "cora", "guide": "sage"}
    rows = [
        row | {"trial": trial, "seed": seed, "settings": {"layers": trial}, "val": {"AP": value}}
        for trial, values in enumerate([(80.0, 90.0), (84.0, 88.0)])
        for seed, value in enumerate(values)
    ]  # fmt: skip
    rows += [rows[0] | {"guide": "vgae", "trial": 9, "val": {"AP": 99.0}}]
    assert rivals.chosen(rows, "pubmed", "sage") == {"layers": 1}
    with pytest.raises(ValueError, match="search of nips12 sage has not been run"):
        rivals.chosen(rows, "nips12", "sage")


def measured(guide, gain, **more):
    row = {"task": "compare", "dataset": "cora", "guide": guide}
    tests = [{"AP": 90 + gain + s / (2 + gain), "AUC": 80 + gain} for s in range(4)]
    return [row | more | {"seed": s, "test": test} for s, test in enumerate(tests)]


def test_rivals_are_paired(tables):
    """A rival that is ahead is said to be; the sentence follows when it is not."""
    ours, other = measured("nmm", 1.0), measured("sage", 3.0)
    lines = list(tables.link_rivals(ours + other))
    assert [line["method"] for line in lines] == ["GraphSAGE", "NMM-DGLFRM"]
    assert lines[0]["AUC, NMM-DGLFRM minus it"].startswith("-2.00 ± 0.00")
    claim = " ".join(tables.rivals_claim(ours + other).split())
    assert "above it on none, below it on Cora" in claim
    claim = " ".join(tables.rivals_claim(measured("nmm", 5.0) + other).split())
    assert "above it on Cora, below it on none" in claim
    assert tables.rivals_claim(ours) == "No rival has been compared yet."


def test_vgae_is_held_against_its_authors(tables):
    row = {"task": "anchor", "dataset": "cora"}
    scores = [{"AUC": 91.2 + s, "AP": 90.1 + s} for s in (-1, 0, 1)]
    rows = [row | {"seed": s, "test": test} for s, test in enumerate(scores)]
    (line,) = tables.vgae_anchor(rows)
    assert line["AUC, its authors (above ours, sd)"] == "91.4 (+0.2)"
    assert line["AP, DGL's example (above ours, sd)"] == "92.5 (+2.4)"
    claim = " ".join(tables.anchor_claim(rows).split())
    assert "1 are at most one standard deviation of our splits above our mean and 1" in claim
    assert "(the farthest +2.5)" in claim
    assert tables.anchor_claim([]) == "VGAE: nothing has been compared yet."


def test_readings_of_the_appendix_are_paired(tables):
    base = {"dataset": "cora", "settings": {"num_communities": 9}}
    row = base | {"loss": 0.9, "val": {"AP": 90.0, "AUC": 80.0}}
    ours = [row | {"task": "search", "guide": "nmm", "seed": s} for s in range(2)]
    wide = row["settings"] | {"own_attention": True, "width": 9}
    changed = {"task": "attention", "reading": "another one", "loss": 0.8, "settings": wide}
    rows = ours + [row | changed | {"seed": s} for s in range(2)]
    first, second = tables.link_attention(rows)
    assert first["attention"] == "first layer shared, 16 outputs"
    assert second["attention"] == "another one, as wide as the communities"
    assert second["bound, change"].startswith("+0.1000")
    assert "in 1 of 1 cases: Cora (another one)" in " ".join(tables.attention_claim(rows).split())


@pytest.mark.slow
def test_benchmark_of_rivals(tmp_path, rivals, tables):
    torch.set_default_dtype(torch.float)
    path = tmp_path / "links.jsonl"
    import_module("benchmarks.links.run").main(
        ["search", "compare", "--smoke", "--results", str(path)]
    )
    tasks = ["anchor", "search", "compare", "--smoke", "--results", str(path)]
    rows = rivals.main(tasks).rows
    number = (2 + 3) + 6 + 3 + 2 * 2 + 2 * 3
    assert len(rows) == len(path.read_text().splitlines()) == number
    assert len(rivals.main(tasks).rows) == number
    more = ["attention", "attended", "--smoke", "--results", str(path)]
    attention = import_module("benchmarks.links.attention")
    rows = attention.main(more).rows
    liked = attention.best_reading(rows, "nips12") is not None
    assert len(rows) == len(attention.main(more).rows) == number + 2 + liked
    found = tables.tables(rows)
    for name in ("link rivals", "vgae anchor", "link attention"):
        assert found[name].count("\n") > 1
