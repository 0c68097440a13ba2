# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Seconds, memory and noise: of large graphs, steps, draws of q(c|y), estimates, and a GPU."""

import gc
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import mean, median, stdev

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceGraph_ELBO
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, l1_loss, one_hot
from torch_geometric.nn import GCN, CorrectAndSmooth

from benchmarks.shared.graphs import correct_and_smooth
from benchmarks.shared.records import Records
from benchmarks.shared.timing import citation_like, in_a_process, in_turn, peak_memory, timed
from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional, compiled
from pyro_nmm.guides import AmortizedNMM, Chains, evidence_guide, ordered_guide
from pyro_nmm.models import (
    Annotators,
    FieldPrior,
    NMMNetwork,
    StackedNMM,
    fit_field,
    nmm,
)

#: Nodes, directed edges and labels: a large graph, and one as dense as co-purchases.
LARGE, DENSE, LATENT = (10**6, 10**7, 20), (13_752, 490_000, 10), (10**6, 10**7, 7)
OF_POSTERIOR = {"marginals": LARGE, "pairwise": LARGE, "sample": LARGE, "sequential": DENSE}
QUERIES = dict.fromkeys(("pooled", "condition", "log_likelihood"), LARGE) | OF_POSTERIOR
QUERIES |= dict.fromkeys(("smooth on CSR", "known"), LARGE) | {"annotators": LATENT}


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
        return *latent(hood, num_classes), hood.num_edges
    scores = 2 * torch.randn(num_nodes, num_classes)
    # Where a fit starts: queries cost the same at all values.
    with torch.no_grad():
        mix = NeighborMixture(hood, *StackedNMM(num_classes, pool=False)(hood, scores))
    # Labels of the model itself: particles then differ in weight, and are drawn anew.
    y, part = mix.sample(), torch.rand(num_nodes)
    train, held_out, test = part < 0.02, part > 0.98, (part - 0.5).abs() < 0.01
    pairs, given = torch.randint(num_nodes, (2, 1000)), (hood, scores, y, train, held_out)
    joint = f"log_likelihood of {int(test.sum())} nodes, 16 particles"
    post = mix.condition(y, train, num_samples=64) if query in OF_POSTERIOR else None
    tenth, some = part < 0.1, (part - 0.2).abs() < 0.025
    more, smoother = (hood, scores, y, tenth), CorrectAndSmooth(50, 0.8, 50, 0.8)
    seen, probs = (y, tenth, torch.stack([hood.source, hood.target])), scores.softmax(-1)
    smooth, whole = "Correct and Smooth on CSR, 10 % known", "StackedNMM.fit, posterior, 10 % + 5 %"
    found = {
        "pooled": ("StackedNMM.fit, 2 % + 2 %", lambda: StackedNMM(num_classes).fit(*given)),
        "condition": ("condition, 64 samples", lambda: mix.condition(y, train, 64)),
        "log_likelihood": (joint, lambda: mix.log_likelihood(y, test, num_particles=16)),
        "smooth on CSR": (smooth, lambda: correct_and_smooth(smoother, probs, *seen)),
        "known": (whole, lambda: StackedNMM(num_classes).fit(*more, some).posterior(*more)),
        "marginals": ("marginals", lambda: post.marginals()),
        "pairwise": ("pairwise of 1,000 pairs", lambda: post.pairwise(pairs)),
        "sample": ("sample", lambda: post.sample()),
        "sequential": ('predict("sequential")', lambda: post.predict(method="sequential")),
    }
    return *found[query], hood.num_edges


def latent(hood: Neighborhood, num_classes: int) -> tuple[str, Callable]:
    """Labels of the model, of which ten annotators are right in six of ten answers."""
    mix = NeighborMixture(hood, *FieldPrior(num_classes)(hood))
    truth = mix.sample()[:, None]
    wrong = torch.rand(hood.num_nodes, 10) < 0.4
    answers = torch.where(wrong, torch.randint(num_classes, wrong.shape), truth)
    emission, name = Annotators(num_classes), "Annotators.fit, 10 annotators, 2 chains of 50 sweeps"
    options = {"num_starts": 1, "num_steps": 20, "num_draws": 5, "num_chains": 2}
    return name, partial(fit_field, emission, hood, answers, **options)


ESTIMATORS = ["reward_to_go", "no_score"]
#: How many times as many steps: the score term is a difference of noisy means.
MORE = {"reward_to_go": 5}
#: Nodes, links and labels.
MEDIUM = 20_000, 50_000, 3
#: Of the graph of Cora's size, and of the chains that give the true marginals.
CLASSES, CHAINS, SWEEPS = 7, 2048, 20
cpu_timed = partial(timed, clock=time.process_time)


