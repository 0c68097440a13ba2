# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels of pixels that emit a Normal variable. README.md explains the tasks."""

import math

import pyro
import torch
from pyro.distributions import Categorical, Normal
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import ClippedAdam
from torch import Size, Tensor, nn

from benchmarks.shared.records import RESULTS, Records, command, pick
from benchmarks.shared.scores import brier, mean_log_prob
from pyro_nmm import ChosenLabels, EvidenceConditional, NeighborChoice, NeighborMixture, sources
from pyro_nmm.guides import evidence_guide, mean_field
from pyro_nmm.models import PairwiseMRF, annealed_log_normalizer, grid_edges, nmm, potts
from pyro_nmm.ops.entries import Draw, evidence_entries
from pyro_nmm.ops.sweeps import run_chains

FIELDS, SIZE, CLASSES = ["smooth", "potts", "nmm"], 64, 3
#: Couplings that the Potts field chooses from, and strides and radii that the NMM chooses from.
COUPLINGS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
SOURCES = [{"stride": stride, "radius": stride * 3 // 2} for stride in (2, 4, 6)]
#: Steps of a fit of the NMM, Gibbs sweeps, steps of annealing, rounds of EM for every coupling.
NUM_STEPS, SWEEPS, ANNEAL, ROUNDS = 250, 500, 400, 2


def strided(size: int, stride: int, radius: int):
    """Pixels with their sources, and the squared length of every edge in strides."""
    hood, number = sources.grid(size, size, stride, radius), -(-size // stride)
    source = torch.stack(torch.unravel_index(hood.source, (number, number)))
    pixel = torch.stack(torch.unravel_index(hood.target, (size, size)))
    gap = (size - 1) % stride // 2 + stride * source - pixel
    return hood, gap.square().sum(0) / stride**2


@torch.no_grad()
def gibbs(field: PairwiseMRF, y: Tensor, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """Labels ``(B, N)`` after the sweeps, and the share of each label in their second half."""
    classes, colors, met = torch.eye(field.num_classes), field.colors(), 0
    for number in range(num_sweeps):
        for color in colors:
            logits = field.local_logits(classes[y]).index_select(1, color)
            y = y.index_copy(1, color, Categorical(logits=logits).sample())
        met = met + classes[y].mean(0) * (number >= num_sweeps // 2)
    return y, met / met.sum(-1, keepdim=True)


def truth(key: dict) -> tuple[Tensor, Tensor]:
    """Labels, and the noisy image of them."""
    pyro.set_rng_seed(key["seed"])
    if key["field"] == "smooth":  # noise under a Gaussian window of four pixels, cut at terciles
        frequency = torch.fft.fftfreq(SIZE)
        window = -2 * (4 * math.pi) ** 2 * (frequency[:, None].square() + frequency.square())
        noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(SIZE, SIZE)) * window.exp()).real
        noise = noise.flatten().contiguous()
        y = torch.bucketize(noise, noise.quantile(torch.tensor([1 / 3, 2 / 3])))
    elif key["field"] == "potts":
        field = potts(grid_edges(SIZE, SIZE), 0.95, torch.zeros(SIZE**2, CLASSES))
        y = gibbs(field, torch.randint(CLASSES, (1, SIZE**2)), SWEEPS)[0][0]
    else:
        hood, distance = strided(SIZE, stride=4, radius=6)
        alpha = torch.full((hood.num_sources, CLASSES), 0.2)
        y = NeighborMixture(hood, alpha, -2.0 * distance).sample()
    return y, y - 1 + key["noise"] * torch.randn(SIZE**2)


def first_guess(w: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviation of a Normal emission, with which every method starts."""
    return w.quantile((torch.arange(CLASSES).to(w) + 0.5) / CLASSES), 0.6 * w.std()


def log_likelihoods(w: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """``(N, C)``: log p(w_i | u_i = k)."""
    return Normal(means, scale).log_prob(w[:, None])


def emission(w: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviation of highest likelihood, given distributions of the labels."""
    means = (probs * w[:, None]).sum(0) / probs.sum(0)
    return means, (probs * (w[:, None] - means).square()).sum(1).mean().sqrt()


def independent(w: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Means, marginals and a row of the mixture of Normals with equal weights, by EM."""
    means, scale = first_guess(w)
    for _ in range(200):
        means, scale = emission(w, log_likelihoods(w, means, scale).softmax(-1))
    log_joint = log_likelihoods(w, means, scale) - math.log(CLASSES)
    total = log_joint.logsumexp(-1).double().sum().item()
    row = {"bound": total, "log evidence": total, "error": 0.0, "settings": {"sd": scale.item()}}
    return means, log_joint.softmax(-1), row


@torch.no_grad()
def potts_fits(w: Tensor, log_normalizers: dict[float, float]) -> dict[str, tuple]:
    """By method, the same of a Potts field by variational EM, at the best bound's coupling."""
    trials, warm, (means, scale) = [], None, first_guess(w)
    for coupling, log_z in log_normalizers.items():
        for turn in range(ROUNDS + 1):
            if turn:
                means, scale = emission(w, warm[0])
            field = potts(grid_edges(SIZE, SIZE), coupling, log_likelihoods(w, means, scale))
            options = {"num_random": 2 * (turn == ROUNDS), "num_sweeps": 200}
            q = mean_field(field, warm, tolerance=1e-4, **options)
            warm = q.marginals[None]
        trials.append((-q.losses[0].item() - log_z, coupling, q.marginals, means, scale, field))
    bound, coupling, marginals, means, scale, field = max(trials, key=lambda trial: trial[0])
    total, error = annealed_log_normalizer(field, marginals, ANNEAL, 8)
    row = {"bound": bound, "log evidence": total.item() - log_normalizers[coupling]}
    row |= {"error": error.item(), "settings": {"coupling": coupling, "sd": scale.item()}}
    sampled = gibbs(field, Categorical(marginals).sample(Size([8])), SWEEPS // 2)[1]
    return {"Potts, mean field": (means, marginals, row), "Potts, Gibbs": (means, sampled, row)}


class HiddenField(nn.Module):
    """An NMM of strided sources over a square image, with one concentration and one rate."""

    def __init__(self, w: Tensor, stride: int, radius: int) -> None:
        super().__init__()
        self.w, (self.hood, self.distance) = w, strided(math.isqrt(len(w)), stride, radius)
        means, scale = first_guess(w)
        logs = {"alpha": torch.tensor(-1.0), "rate": torch.tensor(0.0), "sd": scale.log()}
        self.means, self.logs = nn.Parameter(means), nn.ParameterDict(logs)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Concentrations, attention scores, which fall with the distance, and log-likelihoods."""
        alpha, rate, scale = (log.exp() for log in self.logs.values())
        alpha = alpha.expand(self.hood.num_sources, CLASSES)
        return alpha, -rate * self.distance, log_likelihoods(self.w, self.means, scale)

    def model(self) -> None:
        pyro.module("field", self)
        y = nmm(self.hood, *self.parts()[:2], collapsed=True)
        pyro.sample("w", Normal(self.means[y], self.logs["sd"].exp()).to_event(1), obs=self.w)

    def guide(self) -> None:
        evidence_guide(self.hood, *self.parts(), collapsed=True)

    def prior_draw(self, num_chains: int) -> Draw:
        alpha, logits, _ = self.parts()
        c = NeighborChoice(self.hood, logits).sample(Size([num_chains]))
        return Draw(self.hood.find(c), ChosenLabels(alpha, c).sample())

    @torch.no_grad()
    def swept(self, draw: Draw, power: float = 1.0) -> Draw:
        """Chains after a Gibbs sweep under the prior times the likelihood to a power."""
        alpha, logits, evidence = (part[None] for part in self.parts())
        terms = evidence_entries(self.hood.log_softmax(logits), alpha, power * evidence)
        return run_chains(self.hood, terms, draw, num_sweeps=1)[0].draw


def fit_by_bound(field: HiddenField) -> None:
    """SVI on the bound of the sequential draw."""
    pyro.clear_param_store()
    adam = ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / NUM_STEPS)})
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(field.model, field.guide, adam, elbo)
    for _ in range(NUM_STEPS):
        svi.step()


def fit_by_sweeps(field: HiddenField) -> None:
    """Stochastic maximum likelihood: four chains take a sweep between steps of log p(w, c, u)."""
    adam = torch.optim.Adam(field.parameters(), 0.05)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.1 ** (1 / NUM_STEPS))
    draw, nodes = field.prior_draw(4), torch.arange(len(field.w))
    for _ in range(NUM_STEPS):
        draw = field.swept(draw)
        alpha, logits, evidence = field.parts()
        c = field.hood.source[draw.edges]
        joint = ChosenLabels(alpha, c).log_prob(draw.labels) + evidence[nodes, draw.labels].sum(-1)
        joint = joint + NeighborChoice(field.hood, logits).log_prob(c)
        adam.zero_grad()
        (-joint.mean()).backward()
        adam.step()
        decay.step()


@torch.no_grad()
def annealed_log_evidence(field: HiddenField, num_steps: int, num_chains: int = 8):
    """Of importance sampling from the prior: log p(w), its error, and the log-weights' sd."""
    draw, before, evidence = field.prior_draw(num_chains), 0.0, field.parts()[2].double()
    weights = torch.zeros(num_chains, dtype=torch.double)
    for step in range(1, num_steps + 1):
        power = (step / num_steps) ** 2
        weights += (power - before) * evidence[torch.arange(len(field.w)), draw.labels].sum(-1)
        draw, before = field.swept(draw, power), power
    total = weights.logsumexp(0) - math.log(num_chains)
    error = (weights - total).exp().std() / num_chains**0.5
    return total.item(), error.item(), weights.std().item()


@torch.no_grad()
def found_by(field: HiddenField, settings: dict) -> tuple[Tensor, Tensor, dict]:
    """Means, marginals and a row of a fitted field."""
    q = EvidenceConditional(field.hood, *field.parts())
    bound = q.log_terms(q.sample(Size([64]))).sum(-1).mean().item()
    posterior = q.posterior(num_samples=8, num_sweeps=SWEEPS)
    total, error, apart = annealed_log_evidence(field, ANNEAL)
    settings = settings | {name: log.exp().item() for name, log in field.logs.items()}
    settings["Gelman-Rubin"] = posterior.chains.gelman_rubin().max().item()
    settings["sd of log-weights"] = apart
    row = {"bound": bound, "log evidence": total, "error": error, "settings": settings}
    return field.means, posterior.marginals(), row


def normalizers(args, results: Records) -> None:
    """Annealed from uniform labels and from mostly one label; the higher estimate is closer."""
    for key in results.missing(task="normalizers", size=SIZE, coupling=COUPLINGS):
        pyro.set_rng_seed(0)
        field = potts(grid_edges(SIZE, SIZE), key["coupling"], torch.zeros(SIZE**2, CLASSES))
        starts = torch.tensor([[1 / 3] * 3, [0.9, 0.05, 0.05]])[:, None].expand(-1, SIZE**2, -1)
        value, error = max(annealed_log_normalizer(field, start, ANNEAL, 8) for start in starts)
        results.add(**key, **{"log Z": value.item(), "error": error.item()})


def select(args, results: Records) -> None:
    cells = {"size": SIZE, "field": FIELDS, "noise": args.noise}
    for key in results.missing(task="search", **cells, seed=100, settings=SOURCES):
        field = HiddenField(truth(key)[1], **key["settings"])
        fit_by_bound(field)
        value, error, _ = annealed_log_evidence(field, ANNEAL)
        results.add(**key, **{"log evidence": value, "error": error})


def compare(args, results: Records) -> None:
    log_z = {row["coupling"]: row["log Z"] for row in pick(results.rows, task="normalizers")}
    cells = {"size": SIZE, "field": FIELDS, "noise": args.noise}
    for key in results.missing(task="compare", **cells, seed=range(args.seeds)):
        y, w = truth(key)
        trials = pick(results.rows, task="search", **{name: key[name] for name in cells})
        best = max(trials, key=lambda trial: trial["log evidence"])["settings"]
        found = {"independent": independent(w), **potts_fits(w, log_z)}
        for name, fit in (("NMM, bound", fit_by_bound), ("NMM, sweeps", fit_by_sweeps)):
            field = HiddenField(w, **best)
            fit(field)
            found[name] = found_by(field, best)
        for method, (means, marginals, row) in found.items():
            probs = marginals[:, means.argsort()]  # true labels are in the order of their means
            likely = probs.clamp(min=1e-4)  # chains may never meet a rare label
            row = row | {"Brier": brier(probs, y).item(), "NLL": -mean_log_prob(likely, y).item()}
            row["accuracy"] = (probs.argmax(1) == y).double().mean().item()
            results.add(**key, method=method, **row)


OPTIONS = {"noise": [0.5, 1.0], "seeds": 3, "results": RESULTS / "hidden.jsonl"}
main = command(__doc__, (normalizers, select, compare), **OPTIONS)

if __name__ == "__main__":
    main()
