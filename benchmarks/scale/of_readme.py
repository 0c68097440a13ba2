# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The README's program with priors, character for character, on other graphs and labels."""

from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch_geometric.datasets import KarateClub

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains

README = Path(__file__).parents[2] / "README.md"
#: Before this line the program loads the karate club, after the next one it fits.
MODEL, FIT = "fame = ", "guide = AutoNMM(model)"


def graph(nodes: int) -> Neighborhood:
    """The karate club's, or a random one with six links a node."""
    if nodes == 34:
        return Neighborhood(KarateClub()[0].edge_index, nodes)
    ends = torch.stack([torch.arange(nodes).repeat(3), torch.randint(nodes, (3 * nodes,))])
    ends = ends[:, ends[0] != ends[1]]
    return Neighborhood(torch.cat([ends, ends.flip(0)], 1), nodes)


def labelled(nodes: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """True parameters, the names of the program with labels from its model, and how it fits."""
    program = README.read_text().split("```python\n")[2].split("```")[0]
    imports, model, fit = (
        program[: program.index("pyro.set_rng_seed")],
        program[program.index(MODEL) : program.index(FIT)],
        program[program.index(FIT) :],
    )
    names: dict[str, Any] = {}
    exec(imports, names)
    torch.set_default_dtype(torch.float)  # as in a new process
    pyro.set_rng_seed(7)
    names["hood"] = graph(nodes)
    exec(model, names)
    pyro.set_rng_seed(seed)
    drawn = poutine.trace(names["model"]).get_trace(None).nodes
    names["y"] = drawn["y"]["value"]
    pyro.clear_param_store()
    return {name: drawn[name]["value"] for name in ("kappa", "beta")}, names, fit


def run(
    nodes: int, seed: int, steps: int = 600, options: str = ""
) -> tuple[dict[str, Tensor], AutoNMM, Any]:
    """True parameters, the fitted guide, and what the program prints, for labels from its model.
    ``steps`` stand in place of the program's number; ``options`` are of ``AutoNMM``."""
    truth, names, fit = labelled(nodes, seed)
    printed: list = []
    names |= {"print": printed.append, "Chains": Chains}
    fit = fit.replace("range(600)", f"range({steps})").replace(FIT, f"{FIT[:-1]}{options})")
    exec(fit, names)
    return truth, names["guide"], printed[0]


def draws_of(guide: AutoNMM, labels: Tensor) -> dict[str, Tensor]:
    """A thousand draws of each parameter from a guide that was fitted."""
    with torch.no_grad():
        draws = [guide.parents(labels) for _ in range(1000)]
    return {name: torch.stack([draw[name].flatten()[0] for draw in draws]) for name in draws[0]}
