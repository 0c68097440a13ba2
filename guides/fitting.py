# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loop of every fit, and what it fits."""

from pyro_nmm.fitting import Run, Steps, load_checkpoint, save_checkpoint, train
from pyro_nmm.guides.amortized import NodeRun, fit_classifier, fit_nmm
from pyro_nmm.guides.dglfrm import fit_links
from pyro_nmm.guides.field import fit_mixture

__all__ = [
    "NodeRun", "Run", "Steps", "fit_classifier", "fit_links", "fit_mixture", "fit_nmm",
    "load_checkpoint", "save_checkpoint", "train",
]  # fmt: skip
