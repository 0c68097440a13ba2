# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Seconds and memory on large graphs."""

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn import CorrectAndSmooth

from benchmarks.shared.records import Records
from benchmarks.shared.timing import citation_like, in_a_process, peak_memory, timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import Annotators, FieldPrior, StackedNMM, fit_field, marginals_in_blocks
from pyro_nmm.ops.entries import evidence_entries
from pyro_nmm.ops.gibbs import sweep
from pyro_nmm.ops.sampling import draw_entries

#: Nodes, directed edges and labels: a large graph, and one as dense as co-purchases.
LARGE, DENSE, LATENT = (10**6, 10**7, 20), (13_752, 490_000, 10), (10**6, 10**7, 7)
OF_POSTERIOR = {"marginals": LARGE, "pairwise": LARGE, "sample": LARGE, "sequential": DENSE}
QUERIES = dict.fromkeys(("fit", "pooled", "condition", "log_likelihood"), LARGE) | OF_POSTERIOR
QUERIES |= dict.fromkeys(("smooth", "known", "joint"), LARGE)
QUERIES |= dict.fromkeys(("sweep", "annotators"), LATENT)
#: Labels of a StackedNMM.
CLASSES = 10


def measured(function: Callable, *args) -> tuple:
    """What a function returns, and its seconds and memory."""
    gc.collect()
    (found, seconds), peak, above = peak_memory(timed, function, *args)
    return found, {"seconds": seconds, "peak": peak, "above": above}


