# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Does a consensus contradict answers that agree, without support by the neighbours' answers?"""

import torch
from torch import Tensor

from pyro_nmm.models.latent.walks import Walk

#: Contradictions without support that are too many, as a share of the nodes whose answers agree,
#: and beside it. Half of both warns of good fits to small graphs, twice of both not of a consensus
#: that is .05 less accurate than the vote.
SHARE, FEW = 0.05, 2
#: Answers of one label that are no chance: five are, one time in sixteen; twenty miss rare voters.
MANY = 10
#: Standard errors by which priors must predict answers better than chance to support anything.
INFORMED = 2.0


def contradiction(
    answers: Tensor, probs: Tensor, walk: Walk, part: Tensor, errors: float
) -> str | None:
    """
    A warning if the consensus contradicts too many nodes whose answers all agree.

    The neighbours' answers support a contradiction if a walk from the node, over the votes of other
    nodes, meets the label of the consensus more often than the label of the answers.

    :param Tensor probs: ``(N, C)``, the consensus.
    :param Tensor part: ``(N,)`` integers from zero; a part's own votes are left out for it.
    :param float errors: by how many standard errors the priors predict answers.
    """
    votes = torch.stack([(answers == k).sum(1) for k in range(probs.shape[1])], 1).double()
    number = (answers >= 0).sum(1)
    most, label = votes.max(1)
    # Answers alone at their nodes are all that there is if no node has two.
    agree = (most == number) & (number >= number.max().clamp(max=2))
    wrong = agree & (probs.argmax(1) != label)
    limit = FEW + SHARE * int(agree.sum())
    if wrong.sum() > limit and errors >= INFORMED:
        around = walk.labels(votes / number.clamp(min=1)[:, None], part)
        least = around.gather(1, label[:, None])
        wrong &= (around.gather(1, probs.argmax(1)[:, None]) <= least)[:, 0]
    if wrong.sum() <= limit:
        return None
    found = f"consensus contradicts {int(wrong.sum())} of {int(agree.sum())} nodes whose answers"
    found = f"{found} all agree, and neighbours do not support it: the vote is probably better"
    given = torch.stack([(answers == k).sum(0) for k in range(probs.shape[1])])
    single = int(((given.amax(0) >= MANY) & (given.amax(0) == given.sum(0))).sum())
    if 2 * single > len(given[0]):
        one = f"{single} of {len(given[0])} annotators give one label only"
        return f"{found}. {one}: number silence as an answer, see num_answers"
    return f"{found}. Compare consensus.field, or pass a graph on which neighbours have equal labels"
