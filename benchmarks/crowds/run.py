# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Answers of people and of weak classifiers, combined. README.md explains the tasks."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyro
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data

from benchmarks.crowds import rivals
from benchmarks.crowds.data import ALONE, KINDS, SETS, SIMULATED, answered
from benchmarks.latent import grid_mixture, noisy
from benchmarks.nodes import node_scores
from benchmarks.shared.records import RESULTS, Records, command
from pyro_nmm.fitting import minimise
from pyro_nmm.models import Annotators, Consensus, CopyingAnnotators, accuracy
from pyro_nmm.models.annotators import excess_agreement

FILE = RESULTS / "crowds.jsonl"
OURS, FIELD, BEST = "Annotators", "Annotators, answers independent", "Annotators, best powers"
WITH, CROWDLAB = "Annotators and a GCN", "GCN, CROWDLAB"
COPYING = "CopyingAnnotators"
#: Methods without features of the nodes, and NETWORKS, which read them.
METHODS: dict[str, Callable[[Data], Tensor]] = {
    "majority": rivals.votes,
    "Dawid-Skene": partial(rivals.crowd_kit, "DawidSkene"),
    "GLAD": partial(rivals.crowd_kit, "GLAD"),
    "MACE": partial(rivals.crowd_kit, "MACE"),
    "label spreading": rivals.label_spreading,
    "Potts": rivals.potts,
}
NETWORKS: dict[str, Callable[[Data], Tensor]] = {
    "GCN on the majority": partial(rivals.gcn, hard=True),
    "GCN on vote shares": partial(rivals.gcn, hard=False),
    "GCN, CrowdLayer": rivals.crowd_layer,
    CROWDLAB: rivals.crowdlab,
    "GCN, EM: posterior": partial(rivals.raykar, read="posterior"),
    "GCN, EM: network": partial(rivals.raykar, read="network"),
}
#: Nodes of the side of a grid, shares of answers that repeat a common guess, and its accuracy.
SIDE, STRENGTHS, COMMON, SIMULATIONS = 20, [0.0, 0.3, 0.6], 0.6, 200


def scores(probs: Tensor, data: Data) -> dict:
    """Of answered nodes, and of test nodes without answers or of all nodes."""
    parts = {"answered": (data.answers >= 0).any(1)}
    parts |= {name: data[name] for name in ("test", "all") if name in data}
    clear = (probs := probs.double().clamp(min=1e-12)) / probs.sum(-1, keepdim=True)
    return {name: node_scores(clear[rows], data.y[rows]) for name, rows in parts.items()}


def best_powers(found: Consensus, data: Data) -> Tensor:
    """The pool with the powers that suit the true labels best: by hindsight."""
    rows, names = (data.answers >= 0).any(1), list(found.powers)
    logs = [found.priors[name].double().log() for name in names[:-1]]
    pooled = sum(found.powers[name] * each for name, each in zip(names, logs, strict=False))
    logs.append((found.probs.double().clamp(min=1e-300).log() - pooled) / found.powers["answers"])
    parts = torch.stack(logs, -1)
    powers = torch.full((len(names),), 0.5).double().requires_grad_()
    minimise(lambda: cross_entropy(parts[rows] @ powers, data.y[rows]), [powers], 60)
    return (parts @ powers).softmax(-1).detach()


def answers(args, results: Records, task="answers") -> None:
    for name in args.sets:
        kinds = list(SIMULATED) if task == "simulated" else KINDS[: 4 if name in ALONE else 2]
        for key in results.missing(task=task, set=name, kind=kinds, seed=args.seeds,
                                   method=[OURS, WITH, *METHODS, *NETWORKS]):  # fmt: skip
            if key["method"] == CROWDLAB and "one" in key["kind"]:
                continue  # its weights come from nodes with two answers
            data = answered(name, key["kind"], args.data_root, key["seed"])
            found = {key["method"]: (METHODS | NETWORKS | {WITH: with_network}).get(key["method"])}
            found = own(data) if key["method"] == OURS else found
            for method, make in found.items():
                pyro.set_rng_seed(key["seed"])
                begin = time.process_time()
                probs = make(data)
                seconds = time.process_time() - begin
                row = key | {"method": method} | getattr(make, "row", {})
                results.add(**row, seconds=seconds, **scores(probs, data))


def simulated(args, results: Records) -> None:
    answers(args, results, "simulated")


def with_network(data: Data) -> Tensor:
    return Annotators(int(data.y.max()) + 1).fit(data, data.answers).probs


def checks(found: Consensus, data: Data) -> dict:
    """Excess agreement given the consensus, and given the true labels."""
    truth = one_hot(data.y).double()
    known = excess_agreement(truth, truth.clamp(min=1e-9).log(), 1.0, data.answers).excess
    row = {name: value.item() for name, value in found.dependence._asdict().items()}
    return row | {"truth": known.item(), "found": bool(found.dependence.found)}


def own(data: Data) -> dict[str, Callable[[Data], Tensor]]:
    """Our consensus, its parts, and the powers of hindsight, of one fit."""
    size, kept = int(data.y.max()) + 1, {}

    def default(data: Data) -> Tensor:
        kept["fit"] = Annotators(size).fit(data.edge_index, data.answers)
        if data.answers.shape[1] > 1:
            default.row = {"dependence": checks(kept["fit"], data)}  # type: ignore[attr-defined]
        return kept["fit"].probs

    def copying(data: Data) -> Tensor:
        return CopyingAnnotators(size).fit(data.edge_index, data.answers).probs

    found = {OURS: default, FIELD: lambda data: kept["fit"].field.probs}
    found[BEST] = lambda data: best_powers(kept["fit"], data)
    if 1 < data.answers.shape[1] <= 10:  # its cost is quadratic
        found[COPYING] = copying
    return found


def shared(y: Tensor, right: Tensor, strength: float) -> Tensor:
    """Answers of annotators who repeat a common guess in a share of the cases."""
    own, size = noisy(y, right, 3), len(y)
    guess = (y + torch.randint(1, 3, (size,)) * (torch.rand(size) >= COMMON)) % 3
    return torch.where((torch.rand(own.shape) < strength) & (own >= 0), guess[:, None], own)


def coverage(args, results: Records) -> None:
    mixture = grid_mixture(SIDE, 3)
    for key in results.missing(task="coverage", strength=STRENGTHS, seed=range(SIMULATIONS)):
        pyro.set_rng_seed(key["seed"])
        y, right = mixture.sample(), 0.4 + 0.55 * torch.rand(5)
        truth = (1 - key["strength"]) * right + key["strength"] * COMMON
        answers = shared(y, right, key["strength"])
        found = Annotators(3).fit(mixture.hood, answers)
        row = {name: value.tolist() for name, value in accuracy(found)._asdict().items()}
        dependence = checks(found, Data(y=y, answers=answers))
        results.add(**key, **row, accuracies=truth.tolist(), dependence=dependence)


TASKS = answers, simulated, coverage
OPTIONS: dict = {"sets": ["music", "labelme", "digits", "cora", "pubmed"], "data_root": Path}
OPTIONS |= {"seeds": [0, 1, 2, 3, 4], "choices": {"sets": list(SETS)}}
main = command(__doc__, TASKS, **OPTIONS, results=FILE)

if __name__ == "__main__":
    main()
