# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Results of Pyro as trees that ArviZ reads."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.autoname import name_count, scope
from pyro.infer import MCMC, NUTS, Predictive

from pyro_nmm import Neighborhood
from pyro_nmm.guides import FieldGibbs, to_datatree
from pyro_nmm.models import nmm, nmm_counts

arviz_base = pytest.importorskip("arviz_base")
arviz_stats = pytest.importorskip("arviz_stats")
GRID = Neighborhood.grid(2, 2)
HOOD, Y = Neighborhood.grid(3, 3), torch.tensor([0, 0, 1, 0, 0, 1, 1, 1, 1])
KNOWN = torch.arange(9) != 4
FEW = pytest.mark.filterwarnings(  # few draws; and calls of pandas by arviz-stats
    "ignore:Estimated shape parameter of Pareto", "ignore:The inplace keyword in DataFrame"
)
X = torch.tensor([[0.3, -0.1], [1.2, 0.4], [-0.5, 0.8]])


def plain(x):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("place", len(x)):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.deterministic("double", 2 * slope, event_dim=1)
        pyro.sample("x", dist.Normal(loc + slope, 1.0).to_event(1), obs=x)


def field(y):
    kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    alpha = kappa[..., None, None] * torch.full((9, 2), 0.5)
    nmm(HOOD, alpha, torch.zeros(HOOD.num_edges), y, KNOWN, collapsed=True)


def run(kernel, *args, num_chains=1, save=()):
    pyro.set_rng_seed(0)
    mcmc = MCMC(kernel, 60, 30, num_chains=num_chains, disable_progbar=True)
    kernel.save_params = [*save]
    mcmc.run(*args)
    return mcmc


@FEW
def test_a_program_without_a_field():
    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(plain), 60, 30, disable_progbar=True)
    mcmc.run(X)
    draws = mcmc.get_samples()
    more = Predictive(plain, draws)(X)
    tree = to_datatree(mcmc, plain, X, log_likelihood=True, posterior_predictive=more,
                       coords={"place": ["a", "b", "c"]})  # fmt: skip
    assert set(tree.children) == {
        "posterior", "sample_stats", "observed_data", "posterior_predictive", "log_likelihood",
    }  # fmt: skip
    assert dict(tree.posterior.slope.sizes) == {
        "chain": 1, "draw": 60, "place": 3, "slope_dim_1": 2,
    }  # fmt: skip
    assert tree.posterior.place.values.tolist() == ["a", "b", "c"]
    assert torch.equal(torch.as_tensor(tree.observed_data.x.values), X)
    assert set(tree.observed_data.data_vars) == set(tree.log_likelihood.data_vars) == {"x"}
    loc, slope = draws["loc"][7], draws["slope"][7]
    exact = dist.Normal(loc + slope, 1.0).log_prob(X)
    torch.testing.assert_close(torch.as_tensor(tree.log_likelihood.x.values[0, 7]), exact)
    assert arviz_stats.summary(tree, var_names=["loc"]).shape[0] == 1
    assert arviz_stats.loo(tree).n_data_points == 6
    assert len(arviz_stats.compare({"one": tree, "same": tree})) == 2


@FEW
def test_chains_of_a_field():
    """Two chains; coordinates are node ids, and a label's entry is given all others."""
    chains = [run(FieldGibbs(field), Y, save=["kappa", "c"]) for _ in range(2)]
    samples = [chain.get_samples() for chain in chains]
    mcmc = run(FieldGibbs(field), Y, save=["kappa", "c"])
    mcmc._samples = {k: torch.stack([s[k] for s in samples]) for k in samples[0]}
    mcmc._diagnostics = [chain._diagnostics[0] for chain in chains]
    tree = to_datatree(mcmc, field, Y, log_likelihood=True)
    nodes = [0, 1, 2, 3, 5, 6, 7, 8]
    assert tree.posterior.c.dims == ("chain", "draw", "node")
    assert tree.posterior.node.values.tolist() == nodes
    assert tree.sample_stats.lp.shape == tree.sample_stats.diverging.shape == (2, 60)
    assert tree.log_likelihood.y.shape == (2, 60, 8)
    counts = torch.full((9, 2), 0.5) * samples[1]["kappa"][3]
    c = samples[1]["c"][3]
    for choice, node in zip(c[1:], nodes[1:], strict=True):
        counts[choice, Y[node]] += 1
    sources = HOOD.source[HOOD.ptr[0] : HOOD.ptr[1]]
    share = (counts[sources, Y[0]] / counts[sources].sum(-1)).mean()
    assert tree.log_likelihood.y.values[1, 3, 0] == pytest.approx(share.log().item(), rel=1e-5)
    arviz_stats.loo(tree)
    assert arviz_stats.summary(tree, var_names=["kappa"])["r_hat"].notna().all()


def test_draws_of_a_guide():
    """Sites of the guide alone are left out."""
    guide = pyro.infer.autoguide.AutoNormal(pyro.poutine.block(plain, hide=["x"]))
    guide(X)
    draws = Predictive(guide, num_samples=20)(X) | {"extra": torch.zeros(20)}
    tree = to_datatree(draws, plain, X)
    assert set(tree.posterior.data_vars) == {"loc", "slope"}
    assert "extra" in to_datatree(draws).posterior


