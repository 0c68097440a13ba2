# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A pool of answers, neighbours and a classifier, with powers that predict left-out answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_nmm.fitting import minimise
from pyro_nmm.models.annotators.answers import Answers
from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.hidden import HiddenField
from pyro_nmm.sparse import label_spreading, sparse_coo

# Chosen on development sets: small simulated crowds of other seeds than the page of results has,
# CiteSeer, digits with other classifiers, and labels from an NMM. "Half" and "twice" are the mean
# change of the NLL on 62 to 217 of these sets, and the change of the worst group of sets.
#: Strength of the neighbours in a Potts model (half: +.011, +.066; twice: +.016, +.089). Without a
#: walk the NLL is .05 higher, without a Potts model .08.
STRENGTH = 2.5
#: Power of Potts, of a classifier and of the answers, in Potts too, where no node has two answers,
#: so that none can be left out. With .15 the NLL of one answer a node is .10 higher, with .6 .19.
ALONE = 0.25
#: Answers count for less than the fit says, for confusion matrices come from the same answers
#: (half: +.034, +.134; at one: +.006, +.052, and .1 for people who err together).
SHARE = 0.8
#: Standard errors by which priors must predict answers to count in full (half: +.006, +.028; twice:
#: +.105, +.513). By one less they count for nothing: a graph without information has more than two
#: in one of forty cases.
INFORMED = 2.0


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
    #: Probability of a further step (.8: +.002, +.013; .95: +.004, +.015).
    damping: float = 0.9

    @classmethod
    def on_graph(cls, edge_index: Tensor, num_nodes: int) -> "Walk":
        """An edge counts in both directions, and loops do not."""
        from torch_geometric.utils import remove_self_loops, to_undirected

        edges = remove_self_loops(to_undirected(edge_index.long(), num_nodes=num_nodes))[0]
        weight = torch.ones(edges.shape[1], dtype=torch.double, device=edges.device)
        return cls(_shares(edges[0], edges[1], weight, (num_nodes, num_nodes)))

    @classmethod
    def on_field(cls, field: HiddenField) -> "Walk":
        """Over the sources of a field, with its fitted attention."""
        hood = field.hood
        weight = hood.log_softmax(field.prior(hood, field.edge_attr)[1]).double().exp()
        there = _shares(hood.target, hood.source, weight, (hood.num_nodes, hood.num_sources))
        back = _shares(hood.source, hood.target, weight, (hood.num_sources, hood.num_nodes))
        return cls(there, back, damping=0.5)

    def step(self, labels: Tensor) -> Tensor:
        """``(N, C)``: the mean of the neighbours."""
        return self.there @ (labels if self.back is None else self.back @ labels)

    def labels(self, observed: Tensor, part: Tensor) -> Tensor:
        """Distributions ``(N, C)`` around each node, equal shares if a walk meets no label. Those
        of a node's ``part`` are left out for it; ``observed`` is zero at nodes without any."""
        found = _left_out(
            observed, part, lambda seen: label_spreading(self.step, seen, self.damping, 50)
        )
        total = found.sum(-1, keepdim=True)
        return torch.where(total > 0, found / total, 1 / observed.shape[1])

    def potts(self, evidence: Tensor, part: Tensor) -> Tensor:
        r"""Softmax of the second term, ``(N, C)``, in the mean field of a Potts model,

        .. math::

            q_i \propto \exp \Bigl( e_i + \tfrac{2.5}{\sqrt{d_i}} \sum_{j \sim i} q_j \Bigr)

        Label spreading is linear and mild, but in the Potts model neighbours that agree convince
        each other. Over sources :math:`d_i` is the inverse sum of squared attention. The evidence
        of a node's ``part`` is left out for it. Steps are damped by one half.
        """
        squares, rows = self.there.values().square(), self.there.crow_indices().diff()
        total = torch.segment_reduce(squares, "sum", lengths=rows, initial=0)
        strength = STRENGTH * total.clamp(min=torch.finfo(total.dtype).tiny).rsqrt()[:, None]

        def around(seen: Tensor) -> Tensor:
            labels = seen.softmax(-1)
            for _ in range(30):
                labels = (labels + (seen + strength * self.step(labels)).softmax(-1)) / 2
            return (strength * self.step(labels)).softmax(-1)

        return _left_out(evidence, part, around)


