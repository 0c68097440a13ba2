# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loss of a mini-batch of seed nodes."""

import functools
import warnings
from collections.abc import Sequence

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, nn
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_set, check_integers, check_positive
from pyro_nmm.datasets.batches import IN_DEGREE
from pyro_nmm.datasets.entries import entry
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import NoSites
from pyro_nmm.models.networks import Parameters
from pyro_nmm.models.nmm import nmm


class SeedLoss(nn.Module):
    r"""
    The loss of a mini-batch: the negative bound of :func:`fit_nmm` on the joint likelihood
    :math:`p(y_s)` of its seed nodes :math:`s`, a mean over the seeds.

    Other labels are marginalised exactly. The bound equals the seeds' bound in the whole graph if
    the batch has every edge into a seed, and behind these the hops of the network
    (:func:`~pyro_nmm.datasets.seed_batch`, or ``NeighborLoader`` with a first fan-out of -1). The
    sum over batches bounds a composite likelihood (Varin, Reid and Firth 2011, Statistica Sinica).

    ``DistributedDataParallel`` and Lightning may wrap the module: the loss is differentiable, and
    no parameter store is used. If gradients of several processes are averaged, give each process
    ``total``, the number of all seeds divided by the number of processes.

    >>> from torch_geometric.datasets import KarateClub
    >>> from torch_geometric.nn import GraphSAGE
    >>> from pyro_nmm.datasets import seed_batch, with_in_degree
    >>> from pyro_nmm.models import NMMNetwork
    >>> data = with_in_degree(KarateClub()[0])
    >>> labels, attention = GraphSAGE(34, 16, 2, out_channels=4), GraphSAGE(34, 16, 1)
    >>> loss = SeedLoss(NMMNetwork(labels, attention, num_classes=4))
    >>> for seeds in torch.randperm(34).split(12):
    ...     loss(seed_batch(data, seeds, num_hops=3)).backward()  # and a step of any optimizer

    Cost: the network, ``alpha`` ``(N, C)``, and :math:`O(E_s)` a particle for edges into seeds.

    :param nn.Module network: a :class:`~pyro_nmm.models.ParameterNetwork`, no layer ``cached``.
    :param inputs: names of the batch's entries that are the network's arguments, in order.
    :param int num_particles: draws of :math:`q(c \mid y)`.
    :param estimator: of :func:`~pyro_nmm.guides.ordered_guide`.
    """

    def __init__(
        self, network: nn.Module, *, inputs: Sequence[str] = ("x", "edge_index"),
        num_particles: int = 4, estimator: str | Chains = "reward_to_go",
    ) -> None:  # fmt: skip
        super().__init__()
        check_integers(1, num_particles=num_particles)
        for name, part in network.named_modules():
            if getattr(part, "cached", False):
                cure = "use cached=False, for GCN as in docs/distributed.md"
                raise ValueError(f"network.{name} is cached, which fits one graph only: {cure}")
        self.network, self.inputs, self.estimator = network, tuple(inputs), estimator
        self._elbo = Trace_ELBO(num_particles, max_plate_nesting=0, vectorize_particles=True)
        self._told = False

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, num_particles={self._elbo.num_particles}"

    def forward(
        self, batch: Data, seeds: Tensor | None = None, total: float | None = None
    ) -> Tensor:
        """
        :param Data batch: with ``edge_index`` ``(2, num_edges)``, ``y`` ``(N,)``, read at the seeds
            only, the entries of ``inputs``, and ``in_degree`` ``(N,)`` by
            :func:`~pyro_nmm.datasets.with_in_degree`, which reveals seeds without all their edges.
        :param Tensor seeds: node ids of the batch, or a mask ``(N,)``; default the first
            ``batch.batch_size`` nodes, as PyG's loaders have them.
        :param float total: divides the bound, default the number of seeds. The share of seeds among
            all labelled nodes gives an estimate of the sum over these nodes.
        :return: a number; zero for a batch without seeds.
        """
        mask = self._seeds(batch, seeds)
        if mask is None:
            # Every parameter takes part, or other processes would wait for its gradient.
            parts = [(0 * p).sum() for p in self.parameters() if p.requires_grad]
            return torch.stack(parts).sum()
        if total is not None:
            check_positive(total=total)
        edge_index = entry(batch, "edge_index")
        # The model needs the seeds' rows alone; the network sees all edges.
        hood = Neighborhood(edge_index[:, mask[edge_index[1]]], batch.num_nodes)
        self._check_whole(batch, hood, mask)
        with NoSites():
            outputs = Parameters(*self.network(hood, *(batch[name] for name in self.inputs)))
        arguments = hood, outputs.alpha, outputs.logits, entry(batch, "y"), mask
        options = {"relabel": outputs.relabel, "collapsed": True}
        model = functools.partial(nmm, *arguments, **options)
        guide = functools.partial(ordered_guide, *arguments, estimator=self.estimator, **options)
        bound = self._elbo.differentiable_loss(model, guide)
        return bound / (int(mask.sum()) if total is None else total)

    @staticmethod
    def _seeds(batch: Data, seeds: Tensor | None) -> Tensor | None:
        device = entry(batch, "edge_index").device
        if seeds is None:
            if (number := batch.get("batch_size")) is None:
                raise ValueError("batch has no batch_size, which seed_batch sets: give seeds")
            seeds = torch.arange(batch.num_nodes, device=device) < number
        mask = as_set(seeds, batch.num_nodes, device, "seeds", empty=True)
        return mask if mask.any() else None

    def _check_whole(self, batch: Data, hood: Neighborhood, mask: Tensor) -> None:
        if (whole := batch.get(IN_DEGREE)) is None:
            if not self._told:
                warnings.warn(
                    "batch has no in_degree, so missing edges into seeds would change the loss "
                    "unnoticed: load batches of with_in_degree(data)",
                    stacklevel=3,
                )
                self._told = True
            return
        loaded = hood.ptr.diff() - 1
        if (cut := mask & (loaded < whole)).any():
            node = cut.nonzero()[0].item()
            raise ValueError(
                f"seed {node} has {loaded[node].item()} of its {whole[node].item()} neighbours in "
                f"the batch ({int(cut.sum())} such seeds): the fan-out of the first hop must be -1"
            )
