# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities, concentrations and attention of a StackedNMM as functions of parameters."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import Array, NodeSet, check_each_call, check_integers, expect
from pyro_nmm.model_arguments import check_all_rows
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.stacked.table import GraphScores
from pyro_nmm.sparse import label_spreading, sparse_csr

#: Probability that the walk takes another step, and its largest number of steps.
DAMPING, STEPS = 0.9, 20
#: Weight of the labels' shares beside the known labels that a walk reaches.
SHRINKAGE = 0.01
#: Agreement at which the scores have the weight ``exp(log_scale)``.
USUAL_AGREEMENT = 0.75
#: Concentrations of a known node's label, and of the others: certain in single precision.
CERTAIN, EXCLUDED = 1e6, 1e-6

Tensors = tuple[Tensor, ...]
#: Means and standard deviations of normal priors, by a parameter's name in ``state_dict()``.
Prior = Mapping[str, tuple[float, float]]

#: Of an NMM on scores alone, at a scale relative to temperature scaling. The means did best on five
#: random splits of Cora and of CiteSeer, none of which is reported.
ON_SCORES = {
    "log_kappa": (1.0, 1.0),
    "log_floor": (-5.0, 1.0),
    "gamma": (2.0, 1.0),
    "similarity": (1.0, 1.0),
    "pool.log_scale": (0.0, 1.0),
}
#: Of an NMM on pooled scores. Fitted to nearly all labels of 36 splits of three graphs
#: (`benchmarks.on_top.run priors`). Two of the graphs are reported on other splits, and
#: docs/results/classifiers.md shows priors from other graphs. There is an offset for every class.
ON_POOL = {
    "log_kappa": (-1.2, 0.7),
    "log_floor": (-5.0, 1.0),
    "gamma": (0.5, 0.5),
    "similarity": (2.4, 0.7),
    "pool.log_scale": (-0.9, 0.7),
    "pool.neighbors": (0.8, 0.4),
    "pool.labels": (0.3, 0.4),
    "pool.agreement": (-0.2, 0.3),
    "pool.offsets": (0.0, 0.7),
}
#: Of edges that relabel; not chosen on any data.
RELABEL = {"odds": (-1.0, 1.5)}
#: What the mean of gamma rises by where neighbours never agree, chosen on splits of heterophilous
#: graphs that are not reported.
ALONE = 4.0
#: Deviations by which the mean of ``pool.labels`` rises where scores say nothing: labels have more
#: weight alone than beside scores that learned from them. On maps half of it costs .02 nats a node
#: where neighbours agree, and twice gains .01.
RISE = 3.0


def prior_of(pool: bool, relabel: bool, changes: Prior) -> dict[str, tuple[float, float]]:
    """The priors of all parameters, some of them changed."""
    priors = (ON_POOL if pool else ON_SCORES) | (RELABEL if relabel else {})
    for name, (mean, sd) in changes.items():
        if name not in priors:
            raise ValueError(f"prior must name parameters of {list(priors)}, got {name!r}")
        if not (math.isfinite(mean) and 0 < sd < math.inf):
            raise ValueError(f"prior must be a mean and a positive sd, got {mean, sd} for {name}")
    return priors | dict(changes)


def adjusted(prior: Prior, agreement: float, silence: float) -> Prior:
    """The priors of one fit, which depend on scores and neighbours."""
    changed = dict(prior)
    if prior["gamma"] == ON_POOL["gamma"]:
        mean, sd = prior["gamma"]
        changed["gamma"] = mean + ALONE * (1 - agreement) ** 2, sd
    if "pool.labels" in prior:
        mean, sd = prior["pool.labels"]
        changed["pool.labels"] = mean + RISE * silence * sd, sd * (1 + silence)
    return changed


