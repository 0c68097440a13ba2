# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The simulated device itself, without which the tests of placement would show nothing."""

import pytest
import torch


def test_results_stay_there(device):
    x = torch.randn(3, device=device, requires_grad=True)
    found = (x * 2 + 1).exp().sum()
    found.backward()
    assert found.device.type == x.grad.device.type == device
    torch.testing.assert_close(x.grad.cpu(), 2 * (x * 2 + 1).exp().detach().cpu())
    assert torch.tensor([1, 2], device=device)[[1]].tolist() == [2]


def test_tensors_of_two_devices_do_not_meet(device):
    x = torch.zeros(3, device=device)
    assert (x + torch.tensor(1.0)).device.type == device  # a number may come from the CPU
    with pytest.raises(RuntimeError, match="cpu"):
        x + torch.zeros(3)
    with pytest.raises(RuntimeError, match="cpu"):
        torch.zeros(3, dtype=torch.bool, device=device) & torch.ones(3, dtype=torch.bool)
