# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM and rivals as approximations of Markov random fields. README.md explains the tasks."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, lru_cache, partial
from itertools import product

import pyro
import torch
from torch import Tensor, nn

from benchmarks.random_fields import fields, rivals
from benchmarks.random_fields.fields import Grid, Shape, grid
from benchmarks.shared.records import RESULTS, Records, command, pick
from benchmarks.shared.timing import timed
from pyro_nmm import ChosenLabels, NeighborChoice, NeighborMixture, models
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import FreeNMM, MarginalField, PairwiseMRF
from pyro_nmm.models.random_fields import coarseness

EVERY = ["mean field", "chains"]
EVERY += ["NMM, 500 steps", "NMM of half, 500 steps", "VAN, 150 steps", "VAN, 600 steps"]
#: Further fits for two labels, and windows as the number of labels allows.
LONG = ["NMM, 2000 steps", "NMM of half, 2000 steps"]
WINDOWS = {
    2: ["windows 3 x 3, 8 given", "windows 5 x 5, 8 given", "windows 7 x 7, 8 given"],
    4: ["windows 3 x 3, 4 given", "windows 5 x 5, 4 given", "windows 7 x 7, 6 given"],
    8: ["windows 3 x 3, 3 given", "windows 5 x 5, 4 given", "windows 7 x 7, 5 given"],
}
#: By the number of labels; and those whose cost allows 128 x 128 pixels.
NARROW = {2: EVERY + WINDOWS[2] + LONG, 4: EVERY + WINDOWS[4], 8: EVERY + WINDOWS[8]}
LARGE = ["chains", "NMM of half, 500 steps", *WINDOWS[2]]
#: Draws for a KL divergence, and random starts of mean fields.
DRAWS, STARTS = 2048, 12


