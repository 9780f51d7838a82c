"""Activations of pixels, against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from cnmm.rows import activate, activate_rows, column_sums


@pytest.mark.parametrize("channels", [12, 16, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steep", [False, True])
def test_prelu_and_its_gradients_are_torchs(channels, dtype, steep):
    torch.manual_seed(0)
    x = torch.randn(2, channels, 6, 10, dtype=dtype).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, channels, 6, 10, dtype=dtype)
    slope = torch.randn(channels, dtype=torch.float64 if dtype == torch.float64 else torch.float32).clamp_max(0.9)
    slope[1] = 1.7 if steep else 0.0
    found = []
    for function in (activate, lambda x, slope: F.prelu(x, slope.to(x.dtype))):
        a, b = x.clone().requires_grad_(), slope.clone().requires_grad_()
        y = function(a, b)
        y.backward(grad)
        found.append([y, a.grad, b.grad])
    for name, ours, theirs in zip(("value", "input", "slope"), *found, strict=True):
        tight = 1e-12 if dtype == torch.float64 else 0.02 * theirs.abs().max().item()
        assert torch.allclose(ours.double(), theirs.double(), atol=tight), name
    assert torch.equal(
        activate_rows(x.permute(0, 2, 3, 1).reshape(-1, channels), slope),
        found[0][0].permute(0, 2, 3, 1).reshape(-1, channels),
    )


def test_column_sums_of_groups():
    x = torch.randn(24, 5, dtype=torch.float64)
    assert torch.allclose(column_sums(x, 3), x.view(3, 8, 5).sum(1))
