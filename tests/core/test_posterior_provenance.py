# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Posteriors below a discrete parent. A posterior keeps no provenance, so it refuses values that have
any; what its queries return keeps the provenance of their arguments.
"""

import pytest
import torch
from graphs import house
from pyro.ops.provenance import get_provenance, track_provenance

from pyro_nmm import AveragedPosterior, NeighborMixture

HOOD = house()
ALPHA, LOGITS = torch.linspace(0.5, 2, 10).view(5, 2), torch.linspace(-1, 1, HOOD.num_edges)
Y, KNOWN = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([True, False, True, False, False])
EVIDENCE, TWO = torch.linspace(-2, 0, 10).view(5, 2), torch.tensor([1, 3])
KEEP = torch.eye(2).expand(HOOD.num_edges, 2, 2)
MIX = NeighborMixture(HOOD, ALPHA, LOGITS)


def below(value):
    """A value that depends on the site ``x``."""
    return track_provenance(value, frozenset("x"))


#: What a posterior is made of.
REFUSED = {
    "alpha": lambda: NeighborMixture(HOOD, below(ALPHA), LOGITS).prior(),
    "logits": lambda: NeighborMixture(HOOD, ALPHA, below(LOGITS)).condition(Y, KNOWN, 5),
    "relabel": lambda: NeighborMixture(HOOD, ALPHA, LOGITS, below(KEEP)).condition(Y, KNOWN, 5),
    "y": lambda: MIX.condition(below(Y), KNOWN),
    "observed": lambda: MIX.condition(Y, below(KNOWN)),
    "more labels": lambda: MIX.condition(Y, KNOWN).condition(below(Y)),
    "more labels of all": lambda: AveragedPosterior([MIX.prior(5)] * 2).condition(below(Y)),
    "evidence": lambda: MIX.latents(below(EVIDENCE)).posterior(5),
    "evidence of": lambda: MIX.latents(EVIDENCE, below(KNOWN)).posterior(),
}
#: Queries of a posterior whose arguments depend on ``x``.
QUERIES = {
    "sample": lambda p: p.sample((3,), below(TWO)),
    "predict": lambda p: p.predict(below(TWO)),
    "joint": lambda p: p.predict(below(TWO), "joint"),
    "pairwise": lambda p: p.pairwise(below(TWO[:, None])),
    "counts": lambda p: p.counts([below(TWO), [0]], label=1, num_samples=5),
    "log_marginal, nodes": lambda p: p.log_marginal(below(TWO), TWO.new_tensor([0, 1])),
    "log_marginal, labels": lambda p: p.log_marginal(TWO, below(TWO.new_tensor([0, 1]))),
    "log_likelihood": lambda p: p.log_likelihood(below(Y), ~KNOWN),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_of_a_site_are_refused(name):
    with pytest.raises(ValueError, match="depend on, here x, and TraceGraph_ELBO"):
        REFUSED[name]()


@pytest.mark.parametrize("name", QUERIES)
def test_queries_keep_the_provenance_of_their_arguments(name):
    posterior = MIX.condition(Y, KNOWN)
    for each in (posterior, AveragedPosterior([posterior] * 2)):
        assert get_provenance(QUERIES[name](each)) == {"x"}
