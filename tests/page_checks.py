# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What each page claims, of the names that its snippets leave behind and of what they print."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from documents import ROOT

from pyro_nmm import Neighborhood, NeighborMixture

#: By the name of the page.
CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {}


def of(name):
    def register(check):
        CHECKS[name] = check
        return check

    return register


@of("pyro.md")
def compatibility(found, printed):
    store, truth = pyro.get_param_store(), found["truth"]
    assert sum(found["losses"][-20:]) < sum(found["losses"][:20])
    assert store["means"][0] < -0.4
    assert store["means"][1] > 0.4
    marginals, labelled = found["marginals"], found["labelled"]
    torch.testing.assert_close(marginals[labelled].argmax(-1), truth[labelled])
    assert (marginals.argmax(-1) == truth).float().mean() > 0.8
    assert found["rest"].shape == (1000, 12)
    assert found["ones"].shape == (12,)
    mix = NeighborMixture(found["hood"], found["alpha"], found["logits"])
    exact = mix.condition(truth, labelled, num_samples=4000, weighted=True).marginals()
    assert (found["ones"] - exact[~labelled, 1]).abs().max() < 0.15


@of("distributed.md")
def distributed(found, printed):
    data, network, batch = found["data"], found["network"], found["batch"]
    hood = Neighborhood(data.edge_index, 34)
    with torch.no_grad():
        whole = NeighborMixture(hood, *network(hood, data.x, data.edge_index)).marginals()
    torch.testing.assert_close(found["marginals"], whole[batch.n_id[: batch.batch_size]])
    assert (whole.argmax(-1) == data.y).double().mean() > 0.9


@of("links.md")
def links(found, printed):
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", printed).groups())
    assert last < first
    pair, edges, x, test = found["pair"], found["train"].edge_index, found["data"].x, found["test"]
    assert found["logits"].shape == (2 * int(test.edge_label.sum()),)
    assert found["strength"].shape == (34, 8)
    # A handful of hidden links says nothing; those that were fitted must be likelier than others.
    known, apart = pair.link_logits(edges, edges, x), found["logits"][test.edge_label == 0]
    assert known.mean() > apart.mean() + 0.2


def patches(hood, chosen):
    """Number of connected sets of the chosen nodes."""
    edges = torch.stack([hood.source, hood.target])[:, chosen[hood.source] & chosen[hood.target]]
    return len(Neighborhood(edges, hood.num_nodes).components()[chosen].unique())


@of("maps.md")
def maps(found, printed):
    kappa, stay, inside = map(float, re.search(
        r"kappa ([\d.]+), stay ([\d.]+)\n.*intervals hold ([\d.]+) of", printed, re.DOTALL
    ).groups())  # fmt: skip
    assert 0.3 < kappa < 0.8
    assert 0 < stay < 0.7
    assert 0.75 <= inside <= 1
    check, told = found["check"], (ROOT / "docs" / "maps.md").read_text()
    assert check.fits
    assert check.p_values["edges 0-2"] < 0.03
    quoted = re.findall(r"^([\w ]+-?\d?): ([\d.]+), in draws of the model ([\d.]+) ±", told, re.M)
    assert [name for name, *_ in quoted] == [*check.data]
    for name, data, mean in quoted:
        assert float(data) == pytest.approx(check.data[name], abs=6e-4)
        assert float(mean) == pytest.approx(check.draws[name].mean().item(), abs=0.02)
    assert len(found["panels"]) == 4
    hood, first, last = found["hood"], found["drawn"][0], found["drawn"][500]
    high = [patches(hood, labels == 2) for labels in (found["y"], first, last)]
    assert high[0] == 1
    assert min(high[1:]) > 1


@of("arviz.md")
def arviz(found, printed):
    dependent, alone = map(float, re.search(r"(-[\d.]+) (-[\d.]+)$", printed.strip()).groups())
    assert alone == pytest.approx(34 * math.log(0.25), abs=0.1)
    assert abs(dependent + 24.7) < 1.0
    assert dict(found["tree"].log_likelihood.sizes) == {"chain": 1, "draw": 1000, "place": 100}