def _shares(rows: Tensor, columns: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix whose rows sum to one, but for empty rows."""
    total = weight.new_zeros(shape[0]).index_add_(0, rows, weight)
    places = torch.stack([rows, columns])
    return sparse_coo(places, weight / total[rows], shape).to_sparse_csr()


def _left_out(observed: Tensor, part: Tensor, around: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of all nodes' tables ``(N, C)``, for each part without the part's rows."""
    labels = torch.empty_like(observed)
    for number in range(int(part.max()) + 1):
        here = part == number
        labels[here] = around(observed.masked_fill(here[:, None], 0))[here]
    return labels


class LeftOut(NamedTuple):
    """What is known about ``A`` answers without them."""

    evidence: Tensor  #: ``(N, C)`` of all answers at each node, in nats
    node: Tensor  #: ``(A,)`` the node that each answer is about
    others: Tensor  #: ``(A, C)`` evidence of the other answers at the node
    single: Tensor  #: ``(A, C)`` evidence of the answer itself
    same: Tensor  #: ``(A,)`` the share of the other answers that are the same


def left_out_answers(field: HiddenField, entries: Answers, probs: Tensor, part: Tensor) -> LeftOut:
    """Evidence in each part of the nodes, from the M-step without the part's answers, under label
    distributions ``(N, C)``. Cost: linear in the number of answers."""
    emission: Any = field.emission
    evidence, parts = probs.new_zeros(probs.shape, dtype=torch.double), []
    for number in range(int(part.max()) + 1):
        here = part == number
        values = emission.without(entries.at(~here), probs, field.values)
        confusion, inside = values["confusion"], entries.at(here)
        evidence[here] = emission.log_prob(values, inside)[here]
        node, single = inside.node, confusion.log()[inside.annotator, :, inside.answer]
        others = emission.of_labels(inside.evidence(confusion)[node] - single, values)
        beside = inside.number()[node] - 1
        same = inside.votes(confusion.shape[-1])[node, inside.answer].double() - 1
        others = others.masked_fill((beside == 0)[:, None], 0)
        parts.append((node, others, emission.of_labels(single, values), same / beside.clamp(min=1)))
    return LeftOut(evidence, *(torch.cat(column) for column in zip(*parts, strict=True)))


def pool_of(
    field: HiddenField, table: Tensor, walk: Walk, classifier: Tensor | None = None
) -> Consensus:
    """Pool the answers ``(N, M)`` with the neighbours, and with predictions of a classifier."""
    emission: Any = field.emission
    entries = Answers.of(table)
    # Ten parts of the nodes whose answers are left out (5: +.009, +.039; 20: -.002, +.008).
    part = torch.randperm(len(table), device=table.device) % 10
    silent = (table < 0).all(1, keepdim=True)
    several = bool(entries.number().max() > 1)
    simple = emission.alone(entries, field.values).double()

    def around(probs: Tensor) -> tuple[LeftOut, Tensor]:
        answers = left_out_answers(field, entries, probs.to(field.probs), part)
        return answers, walk.labels(answers.evidence.softmax(-1).masked_fill(silent, 0), part)

    def pooled(answers: LeftOut, ends: Tensor, **more: Tensor) -> Consensus:
        """Pool the shares of the labels and other priors, each with its gate."""
        potts = walk.potts((1.0 if several else ALONE) * answers.evidence, part)
        gates = [weight, weight, *(gate(prior, answers) for prior in more.values())]
        priors = {"shares": simple.mean(0).expand_as(simple), "walk": ends, "potts": potts} | more
        # Away from zero: a hundredth of this share changes nothing.
        least = {name: prior.double().clamp(min=1e-4) for name, prior in priors.items()}
        priors = {name: prior / prior.sum(-1, keepdim=True) for name, prior in least.items()}
        logs = torch.stack([prior.log() for prior in priors.values()], 1)
        if several:
            powers = fit_powers(logs[:, 1:], answers)
            # Other answers predict one better than priors do if annotators err together.
            powers[-1] *= SHARE * powers[:-1].sum().clamp(max=1)
        else:  # none can be left out: of the walk, others, and the answers
            powers = logs.new_tensor([1.0, *[ALONE] * len(gates)])
        top = max(gates)
        gated, own = powers[:-1] * powers.new_tensor(gates), top * powers[-1:] + 1 - top
        powers = torch.cat([own.new_tensor([1 - top]), gated, own])
        logits = torch.einsum("npc,p->nc", logs, powers[:-1]) + powers[-1] * answers.evidence
        priors = {name: prior.to(field.probs) for name, prior in priors.items()}
        named = dict(zip([*priors, "answers"], powers.tolist(), strict=True))
        return Consensus(field, table, logits.softmax(-1).to(field.probs), priors, named)

    # Matrices come from the field if the graph predicts answers, else from the answers alone.
    answers, ends = around(simple)
    weight = gate(ends, answers)
    if weight > 0:
        answers, ends = around(weight * field.probs + (1 - weight) * simple)
    if weight > 0 and not several:
        # Each of the three believes an annotator whom no other one contradicts: take their mean.
        mean = (field.probs + simple + pooled(answers, ends).probs) / 3
        answers, ends = around(weight * mean + (1 - weight) * simple)
    return pooled(answers, ends, **({} if classifier is None else {"classifier": classifier}))


def gate(prior: Tensor, answers: LeftOut) -> float:
    """Weight of a prior, from zero to one: by how many standard errors over nodes it gives more to
    the labels that answers mean than to those of other nodes' answers. A graph or a classifier that
    predicts no answers must not overrule any, nor does it show whether annotators err together."""
    there = answers.node.bincount(minlength=len(prior)) > 0
    more = (prior - prior[there].mean(0))[answers.node]
    gain = (answers.single.softmax(-1) * more).sum(-1)
    gain = gain.new_zeros(len(there)).index_add(0, answers.node, gain)[there]
    errors = gain.mean() / (gain.std(correction=0) / len(gain) ** 0.5 + 1e-12)
    return (errors - INFORMED + 1).clamp(0, 1).item()


def fit_powers(log_priors: Tensor, answers: LeftOut) -> Tensor:
    r"""Powers :math:`b_q` of the priors, ``(N, P, C)`` logarithms, and :math:`w` of the answers,
    from the likelihood of each answer given the priors of its node and the other answers there,

    .. math::

        \sum_{i, m} \log \Bigl( (1 - r) \sum_k P_{mk a_{im}} \, \mathrm{softmax}_k \bigl(
        \textstyle\sum_q b_q \log \nu_{qi} + w e_i^{-m} \bigr) + r \, s_{im} \Bigr),
        \qquad b_q \sim \mathrm{Exponential}(1), \quad w \sim \mathrm{Uniform}(0, 1) .

    A share :math:`r` of the answers repeats a random other answer at the node, of which
    :math:`s_{im}` are the same. It is fitted too, so that copies do not lower :math:`b`.

    :return: ``(P + 1,)``. Cost: :math:`O(A P C)` for ``A`` answers, at most 60 steps of BFGS.
    """
    priors, several = log_priors[answers.node], (answers.others != 0).any(-1)
    free = priors.new_tensor([0.0] * (priors.shape[1] + 1) + [-3.0]).requires_grad_()

    def loss() -> Tensor:
        powers, odds = free[:-2].exp(), free[-2]
        logits = torch.einsum("apc,p->ac", priors, powers) + odds.sigmoid() * answers.others
        alone = (logits.log_softmax(-1) + answers.single).logsumexp(-1).exp()
        copied = free[-1].sigmoid() * several
        likelihood = ((1 - copied) * alone + copied * answers.same).log().sum()
        # Densities of logarithms and of log-odds: without them few answers have extreme powers.
        unlikely = (powers - powers.log()).sum() - logsigmoid(odds) - logsigmoid(-odds)
        return (unlikely - likelihood) / len(priors)

    minimise(loss, [free], 60)
    return torch.cat([free[:-2].exp(), free[-2:-1].sigmoid()]).detach()
