# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Cost without a clock: the numbers that operations of PyTorch write."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Work(TorchDispatchMode):
    """``total`` numbers written, and those of the ``largest`` tensor; views count too."""

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            # What is expanded writes nothing.
            if isinstance(value, torch.Tensor) and 0 not in value.stride():
                self.total += value.numel()
                self.largest = max(self.largest, value.numel())
        return result
