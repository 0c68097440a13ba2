# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Links by inferred community, the bound over steps, and members of the communities."""

from __future__ import annotations

import textwrap

import torch
from matplotlib.patches import Rectangle
from torch import Tensor
from torch_geometric.utils import to_dense_adj

from drawing import BLUE, VERMILION, canvas, save


def draw(output, data, names: list[str], community: Tensor, fit: Tensor, curves: dict) -> None:
    figure, axes = canvas(1, 3, (13, 5), font=11)
    order = (2 * community - fit / fit.abs().max()).argsort()
    matrix = to_dense_adj(data.edge_index.cpu(), max_num_nodes=data.num_nodes)[0]
    axes[0].imshow(matrix[order][:, order], cmap="gray_r", interpolation="nearest")
    sizes, start = community.bincount().tolist(), 0
    for number, size in enumerate(sizes):
        box = Rectangle((start - 0.5, start - 0.5), size, size, fill=False, ec="#E69F00", lw=1.5)
        axes[0].add_patch(box)
        axes[0].text(start + size, start, f"{number + 1}", color="#B45F06", weight="bold", va="top")
        start += size
    axes[0].set(title="Links, sorted by community", xlabel="node", ylabel="node")
    for (name, curve), color in zip(curves.items(), (VERMILION, BLUE), strict=False):
        smooth = -torch.tensor(curve).unfold(0, min(20, len(curve)), 1).mean(-1)
        axes[1].plot(range(len(curve) - len(smooth), len(curve)), smooth, color=color,
                     label=name)  # fmt: skip
    axes[1].set(title="Lower bound, mean of 20 steps", xlabel="step",
                ylabel="nats a pair of nodes")  # fmt: skip
    axes[1].legend(frameon=False, loc="lower right")
    axes[1].set_ylim(bottom=-torch.tensor(list(curves.values())).quantile(0.9).item())
    axes[2].axis("off")
    axes[2].set_title("Communities: typical members", loc="left")
    for number, size in enumerate(sizes):
        members = [names[i] for i in order.tolist() if community[i] == number][:9]
        more = f" and {size - len(members)} more" * (size > len(members))
        text = textwrap.fill(f"{number + 1}: {', '.join(members)}{more}", 52)
        axes[2].text(0, 1 - number / len(sizes), text, va="top", transform=axes[2].transAxes)
    save(figure, output)
