# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""One program in NumPyro, whose samplers FieldGibbs is compared with."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

# One thread, as for the other side.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import NUTS, DiscreteHMCGibbs, HMCGibbs

numpyro.enable_x64()
#: Draws of one compiled loop, after which the time is read.
CHUNK = 50


class Labelling(NamedTuple):
    """Six sources of each node, a feature of each edge ``(N, 6)``, and labels ``(N,)``."""

    source: Array
    feature: Array
    y: Array


def parents(data: Labelling) -> tuple[Array, Array]:
    """Concentrations and logits of the choices by kappa and beta."""
    kappa = numpyro.sample("kappa", dist.Gamma(2.0, 2.0))
    logits = numpyro.sample("beta", dist.Normal(0.0, 1.0)) * data.feature
    return jnp.broadcast_to(kappa / 3, (3,)), logits


def summed(data: Labelling) -> None:
    """Choices summed out by hand, the paper's equation (2)."""
    alpha, logits = parents(data)
    with numpyro.plate("nodes", len(data.y)):
        z = numpyro.sample("z", dist.Dirichlet(alpha))
    shown = z[data.source, data.y[:, None]]
    numpyro.factor("y", jnp.log((jax.nn.softmax(logits, -1) * shown).sum(-1)).sum())


def sampled(data: Labelling, infer: dict | None = None) -> None:
    """Choices as a site, which ``infer`` may enumerate."""
    alpha, logits = parents(data)
    with numpyro.plate("nodes", len(data.y)):
        z = numpyro.sample("z", dist.Dirichlet(alpha))
        c = numpyro.sample("c", dist.Categorical(logits=logits), infer=infer or {})
        probs = z[data.source[jnp.arange(len(data.y)), c]]
        numpyro.sample("y", dist.Categorical(probs), obs=data.y)


def conditionals(data: Labelling, rng_key: Array, gibbs_sites: dict, hmc_sites: dict) -> dict:
    """Choices given label distributions, and these given choices, as a user may write them."""
    first, second = jax.random.split(rng_key)
    shown = gibbs_sites["z"][data.source, data.y[:, None]]
    c = jax.random.categorical(first, hmc_sites["beta"] * data.feature + jnp.log(shown))
    chosen = data.source[jnp.arange(len(c)), c]
    counts = jnp.zeros((len(c), 3)).at[chosen, data.y].add(1.0)
    z = jax.random.dirichlet(second, hmc_sites["kappa"] / 3 + counts)
    z = jnp.clip(z, 1e-30)  # the logarithm of a label distribution must be finite
    return {"c": c, "z": z / z.sum(-1, keepdims=True)}


ENUMERATED = partial(sampled, infer={"enumerate": "parallel"})
SAMPLERS: dict[str, Callable] = {
    "NUTS, choices summed by hand": lambda data: NUTS(summed),
    "NUTS, choices enumerated": lambda data: NUTS(ENUMERATED),
    "DiscreteHMCGibbs": lambda data: DiscreteHMCGibbs(NUTS(sampled)),
    "HMCGibbs, conditionals by hand": lambda data: HMCGibbs(
        NUTS(sampled), partial(conditionals, data), ["c", "z"]
    ),
}


def chain(
    sampler: str, values: tuple, seed: int, num_samples: int, warmup: int, limit: float, cache: dict
) -> tuple[dict[str, np.ndarray], float, float]:
    """Draws of a chain, CPU seconds of the draws, and with compilation and warm-up."""
    start = time.process_time()
    data = Labelling(*map(jnp.asarray, values))
    # A chain after the first has the kernel and the code of the first.
    kernel = cache.setdefault("kernel", SAMPLERS[sampler](data))
    state = kernel.init(jax.random.PRNGKey(seed), warmup, None, (data,), {})
    if "run" not in cache:
        constrained = kernel.postprocess_fn((data,), {})

        def step(state, _):
            state = kernel.sample(state, (data,), {})
            found = constrained(getattr(state, kernel.sample_field))
            return state, {name: found[name] for name in ("kappa", "beta")}

        size = min(CHUNK, num_samples)
        cache["run"] = jax.jit(lambda s: jax.lax.scan(step, s, None, size)).lower(state).compile()
    draws, begin = [], None
    while (taken := time.process_time()) - start < limit:
        if len(draws) * CHUNK == warmup:
            begin = taken
        if len(draws) * CHUNK >= warmup + num_samples:
            break
        state, found = cache["run"](state)
        draws.append(jax.tree.map(np.asarray, found))
    kept = draws[warmup // CHUNK :]
    end = time.process_time()
    begin = begin or end
    values = {name: np.concatenate([d[name] for d in kept] or [[]]) for name in ("kappa", "beta")}
    return values, end - begin, end - start