WRONG = [
    (lambda: to_datatree({}), "draws has no sites"),
    (lambda: to_datatree({"a": torch.zeros(3), "b": torch.zeros(2)}), r"of \['b'\] are not 3"),
    (lambda: to_datatree({"a": torch.zeros(3)}, log_likelihood=True), "runs the model: give it"),
    (lambda: to_datatree({"kappa": torch.ones(3)}, field, Y, log_likelihood=True), 'draws of "c"'),
    (lambda: to_datatree({"a": torch.zeros(3)}, posterior_predictive={"x": torch.zeros(2)}),
     r"posterior_predictive of \['x'\] must have 3 draws"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), WRONG)
def test_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@FEW
@pytest.mark.filterwarnings("ignore:num_chains=2 is more than available_cpu")
def test_two_chains_through_a_file(tmp_path):
    """Of ``MCMC(FieldGibbs)``: summary, leave-one-out and comparison of the tree that was read."""
    pytest.importorskip("h5netcdf")
    xarray = pytest.importorskip("xarray")
    mcmc = run(FieldGibbs(field), Y, num_chains=2, save=["kappa", "c"])
    tree = to_datatree(mcmc, field, Y, log_likelihood=True)
    tree.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "draws.nc", engine="h5netcdf") as read:
        assert read.identical(tree)
        assert arviz_stats.summary(read, var_names=["kappa"]).equals(
            arviz_stats.summary(tree, var_names=["kappa"])
        )
        ours = arviz_stats.loo(read)
        assert ours.elpd == arviz_stats.loo(tree).elpd
        table = arviz_stats.compare({"one": ours, "same": ours})
        assert (table["elpd_diff"] == 0).all()


def test_log_likelihood_needs_draws_of_every_latent_site():
    counts = torch.tensor([[2, 1]] * 9)

    def units():
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
        nmm_counts(HOOD, kappa * torch.ones(9, 2), torch.zeros(HOOD.num_edges), counts)

    with pytest.raises(ValueError, match=r"needs draws of the sites \['z'\], which MCMC keeps"):
        to_datatree(run(FieldGibbs(units)), units, log_likelihood=True)
    tree = to_datatree(run(FieldGibbs(units), save=["kappa", "z"]), units, log_likelihood=True)
    assert tree.log_likelihood.y.shape == (1, 60, 9)


@pytest.mark.parametrize("order", ["mask last", "mask first"])
def test_masked_vectors_have_an_entry_for_each_element(order):
    mask = torch.tensor([True, False, True])

    def masked(x):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        each = dist.Normal(loc, 1.0).expand([3, 2])
        with pyro.plate("place", 3):
            last = each.to_event(1).mask(mask)
            fn = last if order == "mask last" else each.mask(mask[:, None]).to_event(1)
            pyro.sample("x", fn, obs=x)

    draws = {"loc": torch.tensor([0.5, -1.0])}
    tree = to_datatree(draws, masked, X, log_likelihood=True)
    found = torch.as_tensor(tree.log_likelihood.x.values)[0]
    expected = dist.Normal(draws["loc"][:, None, None], 1.0).log_prob(X) * mask[:, None]
    torch.testing.assert_close(found, expected)


def test_scopes_and_coordinates_of_all_nodes():
    observed, names = torch.tensor([True, True, False, True]), ["a", "b", "c", "d"]

    def scoped(y, counts):
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
        prior = GRID, kappa * torch.full((4, 2), 0.5), torch.zeros(GRID.num_edges)
        scope(nmm, prefix="low")(*prior, y, observed, collapsed=True)
        scope(nmm_counts, prefix="high")(*prior, counts, observed)

    given = torch.tensor([0, 1, -1, 0]), torch.ones(4, 2)
    draws = {"kappa": torch.rand(9), "high/z": torch.full((9, 4, 2), 0.5)}
    coords = {"low/node": names, "high/node": names, "high/label": ["yes", "no"]}
    tree = to_datatree(draws, scoped, *given, coords=coords)
    assert tree.posterior["high.z"].dims == ("chain", "draw", "high.source", "high.label")
    for field in ("low", "high"):
        assert tree.observed_data[f"{field}.y"][f"{field}.node"].values.tolist() == ["a", "b", "d"]
    assert tree.observed_data["high.y"].sel({"high.label": "no"}).shape == (3,)


def test_numbered_fields_have_nodes_of_their_own():
    masks = torch.tensor([[True, True, False, True], [True, False, True, True]])

    @name_count
    def two(y):
        for collapsed, observed in zip((False, True), masks, strict=True):
            prior = GRID, torch.full((4, 2), 0.5), torch.zeros(GRID.num_edges)
            nmm(*prior, y, observed, collapsed=collapsed)

    tree = to_datatree(
        {name: torch.zeros(9, 3).long() for name in ("c", "c__1")}, two, torch.ones(4).long()
    )
    for number, observed in zip(("", "__1"), masks, strict=True):
        nodes = observed.nonzero()[:, 0].tolist()
        for values in (tree.posterior[f"c{number}"], tree.observed_data[f"y{number}"]):
            assert values[f"node{number}"].values.tolist() == nodes
