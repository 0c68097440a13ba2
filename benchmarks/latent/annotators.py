# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Consensus of noisy labels: Dawid and Skene's model with an NMM as the labels' prior, against
majority votes, Dawid-Skene, Potts fields and label spreading.

    python -m benchmarks.latent.annotators halves cortex graphs simulated model coverage

Tasks: ``halves`` (agreement of halves of the clusterings, which chooses the number of labels),
``cortex`` (clusterings against layers by hand), ``graphs`` (sizes), ``simulated`` (annotators of a
graph's nodes), ``model`` (labels drawn from an NMM) and ``coverage`` (of intervals of accuracies).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pyro
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.latent.data import SECTIONS, Place, graph, noisy, places, section
from benchmarks.latent.potts import Found
from benchmarks.latent.rivals import Fits, gcn, majority, rivals, timed, typed_rivals
from benchmarks.shared.records import RESULTS, Records, run
from benchmarks.shared.tables import frame
from pyro_nmm import NeighborMixture, sources
from pyro_nmm.metrics import brier, mean_log_prob
from pyro_nmm.models import Annotators, CopyingAnnotators, accuracy, grid_edges, leave_one_out

#: Types of clusterings that err together.
NUM_TYPES = 16
#: One method of every group that is fitted together to a section of cortex.
METHODS = ["NMM, types", "NMM", "Dawid-Skene", "Potts, mean field, types"]
#: Simulated annotators are independent, or the last copies; there may be a GCN besides.
CELLS = ["independent", "copies", "copies and a GCN"]
#: The method that runs last on simulated annotators.
LAST = "Potts, Gibbs, copies"
#: Halves of the clusterings: two random ones, and principal components against UMAP.
HALVINGS = [0, 1, "PCA and UMAP"]


def halves(args, results: Records) -> None:
    keys = {"section": args.sections, "labels": args.candidates, "halving": HALVINGS}
    for key in results.missing(task="halves", **keys):
        data, order = section(args.data_root, key["section"]), torch.arange(10)
        if isinstance(key["halving"], int):  # else principal components are the first five
            order = torch.randperm(10, generator=torch.Generator().manual_seed(key["halving"]))
        pyro.set_rng_seed(0)
        emission, (hood, edge_attr) = Annotators(key["labels"], num_types=NUM_TYPES), data.place
        labels = []
        for half in order.split(5):
            options = {"num_starts": 1, "num_steps": args.num_steps}
            fit = emission.fit(hood, data.answers[:, half], edge_attr, **options)
            labels.append(fit.predict().numpy())
        results.add(**key, agreement=adjusted_mutual_info_score(*labels))


def chosen_labels(rows: list[dict]) -> dict[str, int]:
    """By section: the number of labels for which two halves of the clusterings agree most."""
    agreement = frame(rows, task="halves").groupby(["section", "labels"])["agreement"].mean()
    return agreement.unstack().idxmax(axis=1).to_dict()


def cortex(args, results: Records) -> None:
    best = chosen_labels(results.rows)
    for name in args.sections:
        data, keys = section(args.data_root, name), {"task": "cortex", "section": name}
        for key in results.missing(**keys, method="majority"):
            for method, probs in without_fit(data.answers).items():
                row = key | {"method": method}
                results.add(**row, **clustering_scores(probs, data.y))
        keys |= {"seed": range(args.num_seeds), "labels": best[name], "method": METHODS}
        for key in results.missing(**keys):
            pyro.set_rng_seed(key["seed"])
            for method, found, seconds in clusterings(args, key, data):
                row = key | {"method": method, "seconds": seconds} | found.settings
                results.add(**row, **clustering_scores(found.probs, data.y))


def without_fit(answers: Tensor) -> dict[str, Tensor]:
    """Every clustering by itself, and their majority after renaming each to suit the first."""
    size, renamed, found = int(answers.max()) + 1, [], {}
    for number, column in enumerate(answers.T):
        found[f"{number + 1}"] = one_hot(column.clamp(min=0)).double()
        name = suited(column, answers[:, 0], size, size)
        renamed.append(torch.where(column < 0, -1, name[column]))
    return found | {"majority": majority(torch.stack(renamed, 1), size).probs}


def clusterings(args, key: dict, data: Data) -> Fits:
    """The fit of a key's method, and of those that start from it."""
    typed = Annotators(key["labels"], num_types=NUM_TYPES)
    plain = Annotators(key["labels"], aligned=False)
    if key["method"] == "Dawid-Skene":
        yield from rivals(plain, data, args.starts)
    elif key["method"] == "Potts, mean field, types":
        yield from typed_rivals(typed, data, args.starts)
    else:
        emission = typed if key["method"] == "NMM, types" else plain
        options = {"num_starts": args.starts, "num_steps": args.num_steps}
        yield key["method"], *timed(found_by, emission, [data.place], data.answers, options)


def found_by(emission: Annotators, choice: list[Place], answers: Tensor, options: dict) -> Found:
    """Our fits, one for each draw of the sources: mean probabilities and mean settings."""
    fields = [emission.fit(hood, answers, edge_attr, **options) for hood, edge_attr in choice]
    columns = {
        "score": [field.score for field in fields],
        "left out": [leave_one_out(field, answers).mean().item() for field in fields],
        "kappa": [field.prior.log_kappa.exp().item() for field in fields],
        "weight": [weight for field in fields for weight in field.prior.weight.tolist()],
        "Gelman-Rubin": [
            field.chains.gelman_rubin().nan_to_num(1).max().item() for field in fields
        ],
    }
    means = {name: mean(values) for name, values in columns.items() if values}
    return Found(torch.stack([field.probs for field in fields]).mean(0), means)


def scores(probs: Tensor, y: Tensor) -> dict:
    """Scores of probabilities of labels that have names; 1e-12 stands for smaller ones."""
    probs = probs.double()
    found = {
        "accuracy": (probs.argmax(-1) == y).double().mean(),
        "log score": mean_log_prob(probs.clamp(min=1e-12), y),
        "ECE": multiclass_calibration_error(probs, y, probs.shape[-1], n_bins=15),
        "Brier": brier(probs, y),
        "confidence": probs.amax(-1).mean(),
        "entropy": torch.special.entr(probs).sum(-1).mean(),
    }
    return {name: score.item() for name, score in found.items()}


def clustering_scores(probs: Tensor, y: Tensor) -> dict:
    """Scores under the names that suit best, of nodes of known truth, and adjusted Rand index."""
    probs, y = probs[y >= 0], y[y >= 0]
    found, num_layers = probs.argmax(-1), int(y.max()) + 1
    name = suited(found, y, probs.shape[1], num_layers)
    named = probs.new_zeros(len(probs), num_layers).index_add_(1, name, probs)
    return {"ARI": adjusted_rand_score(y.numpy(), found.numpy()), **scores(named, y)}


def suited(labels: Tensor, truth: Tensor, num_labels: int, num_layers: int) -> Tensor:
    """
    ``(num_labels,)``: the layer of every label, one to one by the Hungarian method; a label that is
    left over is the layer that it overlaps with most. Labels of -1 are absent.
    """
    both = (labels >= 0) & (truth >= 0)
    counts = one_hot(labels[both], num_labels).T @ one_hot(truth[both], num_layers)
    name, (rows, layers) = counts.argmax(1), linear_sum_assignment(counts, maximize=True)
    name[rows] = torch.tensor(layers)
    return name


def graphs(args, results: Records) -> None:
    for key in results.missing(task="graphs", graph=args.graphs):
        data = graph(key["graph"], args.data_root)
        edges = to_undirected(data.edge_index, num_nodes=data.num_nodes)
        within = (data.y[edges[0]] == data.y[edges[1]]).double().mean().item()
        middle = edges[0].bincount(minlength=data.num_nodes).median().item()
        sizes = {"nodes": data.num_nodes, "edges": edges.shape[1] // 2}
        labels = int(data.y.max()) + 1
        results.add(**key, **sizes, labels=labels, within=within, degree=middle)


def compare(args, results: Records, key: dict, data: Data, more: dict[str, Found]) -> None:
    """
    Rows of all methods on the answers and with the ``places`` of ``data``, and of ``more``. Sources
    are chosen without copies: who may copy is fitted at those that predict best what is left out.
    """
    size, options = int(data.y.max()) + 1, {"num_starts": 1, "num_steps": args.num_steps}
    plain, copying, ours = Annotators(size), CopyingAnnotators(size), {}
    for name, choice in data.places.items():
        ours[name] = timed(found_by, plain, choice, data.answers, options)
    best = max(ours, key=lambda name: ours[name][0].settings["left out"])
    ours[f"copies, {best}"] = timed(found_by, copying, data.places[best], data.answers, options)
    found = {f"NMM, {name}": fit for name, fit in ours.items()}
    more = more | {"majority": majority(data.answers, size)}
    found |= {name: (other, 0.0) for name, other in more.items()}
    for suffix, emission in {"": plain, ", copies": copying}.items():
        found |= {name + suffix: fit for name, *fit in rivals(emission, data, 1)}
    for method, (consensus, seconds) in found.items():
        row = key | {"method": method, "seconds": seconds} | consensus.settings
        results.add(**row, **scores(consensus.probs, data.y))


def simulations(args, results: Records, **key):
    """Keys of what has not been simulated yet, with the accuracies of six annotators."""
    keys = {"seed": range(args.num_seeds), "level": args.levels, "method": LAST}
    for found in results.missing(**key, **keys):
        pyro.set_rng_seed(found["seed"])
        yield found, found["level"] + torch.linspace(-0.08, 0.08, 6)


def simulated(args, results: Records) -> None:
    for key, right in simulations(args, results, task="simulated", graph=args.graphs, cell=CELLS):
        whole, more = graph(key["graph"], args.data_root), {}
        size = int(whole.y.max()) + 1
        answers = noisy(whole.y, right, size, key["cell"] != "independent")
        choices = places(whole, args.placements)
        if key["cell"] == "copies and a GCN":
            more["GCN"] = gcn(whole, majority(answers, size).probs, args.num_epochs)
            answers = torch.cat([answers, more["GCN"].probs.argmax(1, keepdim=True)], 1)
        data = Data(y=whole.y, edge_index=whole.edge_index, answers=answers, places=choices)
        compare(args, results, key, data, more)


def grid_mixture(side: int, num_labels: int) -> NeighborMixture:
    """Labels of a grid, whose sources are four pixels apart."""
    hood = sources.grid(side, side, stride=4)
    alpha = torch.full((hood.num_sources, num_labels), 0.2 / num_labels)
    return NeighborMixture(hood, alpha, torch.zeros(hood.num_edges))


def model(args, results: Records) -> None:
    """
    Labels of an NMM on a grid, whose sources our fit knows; and the posterior at the true numbers,
    which shows the error that is left with so many nodes.
    """
    truth, same = grid_mixture(args.height, 5), torch.eye(5)
    edges = to_undirected(grid_edges(args.height, args.height))
    for key, right in simulations(args, results, task="model", graph="grid", cell=CELLS[:2]):
        y, copying, right = truth.sample(), key["cell"] == "copies", right[:, None, None]
        data = Data(y=y, edge_index=edges, answers=noisy(y, right.flatten(), 5, copying))
        confusion = right * same + (1 - right) / 4 * (1 - same)
        evidence = Annotators(5).log_prob({"confusion": confusion}, data.answers)
        posterior = truth.latents(evidence).posterior(num_samples=4, num_sweeps=100)
        # A label that none of 4 x 50 sweeps met is rare, not impossible, as in our own fit.
        exact = Found((200 * posterior.marginals() + 1 / 5) / 201)
        data.places = {"true sources": [(truth.hood, None)]}
        compare(args, results, key, data, {} if copying else {"true numbers": exact})


def coverage(args, results: Records) -> None:
    """Intervals of the accuracies of five annotators; labels are those of an NMM on a grid."""
    mixture = grid_mixture(args.side, 3)
    for key in results.missing(task="coverage", seed=range(args.simulations)):
        pyro.set_rng_seed(key["seed"])
        y, truth = mixture.sample(), 0.4 + 0.55 * torch.rand(5)
        found = accuracy(Annotators(3).fit(mixture.hood, noisy(y, truth, 3), num_starts=1))
        inside = (found.low <= truth) & (truth <= found.high)
        named = found._asdict() | {"truth": truth, "covered": inside}
        results.add(**key, **{name: value.tolist() for name, value in named.items()})


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (halves, cortex, graphs, simulated, model, coverage),
        choices={"sections": SECTIONS}, sections=SECTIONS, candidates=[3, 4, 5, 6, 7, 8],
        num_seeds=10, starts=(5, "of a fit to cortex, of which the best is kept"),
        graphs=(["digits"], "digits, cora, citeseer or pubmed"), levels=[0.9, 0.7, 0.5],
        placements=(2, "draws of sources, whose probabilities are averaged"),
        num_steps=(120, "of our fits"), num_epochs=(100, "of the GCN"),
        simulations=200, side=(20, "of the grid of coverage"), height=(128, "of that of model"),
        data_root=Path, results=RESULTS / "annotators.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
