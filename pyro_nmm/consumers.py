# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Which of Pyro's algorithms runs a program: some weigh draws by their densities."""

import os
import sys
from collections.abc import Callable

from pyro.infer import (
    Importance,
    RenyiELBO,
    ReweightedWakeSleep,
    SMCFilter,
    TraceTailAdaptive_ELBO,
    TraceTMC_ELBO,
    WeighedPredictive,
    predictive,
)
from pyro.infer.importance import vectorized_importance_weights

#: Pyro's classes and functions that weigh draws.
WEIGHING = (
    Importance,
    RenyiELBO,
    ReweightedWakeSleep,
    SMCFilter,
    TraceTMC_ELBO,
    TraceTailAdaptive_ELBO,
    WeighedPredictive,
    vectorized_importance_weights,
)
#: The function that both of Pyro's classes of predictions call.
PREDICTIVE = (predictive._predictive,)
#: The folder of Pyro's algorithms.
INFER = os.path.dirname(predictive.__file__)


def consumer(*algorithms: type | Callable) -> str | None:
    """The name of the innermost of these algorithms that is running; no handler shows it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(INFER):
            owner = frame.f_locals.get("self")
            for each in algorithms:
                if isinstance(each, type) and isinstance(owner, each):
                    return type(owner).__name__
                if code is getattr(each, "__code__", None):
                    return code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return None
