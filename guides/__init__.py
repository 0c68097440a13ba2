# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro guides."""

from pyro_nmm.guides.amortized import AmortizedNMM, Consistency, SeedLoss
from pyro_nmm.guides.automatic import AutoNMM
from pyro_nmm.guides.best_state import BestState
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.checking import check_program
from pyro_nmm.guides.dglfrm import DGLFRMGuide
from pyro_nmm.guides.field import FieldGuide
from pyro_nmm.guides.fitting import fit_classifier, fit_links, fit_mixture, fit_nmm
from pyro_nmm.guides.gibbs import FieldGibbs
from pyro_nmm.guides.images import fit_images, fit_unet
from pyro_nmm.guides.mixture import MarginalGuide, MixtureGuide, density
from pyro_nmm.guides.ordered import evidence_guide, ordered_guide
from pyro_nmm.models.random_fields import mean_field

__all__ = [
    "AmortizedNMM", "AutoNMM", "BestState", "Chains", "Consistency", "DGLFRMGuide", "FieldGibbs",
    "FieldGuide", "MarginalGuide", "MixtureGuide", "SeedLoss", "check_program",
    "density", "evidence_guide", "fit_classifier", "fit_images", "fit_links", "fit_mixture",
    "fit_nmm", "fit_unet", "mean_field", "ordered_guide",
]  # fmt: skip
