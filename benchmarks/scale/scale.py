# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Seconds and peak resident memory of every query on a large graph, each in a process of its own
and again at a tenth of the size, of latent labels down to a thousandth: a query that is linear
takes a tenth.

Table 4 of ``benchmarks/speed.py``.
"""

from __future__ import annotations

import time

import torch

from benchmarks.shared.common import Records
from benchmarks.shared.timing import citation_like, in_a_process, peak_memory, timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import Annotators, FieldPrior, StackedNMM
from pyro_nmm.ops.evidence import LatentTerms, draw_latent
from pyro_nmm.ops.gibbs import sweep

#: Nodes, directed edges, labels: a large graph, and one as dense as co-purchases are.
LARGE, DENSE = (10**6, 10**7, 20), (13_752, 490_000, 10)
#: Of latent labels that annotators answered about.
LATENT, ANNOTATORS = (10**6, 10**7, 7), 10
QUERIES = (
    "fit", "pooled", "condition", "marginals", "pairwise", "sample", "log_likelihood", "sequential",
    "sweep", "annotators",
)  # fmt: skip
SIZES = {"sequential": DENSE, "sweep": LATENT, "annotators": LATENT}


def prepared(query: str, num_nodes: int, num_edges: int, num_classes: int):
    """
    The query as a function of nothing, what it is called in the table, and the edges: of a graph
    with hubs, a classifier's scores, and 2 % of the nodes each to learn from.
    """
    hood = Neighborhood(citation_like(num_nodes, num_edges // 2), num_nodes)
    if query in ("sweep", "annotators"):
        return *latent(query, hood, num_classes), hood.num_edges
    scores = 2 * torch.randn(num_nodes, num_classes)
    # Where a fit starts: queries cost the same at all values.
    mix = StackedNMM(pool=False).mixture(hood, scores)
    # Labels of the model itself: particles then differ in weight, and are drawn anew.
    y, part = mix.sample(), torch.rand(num_nodes)
    train, held_out, test = part < 0.02, part > 0.98, (part - 0.5).abs() < 0.01
    pairs = torch.randint(num_nodes, (2, 1000))
    name = {
        "fit": "StackedNMM.fit on scores alone, 2 % + 2 %",
        "pooled": "StackedNMM.fit, 2 % + 2 %",
        "condition": "condition, 64 samples",
        "pairwise": "pairwise of 1,000 pairs",
        "log_likelihood": f"log_likelihood of {int(test.sum())} nodes, 16 particles",
        "sequential": 'predict("sequential")',
    }.get(query, query)
    run = {
        "fit": lambda: StackedNMM(pool=False).fit(hood, scores, y, train, held_out, num_steps=150),
        "pooled": lambda: StackedNMM(num_classes).fit(hood, scores, y, train, held_out),
        "condition": lambda: mix.condition(y, train, 64),
        "log_likelihood": lambda: mix.log_likelihood(y, test, num_particles=16),
    }
    if query not in run:
        posterior = mix.condition(y, train, num_samples=64)
        run = {
            "marginals": posterior.marginals,
            "pairwise": lambda: posterior.pairwise(pairs),
            "sample": posterior.sample,
            "sequential": lambda: posterior.predict(method="sequential"),
        }
    return run[query], name, hood.num_edges


def latent(query: str, hood: Neighborhood, num_classes: int):
    """Labels of the model, of which annotators are right in six of ten answers."""
    mix = NeighborMixture(hood, *FieldPrior(num_classes)(hood))
    truth = mix.sample()[:, None]
    wrong = torch.rand(hood.num_nodes, ANNOTATORS) < 0.4
    answers = torch.where(wrong, torch.randint(num_classes, wrong.shape), truth)
    emission = Annotators(num_classes)
    if query == "annotators":
        options = {"num_starts": 1, "num_steps": 20, "num_draws": 5, "num_chains": 2}
        name = f"Annotators.fit, {ANNOTATORS} annotators, 2 chains of 50 sweeps"
        return lambda: emission.fit(hood, answers, **options), name
    evidence = emission.log_prob(emission.start(answers, hood), answers)[None]
    parts = hood.log_softmax(mix.logits)[None], mix.table[None], evidence
    terms = LatentTerms(*(part.detach() for part in parts))
    first, second = torch.rand(2, 1, hood.num_nodes, dtype=torch.double)
    draw = draw_latent(hood, terms, first)
    return lambda: sweep(hood, terms, draw, second[None]), "a sweep of latent labels, one chain"


def one_query(query: str, num_nodes: int, num_edges: int, num_classes: int) -> dict:
    """A measurement, in this process."""
    torch.manual_seed(0)
    prepared(query, 300, 1500, num_classes)[0]()  # pays for what is loaded or compiled once
    run, name, edges = prepared(query, num_nodes, num_edges, num_classes)
    cpu = time.process_time()
    (_, seconds), peak, above = peak_memory(timed, run)
    return {
        "task": "scale", "query": query, "name": name, "nodes": num_nodes, "edges": edges,
        "classes": num_classes, "seconds": seconds, "cpu_seconds": time.process_time() - cpu,
        "peak": peak, "above": above, "threads": torch.get_num_threads(),
    }  # fmt: skip


def measure(args, results: Records) -> None:
    """Table 4."""
    for query in args.queries:
        *sizes, classes = SIZES.get(query, LARGE)
        for part in (1000, 100, 10, 1) if sizes == list(LATENT[:2]) else (10, 1):
            nodes, edges = (round(size * args.scale_nodes / 10**6) // part for size in sizes)
            if nodes < 100:  # too small for a graph with hubs
                continue
            known = {"nodes": nodes, "classes": classes, "threads": args.threads}
            if not results.has(task="scale", query=query, **known):
                one = one_query, query, nodes, edges, classes
                results.add(**in_a_process(args.threads, *one))
