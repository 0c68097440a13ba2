# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family for any Pyro program."""

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import ImproperUniform
from torch import Size, Tensor, nn
from torch.distributions import constraints

from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture
from pyro_nmm.arguments import check_integers
from pyro_nmm.guides.shared_forward import Family, SharedForward, as_order
from pyro_nmm.models.random_fields import RandomField
from pyro_nmm.ops.score_costs import others_mean
from pyro_nmm.provenance import untracked


class MarginalGuide(SharedForward[Family]):
    r"""A guide for any Pyro program by a family whose choices are summed out, such as
    :class:`~pyro_nmm.MembershipMixture`. The loss of ``Trace_ELBO`` is an estimate of
    :math:`\mathrm{KL}(p(s) \,\|\, p^*(s) / Z) - \log Z`.

    >>> from pyro.distributions import Normal
    >>> from pyro.infer import Trace_ELBO
    >>> from pyro_nmm import MembershipMixture
    >>> class Free(nn.Module):
    ...     def forward(self, hood):
    ...         return torch.zeros(4, 2), torch.zeros(hood.num_edges)
    >>> def target():
    ...     pyro.sample("s", Normal(0.0, 2.0).expand([4, 2]).to_event(2))
    >>> pair = MarginalGuide(Neighborhood.grid(2, 2), Free(), target, MembershipMixture, site="s")
    >>> Trace_ELBO(num_particles=64).loss(pair.model, pair.guide) > 0  # KL of 8 log-odds ``(N, K)``
    True

    Parameters as for :class:`MixtureGuide`, and

    :param family: from ``(hood, *outputs)`` of the network to the distribution.
    :raises ValueError: in a call for a network with sample sites, and another one of this ``name``
        in Pyro's store.
    """

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        target: Callable[..., Any],
        family: Callable[..., Family],
        *,
        site: str = "y",
        name: str = "mixture",
    ) -> None:
        super().__init__(hood, network, name, family)
        self.target, self.site = target, site

    def guide(self, *inputs: Any) -> Tensor:
        """The sites of the family; returns its values."""
        return self.draw(*self.give(inputs))

    def draw(self, parameters: Any, logits: Tensor, *relabel: Tensor) -> Tensor:
        """The site of the family, for an output of the network."""
        return pyro.sample(self.site, self.family(self.hood, parameters, logits, *relabel))

    def model(self, *inputs: Any) -> Any:
        """The target."""
        return self.target(*inputs)


