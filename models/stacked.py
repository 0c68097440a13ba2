# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.concentrations import in_single
from pyro_nmm.edges import check_mask
from pyro_nmm.models.communities import check_hood, means, sources_of
from pyro_nmm.models.compatibility import between_nodes
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.validation import check_integers, check_label_range, check_labels, check_positive

#: Weak normal priors on four of the five numbers: mean and standard deviation. Some hundred
#: held-out nodes say little about kappa and gamma; without the priors, fits wander off and lose up
#: to .02 nats of pair log-likelihood to temperature scaling (CiteSeer). The means did best on five
#: random splits of Cora and of CiteSeer, none of which is among the reported ones; PubMed had no
#: part in it. The prior of log_scale is around temperature scaling's.
PRIOR = {
    "log_kappa": (1.0, 1.0),
    "log_floor": (-5.0, 1.0),
    "gamma": (2.0, 1.0),
    "similarity": (1.0, 1.0),
}
#: The same for the log odds that edges relabel; not chosen on any data.
RELABEL_PRIOR = {"odds": (-1.0, 1.5)}
#: The same for the two numbers of communities, chosen on the same random splits.
COMMUNITY_PRIOR = {"log_kappa_community": (-1.0, 1.0), "community": (-1.0, 1.0)}


class StackedNMM(nn.Module):
    r"""
    An NMM on top of any classifier that is already trained: five numbers, fitted in seconds
    on held-out nodes, turn its scores into a joint distribution of all labels.

    .. math::

        P_j = \mathrm{softmax}(s \cdot \text{scores}_j), \qquad
        \alpha_j = \kappa P_j + \epsilon, \qquad
        \text{logits}_{ij} = \gamma \, \delta(i = j)
                             + \beta \frac{P_i^\top P_j}{\|P_i\| \|P_j\|}

    with the inverse temperature :math:`s`, the concentration :math:`\kappa` (the smaller, the
    more correlated), the floor :math:`\epsilon`, the self-attention :math:`\gamma` and the
    attention :math:`\beta` to neighbours with similar predictions. As
    :math:`\kappa, \gamma \to \infty` it is temperature scaling. :meth:`fit` maximises

    .. math::

        E_{q(c \mid y)} \sum_{i \text{ held out}} \log p(y_i \mid y_{<i}, c_{<i})
            + \log \text{prior}
        \approx \log p(y_{\text{held out}} \mid y_{\text{train}}) + \log \text{prior}

    in orders with the training nodes first: *joint*, so that correlation counts, and
    *conditional*, because a classifier is overconfident where it was trained. (It would be a
    bound if :math:`q(c_{\text{train}} \mid y_{\text{train}})` were exact.) The result is a
    :class:`~pyro_nmm.NeighborMixture` with all that it can do.

    >>> from pyro_nmm import Neighborhood
    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, train = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, False])
    >>> held_out = torch.tensor([False, True, True, False])
    >>> stacked = StackedNMM().fit(hood, scores, y, train, held_out, num_steps=20)
    >>> posterior = stacked.mixture(hood, scores).condition(y, train)
    >>> posterior.marginals().argmax(-1)
    tensor([0, 0, 1, 1])

    Like :class:`~pyro_nmm.models.NMMNetwork`, it maps ``(hood, scores)`` to
    ``(alpha, logits)``, so :class:`~pyro_nmm.guides.AmortizedNMM` takes it too.

    **Communities.** With ``communities=True`` the communities of a graph are sources as well:
    label distributions that all their members may take theirs from, so that a known label tells
    of nodes at any distance. There are two numbers more: for a community :math:`g` of node `i`,

    .. math::

        P_g &= \frac{1}{|g|} \sum_{j \in g} P_j, \qquad
        \alpha_g = \kappa_\text{community} P_g + \epsilon, \\
        \text{logits}_{ig} &= \delta + \beta \frac{P_i^\top P_g}{\|P_i\| \|P_g\|}
            + \log \sum_{j \le N} e^{\text{logits}_{ij}}, \qquad j \text{ in } n(i),

    so that the first two terms are the log odds of the community against all nodes of
    :math:`n(i)` together, however many. As :math:`\delta \to -\infty` it is the NMM without
    communities.

    >>> from pyro_nmm.sources import communities
    >>> edge_index = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    >>> hood = communities(edge_index, 4, membership=torch.tensor([0, 0, 1, 1]))
    >>> stacked = StackedNMM(communities=True).fit(hood, scores, y, train, held_out, num_steps=20)
    >>> stacked.mixture(hood, scores).alpha.shape  # four nodes and two communities
    torch.Size([6, 2])

    **Neighbours that differ.** With a matrix :math:`H` of
    :func:`~pyro_nmm.models.compatibility`, a label that is borrowed from another node passes
    through :math:`(1 - \rho) I + \rho H`, with one number more, the log odds of :math:`\rho`. As
    they fall, edges keep labels.

    :param bool communities: Whether neighbourhoods have communities for sources: those of
        :func:`pyro_nmm.sources.communities`, of one partition or of several.
    :param Tensor compatibility: ``(C, C)``, :math:`H`, whose rows sum to one.
    """

    log_scale: Tensor  #: :math:`\log s`
    log_kappa: Tensor  #: :math:`\log \kappa`
    log_floor: Tensor  #: :math:`\log \epsilon`
    gamma: Tensor  #: :math:`\gamma`
    similarity: Tensor  #: :math:`\beta`
    log_kappa_community: Tensor  #: :math:`\log \kappa_\text{community}`, if there are any
    community: Tensor  #: :math:`\delta`, if there are any
    odds: Tensor  #: :math:`\log \rho / (1 - \rho)`, if there is a matrix
    compatibility: Tensor | None

    def __init__(self, communities: bool = False, compatibility: Tensor | None = None) -> None:
        super().__init__()
        if communities and compatibility is not None:
            raise ValueError("compatibility is one of neighbouring nodes: use communities=False")
        self.communities = communities
        self.register_buffer("compatibility", compatibility)
        self._prior = PRIOR | (COMMUNITY_PRIOR if communities else {})
        self._prior |= {} if compatibility is None else RELABEL_PRIOR
        for name, (mean, _) in ({"log_scale": (0.0, 1.0)} | self._prior).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(mean)))

    def forward(self, hood: Neighborhood, scores: Tensor) -> tuple[Tensor, ...]:
        """
        :param Tensor scores: ``(N, C)`` the classifier's logits.
        :return: ``alpha`` of shape ``(N, C)``, with communities ``(M, C)``, and ``logits`` of
            shape ``(num_edges,)``, of the scores' type, at least single precision; with a
            compatibility matrix ``relabel``, ``(num_edges, C, C)``, too.
        """
        check_hood(hood, self.communities)
        _check_scores(hood, scores)
        scores = in_single(scores)
        probs = (self.log_scale.exp() * scores).softmax(-1)
        alpha = self.log_kappa.exp() * probs + self.log_floor.exp()
        if not self.communities:
            found = alpha, attention_scores(hood, probs, self.similarity, self.gamma)
            if self.compatibility is None:
                return found
            keep, change = torch.eye(probs.shape[1]).to(probs), self.compatibility.to(probs)
            return *found, between_nodes(hood, keep + self.odds.sigmoid() * (change - keep))
        shared = means(hood, probs)
        of_shared = self.log_kappa_community.exp() * shared + self.log_floor.exp()
        logits = attention_scores(hood, torch.cat([probs, shared]), self.similarity, self.gamma)
        inside = hood.source >= hood.num_nodes
        nodes = hood.logsumexp(logits.masked_fill(inside, -torch.inf))
        against = self.community + nodes.index_select(0, hood.row)
        return torch.cat([alpha, of_shared]), logits + inside * against

    def fit(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        train: Tensor,
        held_out: Tensor,
        *,
        num_steps: int = 150,
        num_samples: int = 8,
        lr: float = 0.1,
    ) -> StackedNMM:
        r"""
        Adam on an unbiased estimate of the gradient, with a rate that falls to zero, from
        temperature scaling and the priors' means. The scale of the scores does not matter.

        :param Neighborhood hood: The neighbourhoods.
        :param Tensor scores: ``(N, C)`` the trained classifier's logits, in evaluation mode.
        :param Tensor y: ``(N,)`` labels, read in the two masks only.
        :param Tensor train: ``(N,)`` boolean mask of the nodes that the classifier learned
            from; they are conditioned on.
        :param Tensor held_out: ``(N,)`` boolean mask of nodes that it did not learn from, for
            example the validation nodes.
        :param int num_samples: draws of :math:`q(c \mid y)` a step, at least 2.
        :param float lr: Adam's, positive.
        :return: the module itself.
        :raises ValueError: for wrong shapes, for masks that overlap or select nothing, for a
            ``hood`` without communities or with some where there should be none, and for an
            ``lr`` at which the fit diverges; the module is then as it was before.

        Cost: :math:`O(T E_\tau + E_\tau C)` a step, :math:`E_\tau` the edges into the two masks;
        and :math:`O(N C)` once. With ``R`` partitions into communities, :math:`O(R N C)` a step
        more, because every member counts for the mean.
        """
        check_integers(1, num_steps=num_steps)
        check_integers(2, num_samples=num_samples)
        check_positive(lr=lr)
        check_hood(hood, self.communities)
        _check(hood, scores, y, train, held_out)
        scores = in_single(scores.detach())
        fitted = copy.deepcopy(self).to(scores)
        prior = fitted._start(scores, y, held_out)
        # No label that is read depends on other nodes than those the observed may choose.
        hood, nodes = sources_of(hood, train | held_out)
        scores, y, train, held_out = (t[nodes] for t in (scores, y, train, held_out))
        first, last = (mask.nonzero()[:, 0] for mask in (train, held_out))
        optimizer = torch.optim.Adam(fitted.parameters(), lr=lr, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, 2 - 2 * step / num_steps)
        )
        for _ in range(num_steps):
            optimizer.zero_grad()
            mixture = NeighborMixture(hood, *fitted(hood, scores), validate_args=False)
            order = torch.cat([nodes[torch.randperm(len(nodes), device=nodes.device)]
                               for nodes in (first, last)])  # fmt: skip
            q = mixture.in_order(y, train | held_out, order)
            loss = -fitted._log_prior(prior) - _surrogate(q, len(first), num_samples)
            (loss / len(last)).backward()
            optimizer.step()
            schedule.step()
            if not fitted._finite():
                raise ValueError(f"{lr=} is too large: the numbers are no longer finite")
        self.to(scores).load_state_dict(fitted.state_dict())
        return self

    @torch.no_grad()
    def _finite(self) -> bool:
        """Whether alpha and logits are, and alpha positive."""
        numbers = dict(self.named_parameters())
        positive = torch.stack([p for name, p in numbers.items() if "log" in name]).exp()
        others = torch.stack(list(numbers.values()))
        return bool((positive > 0).all() and torch.cat([positive, others]).isfinite().all())

    @torch.no_grad()
    def _start(self, scores: Tensor, y: Tensor, held_out: Tensor) -> dict:
        """Sets all numbers to their prior's mean and returns the priors."""
        # Few held-out nodes may all be predicted rightly, and would have a temperature of zero.
        unit = scores.std().clamp(min=1e-30)
        with torch.enable_grad():
            temperature = temperature_scaling(scores / unit, y, held_out)
        temperature = unit.item() * min(max(temperature, 0.05), 20.0)
        prior = {"log_scale": (-math.log(temperature), 1.0)} | self._prior
        for name, (mean, _) in prior.items():
            getattr(self, name).fill_(mean)
        return prior

    def _log_prior(self, prior: dict) -> Tensor:
        terms = [((getattr(self, n) - mean) / sd).square() for n, (mean, sd) in prior.items()]
        return -0.5 * torch.stack(terms).sum()

    @torch.no_grad()
    def mixture(self, hood: Neighborhood, scores: Tensor) -> NeighborMixture:
        """The fitted distribution over the labels of all nodes."""
        return NeighborMixture(hood, *self(hood, scores))

    def extra_repr(self) -> str:
        found = {name: number.item() for name, number in self.named_parameters()}
        scale = {"temperature": math.exp(-found.pop("log_scale"))}
        logs = {name[4:]: math.exp(found.pop(name)) for name in list(found) if "log_" in name}
        return ", ".join(f"{name}={number:.4g}" for name, number in (scale | logs | found).items())


