# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Draws, gradients and posteriors of 200 random cases, whose inputs and uniform numbers come from the
generator that NumPy froze (``RandomState``).

``golden.json`` holds one number for each quantity: the sum of its entries with fixed weights. A
change of the library that moves one of them must say why. ``python tests/core/test_golden.py``
writes the file again.
"""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture, OrderedConditional

GOLDEN = Path(__file__).parent / "golden.json"
KINDS = "labels", "permuted", "matrices", "evidence", "edge evidence"
ESTIMATORS = "reward_to_go", "no_score"
NUM_CASES = 200
NUM_UNIFORMS = 4096
#: Orders of addition, loops and tensors agree to 1e-12 here: other processors may add otherwise.
TOLERANCE = 1e-9


@contextmanager
def stored_numbers():
    """Uniform numbers are stored ones, in turn; random orders are descending ones."""
    numbers, place = torch.from_numpy(np.random.RandomState(0).rand(NUM_UNIFORMS)), 0

    def take(size):
        nonlocal place
        index = torch.arange(place, place := place + math.prod(size)) % NUM_UNIFORMS
        return numbers[index].view(size)

    def rand(*size, dtype=None, **options):
        size = size if isinstance(size[0], int) else tuple(size[0])
        return take(size).to(dtype or torch.get_default_dtype())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        patch.setattr(torch.Tensor, "uniform_", lambda tensor: tensor.copy_(take(tensor.shape)))
        patch.setattr(torch, "randperm", lambda size, **options: torch.arange(size).flip(0))
        yield


def new_case(number):
    """Inputs of one case: a graph, parameters with or without a batch, labels or evidence."""
    random, kind = np.random.RandomState(number), KINDS[number % len(KINDS)]
    n, size = 2 + random.randint(12), 2 + random.randint(3)
    shares = number // 5 % 4 == 3  # sources that are no nodes
    num_sources = 1 + random.randint(6) if shares else n
    reach = random.rand(n, num_sources) < 0.3
    reach[np.arange(n), random.randint(num_sources, size=n)] = True
    if not shares and number // 5 % 4:
        reach |= reach.T  # both directions of an edge
    edges = torch.from_numpy(np.stack(reach.nonzero()[::-1]).copy())
    hood = Neighborhood(edges, n, num_sources)
    batch = (3,) if number // 20 % 2 else ()
    scale = 3 * random.rand()
    case = {
        "hood": hood,
        "alpha": np.exp(scale * random.randn(*batch, num_sources, size)),
        "logits": scale * random.randn(*batch[: random.randint(2)], hood.num_edges),
        "y": random.randint(size, size=(*batch[: random.randint(2)], n)),
        "observed": (random.rand(n) < 0.7) | (np.arange(n) == 0),
    }
    case["order"] = random.permutation(case["observed"].nonzero()[0])
    if kind == "permuted":
        labels = np.stack([random.permutation(size) for _ in range(hood.num_edges)])
        case["relabel"] = np.eye(size)[labels]
    elif kind == "matrices":
        case["relabel"] = random.dirichlet(np.ones(size), (hood.num_edges, size))
    elif "evidence" in kind:
        rows = hood.num_edges if "edge" in kind else n
        case["evidence"] = random.randn(rows, size)
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}


def value_of(tensor):
    """One number: the sum of entries with weights between one and two."""
    flat = tensor.detach().double().flatten()
    return float((flat * (1.5 + 0.5 * torch.cos(torch.arange(len(flat))))).sum())


def answers(case, estimator):
    """Quantities of one case by name."""
    hood = case["hood"]
    alpha, logits = (case[name].requires_grad_() for name in ("alpha", "logits"))
    y, observed, order = case["y"], case["observed"], case["order"]
    relabel, evidence = case.get("relabel"), case.get("evidence")
    mix = NeighborMixture(hood, alpha, logits, relabel)
    found = {}
    given = hood, alpha, logits
    if relabel is not None:
        evidence = mix.in_order(y, observed, order).data
    if evidence is None:
        q = OrderedConditional(*given, y, observed, order, estimator)
    else:
        relabels = relabel is not None
        q = EvidenceConditional(*given, evidence, observed, order, estimator, relabels=relabels)
    hints = q.latent and not q.relabels
    with stored_numbers():
        draw = q.sample((2,))
        found["draw"] = draw
        found["log_prob"], found["terms"] = q.log_prob(draw), q.log_terms(draw)
        parts = q.score_parts(draw)
        joint = found["terms"].sum(-1) + parts.log_prob
        bound = found["terms"].sum(-1).detach()
        loss = (joint + parts.score_function * bound - parts.entropy_term).sum()
        found["alpha's gradient"], found["logits' gradient"] = torch.autograd.grad(
            loss, (alpha, logits)
        )
        if mix.batch_shape or y.dim() > 1:
            return found
        found["marginals"] = mix.marginals()
        posterior = {"num_samples": 6, "weighted": True}
        if hints:
            posteriors = {"draws": q.posterior(**posterior)}
            posteriors["chains"] = q.posterior(3, num_sweeps=4)
            found["likelihood"] = q.log_likelihood(4)
        else:
            posteriors = {"draws": mix.condition(y, observed, **posterior)}
            found["likelihood"] = mix.log_likelihood(y, observed, None, 4, order=hood.nodes)
        for name, posterior in posteriors.items():
            found[name] = posterior.marginals()
            pair = torch.tensor([[0], [hood.num_nodes - 1]])
            found[f"{name}, pairs"] = posterior.pairwise(pair)
            found[f"{name}, joint"] = posterior.log_marginal(pair[:1, 0], y[:1])
    return found


def quantities(numbers):
    for number in numbers:
        for name, value in answers(new_case(number), ESTIMATORS[number % 3 % 2]).items():
            yield f"{number}/{name}", value_of(value)


@pytest.mark.parametrize("part", range(4))
def test_draws_gradients_and_posteriors_are_those_of_before(part, kernels):
    numbers, swept = range(part, NUM_CASES, 4), set()
    stored, found = json.loads(GOLDEN.read_text()), dict(quantities(numbers))
    if kernels != "loops":  # sweeps take other uniform numbers there, and leave others to the next
        cases = {name.partition("/")[0] for name in found if "/chains" in name}
        swept = {name for name in found if "/chains" in name}
        swept |= {f"{case}/likelihood" for case in cases}
    wanted = {name: value for name, value in stored.items() if int(name.split("/")[0]) in numbers}
    assert found.keys() == wanted.keys()
    found, wanted = ({n: v for n, v in each.items() if n not in swept} for each in (found, wanted))
    assert found == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


if __name__ == "__main__":
    torch.set_default_dtype(torch.double)
    torch.set_num_threads(1)
    lines = ",\n".join(
        f'"{name}": {json.dumps(value)}' for name, value in quantities(range(NUM_CASES))
    )
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
