# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices given observed labels, drawn in an order."""

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.concentrations import Concentrations
from pyro_nmm.distributions.in_order import InOrder
from pyro_nmm.distributions.neighbor_choice import Neighbors
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.graph_arguments import check_label_range, check_labels
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import Draw, Entries, draw_of_edges
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel


class OrderedConditional(InOrder):
    r"""
    The choices of the observed nodes given their labels, node after node in a random order:
    :math:`q(c \mid y)`, the paper's equation (6). It has no parameter of its own.

    .. math::

        q(c \mid y) = \prod_i p(c_i \mid y_i, c_{<i}, y_{<i}), \quad
        p(c_i = j \mid \cdot) \propto L_{ij} \frac{\alpha_{j y_i} + s_{ij}}{A_j + S_{ij}}

    where :math:`S_{ij}` counts the earlier nodes that chose :math:`j`, :math:`s_{ij}` how many of
    these have label :math:`y_i`, and :math:`A_j = \sum_k \alpha_{jk}`. A sample holds node ids,
    shape ``batch_shape + (n,)``, for ``n`` observed nodes **in ascending node id**.

    The bound :math:`E_q[\sum_i f_i] \le \log p(y)`, :math:`f_i = \log p(y_i \mid y_{<i},
    c_{<i})`, is loose by the divergence of :math:`q` from :math:`p(c \mid y)`, because a choice
    depends on the labels of earlier nodes alone; :math:`E_q[\prod_i e^{f_i}] = p(y)` is exact.

    **The gradient of the bound.** :meth:`score_parts` gives Pyro's losses a control variate that
    removes from the score of a choice the costs that it cannot have caused. Other sites that depend
    on ``c`` stay charged to it.

    =====================  ================================================  =========
    ``estimator``          the choice :math:`c_i` is charged with            bias
    =====================  ================================================  =========
    ``"reward_to_go"``     :math:`f_{i'}` of later nodes connected to it,    none
                           minus the mean of the other draws
    ``"one_step_credit"``  the change that its own count makes in later      small
                           :math:`f_{i'}`, minus the mean of the others
    ``"no_score"``         nothing: the gradient of EM                       moderate
    ``"reinforce"``        the whole bound: textbook REINFORCE               none
    =====================  ================================================  =========

    "The other draws" are the rest of the batch. A batch of one makes one more draw for the baseline
    alone. :class:`~pyro.infer.TraceGraph_ELBO` takes any program. ``Trace_ELBO`` gives the same
    gradient to programs with no other sites or factors, and has a ``differentiable_loss``.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> q = OrderedConditional(hood, alpha, logits, y=torch.tensor([0, 0]))
    >>> q.log_prob(torch.tensor([0, 0])).exp()
    tensor(0.8108)

    Cost: :math:`O(E)` a draw and :math:`O(E \log E)` a ``log_prob``, ``E`` the edges into observed
    nodes. ``hood``, ``alpha`` and ``logits`` are as for :class:`~pyro_nmm.NeighborMixture`.

    :param Tensor y: ``(..., N)`` integer labels; unobserved entries are never read.
    :param Tensor observed: ``(N,)`` boolean mask of observed nodes, default all.
    :param Tensor order: ``(n,)`` permutation of the observed node ids, which the whole batch
        shares; default random.
    :param str estimator: see the table.
    :param Tensor relabel: ``(num_edges, C)`` permutations, see :mod:`pyro_nmm.relabel`. In the
        equation :math:`y_i` is then the label that was borrowed, if over this edge.
    """

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Concentrations,
        logits: Tensor,
        y: Tensor,
        observed: Tensor | None = None,
        order: Tensor | None = None,
        estimator: str = "reward_to_go",
        relabel: Tensor | Channel | None = None,
        *,
        validate_args=None,
    ) -> None:
        parameters = Parameters.of(hood, alpha, logits, relabel, kinds="permutations")
        y, arrangement = check_labels(hood, y, hood.num_nodes), (observed, order, estimator)
        self.channel = parameters.channel
        super().__init__(parameters, y.shape[:-1], arrangement, validate_args=validate_args)
        labels = y.index_select(-1, self.rows.nodes)
        if self._validate_args:
            check_label_range(self.rows, labels, self.num_classes)
        #: The labels that choices count for: ``(..., n)`` of rows, or of edges where these relabel.
        self.labels = self._data = self.channel.of(self.rows.edge).borrowed(self.rows, labels)

    log_labels = InOrder.log_terms

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return Neighbors(self.observed_rows)

    def _columns(self, draw: Draw) -> Tensor:
        return self.rows.source[draw.edges]

    def _located(self, value: Tensor, shape: Size) -> tuple[Draw, Tensor]:
        edges = self.rows.find(value)
        entries = Entries(*untracked(*self._flat(shape))[0])
        return draw_of_edges(self.rows, entries, edges.clamp(min=0)), edges < 0

    def borrowed(self, value: Tensor) -> Tensor:
        """
        ``(..., n)``: the labels that choices take from their sources, in ascending node id: the
        observed labels unless edges relabel.
        """
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        if self.channel.keeps:
            return self.labels.index_select(-1, self._row_of).expand(*shape, -1)
        (value, _), provenance = untracked(value, self.labels)
        labels = self._recall(value, shape)[0].labels
        return track_provenance(labels.index_select(1, self._row_of).view(*shape, -1), provenance)