def with_error(samples: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


@torch.no_grad()
def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    parts = [mix.entropy_bound(chunk, order) for _ in range(num_samples // chunk)]
    return with_error(-torch.cat(parts).double() - field.expected_potential(mix).double())


@torch.no_grad()
def drawn_bound(mix: NeighborMixture, half: MarginalField, order: Tensor, num_samples: int):
    """The loss of :func:`loss` by joint draws; choices drawn from q(c | y) would bound it."""
    parts = []
    for _ in range(num_samples // 64):
        c = NeighborChoice(mix.hood, mix.logits).sample((64,))
        y = ChosenLabels(mix.alpha, c).sample()
        terms = mix.choices(y, order=order).log_terms(c)
        parts.append(terms.sum(-1).double() - half.log_potential(y).double())
    return with_error(torch.cat(parts))


@torch.no_grad()
def product_loss(field: PairwiseMRF, probs: Tensor) -> float:
    """E[log q - log p*] of independent labels ``(N, C)``; each edge counts half at both ends."""
    probs = probs.to(field.unary)
    energy = (probs * (field.local_logits(probs) + field.unary)).sum() / 2
    return (-torch.special.entr(probs).sum() - energy).item()


def divergence(mix: NeighborMixture, field: PairwiseMRF, order: Tensor) -> tuple[float, float]:
    """E[log p(y) - log p*(y)] and its standard error, log p(y) by importance weights."""
    draws = mix.sample((256,))
    log_prob = torch.stack([mix.log_likelihood(y, order=order) for y in draws])
    return with_error((log_prob - field.log_potential(draws)).double())


@torch.no_grad()
def drawn_loss(family, field: PairwiseMRF, count: int = DRAWS) -> tuple[float, float]:
    """E[log q(y) - log p*(y)], which is KL(q || p) - log Z, and its standard error."""
    y = family.sample(count)
    return with_error(family.log_prob(y).double() - field.log_potential(y).double())


def fit(target, windows: Grid, network: nn.Module | None, **options) -> NeighborMixture:
    """The NMM of a network, fitted from coarse to fine."""
    return fit_mixture(target, windows.hood, network, order=windows.order, **options)[0]


def fits(target, windows: Grid, starts: list, **steps: int) -> Iterator[NeighborMixture]:
    """NMMs one by one from starts: alpha, logits, and options of ``FreeNMM`` and of the fit."""
    for alpha, logits, free, options in starts:
        network = FreeNMM(windows.hood, alpha.shape[1], alpha.contiguous(), gamma=0.0, **free)
        with torch.no_grad():
            network.logits.add_(logits)
        yield fit(target, windows, network, **steps, **options)


def two_starts(unary: Tensor, marginals: Tensor, logits: Tensor) -> list[tuple]:
    """Near each pixel's own evidence, and near the mean field."""
    evidence = unary.softmax(-1), logits, {"kappa": 1.0}, {}
    return [evidence, (marginals, logits, {}, {})]


def fit_all(field: PairwiseMRF, windows: Grid, marginals: Tensor, given=None, **steps: int):
    """The NMM of all pixels: the best of two starts, and of a ``given`` mixture, if any."""
    starts = two_starts(field.unary, marginals, -0.5 * windows.distance)
    if given is not None:
        options = {"kappa": 1.0, "epsilon": 0.0}, {"lr": 0.01}
        starts.append((given.alpha, given.logits, *options))
    count = max(4, 2**15 // field.num_nodes)
    score = partial(loss, field=field, order=windows.order, num_samples=8 * count, chunk=count)
    return min(fits(field, windows, starts, **steps), key=score)


def fit_half(field: PairwiseMRF, shape: Shape, marginals: Tensor, **steps: int):
    """
    The NMM of every other pixel, first from coarse to fine, the rest summed out. Also the field of
    the pixels that stay, and the order of the fit.
    """
    half = MarginalField(field, coarseness(*shape) != 2)
    windows, stay = grid(shape, 2, half.stay), half.nodes
    # The nearest pixels are diagonal, at a squared distance of 2.
    starts = two_starts(field.unary[stay], marginals[stay], -0.25 * windows.distance)
    score = partial(drawn_bound, half=half, order=windows.order, num_samples=256)
    return min(fits(half, windows, starts, **steps), key=score), half, windows.order


def fitted(name: str, field: PairwiseMRF, shape: Shape):
    """A function of the loss and, if sampled, its error."""
    kind, numbers = name.split(",")[0], [int(n) for n in re.findall(r"\d+", name)]
    if kind == "chains":
        rows = torch.arange(field.num_nodes).view(shape)
        starts = STARTS if field.num_nodes < 1000 else 2  # for speed
        found = [rivals.chain_mean_field(field, each, starts)[1] for each in (rows, rows.T)]
        return lambda: (min(found),)
    if kind == "VAN":  # a pixel's conditional in the target needs a memory of no more than a row
        return partial(drawn_loss, rivals.fit_van(field, shape[1] + 1, numbers[0]), field)
    if kind.startswith("windows"):
        side, _, given = numbers
        return partial(drawn_loss, rivals.Windowed(field, grid(shape, side // 2), given), field)
    if kind not in ("mean field", "NMM", "NMM of half"):
        raise ValueError(f"no method is called {name!r}")
    marginals, losses = mean_field(field, num_random=STARTS)
    if kind == "mean field":
        return lambda: (losses[0].item(),)
    if kind == "NMM of half":
        found = fit_half(field, shape, marginals, num_steps=numbers[-1])
        return partial(drawn_bound, *found, DRAWS)
    windows = grid(shape)
    mix = fit_all(field, windows, marginals, num_steps=numbers[-1])
    return partial(loss, mix, field, windows.order, 1024, 64)


#: The mean field inside a network that serves many fields: a few sweeps from three starts.
QUICK = {"num_random": 0, "num_rises": 0, "num_sweeps": 10}
#: Of the windows of NMM-CNN on single fields, and of all windows of 128 x 128 pixels.
RADIUS = 3
#: Fits of a field by free parameters and by NMM-CNN: the rate, which fields of other seeds chose.
RATES, RUNS = {"NMM": 0.1, "NMM-CNN": 0.003}, range(5)
#: Of fits, and of annealing; and the sides of the grids of ``scaling``.
STEPS = {"strips": 2000, "large": 600, "annealing": 2000, "amortized": 3000, "deviations": 1000}
#: In windows of 7 x 7; a tenth of the free fit's rate, because it starts near its end.
WIDE = {"NMM-CNN, 7 x 7": 0.003, "NMM, 7 x 7": 0.01}
STEPS |= {"corrected": 500, "large, corrected": 300, "many fields": 1000}


def alone(field: PairwiseMRF, **options) -> tuple[Tensor, float]:
    """The mean field's marginals, and its bound on log Z."""
    marginals, losses = mean_field(field, **options)
    return marginals, -losses[0].item()


@torch.no_grad()
def answer(field: PairwiseMRF, windows: Grid, network: nn.Module) -> NeighborMixture:
    return NeighborMixture(windows.hood, *network(windows.hood, field))


def fit_on_top(field: PairwiseMRF, windows: Grid, network: nn.Module) -> NeighborMixture:
    return fit(field, windows, deepcopy(network), num_steps=50, lr=RATES["NMM-CNN"])


#: What answers for a field, with a network that serves many: a mixture, or marginals and log Z.
ANSWERS: dict[str, Callable] = {
    "mean field": lambda field, *_: alone(field),
    "mean field, 10 sweeps": lambda field, *_: alone(field, **QUICK),
    "loopy BP": lambda field, *_: rivals.loopy(field),
    "Gibbs, 100 sweeps": lambda field, *_: (rivals.gibbs(field), None),
    "NMM-CNN": answer,
    "NMM-CNN, 50 steps more": fit_on_top,
}


def compare(args, names: list[str], make: Callable, **keys) -> None:
    """Measure each method on each field; ``make`` returns a field and its log Z, kept for all."""
    make, results = lru_cache(1)(make), Records(args.results.with_name("fields_compared.jsonl"))
    shape = fields.STRIPS.get(keys.get("labels"), (fields.SIZE, fields.SIZE))
    for key in results.missing(**keys, method=names):
        field, log_z = make(key.get("coupling"), key["seed"])
        pyro.set_rng_seed(0)
        score, seconds = timed(fitted, key["method"], field, shape, clock=time.process_time)
        row = dict(zip(("KL", "error"), score(), strict=False))
        row["KL"] += log_z
        results.add(**key, **row, seconds=seconds)


def strips(args, results: Records) -> None:
    windows, steps = fields.grid(fields.STRIPS[2]), {"num_steps": STEPS["strips"]}
    for key in results.missing(task="strips", coupling=fields.COUPLINGS[2], seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        (field, log_z), seconds = fields.strip(2, key["coupling"], key["seed"]), {}
        (free, losses), seconds["mean field"] = timed(mean_field, field, num_random=12)
        mix, seconds["NMM"] = timed(fit_all, field, windows, free, **steps)
        row = {"mean field": losses[0].item() + log_z}
        row["NMM bound"] = loss(mix, field, windows.order, 1024, 64)[0] + log_z
        kl, row["error"] = divergence(mix, field, windows.order)
        found = {"mean field": free, "NMM": mix.marginals()}
        (found["loopy"], _), seconds["loopy"] = timed(rivals.loopy, field)
        truth = field.marginals()
        errors = {k: (p - truth).abs().mean().item() for k, p in found.items()}
        results.add(**key, **row, NMM=kl + log_z, marginals=errors, seconds=seconds)
    for labels, couplings in fields.COUPLINGS.items():
        keys = {"task": "strips" if labels == 2 else "potts", "labels": labels}
        keys |= {"seed": fields.SEEDS, "coupling": couplings}
        compare(args, NARROW[labels], partial(fields.strip, labels), **keys)


def corrected(args, results: Records) -> None:
    """Fits that start at the mean field: narrow fields, five runs each."""
    for run, (labels, couplings) in product(RUNS, fields.COUPLINGS.items()):
        windows = fields.grid(fields.STRIPS[labels])
        keys = {"task": "corrected", "run": run, "labels": labels, "coupling": couplings}
        for key in results.missing(**keys, seed=fields.SEEDS, method=list(RATES)):
            field, log_z = fields.strip(labels, key["coupling"], key["seed"])
            measure(results, key, field, log_z, windows, STEPS["corrected"], 2048)


def large_corrected(args, results: Records) -> None:
    """The same on 128 x 128 pixels."""
    on_large(args, results, fields.grid((fields.SIZE, fields.SIZE)), list(RATES), measure)


def wide_corrected(args, results: Records) -> None:
    """The same in windows of 7 x 7, where free parameters start at the network's answer."""
    windows = fields.grid((fields.SIZE, fields.SIZE), RADIUS)
    on_large(args, results, windows, list(WIDE)[:1], in_turn)


def on_large(args, results: Records, windows: Grid, methods: list[str], measure) -> None:
    keys = {"task": "large, corrected", "run": args.runs, "method": methods}
    known = {row["seed"]: row["log Z"] for row in pick(results.rows, task="letter")}
    options = {"steps": STEPS["large, corrected"], "draws": 256}
    for key in results.missing(**keys, kind="letter", seed=fields.SEEDS):
        field, _ = fields.noisy_letter(key["seed"])
        measure(results, key, field, known[key["seed"]], windows, **options)
    for key in results.missing(**keys, kind="plain", seed=None, coupling=fields.COUPLINGS[2]):
        measure(results, key, *fields.plain(key["coupling"]), windows, **options)


def in_turn(results: Records, key: dict, *target, **options) -> None:
    """The methods of ``WIDE``, each from the answer of the one before."""
    given = None
    for method in WIDE:
        given = measure(results, key | {"method": method}, *target, given=given, **options)


def measure(
    results: Records, key: dict, field: PairwiseMRF, log_z: float, windows: Grid, steps: int,
    draws: int, given: NeighborMixture | None = None,
) -> NeighborMixture:  # fmt: skip
    """A fit from the mean field or a ``given`` mixture, whose bound is measured by ``draws``."""
    pyro.set_rng_seed(key["run"])
    free, before = timed(mean_field, field, clock=time.process_time)
    network, (name, _, wide), lr = None, key["method"].partition(", "), WIDE | RATES
    if name == "NMM-CNN":
        radius = RADIUS if wide else 1
        network = models.MeanFieldCorrection(models.ConvolutionalNMM(radius, field.num_classes))
    if given is not None:
        network = FreeNMM(windows.hood, field.num_classes, given.alpha, gamma=0.0, epsilon=0.0)
        network.logits.data.copy_(given.logits)
    options = {"num_steps": steps, "lr": lr[key["method"]]}
    mix, seconds = timed(fit, field, windows, network, **options, clock=time.process_time)
    chunk = min(draws, max(4, 2**15 // field.num_nodes))
    bound, error = loss(mix, field, windows.order, draws, chunk)
    row = {"mean field": free.losses[0].item() + log_z, "bound": bound + log_z, "error": error}
    results.add(**key, **row, seconds={"mean field": before, "fit": seconds})
    return mix


def large(field: models.PairwiseMRF, log_z: float | None, starts: Tensor | None = None) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    seconds, windows = {}, fields.grid((fields.SIZE, fields.SIZE), RADIUS)
    steps = {"num_steps": STEPS["large"], "num_samples": 2}
    (free, losses), seconds["mean field"] = timed(mean_field, field, starts, num_random=2)
    row = {"mean field": losses[0].item(), "log Z": log_z, "seconds": seconds}
    if log_z is None:
        found = models.annealed_log_normalizer(field, free, STEPS["annealing"], 8)
        row["log Z"], row["log Z error"] = (value.item() for value in found)
    network = models.ConvolutionalNMM(RADIUS)
    cnn, seconds["NMM-CNN"] = timed(fit, field, windows, network, lr=0.003, **steps)
    row["NMM-CNN"] = loss(cnn, field, windows.order, 64, 4)[0]
    # If all pixels have the same terms, a network with shared weights gets there first.
    given = cnn if field.unary.eq(field.unary[0]).all() else None
    mix, seconds["NMM"] = timed(fit_all, field, windows, free, given, **steps)
    row["NMM"] = loss(mix, field, windows.order, 64, 4)[0]
    _, seconds["loopy"] = timed(rivals.loopy, field)
    return row


def letter(args, results: Records) -> None:
    for key in results.missing(task="letter", seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        field, clean = fields.noisy_letter(key["seed"])
        right = torch.stack([-clean, clean], -1).view(1, -1, 2).clamp(0.001, 0.999)
        results.add(**key, **large(field, None, right))
    log_z = {row["seed"]: row["log Z"] for row in pick(results.rows, task="letter")}
    known = {seed: (fields.noisy_letter(seed)[0], log_z[seed]) for seed in fields.SEEDS}
    compare(args, LARGE, lambda _, seed: known[seed], task="letter", seed=fields.SEEDS)


def plain(args, results: Records) -> None:
    for key in results.missing(task="plain", coupling=fields.COUPLINGS[2]):
        pyro.set_rng_seed(0)
        results.add(**key, **large(*fields.plain(key["coupling"])))
    keys = {"task": "plain", "coupling": fields.COUPLINGS[2], "seed": 0}
    compare(args, LARGE, lambda coupling, _: fields.plain(coupling), **keys)


def train(start: str | None, num_steps: int, lr: float) -> tuple[nn.Module, float]:
    """One network for many fields, from even labels or the mean field, and seconds."""
    pyro.set_rng_seed(0)
    network, windows = models.ConvolutionalNMM(1), fields.grid(fields.STRIPS[2])
    if start:
        network = models.MeanFieldCorrection(network, **QUICK)
    stream = lambda step: fields.random_field(2, (0.1, 0.6), 1000 + step)  # noqa: E731
    return network, timed(fit, stream, windows, network, num_steps=num_steps, lr=lr)[1]


def amortized(args, results: Records) -> None:
    windows = fields.grid(fields.STRIPS[2])
    for key in results.missing(task="amortized", start=[None, "mean field"]):
        network, training = train(key.get("start"), STEPS["amortized"], lr=0.006)
        tests = []
        for seed in range(20):
            field, log_z = fields.strip(2, (0.1, 0.6), seed)
            (_, losses), slow = timed(mean_field, field)
            with torch.no_grad():
                parameters, fast = timed(network, windows.hood, field)
            mix = NeighborMixture(windows.hood, *parameters)
            bound = loss(mix, field, windows.order, 512, 64)[0] + log_z
            tests.append((losses[0].item() + log_z, bound, slow, fast))
        free, bounds, slow, fast = zip(*tests, strict=True)
        row = {"train seconds": training, "mean field": free, "NMM-CNN": bounds}
        results.add(**key, **row, seconds={"mean field": slow, "NMM-CNN": fast})


def many_fields(args, results: Records) -> None:
    """One network, trained from the mean field, beside methods that start anew at each field."""
    keys = {"task": "many fields", "fields": list(fields.MANY), "method": list(ANSWERS)}
    if not (missing := [*results.missing(**keys)]):
        return
    network, _ = train("mean field", STEPS["many fields"], lr=0.012)
    make, truth = cache(fields.strip), cache(PairwiseMRF.marginals)
    for key in missing:
        shape, couplings, seeds = fields.MANY[key["fields"]]
        windows, row = fields.grid(shape), defaultdict(list)
        for seed in seeds:
            field, log_z = make(2, couplings, seed, shape)
            pyro.set_rng_seed(seed)
            method = ANSWERS[key["method"]]
            found, seconds = timed(method, field, windows, network, clock=time.process_time)
            row["seconds"].append(seconds)
            if isinstance(found, NeighborMixture):
                row["KL"].append(loss(found, field, windows.order, 512, 64)[0] + log_z)
                marginals, estimate = found.marginals(), log_z - row["KL"][-1]
            else:
                marginals, estimate = found
                row["KL"].append(product_loss(field, marginals) + log_z)
            if estimate is not None:
                row["log Z error"].append(estimate - log_z)
            row["error"].append((marginals - truth(field)).abs().mean().item())
        results.add(**key, **row)


TASKS = strips, letter, plain, amortized, corrected, large_corrected
TASKS += wide_corrected, many_fields
main = command(__doc__, TASKS, results=RESULTS / "fields.jsonl", runs=[0])

if __name__ == "__main__":
    main()
