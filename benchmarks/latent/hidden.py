# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels of pixels that emit a Normal variable: an NMM of strided sources against a Potts field.

    python -m benchmarks.latent.hidden normalizers select compare

Tasks: ``normalizers`` (log Z of Potts fields, which their log p(w) needs), ``select`` (stride and
radius of the sources, by log p(w) of a field of another seed) and ``compare``.
"""

from __future__ import annotations

import math

import pyro
import torch
from pyro.distributions import Normal
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import ClippedAdam
from torch import Size, Tensor, nn

from benchmarks.latent import potts
from benchmarks.latent.potts import CLASSES, first_guess, log_likelihoods
from benchmarks.shared.records import RESULTS, Records, chosen, pick, run
from pyro_nmm import ChosenLabels, EvidenceConditional, NeighborChoice, NeighborMixture, sources
from pyro_nmm.guides import evidence_guide
from pyro_nmm.metrics import brier, mean_log_prob
from pyro_nmm.models import nmm
from pyro_nmm.ops.evidence import LatentDraw, LatentTerms
from pyro_nmm.ops.gibbs import sweep

FIELDS = ["smooth", "potts", "nmm"]
#: Couplings that the Potts field chooses from.
COUPLINGS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
#: Strides and radii of the sources that the NMM chooses from.
SOURCES = [{"stride": stride, "radius": stride * 3 // 2} for stride in (2, 4, 6)]


def smooth(size: int) -> Tensor:
    """Normal noise under a Gaussian window of four pixels, cut at its terciles."""
    frequency = torch.fft.fftfreq(size)
    window = -2 * (4 * math.pi) ** 2 * (frequency[:, None].square() + frequency.square())
    noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(size, size)) * window.exp()).real
    values = noise.flatten().contiguous()
    return torch.bucketize(values, values.quantile(torch.tensor([1 / 3, 2 / 3])))


def strided(size: int, stride: int, radius: int):
    """Pixels with their sources, and the squared length of every edge in strides."""
    hood = sources.grid(size, size, stride, radius)
    number = -(-size // stride)
    first = (size - 1 - stride * (number - 1)) // 2
    place = first + stride * torch.stack([hood.source // number, hood.source % number])
    pixel = torch.stack([hood.target // size, hood.target % size])
    return hood, (place - pixel).square().sum(0) / stride**2


def truth(args, key: dict) -> tuple[Tensor, Tensor]:
    """Labels, and the noisy image of them."""
    pyro.set_rng_seed(key["seed"])
    if key["field"] == "smooth":
        y = smooth(args.size)
    elif key["field"] == "potts":
        field = potts.without_evidence(args.size, 0.95)
        y = potts.gibbs(field, torch.randint(CLASSES, (1, args.size**2)), args.sweeps)[0][0]
    else:
        hood, distance = strided(args.size, stride=4, radius=6)
        alpha = torch.full((hood.num_sources, CLASSES), 0.2)
        y = NeighborMixture(hood, alpha, -2.0 * distance).sample()
    return y, y - 1 + key["noise"] * torch.randn(args.size**2)


class HiddenField(nn.Module):
    """
    An NMM of strided sources over an image ``w``. It has one concentration for all labels and
    sources, and attention falls with the squared distance at one rate.
    """

    def __init__(self, w: Tensor, size: int, stride: int, radius: int) -> None:
        super().__init__()
        self.w, self.settings = w, {"stride": stride, "radius": radius}
        self.hood, self.distance = strided(size, stride, radius)
        means, scale = first_guess(w)
        self.means, self.log_scale = nn.Parameter(means), nn.Parameter(scale.log())
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))
        self.log_rate = nn.Parameter(torch.tensor(0.0))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Concentrations, attention scores and log-likelihoods."""
        alpha = self.log_alpha.exp().expand(self.hood.num_sources, CLASSES)
        evidence = log_likelihoods(self.w, self.means, self.log_scale.exp())
        return alpha, -self.log_rate.exp() * self.distance, evidence

    def model(self) -> None:
        pyro.module("field", self)
        alpha, logits, _ = self.parts()
        y = nmm(self.hood, alpha, logits, collapsed=True)
        emission = Normal(self.means[y], self.log_scale.exp())
        pyro.sample("w", emission.to_event(1), obs=self.w)

    def guide(self) -> None:
        pyro.module("field", self)
        evidence_guide(self.hood, *self.parts(), collapsed=True)

    def likelihoods_of(self, labels: Tensor) -> Tensor:
        """``(B, N)``: log p(w_i | u_i) for the labels of chains."""
        return self.parts()[2][torch.arange(len(self.w)), labels]

    @torch.no_grad()
    def prior_draw(self, num_chains: int) -> LatentDraw:
        alpha, logits, _ = self.parts()
        c = NeighborChoice(self.hood, logits).sample(Size([num_chains]))
        return LatentDraw(self.hood.find(c), ChosenLabels(alpha, c).sample())

    @torch.no_grad()
    def swept(self, draw: LatentDraw, power: float = 1.0) -> LatentDraw:
        """Chains after a Gibbs sweep under the prior times the likelihood to a power."""
        alpha, logits, evidence = (part[None] for part in self.parts())
        terms = LatentTerms(self.hood.log_softmax(logits), alpha, power * evidence)
        uniforms = torch.rand(1, *draw.edges.shape, dtype=torch.double)
        return sweep(self.hood, terms, draw, uniforms).draw


