# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM on top of trained classifiers, beside rivals. README.md explains the tasks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

import pyro
import torch
from pyro.ops.stats import crps_empirical
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import evaluate, node_scores
from benchmarks.on_top import rivals, stages
from benchmarks.on_top.data import cases, few, given, graph, grown, shuffled, some_pairs, trained
from benchmarks.shared.records import RESULTS, Records, command, pick, read
from benchmarks.shared.scores import independent_pairs
from benchmarks.shared.timing import timed
from pyro_nmm import NeighborMixture, Posterior
from pyro_nmm.models import StackedNMM

FILE = RESULTS / "calibration.jsonl"
#: Each reported graph that the priors are from, and the other one.
OTHER = {"cora": "citeseer", "citeseer": "cora"}
OURS, POOL, SCORES = "StackedNMM", "the pool alone", "StackedNMM, scores alone"
FITTED, UPDATED = "StackedNMM, fitted parameters", "StackedNMM, updated"
ELSEWHERE = "StackedNMM, the other graph's priors"
#: Sizes of sets, shares of labels, and numbers of answers, of all that are asked for.
SIZES, SHARES, SHOWN, QUESTIONS = [10, 30, 100, None], [0.0, 0.1, 0.3, 0.5], [0, 5, 10, 20], 20
#: Scores that are stored, by their name in other benchmarks.
FIELDS = {"test": "test", "joint": "joint", "own product": "own product", "conditional": "pairs"}


def stacked(data: Data, pool: bool = True, elsewhere: bool = False) -> NeighborMixture:
    """``elsewhere``: the priors' means are medians over the fits to the other graph."""
    module = StackedNMM(data.logits.shape[1], pool=pool)
    if elsewhere:
        fits = pick(read(FILE), task="priors", dataset=OTHER[data.graph])
        found = {name: median(row["numbers"][name] for row in fits) for name in module.prior}
        module.prior = {name: (found[name], sd) for name, (_, sd) in module.prior.items()}
        # Offsets have mean zero; a fit's number for them is their standard deviation.
        module.prior["pool.offsets"] = (0.0, found["pool.offsets"])
    return module.fit(*given(data), data.val_mask).mixture(*given(data))


def averaged(data: Data) -> Posterior:
    """Over draws of the parameters, as users have it."""
    own = given(data)
    return StackedNMM(data.logits.shape[1]).fit(*own, data.val_mask).posterior(*own)


METHODS: dict[str, Callable[[Data], Tensor | NeighborMixture | Posterior]] = {
    "raw": lambda data: data.logits.softmax(-1),
    "temperature": rivals.temperature,
    "vector scaling": rivals.vector,
    "vector scaling, shrunk": rivals.shrunk_vector,
    "three numbers": rivals.three_numbers,
    "CaGCN": partial(rivals.calibrated, rivals.CaGCN),
    "GATS": partial(rivals.calibrated, rivals.GATS),
    "C&S": rivals.correct_and_smooth,
    "Potts": lambda data: rivals.potts(data, data.logits.softmax(-1)),
    "Potts on C&S": lambda data: rivals.potts(data, rivals.correct_and_smooth(data)),
    "GMNN": rivals.gmnn,
    POOL: rivals.pool_alone,
    SCORES: partial(stacked, pool=False),
    FITTED: stacked,
    OURS: averaged,
    ELSEWHERE: partial(stacked, elsewhere=True),
}


def splits(args, results: Records) -> None:
    for name in args.graphs:
        methods = [each for each in args.methods if each != ELSEWHERE or name in OTHER]
        for key, data in cases(args, results, "splits", dataset=name, method=methods):
            found, seconds = timed(METHODS[key["method"]], data)
            row = evaluate(found, data, some_pairs(data, key["split"]), joint=True)
            row = {FIELDS[name]: value for name, value in row.items() if name in FIELDS}
            results.add(**key, **row, **{"fit seconds": seconds})


def priors(args, results: Records) -> None:
    for key, data in cases(args, results, "priors", split=[100, 101]):
        module = StackedNMM(data.logits.shape[1])
        module.prior = {name: (mean, 10 * sd) for name, (mean, sd) in module.prior.items()}
        module.fit(*given(data), data.val_mask | data.test_mask)
        numbers = {name: p.item() for name, p in module.named_parameters() if p.numel() == 1}
        numbers["pool.offsets"] = module.pool.offsets.std().item()
        results.add(**key, numbers=numbers)


