# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""One label distribution per node, from annotators, neighbours and a classifier."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_nmm.models.annotators.answers import Answers
from pyro_nmm.models.hidden import HiddenField


@dataclass(frozen=True)
class Consensus:
    r"""One label distribution per node from the answers of several annotators, by
    :meth:`Annotators.fit`.

    .. math::

        p(u_i = k) \propto \prod_q \nu_{qik}^{b_q} \, p(a_i \mid u_i = k, P^{-i})^w

    The priors :math:`\nu_q` of a node's label are the shares of the labels, the end of a random
    walk, the field of the neighbours in a Potts model, and your ``pred_probs``. They and the
    confusion matrices :math:`P^{-i}` leave the node's own answers out. The powers :math:`b_q` and
    :math:`w < 1` maximise the likelihood of left-out answers. :math:`w` is then multiplied by
    :math:`.8 \min(1, \sum_q b_q)`, because a small :math:`b` shows dependent errors.

    The graph counts only if it predicts answers. Let :math:`t` be the number of standard errors by
    which the walk gives more to the labels that a node's answers mean than to those of other
    nodes. The graph's powers are multiplied by :math:`g = t - 1`, between zero and one, and those
    of ``pred_probs`` by their own. With the larger :math:`g` the shares have the power
    :math:`1 - g`, and the answers :math:`g w + 1 - g`. If no node has two answers the powers are
    fixed.

    >>> from torch_geometric.utils import grid
    >>> from pyro_nmm.models import Annotators
    >>> edge_index, places = grid(20, 20)
    >>> truth = (places[:, 0] < 10).long()
    >>> answers = truth[:, None] & (torch.rand(400, 3) < 0.7).long()  # 0 by mistake
    >>> consensus = Annotators(num_labels=2).fit(edge_index, answers)
    >>> consensus.predict()[:2]
    tensor([1, 1])

    :ivar HiddenField field: the fitted model, with its joint samples and parameters.
    :ivar Tensor answers: ``(N, M)``, -1 for missing ones, and ``C`` for the silence of annotators
        who give one label only.
    :ivar Tensor probs: ``(N, C)``, the probability of every label of every node.
    :ivar dict priors: ``(N, C)`` label distributions :math:`\nu_q`: "shares", "walk", "potts",
        and "classifier" given ``pred_probs``.
    :ivar dict powers: :math:`b_q` under the same names, and :math:`w`, "answers".
    """

    field: HiddenField
    answers: Tensor
    probs: Tensor
    priors: dict[str, Tensor]
    powers: dict[str, float]

    def predict(self) -> Tensor:
        """``(N,)``: every node's most probable label."""
        return self.probs.argmax(-1)

    def entropy(self) -> Tensor:
        """``(N,)``: entropy of every node's label, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def log_prior(self) -> Tensor:
        r"""``(N, C)``: :math:`\sum_q b_q \log \nu_q`, of each node without its own answers."""
        logs = [self.powers[name] * prior.double().log() for name, prior in self.priors.items()]
        return torch.stack(logs).sum(0)

    def information_gain(self) -> Tensor:
        """``(N, M)``: expected information about each node's label in one more answer, in nats. The
        largest entry is the best next question. Zero where the annotator has answered."""
        emission: Any = self.field.emission
        probs, size = self.probs.double(), int(self.answers.max()) + 1
        plain = replace(emission, num_answers=size, num_types=None, aligned=emission.named)
        confusion = plain.maximise(Answers.of(self.answers), probs, {})["confusion"]
        answers = torch.einsum("nk,mka->nma", probs, confusion)
        expected = torch.einsum("nk,mka->nm", probs, torch.special.entr(confusion))
        gain = torch.special.entr(answers).sum(-1) - expected
        return gain.clamp(min=0).masked_fill(self.answers >= 0, 0).to(self.probs)

    def summary(self) -> str:
        """Sizes of the data, powers of answers and neighbours, and warnings."""
        there = self.answers >= 0
        number, nodes = int(there.sum()), int(there.any(1).sum())
        powers = ", ".join(f"{name} {power:.2f}" for name, power in self.powers.items())
        lines = [
            f"{number:,} answers of {there.shape[1]:,} annotators about {nodes:,} of "
            f"{len(there):,} nodes, {self.probs.shape[1]} labels",
            f"powers: {powers}",
        ]
        if self.powers["shares"] > 0:
            bad = "neighbours predict answers badly, a graph that does not fit"
            used = f"{1 - self.powers['shares']:.0%} of the pool, the rest from the answers alone"
            lines.append(f"warning: {bad}: {used}")
        if nodes == number:
            lines.append(
                "warning: no node has two answers: powers are defaults, confidence is a guess"
            )
        sure = self.probs[there.any(1)].double().amax(1)
        error = 2 * (sure * (1 - sure)).sum().sqrt().item() / nodes  # two standard errors
        if error > 0.08:
            beside = f"the accuracy may differ from the confidence {sure.mean():.2f}"
            lines.append(f"warning: {nodes} answered nodes are few: {beside} by {error:.2f}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Consensus({self.summary()})".replace("\n", "; ")
