# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""NMMs of the winners in counties as Pyro programs, and their fits by MCMC and by SVI."""

import warnings
from abc import ABC, abstractmethod

import pyro
import torch
from pyro.distributions import Bernoulli, LogNormal, Normal
from pyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from pyro.ops.stats import split_gelman_rubin
from pyro.optim import ClippedAdam
from torch import Tensor

from benchmarks.maps.data import Problem, within_hops
from benchmarks.maps.rivals import Found, covariates
from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood, sources
from pyro_nmm.guides import AutoNMM, FieldGibbs
from pyro_nmm.models import nmm
from pyro_nmm.ops.diagnostics import effective_size

#: Draws of a chain after its warm-up, and those of them that predict.
WARMUP, SAMPLES, KEPT = 200, 1000, 250
#: Draws of a chain that validates a setting.
FEW = 200
#: Steps of SVI.
NUM_STEPS = 300


class Program(ABC):
    """A program with one field, whose labels are two, and predictions from its draws."""

    sites = "beta", "kappa", "rho"
    states = ("c",)

    def __init__(self, problem: Problem, settings: dict) -> None:
        self.problem, self.train, data = problem, problem.train, problem.data
        self.y = problem.known
        self.hood, self.hops = self.reach(settings)
        x = torch.from_numpy(covariates(problem, settings["around"])).float()
        self.x = torch.cat([torch.ones(data.num_nodes, 1), x], 1)

    @abstractmethod
    def reach(self, settings: dict) -> tuple[Neighborhood, Tensor]:
        """Neighbourhoods, and the hops of each edge."""

    def parameters(self) -> dict[str, Tensor]:
        """Draws of the continuous sites."""
        size, zero = self.x.shape[1], torch.zeros(())
        beta = pyro.sample("beta", Normal(torch.zeros(size), 1.0).to_event(1))
        kappa = pyro.sample("kappa", LogNormal(zero, 1.0))
        return {"beta": beta, "kappa": kappa, "rho": pyro.sample("rho", LogNormal(zero, 1.0))}

    def scores(self, values: dict[str, Tensor]) -> Tensor:
        """``(..., N)``: linear predictors."""
        return values["beta"] @ self.x.T

    def logits(self, values: dict[str, Tensor]) -> Tensor:
        """``(..., num_edges)``: attention scores, which fall with the number of hops."""
        return -self.hops / values["rho"][..., None]

    @abstractmethod
    def alpha(self, values: dict[str, Tensor]) -> Tensor:
        """``(..., M, 2)``: concentrations of the sources."""

    @abstractmethod
    def model(self) -> None: ...

    @abstractmethod
    def borrowed(self, draw: dict[str, Tensor]) -> Tensor:
        """``(n,)``: labels that the training counties took from their sources."""

    def emitted(self, values: dict[str, Tensor]) -> Tensor | None:
        """``(N, 2)``: probabilities of a win given the label; ``None`` if the label is the win."""
        return None

    @torch.no_grad()
    def predict(self, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Means over draws of p(y | parameters, choices, y of training counties), exactly, and
        a joint draw of all labels for each of them."""
        probs, labels, size = torch.zeros(len(self.y)), [], self.hood.num_sources
        for number in range(len(draws["kappa"])):
            draw = {name: value[number] for name, value in draws.items()}
            alpha, logits = self.alpha(draw), self.logits(draw)
            places = 2 * draw["c"] + self.borrowed(draw)
            counted = alpha + torch.bincount(places, minlength=2 * size).view(size, 2)
            means = counted[:, 1] / counted.sum(1)
            of_label = self.hood.sum(self.hood.softmax(logits) * means[self.hood.source])
            choice = NeighborChoice(self.hood, logits).sample()
            label, emitted = ChosenLabels(counted, choice).sample(), self.emitted(draw)
            if emitted is None:
                probs += of_label
            else:
                probs += of_label * emitted[:, 1] + (1 - of_label) * emitted[:, 0]
                label = Bernoulli(emitted.gather(1, label[:, None])[:, 0]).sample().long()
            labels.append(label)
        return probs / len(labels), torch.stack(labels)

    def shares(self, rho: Tensor) -> list[float]:
        """Mean attention of counties to sources at 0, 1, ... hops."""
        weights = self.hood.softmax(self.logits({"rho": rho}))
        total = torch.zeros(int(self.hops.max()) + 1).index_add_(0, self.hops.long(), weights)
        return (total / self.hood.num_rows).tolist()

    def row(self, draws: dict[str, Tensor]) -> dict:
        """Posterior means and 90 % intervals, and the shares of attention by hops."""
        found = {}
        for name in self.sites:
            low, high = draws[name].quantile(torch.tensor([0.05, 0.95]), 0)
            values = {"mean": draws[name].mean(0), "low": low, "high": high}
            found[name] = {k: v.tolist() for k, v in values.items()}
        some = draws["rho"][:: max(1, len(draws["rho"]) // 50)]
        found["attention"] = torch.tensor([self.shares(rho) for rho in some]).mean(0).tolist()
        return found


class Borrowed(Program):
    r"""Winners are labels that counties take from counties of their neighbourhood:
    :math:`\alpha_j = \kappa \, \mathrm{softmax}(0, x_j \beta)`."""

    def reach(self, settings: dict) -> tuple[Neighborhood, Tensor]:
        return within_hops(self.problem.data, settings["hops"])

    def alpha(self, values: dict[str, Tensor]) -> Tensor:
        scores = self.scores(values)
        shares = torch.stack([torch.zeros_like(scores), scores], -1).softmax(-1)
        return values["kappa"][..., None, None] * shares

    def model(self) -> None:
        values = self.parameters()
        alpha, logits = self.alpha(values), self.logits(values)
        nmm(self.hood, alpha, logits, self.y, self.train, collapsed=True)

    def borrowed(self, draw: dict[str, Tensor]) -> Tensor:
        return self.y[self.train]


class Hidden(Program):
    r"""Winners depend on covariates and on a latent label of two, which counties take from
    regions: :math:`\mathrm{logit}\, p(y_i = 1) = x_i \beta + \gamma (2 u_i - 1)`."""

    sites = "beta", "kappa", "rho", "gamma"
    states = "c", "y"

    def reach(self, settings: dict) -> tuple[Neighborhood, Tensor]:
        torch.manual_seed(0)  # the sources are a random set
        data, options = self.problem.data, {name: settings[name] for name in ("radius", "spacing")}
        hood, hops = sources.hops(data.edge_index, data.num_nodes, **options)
        return hood, hops.float()

    def parameters(self) -> dict[str, Tensor]:
        gamma = pyro.sample("gamma", LogNormal(torch.zeros(()), 1.0))
        return super().parameters() | {"gamma": gamma}

    def alpha(self, values: dict[str, Tensor]) -> Tensor:
        kappa = values["kappa"][..., None, None]
        return 0.5 * kappa.expand(*kappa.shape[:-2], self.hood.num_sources, 2)

    def model(self) -> None:
        values = self.parameters()
        given = self.alpha(values), self.logits(values)
        label = nmm(self.hood, *given, observed=self.train, collapsed=True)
        logits = self.scores(values)[..., self.train]
        logits = logits + values["gamma"][..., None] * (2 * label - 1)
        winner = self.y[self.train].float()
        pyro.sample("winner", Bernoulli(logits=logits).to_event(1), obs=winner)

    def borrowed(self, draw: dict[str, Tensor]) -> Tensor:
        return draw["y"]

    def emitted(self, values: dict[str, Tensor]) -> Tensor:
        logits = self.scores(values)[:, None] + values["gamma"] * torch.tensor([-1.0, 1.0])
        return logits.sigmoid()


PROGRAMS: dict[str, type[Program]] = {"borrowed": Borrowed, "hidden": Hidden}


def chain(program: Program, num_samples: int, start: dict | None = None) -> dict[str, Tensor]:
    """Draws of a chain of ``FieldGibbs``, with the states of the field."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*effective draws")
        mcmc = MCMC(
            FieldGibbs(program.model), num_samples, WARMUP, initial_params=start,
            save_params=[*program.sites, *program.states], disable_progbar=True,
        )  # fmt: skip
        mcmc.run()
    return mcmc.get_samples()


