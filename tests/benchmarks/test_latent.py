# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmarks of hidden fields and of annotators, in small."""

from importlib import import_module

import pytest
import torch

from pyro_nmm import NeighborMixture
from pyro_nmm.models import Annotators, grid_edges


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
def test_benchmark_of_hidden_fields(tmp_path):
    benchmark = import_module("benchmarks.latent.hidden")
    path = tmp_path / "hidden.jsonl"
    tasks = ["normalizers", "select", "compare", "--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    sizes = len(benchmark.COUPLINGS), 3 * len(benchmark.SOURCES), 3 * 5
    assert len(rows) == len(path.read_text().splitlines()) == sum(sizes)
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows:
        if row["task"] == "compare":
            assert 0 <= row["Brier"] <= 2
            assert 0 <= row["accuracy"] <= 1
            assert row["method"] != "independent" or row["bound"] == row["log evidence"]


@pytest.mark.slow
def test_benchmark_of_noisy_labels(tmp_path):
    benchmark, tables = (
        import_module("benchmarks.latent.annotators"),
        import_module("benchmarks.latent.annotators_tables"),
    )
    path, folder = tmp_path / "annotators.jsonl", write_section(tmp_path / "dlpfc")
    kinds = ["cortex", "halves", "graphs", "simulated", "model", "coverage"]
    tasks = [*kinds, "--smoke", "--sections", "151673", "--data-root", str(folder.parent)]
    tasks += ["--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines())
    assert len(benchmark.main(tasks).rows) == len(rows)
    found = {row["task"] for row in rows}
    assert found == set(kinds)
    for row in rows:
        if "ARI" in row:
            assert -1 <= row["ARI"] <= 1
        if "log score" in row:
            assert row["log score"] <= 0
            assert 0 <= row["ECE"] <= 1
    assert all("Nothing" not in text for text in tables.tables(rows).values())


def write_section(folder):
    """A section of 12 x 16 spots in two layers, of which the clusterings tell something."""
    folder.mkdir()
    truth = torch.arange(192) % 16 >= 8
    names = [f"{i}_{kind}{end}" for end in ("", "_spatial") for kind in ("PCA", "UMAP")
             for i in range(5)]  # fmt: skip
    answers = torch.where(torch.rand(192, 20) < 0.3, torch.randint(5, (192, 20)), truth[:, None])
    lines = [",".join(["key", "ground_truth", *names])]
    places = []
    for i, row in enumerate(answers.tolist()):
        layer = "NA" if i == 7 else f"Layer_{int(truth[i])}"
        lines.append(",".join([f"151673_S{i}", layer, *(str(a + 1) for a in row)]))
        y, x = divmod(i, 16)
        places.append(f"S{i},1,{y},{2 * x + y % 2},0,0")
    (folder / "cluster_labels_151673.csv").write_text("\n".join(lines) + "\n")
    (folder / "tissue_positions_151673.txt").write_text("\n".join(places) + "\n")
    return folder


def test_names_of_labels_that_have_none():
    """A label for each layer; one left over is that of the layer that it overlaps with most."""
    fits = import_module("benchmarks.latent.annotators_fits")
    y = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    labels = torch.tensor([2, 2, 0, 1, 1, 0, 0])
    found = fits.clustering_scores(torch.eye(3)[labels], y)
    assert found["accuracy"] == pytest.approx(5 / 6)
    alone = fits.clustering_scores(
        torch.eye(2)[(y == 1).long()], torch.tensor([0, 0, 2, 1, 1, 1, -1])
    )
    assert alone["accuracy"] == pytest.approx(5 / 6)
    renamed = fits.renamed(torch.stack([labels, (labels + 1) % 3], 1))
    assert torch.equal(renamed[:, 0], renamed[:, 1])


def test_coupling_of_the_rival_is_that_of_the_pseudo_likelihood():
    fits, edges = import_module("benchmarks.latent.annotators_fits"), grid_edges(8, 8)
    labels = torch.nn.functional.one_hot(torch.randint(2, (64,)), 2).float()
    field = fits.Potts(
        Annotators(2), torch.zeros(64, 1).long(), torch.cat([edges, edges.flip(0)], 1)
    )
    numbers = torch.zeros(3)
    for _ in range(20):
        numbers = field.raise_pseudo_likelihood(numbers, labels)
    around = field.around(labels)

    def value(coupling):
        logits = coupling * around + numbers[1:]
        return (labels * logits.log_softmax(-1)).sum(-1).mean() - 1e-4 * coupling**2

    best = max(torch.linspace(-1, 1, 401).tolist(), key=value)
    assert numbers[0].item() == pytest.approx(best, abs=0.01)


def test_annealed_evidence_of_hidden_labels():
    """Against the exact sum, of a few pixels."""
    fits = import_module("benchmarks.latent.hidden_fits")
    field = fits.HiddenField(torch.tensor([-1.2, -0.4, 0.1, 1.3]), 2, 2, 1)
    with torch.no_grad():
        alpha, logits, evidence = field.parts()
        labels = torch.cartesian_prod(*[torch.arange(3)] * 4)
        log_prob = NeighborMixture(field.hood, alpha, logits).log_prob(labels)
        truth = (log_prob + evidence[torch.arange(4), labels].sum(1)).logsumexp(0)
    value, error, _ = fits.annealed_log_evidence(field, 20, 500)
    assert error < 0.05
    assert abs(value - truth.item()) < 4 * error
