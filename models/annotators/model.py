# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators who answer about latent labels: their emission, and its fit."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from pyro.distributions import DirichletMultinomial
from torch import Tensor
from torch.distributions import Categorical, Dirichlet, constraints
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import Array, as_expected, check_integers, check_range, expect_all
from pyro_nmm.edges import edges_of
from pyro_nmm.fitting import with_gradients
from pyro_nmm.labels import check_same_order, in_label_order
from pyro_nmm.models.annotators.answers import Answers, read_answers
from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.annotators.pool import Walk, pool_of
from pyro_nmm.models.hidden import FieldOptions, FieldRun, Values, fit_field, mixture_em
from pyro_nmm.sources import hops

if TYPE_CHECKING:
    from torch_geometric.data import Data


@dataclass(frozen=True)
class Annotators:
    r"""Answers of annotators (people, clusterings, classifiers, language models) about latent
    labels: the model of Dawid and Skene (1979, "Maximum Likelihood Estimation of Observer
    Error-Rates Using the EM Algorithm", JRSS C 28) with an NMM as the prior of the labels.

    .. math::

        u \sim \mathrm{NMM}, \qquad a_{im} \mid u_i = k \sim \mathrm{Categorical}(P_{mk}), \qquad
        P_{mk} \sim \mathrm{Dirichlet}

    Every annotator :math:`m` has a confusion matrix :math:`P_m`, and answers are ``(N, M)``.

    >>> from torch_geometric.utils import grid
    >>> edge_index, places = grid(20, 20)
    >>> truth = (places[:, 0] >= 10).long()
    >>> answers = truth[:, None] ^ (torch.rand(400, 3) < 0.25).long()
    >>> consensus = Annotators(num_labels=2).fit(edge_index, answers)
    >>> majority = answers.sum(1) > 1
    >>> bool((consensus.predict() == truth).sum() > (majority == truth).sum())
    True

    With ``num_types=H``, for **annotators whose errors depend on each other**, they see the node's
    type :math:`h_i \sim \mathrm{Categorical}(R_{u_i})` in the place of its label. If answers name
    labels, the silence of annotators who give one label only is one more answer.

    :param int num_labels: ``C``.
    :param int num_answers: ``K``; default ``num_labels``, or the largest answer plus one if answers
        name no labels.
    :param bool aligned: whether answer ``k`` names label ``k``; false for clusterings. With types
        answers never name labels. The prior of a confusion matrix is then Jeffreys', else each row
        of it counts for one answer, half of it right.
    :raises ValueError: for a number below two.
    """

    num_labels: int
    num_answers: int | None = None
    num_types: int | None = None
    aligned: bool = True
    support: ClassVar = {
        "confusion": constraints.independent(constraints.simplex, 2),
        "types": constraints.independent(constraints.simplex, 1),
    }

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("num_labels", "num_types", "num_answers")}
        check_integers(2, **{name: value for name, value in numbers.items() if value is not None})

    @with_gradients
    def fit(
        self, graph: "Neighborhood | Data | Array", answers: Any,
        edge_attr: Array | None = None, *, pred_probs: Any = None, **options: Unpack[FieldOptions],
    ) -> Consensus:  # fmt: skip
        """Fit the model, and pool the answers about each node with its neighbours.

        :param graph: a neighborhood of your choice; or PyG's ``Data``, an ``edge_index`` or a
            sparse matrix of edges, whose sources are then nodes within two hops.
        :param answers: ``(N, M)`` integers, -1, NaN or masked if missing: a tensor, an array, or a
            data frame with a column for each annotator. True labels of some nodes are the answers
            of one more annotator.
        :param Tensor edge_attr: features of the edges of a neighborhood, such as hops.
        :param pred_probs: ``(N, C)`` out-of-sample probabilities of a classifier of the nodes'
            features, as cleanlab has them: it has not learned the labels of the nodes that it
            predicts. It may learn labels of a first consensus.
        :param options: of :func:`~pyro_nmm.models.fit_field`; one start if answers name labels. For
            more than 50,000 nodes ``num_steps=40, num_chains=2`` are enough.
        :return: the consensus. Cost: as for ``fit_field``, and :math:`O(E C)` for the pool.
        :raises ValueError: for answers that are no integers, too large or all missing,
            ``pred_probs`` that are no probabilities, and options below one.
        """
        hood, walk = graph, None
        if not isinstance(hood, Neighborhood):
            if edge_attr is not None:
                raise ValueError("edge_attr belongs to a Neighborhood: pass one as graph")
            edges, size = edges_of(graph)
            if size is None:
                size = answers.shape[0] if hasattr(answers, "shape") else len(answers)
                check_range("graph", edges, size, cure=", the rows of answers: -1 is no answer")
            hood, edge_attr = hops(edges, size)
            walk = Walk.on_graph(edges, size)
        table = self.check(hood, answers).table()
        if pred_probs is not None:
            check_same_order("pred_probs", pred_probs, "answers", answers)
            pred_probs = in_label_order(pred_probs)
            shape = hood.num_nodes, self.num_labels
            pred_probs = as_expected("pred_probs", pred_probs, shape, kind="float", like=hood)
            total = pred_probs.double().sum(1)
            expect_all("pred_probs", pred_probs, pred_probs >= 0, "be probabilities")
            expect_all("pred_probs", total, (total - 1).abs() < 1e-3, "have rows that sum to one")
        emission, table = self._with_silence(table)
        run = FieldRun(**{"num_starts": 1 if self.named else 5} | options)
        field = fit_field(emission, hood, table, edge_attr, options=run)
        with torch.no_grad():
            return pool_of(field, table, walk or Walk.on_field(field), pred_probs)

    def check(self, hood: Neighborhood, data: Any) -> Answers:
        """Answers of the answers ``(N, M)``, or an error that names what is wrong."""
        table = read_answers(data.table() if isinstance(data, Answers) else data, hood)
        must = f"lie in 0..{self._num_answers(table) - 1}"
        cure = ": number from 0, or raise num_labels or num_answers"
        expect_all("answers", table, table < self._num_answers(table), must, cure)
        return Answers.of(table)

    def start(self, data: Tensor | Answers, hood: Neighborhood) -> Values:
        """The majority vote if answers name labels, else a fit without the graph."""
        if self.named:
            return self.maximise(data, self._votes(Answers.of(data)), {})
        if self.num_types is None:
            return mixture_em(self, data, self._seeds(data))[0]
        plain = Annotators(self.num_types, self._num_answers(data), aligned=False)
        values, probs = mixture_em(plain, data, plain._seeds(data))
        # A mixture of the counts of types at the sources, of each node in equal shares.
        share = (probs * (1 / hood.ptr.diff().to(probs))[:, None]).index_select(0, hood.row)
        counts = probs.new_zeros(hood.num_sources, probs.shape[1]).index_add_(0, hood.source, share)
        seeds = counts[_draw_places(len(counts), self.num_labels, counts.device)] + 1
        of_types: Any = _Counts(self.num_labels)  # the part of an Emission that EM asks for
        return values | mixture_em(of_types, counts, {"types": shares(seeds)})[0]

    def log_prob(self, values: Values, data: Tensor | Answers) -> Tensor:
        """``(N, C)``: of all answers about a node, in nats."""
        return self.of_labels(Answers.of(data).evidence(values["confusion"]), values)

    def of_labels(self, log_prob: Tensor, values: Values) -> Tensor:
        """``(..., C)``: log-likelihoods given labels, from those given types if there are any."""
        if self.num_types is None:
            return log_prob
        top = log_prob.detach().amax(-1, keepdim=True)
        return ((log_prob - top).exp() @ values["types"].mT).log() + top

    def log_prior(self, values: Values, data: Tensor | Answers) -> Tensor:
        """Log prior of all rows of the parameters, as densities of log-odds."""
        total = (self._pseudo_counts(values["confusion"]) * values["confusion"].log()).sum()
        if self.num_types is not None:
            total = total + (values["types"].log() / self.num_types).sum()
        return total

    def maximise(self, data: Tensor | Answers, probs: Tensor, values: Values) -> Values:
        """Expected shares of answers and of types, under ``probs`` ``(N, C)``."""
        if self.num_types is None:
            return {"confusion": shares(self._counts(data, probs))}
        log_prob = Answers.of(data).evidence(values["confusion"])
        likelihood = (log_prob - log_prob.amax(-1, keepdim=True)).exp()
        share = probs / (likelihood @ values["types"].mT)
        types = values["types"] * (share.mT @ likelihood) + 1 / self.num_types
        of_types = likelihood * (share @ values["types"])
        return {"confusion": shares(self._counts(data, of_types)), "types": shares(types)}

    def draw(self, data: Tensor | Answers, labels: Tensor, values: Values) -> Values:
        """Draws from the Dirichlet posterior of every row, given types that are drawn first."""
        causes, drawn = labels, {}
        if self.num_types is not None:
            log_prob = Answers.of(data).evidence(values["confusion"])
            logits = log_prob + values["types"].log().index_select(0, labels)
            causes = Categorical(logits=logits, validate_args=False).sample()
            shape = self.num_labels, self.num_types
            pairs = (labels * self.num_types + causes).bincount(minlength=shape[0] * shape[1])
            counts = pairs.view(shape) + 1 / self.num_types
            drawn["types"] = Dirichlet(counts.to(log_prob)).sample()
        probs = one_hot(causes, self.num_types or self.num_labels).to(values["confusion"])
        return {"confusion": Dirichlet(self._counts(data, probs)).sample()} | drawn

    def shrunk(self, counts: Tensor) -> Tensor:
        r"""Confusion matrices ``(M, C, K)`` of annotators who resemble each other, from expected
        counts :math:`n` of the same shape,

        .. math::

            P_{mk} = \frac{n_{mk} + s \pi_k}{n_{mk} \cdot 1 + s}, \qquad
            p(s \mid n) \propto \prod_{m, k}
            \mathrm{DirichletMultinomial}(n_{mk} \mid s \pi_k), \quad s \in \{1, 2, 5, \dots, 80\}

        with the mean of :math:`s`. An annotator of few answers has nearly :math:`\pi`, the matrix
        of all annotators together. It comes from :math:`\sum_m n_m` in the same way, and has the
        prior's shape if all answers are few.
        """
        prior = self._pseudo_counts(counts)
        # Nodes of a label that no answer names show little.
        counts = counts * (counts.sum((0, 1))[: len(prior), None] > 0)
        (together,) = _towards(shares(prior), counts.sum(0, keepdim=True))
        return _towards(together, counts)

    def without(self, entries: Answers, probs: Tensor, values: Values) -> Values:
        """The M-step under ``probs`` ``(N, C)`` from some of the answers, in double precision, with
        matrices as of :meth:`shrunk` if answers name labels."""
        if not self.named:
            found = self.maximise(entries, probs, values)
            return {name: value.double() for name, value in found.items()}
        counts = entries.confusion(probs[entries.node], self._num_answers(entries))
        return {"confusion": self.shrunk(counts)}

    def alone(self, entries: Answers, values: Values) -> Tensor:
        """``(N, C)``: labels from the answers without a graph. Answers that name labels start EM at
        the majority vote, with matrices as of :meth:`shrunk`; others have the fitted ``values``."""
        if not self.named:
            evidence = self.log_prob(values, entries).double()
            share = shares(evidence.softmax(-1).sum(0) + 1)
            return (evidence + share.log()).softmax(-1)
        # If no node has two answers nothing is known about any annotator: matrices are the prior's.
        several = entries.number().max() > 1
        probs = several * self._votes(entries).double()
        for _ in range(30 if several else 1):
            confusion = self.without(entries, probs, values)["confusion"]
            evidence = entries.evidence(confusion)
            probs = (evidence + shares(probs.sum(0) + 1).log()).softmax(-1)
        return probs

    @property
    def named(self) -> bool:
        """Whether answers name labels."""
        return self.aligned and self.num_types is None

    def _num_answers(self, data: Tensor | Answers) -> int:
        if self.num_answers is not None:
            return self.num_answers
        return self.num_labels if self.named else int(Answers.of(data).answer.max()) + 1

    def _votes(self, entries: Answers) -> Tensor:
        """``(N, C)``: shares of the votes."""
        votes = entries.votes(self._num_answers(entries))[:, : self.num_labels]
        voted = votes.sum(0) > 0  # a label without answers is not the label of doubtful nodes
        return shares(votes.to(torch.get_default_dtype()) + voted / self.num_labels)

    def _with_silence(self, table: Tensor) -> tuple["Annotators", Tensor]:
        """The same model of so many answers, for parts of the nodes too; and one more, silence, of
        annotators who give one label only."""
        number = self._num_answers(table)
        votes = torch.stack([(table == k).sum(0) for k in range(number)], 1).double()
        most, label = votes.max(1)
        # Annotators who give one label only by chance, expected among all of them: half and twice
        # the limit find the same ones on all development sets.
        by_chance = shares(votes.sum(0))[label] ** most * len(votes)
        one_sided = (most == votes.sum(1)) & (by_chance < 0.01) & (table < 0).any(0)
        if not self.named or not one_sided.any():
            return replace(self, num_answers=number), table
        silent = (table < 0) & one_sided
        return replace(self, num_answers=number + 1), table.masked_fill(silent, number)

    def _seeds(self, data: Tensor | Answers) -> Values:
        """Each label's matrix from ten times one random node's answers, all different."""
        entries = Answers.of(data)
        answered = entries.table()[entries.number() > 0].unique(dim=0)
        answers = answered[_draw_places(len(answered), self.num_labels, answered.device)]
        seen = 10 * torch.eye(self.num_labels, device=answers.device).to(torch.get_default_dtype())
        of_all = replace(self, num_answers=self._num_answers(data))
        return {"confusion": shares(of_all._counts(answers, seen))}

    def _counts(self, data: Tensor | Answers, probs: Tensor) -> Tensor:
        """``(M, C, K)``: answers counted with probabilities ``(N, C)``, and the prior's."""
        entries = Answers.of(data)
        place = probs.index_select(0, entries.node)
        counts = entries.confusion(place, self._num_answers(data)).to(probs)
        return counts + self._pseudo_counts(counts)

    def _pseudo_counts(self, like: Tensor) -> Tensor:
        """``(C, K)``: equal shares, or one half for the right answer if answers name labels, and
        two thirds of two answers: it must be more probable than each other one."""
        shape, columns = like.shape[-2:], like.shape[-1]
        if not self.named:
            return like.new_full(shape, 1 / 2)
        right = max(1 / 2, 2 / (columns + 1))
        wrong = (1 - right) / (columns - 1)
        return like.new_full(shape, wrong).fill_diagonal_(right)


def _towards(mean: Tensor, counts: Tensor) -> Tensor:
    """Shares of counts ``(M, C, K)``, shrunk towards rows ``(C, K)`` with a learned strength."""
    strengths = counts.new_tensor([1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0])
    rows = [DirichletMultinomial(strength * mean, validate_args=False) for strength in strengths]
    logits = torch.stack([row.log_prob(counts).sum() for row in rows])
    return shares(counts + logits.softmax(0) @ strengths * mean)


def shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True)


def _draw_places(number: int, size: int, device: torch.device) -> Tensor:
    """``(size,)`` random places, different as long as there are enough."""
    place = torch.randperm(number, device=device)[:size]
    return torch.cat([place, torch.randint(number, (size - len(place),), device=device)])


@dataclass(frozen=True)
class _Counts:
    """Counts of types at a source, multinomial given the source's label."""

    num_labels: int

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        return data @ values["types"].log().mT

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        return {"types": shares(probs.mT @ data + 1 / data.shape[1])}