class PooledScores(nn.Module):
    r"""Label probabilities of each node from its scores, the scores of its neighbours and the known
    labels around it: a logarithmic pool (Genest and Zidek 1986, "Combining Probability
    Distributions", Statistical Science 1) with ``4 + C`` parameters.

    .. math::

        P_i &= \mathrm{softmax}\Big( \big( s + \eta \, (A_i - \tfrac{3}{4}) \big) \log p_i
            + a \, m_i + \lambda \, \ell_i + b \Big) \\
        A_i &= \sum_k p_{ik} \frac{1}{|n(i)|} \sum_{j \in n(i)} p_{jk}, \quad
               p_i = (1 - \zeta) \, \mathrm{softmax} \frac{x_i}{t} + \zeta \bar\pi \\
        m_i &= \log \Big( \frac{1}{|n(i)|} \sum_{j \in n(i)} p_j + 10^{-3} \Big) \\
        \ell_{ik} &= \log \frac{R_{ik} + \tau \pi_k}{\sum_l R_{il} + \tau} - \log \pi_k \\
        R &= (1 - g) \sum_{r=0}^{19} g^r W^r Y + g^{20} W^{20} Y

    with scores :math:`x`, ``(N, C)``, at temperature :math:`t`. A step of the walk :math:`W` goes
    to a node of :math:`n(i)`. :math:`Y` holds the known labels, one-hot, and zeros for other nodes.
    :math:`\pi` is the share of each label, :math:`g = .9` and :math:`\tau = .01`. :math:`\ell` is
    label propagation (Zhou et al. 2003, "Learning with Local and Global Consistency", NeurIPS)
    relative to the shares, and zero if no label is known.
    A negative :math:`\eta` corrects overconfidence where a node agrees with its neighbours (Hsu et
    al. 2022, "What Makes Graph Neural Networks Miscalibrated?", NeurIPS). With :math:`s = 1` and
    :math:`a = \lambda = \eta = 0` this is temperature scaling with a bias (Alexandari et al. 2020,
    "Maximum Likelihood with Bias-Corrected Calibration is Hard-To-Beat at Label Shift Adaptation",
    ICML).

    **Uninformative scores**, such as zeros, yield to the shares :math:`\bar\pi` of the fit's
    labels, shrunk by five labels. :math:`\zeta = \min(1, \prod_i \bar p_{y_i} / p_{i y_i})` over
    held-out labels is near zero if they are much likelier than under the nodes' mean :math:`\bar p`
    of the softmax. The prior of :math:`\lambda` rises with :math:`\zeta`.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    >>> pool, scores = PooledScores(2), torch.zeros(3, 2)
    >>> known = torch.tensor([True, False, False])
    >>> terms = pool.terms(hood, scores, torch.tensor([1, -1, -1]), known)
    >>> terms.shape
    torch.Size([4, 3, 2])
    >>> probs = pool(terms)[:, 1]  # the nearer to the known label, the likelier
    >>> bool((probs[:-1] > probs[1:]).all())
    True

    :param bool scores_alone: whether :math:`s` is the only parameter, and ``terms`` the first one.
    :raises ValueError: for fewer than two labels, wrong shapes, and scores that are not finite.
    """

    temperature: Tensor  #: :math:`t`, set by temperature scaling and not fitted
    shares: Tensor  #: ``(C,)``: :math:`\zeta \bar\pi`, set likewise
    log_scale: Tensor  #: :math:`\log s`
    neighbors: Tensor  #: :math:`a`
    labels: Tensor  #: :math:`\lambda`
    agreement: Tensor  #: :math:`\eta`
    offsets: Tensor  #: ``(C,)``: :math:`b`

    def __init__(self, num_classes: int, scores_alone: bool = False) -> None:
        super().__init__()
        check_integers(2, num_classes=num_classes)
        self.scores_alone = scores_alone
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("shares", torch.zeros(num_classes))
        for name, (mean, _) in (ON_SCORES if scores_alone else ON_POOL).items():
            if name.startswith("pool."):
                size = (num_classes,) if name == "pool.offsets" else ()
                value = nn.Parameter(torch.full(size, mean))
                self.register_parameter(name.removeprefix("pool."), value)

    def forward(self, terms: Tensor) -> Tensor:
        """:math:`P`, ``(N, C)``, of :meth:`terms` ``(4, N, C)``."""
        number = 1 if self.scores_alone else 4
        expect("terms", terms, (number, "N", len(self.shares)), kind="float")
        check_each_call("terms", terms)
        return pooled(terms, *self.parameters())

    def extra_repr(self) -> str:
        return f"{readable(self)}, temperature={self.temperature.item():.4g}"

    def terms(self, hood: Neighborhood, scores: Array, y: Array, known: NodeSet) -> Tensor:
        r"""``(4, N, C)``: :math:`\log p`, :math:`m`, :math:`\ell` and :math:`(A - .75) \log p`, of
        arguments as for :meth:`StackedNMM.forward`. Cost: :math:`O(E C)`, 21 times.
        """
        data = GraphScores.of(hood, scores, y, known)
        return terms_of(data, self.temperature, self.shares, self.scores_alone)


