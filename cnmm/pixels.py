"""What the classifier of pixels and its loss spend most time on, by hand: few channels, many pixels.

On CPUs torch's own normalisation of a dozen channels and its cross-entropy of pixels take a third of a step. Here rows
of pixels lie several abreast where one is narrow; logits come plane by plane, as the loss reads them; and the loss and
its gradient are computed together, in pieces that stay in the cache.

Shapes: N images, M pixels of all images, C channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cnmm.rows import LANES, images, rows, scale_shift, wide

_PIECE = 2**14
"""Pixels whose loss is computed at once."""


class _Normalise(torch.autograd.Function):
    """Batch normalisation of images, several pixels abreast; mean and variance have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        packed = _abreast(x)
        unused = torch.zeros(2, packed.shape[1], dtype=wide(x), device=x.device)  # their type is the result's
        means, variances = torch.batch_norm_update_stats(packed, unused[0], unused[1], 0.0)
        mean = means.view(-1, x.shape[1]).mean(0)
        var = (variances + (means - mean.repeat(len(means) // len(mean))).square()).view(-1, x.shape[1]).mean(0)
        rstd = (var + eps).rsqrt()
        ctx.save_for_backward(x, mean, rstd, weight_C)
        ctx.mark_non_differentiable(mean, var)
        scale = weight_C * rstd
        return _scaled(packed, scale, bias_C - scale * mean, x.shape), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, rstd, weight_C = ctx.saved_tensors
        packed, packed_grad = _abreast(x), _abreast(grad)
        times = packed.shape[1] // x.shape[1]
        tiled = mean.repeat(times), rstd.repeat(times)
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            packed_grad, packed, tiled[1], None, None, *tiled, True, 0.0, [False, True, True]
        )
        grad_weight, grad_bias = (part.view(times, -1).sum(0) for part in (by_weight, by_bias))
        scale, count = weight_C * rstd, x.numel() // x.shape[1]
        slope = -scale * rstd * grad_weight / count
        shift = -scale * grad_bias / count - slope * mean
        grad_x = _scaled(packed_grad, scale, shift, x.shape)
        return grad_x.add_(_scaled(packed, slope, torch.zeros_like(slope), x.shape)), grad_weight, grad_bias, None


normalise = cast(Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]], _Normalise.apply)
"""[N, C, h, w] normalised by its own statistics, scaled and shifted; and its mean and variance, [C]."""


def is_narrow(x: Tensor) -> bool:
    """Are there so few channels, on a CPU, that `normalise` is faster than torch's own?"""
    return x.device.type == "cpu" and x.shape[1] < LANES and x.shape[3] % (LANES // math.gcd(x.shape[1], LANES)) == 0


def _abreast(x: Tensor) -> Tensor:
    """[N, C, h, w] as [N, times C, h, w / times], no copy if channels come last."""
    num, width = x.shape[0], x.shape[1]
    times = LANES // math.gcd(width, LANES)
    return images(rows(x).view(-1, times * width), (num, 0, x.shape[2], x.shape[3] // times))


def _scaled(packed: Tensor, scale_C: Tensor, shift_C: Tensor, shape: torch.Size) -> Tensor:
    """x * scale + shift, as images of a shape."""
    times = packed.shape[1] // len(scale_C)
    wide_rows = scale_shift(rows(packed), scale_C.repeat(times), shift_C.repeat(times), packed.shape)
    return images(wide_rows.view(-1, shape[1]), shape)


class _Planes(torch.autograd.Function):
    """A 1x1 convolution of images whose channels come last; those of the result come first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_KC: Tensor, bias_K: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_KC)
        num, _, height, width = x.shape
        pixels = rows(x).view(num, height * width, -1).transpose(1, 2)
        planes = torch.baddbmm(bias_K.view(1, -1, 1), weight_KC.expand(num, -1, -1), pixels)
        return planes.view(num, -1, height, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight_KC = ctx.saved_tensors
        grad_NKP = grad.flatten(2)
        grad_x = torch.bmm(grad_NKP.transpose(1, 2), weight_KC.expand(len(x), -1, -1))
        pixels = rows(x).view(len(x), grad_NKP.shape[2], -1)
        grad_weight, grad_bias = (
            torch.bmm(grad_NKP, part).sum(0, dtype=wide(x)).to(x.dtype)
            for part in (pixels, torch.ones_like(pixels[:, :, :1]))
        )
        return images(grad_x.view(-1, x.shape[1]), x.shape), grad_weight, grad_bias[:, 0]


planes = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _Planes.apply)
"""[N, C, h, w], channels last, weights [K, C] and biases [K] give [N, K, h, w], channels first."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        num, classes = logits.shape[:2]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        place_NP, weight_NP = target.flatten(1).long(), weight[target.flatten(1).long()]
        weight_NP = weight_NP / weight_NP.sum().clamp_min(1e-6)
        place_NP = place_NP.clamp_max(classes - 1)  # void has no weight
        loss = weight_NP.new_zeros(())
        for image in range(num):
            scores, found = logits[image].flatten(1), grad[image].flatten(1)
            for start in range(0, scores.shape[1], _PIECE):
                piece = slice(start, start + _PIECE)
                place, share = place_NP[image, None, piece], weight_NP[image, piece]
                z = scores[:, piece].to(weight.dtype, copy=True)
                z -= z.amax(0)
                own = z.gather(0, place)[0]
                sums = z.exp_().sum(0)
                loss += (share * (sums.log() - own)).sum()
                z *= share / sums
                found[:, piece] = z.scatter_add_(0, place, -share[None])
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None, None


cross_entropy = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _CrossEntropy.apply)
"""Mean over the pixels of -log p(target), by weights of targets, [256]; logits [N, K, h, w], targets [N, h, w].

A target that has no weight need not be a class.
"""
