# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.models.stacked import pooled
from pyro_nmm.models.stacked.communities import check_hood
from pyro_nmm.models.stacked.fit import (
    COMMUNITY_PRIOR,
    PRIOR,
    RELABEL_PRIOR,
    SCORES_PRIOR,
    fit_numbers,
    num_classes_of,
)
from pyro_nmm.models.stacked.inputs import (
    check_known,
    labels_of,
    mask_of,
    scores_of,
    weights_of,
)
from pyro_nmm.models.stacked.known_labels import set_apart
from pyro_nmm.models.stacked.parameters import parameters_of
from pyro_nmm.validation import check_integers


class StackedNMM(nn.Module):
    r"""
    An NMM on top of any classifier that is already trained: a few numbers, fitted in seconds on
    held-out nodes, turn its scores and the labels that are known into a joint distribution of the
    other labels.

    .. math::

        \alpha_j = \kappa \left( P_j + \frac{\epsilon}{C} \right), \qquad
        \text{logits}_{ij} = \gamma \, \delta(i = j)
                             + \beta \frac{P_i^\top P_j}{\|P_i\| \|P_j\|}

    where :math:`P_j` pools what the classifier says of node `j`, what it says of its neighbours,
    and the known labels around (:class:`~pyro_nmm.models.PooledScores`, ``4 + C`` numbers);
    :math:`\kappa` is the concentration (the smaller, the more correlated), :math:`\epsilon` the
    floor, :math:`\gamma` the attention to oneself and :math:`\beta` that to neighbours with
    similar predictions. As :math:`\kappa, \gamma \to \infty` and :math:`\epsilon \to 0` it is
    the pool, and in its limits temperature scaling, with a bias or without. :meth:`fit` maximises

    .. math::

        E_{q(c \mid y)} \sum_{i \text{ held out}} \log p(y_i \mid y_{<i}, c_{<i})
            + \log \text{prior}
        \le \log p(y_{\text{held out}} \mid y_{\text{train}}) + \log \text{prior}

    in random orders: *joint*, so that correlation counts, and on nodes from which the classifier
    did not learn, because it is overconfident on the others.

    >>> from pyro_nmm import Neighborhood
    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, train = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, False])
    >>> held_out = torch.tensor([False, True, True, False])
    >>> stacked = StackedNMM(num_classes=2).fit(hood, scores, y, train, held_out, num_steps=20)
    >>> posterior = stacked.posterior(hood, scores, y, train)
    >>> posterior.marginals().argmax(-1)
    tensor([0, 0, 1, 1])

    **New labels.** A posterior takes them at once, ``posterior.condition(y, new)``. More is made of
    them by :meth:`update`, which fits the numbers to them as well, in about a second, and by a
    posterior given all of them, whose :math:`P` they are part of:

    >>> more = train | held_out
    >>> later = stacked.update(hood, scores, y, train, held_out, num_steps=20)
    >>> later.posterior(hood, scores, y, more).marginals().argmax(-1)
    tensor([0, 0, 1, 1])

    Like :class:`~pyro_nmm.models.NMMNetwork`, it maps ``(hood, scores, y, known)`` to
    ``(alpha, logits)``, so :class:`~pyro_nmm.guides.AmortizedNMM` takes it too. As ``alpha`` knows
    the known labels, the mixture is one of the *other* labels, given these: to condition on the
    known ones as well would count them twice, and :meth:`mixture` sets them apart.

    **Communities.** With ``communities=True`` the communities of a graph are sources as well:
    label distributions that all their members may take theirs from, so that a known label tells
    of nodes at any distance. There are two numbers more: for a community :math:`g` of node `i`,

    .. math::

        P_g &= \frac{1}{|g|} \sum_{j \in g} P_j, \qquad
        \alpha_g = \kappa_\text{community} \left( P_g + \frac{\epsilon}{C} \right), \
        \text{logits}_{ig} &= \delta + \beta \frac{P_i^\top P_g}{\|P_i\| \|P_g\|}
            + \log \sum_{j \le N} e^{\text{logits}_{ij}}, \qquad j \text{ in } n(i),

    so that the first two terms are the log odds of the community against all nodes of
    :math:`n(i)` together, however many. As :math:`\delta \to -\infty` it is the NMM without
    communities.

    >>> from pyro_nmm.sources import communities
    >>> edge_index = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    >>> hood = communities(edge_index, 4, membership=torch.tensor([0, 0, 1, 1]))
    >>> stacked = StackedNMM(2, communities=True)
    >>> stacked = stacked.fit(hood, scores, y, train, held_out, num_steps=20)
    >>> stacked(hood, scores, y, train)[0].shape  # alpha of four nodes and two communities
    torch.Size([6, 2])

    **Neighbours that differ.** With a matrix :math:`H` of
    :func:`~pyro_nmm.models.compatibility`, a label that is borrowed from another node passes
    through :math:`(1 - \rho) I + \rho H`, with one number more, the log odds of :math:`\rho`. As
    they fall, edges keep labels.

    **Edge weights** :math:`w` multiply the attention, :math:`\log w_{ij}` is added to
    :math:`\text{logits}_{ij}`, and the steps of the pool's walk.

    **Scores alone.** With ``pool=False`` there are five numbers, :math:`P_j` is the softmax of
    scores times a number, no known label has a part in it, and the floor is one of
    :math:`\alpha = \kappa P + \epsilon`. The fit conditions on the training labels, in orders
    that have them first. ``y`` and ``known`` are then left out of :meth:`mixture`.

    :param int num_classes: ``C``; not needed for ``pool=False``.
    :param bool pool: Whether :math:`P` pools scores, neighbours and known labels.
    :param bool communities: Whether neighbourhoods have communities for sources: those of
        :func:`pyro_nmm.sources.communities`, of one partition or of several.
    :param Tensor compatibility: ``(C, C)``, :math:`H`, whose rows sum to one.
    """

    pool: pooled.PooledScores | None  #: :math:`P`
    log_scale: Tensor  #: :math:`\log s`, without a pool
    log_kappa: Tensor  #: :math:`\log \kappa`
    log_floor: Tensor  #: :math:`\log \epsilon`
    gamma: Tensor  #: :math:`\gamma`
    similarity: Tensor  #: :math:`\beta`
    log_kappa_community: Tensor  #: :math:`\log \kappa_\text{community}`, if there are any
    community: Tensor  #: :math:`\delta`, if there are any
    odds: Tensor  #: :math:`\log \rho / (1 - \rho)`, if there is a matrix
    compatibility: Tensor | None

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        pool: bool = True,
        communities: bool = False,
        compatibility: Tensor | None = None,
    ) -> None:
        super().__init__()
        if communities and compatibility is not None:
            raise ValueError("compatibility is one of neighbouring nodes: use communities=False")
        if pool:
            if num_classes is None:
                raise ValueError("num_classes is needed: the number of columns of the scores")
            check_integers(2, num_classes=num_classes)
        self.communities = communities
        self.pool = pooled.PooledScores(num_classes) if pool else None
        self.register_buffer("compatibility", compatibility)
        own = (PRIOR if pool else SCORES_PRIOR) | (COMMUNITY_PRIOR if communities else {})
        own |= {} if compatibility is None else RELABEL_PRIOR
        #: Of numbers by name; that of log_scale follows from the scores.
        self.prior = own | {f"pool.{name}": values for name, values in pooled.PRIOR.items() if pool}
        for name, (mean, _) in (({} if pool else {"log_scale": (0.0, 1.0)}) | own).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(mean)))

    def forward(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor | None = None,
        known: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """
        :param Tensor scores: ``(N, C)`` the classifier's logits.
        :param Tensor y: ``(N,)`` labels, read where known; left out for ``pool=False``.
        :param Tensor known: ``(N,)`` boolean mask or node ids; it may select nothing, as on a graph
            without labels whose numbers come from another one.
        :param Tensor edge_weight: ``(num_edges,)`` positive weights in the order of ``hood``, see
            :func:`~pyro_nmm.models.edge_weights`, if the fit had them.
        :return: ``alpha`` of shape ``(N, C)``, with communities ``(M, C)``, and ``logits`` of
            shape ``(num_edges,)``, of the scores' type, at least single precision; with a
            compatibility matrix ``relabel``, ``(num_edges, C, C)``, too.
        """
        check_hood(hood, self.communities)
        scores, edge_weight = scores_of(hood, scores), weights_of(hood, edge_weight)
        if self.pool is None:
            return parameters_of(self, hood, scores, edge_weight)
        if y is None or known is None:
            raise ValueError(
                "y and known are needed: the labels that are known, and where, are a part of what "
                "is pooled; on a graph without any, give a mask that selects no node"
            )
        y, known = labels_of(hood, y), mask_of(hood, known, "known", empty=True)
        check_known(hood, y, known, num_classes_of(self, scores))
        terms = self.pool.terms(hood, scores, y, known, edge_weight)
        return parameters_of(self, hood, terms, edge_weight)

    def fit(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        train: Tensor,
        held_out: Tensor,
        *,
        edge_weight: Tensor | None = None,
        num_steps: int = 150,
        num_samples: int = 8,
        lr: float = 0.1,
        progress: Callable[[range], Iterable[int]] = iter,
    ) -> StackedNMM:
        r"""
        Adam on an unbiased estimate of the gradient, with a rate that falls to zero, from
        temperature scaling and the priors' means. The scale of the scores does not matter.

        Tensors or NumPy arrays; sets of nodes as masks or as node ids.

        :param Neighborhood hood: The neighbourhoods.
        :param Tensor scores: ``(N, C)`` the trained classifier's logits, in evaluation mode.
        :param Tensor y: ``(N,)`` or ``(N, 1)`` labels, read in the two sets only.
        :param Tensor train: ``(N,)`` boolean mask of the nodes that the classifier learned
            from, known when the held-out are told; it may select nothing.
        :param Tensor held_out: ``(N,)`` boolean mask of nodes that it did not learn from, for
            example the validation nodes.
        :param Tensor edge_weight: as in :meth:`forward`.
        :param int num_samples: draws of :math:`q(c \mid y)` a step, at least 2.
        :param float lr: Adam's, positive.
        :param progress: wraps the range of steps, for example ``tqdm``.
        :return: the module itself.
        :raises ValueError: for wrong shapes, for masks that overlap or select nothing, for a
            ``hood`` without communities or with some where there should be none, and for an
            ``lr`` at which the fit diverges; the module is then as it was before.

        Cost: :math:`O(T E_\tau + E_\tau C)` a step, :math:`E_\tau` the edges into the held-out
        nodes (into both sets without a pool); and :math:`O(E C)` once, 21 times. With ``R``
        partitions into communities, :math:`O(R N C)` a step more, because every member counts for
        the mean.
        """
        nodes = {"train": train, "held_out": held_out}
        how = num_steps, num_samples, lr, progress
        return fit_numbers(self, hood, scores, y, nodes, edge_weight, None, *how)

    def update(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        train: Tensor,
        known: Tensor,
        *,
        edge_weight: Tensor | None = None,
        num_folds: int = 5,
        num_steps: int = 60,
        num_samples: int = 8,
        lr: float = 0.1,
        progress: Callable[[range], Iterable[int]] = iter,
    ) -> StackedNMM:
        """
        Another fit, from the numbers that there are, to all labels known by now. Every fold of them
        is held out in turn, given all others, so that the numbers are those for a graph of which as
        much is known. The priors stay.

        :param Tensor known: ``(N,)`` boolean mask of *all* nodes whose labels are known and from
            which the classifier did not learn: those that were held out, and new ones.
        :param int num_folds: that the known labels are split into.
        :return: the module itself. The other parameters are those of :meth:`fit`, as is the cost
            of a step; what it costs once, it costs for every fold.
        """
        check_integers(1, num_folds=num_folds)
        nodes = {"train": train, "known": known}
        how = num_folds, num_steps, num_samples, lr, progress
        return fit_numbers(self, hood, scores, y, nodes, edge_weight, *how)

    @torch.no_grad()
    def mixture(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor | None = None,
        known: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> NeighborMixture:
        """
        The fitted distribution over the labels of all nodes. With a pool it is that given the known
        labels: known nodes have a source of their own each, beside those of ``hood``, and keep
        their label. The parameters are those of :meth:`forward`.
        """
        found = self(hood, scores, y, known, edge_weight)
        if self.pool is None:
            return NeighborMixture(hood, *found)
        y, known = labels_of(hood, y), mask_of(hood, known, "known", empty=True)
        return set_apart(hood, y, known, *found)

    def posterior(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        known: Tensor,
        num_samples: int = 64,
        *,
        edge_weight: Tensor | None = None,
    ) -> Posterior:
        """
        The fitted distribution of all labels given the known ones, at least one.

        :param int num_samples: see :meth:`~pyro_nmm.NeighborMixture.condition`.
        """
        y, known = labels_of(hood, y), mask_of(hood, known, "known")
        told = (None, None) if self.pool is None else (y, known)
        mixture = self.mixture(hood, scores, told[0], told[1], edge_weight)
        return mixture.condition(y, known, num_samples)

    def extra_repr(self) -> str:
        found = {name: number.item() for name, number in self.named_parameters(recurse=False)}
        scale = {} if self.pool else {"temperature": math.exp(-found.pop("log_scale"))}
        logs = {name[4:]: math.exp(found.pop(name)) for name in list(found) if "log_" in name}
        return ", ".join(f"{name}={number:.4g}" for name, number in (scale | logs | found).items())
