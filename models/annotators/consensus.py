# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""One label distribution per node: a pool of answers, neighbours and a classifier."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch_geometric.utils import remove_self_loops, to_undirected

from pyro_nmm.fitting import minimise
from pyro_nmm.models.annotators.agreement import (
    Dependence,
    Quality,
    effective_number,
    excess_agreement,
    matrices,
)
from pyro_nmm.models.annotators.answers import Entries
from pyro_nmm.models.hidden import HiddenField, Values, allowed_labels
from pyro_nmm.sparse import csr_of_entries

# Development sets: small simulated crowds of other seeds than the page has, CiteSeer, digits with
# other classifiers, and labels from an NMM. "Half" and "twice" are the mean change of the NLL on 62
# to 217 of these sets, and the change of the worst group of sets.
#: Probability of a further step after an edge (.8: +.002, +.013; .95: +.004, +.015), the same after
#: a source (.25: -.002, +.009; .9: -.004, +.042, on labels from an NMM), and the longest walk.
DAMPING, OVER_SOURCES, LONGEST = 0.9, 0.5, 50
#: Strength of the neighbours in a Potts model (half: +.011, +.066; twice: +.016, +.089), and damped
#: steps. Without a walk the NLL is .05 higher, without a Potts model .08.
STRENGTH, NUM_STEPS = 2.5, 30
#: Parts of the nodes whose answers are left out (half: +.009, +.039; twice: -.002, +.008, at twice
#: the cost), and answers that fit the powers.
PARTS, MOST_ANSWERS = 10, 20_000
#: Power of Potts and of the answers, in Potts too, where no node has two answers, so that none can
#: be left out. With .15 the NLL of one answer a node is .10 higher, with .6 it is .19 higher. Then
#: a classifier's power (half: +.019 on CiteSeer, -.070 on digits; twice: -.017, +.169).
ALONE, CLASSIFIER = 0.25, 0.5
#: Times that a classifier learns from the pool. Once, in half of the time: +.009 and +.021 on
#: CiteSeer, -.003 and -.048 on digits, one seed each.
ROUNDS = 2
#: Answers count for less than the fit says, for confusion matrices come from the same answers
#: (half: +.034, +.134; at one: +.006, +.052, and .1 for people who err together).
SHARE = 0.8
#: Standard errors by which priors must predict answers to count in full (half: +.006, +.028; twice:
#: +.105, +.513). By one less they count for nothing: a graph without information has more than two
#: in one of forty cases.
INFORMED = 2.0
#: The smallest share of a label around a node. A hundredth of it changes nothing.
LEAST = 1e-4
#: Two standard errors of the accuracy, above which `summary` warns. No answer depends on it.
ROUGH = 0.08


