# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden fields: latent labels on a graph, observed through emissions."""

from pyro_nmm.models.latent.annotators import Annotators
from pyro_nmm.models.latent.copying import CopyingAnnotators
from pyro_nmm.models.latent.emissions import NormalEmission, PoissonEmission
from pyro_nmm.models.latent.field import (
    Emission,
    FieldPrior,
    HiddenField,
    Values,
    check_edge_attr,
    hidden_field,
)
from pyro_nmm.models.latent.fit import FieldRun, FieldSampling, fit_field, sample_field
from pyro_nmm.models.latent.leave_one_out import leave_one_out
from pyro_nmm.models.latent.mixture_em import mixture_em
from pyro_nmm.models.latent.quality import accuracy, information

__all__ = [
    "Annotators",
    "CopyingAnnotators",
    "Emission",
    "FieldPrior",
    "FieldRun",
    "FieldSampling",
    "HiddenField",
    "NormalEmission",
    "PoissonEmission",
    "Values",
    "accuracy",
    "check_edge_attr",
    "fit_field",
    "hidden_field",
    "information",
    "leave_one_out",
    "mixture_em",
    "sample_field",
]
