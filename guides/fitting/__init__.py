# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loops that fit."""

from pyro_nmm.guides.fitting.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.guides.fitting.field import fit_mixture
from pyro_nmm.guides.fitting.images import fit_images, fit_unet
from pyro_nmm.guides.fitting.links import fit_links
from pyro_nmm.guides.fitting.loop import train, unvalidated
from pyro_nmm.guides.fitting.nodes import fit_classifier, fit_nmm

__all__ = [
    "fit_classifier",
    "fit_images",
    "fit_links",
    "fit_mixture",
    "fit_nmm",
    "fit_unet",
    "load_checkpoint",
    "save_checkpoint",
    "train",
    "unvalidated",
]