def seconds(repeats: int, functions: dict[str, Callable], timer: Callable = cpu_timed) -> dict:
    """Medians of functions that take turns, after two rounds to warm up."""
    turns = {name: lambda f=f: timer(f)[1] for name, f in functions.items()}
    return {name: median(times[2:]) for name, times in in_turn(turns, repeats + 2).items()}


def problem(num_nodes: int, num_links: int, num_classes: int) -> tuple:
    """Fields of rows; neighbourhoods, alpha, logits and labels."""
    hood = Neighborhood(citation_like(num_nodes, num_links), num_nodes)
    alpha = torch.randn(num_nodes, num_classes).exp().requires_grad_()
    logits = torch.randn(hood.num_edges, requires_grad=True)
    place = {"nodes": num_nodes, "edges": hood.num_edges, "device": "cpu"}
    return place, hood, alpha, logits, torch.randint(num_classes, (num_nodes,))


def draw_in_a_loop(hood, alpha, logits, y) -> Tensor:
    """q(c|y) as it is written down: one node after the other."""
    attention, counts = hood.softmax(logits), alpha.clone()
    ptr, chosen = hood.ptr.tolist(), []
    for i in torch.randperm(len(y)).tolist():
        near = hood.source[ptr[i] : ptr[i + 1]]
        share = counts[near, y[i]] / counts[near].sum(-1)
        c = near[torch.multinomial(attention[ptr[i] : ptr[i + 1]] * share, 1)]
        counts[c, y[i]] += 1
        chosen.append(c)
    return torch.cat(chosen)


def draw(args, results: Records) -> None:
    place, hood, alpha, logits, y = problem(*MEDIUM)
    given, devices = (hood, alpha.detach(), logits.detach(), y), compiled.DEVICES
    each = {"task": "draw", "threads": args.threads} | place
    for key in results.missing(**each, code="loop", particles=1):
        results.add(**key, seconds=cpu_timed(draw_in_a_loop, *given)[1])
    for key in results.missing(**each, particles=args.samples, code=["compiled", "sweeps"]):
        compiled.DEVICES = devices if key["code"] == "compiled" else set()
        q = OrderedConditional(*given, validate_args=False)
        found = seconds(args.repeats, {"draws": partial(q.sample, (key["particles"],))})
        results.add(**key, seconds=found["draws"] / key["particles"])
    compiled.DEVICES = devices


def step_of(model: Callable, guide: Callable, given: tuple, particles: int, estimator: str) -> None:
    """Adds the gradients of the loss to the tensors of ``given`` that need them."""
    elbo = TraceGraph_ELBO(particles, max_plate_nesting=0, vectorize_particles=True)
    guide = partial(guide, collapsed=True, estimator=estimator)
    elbo.loss_and_grads(partial(model, collapsed=True), guide, *given)


def latent_nmm(hood, alpha, logits, table: Tensor, collapsed: bool) -> None:
    """Latent labels; the log-probabilities of what is observed are a table."""
    y = nmm(hood, alpha, logits, collapsed=collapsed)
    pyro.factor("w", table.expand(*y.shape, -1).gather(-1, y[..., None]).sum((-2, -1)))


observed_step = partial(step_of, nmm, ordered_guide)
latent_step = partial(step_of, latent_nmm, evidence_guide)


def gcn_step(model: GCN, x: Tensor, edge_index: Tensor, y: Tensor, observed: Tensor, p=0.0) -> None:
    model.zero_grad()
    cross_entropy(model(dropout(x, p), edge_index)[observed], y[observed]).backward()


def step(args, results: Records) -> None:
    place, *parts, y = problem(*MEDIUM)
    gcn = GCN(500, 16, 2, MEDIUM[2], dropout=0.5, cached=True)
    inputs = torch.randn(len(y), 500), citation_like(*MEDIUM[:2])
    each = {"labelled": (60, 140, len(y)), "particles": args.samples, "estimator": ESTIMATORS}
    for key in results.missing(task="step", **place, threads=args.threads, **each):
        labels = y, torch.randperm(len(y)) < key["labelled"]
        bound = partial(observed_step, (*parts, *labels), key["particles"], key["estimator"])
        plain = partial(gcn_step, gcn, *inputs, *labels)
        functions = {"bound": bound, "GCN": plain, "GCN, input dropout": partial(plain, p=0.5)}
        results.add(**key, seconds=seconds(args.repeats, functions))


