# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities, concentrations and attention of a StackedNMM as functions of parameters."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.utils import cumsum, index_to_mask, segment

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import check_each_call, check_integers, expect
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.stacked.table import GraphScores
from pyro_nmm.sparse import sparse_csr, spread

#: Probability that the walk takes another step, and its largest number of steps.
DAMPING, STEPS = 0.9, 20
#: Weight of the labels' shares beside the known labels that a walk reaches.
SHRINKAGE = 0.01
#: Agreement at which the scores have the weight ``exp(log_scale)``.
USUAL_AGREEMENT = 0.75
#: Concentrations of a known node's label, and of the others: certain in single precision.
CERTAIN, EXCLUDED = 1e6, 1e-6

Tensors = tuple[Tensor, ...]
#: Parameters by name, ``(1,)`` or ``(C,)``, or ``(E, 1)`` or ``(E, C)`` for each edge's source.
Values = Mapping[str, Tensor]
#: Means and standard deviations by name.
Prior = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Parameter:
    """A parameter and its normal prior."""

    name: str  #: as in ``state_dict()``
    mean: float  #: of the prior, where a fit begins
    sd: float  #: of the prior
    log: bool = False  #: whether the parameter is the logarithm of a positive number
    tempered: bool = False  #: whether the mean is relative to temperature scaling
    alone: float = 0.0  #: added to the mean where neighbours never agree
    silent: bool = False  #: whether the prior is another where scores say nothing


#: Of an NMM on scores alone. The means did best on five random splits of Cora and of CiteSeer,
#: none of which is reported.
ON_SCORES = (
    Parameter("log_scale", 0.0, 1.0, log=True, tempered=True),
    Parameter("log_kappa", 1.0, 1.0, log=True),
    Parameter("log_floor", -5.0, 1.0, log=True),
    Parameter("gamma", 2.0, 1.0),
    Parameter("similarity", 1.0, 1.0),
)
#: Of an NMM on pooled scores. Fitted to nearly all labels of 36 splits of three graphs
#: (`benchmarks.on_top.run priors`). Two of the graphs are reported on other splits, and
#: docs/results/on-top.md shows priors from other graphs. What is added to gamma where neighbours
#: never agree was chosen on splits of heterophilous graphs that are not reported.
ON_POOL = (
    Parameter("log_kappa", -1.2, 0.7, log=True),
    Parameter("log_floor", -5.0, 1.0, log=True),
    Parameter("gamma", 0.5, 0.5, alone=4.0),
    Parameter("similarity", 2.4, 0.7),
)
#: Of the pool, fitted together with ``ON_POOL``. There is an offset for every class.
POOL = (
    Parameter("log_scale", -0.9, 0.7, log=True),
    Parameter("neighbors", 0.8, 0.4),
    Parameter("labels", 0.3, 0.4, silent=True),
    Parameter("agreement", -0.2, 0.3),
    Parameter("offsets", 0.0, 0.7),
)
#: Of edges that relabel; not chosen on any data.
RELABEL = (Parameter("odds", -1.0, 1.5),)
#: Deviations by which the mean of a prior rises where scores say nothing: labels have more weight
#: alone than beside scores that learned from them. On maps half of it costs .02 nats a node where
#: neighbours agree, and twice gains .01.
RISE = 3.0


def declarations(pool: bool, relabel: bool) -> tuple[Parameter, ...]:
    """The parameters of a StackedNMM, in the order of its ``parameters()``."""
    declared: tuple[Parameter, ...] = ON_POOL if pool else ON_SCORES
    declared += RELABEL if relabel else ()
    return declared + tuple(replace(p, name=f"pool.{p.name}") for p in POOL if pool)


