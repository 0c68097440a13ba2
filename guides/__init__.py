# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro guides."""

from pyro_nmm.guides.amortized import AmortizedNMM, fit_nmm
from pyro_nmm.guides.automatic import AutoNMM
from pyro_nmm.guides.best_state import BestState
from pyro_nmm.guides.calibration import calibration_ranks
from pyro_nmm.guides.chains import Chains
from pyro_nmm.guides.checking import check_program
from pyro_nmm.guides.datatree import to_datatree
from pyro_nmm.guides.dependence import check_dependence
from pyro_nmm.guides.dglfrm import DGLFRMGuide, fit_links
from pyro_nmm.guides.field import FieldGuide, fit_mixture
from pyro_nmm.guides.fit_check import check_fit
from pyro_nmm.guides.gibbs import FieldGibbs
from pyro_nmm.guides.mixture import MarginalGuide, MixtureGuide, density
from pyro_nmm.guides.nested import nested_posterior
from pyro_nmm.guides.ordered import evidence_guide, ordered_guide
from pyro_nmm.models.random_fields import mean_field

__all__ = [
    "AmortizedNMM", "AutoNMM", "BestState", "Chains", "DGLFRMGuide", "FieldGibbs", "FieldGuide",
    "MarginalGuide", "MixtureGuide", "calibration_ranks", "check_dependence", "check_fit",
    "check_program", "density", "evidence_guide", "fit_links", "fit_mixture", "fit_nmm",
    "mean_field", "nested_posterior", "ordered_guide", "to_datatree",
]  # fmt: skip
