# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden fields: latent labels on a graph, observed through emissions."""

from pyro_nmm.models.latent.annotators import Annotators
from pyro_nmm.models.latent.consensus import Consensus
from pyro_nmm.models.latent.copying import CopyingAnnotators
from pyro_nmm.models.latent.dependence import Dependence, excess_agreement
from pyro_nmm.models.latent.emissions import (
    Emission,
    NormalEmission,
    PoissonEmission,
    Values,
    mixture_em,
)
from pyro_nmm.models.latent.field import (
    FieldPrior,
    HiddenField,
    check_edge_attr,
    hidden_field,
    without_relabel,
)
from pyro_nmm.models.latent.fit import fit_field, leave_one_out, sample_field
from pyro_nmm.models.latent.options import FieldRun, FieldSampling
from pyro_nmm.models.latent.quality import accuracy, information

__all__ = [
    "Annotators",
    "Consensus",
    "CopyingAnnotators",
    "Dependence",
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
    "excess_agreement",
    "fit_field",
    "hidden_field",
    "information",
    "leave_one_out",
    "mixture_em",
    "sample_field",
    "without_relabel",
]