def step_without_value(
    model: Callable, guide: Callable, num_chains: int, *given, **observed
) -> None:
    """Adds the gradients of ``Trace_ELBO``, but does not ask for its value, which is a wait."""
    with pyro.plate("num_particles_vectorized", num_chains, dim=-1):
        drawn = poutine.trace(guide).get_trace(*given, **observed)
        replayed = poutine.trace(poutine.replay(model, trace=drawn))
        (replayed.get_trace(*given, **observed).log_prob_sum() / -num_chains).backward()


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The step as a CUDA graph, after three steps that load libraries and start chains."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def queries(nodes: int, at: str) -> dict[str, Callable]:
    """Of one graph on a device; each waits for its result."""
    pyro.set_rng_seed(0)
    _, hood, *parts, _ = problem(nodes, 5 * nodes, CLASSES)
    alpha, logits = (part.detach().to(at).requires_grad_() for part in parts)
    more = torch.randn(nodes, CLASSES), torch.randn(nodes, 100), torch.rand(nodes)
    (scores, x, part), hood = (each.to(at) for each in more), hood.to(at)
    known, some, edges = part < 0.1, part > 0.95, torch.stack([hood.source, hood.target])
    mix = NeighborMixture(hood, alpha.detach(), logits.detach())
    post = mix.condition(y := mix.sample(), known, num_samples=64)
    gcn, *both = (GCN(100, 16, 2, n, cached=True).to(at) for n in (CLASSES, CLASSES, 16))
    network = NMMNetwork(*both, num_classes=CLASSES).to(at)
    table = scores.clone().requires_grad_()
    pair, chained = (
        AmortizedNMM(hood, network, name=f"{at} {nodes}", estimator=how)
        for how in ("reward_to_go", Chains())
    )
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    amortized, given = partial(elbo.loss_and_grads, pair.model, pair.guide), (hood, alpha, logits)
    bound = partial(observed_step, (*given, y, None), estimator="reward_to_go")
    choices = mix.choices(y)
    sweep = partial(choices.sweep, choices.sample((1,)))
    guide = partial(evidence_guide, collapsed=True, estimator=Chains())
    programs = partial(latent_nmm, collapsed=True), guide
    # Steps that a CUDA graph may hold: indices in place of a mask, and no value of the loss.
    labels = x, edges, y, known.nonzero()[:, 0]
    other = GCN(100, 17, 2, CLASSES, cached=True).to(at)
    static = {
        "step of a GCN": partial(gcn_step, gcn, *labels),
        "step of a GCN with 17 hidden units": partial(gcn_step, other, *labels),
        "two GCNs and edge scores": lambda: sum(
            t.sum() for t in network(hood, x, edges)
        ).backward(),
        "step of an NMM of two GCNs, four chains": partial(
            step_without_value, chained.model, chained.guide, 4, x, edges, y=y, observed=known
        ),
        "step with latent labels, four chains": partial(
            step_without_value, *programs, 4, *given, table
        ),
    }
    if at == "cuda":
        static |= {f"{name}, captured": captured(step) for name, step in static.items()}
    asked = static | {
        "step of an NMM of two GCNs, T = 4": partial(amortized, x, edges, y=y, observed=known),
        "step of the bound, T = 1": partial(bound, 1),
        "step of the bound, T = 8": partial(bound, 8),
        "step with latent labels, T = 4": partial(latent_step, (*given, table), 4, "reward_to_go"),
        "sweep of a chain, all labels observed": partial(sweep, 1),
        "eight sweeps": partial(sweep, 8),
        "`sample`": mix.sample,
        "`marginals`": lambda: NeighborMixture(hood, mix.alpha, mix.logits).marginals(),
        "`condition`, 64 samples": partial(mix.condition, y, known, 64),
        "`marginals` of this posterior": post.marginals,
        "`log_likelihood`, 16 particles": partial(mix.log_likelihood, y, known, None, 16),
        "`StackedNMM.fit`": partial(StackedNMM(CLASSES).fit, hood, scores, y, known, some),
    }
    wait = torch.cuda.synchronize if at == "cuda" else list
    return {name: lambda query=query: (query(), wait()) for name, query in asked.items()}


