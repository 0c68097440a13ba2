# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Networks in Pyro's parameter store."""

import warnings

import pyro
import torch
from torch import nn

from pyro_nmm.fitting import ordinary


def register(name: str, module: nn.Module) -> None:
    """``pyro.module``, and an error if the store has other parameters: they would learn instead."""
    if not torch.is_inference_mode_enabled():
        ordinary(module)  # it may have been made there
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was not registered in the param store")
        pyro.module(name, module)
    store = pyro.get_param_store()
    for key, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if store[f"{name}$$${key}"].data_ptr() != parameter.data_ptr():
            raise ValueError(
                f"Pyro's store already holds another network named {name!r}, or this one's state "
                f"from param_store.load: to go on from the state call pyro.module({name!r}, "
                f"network, update_module_params=True) first, and to train a second network give "
                f"each program its own name="
            )
