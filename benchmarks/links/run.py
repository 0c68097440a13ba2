# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Link prediction by DGLFRM, NMM-DGLFRM and rivals. README.md explains the tasks."""

import itertools
from pathlib import Path

from torch_geometric.datasets import Planetoid

from benchmarks.links import dglfrm, rivals
from benchmarks.links.protocol import DATASETS, Problem, candidates, chosen, load
from benchmarks.shared.records import RESULTS, Records, command
from pyro_nmm.datasets import published_split

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
GUIDES = [*dglfrm.GUIDES, *rivals.NETWORKS]
READINGS = ("a network of its own", "first layer shared")  #: of the appendix, for the attention


def reproduce(args, results: Records) -> None:
    for key in results.missing(task="reproduce", dataset="cora", split=(0, 1), seed=range(3)):
        path = args.data_root / f"linkpred_splits/cora/split_{key['split']}.npz"
        data = load("cora", args.data_root)
        problem = Problem(data, published_split(path, data.num_nodes))
        first, *_ = candidates(results.rows, "cora", "original")
        row = dglfrm.measure(args, problem, "original", first, key["seed"], ["test"], draws=15)
        results.add(**key, **row)


def measured(args, key: dict, guide: str, settings: dict) -> dict:
    """The row of a guide or rival on a random split. Searches do not see test links."""
    measure = rivals.measure if guide in rivals.NETWORKS else dglfrm.measure
    problem = Problem.of(args, key["dataset"], key["seed"])
    parts = ["val"] if key["task"] in ("search", "attention") else ["val", "test"]
    row = measure(args, problem, guide, settings, key["seed"], parts)
    return {k: v for k, v in row.items() if k != "curve" or key["task"] == "compare"}


def search(args, results: Records) -> None:
    for dataset, guide in itertools.product(args.datasets, args.guides):
        trials = candidates(results.rows, dataset, guide)
        known = {"task": "search", "dataset": dataset, "guide": guide, "trial": range(len(trials))}
        for key in results.missing(**known, seed=range(args.num_searched)):
            results.add(**key, **measured(args, key, guide, trials[key["trial"]]))


def compared(args) -> range:
    """Seeds of splits that no setting was searched on."""
    return range(args.num_searched, args.num_searched + args.num_splits)


def compare(args, results: Records) -> None:
    for dataset, guide in itertools.product(args.datasets, args.guides):
        settings = chosen(results.rows, dataset, guide)
        known = {"task": "compare", "dataset": dataset, "guide": guide, "settings": settings}
        for key in results.missing(**known, seed=compared(args)):
            results.add(**key | measured(args, key, guide, settings))


def katz(args, results: Records) -> None:
    for key in results.missing(task="katz", dataset=args.datasets, seed=compared(args)):
        results.add(**key, **rivals.katz(Problem.of(args, key["dataset"], key["seed"])))


def memberships(args, results: Records) -> None:
    seeds = range(args.num_searched)
    for key in results.missing(task="memberships", dataset=args.datasets, seed=seeds):
        problem = Problem.of(args, key["dataset"], key["seed"])
        settings = chosen(results.rows, key["dataset"], "original")
        pair, _ = dglfrm.fit(args, problem, "original", settings, key["seed"])
        results.add(**key, AP=dglfrm.exchanged(pair, problem))


def cost(args, results: Records) -> None:
    for key in results.missing(task="cost", dataset=args.datasets):
        settings = chosen(results.rows, key["dataset"], "nmm")
        results.add(**key, **dglfrm.cost(Problem.of(args, key["dataset"], 0), settings))


def anchor(args, results: Records) -> None:
    settings = {"hidden": 32, "width": 16, "dropout": 0.0}
    datasets = [name for name in args.datasets if name in PLANETOID]
    for key in results.missing(task="anchor", dataset=datasets, seed=range(args.num_splits)):
        problem = Problem.of(args, key["dataset"], key["seed"])
        # DGLFRM sees zeros and ones; the authors of VGAE use PubMed's weights of words.
        data = problem.data.clone()
        data.x = Planetoid(str(args.data_root), PLANETOID[key["dataset"]])[0].x.to_sparse_csr()
        known = Problem(data, problem.split), "vgae", settings, key["seed"], ["val", "test"]
        row = rivals.measure(args, *known, every=args.num_steps or 200)
        results.add(**key, **{name: row[name] for name in ("settings", "step", "val", "test")})


def attended(args, results: Records, others: Records, **each) -> None:
    """Adds rows of the NMM with attention by readings of the paper's appendix."""
    for key in others.missing(**each):
        settings = chosen(results.rows, key["dataset"], "nmm")
        own = key.get("reading") != READINGS[1]
        wide = settings | {"own_attention": own, "width": settings["num_communities"]}
        others.add(**key, **measured(args, key, "nmm", wide))


def attention(args, results: Records) -> None:
    known = {"task": "attention", "dataset": args.datasets, "seed": range(args.num_searched)}
    attended(args, results, results, **known, reading=READINGS)


def deviations(args, results: Records) -> None:
    others = Records(args.results.with_name("deviations.jsonl"))
    known = {"task": "links", "dataset": args.datasets, "change": "own attention"}
    attended(args, results, others, **known, seed=compared(args))


TASKS = reproduce, search, compare, katz, memberships, cost, anchor, attention, deviations
CHOICES = {"datasets": [*DATASETS, "pubmed"], "guides": GUIDES}
OPTIONS = CHOICES | {"choices": CHOICES, "datasets": DATASETS, "data_root": Path}
OPTIONS |= {"num_searched": (2, "splits of the search"), "num_splits": (10, "other splits")}
OPTIONS |= {"num_steps": (int, "steps of Adam; default: 500, rivals 200")}
main = command(__doc__, TASKS, **OPTIONS, results=RESULTS / "links.jsonl")

if __name__ == "__main__":
    main()