def summary(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Coverage and width of 90 % intervals, and the CRPS, in nodes, of draws of counts."""
    draws, truth = draws.double(), truth.double()
    low, high = draws.quantile(torch.tensor([0.05, 0.95]).to(draws), 0)
    low, high = low.floor(), high.ceil()
    inside, crps = (truth >= low) & (truth <= high), crps_empirical(draws, truth)
    found = {"coverage": inside.double(), "width": high - low, "CRPS": crps}
    return {name: value.mean().item() for name, value in found.items()}


def counts(args, results: Records) -> None:
    for key, data in cases(args, results, "counts", fold=0, size=SIZES):
        sets = data.test_mask.nonzero().T
        if "size" in key:
            sets = grown(data.hood, data.test_mask, key["size"], key["split"])
        (nodes, place), size = sets.unique(return_inverse=True), data.logits.shape[1]
        module = StackedNMM(size).fit(*given(data), data.val_mask)
        posterior = module.posterior(*given(data))
        fitted = module.posterior(*given(data), num_draws=0)
        found = {"joint": posterior.sample((400,), nodes), "fitted": fitted.sample((400,), nodes)}
        alone = {"own product": fitted.marginals(), "temperature": rivals.temperature(data)}
        found |= {name: Categorical(p[nodes]).sample((400,)) for name, p in alone.items()}
        truth = F.one_hot(data.y[sets], size).sum(-2)
        tallies = {name: F.one_hot(draws[:, place], size).sum(-2) for name, draws in found.items()}
        results.add(**key, **{name: summary(tally, truth) for name, tally in tallies.items()})


def edges(args, results: Records) -> None:
    methods = [each for each in args.methods if each not in (ELSEWHERE, "GMNN")]
    for key, data in cases(args, results, "edges", fold=0, method=methods):
        found, pairs = METHODS[key["method"]](data), some_pairs(data, key["split"])
        if isinstance(found, NeighborMixture):
            found = found.condition(data.y, data.train_mask, 64)
        own = independent_pairs if isinstance(found, Tensor) else type(found).pairwise
        (one, other), table = data.y[pairs], own(found, pairs).flatten(1)
        pair = one * data.logits.shape[1] + other
        agree = {"all": one == one, "agreeing": one == other, "disagreeing": one != other}
        row = {k: node_scores(table[w], pair[w]) for k, w in agree.items() if w.any()}
        results.add(**key | row)


OTHERS: dict[str, Callable[[Data], Tensor]] = {
    "C&S": partial(rivals.correct_and_smooth, fitted=rivals.by_folds),
    "label propagation": rivals.propagation,
    "vector scaling, shrunk": rivals.shrunk_vector,
}


def updated(module: StackedNMM, data: Data, new: Tensor) -> Tensor:
    return module.update(*given(data), new).posterior(*given(data), new=new).marginals()


def labels(args, results: Records) -> None:
    for key, data in cases(args, results, "labels", fold=0, share=SHARES, method=UPDATED):
        test = shuffled(data.test_mask, torch.Generator().manual_seed(key["split"]))
        more, rest = data.clone(), test[len(test) // 2 :]
        more.val_mask[test[: int(key["share"] * len(test))]] = True
        found = {name: timed(make, more) for name, make in OTHERS.items()}
        module = StackedNMM(data.logits.shape[1]).fit(*given(data), data.val_mask)
        posterior = module.posterior(*given(data)).condition(data.y, more.val_mask)
        found["StackedNMM, conditioned"] = posterior.marginals(), None
        found[UPDATED] = timed(updated, module, data, more.val_mask)
        for name, (probs, seconds) in found.items():
            row = {"test": node_scores(probs[rest], data.y[rest]), "seconds": seconds}
            results.add(**key | {"method": name}, **row)


RULES: dict[str, Callable[[Posterior, Tensor], Tensor]] = {
    "entropy": lambda posterior, nodes: torch.special.entr(posterior.marginals()[nodes]).sum(-1),
    "at random": lambda posterior, nodes: torch.rand(len(nodes)),
}


def questions(args, results: Records) -> None:
    data, hood = graph("digits", None)
    data, each = data.clone(), {"split": args.splits, "method": list(RULES)}
    data.hood = hood
    for key in results.missing(task="questions", dataset="digits", backbone="gcn", **each):
        data.train_mask, data.val_mask, open_to, test = few(data.y, key["split"])
        data.logits = trained("gcn", data, key["split"])
        pyro.set_rng_seed(key["split"])
        module = StackedNMM(data.logits.shape[1])
        module.fit(*given(data), data.val_mask)
        known, curve, alike = data.train_mask | data.val_mask, {}, []
        for number in range(QUESTIONS + 1):
            posterior = module.posterior(*given(data)[:3], known)
            if number in SHOWN:
                curve[str(number)] = node_scores(posterior.marginals()[test], data.y[test])
            nodes = (open_to & ~known).nonzero()[:, 0]
            value, entropy = (RULES[name](posterior, nodes) for name in (key["method"], "entropy"))
            alike.append(torch.corrcoef(torch.stack([value, entropy]))[0, 1].item())
            known = known | index_to_mask(nodes[value.argmax()][None], len(known))
        results.add(**key, curve=curve, alike=mean(alike))


def revealed(args, results: Records) -> None:
    """Log-likelihood of all test labels, also of predictions that are revealed block by block."""
    for key, data in cases(args, results, "revealed", method=list(stages.METHODS)):
        found, seconds = timed(stages.METHODS[key["method"]], data)
        results.add(**key, **found, seconds=seconds)


TASKS = priors, splits, edges, labels, counts, questions, revealed
OPTIONS: dict = {"graphs": ["cora", "citeseer", "pubmed"], "backbones": ["gcn", "gat"]}
OPTIONS |= {"splits": [0, 1, 2, 3, 4], "num_folds": 3, "methods": list(METHODS)}
OPTIONS |= {"data_root": Path, "choices": {"backbones": ["gcn", "gat", "mlp"]}}
main = command(__doc__, TASKS, **OPTIONS, results=FILE)

if __name__ == "__main__":
    main()