@dataclass(frozen=True)
class Walk:
    r"""Label distribution at the other end of a random walk from each node, which is label
    spreading (Zhou et al. 2003, "Learning with Local and Global Consistency", NeurIPS 16) with the
    mean over neighbours,

    .. math::

        F \leftarrow g \, D^{-1} A F + (1 - g) \, Y, \qquad g = 0.9 .

    On a graph each step goes to a neighbour. On a neighbourhood it goes to a source and on to a
    node of that source, each in proportion to attention, with :math:`g = 0.5`.
    """

    there: Tensor  #: ``(N, N)`` or ``(N, M)`` shares of the neighbours or the sources of each node
    back: Tensor | None = None  #: ``(M, N)`` shares of the nodes of each source
    damping: float = DAMPING

    @classmethod
    def on_graph(cls, edge_index: Tensor, num_nodes: int) -> "Walk":
        """An edge counts in both directions, and loops do not."""
        edges = remove_self_loops(to_undirected(edge_index.long(), num_nodes=num_nodes))[0]
        weight = torch.ones(edges.shape[1], dtype=torch.double, device=edges.device)
        return cls(_shares(edges[0], edges[1], weight, (num_nodes, num_nodes)))

    @classmethod
    def on_field(cls, field: HiddenField) -> "Walk":
        """Over the sources of a field, with its fitted attention."""
        hood = field.hood
        with torch.no_grad():
            weight = hood.log_softmax(field.prior(hood, *field.inputs)[1]).double().exp()
        there = _shares(hood.target, hood.source, weight, (hood.num_nodes, hood.num_sources))
        back = _shares(hood.source, hood.target, weight, (hood.num_sources, hood.num_nodes))
        return cls(there, back, OVER_SOURCES)

    def labels(self, observed: Tensor, part: Tensor) -> Tensor:
        """Distributions ``(N, C)`` around each node, equal shares if a walk meets no label. Those
        of a node's ``part`` are left out for it; ``observed`` is zero at nodes without any."""
        ends = _left_out(observed, part, self.ends)
        total = ends.sum(-1, keepdim=True)
        return torch.where(total > 0, ends / total, 1 / observed.shape[1])

    def ends(self, observed: Tensor) -> Tensor:
        """``(N, C)``: labels at the other ends of walks, in the formula's units."""
        labels = observed
        for _ in range(LONGEST if self.back is None else LONGEST // 2):
            labels = self.damping * self.step(labels) + (1 - self.damping) * observed
        return labels

    def step(self, labels: Tensor) -> Tensor:
        """``(N, C)``: the mean of the neighbours."""
        return self.there @ (labels if self.back is None else self.back @ labels)


def _shares(rows: Tensor, columns: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix whose rows sum to one, but for empty rows."""
    total = weight.new_zeros(shape[0]).index_add_(0, rows, weight)
    return csr_of_entries(rows, columns, weight / total[rows], shape)


def _left_out(observed: Tensor, part: Tensor, around: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of all nodes' tables ``(N, C)``, for each part without the part's rows."""
    labels = torch.empty_like(observed)
    for number in range(int(part.max()) + 1):
        here = part == number
        labels[here] = around(observed.masked_fill(here[:, None], 0))[here]
    return labels


def potts_labels(walk: Walk, evidence: Tensor, part: Tensor) -> Tensor:
    r"""Softmax of the second term, ``(N, C)``, in the mean field of a Potts model,

    .. math::

        q_i \propto \exp \Bigl( e_i + \tfrac{2.5}{\sqrt{d_i}} \sum_{j \sim i} q_j \Bigr)

    Label spreading is linear and mild, but in the Potts model neighbours that agree convince each
    other. Over sources :math:`d_i` is the inverse sum of squared attention. The evidence of a
    node's ``part`` is left out for it.
    """
    shares, rows = walk.there.values(), walk.there.crow_indices().diff()
    squares = torch.segment_reduce(shares.square(), "sum", lengths=rows, initial=0)
    strength = STRENGTH * squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()[:, None]

    def around(observed: Tensor) -> Tensor:
        labels = observed.softmax(-1)
        for _ in range(NUM_STEPS):
            labels = (labels + (observed + strength * walk.step(labels)).softmax(-1)) / 2
        return (strength * walk.step(labels)).softmax(-1)

    return _left_out(evidence, part, around)


@dataclass(frozen=True)
class Consensus:
    r"""One label distribution per node from the answers of several annotators: what
    :meth:`Annotators.fit` returns.

    .. math::

        p(u_i = k) \propto \prod_q \nu_{qik}^{b_q} \, p(a_i \mid u_i = k, P^{-i})^w

    The priors :math:`\nu_q` of a node's label are the shares of the labels, the end of a random
    walk, the field of the neighbours in a Potts model, and out-of-fold predictions of a classifier.
    They and the confusion matrices :math:`P^{-i}` do without the node's own answers. The powers
    :math:`b_q` and :math:`w < 1` predict answers that are left out best. :math:`w` is then
    multiplied by :math:`.8 \min(1, \sum_q b_q)`, for a small :math:`b` shows dependent errors.

    The graph counts only if it predicts answers. Let :math:`t` be the number of standard errors by
    which the walk gives more to the labels that a node's answers mean than to those of other
    nodes. The graph's powers are multiplied by :math:`g = t - 1`, between zero and one, and those
    of a classifier by its own. With the larger :math:`g` the shares have the power :math:`1 - g`,
    and the answers :math:`g w + 1 - g`. If no node has two answers the powers are fixed. Known
    labels move all powers, and :math:`w` may then exceed one.

    >>> from torch_geometric.utils import grid
    >>> from pyro_nmm.models import Annotators
    >>> edge_index, places = grid(20, 20)
    >>> truth = np.where(places[:, 0] >= 10, "cat", "dog")
    >>> guesses = np.where(np.random.default_rng(0).random((400, 3)) < 0.3, "cat", truth[:, None])
    >>> consensus = Annotators(num_labels=2).fit(edge_index, guesses)
    >>> consensus.predict()[:2], consensus.labels
    (array(['dog', 'dog'], dtype='<U3'), ['cat', 'dog'])

    :ivar HiddenField field: the fitted model, with its joint samples and parameters.
    :ivar Tensor answers: ``(N, M)``, -1 for missing ones, and ``C`` for the silence of annotators
        who give one label only.
    :ivar Tensor probs: ``(N, C)``, the probability of every label of every node.
    :ivar dict priors: ``(N, C)`` label distributions :math:`\nu_q`: "shares", "walk", "potts",
        and "classifier" if there is one.
    :ivar dict powers: :math:`b_q` under the same names, and :math:`w`, "answers".
    :ivar Dependence dependence: excess agreement of annotators.
    :ivar list labels: names of labels, if answers are text that names them.
    :ivar list annotators: names of annotators, if answers are a data frame.
    """

    field: HiddenField
    answers: Tensor
    probs: Tensor
    priors: dict[str, Tensor]
    powers: dict[str, float]
    dependence: Dependence
    labels: list[str] | None = None
    annotators: list | None = None

    def predict(self) -> Any:
        """``(N,)``: every node's most probable label, an array of names if answers are text that
        names labels."""
        numbers = self.probs.argmax(-1)
        return numbers if self.labels is None else np.array(self.labels)[numbers.cpu().numpy()]

    def predict_proba(self) -> Tensor:
        """:attr:`probs`, under the name of scikit-learn."""
        return self.probs

    def entropy(self) -> Tensor:
        """``(N,)``: of every node's label, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def log_prior(self) -> Tensor:
        r"""``(N, C)``: :math:`\sum_q b_q \log \nu_q`, of each node without its own answers."""
        logs = [self.powers[name] * prior.double().log() for name, prior in self.priors.items()]
        known = allowed_labels(self.field.known, self.field.hood, self.probs.shape[1])
        return torch.stack([*logs, known.double()]).sum(0)

    def information_gain(self) -> Tensor:
        """``(N, M)``: what one more answer of each annotator would say about each node's label, in
        nats, to ask the most useful question next. Zero where the annotator has answered."""
        probs, size = self.probs.double(), int(self.answers.max()) + 1
        confusion = matrices(probs, self.answers, size)
        answers = torch.einsum("nk,mka->nma", probs, confusion)
        known = torch.einsum("nk,mka->nm", probs, torch.special.entr(confusion))
        gain = torch.special.entr(answers).sum(-1) - known
        return gain.clamp(min=0).masked_fill(self.answers >= 0, 0).to(self.probs)

    def pairs(self) -> Dependence:
        """``(M, M)``: which annotators err together, the excess agreement of each pair. NaN where
        two share no answers that could differ, zeros on the diagonal."""
        power = self.powers["answers"]
        pairs = excess_agreement(self.probs, self.log_prior, power, self.answers, pairs=True)
        return Dependence(*(table.fill_diagonal_(0) for table in pairs))

    @property
    def graph_power(self) -> float:
        """The sum of the priors' powers."""
        return sum(power for name, power in self.powers.items() if name != "answers")

    def effective_number(self, level: float = 0.9) -> Quality:
        """How many independent answers the answers at a node are worth, judged without true labels:
        see :func:`~pyro_nmm.models.annotators.effective_number`."""
        power, values = self.graph_power, self.field.values
        return effective_number(self.log_prior, power, values, self.answers, level)

    def summary(self) -> str:
        """What was fitted, how answers and neighbours count, whether annotators agree more often
        than independent errors explain, how many independent answers a node has, and warnings."""
        there, lines = self.answers >= 0, [self._fitted()]
        with torch.random.fork_rng():  # a summary changes no random number
            worth = self.effective_number()
        if worth.mean.isfinite():
            mean, low, high = (value.item() for value in worth)
            size = there.sum(1)[there.sum(1) > 1].double().mean().item()
            of_all = f"{size:.1f} answers a node are worth {mean:.1f} independent ones"
            lines.append(f"{of_all} ({low:.1f} to {high:.1f}), if neighbours share no error")
        return "\n".join(lines + [f"warning: {text}" for text in self._warnings()])

    def _warnings(self) -> Iterator[str]:
        there, labelled = self.answers >= 0, self.field.known is not None
        nodes = int(there.any(1).sum())
        if self.powers["shares"] > 0 and not labelled:
            used = f"{1 - self.powers['shares']:.0%} of the pool, the rest from the answers alone"
            yield f"neighbours predict answers badly, a graph that does not fit: {used}"
        if nodes == there.sum() and not labelled:
            yield "no node has two answers: powers are defaults, confidence is a guess"
        sure = self.probs[there.any(1)].double().amax(1)
        error = 2 * (sure * (1 - sure)).sum().sqrt().item() / max(1, nodes)
        if error > ROUGH:
            beside = f"the accuracy may differ from the confidence {sure.mean():.2f}"
            yield f"{nodes} answered nodes are few: {beside} by {error:.2f}"

    def _fitted(self) -> str:
        there, powers = self.answers >= 0, [f"{name} {b:.2f}" for name, b in self.powers.items()]
        return (
            f"{int(there.sum()):,} answers of {there.shape[1]:,} annotators about "
            f"{int(there.any(1).sum()):,} of {len(there):,} nodes, {self.probs.shape[1]} labels\n"
            f"powers: {', '.join(powers)}\n{self.dependence}"
        )

    def __repr__(self) -> str:
        return f"Consensus({self._fitted()})".replace("\n", "; ")


@torch.no_grad()
def consensus_of(
    field: HiddenField, answers: Tensor, walk: Walk,
    classifier: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Consensus:  # fmt: skip
    """Pool neighbours, a classifier as :func:`out_of_fold` returns it, and the answers."""
    emission: Any = field.emission
    part = torch.randperm(len(answers), device=answers.device) % PARTS
    known = allowed_labels(field.known, field.hood, field.probs.shape[1]).double()
    certain = (answers >= 0).any(1) | known.isinf().any(1)
    entries = emission.check(field.hood, answers)
    simple = emission.alone(entries, known, field.values).double()
    told = field.known
    if told is not None and getattr(emission, "named", False):
        # Answers cannot show a label that none of them names, nor can it show what they count for.
        told = told.masked_fill(~torch.isin(told, entries.answer), -1)

    counts = 1.0 if entries.number().max() > 1 else ALONE

    def around(probs: Tensor) -> tuple[LeftOut, Tensor]:
        left_out = left_out_answers(field, entries, probs.to(field.probs), part)
        near = (left_out.evidence + known).softmax(-1).masked_fill(~certain[:, None], 0)
        return left_out, walk.labels(near, part)

    def pooled(left_out: LeftOut, ends: Tensor) -> tuple[dict[str, Tensor], _Pool]:
        potts = potts_labels(walk, counts * left_out.evidence + known, part)
        priors = {"shares": simple.mean(0).expand_as(simple), "walk": ends, "potts": potts}
        return priors, _pool(priors, left_out, known, told, weight)

    # Matrices come from the field if the graph predicts answers, else from the answers alone.
    left_out, ends = around(simple)
    weight = gate(ends, left_out, known)
    if weight > 0:
        left_out, ends = around(weight * field.probs + (1 - weight) * simple)
    priors, pool = pooled(left_out, ends)
    if weight > 0 and counts < 1:
        # Each of the three believes an annotator whom no other one contradicts: take their mean.
        mean = (field.probs + simple + pool.probs) / 3
        left_out, ends = around(weight * mean + (1 - weight) * simple)
        priors, pool = pooled(left_out, ends)
    # The classifier learns from the pool, and then once more from the pool that it is part of.
    for _ in range(ROUNDS if classifier is not None else 0):
        priors["classifier"] = classifier(pool.probs, certain)  # type: ignore[misc]
        pool = _pool(priors, left_out, known, told, weight)
    log_prior, probs = pool.log_prior + known, pool.probs.to(field.probs)
    powers = dict(zip([*priors, "answers"], pool.powers.tolist(), strict=True))
    priors = {name: _away_from_zero(prior).to(field.probs) for name, prior in priors.items()}
    dependence = excess_agreement(probs, log_prior, powers["answers"], answers)
    return Consensus(field, answers, probs, priors, powers, dependence)


class LeftOut(NamedTuple):
    """What is known about ``A`` answers without them."""

    evidence: Tensor  #: ``(N, C)`` of all answers at each node, in nats
    node: Tensor  #: ``(A,)`` the node that each answer is about
    others: Tensor  #: ``(A, C)`` evidence of the other answers at the node
    single: Tensor  #: ``(A, C)`` evidence of the answer itself
    same: Tensor  #: ``(A,)`` the share of the other answers that are the same


def left_out_answers(
    field: HiddenField, data: Tensor | Entries, probs: Tensor, part: Tensor
) -> LeftOut:
    """Evidence in each part of the nodes, from the M-step without the part's answers, under label
    distributions ``(N, C)``."""
    fitted: Any = field.emission
    checked = fitted.check(field.hood, data)
    evidence, parts = probs.new_zeros(probs.shape, dtype=torch.double), []
    for number in range(int(part.max()) + 1):
        here = part == number
        others, inside = checked.at(~here), checked.at(here)
        if getattr(fitted, "named", False):
            size = field.values["confusion"].shape[-1]
            matrices = fitted.shrunk(others.confusion(probs[others.node], size))
            values = {"confusion": matrices}
        else:
            values = fitted.maximise(others, probs, field.values)
            values = {name: value.double() for name, value in values.items()}
        evidence[here] = fitted.log_prob(values, inside)[here]
        parts.append(_each_alone(fitted, values, inside))
    return LeftOut(evidence, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _each_alone(emission: Any, values: Values, entries: Entries) -> tuple:
    """Each answer and the others at its node, annotator by annotator, linear in the answers."""
    order = entries.annotator.argsort(stable=True)
    node, answer = entries.node[order], entries.answer[order]
    confusion = values["confusion"]
    alone = confusion.log()[entries.annotator[order], :, answer]
    number = entries.number()[node]
    others = emission.of_labels(entries.evidence(confusion)[node] - alone, values)
    others, alone = others.masked_fill((number == 1)[:, None], 0), emission.of_labels(alone, values)
    same = entries.votes(confusion.shape[-1])[node, answer].double() - 1
    return node, others, alone, same / (number - 1).clamp(min=1)


class _Pool(NamedTuple):
    """Probabilities, powers of the priors and the answers, and the priors to their powers."""

    probs: Tensor
    powers: Tensor
    log_prior: Tensor


def _pool(
    priors: dict[str, Tensor], answers: LeftOut, allowed: Tensor, known: Tensor | None, graph: float
) -> _Pool:
    """Pool priors, of which shares of the labels come first, then those of a graph of weight
    ``graph``, and a classifier."""
    logs = torch.stack([_away_from_zero(prior).log() for prior in priors.values()], 1)
    several = answers.node.bincount().max() > 1
    # If none can be left out: of walk, Potts, a classifier and the answers.
    fixed = logs.new_tensor([1.0, ALONE, *[CLASSIFIER] * (len(priors) - 3), ALONE])
    powers = fit_powers(logs[:, 1:], answers) if several else fixed
    around, own = powers[:-1], powers[-1:]
    if several:  # other answers predict one better than priors do if annotators err together
        own = SHARE * around.sum().clamp(max=1) * own
    gates = [graph, graph, *(gate(prior, answers, allowed) for prior in list(priors.values())[3:])]
    weight = max(gates)
    around = around * around.new_tensor(gates)
    powers = torch.cat([own.new_tensor([1 - weight]), around, weight * own + 1 - weight])
    if known is not None:
        powers = refit_powers(powers, logs, answers.evidence, known)
    log_prior = torch.einsum("npc,p->nc", logs, powers[:-1])
    probs = (log_prior + powers[-1] * answers.evidence + allowed).softmax(-1)
    return _Pool(probs, powers, log_prior)


def gate(prior: Tensor, answers: LeftOut, allowed: Tensor) -> float:
    """Weight of a prior, from zero to one. A graph or a classifier that predicts no answers must
    not overrule any, nor does it show whether annotators err together."""
    return (standard_errors(prior, answers, allowed) - INFORMED + 1).clamp(0, 1).item()


def standard_errors(prior: Tensor, answers: LeftOut, allowed: Tensor) -> Tensor:
    """By how many standard errors over nodes the prior gives more to the labels that answers mean,
    and to known labels, than to those of other nodes' answers."""
    known = allowed.isinf().any(1).nonzero()[:, 0]
    node = torch.cat([answers.node, known])
    labels = torch.cat([answers.single, allowed[known]]).softmax(-1)
    there = node.bincount(minlength=len(prior)) > 0
    gain = (labels * (prior - prior[there].mean(0))[node]).sum(-1)
    gain = gain.new_zeros(len(there)).index_add(0, node, gain)[there]
    return gain.mean() / (gain.std(correction=0) / len(gain) ** 0.5 + 1e-12)


def _away_from_zero(probs: Tensor) -> Tensor:
    probs = probs.double().clamp(min=LEAST)
    return probs / probs.sum(-1, keepdim=True)


def fit_powers(log_priors: Tensor, answers: LeftOut) -> Tensor:
    r"""Powers :math:`b_q` of the priors, ``(N, P, C)`` logarithms, and :math:`w` of the answers,
    from the likelihood of each answer given the priors of its node and the other answers there,

    .. math::

        \sum_{i, m} \log \Bigl( (1 - r) \sum_k P_{mk a_{im}} \, \mathrm{softmax}_k \bigl(
        \textstyle\sum_q b_q \log \nu_{qi} + w e_i^{-m} \bigr) + r \, s_{im} \Bigr),
        \qquad b_q \sim \mathrm{Exponential}(1), \quad w \sim \mathrm{Uniform}(0, 1) .

    A share :math:`r` of the answers repeats a random other answer at the node, of which
    :math:`s_{im}` are the same. It is fitted too, so that copies do not lower :math:`b`.

    :return: ``(P + 1,)``.
    """
    at = torch.randperm(len(answers.node), device=log_priors.device)[:MOST_ANSWERS]
    priors, others, single = log_priors[answers.node[at]], answers.others[at], answers.single[at]
    same, several = answers.same[at], (others != 0).any(-1)
    free = single.new_tensor([0.0] * (log_priors.shape[1] + 1) + [-3.0]).requires_grad_()

    def loss() -> Tensor:
        powers, odds = free[:-2].exp(), free[-2]
        logits = torch.einsum("apc,p->ac", priors, powers) + odds.sigmoid() * others
        alone = (logits.log_softmax(-1) + single).logsumexp(-1).exp()
        copied = free[-1].sigmoid() * several
        likelihood = ((1 - copied) * alone + copied * same).log().sum()
        # Densities of logarithms and of log-odds: without them few answers have extreme powers.
        unlikely = (powers - powers.log()).sum() - logsigmoid(odds) - logsigmoid(-odds)
        return (unlikely - likelihood) / len(single)

    minimise(loss, [free], 60)
    return torch.cat([free[:-2].exp(), free[-2:-1].sigmoid()]).detach()


def refit_powers(powers: Tensor, log_priors: Tensor, evidence: Tensor, known: Tensor) -> Tensor:
    """Powers from known labels, with those from the answers as the mean of a Normal prior of their
    logarithms, of standard deviation one."""
    rows = (known >= 0) & (evidence.abs().sum(1) > 0)
    if not rows.any():
        return powers
    start = powers.clamp(min=0.01).log()  # known labels can raise powers that answers do not
    free = start.clone().requires_grad_()

    def loss() -> Tensor:
        logits = torch.einsum("npc,p->nc", log_priors[rows], free[:-1].exp())
        logits = logits + free[-1].exp() * evidence[rows]
        loss = cross_entropy(logits, known[rows], reduction="sum")
        return loss + (free - start).square().sum() / 2

    minimise(loss, [free], 60)
    return free.exp().detach()
