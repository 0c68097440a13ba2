# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains of FieldGibbs and, where it is installed, of NumPyro."""

from importlib.util import find_spec

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from benchmarks.scale import inference
from benchmarks.shared.records import read
from pyro_nmm.models import nmm


@pytest.mark.filterwarnings("ignore:.*effective draws")
def test_chains_of_both_sides_store_rows(tmp_path):
    samplers = [*inference.BESIDE, *inference.PEERS[: bool(find_spec("numpyro"))]]
    path = tmp_path / "rows.jsonl"
    given = ["numpyro", "--repeats", "1", "--warmup", "50", "--results", str(path)]
    given += ["--num-samples", "50", "--samplers", *samplers]
    inference.main([*given, "--sizes", "12"])
    inference.main([*given, "--sizes", "13", "--limit", "0"])
    rows = read(path)
    assert len(rows) == 2 * len(samplers)
    for row in rows:
        in_time = row["nodes"] == 12
        assert row["samples"] == 50 * in_time
        assert (row["kappa"]["effective"] > 0) == ("mean" in row["beta"]) == in_time
        assert (row["whole"] > row["seconds"] > 0) == in_time
    assert inference.beside_numpyro({"inference": rows}).count("\n| 12 |") == len(samplers)


def test_numpyro_has_the_same_density():
    pytest.importorskip("numpyro")
    from numpyro.infer.util import log_density

    from benchmarks.scale import peers

    hood, feature, y = inference.attended(12, 0)
    values = {"kappa": torch.tensor(0.7), "beta": torch.tensor(-1.3)}
    values["z"] = dist.Dirichlet(torch.ones(12, 3)).sample()

    def model():
        kappa = pyro.sample("kappa", dist.Gamma(2.0, 2.0))
        logits = pyro.sample("beta", dist.Normal(0.0, 1.0)) * feature
        nmm(hood, kappa * torch.full((12, 3), 1 / 3), logits, y, choices="summed")

    expected = poutine.trace(poutine.condition(model, values)).get_trace().log_prob_sum()
    table = hood.source.view(-1, 6).numpy(), feature.view(-1, 6).numpy(), y.numpy()
    found = {name: value.numpy() for name, value in values.items()}
    density, _ = log_density(peers.summed, (peers.Labelling(*table),), {}, found)
    assert float(density) == pytest.approx(expected.item(), abs=1e-3)