def fit_by_bound(field: HiddenField, num_steps: int) -> None:
    """SVI on the bound of the sequential draw."""
    pyro.clear_param_store()
    adam = ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / num_steps)})
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(field.model, field.guide, adam, elbo)
    for _ in range(num_steps):
        svi.step()


def fit_by_sweeps(field: HiddenField, num_steps: int) -> None:
    """
    Stochastic maximum likelihood: the gradient of log p(w) is the posterior mean of the gradient
    of log p(w, c, u), here over four chains that take one Gibbs sweep between two steps.
    """
    adam = torch.optim.Adam(field.parameters(), 0.05)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.1 ** (1 / num_steps))
    draw = field.prior_draw(4)
    for _ in range(num_steps):
        draw = field.swept(draw)
        alpha, logits, _ = field.parts()
        c = field.hood.source[draw.edges]
        joint = ChosenLabels(alpha, c).log_prob(draw.labels)
        joint = joint + field.likelihoods_of(draw.labels).sum(-1)
        joint = joint + NeighborChoice(field.hood, logits).log_prob(c)
        adam.zero_grad()
        (-joint.mean()).backward()
        adam.step()
        decay.step()


@torch.no_grad()
def annealed_log_evidence(field: HiddenField, num_steps: int, num_chains: int = 8):
    """
    log p(w) by annealed importance sampling from the prior, too low on average; its standard
    error, which says little once one chain holds all weight; and the log-weights' deviation.
    """
    draw, before = field.prior_draw(num_chains), 0.0
    weights = torch.zeros(num_chains, dtype=torch.double)
    for step in range(1, num_steps + 1):
        power = (step / num_steps) ** 2
        weights += (power - before) * field.likelihoods_of(draw.labels).double().sum(-1)
        draw, before = field.swept(draw, power), power
    total = weights.logsumexp(0) - math.log(num_chains)
    error = (weights - total).exp().std() / num_chains**0.5
    return total.item(), error.item(), weights.std().item()


@torch.no_grad()
def found_by(field: HiddenField, args) -> tuple[Tensor, Tensor, dict]:
    """Means, marginals of the labels, and other values of a fitted field's row."""
    q = EvidenceConditional(field.hood, *field.parts())
    bound = q.log_evidence(q.sample(Size([64]))).sum(-1).mean().item()
    posterior = q.posterior(num_samples=8, num_sweeps=args.sweeps)
    total, error, apart = annealed_log_evidence(field, args.anneal)
    numbers = {"alpha": field.log_alpha, "rate": field.log_rate, "sd": field.log_scale}
    settings = field.settings | {name: number.exp().item() for name, number in numbers.items()}
    settings |= {"Gelman-Rubin": posterior.chains.gelman_rubin().max().item()}
    settings |= {"sd of log-weights": apart}
    row = {"bound": bound, "log evidence": total, "error": error, "settings": settings}
    return field.means, posterior.marginals(), row


def normalizers(args, results: Records) -> None:
    for key in results.missing(task="normalizers", size=args.size, coupling=COUPLINGS):
        pyro.set_rng_seed(0)
        value, error = potts.log_normalizer(args.size, key["coupling"], args.anneal)
        results.add(**key, **{"log Z": value, "error": error})


def select(args, results: Records) -> None:
    cells = {"size": args.size, "field": FIELDS, "noise": args.noise}
    for key in results.missing(task="search", **cells, seed=100, settings=SOURCES):
        field = HiddenField(truth(args, key)[1], args.size, **key["settings"])
        fit_by_bound(field, args.num_steps)
        value, error, _ = annealed_log_evidence(field, args.anneal)
        trial = SOURCES.index(key["settings"])
        results.add(**key, trial=trial, **{"log evidence": value, "error": error})


def compare(args, results: Records) -> None:
    known = pick(results.rows, task="normalizers", size=args.size)
    log_z = {row["coupling"]: row["log Z"] for row in known}
    cells = {"size": args.size, "field": FIELDS, "noise": args.noise}
    for key in results.missing(task="compare", **cells, seed=range(args.seeds)):
        y, w = truth(args, key)
        cell = {name: key[name] for name in cells}
        best = chosen(results.rows, lambda rows: rows[0]["log evidence"], **cell)
        found = {"independent": potts.independent(w), **potts.fitted(w, log_z, args)}
        for name, fit in (("NMM, bound", fit_by_bound), ("NMM, sweeps", fit_by_sweeps)):
            field = HiddenField(w, args.size, **best)
            fit(field, args.num_steps)
            found[name] = found_by(field, args)
        for method, (means, marginals, row) in found.items():
            probs = marginals[:, means.argsort()]  # true labels are in the order of their means
            likely = probs.clamp(min=1e-4)  # chains may never meet a rare label
            scores = {"Brier": brier(probs, y), "NLL": -mean_log_prob(likely, y)}
            scores["accuracy"] = (probs.argmax(1) == y).double().mean()
            row = {name: score.item() for name, score in scores.items()} | row
            results.add(**key, method=method, **row)


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (normalizers, select, compare), size=64, noise=[0.5, 1.0], seeds=3,
        num_steps=(250, "of a fit"), sweeps=(500, "of Gibbs sampling, in eight chains"),
        anneal=(400, "steps of annealed importance sampling"),
        rounds=(2, "of variational EM for every coupling"), results=RESULTS / "hidden.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
