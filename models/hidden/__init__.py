# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden fields: latent labels on a graph, observed through emissions."""

from pyro_nmm.models.hidden.em import FieldOptions, FieldRun, fit_field, leave_one_out
from pyro_nmm.models.hidden.emissions import Emission, NormalEmission, Values, mixture_em
from pyro_nmm.models.hidden.field import FieldPrior, HiddenField, hidden_field

__all__ = [
    "Emission", "FieldOptions", "FieldPrior", "FieldRun", "HiddenField", "NormalEmission", "Values",
    "fit_field", "hidden_field", "leave_one_out", "mixture_em",
]  # fmt: skip