def readable(module: nn.Module) -> str:
    """A module's own parameters of one number, logarithms as what they are of."""
    shown = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.numel() == 1:
            value, of = parameter.item(), name.removeprefix("log_")
            shown.append(f"{of}={value if of == name else math.exp(value):.4g}")
    return ", ".join(shown)


def pooled(terms: Tensor, log_scale: Tensor, *others: Tensor) -> Tensor:
    """:math:`P` of the terms, by the parameters of a pool."""
    logits = log_scale.to(terms).exp() * terms[0]
    if others:
        *weights, offsets = (parameter.to(terms) for parameter in others)
        pairs = zip(weights, terms[1:], strict=True)
        logits = sum((weight * term for weight, term in pairs), logits + offsets)
    return logits.softmax(-1)


def terms_of(data: GraphScores, temperature: Tensor, shares: Tensor, alone: bool) -> Tensor:
    """``(4, N, C)``: :meth:`PooledScores.terms`, or ``(1, N, C)`` of scores alone."""
    check_all_rows(data.hood)
    shares = shares.to(data.scores)
    kept = (1 - shares.sum()).clamp(min=0).log()
    own = torch.logaddexp((data.scores / temperature).log_softmax(-1) + kept, shares.log())
    if alone:
        return own[None]
    probs, nearby = own.exp(), mean_of_neighbors(data)(own.exp())
    agreement = (probs * nearby).sum(-1, keepdim=True) - USUAL_AGREEMENT
    return torch.stack([own, (nearby + 1e-3).log(), propagated(data), agreement * own])


def mean_of_neighbors(data: GraphScores) -> Callable[[Tensor], Tensor]:
    """Means of the neighbours as a function of values ``(N, K)``."""
    hood, ones = data.hood, data.scores.new_ones(data.hood.num_edges)
    matrix = sparse_csr(hood.ptr, hood.source, ones, (hood.num_nodes, hood.num_nodes))
    return lambda values: (matrix @ values).div_(hood.ptr.diff()[:, None])


def propagated(data: GraphScores) -> Tensor:
    r"""``(..., N, C)``: :math:`\ell` given labels ``(..., N)``, as columns of one walk."""
    known, num_classes = data.known, data.scores.shape[1]
    labels = one_hot(data.y.where(known, 0), num_classes).to(data.scores) * known[:, None]
    share = (labels.sum(-2, keepdim=True) + 1) / (labels.sum((-2, -1), keepdim=True) + num_classes)
    columns = labels.movedim(-2, 0)
    reached = label_spreading(mean_of_neighbors(data), columns.flatten(1), DAMPING, STEPS)
    reached = reached.view(columns.shape).movedim(0, -2)
    total = reached.sum(-1, keepdim=True)
    return ((reached + SHRINKAGE * share) / (total + SHRINKAGE)).log() - share.log()