def device(args, results: Records) -> None:
    """Without Pyro's validation, whose checks of values wait for them."""
    pyro.enable_validation(False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    for nodes in args.sizes:
        each = {at: queries(nodes, at) for at in ("cpu", "cuda")[: 1 + bool(gpu)]}
        names = {"nodes": nodes, "query": list(each["cuda" if gpu else "cpu"])}
        for key in results.missing(task="device", gpu=gpu, threads=args.threads, **names):
            name = key["query"]
            turns = {at: found[name] for at, found in each.items() if name in found}
            results.add(**key, seconds=seconds(args.repeats, turns, timed))


def growth(args, results: Records) -> None:
    for key in results.missing(task="growth", size=args.sizes, threads=args.threads):
        results.add(**key, **in_a_process(args.threads, one_size, key["size"]))


def one_size(size: int) -> dict:
    """The graph's making counts towards the memory."""
    pyro.set_rng_seed(0)
    timed_step(100, 500)  # pays for what is loaded or compiled once
    found, row = measured(timed_step, size // 10, size // 2)
    return row | found


def timed_step(nodes: int, links: int) -> dict:
    place, *parts = problem(nodes, links, 3)
    step = {"seconds": partial(observed_step, (*parts, None), 1, "reward_to_go")}
    return place | seconds(3, step)


def cora_like(share: float) -> tuple[NeighborMixture, Tensor, Tensor, Tensor]:
    """A mixture away from the one that made the labels; labels, observed nodes, and log alpha."""
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.double)  # of the graph's random numbers
    hood = Neighborhood(citation_like(2708, 5278), 2708)
    torch.set_default_dtype(torch.float)
    logits = torch.randn(hood.num_edges, dtype=torch.double)
    alpha = torch.randn(hood.num_nodes, CLASSES, dtype=torch.double).mul(1.5).exp()
    y = NeighborMixture(hood, alpha, logits).sample()
    log_alpha = alpha.log() + 0.3 * torch.randn_like(alpha)
    mix = NeighborMixture(hood, log_alpha.exp(), logits + 0.5 * torch.randn_like(logits))
    return mix, y, torch.rand(len(y), dtype=torch.double) < share, log_alpha


def gradients_of(given: tuple, estimator: str, particles: int, steps: int) -> Tensor:
    """``(steps, P)`` gradients of the loss."""
    mix, y, observed, log_alpha = given
    found = []
    for _ in range(steps):
        a, b = log_alpha.clone().requires_grad_(), mix.logits.clone().requires_grad_()
        observed_step((mix.hood, a.exp(), b, y, observed), particles, estimator)
        found.append(torch.cat([a.grad.flatten(), b.grad]))
    return torch.stack(found)


def summary(found: Tensor, observed: Tensor) -> dict:
    """``sd`` is the root of the total variance of one step's gradient."""
    noise = found.var(0).sum().sqrt().item()
    return {"labelled": int(observed.sum()), "steps": len(found), "sd": noise}


def variance(args, results: Records) -> None:
    for key in results.missing(particles=4, repeats=args.repeats, seed=0, share=args.shares):
        given, found = cora_like(key["share"]), {}
        for name in ("reinforce", *ESTIMATORS):
            found[name] = gradients_of(given, name, 4, args.repeats * MORE.get(name, 1))
        for name, steps in found.items():
            row = summary(steps, given[2])
            results.add(**key, estimator=name, mean=steps.mean(0).norm().item(), **row)


def gradients(args, results: Records) -> None:
    each = {"share": args.shares, "estimator": ESTIMATORS, "particles": args.samples}
    for key in results.missing(task="gradients", seed=0, **each):
        given, name = cora_like(key["share"]), key["estimator"]
        gradients_of(given, name, 2, MORE.get(name, 1))  # warms up
        found, seconds = cpu_timed(gradients_of, given, name, key["particles"], args.repeats)
        results.add(**key, **summary(found, given[2]), seconds=seconds / args.repeats)


@cache
def reference(share: float) -> tuple[NeighborMixture, Tensor, Tensor, list[Tensor]]:
    """A mixture, labels, observed nodes, and marginals of the others by two halves of chains."""
    mix, y, observed, _ = cora_like(share)
    latents = mix.latents(one_hot(y, CLASSES).to(mix.alpha).log(), observed)
    halves = [latents.posterior(CHAINS // 2, num_sweeps=SWEEPS) for _ in range(2)]
    return mix, y, observed, [half.marginals()[~observed] for half in halves]


def marginals(args, results: Records) -> None:
    each = {"share": args.shares, "weighted": [False, True], "draws": args.samples}
    for key in results.missing(task="marginals", seed=0, **each):
        mix, y, observed, halves = reference(key["share"])
        how = y, observed, key["draws"], key["weighted"]
        query = lambda: mix.condition(*how).marginals()  # noqa: B023, E731
        turns = [cpu_timed(query) for _ in range(args.repeats)]
        errors = [l1_loss(probs[~observed], sum(halves) / 2).item() for probs, _ in turns]
        row = {"error": mean(errors), "error of the reference": l1_loss(*halves).item() / 2}
        row = {name: CLASSES / 2 * error for name, error in row.items()}
        row |= {"labelled": int(observed.sum()), "seconds": median(time for _, time in turns)}
        results.add(**key, **row)


def likelihood(args, results: Records) -> None:
    each = {"share": args.shares, "particles": [0, *args.samples]}
    for key in results.missing(task="likelihood", seed=0, **each):
        (mix, *given, _), number = cora_like(key["share"]), key["particles"]
        estimate = partial(mix.log_likelihood, num_particles=number) if number else mix.elbo
        cpu_timed(estimate, *given)  # warms up
        turns = [cpu_timed(estimate, *given) for _ in range(args.repeats)]
        values = [value.item() for value, _ in turns]
        row = {"labelled": int(given[1].sum()), "seconds": median(time for _, time in turns)}
        results.add(**key, **row, mean=mean(values), sd=stdev(values))
