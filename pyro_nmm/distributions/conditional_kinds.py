# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices given labels, and choices and labels given evidence."""

import torch
from torch import Size, Tensor

from pyro_nmm.arguments import check_integers, check_plain
from pyro_nmm.blocks import NUMBERS
from pyro_nmm.distributions.components import Components, all_latents
from pyro_nmm.distributions.conditional import Conditional
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.model_arguments import check_evidence, check_label_range, check_labels, check_possible
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import terms_of
from pyro_nmm.ops.score_costs import Estimator
from pyro_nmm.ops.sweeps import run_chains
from pyro_nmm.provenance import posterior_values

#: States that all chains keep by default: standard errors of .016 at most if independent.
_MOST_STATES = 1024


class OrderedConditional(Conditional):
    r"""The choices of the observed nodes given their labels, node after node in a random order:
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
    removes from a choice's score the costs that it cannot have caused. Those of other sites stay.

    ==================  ================================================  =========
    ``estimator``       the choice :math:`c_i` is charged with            bias
    ==================  ================================================  =========
    ``"reward_to_go"``  :math:`f_{i'}` of later nodes connected to it,    none
                        minus the mean of the other draws
    ``"no_score"``      nothing: the gradient of EM                       moderate
    ``"reinforce"``     the whole bound: textbook REINFORCE               none
    ==================  ================================================  =========

    "The other draws" are the rest of the batch; a batch of one makes one more draw for the
    baseline. :class:`~pyro.infer.TraceGraph_ELBO` takes any program. ``Trace_ELBO`` gives the same
    gradient to programs with no other sites or factors, and has a ``differentiable_loss``. With
    more than a few hundred labels :class:`~pyro_nmm.guides.Chains` has far less noise.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> q = OrderedConditional(hood, alpha, logits, y=torch.tensor([0, 0]))
    >>> q.log_prob(torch.tensor([0, 0])).exp()
    tensor(0.8108)

    Cost: :math:`O(E)` a draw and a ``log_prob``, ``E`` the edges into observed nodes, and on a
    device :math:`O(E \log E)`. ``hood``, ``alpha`` and ``logits`` are as for
    :class:`~pyro_nmm.NeighborMixture`.

    :param Tensor y: ``(..., N)`` integer labels; unobserved entries are never read.
    :param Tensor observed: ``(N,)`` boolean mask of observed nodes, default all.
    :param Tensor order: ``(n,)`` order of the observed node ids for the batch, default random.
    :param str estimator: see the table.
    :raises ValueError: for wrong shapes or values, labels out of range, an incomplete ``order``,
        and an unknown ``estimator``; in :meth:`sweep` for choices of no neighbour.
    """

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Tensor,
        logits: Tensor,
        y: Tensor,
        observed: Tensor | None = None,
        order: Tensor | None = None,
        estimator: Estimator = "reward_to_go",
        *,
        validate_args: bool | None = None,
    ) -> None:
        parameters = Parameters.of(hood, alpha, logits)
        y = check_labels(hood, y, hood.num_nodes)
        super().__init__(parameters, y, observed, order, estimator, validate_args=validate_args)
        if self._validate_args:
            rows = self.observed_rows
            check_label_range(rows, y.index_select(-1, rows.nodes), self.num_classes)