@dataclass(frozen=True)
class Formula:
    """``alpha`` and ``logits`` as functions of parameters."""

    values: Mapping[str, Tensor]  #: ``(..., 1)`` or ``(..., C)``, by names in ``state_dict()``
    temperature: Tensor
    shares: Tensor  #: of labels, in the place of scores that say nothing
    compatibility: Tensor | None  #: of edges that relabel
    share: float  #: of the NMM beside temperature scaling

    def with_values(self, numbers: Tensor) -> "Formula":
        """The same with other values, ``(..., d)`` in the order of the parameters."""
        parts = numbers.split([value.shape[-1] for value in self.values.values()], -1)
        return replace(self, values=dict(zip(self.values, parts, strict=True)))

    def numbers(self) -> Tensor:
        """``(d,)``: the values."""
        return torch.cat([*self.values.values()]).detach()

    def prior(self, moments: Prior, like: Tensor) -> Normal:
        """Of :meth:`numbers`."""
        each = [like.new_tensor(moments[k]).expand(len(v), 2) for k, v in self.values.items()]
        return Normal(*torch.cat(each).T)

    def inputs(self, data: GraphScores) -> Tensor:
        """The argument of :meth:`probs`."""
        return terms_of(data, self.temperature, self.shares, "pool.labels" not in self.values)

    def probs(self, inputs: Tensor) -> Tensor:
        """``(N, C)``: :math:`P`."""
        return pooled(inputs, *(v for k, v in self.values.items() if k.startswith("pool.")))

    def __call__(self, rows: Neighborhood, inputs: Tensor) -> Tensors:
        """``alpha`` of all nodes, and ``logits`` and perhaps ``relabel`` of some rows' edges."""
        probs = self.probs(inputs)
        floor = self.values["log_floor"].exp() / probs.shape[-1]
        alpha = self.values["log_kappa"].exp() * (probs + floor)
        similarity, gamma = (self.values[name].squeeze(-1) for name in ("similarity", "gamma"))
        logits = attention_scores(rows, probs, similarity, gamma)
        if self.compatibility is None:
            return alpha, logits
        keep, borrowed = torch.eye(len(self.compatibility)).to(probs), rows.source != rows.target
        rate = self.values["odds"].sigmoid()[..., None] * borrowed[:, None, None]
        return alpha, logits, keep + rate * (self.compatibility.to(probs) - keep)

    def mixtures(
        self, data: GraphScores, inputs: Tensor, every: Iterable[Tensors]
    ) -> Iterator[NeighborMixture]:
        """Mixtures of parameters, given the labels that are in :math:`P` alone. Each of these nodes
        has a source of its own, which holds a certain label. With a share below one the others have
        one too, with the probabilities of temperature scaling.
        """
        hood, held = data.hood, data.known & ~data.evidence
        own = held | (self.share < 1)
        if not own.any():
            yield from (NeighborMixture(hood, *parameters) for parameters in every)
            return
        nodes, kept = own.nonzero()[:, 0], (~held)[hood.row].nonzero()[:, 0]
        row, number = torch.cat([hood.row[kept], nodes]), hood.num_nodes + len(nodes)
        order = row.argsort(stable=True)  # the last source of a row has the largest number
        source = torch.cat([hood.source[kept], torch.arange(hood.num_nodes, number).to(nodes)])
        wider = Neighborhood(torch.stack([source, row]), hood.num_nodes, number)
        certain, table = held[nodes], inputs[0].softmax(-1)
        labels = CERTAIN * one_hot(data.y.where(held, 0), table.shape[1]).to(table)
        rows = torch.where(certain[:, None], labels[nodes], table[nodes]) + EXCLUDED
        keep = torch.eye(table.shape[1]).to(table).expand(len(nodes), -1, -1)
        for alpha, logits, *relabel in every:
            odds = hood.logsumexp(logits)[nodes] + math.log(1 / self.share - 1 or 1)
            added = odds.masked_fill(certain, 0.0)
            changes = [torch.cat([change[kept], keep])[order] for change in relabel]
            logits = torch.cat([logits[kept], added])[order]
            yield NeighborMixture(wider, torch.cat([alpha, rows]), logits, *changes)
