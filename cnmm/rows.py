"""Tensors of pixels as rows, one per pixel: views, sums over them, and activations, whose PReLU has a backward by hand.

On CPUs torch's own PReLU takes a third of a segmentation step, most of it in its backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LANES = 16
"""Numbers that a CPU handles at once."""
_LARGE = 1 << 20  # numbers in a tensor from which on a convolution is worth its preparation


def rows(x: Tensor) -> Tensor:
    """[N, C, h, w] in channels-last order as the matrix [M, C]; no copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def images(x_MC: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse of `rows`, for images of a shape [N, any, h, w]; no copy."""
    num, _, height, width = shape
    return x_MC.view(num, height, width, -1).permute(0, 3, 1, 2)


def wide(x: Tensor) -> torch.dtype:
    """The type for sums and probabilities: that of the tensor, but float32 for bfloat16."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def column_sums(x_MD: Tensor, groups: int = 1) -> Tensor:
    """Sums over the rows of each group, [G, D]: in two steps, which is faster than one and as exact.

    In bfloat16 the first step is a product with ones.
    """
    parts = groups * math.gcd(x_MD.shape[0] // groups, 64)
    x = x_MD.view(parts, -1, x_MD.shape[1])
    sums = torch.bmm(x.new_ones(parts, 1, x.shape[1]), x) if x.dtype == torch.bfloat16 else x.sum(1)
    return sums.view(groups, -1, x_MD.shape[1]).sum(1, dtype=wide(x_MD))


def scale_shift(x_MD: Tensor, scale_D: Tensor, shift_D: Tensor, shape: Sequence[int]) -> Tensor:
    """x * scale + shift; for large bfloat16 tensors a convolution of every column by itself, in half the time."""
    scale, shift = scale_D.to(x_MD.dtype), shift_D.to(x_MD.dtype)
    if x_MD.dtype == torch.bfloat16 and x_MD.device.type == "cpu" and x_MD.numel() >= _LARGE:
        return rows(F.conv2d(images(x_MD, shape), scale.view(-1, 1, 1, 1), shift, groups=len(scale)))
    return torch.addcmul(shift, x_MD, scale)


def activate(x: Tensor, slope_C: Tensor | None) -> Tensor:
    """ReLU of images [N, C, h, w], or PReLU when there are slopes."""
    if slope_C is None:
        return F.relu(
            x, inplace=not torch.Tensor._is_view(x)
        )  # what a function of our own returned as a view must stay as it is
    return _prelu(x, slope_C) if x.device.type == "cpu" else F.prelu(x, slope_C.to(x.dtype))


def activate_rows(x_MC: Tensor, slope_C: Tensor | None) -> Tensor:
    """The same of rows, without gradients."""
    if slope_C is None:
        return F.relu(x_MC, inplace=True)
    if x_MC.dtype == torch.bfloat16 and x_MC.device.type == "cpu" and bool((slope_C <= 1).all()):
        x, slope = _abreast(x_MC, slope_C)  # torch's own kernel is several times slower in this type
        return torch.maximum(x, x * slope).view(x_MC.shape)
    return F.prelu(x_MC, slope_C.to(x_MC.dtype))


def prelu_backward(grad_MC: Tensor, x_MC: Tensor, slope_C: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the slopes of a PReLU."""
    (x, slope), (grad, _) = _abreast(x_MC, slope_C), _abreast(grad_MC, slope_C)
    above = torch.ops.aten.threshold_backward(grad, x, 0)
    below = grad - above
    grad_slope = column_sums(below * x).view(-1, len(slope_C)).sum(0)
    return above.add_(below.mul_(slope)).view(x_MC.shape), grad_slope.to(slope_C.dtype)


def _abreast(x_MC: Tensor, values_C: Tensor) -> tuple[Tensor, Tensor]:
    """Several rows side by side where one is narrow, and values of the columns, in the type of the rows."""
    num, width = x_MC.shape
    times = math.gcd(num, LANES // math.gcd(width, LANES))
    return x_MC.view(num // times, times * width), values_C.to(x_MC.dtype).repeat(times)


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope_C: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope_C)
        return images(activate_rows(rows(x), slope_C), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope_C = ctx.saved_tensors
        grad_x, grad_slope = prelu_backward(rows(grad), rows(x), slope_C)
        return images(grad_x, x.shape), grad_slope


_prelu = cast(Callable[[Tensor, Tensor], Tensor], _PReLU.apply)
