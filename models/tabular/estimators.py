# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities of scikit-learn's classifiers, checked."""

from typing import Any

import numpy as np


def with_probabilities(name: str, fitted: Any) -> Any:
    """A fitted classifier. Before its fit, a stack or a search may not know that it has them."""
    if not hasattr(fitted, "predict_proba"):
        cure = "wrap it in CalibratedClassifierCV"
        raise ValueError(f"{name} must have predict_proba, got {type(fitted).__name__}: {cure}")
    return fitted


def probabilities_of(name: str, fitted: Any, X: Any) -> np.ndarray:
    """``(n, C)``: probabilities of the classes that a classifier was fitted to."""
    probs = np.asarray(fitted.predict_proba(X))
    wrong = ~np.isfinite(probs).all(-1)
    if wrong.any():
        raise ValueError(
            f"{name} gives {int(wrong.sum())} of {len(probs)} rows probabilities that are not "
            f"finite, first row {int(wrong.argmax())}: scale its inputs, or take another classifier"
        )
    return probs