class EvidenceConditional(Conditional):
    r"""Choices and latent labels of nodes given observations, node after node in a random order:
    :math:`q(c, u \mid w)`. It has no parameter of its own.

    .. math::

        q(c, u \mid w) = \prod_i p(c_i, u_i \mid w_i, c_{<i}, u_{<i}), \quad
        p(c_i = j, u_i = k \mid \cdot) \propto
            L_{ij} \frac{\alpha_{jk} + s_{ijk}}{A_j + S_{ij}} \, e^{e_{ijk}}

    Here :math:`u_i \sim z_{c_i}` is the label that a node takes from its source, and the evidence
    :math:`e_{ijk} = \log p(w_i \mid u_i = k)` is the log-likelihood of an observation given this
    label: a Normal emission, the votes of annotators, a partial label (0 and :math:`-\infty`), or
    nothing (zeros). Counts are as for :class:`OrderedConditional`, which observed labels need. With
    :math:`f_i` the logarithm of the sum of these terms, :math:`E_q[\sum_i f_i] \le \log p(w)` and
    :math:`E_q[\prod_i e^{f_i}] = p(w)` for every order.

    A sample ``batch_shape + (2, n)`` has choices, then labels, in ascending node id.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.tensor([[9.0, 1.0], [1.0, 9.0]]), torch.zeros(4)
    >>> evidence = torch.tensor([[0.0, -torch.inf], [-0.5, -0.1]])  # a label, and a hint
    >>> q = EvidenceConditional(hood, alpha, logits, evidence, order=torch.arange(2))
    >>> c, u = q.sample((5,)).unbind(-2)
    >>> bool((u[:, 0] == 0).all())
    True
    >>> q.log_prob(torch.tensor([[0, 0], [0, 0]])).exp()
    tensor(0.3289)

    Cost: :math:`O(E C)` a draw and a ``log_prob``, ``E`` the edges into the observed nodes. Other
    parameters and the gradient of the bound are as for :class:`OrderedConditional`.

    :param Tensor alpha: ``(..., M, C)``.
    :param Tensor evidence: log-likelihoods in nats, ``(..., N, C)``, or ``(..., num_edges, C)``
        if they depend on the edge that a label comes over; unobserved entries are never read.
    :param bool relabels: whether edges change borrowed labels, so that :meth:`posterior` refuses.
    :raises ValueError: as :class:`OrderedConditional`, and for evidence that is NaN, ``inf``, or
        ``-inf`` at every label of a node.
    """

    def __init__(
        self,
        hood: Neighborhood,
        alpha: Tensor,
        logits: Tensor,
        evidence: Tensor,
        observed: Tensor | None = None,
        order: Tensor | None = None,
        estimator: Estimator = "reward_to_go",
        *,
        relabels: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        parameters, self.relabels = Parameters.of(hood, alpha, logits), relabels
        data = check_evidence(hood, parameters.alpha, evidence)
        super().__init__(parameters, data, observed, order, estimator, validate_args=validate_args)
        if self._validate_args:
            check_possible(self.observed_rows, self.data_of(self.observed_rows))

    @torch.no_grad()
    def posterior(
        self,
        num_samples: int | None = None,
        weighted: bool = False,
        num_sweeps: int = 0,
    ) -> Posterior:
        r"""The posterior :math:`p(\cdot \mid w)` as a mixture over choices and labels.

        >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> evidence = torch.tensor([[0.0, -1.0], [0.0, 0.0]])
        >>> q = EvidenceConditional(hood, torch.ones(2, 2), torch.zeros(4), evidence)
        >>> q.posterior().marginals()
        tensor([[0.7311, 0.2689],
                [0.5385, 0.4615]])

        :param int num_samples: ``T`` draws, or chains; ``None`` is an exact sum, for small sets.
        :param bool weighted: Weigh draws by :math:`\prod_i e^{f_i}`, exact as ``T`` grows.
        :param int num_sweeps: ``S`` Gibbs sweeps, see :meth:`sweep`, in chains that start from
            draws, exact as ``S`` grows. It keeps states of their second half, at most 1,024 and 2²⁴
            choices of all chains together. Its ``chains`` has diagnostics.
        :return: the posterior. Cost: :math:`O(T (S + 1) E C)`.
        :raises ValueError: for a batch, too large an exact sum, and edges that relabel.
        """
        check_plain("posterior", self.batch_shape)
        if self.relabels:
            raise ValueError(
                "posterior would be of borrowed labels, before relabel changes them: use "
                "NeighborMixture.condition for observed labels, or leave out relabel"
            )
        check_integers(0, num_sweeps=num_sweeps)
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
        if num_sweeps and (weighted or num_samples is None):
            raise ValueError("num_sweeps needs num_samples chains, which have equal weights")
        values = self.alpha.detach(), self.logits.detach(), self.data.detach()
        alpha, logits, *_ = posterior_values(*values, self.order)
        parameters = Parameters(self.hood, alpha, logits)
        if num_samples is None:
            evidence = self.data_of(self.observed_rows).detach()
            return Posterior(all_latents(parameters, self.observed_rows, evidence), is_exact=True)
        rows, chains, draw = self.rows, None, self._draw(Size([num_samples]))
        entries = self._flat(Size([1])).map(Tensor.detach)
        if num_sweeps:
            num_states = min(_MOST_STATES, NUMBERS // max(1, rows.num_rows))
            num_kept = min(num_sweeps - num_sweeps // 2, max(1, num_states // num_samples))
            chains, draw = run_chains(rows, entries, draw, num_sweeps, num_kept)
        choices, log_weights = rows.source[draw.edges], alpha.new_zeros(len(draw.edges))
        if weighted:
            log_weights = terms_of(rows, entries, draw).sum(-1).to(alpha.dtype)
        components = Components(parameters, rows.nodes, draw.labels, choices, log_weights)
        return Posterior(components, weighted=weighted, chains=chains)