def temperature_scaling(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    r"""
    The temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    :param Tensor scores: ``(N, C)`` logits.
    :param Tensor y: ``(N,)`` labels.
    :param Tensor held_out: ``(N,)`` boolean mask.
    """
    if not held_out.any():
        raise ValueError("held_out selects no node: at least one entry must be True")
    scores = scores.detach()
    log_scale = torch.zeros((), dtype=scores.dtype, device=scores.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(scores[held_out] * log_scale.exp(), y[held_out])
        loss.backward()
        return loss

    optimizer.step(closure)
    return (-log_scale).exp().item()


def _surrogate(q: Any, num_given: int, num_samples: int) -> Tensor:
    """
    A number with the gradient of :math:`E_q \\sum_i f_i` over the nodes after the first
    ``num_given``: its own derivative, and the score of the choices, charged against the other
    draws.
    """
    choices = q.sample(Size([num_samples]))
    bound = q.log_terms(choices)[:, num_given:].sum(-1)
    others = (bound.sum() - bound) / (num_samples - 1)
    return (bound + q.log_prob(choices) * (bound - others).detach()).mean()


def _check_scores(hood: Neighborhood, scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.is_meta:
        got = "one on the meta device" if isinstance(scores, Tensor) else type(scores)
        raise ValueError(f"scores must be a tensor with values, got {got}; see torch.from_numpy")
    if scores.dim() != 2 or len(scores) != hood.num_nodes or scores.shape[1] < 2:
        raise ValueError(
            f"scores must have shape ({hood.num_nodes}, C), one row of logits per node and "
            f"C >= 2 labels, got {tuple(scores.shape)}"
        )


def _check(hood, scores, y, train, held_out) -> None:
    _check_scores(hood, scores)
    if not scores.is_floating_point() or not scores.isfinite().all():
        bad = (~scores.isfinite()).sum().item() if scores.is_floating_point() else scores.dtype
        raise ValueError(
            f"scores must be finite floating-point logits, got {bad}"
            + (" entries that are not" if scores.is_floating_point() else "")
        )
    check_labels(hood, y, hood.num_nodes)
    for name, mask in (("train", train), ("held_out", held_out)):
        check_mask(mask, hood.num_nodes, hood.device, name)
    if (train & held_out).any():
        node = (train & held_out).nonzero()[0].item()
        raise ValueError(
            f"train and held_out must be disjoint, but both hold node {node}: a classifier is "
            f"overconfident where it was trained"
        )
    rows = hood.restrict(train | held_out)
    check_label_range(rows, y[rows.nodes], scores.shape[-1])
