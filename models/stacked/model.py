# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on top of a classifier that is already trained."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import (
    Array,
    NodeSet,
    as_expected,
    as_tensor,
    check_integers,
    expect,
    expect_all,
)
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.fitting import Steps, bar, with_gradients
from pyro_nmm.model_arguments import check_hood
from pyro_nmm.models.stacked.fit import (
    FOLDS,
    LABELS,
    NUM_DRAWS,
    RATE,
    Evidence,
    Fold,
    agreement,
    bounded_temperature,
    deviations,
    evidence_of,
    maximise,
    parts_of,
    silence,
    some_of,
)
from pyro_nmm.models.stacked.formula import (
    Formula,
    PooledScores,
    Prior,
    adjusted,
    prior_of,
    readable,
)
from pyro_nmm.models.stacked.stages import NUM_SAMPLES, StagedPosterior, posteriors
from pyro_nmm.models.stacked.table import GraphScores, disjoint_masks, warn_user

#: Most held-out nodes of a fit without folds.
MOST_HELD_OUT = 5_000


class StackedNMM(nn.Module):
    r"""Joint distribution of labels from the scores of any trained classifier and the known labels,
    with a few parameters that are fitted in seconds on held-out nodes.

    .. math::

        \alpha_j = \kappa \left( P_j + \frac{\epsilon}{C} \right), \qquad
        \text{logits}_{ij} = \gamma \, \delta(i = j)
                             + \beta \frac{P_i^\top P_j}{\|P_i\| \|P_j\|}

    :math:`P_j` pools the scores of node `j`, the scores of its neighbours and the known labels
    around it (:class:`~pyro_nmm.models.PooledScores`). :math:`\kappa` is the concentration: the
    smaller, the stronger the correlation. :math:`\epsilon` is the floor, :math:`\gamma` the
    attention of a node to itself and :math:`\beta` the attention to neighbours with similar
    predictions. As :math:`\kappa, \gamma \to \infty` and :math:`\epsilon \to 0` it is the pool, and
    in its limits temperature scaling, with a bias or without. :meth:`fit` maximises

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

    **Folds.** A classifier that is fitted once for each of ``K`` folds of the labels needs no
    held-out nodes: copies of the graph stand side by side, and copy ``k`` holds out fold ``k``. The
    pool's NMM then has a share :math:`w`, fitted too: each node takes its label from temperature
    scaling with probability :math:`1 - w`.

    **Few labels, no classifier.** The labels' shares replace uninformative scores, such as zeros.
    If they replace the scores entirely, each known label is held out in one of five folds.

    **Heterophilous graphs.** With a matrix :math:`H` of :func:`~pyro_nmm.models.compatibility`, a
    label that a node takes from another one passes through :math:`(1 - \rho) I + \rho H`.

    **Scores alone.** With ``pool=False``, :math:`P_j` is the softmax of the scores times
    :math:`s`, relative to temperature scaling, and known labels are conditioned on: in a fit the
    training labels come first in every order, and :meth:`mixture` needs no ``y`` and no ``known``.

    **In Pyro** it is a :class:`~pyro_nmm.models.ParameterNetwork`. ``alpha`` holds the known labels
    already, and conditioning on them as well would count them twice: use :meth:`mixture`.

    :param int num_classes: ``C``.
    :param bool pool: whether :math:`P` pools scores, neighbours and known labels.
    :param Tensor compatibility: ``(C, C)``, :math:`H`, whose rows sum to one.
    :param dict prior: means and standard deviations of normal priors that replace the priors in
        :attr:`prior`, for example ``{"gamma": (1.0, 0.5)}``. A fit begins at the means.
    :raises ValueError: for a ``prior`` of unknown parameters; in methods for wrong shapes, scores
        that are not finite, and sets that overlap.
    """

    pool: PooledScores  #: :math:`P`
    log_kappa: Tensor  #: :math:`\log \kappa`
    log_floor: Tensor  #: :math:`\log \epsilon`
    gamma: Tensor  #: :math:`\gamma`
    similarity: Tensor  #: :math:`\beta`
    odds: Tensor  #: :math:`\log \rho / (1 - \rho)`, if there is a matrix
    compatibility: Tensor | None
    share: Tensor  #: :math:`w`, 1 unless folds were fitted with a pool, or scores are uninformative
    evidence: Evidence | None  #: of a fit with a pool: what :meth:`summary` prints
    updated: Tensor  #: whether :meth:`update` was the last fit
    deviations: Tensor  #: ``(16, d)``: draws of all parameters, minus the fitted ones

    def __init__(
        self, num_classes: int, *, pool: bool = True, compatibility: Tensor | None = None,
        prior: Prior | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        #: Mean and standard deviation of each parameter's prior, by name.
        self.prior = prior_of(pool, compatibility is not None, prior or {})
        for name in self.prior:
            if "." not in name:  # the others are the pool's
                self.register_parameter(name, nn.Parameter(torch.zeros(())))
        self.pool = PooledScores(num_classes, scores_alone=not pool)
        self.register_buffer("compatibility", compatibility)
        self.register_buffer("share", torch.ones(()))
        self.register_buffer("updated", torch.zeros((), dtype=torch.bool))
        size = sum(value.numel() for value in self.parameters())
        self.register_buffer("deviations", torch.zeros(NUM_DRAWS, size))
        self.evidence = None
        self._set(self.formula.prior(self.prior, self.deviations).mean)

    @torch.no_grad()
    def _set(self, numbers: Tensor) -> None:
        """Change all parameters."""
        new = self.formula.with_values(numbers).values
        for name, value in self.named_parameters():
            value.copy_(new[name].view_as(value))

    @property
    def formula(self) -> Formula:
        """``alpha`` and ``logits`` as functions of the parameters."""
        values = {name: value.view(-1) for name, value in self.named_parameters()}
        fixed = self.pool.temperature, self.pool.shares, self.compatibility
        return Formula(values, *fixed, float(self.share))

    def _read(
        self, hood: Neighborhood, scores: Any, y: Any = None, known: Any = None, new: Any = None
    ) -> GraphScores:
        """A checked graph with scores and labels, which are evidence if scores are alone."""
        if (y is None or known is None) and not self.pool.scores_alone:
            raise ValueError(
                "y and known are needed: the labels that are known, and where, are a part of what "
                "is pooled; on a graph without any, give a mask that selects no node"
            )
        data = GraphScores.of(hood, scores, y, known, new)
        if data.scores.shape[1] != len(self.pool.shares):
            must = f"({hood.num_nodes}, {len(self.pool.shares)}), num_classes columns"
            raise ValueError(f"scores must have shape {must}, got {tuple(data.scores.shape)}")
        if self.pool.scores_alone:
            data = replace(data, evidence=data.known | data.evidence)
        return data

    def forward(
        self, hood: Neighborhood, scores: Array, y: Array | None = None,
        known: NodeSet | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``alpha`` ``(N, C)`` and ``logits`` ``(num_edges,)``, at least in single precision; with
        a compatibility matrix ``relabel``, ``(num_edges, C, C)``, too. All methods take tensors or
        NumPy arrays, and sets of nodes as masks ``(N,)`` or as node ids ``(K,)``, in lists too. A
        set of ``N`` zeros and ones that repeat is a mask.

        :param Tensor scores: ``(N, C)`` finite logits of the classifier, in evaluation mode.
        :param Tensor y: ``(N,)`` or ``(N, 1)`` labels, read where known.
        :param Tensor known: ``(N,)`` boolean mask. It may select nothing, for example on a graph
            without labels with the parameters of another graph.
        """
        data, formula = self._read(hood, scores, y, known), self.formula
        return formula(hood, formula.inputs(data))

    @with_gradients
    def fit(
        self, hood: Neighborhood, scores: Array, y: Array, train: NodeSet | None = None,
        held_out: NodeSet | None = None, *, folds: Array | None = None, num_steps: int = 150,
        progress: Callable[[range], Iterable[int]] = bar,
    ) -> "StackedNMM":  # fmt: skip
        r"""Fit the parameters by Adam on an unbiased estimate of the gradient, with a rate that
        falls to zero, and return the module. It begins at temperature scaling, so the scale of the
        scores does not matter. Other arguments as for :meth:`forward`.

        :param Tensor train: mask or ids of nodes that the classifier learned from; may be empty.
        :param Tensor held_out: mask or ids of nodes that it did not learn from: validation nodes,
            of which it takes at most 5,000.
        :param Tensor folds: ``(N,)`` fold ``0..K - 1`` of each labelled node, negative for others,
            in the place of ``train`` and ``held_out``. ``scores`` is ``(K, N, C)``: the scores of
            fold ``k`` come from a classifier that learned from the labels of all other folds.
        :param progress: wraps the range of steps, as of :class:`~pyro_nmm.fitting.Steps`.
        :raises ValueError: for wrong shapes, and for masks that overlap or select nothing.

        Cost: :math:`O(E_\tau C)` a step, :math:`E_\tau` the edges into the held-out nodes (both
        sets without a pool), and :math:`O(E C)` 21 times for each fold.
        """
        steps = Steps(num_steps, RATE, progress=progress)
        if folds is not None:
            if train is not None or held_out is not None:
                raise ValueError("folds says which labels are held out: leave out train, held_out")
            scores, folds = _folds_of(hood, scores, folds)
            tables = [self._read(hood, each, y, folds >= 0) for each in scores]
            return self._fit([(data, folds == k) for k, data in enumerate(tables)], steps)
        if train is None or held_out is None:
            raise ValueError("train and held_out are needed, or scores (K, N, C) and their folds")
        train, held_out = disjoint_masks(hood, train=train, held_out=held_out)
        held_out = some_of(held_out, MOST_HELD_OUT)
        data = self._read(hood, scores, y, train | held_out)
        return self._fit([(data, held_out)], steps)

    @with_gradients
    def update(
        self, hood: Neighborhood, scores: Array, y: Array, train: NodeSet, new: NodeSet, *,
        num_steps: int = 60,
    ) -> "StackedNMM":  # fmt: skip
        """Refit the parameters, from their present values, to all labels known by now. Each of five
        folds of them is held out given the others, which :meth:`posterior` takes as ``new``.

        :param Tensor new: mask ``(N,)`` or ids of *all* nodes whose labels are known and from
            which the classifier did not learn: the held-out nodes of :meth:`fit`, and later ones.
        """
        train, new = disjoint_masks(hood, train=train, new=new)
        data = self._read(hood, scores, y, train, new)
        data = replace(data, known=data.known | data.evidence)
        copies = [(data, part) for part in parts_of(new, FOLDS)]
        return self._fit(copies, Steps(num_steps, RATE), afresh=False)

    def _fit(
        self, copies: Sequence[tuple[GraphScores, Tensor]], steps: Steps, afresh: bool = True
    ) -> "StackedNMM":
        """Fit to held-out nodes of copies of a graph. An error leaves the module as it was."""
        copies = [(replace(data, scores=data.scores.detach()), out) for data, out in copies]
        formula, (data, _) = self.formula, copies[0]
        scores, y = (torch.cat([getattr(d, name) for d, _ in copies]) for name in ("scores", "y"))
        warn_user(scores, data.hood)
        out = torch.cat([out for _, out in copies])
        agree, silent = agreement(data), float(formula.shares.sum())
        if afresh:
            temperature = bounded_temperature(scores, y, out)
            silent = silence((scores / temperature).softmax(-1), y, out)
            if silent == 1 and len(copies) == 1:  # the scores do not know the training labels
                copies = [(data, part) for part in parts_of(data.known | data.evidence, FOLDS)]
            labels = one_hot(torch.cat([d.y[part] for d, part in copies]), scores.shape[1])
            shares = (labels.sum(0) + LABELS / scores.shape[1]) / (len(labels) + LABELS)
            t, shares = scores.new_tensor(temperature), silent * shares.to(scores)
            formula = replace(formula, temperature=t, shares=shares)
        fold, parts = Fold.of_copies(formula, copies)
        prior = formula.prior(adjusted(self.prior, agree, silent), fold.inputs)
        start = prior.mean if afresh else formula.numbers()
        formula = formula.with_values(maximise(formula.with_values(start), prior, fold, steps))
        draws, evidence = deviations(formula, prior, fold), None
        if afresh and len(labels) > 1 and not self.pool.scores_alone:
            raw = [cross_entropy(d.scores[o], d.y[o], reduction="none") for d, o in copies]
            nll, share = evidence_of(formula, prior, fold, parts, agree + silent * (1 - agree))
            evidence = Evidence({"classifier": torch.cat(raw).mean().item()} | nll, share)
        self.to(scores)
        self._set(formula.numbers())
        self.deviations.copy_(draws)
        self.updated.fill_(not afresh)
        self.evidence = evidence
        if afresh:
            self.share.fill_(evidence.share if evidence else 1.0)
        self.pool.temperature.copy_(formula.temperature)
        self.pool.shares.copy_(formula.shares)
        return self

    def mixture(
        self, hood: Neighborhood, scores: Array, y: Array | None = None,
        known: NodeSet | None = None,
    ) -> NeighborMixture:  # fmt: skip
        """The fitted distribution of all labels, with a pool given the known ones: a known node
        keeps its label, which it takes from a source of its own. Arguments as for :meth:`forward`.
        It has the gradient of the scores alone.

        :raises ValueError: also before :meth:`fit`, ``load_state_dict`` or an optimiser's step.
        """
        data = self._read(hood, scores, y, known)
        [formula] = self._formulas()
        inputs = formula.inputs(data)
        return next(formula.mixtures(data, inputs, [formula(hood, inputs)]))

    @overload
    def posterior(  # type: ignore[overload-overlap]
        self, hood: Neighborhood, scores: Array, y: Array, known: NodeSet, *,
        new: NodeSet | None = None, num_draws: Literal[0], stages: Array | None = None,
    ) -> Posterior: ...  # fmt: skip

    @overload
    def posterior(
        self, hood: Neighborhood, scores: Array, y: Array, known: NodeSet, *,
        new: NodeSet | None = None, num_draws: int = NUM_DRAWS, stages: Array | None = None,
    ) -> AveragedPosterior: ...  # fmt: skip

    @torch.no_grad()
    def posterior(
        self, hood: Neighborhood, scores: Array, y: Array, known: NodeSet, *,
        new: NodeSet | None = None, num_draws: int = NUM_DRAWS, stages: Array | None = None,
    ) -> Posterior:  # fmt: skip
        """The distribution of all labels given the known ones, averaged over draws of the
        parameters around the fit. Without the draws, intervals of counts would be too narrow.
        ``known`` may select no node. Labels that are evidence about choices have 64 draws of
        choices, as in
        :meth:`~pyro_nmm.NeighborMixture.condition`.

        :param Tensor new: mask ``(N,)`` or ids of known labels from which the classifier did not
            learn, none of them in ``known``. After :meth:`update` they belong to :math:`P` too.
        :param int num_draws: at most 16. 0 takes the fitted parameters.
        :param Tensor stages: ``(N,)`` block ``0..B - 1`` of each node, for example of
            :func:`~pyro_nmm.models.random_blocks`, in which labels are revealed to the pool. Each
            block has a joint distribution given all earlier ones. The posterior then has
            ``log_likelihood``, of all nodes of the blocks before its last one, ``sample`` and
            ``counts``. A block costs a pool, :math:`O(E C)` 20 times.
        :raises ValueError: before :meth:`fit`, for more than 16 draws, and ``stages`` without a
            pool.
        """
        check_integers(0, num_draws=num_draws)
        if num_draws > NUM_DRAWS:
            raise ValueError(f"num_draws must be at most {NUM_DRAWS}, got {num_draws}")
        data = self._read(hood, scores, y, known, new)
        formulas = self._formulas(num_draws)
        if self.updated:
            data = replace(data, known=data.known | data.evidence)
        if stages is None:
            members = posteriors(formulas, data, NUM_SAMPLES // len(formulas))
        else:
            if self.pool.scores_alone:
                raise ValueError("stages needs a pool, where labels are revealed")
            size = (hood.num_nodes,)
            block = as_expected("stages", stages, size, kind="labels", like=hood).long()
            expect_all("stages", block, block >= 0, "hold blocks 0, 1, ...")
            members = [StagedPosterior(formula, data, block) for formula in formulas]
        return AveragedPosterior(members) if num_draws else members[0]

    def _formulas(self, num_draws: int = 0) -> list[Formula]:
        """Of draws of the parameters; of the fitted ones, if there are no draws."""
        formula, draws = self.formula, self.deviations[:num_draws]
        numbers = formula.numbers()
        if numbers.float().equal(formula.prior(self.prior, numbers).mean.float()):
            cure = "call fit(...) or load_state_dict(...) first"
            raise ValueError(f"stacked has the parameters that it was made with: {cure}")
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
        return readable(self)


def _folds_of(hood: Neighborhood, scores: Any, folds: Any) -> tuple[Tensor, Tensor]:
    """Scores ``(K, N, C)``, and the fold ``(N,)`` of each node, negative for unlabelled ones."""
    check_hood(hood)
    shape, note = (("K", 2), hood.num_nodes, "C"), "where folds are given"
    scores = expect("scores", as_tensor("scores", scores, hood.device), shape, note=note)
    size, note = (hood.num_nodes,), "one fold per node"
    folds = as_expected("folds", folds, size, kind="labels", like=hood, note=note)
    numbers = folds.unique().tolist()
    if [number for number in numbers if number >= 0] != list(range(len(scores))):
        raise ValueError(
            f"folds must hold each of 0..{len(scores) - 1}, one for every row of scores, and "
            f"negative numbers for nodes without a label, got {numbers[:10]}"
        )
    return scores, folds
