# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Does a consensus contradict answers that agree, without support by the neighbours' answers?"""

import torch
from torch import Tensor

from pyro_nmm.models.annotators.entries import Entries
from pyro_nmm.models.annotators.walks import Walk

#: Contradictions without support that are too many, as a share of the nodes whose answers agree,
#: and beside it. Half of both warns of good fits to small graphs. Twice of both is silent about a
#: consensus that is .05 less accurate than the vote.
SHARE, FEW = 0.05, 2
#: Equal answers that show an annotator of one label. Five occur by chance, and twenty miss
#: annotators who answer rarely.
MANY = 10


def contradiction(
    answers: Tensor, probs: Tensor, walk: Walk, part: Tensor, informed: bool,
    classifier: Tensor | None = None, known: Tensor | None = None,
) -> str | None:  # fmt: skip
    """
    A warning if the consensus contradicts too many nodes whose answers all agree.

    The neighbours' answers support a contradiction if a walk from the node, over the votes of other
    nodes, meets the label of the consensus more often than the label of the answers. A classifier
    supports the label that it prefers. Both support nothing if the priors predict no answers.

    :param Tensor answers: ``(N, M)``, which name labels, -1 for missing ones.
    :param Tensor probs: ``(N, C)``, the consensus.
    :param Tensor part: ``(N,)`` integers from zero; a part's own votes are left out for it.
    :param bool informed: whether the priors of the consensus predict answers.
    :param Tensor classifier: ``(N, C)`` predictions that did not learn from the node itself.
    :param Tensor known: ``(N,)`` true labels, which are not compared, -1 where unknown.
    :return: the warning, or None. Cost: a walk where there are many contradictions.
    """
    entries, size = Entries.of(answers), max(probs.shape[1], int(answers.max()) + 1)
    votes, number = entries.votes(size)[:, : probs.shape[1]].double(), entries.number()
    most, label = votes.max(1)
    found = probs.argmax(1)
    # Two answers that agree say more than one; if no node has two, one is all there is.
    agree = (most == number) & (number >= number.max().clamp(max=2))
    if known is not None:
        agree &= known < 0
    wrong = agree & (found != label)
    limit = FEW + SHARE * int(agree.sum())
    if wrong.sum() > limit and informed:
        around = walk.labels(votes / number.clamp(min=1)[:, None], part)
        for labels in (around, classifier):
            if labels is not None:
                low = labels.gather(1, found[:, None]) <= labels.gather(1, label[:, None])
                wrong &= low[:, 0]
    if wrong.sum() <= limit:
        return None
    what = f"{int(wrong.sum())} of {int(agree.sum())} nodes whose answers all agree"
    doubt = f"consensus contradicts {what}, and nothing else supports it: it is probably less"
    doubt = f"{doubt} accurate than the majority vote."
    given = torch.stack([(answers == k).sum(0) for k in range(size)])
    single = int(((given.amax(0) == given.sum(0)) & (given.sum(0) >= MANY)).sum())
    if 2 * single > answers.shape[1]:
        cure = f"number missing answers {size} and set num_answers={size + 1}"
        return f"{doubt} {single} of {answers.shape[1]} annotators give one label only: {cure}"
    cure = "Compare consensus.field, or pass a graph on which neighbours have equal labels"
    return f"{doubt} {cure}"