def prior_of(declared: Sequence[Parameter], changes: Prior) -> dict[str, tuple[float, float]]:
    """The declared priors, some of them changed."""
    priors = {p.name: (p.mean, p.sd) for p in declared}
    for name, (mean, sd) in changes.items():
        if name not in priors:
            raise ValueError(f"prior must name parameters of {list(priors)}, got {name!r}")
        if not (math.isfinite(mean) and 0 < sd < math.inf):
            raise ValueError(f"prior must be a mean and a positive sd, got {mean, sd} for {name}")
    return priors | dict(changes)


@dataclass(frozen=True)
class Priors:
    """Normal priors of one fit. All methods take the parameters' values by name."""

    declared: tuple[Parameter, ...]

    @classmethod
    def of(
        cls,
        declared: Iterable[Parameter],
        prior: Prior,
        temperature: float = 1.0,
        agreement: float = 1.0,
        silence: float = 0.0,
    ) -> "Priors":
        """With ``prior``'s means and deviations. Declared means depend on neighbours' agreement."""
        priors = []
        for old in declared:
            mean, sd = prior[old.name]
            mean -= math.log(temperature) if old.tempered else 0.0
            mean += old.alone * (1 - agreement) ** 2 if (mean, sd) == (old.mean, old.sd) else 0.0
            if old.silent:
                mean, sd = mean + RISE * silence * sd, sd * (1 + silence)
            priors.append(replace(old, mean=mean, sd=sd))
        return cls(tuple(priors))

    def start(self, values: Values) -> None:
        """Fill the values with the means."""
        for parameter in self.declared:
            values[parameter.name].data.fill_(parameter.mean)

    def log_prob(self, values: Values) -> Tensor:
        """Up to a constant."""
        squares = [((values[p.name] - p.mean) / p.sd).square().sum() for p in self.declared]
        return -0.5 * torch.stack(squares).sum()

    def precision(self, values: Values) -> Tensor:
        """``(d,)``: of all numbers."""
        return torch.cat([torch.full_like(values[p.name], p.sd**-2) for p in self.declared])

    @torch.no_grad()
    def are_finite(self, values: Values) -> bool:
        """Whether all are, and the exponentials of logarithms too, which must be positive."""
        positive = torch.cat([values[p.name] for p in self.declared if p.log]).exp()
        numbers = torch.cat([positive, *values.values()])
        return bool((positive > 0).all() and numbers.isfinite().all())