class MixtureGuide(MarginalGuide[NeighborMixture]):
    r"""The NMM as a variational family: a guide for any Pyro program with a discrete label for
    every node, section 4 of the paper.

    .. math::

        \mathrm{KL}\big(p(y) \,\|\, p^*(y) / Z\big) - \log Z
            \le E_{p(y, c)} \left[ \log \frac{p(y, c)}{q(c \mid y)} - \log p^*(y) \right]

    The guide draws choices ``c`` and labels ``y`` from the NMM. The model is the target, with the
    choices of :class:`~pyro_nmm.OrderedConditional` added. The loss of Pyro's ``TraceGraph_ELBO``
    is the right-hand side, the paper's equation (10). The gradient is a score: for a Markov random
    field :class:`FieldGuide` has far less noise, and for an emission in closed form
    :func:`evidence_guide` needs no parameters.

    The user guides the other sites of the program. Here these are the choices of an ``nmm``, which
    needs a scope, because ``c`` is the name of this guide's own choices:

    >>> from pyro.contrib.autoname import scope
    >>> from pyro.distributions import Categorical
    >>> from pyro.infer import TraceGraph_ELBO
    >>> from pyro_nmm.guides import ordered_guide
    >>> from pyro_nmm.models import FreeNMM, nmm
    >>> hood = Neighborhood.grid(3, 3)
    >>> prior = hood, torch.ones(9, 2), torch.zeros(hood.num_edges)
    >>> def target():
    ...     with scope(prefix="prior"):
    ...         y = nmm(*prior, collapsed=True)
    ...     pyro.sample("w", Categorical(torch.eye(2)[y] + 0.1).to_event(1), obs=torch.ones(9))
    >>> family = MixtureGuide(hood, FreeNMM(hood, num_classes=2), target, site="prior/y")
    >>> def guide():
    ...     y = family.guide()
    ...     with scope(prefix="prior"):
    ...         ordered_guide(*prior, y, collapsed=True)
    >>> TraceGraph_ELBO(num_particles=8, vectorize_particles=True).loss(family.model, guide) > 0
    True
    >>> family.mixture().marginals().shape  # (N, C)
    torch.Size([9, 2])

    Vectorized particles are baselines of each other. Use ``TraceGraph_ELBO`` or ``Trace_ELBO``:
    with other losses, such as ``RenyiELBO``, the baseline biases the gradient. Cost of a particle:
    the network, the target, and :math:`O(E \log E)`.

    :param nn.Module network: to :class:`~pyro_nmm.models.Parameters`, called with the inputs of
        ``model`` and ``guide``, for edges that keep labels.
    :param target: a Pyro program with the same inputs, or the :func:`density` of a function.
    :param Tensor order: ``(N,)`` permutation of the node ids, in which :math:`q(c \mid y)` draws.
        Default: one random order, which is tighter than a new one a step.
    :param str site: name of the program's labels, of event shape ``(N,)``, with its scopes.
    :param str name: of the network's parameters in Pyro's store.
    :raises ValueError: for a Markov random field; in a call for edges that relabel, and a target
        without one event of labels, or with fewer of them.
    """

    order: Tensor

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        target: Callable[..., Any],
        *,
        order: Tensor | None = None,
        site: str = "y",
        name: str = "mixture",
    ) -> None:
        if isinstance(target, RandomField):
            raise ValueError(f"target is a {type(target).__name__}, no program: use FieldGuide")
        super().__init__(hood, network, target, NeighborMixture, site=site, name=name)
        self.register_buffer("order", as_order(hood, order))

    def draw(self, parameters: Any, logits: Tensor, *relabel: Tensor) -> Tensor:
        """Sites ``c`` and ``y``, for an output of the network."""
        family = self.family(self.hood, parameters, logits, *relabel)
        if family.relabel is not None:
            cure = "leave relabel out, or guide the program by hand"
            raise ValueError(
                f"network must be of edges that keep labels, but edges relabel: {cure}"
            )
        c = pyro.sample("c", NeighborChoice(self.hood, logits))
        return pyro.sample(self.site, family.given(c))

    def model(self, *inputs: Any) -> Any:
        """The target, with site ``c``."""
        family = self.family(self.hood, *self.take(inputs))
        with poutine.trace() as tracer:
            result = self.target(*inputs)
            labels = self._labels(tracer.trace)
            y, support = labels["value"], labels["fn"].support
            if labels["fn"].event_dim == 0:
                raise ValueError(
                    f"target has single labels at site {self.site!r}: make the nodes one event, by "
                    f".to_event(1) instead of a plate"
                )
            if not support.check(untracked(y)[0][0]).all():
                raise ValueError(
                    f"network gives {int(y.max()) + 1} or more labels, but target's site "
                    f"{self.site!r} takes {support}: give both the same num_classes"
                )
            with poutine.trace() as choices:
                c = pyro.sample("c", family.choices(y, order=self.order))
        (site,) = (node for node in choices.trace.nodes.values() if node["type"] == "sample")
        if (drawn := str(site["name"]).removesuffix("c") + self.site) != labels["name"]:
            where = f"labels at {labels['name']!r}, but the guide draws {drawn!r}"
            raise ValueError(f"target has {where}: name them in full, such as site='prior/y'")
        pyro.factor("baseline", self._baseline(tracer.trace, site, family, c, y))
        return result

    def _labels(self, trace: poutine.Trace) -> Any:
        """The target's site of labels, whose prefix is the shortest: the prefix of outer scopes."""
        names = [name for name, node in trace.nodes.items() if node["type"] == "sample"]
        ends = [name for name in names if f"/{name}".endswith(f"/{self.site}")]
        depth = min((name.count("/") for name in ends), default=0)
        labels = [name for name in ends if name.count("/") == depth]
        if len(labels) != 1:
            must = f"one site {self.site!r} for the labels, with its scopes in site="
            raise ValueError(f"target must have {must}; it has {names}")
        name = labels[0]
        if f"{name.removesuffix(self.site)}c" in names:
            raise ValueError(
                f"target has a site 'c' beside its labels {name!r}, the name of the guide's "
                f"choices: run that nmm under a scope, with scope(prefix='prior'), as well as an "
                f"ordered_guide for it, and name its labels in full, site='prior/y'"
            )
        return trace.nodes[name]

    def _baseline(
        self, trace: poutine.Trace, site: Any, family: Any, c: Tensor, y: Tensor
    ) -> Tensor:
        """Zero, with a derivative that subtracts the other particles' mean from each one's cost."""
        frames = {f.dim: f.name for f in site["cond_indep_stack"] if f.vectorized}
        dims = [dim for dim, name in frames.items() if name == "num_particles_vectorized"]
        if not dims or not torch.is_grad_enabled():
            return family.logits.new_zeros(())
        (c, y), _ = untracked(c, y)
        parts = NeighborChoice(self.hood, family.logits).log_prob(c), family.given(c).log_prob(y)
        score = sum(untracked(*parts)[0])
        with torch.no_grad():
            trace.compute_log_prob()
            sites = [s["log_prob"] for s in trace.nodes.values() if s["type"] == "sample"]
            # Costs come with their scales, scores without; a plate's elements have their own.
            costs = -score * site["scale"]
            for log_prob in untracked(*sites)[0]:
                outside = [d for d in range(-log_prob.dim(), 0) if d not in frames]
                costs = costs + (log_prob.sum(outside, keepdim=True) if outside else log_prob)
            baseline = others_mean(costs, dims)
        if baseline is None:
            return family.logits.new_zeros(())
        # The factor is scaled like all other sites.
        return -(score - score.detach()) * baseline / site["scale"]


def density(
    log_density: Callable[..., Tensor], num_nodes: int, num_classes: int, site: str = "y"
) -> Callable[..., Tensor]:
    r"""A function :math:`\log p^*` as a Pyro program ``(*inputs)`` with a site ``y``, a target of
    :class:`MixtureGuide`.

    >>> program = density(lambda y: -y.sum(-1).float(), num_nodes=3, num_classes=2)

    :param log_density: ``(y, *inputs)`` with ``y`` of shape ``(..., N)`` to ``(...)``, in nats.
    :raises ValueError: for a size below one, and, in a call, a result of another shape.
    """
    check_integers(1, num_nodes=num_nodes, num_classes=num_classes)
    support = constraints.independent(constraints.integer_interval(0, num_classes - 1), 1)

    def program(*inputs) -> Tensor:
        y = pyro.sample(site, ImproperUniform(support, Size(), Size([num_nodes])))
        log_prob = log_density(y, *inputs)
        if log_prob.shape != y.shape[:-1]:
            want, got = tuple(y.shape[:-1]), tuple(log_prob.shape)
            raise ValueError(f"log_density must return shape {want}, one a labelling, got {got}")
        pyro.factor("log_density", log_prob)
        return y

    return program