def numbers_of(program: Program, draws: dict[str, Tensor]) -> dict[str, Tensor]:
    """Draws of each number, of positive ones their logarithms."""
    found = {name: draws[name].log() for name in program.sites if name != "beta"}
    return found | {f"beta[{k}]": value for k, value in enumerate(draws["beta"].unbind(-1))}


def thinned(draws: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:: max(1, len(value) // KEPT)] for name, value in draws.items()}


def by_mcmc(problem: Problem, settings: dict) -> Found:
    """One chain. A search has fewer draws."""
    pyro.set_rng_seed(settings["seed"])
    program = PROGRAMS[settings["program"]](problem, settings)
    draws = chain(program, settings.get("samples", SAMPLES))
    sizes = {k: effective_size(v[None]).item() for k, v in numbers_of(program, draws).items()}
    found = program.predict(thinned(draws))
    return Found(*found, program.row(draws) | {"effective draws": sizes})


def by_svi(problem: Problem, settings: dict) -> Found:
    """:class:`~pyro_nmm.guides.AutoNMM`, a normal distribution of the parameters."""
    pyro.set_rng_seed(settings["seed"])
    pyro.clear_param_store()
    program = PROGRAMS[settings["program"]](problem, settings)
    guide = AutoNMM(program.model)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    adam = ClippedAdam({"lr": 0.1, "lrd": 0.1 ** (2 / NUM_STEPS)})
    svi = SVI(program.model, guide, adam, elbo)
    for _ in range(NUM_STEPS):
        svi.step()
    names = [*program.sites, *program.states]
    sampled = Predictive(guide, num_samples=KEPT, return_sites=names, parallel=True)
    draws = {name: value.detach() for name, value in sampled().items()}
    return Found(*program.predict(draws), program.row(draws))


def r_hats(program: Program, chains: list[dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    """R-hat and effective draws of each number, by several chains."""
    parts = [numbers_of(program, draws) for draws in chains]
    found = {}
    for name in parts[0]:
        draws = torch.stack([part[name] for part in parts]).double()
        r_hat = split_gelman_rubin(draws, chain_dim=0, sample_dim=1).item()
        found[name] = {"R-hat": r_hat, "effective draws": effective_size(draws).item()}
    return found