class PooledScores(nn.Module):
    r"""Label probabilities of each node from its scores, the scores of its neighbours and the known
    labels around it: a logarithmic pool (Genest and Zidek 1986, "Combining Probability
    Distributions", Statistical Science 1) with ``4 + C`` parameters.

    .. math::

        P_i &= \mathrm{softmax}\Big( \big( s + \eta \, (A_i - \tfrac{3}{4}) \big) \frac{x_i}{t} \\
            &\qquad + a \, m_i + \lambda \, \ell_i + b \Big) \\
        A_i &= \sum_k p_{ik} \frac{1}{|n(i)|} \sum_{j \in n(i)} p_{jk}, \quad
               p_i = \mathrm{softmax} \frac{x_i}{t} \\
        m_i &= \log \Big( \frac{1}{|n(i)|} \sum_{j \in n(i)} p_j + 10^{-3} \Big) \\
        \ell_{ik} &= \log \frac{R_{ik} + \tau \pi_k}{\sum_l R_{il} + \tau} - \log \pi_k \\
        R &= (1 - g) \sum_{r=0}^{19} g^r W^r Y + g^{20} W^{20} Y

    with scores :math:`x`, ``(N, C)``, at temperature :math:`t`. A step of the walk :math:`W` goes
    to a node of :math:`n(i)`, uniformly or in proportion to edge weights. :math:`Y` holds the known
    labels, one-hot, and zeros for other nodes. :math:`\pi` is the share of each label, :math:`g =
    .9` and :math:`\tau = .01`. :math:`\ell` is label propagation (Zhou et al. 2003, "Learning with
    Local and Global Consistency", NeurIPS) relative to the shares, and zero if no label is known.
    Graph networks are overconfident where a node agrees with its neighbours, at large :math:`A_i`.
    A negative :math:`\eta` corrects that, as a temperature for each node does (Hsu et al. 2022,
    "What Makes Graph Neural Networks Miscalibrated?", NeurIPS). With :math:`s = 1` and :math:`a =
    \lambda = \eta = 0` this is temperature scaling with a bias (Alexandari et al. 2020, "Maximum
    Likelihood with Bias-Corrected Calibration is Hard-To-Beat at Label Shift Adaptation", ICML).

    **Scores that say nothing**, such as zeros. A fit replaces :math:`p_i`, and with it :math:`x_i /
    t`, by :math:`(1 - \zeta) \, p_i + \zeta \bar\pi` with the shares :math:`\bar\pi` of its labels,
    shrunk by five labels. :math:`\zeta = \min(1, \prod_i \bar p_{y_i} / p_{i y_i})` over held-out
    labels is near zero if they are much likelier than under the nodes' mean :math:`\bar p` of
    :math:`p`. The prior of :math:`\lambda` rises with :math:`\zeta`.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    >>> pool, scores = PooledScores(2), torch.zeros(3, 2)
    >>> known = torch.tensor([True, False, False])
    >>> terms = pool.terms(hood, scores, torch.tensor([1, -1, -1]), known)
    >>> terms.shape
    torch.Size([4, 3, 2])
    >>> probs = pool(terms)[:, 1]  # the nearer to the known label, the likelier
    >>> bool((probs[:-1] > probs[1:]).all())
    True
    """

    temperature: Tensor  #: :math:`t`, set by temperature scaling and not fitted
    shares: Tensor  #: ``(C,)``: :math:`\zeta \bar\pi`, set likewise
    log_scale: Tensor  #: :math:`\log s`
    neighbors: Tensor  #: :math:`a`
    labels: Tensor  #: :math:`\lambda`
    agreement: Tensor  #: :math:`\eta`
    offsets: Tensor  #: ``(C,)``: :math:`b`

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_integers(2, num_classes=num_classes)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("shares", torch.zeros(num_classes))
        for parameter in POOL:
            size = (num_classes,) if parameter.name == "offsets" else ()
            self.register_parameter(parameter.name, nn.Parameter(torch.zeros(size)))
        Priors(POOL).start(dict(self.named_parameters()))

    def forward(self, terms: Tensor) -> Tensor:
        """:math:`P`, ``(N, C)``, of :meth:`terms` ``(4, N, C)``."""
        expect("terms", terms, (4, "N", len(self.offsets)), kind="float")
        check_each_call("terms", terms)
        return pooled(terms, *self.parameters())

    def extra_repr(self) -> str:
        names = "neighbors", "labels", "agreement", "temperature"
        values = {"scale": self.log_scale.exp()} | {name: getattr(self, name) for name in names}
        return ", ".join(f"{name}={value.item():.4g}" for name, value in values.items())

    def terms(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        known: Tensor,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        r"""``(4, N, C)``: :math:`x / t`, :math:`m`, :math:`\ell` and :math:`(A - .75) \, x / t`, of
        arguments as for :meth:`StackedNMM.forward`. Cost: :math:`O(E C)`, 21 times.
        """
        data = GraphScores.of(hood, scores, y, known, edge_weight)
        return terms_of(data.with_shares(self.shares, self.temperature), self.temperature)


def pooled(
    terms: Tensor,
    log_scale: Tensor,
    neighbors: Tensor,
    labels: Tensor,
    agreement: Tensor,
    offsets: Tensor,
) -> Tensor:
    """:math:`P` of the terms, by the parameters of a pool."""
    pairs = zip((log_scale.exp(), neighbors, labels, agreement), terms, strict=True)
    return sum((weight.to(term) * term for weight, term in pairs), offsets.to(terms)).softmax(-1)


def terms_of(data: GraphScores, temperature: Tensor) -> Tensor:
    """``(4, N, C)``: :meth:`PooledScores.terms`."""
    check_all_rows(data.hood)
    scaled = data.scores / temperature
    probs = scaled.softmax(-1)
    nearby = walk_on(data)(probs)
    agreement = (probs * nearby).sum(-1, keepdim=True) - USUAL_AGREEMENT
    return torch.stack([scaled, (nearby + 1e-3).log(), propagated(data), agreement * scaled])


def propagated(data: GraphScores) -> Tensor:
    r"""``(..., N, C)``: :math:`\ell` given labels ``(..., N)``, as columns of one walk."""
    known, num_classes = data.known, data.scores.shape[1]
    labels = data.scores.new_zeros(*data.y.shape, num_classes)
    labels[..., known, :] = one_hot(data.y[..., known], num_classes).to(labels)
    share = (labels.sum(-2, keepdim=True) + 1) / (labels.sum((-2, -1), keepdim=True) + num_classes)
    columns = labels.movedim(-2, 0)
    reached = spread(walk_on(data), columns.flatten(1), DAMPING, STEPS)
    reached = reached.view(columns.shape).movedim(0, -2)
    total = reached.sum(-1, keepdim=True)
    return ((reached + SHRINKAGE * share) / (total + SHRINKAGE)).log() - share.log()


def walk_on(data: GraphScores) -> Callable[[Tensor], Tensor]:
    """A step of the walk: means of the values ``(N, K)`` of neighbours. Cost: :math:`O(E K)`."""
    hood, weight = data.hood, data.scores.new_ones(data.hood.num_edges)
    weight = weight if data.edge_weight is None else data.edge_weight.to(weight)
    matrix = sparse_csr(hood.ptr, hood.source, weight, (hood.num_nodes, hood.num_nodes))
    total = segment(weight, hood.ptr)[:, None]
    return lambda values: (matrix @ values).div_(total)


@dataclass(frozen=True)
class Formula:
    """``alpha`` and ``logits`` as functions of parameters."""

    values: Values  #: of the parameters, by their names in ``state_dict()``
    temperature: Any = None  #: a tensor, of a pool. Without it, P is a softmax of scaled scores
    shares: Any = None  #: a tensor, of a pool: of labels, in the place of scores that say nothing
    compatibility: Tensor | None = None  #: of edges that relabel
    share: float = 1.0  #: of the NMM beside temperature scaling

    def copied(self, like: Tensor) -> "Formula":
        """The same with parameters of its own, in the type and on the device of a tensor."""
        values = {k: v.detach().to(like, copy=True) for k, v in self.values.items()}
        for name, value in values.items():
            value.requires_grad_(self.values[name].requires_grad)
        fixed = (self.temperature, self.shares, self.compatibility)
        t, shares, matrix = (None if value is None else value.to(like) for value in fixed)
        return replace(self, values=values, temperature=t, shares=shares, compatibility=matrix)

    def with_values(self, numbers: Tensor) -> "Formula":
        """The same with other values, ``(..., d)`` in the order of the parameters."""
        parts = numbers.split([len(value) for value in self.values.values()], -1)
        return replace(self, values=dict(zip(self.values, parts, strict=True)))

    def numbers(self) -> Tensor:
        """``(d,)``: the values."""
        return torch.cat([*self.values.values()]).detach()

    def inputs(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        """The argument of :meth:`probs`, and a mask of known labels that are not in it."""
        if self.temperature is None:
            return data.scores, data.known
        data = data.with_shares(self.shares, self.temperature)
        return terms_of(data, self.temperature), data.known & ~data.certain

    def probs(self, inputs: Tensor) -> Tensor:
        """``(N, C)``: :math:`P`."""
        if self.temperature is None:
            return (self.values["log_scale"].exp() * inputs).softmax(-1)
        return pooled(inputs, *(self.values[f"pool.{p.name}"] for p in POOL))

    def __call__(self, hood: Neighborhood, inputs: Tensor, weight: Tensor | None) -> Tensors:
        """``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        probs = self.probs(inputs)
        return self.alpha(probs), *self.attention(hood, probs, weight)

    def alpha(self, probs: Tensor) -> Tensor:
        """``(N, C)``: concentrations, of :math:`P`."""
        log_kappa, log_floor = self.values["log_kappa"], self.values["log_floor"]
        floor = log_floor.exp()
        if self.temperature is not None:
            floor = (log_kappa + log_floor).exp() / probs.shape[-1]
        return log_kappa.exp() * probs + floor

    def attention(self, rows: Neighborhood, probs: Tensor, weight: Tensor | None) -> Tensors:
        """``logits`` and perhaps ``relabel`` of some rows, of :math:`P` of all nodes."""
        similarity, gamma = (self.values[name].squeeze(-1) for name in ("similarity", "gamma"))
        logits = attention_scores(rows, probs, similarity, gamma)
        if weight is not None:
            logits = logits + weight.to(logits).log()
        if self.compatibility is None:
            return (logits,)
        keep, borrowed = torch.eye(len(self.compatibility)).to(probs), rows.source != rows.target
        rate = self.values["odds"].sigmoid()[..., None] * borrowed[:, None, None]
        return logits, keep + rate * (self.compatibility.to(probs) - keep)

    def beside(self, data: GraphScores) -> Tensor:
        """``(N, C)``: label probabilities beside the NMM."""
        data = data.with_shares(self.shares, self.temperature)
        if data.beside is not None:
            return data.beside
        return (data.scores / self.temperature).softmax(-1)

    def mixtures(self, data: GraphScores, every: Iterable[Tensors]) -> Iterator[NeighborMixture]:
        """Mixtures with ``alpha`` and ``logits``, given the known labels in :math:`P`."""
        if self.temperature is None:
            return (NeighborMixture(data.hood, *parameters) for parameters in every)
        return with_own_sources(data, self.beside(data), self.share, every)


def with_own_sources(
    data: GraphScores, table: Tensor, share: float, every: Iterable[Tensors]
) -> Iterator[NeighborMixture]:
    """Mixtures in which each node has a source of its own. It holds a certain label alone, which is
    no further evidence, or has probability ``1 - share`` and the label probabilities of ``table``.
    """
    hood, known = data.hood, data.certain
    widened = known if share == 1 else torch.ones_like(known)
    if not widened.any():
        yield from (NeighborMixture(hood, *parameters) for parameters in every)
        return
    kept, nodes = (~known)[hood.row].nonzero()[:, 0], widened.nonzero()[:, 0]
    ptr = cumsum(hood.ptr.diff().where(~known, 0) + widened.long())
    added = ptr[1:][nodes] - 1  # the last edge of a row, whose source has the largest number
    others = (~index_to_mask(added, int(ptr[-1]))).nonzero()[:, 0]
    number = hood.num_nodes + len(nodes)

    def with_added(old: Tensor, new: Tensor) -> Tensor:
        values = old.new_empty(len(added) + len(others), *old.shape[1:])
        values[added] = new
        return values.index_copy_(0, others, old.index_select(0, kept))

    source = with_added(hood.source, torch.arange(hood.num_nodes, number, device=nodes.device))
    wider = Neighborhood.of_rows(hood.num_nodes, hood.nodes, ptr, source, num_sources=number)
    labels = one_hot(data.y.where(known, 0), table.shape[1]).to(table)
    rows = (torch.where(known[:, None], CERTAIN * labels, table) + EXCLUDED)[nodes]
    same = torch.eye(table.shape[1]).to(table)
    for alpha, logits, *relabel in every:
        odds = hood.logsumexp(logits) + math.log((1 - share) / share) if share < 1 else 0.0
        added_logits = torch.zeros_like(table[:, 0]).where(known, odds)[nodes]
        matrices = [with_added(change, same) for change in relabel]
        parameters = torch.cat([alpha, rows]), with_added(logits, added_logits), *matrices
        yield NeighborMixture(wider, *parameters)
