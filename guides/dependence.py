# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Predictive checks of the dependence between labels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_expected
from pyro_nmm.datasets import extra
from pyro_nmm.model_arguments import check_all_rows

#: The joint p-value below which the model does not make such labels. If parameters are known, one
#: data set of a hundred is refused wrongly; one of 50 and of 200 with twice and half of it.
LEAST_P = 0.01
#: For so many labels at most there are join counts: 78 of them. Half has 21, and twice has 300.
MOST_LABELS = 12


class DependenceCheck(NamedTuple):
    """Statistics of labels beside statistics of draws; ``print`` shows a table."""

    data: dict[str, float]  #: by name
    draws: dict[str, Tensor]  #: ``(S,)`` each
    p_values: dict[str, float]  #: two-sided, of each statistic
    p_value: float  #: of the first four together

    @property
    def fits(self) -> bool:
        """Whether the model makes such labels."""
        return self.p_value >= LEAST_P

    def lines(self, number: int | None = None) -> list[str]:
        """Rows of the first statistics."""
        return [
            f"{name}: {self.data[name]:.3f}, in draws of the model {draws.mean():.3f} "
            f"± {draws.std():.3f}, p = {self.p_values[name]:.3f}"
            for name, draws in [*self.draws.items()][:number]
        ]

    def __str__(self) -> str:
        says = "makes" if self.fits else "does not make"
        ends = [f"all together: p = {self.p_value:.3f}", f"the model {says} such labels"]
        return "\n".join(self.lines() + ends)

    def plot(self, axes: Any = None) -> Any:
        """Histograms of the first four statistics of draws, with a line at the data.

        :param axes: four axes of matplotlib, default a new figure.
        :return: the axes.
        """
        if axes is None:
            plt: Any = extra("matplotlib.pyplot", "pictures")
            _, axes = plt.subplots(1, 4, figsize=(12, 2.6), layout="constrained")
        for axis, (name, draws) in zip(axes, self.draws.items(), strict=False):
            axis.hist(draws.numpy(), bins=24, color="0.75")
            axis.axvline(self.data[name], color="tab:red")
            title = f"data (line), p = {self.p_values[name]:.2g}"
            axis.set(xlabel=f"{name} in draws", yticks=[], title=title)
        return axes


def check_dependence(
    hood: Neighborhood, y: Tensor, draws: Tensor, observed: Tensor | None = None
) -> DependenceCheck:
    r"""Compare the dependence of labels with draws of a model.

    Each statistic :math:`T_k` of the labels is compared with the statistics of ``S`` draws. The
    p-value of the first four together is the share of draws, the data among them, whose farthest
    statistic is as far off as the data's:

    .. math::

        \max_{k \le 4} \frac{|T_k - \bar T_k|}{\mathrm{sd}(T_k)} .

    It is exact if the draws have the parameters of the data, and conservative if they come from the
    posterior. The other statistics say where labels differ.

    ==========================  ================================================================
    statistic                   what it is
    ==========================  ================================================================
    ``neighbours that agree``   share of edges whose two nodes have one label
    ``the commonest label``     share of nodes that have it
    ``the largest patch``       share of nodes in the largest connected set of nodes with one label
    ``patches``                 number of these sets for each node
    ``label k``                 share of nodes with label ``k``
    ``edges k-l``               join counts: share of edges between labels ``k`` and ``l``, for at
                                most 12 labels
    ==========================  ================================================================

    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> hood, y = Neighborhood.grid(8, 8), torch.arange(64) // 32
    >>> draws = dist.Categorical(torch.ones(2)).sample((200, 64))  # independent labels
    >>> check = check_dependence(hood, y, draws)
    >>> check.fits, round(check.data["neighbours that agree"], 3)
    (False, 0.895)

    :param Tensor y: ``(..., N)`` labels, never read where ``observed`` is false.
    :param Tensor draws: ``(S, ..., n)`` labels of the rows, at least 100 draws, such as
        ``Predictive(model, mcmc.get_samples())(...)["y"]``.
    :param Tensor observed: ``(N,)`` boolean mask, default all nodes.
    :return: the check. With batch dimensions its statistics are means over the batch.
        Cost: :math:`O(S E)`.
    :raises ValueError: for fewer than 100 draws, shapes that do not fit, and negative labels.
    """
    check_all_rows(hood)
    y = as_expected("y", y, ("...", hood.num_nodes), kind="labels", like=hood).long()
    rows = hood.restrict(observed)
    draws = as_expected("draws", draws, ("...", rows.num_rows), kind="labels", like=hood)
    labels = y.index_select(-1, rows.nodes).reshape(1, -1, rows.num_rows)
    if draws.dim() < 2 or len(draws) < 1 / LEAST_P or draws[0].numel() != labels.numel():
        raise ValueError(
            f"draws must be at least {1 / LEAST_P:.0f} labellings of shape {(*labels.shape[1:],)} "
            f"each, got {tuple(draws.shape)}: draw the observed labels anew, y=None in the model"
        )
    both = labels[0], *draws.reshape(len(draws), *labels.shape[1:])  # one by one, to save memory
    known = torch.cat([each.unique().long() for each in both]).unique()
    if known[0] < 0:
        raise ValueError("y and draws must hold labels from 0 on: mask nodes out with observed")
    place = torch.full((hood.num_nodes,), -1, device=hood.device)
    place[rows.nodes] = torch.arange(rows.num_rows, device=hood.device)
    edges = torch.stack([place[rows.source], rows.row])
    edges = edges[:, (edges[0] >= 0) & (edges[0] != edges[1])]
    tables = [[_statistics(edges, each.long(), known) for each in batch] for batch in both]
    names = [*tables[0][0]]
    values = torch.tensor([[[*found.values()] for found in batch] for batch in tables]).mean(1)
    spread = values.std(0)
    off = ((values - values.mean(0)).abs() / spread).where(spread > 1e-12, 0.0)[:, :4].amax(1)
    above, below = ((values >= values[0]).double().mean(0), (values <= values[0]).double().mean(0))
    each = (2 * torch.minimum(above, below)).clamp(max=1)
    return DependenceCheck(
        dict(zip(names, values[0].tolist(), strict=True)),
        dict(zip(names, values[1:].T, strict=True)),
        dict(zip(names, each.tolist(), strict=True)),
        (off >= off[0]).double().mean().item(),
    )


def _statistics(edges: Tensor, labels: Tensor, values: Tensor) -> dict[str, float]:
    labels, known = torch.searchsorted(values, labels), values.tolist()
    number, size, (first, second) = len(labels), len(known), labels[edges]
    shares = (labels.bincount(minlength=size) / number).tolist()
    found = {"the commonest label": max(shares)}
    if edges.numel():
        same = first == second
        patches = Neighborhood(edges[:, same], number).components().bincount()
        found = {
            "neighbours that agree": same.double().mean().item(),
            **found,
            "the largest patch": patches.max().item() / number,
            "patches": (patches > 0).sum().item() / number,
        }
    found |= {f"label {k}": share for k, share in zip(known, shares, strict=True)}
    if edges.numel() and size <= MOST_LABELS:
        key = torch.minimum(first, second) * size + torch.maximum(first, second)
        joins = (key.bincount(minlength=size**2) / len(key)).tolist()
        pairs = ((k, m) for k in range(size) for m in range(k, size))
        found |= {f"edges {known[k]}-{known[m]}": joins[k * size + m] for k, m in pairs}
    return found
