# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on top of a classifier that is already trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import check_integers
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.fitting import with_gradients, with_options
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.models.stacked.fit import (
    LABELS,
    NUM_DRAWS,
    Evidence,
    FitOptions,
    agreement,
    bounded_temperature,
    fit_folds,
    parts_of,
    silence,
    some_of,
)
from pyro_nmm.models.stacked.formula import (
    Formula,
    PooledScores,
    Priors,
    declarations,
    prior_of,
)
from pyro_nmm.models.stacked.stages import Pooled, as_blocks
from pyro_nmm.models.stacked.table import GraphScores, disjoint_masks, scores_of_folds, warn_user


class StackedNMM(nn.Module):
    r"""Joint distribution of labels from the scores of any trained classifier and the known labels,
    with a few parameters that are fitted in seconds on held-out nodes.

    .. math::

        \alpha_j = \kappa \left( P_j + \frac{\epsilon}{C} \right), \qquad
        \text{logits}_{ij} = \gamma \, \delta(i = j)
                             + \beta \frac{P_i^\top P_j}{\|P_i\| \|P_j\|}

    :math:`P_j` pools the scores of node `j`, the scores of its neighbours and the known labels
    around it (:class:`~pyro_nmm.models.PooledScores`, ``4 + C`` parameters). :math:`\kappa` is the
    concentration: the smaller, the stronger the correlation. :math:`\epsilon` is the floor,
    :math:`\gamma` the attention of a node to itself and :math:`\beta` the attention to neighbours
    with similar predictions. As :math:`\kappa, \gamma \to \infty` and :math:`\epsilon \to 0` it is
    the pool, and in its limits temperature scaling, with a bias or without. :meth:`fit` maximises

    .. math::

        & E_{q(c \mid y)} \sum_{i \text{ held out}} \log p(y_i \mid y_{<i}, c_{<i})
            + \log \text{prior} \\
        & \le \log p(y_{\text{held out}} \mid y_{\text{train}}) + \log \text{prior}

    in random orders: *jointly*, so that correlation counts, and on nodes from which the classifier
    did not learn, because it is overconfident on the others.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, train = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, False])
    >>> held_out = torch.tensor([False, True, True, False])
    >>> stacked = StackedNMM(num_classes=2).fit(hood, scores, y, train, held_out, num_steps=20)
    >>> stacked.posterior(hood, scores, y, train).marginals().argmax(-1)
    tensor([0, 0, 1, 1])

    **New labels** of nodes that the classifier did not learn from: :meth:`update` refits the
    parameters to them, and a posterior has them in :math:`P` and as evidence about choices.

    >>> later = stacked.update(hood, scores, y, train, held_out, num_steps=20)
    >>> later.posterior(hood, scores, y, train, new=held_out).marginals().argmax(-1)
    tensor([0, 0, 1, 1])

    **In Pyro** it is a network to :class:`~pyro_nmm.models.Parameters` for
    :class:`~pyro_nmm.guides.AmortizedNMM`. ``alpha`` holds the known labels already, and
    conditioning on them as well would count them twice: use :meth:`mixture`.

    **Folds.** A classifier that is fitted once for each of ``K`` folds of the labels needs no
    held-out nodes: copies of the graph stand side by side, and copy ``k`` holds out fold ``k``. The
    pool's NMM then has a share :math:`w` beside temperature scaling, whose labels are independent:
    each node takes its label from temperature scaling with probability :math:`1 - w`, fitted too.

    >>> folds, both = torch.tensor([0, 1, 0, 1]), scores.expand(2, 4, 2)
    >>> stacked = StackedNMM(num_classes=2).fit(hood, both, y, folds=folds, num_steps=20)
    >>> 0 < stacked.share.item() < 1
    True

    **Few labels, no classifier.** The labels' shares replace scores that say nothing, such as zeros
    (:class:`~pyro_nmm.models.PooledScores`). Observed labels of neighbours then decide. If nothing
    is left of the scores, every known label is held out in one of five folds.

    **Heterophilous graphs.** With a matrix :math:`H` of :func:`~pyro_nmm.models.compatibility`, a
    label that a node takes from another one passes through :math:`(1 - \rho) I + \rho H`.

    **Stages.** Labels may be revealed in blocks, each of which has a joint distribution given all
    earlier ones:

    >>> stacked.posterior(hood, scores, y, train, stages=3).sample((5,)).shape
    torch.Size([5, 4])

    **Edge weights** multiply the attention (``logits`` get their logarithms) and the pool's walk.

    **Scores alone.** With ``pool=False``, :math:`P_j` is the softmax of the scores times
    :math:`s`, :math:`\alpha = \kappa P + \epsilon`, and known labels are conditioned on: in a fit
    the training labels come first in every order, and :meth:`mixture` needs no ``y`` and no
    ``known``. The prior mean of :math:`\log s` is relative to temperature scaling.

    :param int num_classes: ``C``; not needed for ``pool=False``.
    :param bool pool: whether :math:`P` pools scores, neighbours and known labels.
    :param Tensor compatibility: ``(C, C)``, :math:`H`, whose rows sum to one.
    :param dict prior: means and standard deviations of normal priors that replace the priors in
        :attr:`prior`, for example ``{"gamma": (1.0, 0.5)}``. A fit begins at the means.
    """

    pool: PooledScores | None  #: :math:`P`
    log_scale: Tensor  #: :math:`\log s`, without a pool
    log_kappa: Tensor  #: :math:`\log \kappa`
    log_floor: Tensor  #: :math:`\log \epsilon`
    gamma: Tensor  #: :math:`\gamma`
    similarity: Tensor  #: :math:`\beta`
    odds: Tensor  #: :math:`\log \rho / (1 - \rho)`, if there is a matrix
    compatibility: Tensor | None
    share: Tensor  #: :math:`w`, 1 unless folds were fitted, with a pool, or scores say nothing
    evidence: Evidence | None  #: of a fit with a pool: what :meth:`summary` prints
    updated: Tensor  #: whether :meth:`update` was the last fit
    deviations: Tensor  #: ``(16, d)``: draws of all parameters, minus the fitted ones

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        pool: bool = True,
        compatibility: Tensor | None = None,
        prior: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        if pool and num_classes is None:
            raise ValueError("num_classes is needed: the number of columns of the scores")
        self.declared = declarations(pool, compatibility is not None)
        for parameter in self.declared:
            if "." not in parameter.name:  # the others are the pool's
                self.register_parameter(parameter.name, nn.Parameter(torch.zeros(())))
        self.pool = PooledScores(num_classes) if pool and num_classes is not None else None
        self.register_buffer("compatibility", compatibility)
        if self.pool is not None:
            self.register_buffer("share", torch.ones(()))
        self.evidence = None
        self.register_buffer("updated", torch.zeros((), dtype=torch.bool))
        size = sum(value.numel() for value in self.parameters())
        self.register_buffer("deviations", torch.zeros(NUM_DRAWS, size))
        #: Mean and standard deviation of each parameter's prior, by name.
        self.prior = prior_of(self.declared, prior or {})
        Priors.of(self.declared, self.prior).start(self.formula.values)

    @property
    def formula(self) -> Formula:
        """``alpha`` and ``logits`` as functions of the parameters."""
        values = {name: value.view(-1) for name, value in self.named_parameters()}
        if self.pool is None:
            return Formula(values, compatibility=self.compatibility)
        pool = self.pool.temperature, self.pool.shares
        return Formula(values, *pool, self.compatibility, float(self.share))

    def _read(
        self,
        hood: Neighborhood,
        scores: Any,
        y: Any = None,
        known: Any = None,
        weight: Any = None,
        new: Any = None,
    ) -> GraphScores:
        """A checked graph with scores and labels."""
        check_hood(hood)
        if self.pool is not None and (y is None or known is None):
            raise ValueError(
                "y and known are needed: the labels that are known, and where, are a part of what "
                "is pooled; on a graph without any, give a mask that selects no node"
            )
        data = GraphScores.of(hood, scores, y, known, weight, new)
        if self.pool is not None and data.scores.shape[1] != len(self.pool.offsets):
            must = f"({hood.num_nodes}, {len(self.pool.offsets)}), num_classes columns"
            raise ValueError(f"scores must have shape {must}, got {tuple(data.scores.shape)}")
        return data

    def forward(
        self, hood: Neighborhood, scores: Tensor, y: Tensor | None = None,
        known: Tensor | None = None, edge_weight: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``alpha`` ``(N, C)`` and ``logits`` ``(num_edges,)``, at least in single precision; with
        a compatibility matrix ``relabel``, ``(num_edges, C, C)``, too. All methods take tensors or
        NumPy arrays, and sets of nodes as masks ``(N,)`` or as node ids ``(K,)``, in lists too. A
        set of ``N`` zeros and ones that repeat is a mask.

        :param Tensor scores: ``(N, C)`` finite logits of the classifier, in evaluation mode.
        :param Tensor y: ``(N,)`` or ``(N, 1)`` labels, read where known.
        :param Tensor known: ``(N,)`` boolean mask. It may select nothing, for example on a graph
            without labels with the parameters of another graph.
        :param Tensor edge_weight: ``(num_edges,)`` positive weights, see
            :func:`~pyro_nmm.models.edge_weights`; in all calls or in none.
        """
        data, formula = self._read(hood, scores, y, known, edge_weight), self.formula
        return formula(hood, formula.inputs(data)[0], data.edge_weight)

    @with_options
    @with_gradients
    def fit(
        self, hood: Neighborhood, scores: Tensor, y: Tensor, train: Tensor | None = None,
        held_out: Tensor | None = None, *, folds: Tensor | None = None,
        edge_weight: Tensor | None = None, options: FitOptions = FitOptions(),
    ) -> "StackedNMM":  # fmt: skip
        r"""Fit the parameters by Adam on an unbiased estimate of the gradient, with a rate that
        falls to zero, and return the module. It begins at temperature scaling, so the scale of the
        scores does not matter. Other arguments as for :meth:`forward`.

        :param Tensor train: mask or ids of nodes that the classifier learned from; may be empty.
        :param Tensor held_out: mask or ids of nodes that it did not learn from: validation nodes.
        :param Tensor folds: ``(N,)`` fold ``0..K - 1`` of each labelled node, negative for others,
            in the place of ``train`` and ``held_out``. ``scores`` is ``(K, N, C)``: the scores of
            fold ``k`` come from a classifier that learned from the labels of all other folds.
        :param int num_steps: default 150.
        :param int num_samples: draws of :math:`q(c \mid y)` a step, at least 2, default 8.
        :param int num_folds: folds of the held-out nodes, default 1; a step is on one of them.
        :param int max_held_out: most held-out nodes, default 5,000; folds and updates use all.
        :param float lr: Adam's, positive, default .1.
        :param int refit_steps: of LBFGS, for :meth:`summary` and the share, default 20.
        :param progress: wraps the range of steps, for example ``tqdm``.
        :raises ValueError: for wrong shapes, for masks that overlap or select nothing, and for an
            ``lr`` at which the fit diverges. The module is then unchanged.

        Cost: :math:`O(T E_\tau + E_\tau C)` a step, :math:`E_\tau` the edges into the held-out
        nodes (into both sets without a pool); :math:`O(E C)` 21 times for each fold.
        """
        if folds is not None:
            if train is not None or held_out is not None:
                raise ValueError("folds says which labels are held out: leave out train, held_out")
            parts = scores_of_folds(hood, scores, folds)
            copies = [(self._read(hood, s, y, known, edge_weight), out) for s, known, out in parts]
            return self._fit(copies, options)
        if train is None or held_out is None:
            raise ValueError("train and held_out are needed, or scores (K, N, C) and their folds")
        train, held_out = disjoint_masks(hood, train=train, held_out=held_out)
        held_out = some_of(held_out, options.max_held_out)
        data = self._read(hood, scores, y, train | held_out, edge_weight)
        return self._fit([(data, held_out)], options)

    @with_options
    @with_gradients
    def update(
        self, hood: Neighborhood, scores: Tensor, y: Tensor, train: Tensor, new: Tensor, *,
        edge_weight: Tensor | None = None,
        options: FitOptions = FitOptions(num_steps=100, num_folds=5),
    ) -> "StackedNMM":  # fmt: skip
        """Refit the parameters, from their present values, to all labels known by now. Each fold of
        them is held out in turn, given the others, which :meth:`posterior` takes as ``new``.

        :param Tensor new: mask ``(N,)`` or ids of *all* nodes whose labels are known and from
            which the classifier did not learn: the held-out nodes of :meth:`fit`, and later ones.
        :param options: of :meth:`fit`, by default ``num_folds=5`` and ``num_steps=100``.
        """
        train, new = disjoint_masks(hood, train=train, new=new)
        data = self._read(hood, scores, y, train, edge_weight, new=new)
        return self._fit([(data, new)], options, afresh=False)

    def _fit(
        self, copies: Sequence[tuple[GraphScores, Tensor]], options: FitOptions, afresh: bool = True
    ) -> "StackedNMM":
        """Fit to a graph's held-out nodes, or copies. An error leaves the module as it was."""
        copies = [(replace(data, scores=data.scores.detach()), out) for data, out in copies]
        scores, y = (torch.cat([getattr(d, name) for d, _ in copies]) for name in ("scores", "y"))
        warn_user(scores, copies[0][0].hood)
        out = torch.cat([out for _, out in copies])
        temperature, agree = bounded_temperature(scores, y, out), agreement(copies[0][0])
        formula = self.formula.copied(scores)
        if afresh and self.pool is not None:
            silent = silence((scores / temperature).softmax(-1), y, out)
            if silent == 1 and len(copies) == 1:  # the scores do not know the training labels
                copies = [(data, part) for data, _ in copies for part in parts_of(data.known)]
            labels = one_hot(torch.cat([data.y[out] for data, out in copies]), scores.shape[1])
            shares = (labels.to(scores).sum(0) + LABELS / scores.shape[1]) / (len(labels) + LABELS)
            t, shares = scores.new_tensor(temperature), silent * shares
            formula = replace(formula, temperature=t, shares=shares, share=1.0)
        else:
            silent = 0.0 if formula.shares is None else float(formula.shares.sum())
        priors = Priors.of(self.declared, self.prior, temperature, agree, silent)
        if afresh:
            priors.start(formula.values)
        draws, evidence = fit_folds(formula, priors, copies, options, agree + silent * (1 - agree))
        self.to(scores)
        with torch.no_grad():
            for name, value in formula.values.items():
                self.get_parameter(name).view(-1).copy_(value)
            if self.pool is not None:
                self.pool.temperature.copy_(formula.temperature)
                self.pool.shares.copy_(formula.shares)
                self.share.fill_(formula.share if evidence is None else evidence.share)
            self.deviations.copy_(draws)
            self.updated.fill_(not afresh)
        self.evidence = evidence
        return self

    def mixture(
        self, hood: Neighborhood, scores: Tensor, y: Tensor | None = None,
        known: Tensor | None = None, edge_weight: Tensor | None = None,
    ) -> NeighborMixture:  # fmt: skip
        """The fitted distribution of all labels, with a pool given the known ones: a known node
        keeps its label, which it takes from a source of its own. Arguments as for :meth:`forward`.
        It has the gradient of the scores alone.
        :raises ValueError: also before :meth:`fit`, ``load_state_dict`` or an optimiser's step.
        """
        data = self._read(hood, scores, y, known, edge_weight)
        [formula] = self._formulas()
        parameters = formula(hood, formula.inputs(data)[0], data.edge_weight)
        return next(formula.mixtures(data, [parameters]))

    def check_fitted(self) -> None:
        """Refuse parameters that are all as they were made."""
        values, start = self.formula.values, Priors.of(self.declared, self.prior).declared
        if all(bool((values[p.name].float() == p.mean).all()) for p in start):
            cure = "call fit(...) or load_state_dict(...) first"
            raise ValueError(f"stacked has the parameters that it was made with: {cure}")

    @torch.no_grad()
    def posterior(
        self, hood: Neighborhood, scores: Tensor, y: Tensor, known: Tensor,
        num_samples: int | None = 64, num_draws: int = NUM_DRAWS, *, new: Tensor | None = None,
        edge_weight: Tensor | None = None, beside: Tensor | None = None, stages: int | Tensor = 1,
    ) -> Posterior:  # fmt: skip
        """The distribution of all labels given the known ones, averaged over draws of the
        parameters around the fit: a few hundred held-out labels leave them uncertain, and intervals
        of counts would be too narrow without the draws. ``known`` may select no node.

        :param int num_samples: of :meth:`~pyro_nmm.NeighborMixture.condition`, for all draws.
        :param int num_draws: at most 16. 0 takes the fitted parameters.
        :param Tensor new: ``(N,)`` boolean mask of known labels from which the classifier did not
            learn, none of them in ``known``. After :meth:`update` they belong to :math:`P` too.
        :param Tensor beside: ``(N, C)`` label probabilities with the share :math:`1 - w` after a
            fit by folds, default temperature scaling of the scores.
        :param stages: number of blocks in which labels are revealed to the pool, at random, or the
            block of each node ``(N,)``, ``0..B - 1``. It needs a pool and ``num_samples``. With
            several blocks the posterior has ``log_likelihood``, of all nodes of the blocks before
            its last one, ``sample`` and ``counts``. A block costs a pool, :math:`O(E C)` 20 times.
        """
        check_integers(0, num_draws=num_draws)
        if num_samples is not None:
            check_integers(1, num_samples=num_samples)
            num_draws = min(num_draws, num_samples)
        if num_draws > NUM_DRAWS:
            raise ValueError(f"num_draws must be at most {NUM_DRAWS}, got {num_draws}")
        if self.pool is None and beside is not None:
            raise ValueError("beside needs a pool: with pool=False the NMM has no share")
        data = self._read(hood, scores, y, known, edge_weight, new=new)
        data, observed, block = data.with_beside(beside), data.known, None
        if not isinstance(stages, int) or stages != 1:
            if self.pool is None or num_samples is None:
                raise ValueError("stages needs a pool, where labels are revealed, and num_samples")
            block = as_blocks(stages, observed)
        if not self.updated:
            data = replace(data, known=data.certain)
        formulas = self._formulas(num_draws)
        inputs = formulas[0].inputs(data)[0]
        share = num_samples and num_samples // len(formulas)
        pooled = Pooled(data, inputs, observed, share)
        members = pooled.posteriors(formulas) if block is None else pooled.staged(formulas, block)
        return AveragedPosterior(members) if len(members) > 1 else members[0]

    def _formulas(self, num_draws: int = 0) -> list[Formula]:
        """Of draws of the parameters; of the fitted ones, if there are no draws."""
        self.check_fitted()
        formula, draws = self.formula, self.deviations[:num_draws]
        numbers = formula.numbers()
        draws = draws if draws.any() else torch.zeros_like(numbers)[None]
        return [formula.with_values(numbers + d) for d in draws]

    def summary(self) -> str:
        """NLL of held-out labels by classifier, temperature scaling, pool and NMM, the last three
        fitted to other held-out labels, of which 2,000 are enough; with folds the share of the NMM.

        :raises ValueError: without a fit, after an update, with ``pool=False``, or of one label.
        """
        if self.evidence is None:
            raise ValueError("summary needs a fit with a pool and no update or loading after it")
        return str(self.evidence)

    def extra_repr(self) -> str:
        values = {name: value.item() for name, value in self.named_parameters(recurse=False)}
        shown = {} if self.pool else {"temperature": math.exp(-values.pop("log_scale"))}
        logs = [p.name for p in self.declared if p.log and p.name in values]
        shown |= {name.removeprefix("log_"): math.exp(values.pop(name)) for name in logs}
        return ", ".join(f"{name}={value:.4g}" for name, value in (shown | values).items())