def scale(args, results: Records) -> None:
    for query, (*whole, classes) in QUERIES.items():
        for part in args.parts:
            nodes, edges = (number // part for number in whole)
            known = {"nodes": nodes, "classes": classes, "threads": args.threads}
            for key in results.missing(task="scale", query=query, **known):
                if nodes >= 200:  # fewer are too few for a graph with hubs
                    how = query, nodes, edges, classes
                    results.add(**key, **in_a_process(args.threads, one_query, *how))


def one_query(query: str, *size: int) -> dict:
    torch.manual_seed(0)
    prepared(query, 300, 1500, size[-1])[1]()  # pays for what is loaded or compiled once
    name, function, edges = prepared(query, *size)
    return {"name": name, "edges": edges} | measured(function)[1]


def prepared(query: str, num_nodes: int, num_edges: int, num_classes: int) -> tuple:
    """The query's name in tables, the query, and the number of edges."""
    hood = Neighborhood(citation_like(num_nodes, num_edges // 2), num_nodes)
    if QUERIES[query] is LATENT:
        return *latent(query, hood, num_classes), hood.num_edges
    scores = 2 * torch.randn(num_nodes, num_classes)
    # Where a fit starts: queries cost the same at all values.
    with torch.no_grad():
        mix = NeighborMixture(hood, *StackedNMM(pool=False)(hood, scores))
    # Labels of the model itself: particles then differ in weight, and are drawn anew.
    y, part = mix.sample(), torch.rand(num_nodes)
    train, held_out, test = part < 0.02, part > 0.98, (part - 0.5).abs() < 0.01
    pairs, given = torch.randint(num_nodes, (2, 1000)), (hood, scores, y, train, held_out)
    joint = f"log_likelihood of {int(test.sum())} nodes, 16 particles"
    alone = "StackedNMM.fit on scores alone, 2 % + 2 %"
    post = mix.condition(y, train, num_samples=64) if query in OF_POSTERIOR else None
    tenth, some = part < 0.1, (part - 0.2).abs() < 0.025
    more, smoother = (hood, scores, y, tenth), CorrectAndSmooth(50, 0.8, 50, 0.8)
    seen, probs = (y[tenth], tenth, torch.stack([hood.source, hood.target])), scores.softmax(-1)
    smooth, whole = "Correct and Smooth, 10 % known", "StackedNMM.fit, posterior, 10 % + 5 %"
    particles = "log_likelihood of 5 %, 10 % known, 64 particles"
    found = {
        "fit": (alone, lambda: StackedNMM(pool=False).fit(*given, num_steps=150)),
        "pooled": ("StackedNMM.fit, 2 % + 2 %", lambda: StackedNMM(num_classes).fit(*given)),
        "condition": ("condition, 64 samples", lambda: mix.condition(y, train, 64)),
        "log_likelihood": (joint, lambda: mix.log_likelihood(y, test, num_particles=16)),
        "smooth": (smooth, lambda: smoother.smooth(smoother.correct(probs, *seen), *seen)),
        "known": (whole, lambda: StackedNMM(num_classes).fit(*more, some).posterior(*more)),
        "joint": (particles, lambda: mix.log_likelihood(y, some, tenth, num_particles=64)),
        "marginals": ("marginals", lambda: post.marginals()),
        "pairwise": ("pairwise of 1,000 pairs", lambda: post.pairwise(pairs)),
        "sample": ("sample", lambda: post.sample()),
        "sequential": ('predict("sequential")', lambda: post.predict(method="sequential")),
    }
    return *found[query], hood.num_edges


def latent(query: str, hood: Neighborhood, num_classes: int) -> tuple[str, Callable]:
    """Labels of the model, of which ten annotators are right in six of ten answers."""
    mix = NeighborMixture(hood, *FieldPrior(num_classes)(hood))
    truth = mix.sample()[:, None]
    wrong = torch.rand(hood.num_nodes, 10) < 0.4
    answers = torch.where(wrong, torch.randint(num_classes, wrong.shape), truth)
    emission, name = Annotators(num_classes), "Annotators.fit, 10 annotators, 2 chains of 50 sweeps"
    if query == "annotators":
        options = {"num_starts": 1, "num_steps": 20, "num_draws": 5, "num_chains": 2}
        return name, partial(fit_field, emission, hood, answers, **options)
    evidence = emission.log_prob(emission.start(answers, hood), answers)
    terms = evidence_entries(hood.log_softmax(mix.logits), mix.table, evidence)
    terms = terms.map(lambda part: part.detach()[None])
    first, second = torch.rand(2, 1, hood.num_nodes, dtype=torch.double)
    draw = draw_entries(hood, terms, first)
    return "a sweep of latent labels, one chain", partial(sweep, hood, terms, draw, second[None])


def sizes(args, results: Records) -> None:
    for key in results.missing(task="sizes", nodes=args.sizes, threads=args.threads):
        with tempfile.TemporaryDirectory() as folder:
            for stages in (in_memory, from_files):
                edges, rows = in_a_process(args.threads, stages, key["nodes"], Path(folder))
                for stage, row in rows.items():
                    results.add(**key, classes=CLASSES, stage=stage, **row, edges=edges)


def in_memory(nodes: int, folder: Path) -> tuple[int, dict[str, dict]]:
    """A graph, a fit, and posterior marginals of all nodes: in blocks, and at once."""
    if nodes > 500:
        in_memory(500, Path(tempfile.mkdtemp(dir=folder)))  # pays for what is loaded or compiled
    torch.manual_seed(0)
    rows = {}
    edges, rows["a graph"] = measured(citation_like, nodes, 5 * nodes)
    hood, rows["neighbourhoods"] = measured(Neighborhood, edges, nodes)
    del edges
    scores, y = 2 * torch.randn(nodes, CLASSES), torch.randint(CLASSES, (nodes,))
    part = torch.rand(nodes)
    given, held_out = (hood, scores, y, part < 0.02), part > 0.98
    stacked, rows["fit"] = measured(StackedNMM(CLASSES).fit, *given, held_out)
    torch.save((stacked.state_dict(), hood.ptr, hood.source, *given[1:]), folder / "stacked.pt")
    blocks, rows["marginals in blocks"] = measured(in_blocks, folder, stacked, *given)
    mixture, rows["alpha and attention"] = measured(stacked.mixture, *given)
    found, rows["marginals"] = measured(mixture.marginals)
    torch.testing.assert_close(torch.from_numpy(blocks), found, atol=1e-4, rtol=1e-4)
    return hood.num_edges, rows


def from_files(nodes: int, folder: Path) -> tuple[int, dict[str, dict]]:
    """The same marginals in blocks, of a graph and of scores in a file."""
    in_memory(500, Path(tempfile.mkdtemp(dir=folder)))
    state, ptr, source, *known = torch.load(folder / "stacked.pt", mmap=True)
    hood = Neighborhood.of_rows(nodes, torch.arange(nodes), ptr, source)
    stacked = StackedNMM(CLASSES)
    stacked.load_state_dict(state)
    row = measured(in_blocks, folder, stacked, hood, *known)[1]
    return hood.num_edges, {"marginals in blocks, from files": row}


def in_blocks(folder: Path, stacked: StackedNMM, hood: Neighborhood, scores: Tensor, *known):
    """Marginals that are written to a file as they come."""
    out = np.memmap(folder / "marginals", np.float32, "w+", shape=tuple(scores.shape))
    for nodes, probs in marginals_in_blocks(stacked, hood, scores, *known):
        out[nodes] = probs.numpy()
    out.flush()
    return out
