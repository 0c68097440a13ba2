# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.models.latent.dependence import Dependence, excess_agreement
from pyro_nmm.models.latent.field import HiddenField, allowed_labels
from pyro_nmm.models.latent.left_out import LeftOut, left_out_answers
from pyro_nmm.models.latent.walks import Walk

#: Parts of the nodes whose answers are left out, and answers that fit the two powers.
PARTS, MOST_ANSWERS = 10, 20_000
#: Powers of neighbours and answers where no node has two answers, so that none can be left out.
ALONE = 1.0, 0.2
#: Answers count for less than the fit says, for confusion matrices come from the same answers.
SHARE = 0.65
#: Means and standard deviations of Normal priors of log b and logit w: answers count in full unless
#: those that are left out disagree.
PRIOR = torch.tensor([[0.4, 3.0], [0.5, 1.2]], dtype=torch.double)
#: The smallest share of a label around a node.
LEAST = 1e-4


@dataclass(frozen=True)
class Consensus:
    r"""
    One label distribution per node from the answers of several annotators: what
    :meth:`Annotators.fit` returns.

    .. math::

        p(u_i = k) \propto \nu_{ik}^b \, p(a_i \mid u_i = k, P^{-i})^w

    Here :math:`\nu_i` is the label distribution around node :math:`i` (:class:`Walk`) and
    :math:`P^{-i}` are confusion matrices, both without the answers of the node itself and of a
    tenth of the nodes. The powers :math:`b` and :math:`w < 1` predict answers that are left out
    best; :math:`w` is then multiplied by :math:`.65 \min(1, b)`, because matrices come from the
    same answers, and because a small :math:`b` shows dependent errors. Power one for both would
    count every answer as independent evidence.

    >>> from torch_geometric.utils import grid
    >>> from pyro_nmm.models import Annotators
    >>> edge_index, places = grid(20, 20)
    >>> truth = np.where(places[:, 0] >= 10, "cat", "dog")
    >>> guesses = np.where(np.random.default_rng(0).random((400, 3)) < 0.3, "cat", truth[:, None])
    >>> consensus = Annotators(num_labels=2).fit(edge_index, guesses)
    >>> consensus.predict()[:2], consensus.labels
    (array(['dog', 'dog'], dtype='<U3'), ['cat', 'dog'])

    :ivar HiddenField field: the fitted model, with its joint samples and parameters.
    :ivar Tensor answers: ``(N, M)``, -1 for missing ones.
    :ivar Tensor probs: ``(N, C)``, the probability of every label of every node.
    :ivar Tensor around: ``(N, C)``, :math:`\nu`.
    :ivar float neighbor_power: :math:`b`.
    :ivar float answer_power: :math:`w`.
    :ivar Dependence dependence: excess agreement of annotators.
    :ivar list labels: names of labels, if answers are text.
    :ivar list annotators: names of annotators, if answers are a data frame.
    """

    field: HiddenField
    answers: Tensor
    probs: Tensor
    around: Tensor
    neighbor_power: float
    answer_power: float
    dependence: Dependence
    labels: list[str] | None = None
    annotators: list | None = None

    def predict(self) -> Any:
        """``(N,)``: every node's most probable label, an array of names if answers are text."""
        found = self.probs.argmax(-1)
        return found if self.labels is None else np.array(self.labels)[found.cpu().numpy()]

    def predict_proba(self) -> Tensor:
        """:attr:`probs`, under the name of scikit-learn."""
        return self.probs

    def entropy(self) -> Tensor:
        """``(N,)``: of every node's label, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    def summary(self) -> str:
        """What was fitted, how answers and neighbours count, and whether annotators agree more
        often than independent errors explain."""
        there = self.answers >= 0
        number, nodes = int(there.sum()), int(there.any(1).sum())
        lines = [
            f"{number:,} answers of {there.shape[1]:,} annotators about {nodes:,} of "
            f"{len(there):,} nodes, {self.probs.shape[1]} labels",
            f"powers: neighbours {self.neighbor_power:.2f}, answers {self.answer_power:.2f} "
            "(one each: independent errors)",
            str(self.dependence),
        ]
        if nodes == number:
            lines.append("no node has two answers: powers are defaults, confidence is a guess")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Consensus({self.summary()})".replace("\n", "; ")


@torch.no_grad()
def consensus_of(field: HiddenField, answers: Tensor, walk: Walk, **names: Any) -> Consensus:
    """
    Pool of neighbours and answers, of a fit to answers as its emission checked them.

    :param Walk walk: on the graph, or over the sources of the field.
    :param names: ``labels`` and ``annotators``.
    """
    part = torch.randperm(len(answers), device=answers.device) % PARTS
    known = allowed_labels(field.known, field.hood, field.probs.shape[1]).double()
    left_out = left_out_answers(field, answers, part)
    sure = (answers >= 0).any(1) | known.isinf().any(1)
    own = (left_out.evidence + known).softmax(-1).masked_fill(~sure[:, None], 0)
    around = walk.labels(own, part).clamp(min=LEAST)
    around = around / around.sum(-1, keepdim=True)
    dependence = excess_agreement(field, answers, around)
    powers = fit_powers(around.log(), left_out)
    if powers != ALONE:
        # Other answers predict one better than neighbours do (b < 1) if annotators err together.
        powers = powers[0], powers[1] * SHARE * min(1.0, powers[0])
    if field.known is not None:
        powers = refit_powers(powers, around.log(), left_out.evidence, field.known)
    logits = powers[0] * around.log() + powers[1] * left_out.evidence + known
    probs = logits.softmax(-1).to(field.probs)
    return Consensus(field, answers, probs, around.to(probs), *powers, dependence, **names)


def fit_powers(log_around: Tensor, answers: LeftOut) -> tuple[float, float]:
    r"""
    Powers :math:`b` of the neighbours and :math:`w` of the answers, from the likelihood of each
    answer given the neighbours of its node and the other answers there,

    .. math::

        \sum_{i, m} \log \Bigl( (1 - r) \sum_k P_{mk a_{im}} \,
        \frac{\nu_{ik}^b \, e^{w e_{ik}^{-m}}}{\sum_l \nu_{il}^b \, e^{w e_{il}^{-m}}}
        + r \, s_{im} \Bigr), \qquad 0 < w < 1 .

    A share :math:`r` of the answers repeats a random other answer at the node, of which
    :math:`s_{im}` are the same. It is fitted too, so that copies do not lower :math:`b`.
    """
    if answers.node.bincount().max() < 2:
        return ALONE
    at = torch.randperm(len(answers.node), device=log_around.device)[:MOST_ANSWERS]
    around, others, own = log_around[answers.node[at]], answers.others[at], answers.own[at]
    same, several = answers.same[at], (others != 0).any(-1)
    free = torch.tensor([0.0, -1.0, -3.0]).to(own).requires_grad_()

    def loss() -> Tensor:
        logits = free[0].exp() * around + free[1].sigmoid() * others
        alone = (logits.log_softmax(-1) + own).logsumexp(-1).exp()
        copied = free[2].sigmoid() * several
        found = ((1 - copied) * alone + copied * same).log().sum()
        far = (free[:2] - PRIOR[0].to(own)) / PRIOR[1].to(own)
        return (far.square().sum() / 2 - found) / len(own)

    _minimise(loss, free)
    return free[0].exp().item(), free[1].sigmoid().item()


def refit_powers(
    powers: tuple[float, float], log_around: Tensor, evidence: Tensor, known: Tensor
) -> tuple[float, float]:
    """Powers from known labels, with those from the answers as the mean of a Normal prior of their
    logarithms, of standard deviation one."""
    rows = (known >= 0) & (evidence.abs().sum(1) > 0)
    if not rows.any():
        return powers
    start = torch.tensor(powers).to(log_around).log()
    free = start.clone().requires_grad_()

    def loss() -> Tensor:
        logits = free[0].exp() * log_around[rows] + free[1].exp() * evidence[rows]
        found = torch.nn.functional.cross_entropy(logits, known[rows], reduction="sum")
        return found + (free - start).square().sum() / 2

    _minimise(loss, free)
    return free[0].exp().item(), free[1].exp().item()


def _minimise(loss: Callable[[], Tensor], free: Tensor) -> None:
    bfgs = torch.optim.LBFGS([free], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        bfgs.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        bfgs.step(closure)
