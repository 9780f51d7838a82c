"""The operations of a classifier of pixels and its loss, against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from cnmm import pixels

TYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def channels_last(*shape, dtype):
    return torch.randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def compare(ours, theirs, dtype):
    """Values and gradients, relative to the largest."""
    exact = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.double(), b.double()
        assert (a - b).abs().max() <= exact * b.abs().max(), number


def with_gradients(function, *inputs, dtype):
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    torch.manual_seed(1)
    y = function(*leaves)
    y.backward(torch.randn(y.shape, dtype=dtype))
    return [y, *(leaf.grad for leaf in leaves)]


@TYPES
@pytest.mark.parametrize("channels", [12, 4, 11])
def test_normalisation_of_few_channels(dtype, channels):
    torch.manual_seed(0)
    small = torch.float64 if dtype == torch.float64 else torch.float32
    x = channels_last(2, channels, 6, 16, dtype=dtype) * 3 + 5
    weight, bias = torch.rand(channels, dtype=small) + 0.5, torch.randn(channels, dtype=small)
    assert pixels.is_narrow(x)
    assert not pixels.is_narrow(x[..., :7])
    assert not pixels.is_narrow(channels_last(2, 16, 6, 16, dtype=dtype))
    ours = with_gradients(lambda *args: pixels.normalise(*args, 1e-5)[0], x, weight, bias, dtype=dtype)
    theirs = with_gradients(
        lambda x, *args: F.batch_norm(x, None, None, *args, True), x.to(small), weight, bias, dtype=small
    )
    if dtype != torch.bfloat16:  # another type draws other gradients
        compare(ours, theirs, dtype)
    _, mean, var = pixels.normalise(x, weight, bias, 1e-5)
    values = x.to(small).transpose(0, 1).flatten(1)
    compare((mean, var, ours[0]), (values.mean(1), values.var(1, unbiased=False), theirs[0]), dtype)


@TYPES
def test_planes_are_a_convolution(dtype):
    torch.manual_seed(0)
    x, weight, bias = (
        channels_last(3, 12, 5, 7, dtype=dtype),
        torch.randn(4, 12, dtype=dtype),
        torch.randn(4, dtype=dtype),
    )
    ours = with_gradients(pixels.planes, x, weight, bias, dtype=dtype)
    theirs = with_gradients(lambda x, w, b: F.conv2d(x, w[:, :, None, None], b), x, weight, bias, dtype=dtype)
    compare(ours, theirs, dtype)
    assert ours[0].is_contiguous()


@TYPES
@pytest.mark.parametrize("strided", [False, True])
def test_cross_entropy_and_its_gradient(dtype, strided, monkeypatch):
    monkeypatch.setattr(pixels, "_PIECE", 50)
    torch.manual_seed(0)
    logits = 5 * torch.randn(2, 4, 18, 20, dtype=dtype)
    target = torch.randint(0, 4, (2, 18, 20)).to(torch.uint8)
    target[:, 3] = 255
    if strided:
        logits, target = logits[..., 1::2, ::2], target[:, 1::2, ::2]
    table = torch.zeros(256, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    table[:4] = torch.tensor([1.0, 2.0, 0.5, 3.0])
    before = logits.clone()
    ours, theirs = logits.clone().requires_grad_(), logits.to(table.dtype).requires_grad_()
    loss = pixels.cross_entropy(ours, target, table)
    expected = F.cross_entropy(theirs, target.long(), table[:4], ignore_index=255)
    (2 * loss).backward()
    (2 * expected).backward()
    compare((loss.detach(), ours.grad), (expected.detach(), theirs.grad), dtype)
    assert torch.equal(ours.detach(), before)
